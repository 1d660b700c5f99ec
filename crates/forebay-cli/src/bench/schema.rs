//! The one schema of every benchmark's result, and how it is written and drawn.

use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::plot::escape;

/// Rows that are drawn as bars, at most: hardly anything shows a higher picture.
const MOST_IN_BARS: usize = 100;

/// A benchmark's result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the benchmark.
    pub bench: String,
    /// Commit of the source, with "+" when the tree had changes; "unknown" outside a checkout.
    pub commit: String,
    /// Where it ran.
    pub machine: Machine,
    /// The measurements.
    pub rows: Vec<Row>,
    /// Plots beside the bars: names and SVG. Not part of the JSON, which has their figures.
    #[serde(skip)]
    pub plots: Vec<(String, String)>,
}

/// Description of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Processor.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Kernel release.
    pub kernel: String,
    /// Devices beside the CPU: kind, name, driver.
    pub devices: Vec<String>,
    /// What the machine's host took of its cores' time while the benchmark ran, percent; null where that is not known.
    #[serde(default)]
    pub stolen_percent: Option<f64>,
}

/// One measurement beside its peers, all of the same run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub case: String,
    /// Unit of `ours` and of the peers.
    pub unit: String,
    /// Forebay's figure; null when it was not measured.
    pub ours: Option<f64>,
    /// The others' figures; null for a peer that is absent here.
    pub peers: std::collections::BTreeMap<String, Option<f64>>,
    /// The ratio that the target is about.
    pub ratio: Option<f64>,
    /// The target, in words.
    pub target: String,
    /// Whether it was met; null when there is no target or no measurement.
    pub met: Option<bool>,
}

impl Row {
    /// A row without peers or target.
    pub fn new(case: impl Into<String>, unit: &str, ours: Option<f64>) -> Self {
        Row {
            case: case.into(),
            unit: unit.into(),
            ours,
            peers: Default::default(),
            ratio: None,
            target: String::new(),
            met: None,
        }
    }

    /// With a peer's figure.
    pub fn peer(mut self, name: &str, value: Option<f64>) -> Self {
        self.peers.insert(name.into(), value);
        self
    }

    /// With the ratio `ours / peer`, which is to be at most `limit`.
    pub fn at_most(mut self, peer: &str, limit: f64) -> Self {
        let theirs = self.peers.get(peer).copied().flatten();
        self.ratio = self.ours.zip(theirs).map(|(a, b)| a / b);
        self.target = format!("ours / {peer} ≤ {limit}");
        self.met = self.ratio.map(|r| r <= limit);
        self
    }

    /// With the ratio `ours / peer`, which is to be at least `limit`.
    pub fn at_least(mut self, peer: &str, limit: f64) -> Self {
        let theirs = self.peers.get(peer).copied().flatten();
        self.ratio = self.ours.zip(theirs).map(|(a, b)| a / b);
        self.target = format!("ours / {peer} ≥ {limit}");
        self.met = self.ratio.map(|r| r >= limit);
        self
    }

    /// With a target for the figure itself, which is to be at most this.
    pub fn below(mut self, limit: f64) -> Self {
        self.target = format!("≤ {limit} {}", self.unit);
        self.met = self.ours.map(|v| v <= limit);
        self
    }

    /// With a target for the figure itself, which is to be at least this.
    pub fn above(mut self, limit: f64) -> Self {
        self.target = format!("≥ {limit} {}", self.unit);
        self.met = self.ours.map(|v| v >= limit);
        self
    }

    /// With the ratio `peer / ours`, which is to be at least `limit`.
    pub fn faster_than(mut self, peer: &str, limit: f64) -> Self {
        let theirs = self.peers.get(peer).copied().flatten();
        self.ratio = self.ours.zip(theirs).map(|(a, b)| b / a);
        self.target = format!("{peer} / ours ≥ {limit}");
        self.met = self.ratio.map(|r| r >= limit);
        self
    }
}

fn command(program: &str, args: &[&str]) -> Option<String> {
    let out = std::process::Command::new(program).args(args).stderr(std::process::Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The commit of the source in the current folder, or of the bundle that this binary came in.
fn commit() -> String {
    if let Ok(c) = std::env::var("FOREBAY_COMMIT") {
        return c;
    }
    let Some(hash) = command("git", &["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let dirty = command("git", &["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results"])
        .is_some_and(|s| !s.is_empty());
    if dirty { hash + "+" } else { hash }
}

impl Machine {
    /// This machine.
    pub fn here() -> Self {
        let (devices, _) = forebay::hal::discover(&[forebay::Kind::Cpu, forebay::Kind::OpenCl, forebay::Kind::Cuda]);
        let cpu = &devices[0].info();
        let describe = |d: &forebay::hal::DeviceInfo| format!("{}: {} ({})", d.kind, d.name, d.driver);
        Machine {
            cpu: cpu.name.clone(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory_mib: cpu.memory_bytes >> 20,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            devices: devices[1..].iter().map(|d| describe(d.info())).collect(),
            stolen_percent: None,
        }
    }

    /// The folder of its results: a name that says what it is.
    pub fn folder(&self) -> String {
        let gpu = self.devices.iter().find(|d| d.starts_with("cuda")).and_then(|d| d.split(": ").nth(1));
        let name = gpu.and_then(|g| g.split(" (").next()).unwrap_or(&self.cpu);
        let name = name.to_lowercase();
        // What every processor's name has says nothing.
        let words = name.split(|c: char| !c.is_ascii_alphanumeric());
        let words: Vec<&str> = words.filter(|w| !["", "r", "tm", "processor", "cpu"].contains(w)).collect();
        format!("{}-{}c", words.join("-"), self.cores)
    }
}

impl Report {
    /// A report of this machine and commit.
    pub fn new(bench: &str, rows: Vec<Row>) -> Self {
        Report { bench: bench.into(), commit: commit(), machine: Machine::here(), rows, plots: Vec::new() }
    }

    /// The table as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let m = &self.machine;
        let _ = writeln!(out, "## {}\n", self.bench);
        let _ = writeln!(
            out,
            "Commit {} on {}, {} cores, {} MiB, Linux {}.",
            self.commit, m.cpu, m.cores, m.memory_mib, m.kernel
        );
        for d in &m.devices {
            let _ = writeln!(out, "{d}.");
        }
        if let Some(stolen) = m.stolen_percent {
            let _ = writeln!(out, "While it ran the machine's host took {stolen:.2} % of the cores' time.");
        }
        let mut peers: Vec<&String> = self.rows.iter().flat_map(|r| r.peers.keys()).collect();
        peers.sort();
        peers.dedup();
        let _ = write!(out, "\n| case | unit | ours |");
        peers.iter().for_each(|p| out.push_str(&format!(" {p} |")));
        out.push_str(" ratio | target | met |\n|---|---|---|");
        peers.iter().for_each(|_| out.push_str("---|"));
        out.push_str("---|---|---|\n");
        let show = |v: Option<f64>| v.map_or("–".to_owned(), number);
        for r in &self.rows {
            let _ = write!(out, "| {} | {} | {} |", r.case, r.unit, show(r.ours));
            for p in &peers {
                let _ = write!(out, " {} |", r.peers.get(*p).map_or(String::new(), |v| show(*v)));
            }
            let met = r.met.map_or("", |m| if m { "yes" } else { "**no**" });
            let _ = writeln!(out, " {} | {} | {met} |", show(r.ratio), r.target);
        }
        out
    }

    /// What the bar chart shows, and its title: of more rows than anybody looks at, those whose target is not met.
    fn in_bars(&self) -> (Vec<&Row>, String) {
        let (all, here) = (self.rows.len(), self.machine.folder());
        if all <= MOST_IN_BARS {
            return (self.rows.iter().collect(), format!("{} – {here}", self.bench));
        }
        let mut missed: Vec<&Row> = self.rows.iter().filter(|r| r.met == Some(false)).collect();
        let of = missed.len();
        missed.truncate(MOST_IN_BARS);
        let title = format!("{} – {here}: {} of {of} rows whose target is not met, of {all}", self.bench, missed.len());
        (missed, title)
    }

    /// A bar chart: ours and the peers, each case scaled to its largest.
    pub fn svg(&self) -> String {
        const COLOURS: [&str; 6] = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b"];
        let mut peers: Vec<&String> = self.rows.iter().flat_map(|r| r.peers.keys()).collect();
        peers.sort();
        peers.dedup();
        let mut y = 40.0;
        let mut body = String::new();
        let (rows, title) = self.in_bars();
        for r in rows {
            let values: Vec<(String, usize, f64)> = std::iter::once(("ours".to_owned(), 0, r.ours))
                .chain(peers.iter().enumerate().map(|(i, p)| ((*p).clone(), i + 1, r.peers.get(*p).copied().flatten())))
                .filter_map(|(n, i, v)| v.map(|v| (n, i, v)))
                .collect();
            let max = values.iter().map(|v| v.2).fold(0.0, f64::max);
            let _ = writeln!(
                body,
                "<text x='10' y='{}' font-weight='bold'>{} ({})</text>",
                y + 11.0,
                escape(&r.case),
                escape(&r.unit)
            );
            y += 16.0;
            for (name, i, v) in values {
                let w = if max > 0.0 { v / max * 460.0 } else { 0.0 };
                let _ = writeln!(body, "<text x='150' y='{}' text-anchor='end'>{}</text>", y + 11.0, escape(&name));
                let _ = writeln!(
                    body,
                    "<rect x='156' y='{y}' width='{w:.1}' height='13' fill='{}'/>",
                    COLOURS[i % COLOURS.len()]
                );
                let _ = writeln!(body, "<text x='{:.1}' y='{}'>{}</text>", 162.0 + w, y + 11.0, number(v));
                y += 16.0;
            }
            y += 8.0;
        }
        let title = escape(&title);
        format!(
            "<svg xmlns='http://www.w3.org/2000/svg' width='720' height='{}' font-family='sans-serif' font-size='12'>\n\
             <rect width='100%' height='100%' fill='white'/>\n<text x='10' y='22' font-size='15'>{title}</text>\n{body}</svg>\n",
            y + 10.0
        )
    }

    /// Writes `<bench>.json`, `.md` and `.svg` into `dir`.
    pub fn write(&self, dir: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let at = |ext: &str| dir.join(format!("{}.{ext}", self.bench));
        std::fs::write(at("json"), serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(at("md"), self.markdown())?;
        for (name, svg) in &self.plots {
            std::fs::write(dir.join(format!("{name}.svg")), svg)?;
        }
        std::fs::write(at("svg"), self.svg())
    }
}

/// A figure with three significant digits or so.
fn number(v: f64) -> String {
    match v.abs() {
        0.0 => "0".into(),
        a if a >= 1000.0 => format!("{v:.0}"),
        a if a >= 100.0 => format!("{v:.1}"),
        a if a >= 1.0 => format!("{v:.2}"),
        _ => format!("{v:.3}"),
    }
}

/// The median.
pub fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    if v.is_empty() { f64::NAN } else { v[v.len() / 2] }
}

/// The value below which `q` (0 to 1) of the sorted values lie.
pub fn quantile(mut v: Vec<f64>, q: f64) -> f64 {
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::NAN,
        n => v[((n - 1) as f64 * q).round() as usize],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_rows_those_whose_target_is_missed_are_drawn() {
        let row = |i: usize, limit: f64| Row::new(format!("case {i}."), "µs", Some(1.0)).below(limit);
        let drawn = |rows| Report::new("trial", rows).svg().matches("font-weight='bold'").count();
        assert_eq!(drawn((0..MOST_IN_BARS).map(|i| row(i, 2.0)).collect()), MOST_IN_BARS);
        let some: Vec<Row> = (0..300).map(|i| row(i, if i % 30 == 7 { 0.5 } else { 2.0 })).collect();
        assert_eq!(drawn(some), 10);
        let svg = Report::new("trial", (0..300).map(|i| row(i, 0.5)).collect()).svg();
        assert_eq!(svg.matches("font-weight='bold'").count(), MOST_IN_BARS);
        assert!(svg.contains("100 of 300 rows whose target is not met, of 300"), "{svg}");
    }
}
