//! `forebay trace`: who had which device when, as a timeline.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::{Recording, TRACE_VARIABLE};
use forebay_proto::client::Connection;
use forebay_rm::fake::remote::RemoteRm;
use forebay_rm::holds::{Hold, Holds, KERNEL_PID};
use forebay_rm::{Client, Host, Rm, SwitchLog};
use rustix::process::{Pid, Signal};
use rustix::time::{ClockId, clock_gettime};

use crate::perfetto::{Slice, Timeline, Track};

/// Between two looks.
const STEP: Duration = Duration::from_millis(25);
/// Most stays on a GPU that are kept.
const MAX_HOLDS: usize = 4 << 20;
/// Longest recording of a program that is read, bytes.
const MAX_RECORDING: u64 = 1 << 30;

/// Options of `forebay trace`.
#[derive(clap::Args)]
#[command(after_help = "What there is to see:
  NVIDIA GPUs   who was on the GPU from when to when, of all processes, from the GPU's log of context switches (as root)
  the service   share and use of every process on every device that the service divides, 40 times a second
  a program     started with `-- COMMAND`: each invocation of its tasks, and each copy, if it uses Forebay's library
                and is not ended by a signal

Examples:
  sudo forebay trace --seconds 5 gpu.pftrace
  forebay trace --seconds 10 all.pftrace -- ./render --frames 100
Open the file in ui.perfetto.dev.")]
pub struct Options {
    /// For how long; with a command until that ends, if it does so sooner
    #[arg(long, short, default_value_t = 5.0, value_parser = seconds)]
    seconds: f64,
    /// The file to write
    file: PathBuf,
    /// Where a fake of the driver answers: for tests
    #[arg(long, hide = true)]
    fake_rm: Option<PathBuf>,
    /// A program to start and record
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let n: f64 = text.parse().map_err(|_| "say a number of seconds".to_owned())?;
    if n > 0.0 && n <= 3600.0 { Ok(n) } else { Err("more than 0 and at most 3600 seconds".into()) }
}

fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Two clocks read together at two moments: what one says when the other says something.
#[derive(Clone, Copy, Debug)]
struct Clocks {
    first: (u64, u64),
    last: (u64, u64),
}

impl Clocks {
    /// The moment on our clock at which the other one says `at`.
    fn ours(&self, at: u64) -> u64 {
        let ((t0, u0), (t1, u1)) = (self.first, self.last);
        let (theirs, ours) = (t1.saturating_sub(t0), u1.saturating_sub(u0));
        let rate = if theirs > 1_000_000 { ours as f64 / theirs as f64 } else { 1.0 };
        let since = at as f64 - t0 as f64;
        (u0 as f64 + since * rate).max(0.0) as u64
    }
}

/// A GPU's log, read as it comes.
struct Gpu {
    number: u32,
    log: SwitchLog,
    holds: Holds,
    done: Vec<Hold>,
    clocks: Clocks,
    lost: u64,
}

impl Gpu {
    fn open(rm: Arc<dyn Rm>, number: u32) -> Result<Self, forebay_rm::Error> {
        let log = SwitchLog::open(&Arc::new(Client::open(rm, number)?))?;
        let both = (log.now_ns()?, now_ns());
        let clocks = Clocks { first: both, last: both };
        Ok(Gpu { number, log, holds: Holds::new(both.0), done: Vec::new(), clocks, lost: 0 })
    }

    fn read(&mut self) -> Result<(), forebay_rm::Error> {
        let mut records = Vec::new();
        self.lost += self.log.read(&mut records)?;
        for h in records.iter().filter_map(|r| self.holds.feed(r)) {
            if self.done.len() < MAX_HOLDS {
                self.done.push(h);
            } else {
                self.lost += 1;
            }
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), forebay_rm::Error> {
        // What it would not show at once comes by itself within a thirtieth of a second.
        if self.log.flush().is_err() {
            std::thread::sleep(2 * STEP);
        }
        self.read()?;
        self.clocks.last = (self.log.now_ns()?, now_ns());
        self.done.extend(self.holds.open(self.clocks.last.0));
        self.lost += self.holds.missing;
        Ok(())
    }

    /// `here`: processes have the log's numbers here.
    fn draw(&self, t: &mut Timeline, here: bool) {
        let gpu = t.track(format!("GPU {} (context switches)", self.number), None);
        let mut processes: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
        for h in &self.done {
            processes.entry(h.pid).or_default().push(h);
        }
        for (pid, holds) in processes {
            let name = process_name(pid, here);
            let slice = |h: &Hold| Slice {
                name: name.clone(),
                begin_ns: self.clocks.ours(h.from_ns),
                end_ns: self.clocks.ours(h.to_ns),
            };
            t.slices(&format!("{name} ({pid})"), Some(gpu), holds.into_iter().map(slice));
        }
    }
}

fn process_name(pid: u32, here: bool) -> String {
    match pid {
        KERNEL_PID => "the kernel".into(),
        0 => "not shown".into(),
        // Whoever has that number in this container is somebody else.
        _ if !here => "numbered by the machine".into(),
        _ => std::fs::read_to_string(format!("/proc/{pid}/comm")).map_or("has ended".into(), |n| n.trim().into()),
    }
}

/// Share and use of a process on a device, in percent, over time.
type Curve = Vec<(u64, f64, f64)>;

/// What the service says.
#[derive(Default)]
struct Service(BTreeMap<(String, u32, String), Curve>);

impl Service {
    fn read(&mut self, c: &Connection) -> Result<(), String> {
        let at = now_ns();
        for p in c.processes().map_err(|e| e.to_string())? {
            let percent = |millionths: u64| millionths as f64 / 1e4;
            let curve = self.0.entry((p.device, p.pid, p.name)).or_default();
            curve.push((at, percent(p.share), percent(p.used)));
        }
        Ok(())
    }

    fn draw(&self, t: &mut Timeline) {
        let mut devices: BTreeMap<&str, Track> = BTreeMap::new();
        for ((device, pid, name), curve) in &self.0 {
            let parent = *devices.entry(device).or_insert_with(|| t.track(format!("{device} (the service)"), None));
            let used = t.counter(format!("{name} ({pid}) used"), "%", Some(parent));
            let share = t.counter(format!("{name} ({pid}) share"), "%", Some(parent));
            for &(at, s, u) in curve {
                t.value(share, at, s);
                t.value(used, at, u);
            }
        }
    }
}

/// Draws what programs have left in `folder`; how many recordings, and how much did not fit in them.
fn draw_programs(folder: &Path, t: &mut Timeline) -> Result<(usize, u64), String> {
    let (mut n, mut dropped) = (0, 0);
    let files = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for path in files.filter_map(|f| Some(f.ok()?.path())) {
        let read = || -> std::io::Result<Recording> {
            if std::fs::metadata(&path)?.len() > MAX_RECORDING {
                return Err(std::io::Error::other("it is too long"));
            }
            Ok(serde_json::from_slice(&std::fs::read(&path)?)?)
        };
        match read() {
            Ok(r) => {
                let graph = t.track(format!("graph {:?} of process {}", r.graph, r.pid), None);
                t.graph(Some(graph), r.epoch_ns, (&r.tasks, &r.devices), (&r.spans, &r.copies));
                (n, dropped) = (n + 1, dropped + r.dropped);
            }
            Err(e) => eprintln!("a recording is damaged and left out: {e}"),
        }
    }
    Ok((n, dropped))
}

/// Opens the logs of all GPUs; what stands against it is said.
fn open_gpus(o: &Options) -> Vec<Gpu> {
    let rm: Arc<dyn Rm> = match &o.fake_rm {
        Some(path) => match RemoteRm::connect(path) {
            Ok(rm) => Arc::new(rm),
            Err(_) => return Vec::new(),
        },
        None => Arc::new(Host),
    };
    let Ok(cards) = rm.cards() else { return Vec::new() };
    let open = |number| match Gpu::open(rm.clone(), number) {
        Ok(gpu) => Some(gpu),
        Err(e) => {
            eprintln!("GPU {number} has no log of context switches: {e}");
            None
        }
    };
    cards.iter().filter_map(|c| open(c.minor)).collect()
}

/// Waits for a program's end, and tells it when we are told to end.
fn end_of(child: &mut Child, terminated: &AtomicBool) -> Option<ExitStatus> {
    loop {
        if let ended @ (Ok(Some(_)) | Err(_)) = child.try_wait() {
            return ended.ok().flatten();
        }
        if terminated.swap(false, Ordering::Relaxed) {
            // It may have ended meanwhile, but its number is its own until it was waited for.
            let _ = rustix::process::kill_process(Pid::from_child(child), Signal::TERM);
        }
        std::thread::sleep(STEP);
    }
}

/// Records and writes the file.
pub fn run(o: &Options) -> Result<(), String> {
    let mut gpus = open_gpus(o);
    let connection = Connection::open("forebay").ok();
    let program = o.command.split_first();
    if gpus.is_empty() && connection.is_none() && program.is_none() {
        return Err("there is nothing to record: no NVIDIA GPU whose log could be read (that takes root), no service \
                    (`forebay service`), and no program (`-- COMMAND`)"
            .into());
    }
    // A file that cannot be written is noticed before the time has passed.
    std::fs::write(&o.file, []).map_err(|e| format!("{}: {e}", o.file.display()))?;
    // Ctrl-C goes to the program, too, without us; what tells us to end is passed on.
    let (stop, terminated) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (int, term) = (signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM);
    for (signal, flag) in [(int, &stop), (term, &stop), (term, &terminated)] {
        signal_hook::flag::register(signal, flag.clone()).map_err(|e| format!("signal {signal}: {e}"))?;
    }
    // Nobody else's, and gone when dropped.
    let folder = tempfile::Builder::new().prefix("forebay-trace-").tempdir();
    let folder = folder.map_err(|e| format!("a folder for recordings: {e}"))?;
    let mut child = match program {
        Some((name, arguments)) => {
            let mut c = std::process::Command::new(name);
            c.args(arguments).env(TRACE_VARIABLE, folder.path());
            Some(c.spawn().map_err(|e| format!("{}: {e}", name.to_string_lossy()))?)
        }
        None => None,
    };
    let (begun, mut service) = (Instant::now(), Service::default());
    let mut exited = None;
    while begun.elapsed().as_secs_f64() < o.seconds && !stop.load(Ordering::Relaxed) && exited.is_none() {
        std::thread::sleep(STEP.min(Duration::from_secs_f64(o.seconds)));
        for g in &mut gpus {
            g.read().map_err(|e| format!("GPU {}: {e}", g.number))?;
        }
        if let Some(c) = &connection {
            // One that goes in the meantime has said what it has said.
            let _ = service.read(c);
        }
        exited = child.as_mut().and_then(|c| c.try_wait().ok().flatten());
    }
    for g in &mut gpus {
        g.end().map_err(|e| format!("GPU {}: {e}", g.number))?;
    }
    if let Some(c) = child.as_mut().filter(|_| exited.is_none()) {
        eprintln!("{:.1} s are over; waiting for the program to end …", begun.elapsed().as_secs_f64());
        exited = end_of(c, &terminated);
    }
    let mut t = Timeline::default();
    let here = o.fake_rm.is_some() || forebayd::system::has_the_machines_numbers();
    gpus.iter().for_each(|g| g.draw(&mut t, here));
    service.draw(&mut t);
    let (recordings, mut dropped) = draw_programs(folder.path(), &mut t)?;
    std::fs::write(&o.file, t.encode()).map_err(|e| format!("{}: {e}", o.file.display()))?;
    let switches: usize = gpus.iter().map(|g| g.done.len()).sum();
    dropped += gpus.iter().map(|g| g.lost).sum::<u64>();
    eprintln!(
        "{switches} stays on {} GPU{}, {} processes of the service, {recordings} graphs in {} ({dropped} did not fit); \
         open it in ui.perfetto.dev",
        gpus.len(),
        if gpus.len() == 1 { "" } else { "s" },
        service.0.len(),
        o.file.display()
    );
    match exited {
        Some(status) if !status.success() => Err(format!("the program ended with {status}")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_the_machines_has_no_name_in_a_container() {
        let own = std::process::id();
        assert_ne!(process_name(own, true), process_name(own, false));
        assert_eq!(
            [process_name(own, false), process_name(KERNEL_PID, false)],
            ["numbered by the machine", "the kernel"]
        );
    }

    #[test]
    fn one_clock_is_read_off_the_other() {
        // The other one runs a thousandth fast and began at another time.
        let c = Clocks { first: (5_000_000_000, 70_000_000_000), last: (15_010_000_000, 80_000_000_000) };
        assert_eq!(c.ours(5_000_000_000), 70_000_000_000);
        assert!(c.ours(10_005_000_000).abs_diff(75_000_000_000) < 1000);
        // Before the first reading, and without a second one.
        assert!(c.ours(4_000_000_000).abs_diff(69_001_000_000) < 10_000);
        let one = Clocks { first: (100, 200), last: (100, 200) };
        assert_eq!((one.ours(150), one.ours(0)), (250, 100));
    }
}
