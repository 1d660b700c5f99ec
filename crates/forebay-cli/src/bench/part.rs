//! A benchmark's parts. Each runs in a process of its own, one after the other: one that fails, loses its GPU or never ends costs
//! what it would have found and nothing else, and what the others found is written down before the next one begins.

use std::io::Read as _;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay::hal::Device;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use super::schema::{Report, Row};
use super::stolen::Ticks;

/// How long a part may take, if nothing else is said of it.
const LIMIT: Duration = Duration::from_secs(40 * 60);
/// Between two looks at a part that runs.
const LOOK: Duration = Duration::from_millis(20);
/// What a part has said is there when it has ended. One that it has left behind may hold its output open, and is not waited for
/// longer.
const REST: Duration = Duration::from_secs(1);
/// Most bytes of what a part says that are read: a hundred times what the largest one has.
const MAX_SAID: u64 = 64 << 20;

/// What a part found, and what stopped it if it did not come to its end.
#[derive(Default, Serialize, Deserialize)]
pub struct Found {
    /// Measurements.
    pub rows: Vec<Row>,
    /// Names and SVG of plots beside the report's own.
    pub plots: Vec<(String, String)>,
    failure: Option<String>,
}

/// How a part is measured.
type Run = dyn FnOnce(&mut Found) -> Result<(), String>;

/// One part.
pub struct Part {
    name: String,
    limit: Duration,
    run: Box<Run>,
}

impl Part {
    /// A part that is measured by `run`. Its name is its own among those of the benchmark.
    pub fn new(name: impl Into<String>, run: impl FnOnce(&mut Found) -> Result<(), String> + 'static) -> Self {
        Part { name: name.into(), limit: LIMIT, run: Box::new(run) }
    }

    /// The same of one that has rows only.
    pub fn of_rows<E: ToString>(
        name: impl Into<String>,
        run: impl FnOnce(&mut Vec<Row>) -> Result<(), E> + 'static,
    ) -> Self {
        Self::new(name, move |found| run(&mut found.rows).map_err(|e| e.to_string()))
    }

    /// It is taken to hang after so long.
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// The kinds of device that are here, of `wanted`, or of these `only` one.
///
/// # Errors
/// Why the only one is not here.
pub fn kinds(wanted: &[Kind], only: Option<Kind>) -> Result<Vec<Kind>, String> {
    if let Some(kind) = only.filter(|k| !wanted.contains(k)) {
        let names: Vec<&str> = wanted.iter().map(|k| k.name()).collect();
        return Err(format!("it is measured on {}, not on {kind}", names.join(", ")));
    }
    // Each by itself: a GPU that has several interfaces is measured through each of them.
    let each = only.map_or(wanted.to_vec(), |k| vec![k]).into_iter().map(|k| (k, forebay::hal::discover(&[k])));
    let (mut here, mut missing) = (Vec::new(), Vec::new());
    for (kind, (devices, why)) in each {
        let useless = devices.first().and_then(|d| d.compiles().err());
        here.extend((!devices.is_empty() && useless.is_none()).then_some(kind));
        missing.extend(why.into_iter().chain(useless.map(|why| (kind, why))));
    }
    match missing.first() {
        Some((_, why)) if here.is_empty() => Err(why.to_string()),
        _ => {
            missing.iter().for_each(|(kind, why)| eprintln!("no {kind}: {why}"));
            Ok(here)
        }
    }
}

/// The first device of a kind.
///
/// # Errors
/// Why there is none.
pub fn first(kind: Kind) -> Result<Arc<dyn Device>, String> {
    let (devices, missing) = forebay::hal::discover(&[kind]);
    let none = || missing.first().map_or(format!("there is no {kind} device"), |(_, why)| why.to_string());
    devices.into_iter().next().ok_or_else(none)
}

/// The part that is about the first device of a kind.
pub fn on_first<E: ToString>(
    kind: Kind,
    run: impl FnOnce(&Arc<dyn Device>, &mut Vec<Row>) -> Result<(), E> + 'static,
) -> Part {
    Part::of_rows(kind.name(), move |rows| run(&first(kind)?, rows).map_err(|e| e.to_string()))
}

/// Runs the part of this name in this process, and says what it found for whoever started it.
///
/// # Errors
/// There is no such part.
pub fn here(parts: Vec<Part>, name: &str) -> Result<(), String> {
    // Whoever started it may be killed; nobody would read what this one finds.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let names: Vec<String> = parts.iter().map(|p| p.name.clone()).collect();
    let part = parts.into_iter().find(|p| p.name == name);
    let part = part.ok_or_else(|| format!("there is no part {name:?}; there are: {}", names.join(", ")))?;
    let mut found = Found::default();
    if let Err(why) = (part.run)(&mut found) {
        found.failure = Some(why);
    }
    crate::say(&serde_json::to_string(&found).map_err(|e| e.to_string())?);
    Ok(())
}

/// Runs all parts of a benchmark, each in a process of its own. `after` is called behind each one with what there is so far.
/// Gives the names of those that did not come to their end; the report has a row for each that says why.
///
/// # Errors
/// What `after` said.
pub fn all(
    parts: Vec<Part>,
    report: &mut Report,
    mut after: impl FnMut(&Report) -> Result<(), String>,
) -> Result<Vec<String>, String> {
    let (n, mut failed, begun) = (parts.len(), Vec::new(), Ticks::now());
    for (i, part) in parts.into_iter().enumerate() {
        eprintln!("{}: {} ({} of {n})", report.bench, part.name, i + 1);
        let found = apart(&part).unwrap_or_else(|why| Found { failure: Some(why), ..Found::default() });
        report.rows.extend(found.rows);
        report.plots.extend(found.plots);
        if let Some(why) = found.failure {
            eprintln!("{}: {}: {why}", report.bench, part.name);
            let first = why.lines().next().unwrap_or_default();
            report.rows.push(Row {
                target: "comes to its end".into(),
                met: Some(false),
                ..Row::new(format!("{}: {first}", part.name), "", None)
            });
            failed.push(part.name);
        }
        report.machine.stolen_percent = begun.zip(Ticks::now()).and_then(|(begun, now)| begun.stolen_until(now));
        after(report)?;
    }
    Ok(failed)
}

/// This command once more, for one part. What that has started itself does not outlive it for long: services and programs of a
/// [`crate::sharing::Stage`] end with it, others when nobody reads what they say.
fn apart(part: &Part) -> Result<Found, String> {
    let text = |e: std::io::Error| e.to_string();
    let mut again = Command::new(std::env::current_exe().map_err(text)?);
    again.args(arguments(std::env::args().skip(1))).args(["--part", &part.name]);
    let mut child = again.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(text)?;
    let (said, all) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    if let Some(out) = child.stdout.take() {
        let (said, all) = (said.clone(), all.clone());
        std::thread::spawn(move || {
            let (mut out, mut some) = (out.take(MAX_SAID), [0; 4096]);
            while let Ok(n @ 1..) = out.read(&mut some) {
                said.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&some[..n]);
            }
            all.store(true, Ordering::Release);
        });
    }
    let begun = Instant::now();
    let mut ended = None;
    while ended.is_none() && begun.elapsed() < part.limit {
        ended = child.try_wait().map_err(text)?;
        std::thread::sleep(LOOK);
    }
    let Some(status) = ended else {
        // One that the kernel holds, waiting for a device, does not even end by this: it is left to itself.
        let _ = child.kill();
        std::thread::sleep(LOOK);
        let _ = child.try_wait();
        return Err(format!("it had not ended after {} s", part.limit.as_secs_f64()));
    };
    let ended = Instant::now();
    while !all.load(Ordering::Acquire) && ended.elapsed() < REST {
        std::thread::sleep(LOOK);
    }
    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
    understood(status, &said)
}

fn understood(status: ExitStatus, said: &[u8]) -> Result<Found, String> {
    if !status.success() {
        return Err(format!("it ended with {status}"));
    }
    serde_json::from_slice(said).map_err(|e| format!("what it said is no result: {e}"))
}

/// The arguments for a part: those of the whole, but for where its results go.
fn arguments(given: impl Iterator<Item = String>) -> Vec<String> {
    let mut out = Vec::new();
    let mut given = given.peekable();
    while let Some(a) = given.next() {
        match a.as_str() {
            "--json" => {}
            "--out" => drop(given.next()),
            a if a.starts_with("--out=") => {}
            _ => out.push(a),
        }
    }
    out
}

/// Parts with which nothing goes well, for a test.
pub fn trial() -> Vec<Part> {
    let row = |name: &str| Row::new(name, "", Some(1.0));
    let good = move |name: &'static str| {
        Part::of_rows(name, move |rows| {
            rows.push(row(name));
            Ok::<_, String>(())
        })
    };
    let fails = Part::of_rows("fails", move |rows| {
        rows.push(row("before it failed"));
        Err("of its own accord\nand more about that")
    });
    let dies = Part::of_rows("dies", |_| -> Result<(), String> {
        // Somebody is left behind who has its output.
        let _left = Command::new("sleep").arg("60").stderr(Stdio::null()).spawn();
        std::process::abort()
    });
    let hangs = Part::of_rows("hangs", |_| -> Result<(), String> {
        loop {
            std::thread::park();
        }
    });
    vec![good("first"), fails, dies, hangs.within(Duration::from_millis(500)), good("last")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_arguments_of_the_whole_but_for_where_results_go() {
        let given = ["bench", "transfer", "--json", "--device", "cpu", "--out", "here", "--out=there", "--quick"];
        let out = arguments(given.map(str::to_owned).into_iter());
        assert_eq!(out, ["bench", "transfer", "--device", "cpu", "--quick"]);
    }

    #[test]
    fn a_kind_that_is_not_measured_or_not_here_is_an_error_that_says_so() {
        let why = kinds(&[Kind::OpenCl, Kind::Cuda], Some(Kind::Cpu)).unwrap_err();
        assert_eq!(why, "it is measured on opencl, cuda, not on cpu");
        assert_eq!(kinds(&[Kind::Cpu], None).unwrap(), [Kind::Cpu]);
    }
}
