//! Two unmodified PyTorch programs on one GPU: inference every few milliseconds beside training that takes everything. By turns
//! as the driver gives them, sliced by the service, under plain MPS, and as a co-run group of the service.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

use super::Row;
use super::gpu::stage;
use crate::bench::peers::source;
use crate::sharing::{Stage, quantile};

const SETTLED: Duration = Duration::from_secs(4);
const MEASURED: Duration = Duration::from_secs(15);

/// An MPS daemon of this benchmark's own, as its manual has one started.
struct Mps {
    dir: TempDir,
}

impl Mps {
    fn control(dir: &Path) -> Command {
        let mut c = Command::new("nvidia-cuda-mps-control");
        c.env("CUDA_MPS_PIPE_DIRECTORY", dir).env("CUDA_MPS_LOG_DIRECTORY", dir);
        c
    }

    fn start() -> Result<Self, String> {
        let dir = tempfile::Builder::new().prefix("forebay-mps-").tempdir().map_err(|e| e.to_string())?;
        let mps = Mps { dir };
        let started =
            Self::control(mps.dir.path()).arg("-d").status().map_err(|e| format!("nvidia-cuda-mps-control: {e}"))?;
        if started.success() { Ok(mps) } else { Err(format!("nvidia-cuda-mps-control -d: {started}")) }
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        use std::io::Write as _;
        if let Ok(mut c) = Self::control(self.dir.path()).stdin(Stdio::piped()).stdout(Stdio::null()).spawn() {
            let _ = c.stdin.take().map(|mut i| i.write_all(b"quit\n"));
            let _ = c.wait();
        }
    }
}

/// Arguments of `forebay run` for each of the two, variables, and whether the second is there.
#[derive(Clone, Copy, Default)]
struct Way<'a> {
    inference: &'a [&'a str],
    training: &'a [&'a str],
    variables: &'a [(&'a str, &'a str)],
    alone: bool,
}

/// Times of requests, ms: median and p99; training steps a second.
type Got = [f64; 3];

fn run(stage: &Stage, way: Way<'_>) -> Result<Got, String> {
    let script = |name: &str| -> Result<String, String> { Ok(source(name)?.display().to_string()) };
    let (inference, training) = (script("torch_inference.py")?, script("torch_training.py")?);
    let start = |file: &str, class| stage.run(&["python3", file], class, way.variables);
    let training = (!way.alone).then(|| start(&training, way.training)).transpose()?;
    let inference = start(&inference, way.inference)?;
    let all: Vec<_> = std::iter::once(&inference).chain(&training).collect();
    stage.watch(&all, SETTLED, |_| {});
    let s = stage.watch(&all, MEASURED, |_| {});
    let times = &s[0].latencies_ms;
    Ok([quantile(times, 0.5), quantile(times, 0.99), s.get(1).map_or(0.0, |t| t.rate)])
}

fn has_torch() -> Result<(), String> {
    let program = "import torch; assert torch.cuda.is_available(), 'it finds no GPU'";
    let out = Command::new("python3").args(["-c", program]).output().map_err(|e| format!("python3: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if out.status.success() { Ok(()) } else { Err(said.lines().last().unwrap_or("it fails").to_owned()) }
}

/// All of it, where there is PyTorch.
pub fn run_all(rows: &mut Vec<Row>) -> Result<(), String> {
    if let Err(why) = has_torch() {
        eprintln!("sharing: without PyTorch: {why}");
        return Ok(());
    }
    eprintln!("sharing: PyTorch, sliced");
    let nobody = stage(false)?;
    let alone = run(&nobody, Way { alone: true, ..Way::default() })?;
    let default = run(&nobody, Way::default())?;
    let way = Way { inference: &["--class", "interactive"], training: &["--class", "background"], ..Way::default() };
    let sliced = run(&stage(true)?, way)?;
    let case = |what: &str| format!("cuda, PyTorch inference beside training, {what}");
    let row = |what: &str, unit, i: usize, ours: Got| Row::new(case(what), unit, Some(ours[i]));
    let of = |row: Row, i: usize| row.peer("default", Some(default[i])).peer("alone", Some(alone[i]));
    rows.push(of(row("sliced: median", "ms", 0, sliced), 0));
    rows.push(of(row("sliced: p99", "ms", 1, sliced), 1).at_most("alone", 1.2));
    let trained = row("sliced: training", "steps/s", 2, sliced).peer("default", Some(default[2]));
    rows.push(trained.at_least("default", 0.88));

    eprintln!("sharing: PyTorch, co-running");
    let mps = match Mps::start() {
        Ok(mps) => mps,
        Err(why) => {
            eprintln!("sharing: without co-running: {why}");
            return Ok(());
        }
    };
    let dir = mps.dir.path().display().to_string();
    let variables = [("CUDA_MPS_PIPE_DIRECTORY", dir.as_str())];
    let plain = run(&nobody, Way { variables: &variables, ..Way::default() })?;
    drop(mps);
    let group = ["--co-run", "bench"];
    let behind = [&group[..], &["--behind", "--sm-percent", "80"]].concat();
    let ours = run(&stage(true)?, Way { inference: &group, training: &behind, ..Way::default() })?;
    let with_mps = |row: Row, i: usize| of(row, i).peer("plain MPS", Some(plain[i]));
    rows.push(with_mps(row("co-running: median", "ms", 0, ours), 0));
    rows.push(with_mps(row("co-running: p99", "ms", 1, ours), 1).at_most("alone", 1.05));
    let trained = row("co-running: training", "steps/s", 2, ours).peer("default", Some(default[2]));
    rows.push(trained.peer("plain MPS", Some(plain[2])).at_least("plain MPS", 0.98));
    Ok(())
}
