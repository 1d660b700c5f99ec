//! Starts programs and a service for them, and sees how they get on.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay_proto::client::{Connection, Session};
use forebay_proto::wire::{Class, Request};
use forebayd::service::World as _;
use forebayd::system::System;
use tempfile::TempDir;

use super::progress::{Progress, Rest};

/// Longest wait for a program to begin: some load gigabytes of libraries first.
const PATIENCE: Duration = Duration::from_secs(90);

/// Longest wait for a service to end.
const FAREWELL: Duration = Duration::from_secs(3);

/// A service of its own, or none.
pub struct Stage {
    service: Option<Child>,
    /// Goes last.
    dir: TempDir,
}

/// A program on the stage.
pub struct Actor {
    child: Child,
    report: Arc<Mutex<Report>>,
}

#[derive(Default)]
struct Report {
    items: u64,
    latencies_ms: Vec<f64>,
    progress: Progress,
    rests: Vec<Rest>,
}

impl Report {
    /// A line that a program said: items so far, when the last of them was done, if it says that, and how long new ones took;
    /// or when it rested.
    fn line(&mut self, line: &str) {
        let mut words = line.split(' ').peekable();
        if words.next_if_eq(&"rest").is_some() {
            let mut next = || words.next()?.parse().ok();
            if let (Some(from), Some(to), Some(first)) = (next(), next(), next()) {
                self.rests.push(Rest { from, to, first });
            }
            return;
        }
        self.items = words.next().and_then(|n| n.parse().ok()).unwrap_or(self.items);
        if let Some(at) = words.next_if(|w| w.starts_with('@')).and_then(|w| w[1..].parse().ok()) {
            self.progress.push(at, self.items);
        }
        self.latencies_ms.extend(words.filter_map(|l| l.parse::<f64>().ok()));
    }
}

/// How a program has been getting on in a stretch of time.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Items a second.
    pub rate: f64,
    /// CPU time a second: cores.
    pub cores: f64,
    /// Latency of each item, ms.
    pub latencies_ms: Vec<f64>,
}

fn io(what: &str) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{what}: {e}")
}

/// What a service says, the first of it.
fn listen(service: &mut Child) -> Arc<Mutex<String>> {
    const ENOUGH: usize = 4096;
    let said = Arc::new(Mutex::new(String::new()));
    let (from, to) = (service.stderr.take(), said.clone());
    std::thread::spawn(move || {
        for line in from.into_iter().flat_map(|f| BufReader::new(f).lines()).map_while(Result::ok) {
            let mut said = to.lock().unwrap_or_else(PoisonError::into_inner);
            if said.len() < ENOUGH {
                *said += &line;
                said.push('\n');
            }
        }
    });
    said
}

/// Rounds that a plain program needs for a kernel of this length, measured by one that is alone.
pub fn plain_rounds(device: Kind, task_us: u64) -> Result<u32, String> {
    let mut c = Command::new(this()?);
    c.args(["demo", "sharing-plain", "--measure", "--device", device.name(), "--task-us"]).arg(task_us.to_string());
    let out = c.env(forebay_proto::SOCKET_VARIABLE, "").output().map_err(io("start a program"))?;
    let said = String::from_utf8_lossy(&out.stdout);
    said.trim().parse().map_err(|_| format!("a program measured nothing: {}", String::from_utf8_lossy(&out.stderr)))
}

fn this() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(io("this program's own file"))
}

/// Starts a program whose output is piped, and waits until it has done something.
fn begin(mut c: Command) -> Result<Actor, String> {
    let mut child = c.spawn().map_err(|e| format!("start {}: {e}", c.get_program().display()))?;
    let report = Arc::new(Mutex::new(Report::default()));
    let (out, to) = (child.stdout.take(), report.clone());
    std::thread::spawn(move || {
        for line in out.into_iter().flat_map(|o| BufReader::new(o).lines()).map_while(Result::ok) {
            to.lock().unwrap_or_else(PoisonError::into_inner).line(&line);
        }
    });
    let mut actor = Actor { child, report };
    let begun = Instant::now();
    while actor.items() == 0 {
        if begun.elapsed() > PATIENCE || !matches!(actor.child.try_wait(), Ok(None)) {
            let args: Vec<_> = c.get_args().map(|a| a.to_string_lossy()).collect();
            return Err(format!("a program did not begin: {} {}", c.get_program().display(), args.join(" ")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(actor)
}

impl Stage {
    /// A stage with a service, or on which programs are on their own.
    pub fn new(served: bool) -> Result<Self, String> {
        Self::with(served, &[])
    }

    /// A stage whose service, if there is one, has these further arguments.
    pub fn with(served: bool, arguments: &[&str]) -> Result<Self, String> {
        // Nobody else's, and of a name that nobody can guess: root's service writes there.
        let dir =
            tempfile::Builder::new().prefix("forebay-stage-").tempdir().map_err(io("a folder for the service"))?;
        let mut stage = Stage { service: None, dir };
        if served {
            let mut c = Command::new(this()?);
            // Whatever becomes of this process, nobody is to be divided by a service that nobody knows of.
            c.arg("service")
                .arg("--with-parent")
                .arg("--socket")
                .arg(stage.socket())
                .args(arguments)
                .stderr(Stdio::piped());
            let mut service = c.spawn().map_err(io("start a service"))?;
            let said = listen(&mut service);
            stage.service = Some(service);
            let begun = Instant::now();
            while stage.connect().is_err() {
                let ended = stage.service.as_mut().is_some_and(|s| !matches!(s.try_wait(), Ok(None)));
                if ended || begun.elapsed() > PATIENCE {
                    // What it says comes a moment before or after its end.
                    std::thread::sleep(Duration::from_millis(100));
                    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    return Err(format!("the service does not answer: {}", said.trim()));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(stage)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn connect(&self) -> Result<Connection, String> {
        Connection::open_at(&self.socket(), "stage").map_err(|e| e.to_string())
    }

    /// A presence of this process at the service.
    pub fn session(&self, name: &str) -> Result<Arc<Session>, forebay_proto::client::Error> {
        Session::open_at(vec![self.socket()], name)
    }

    /// The service's process.
    pub fn service_pid(&self) -> Option<u32> {
        self.service.as_ref().map(Child::id)
    }

    /// Starts a program, and waits until it works.
    pub fn program(&self, device: Kind, task_us: u64, period_ms: Option<u64>) -> Result<Actor, String> {
        let period = period_ms.map(|ms| ["--period-ms".to_owned(), ms.to_string()]);
        let task = ["--task-us".to_owned(), task_us.to_string()];
        self.start(device, &[&task[..], period.as_ref().map_or(&[], |p| &p[..])].concat())
    }

    /// Starts a program that knows nothing of Forebay ([`super::plain`]), with kernels of so many rounds and these further
    /// options, as [`Stage::run`].
    pub fn plain(&self, device: Kind, rounds: u32, options: &[&str], class: &[&str]) -> Result<Actor, String> {
        self.plain_with(device, rounds, options, class, &[])
    }

    /// The same, with these variables.
    pub fn plain_with(
        &self,
        device: Kind,
        rounds: u32,
        options: &[&str],
        class: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Actor, String> {
        let (this, rounds) = (this()?.display().to_string(), rounds.to_string());
        let program = [&this, "demo", "sharing-plain", "--device", device.name(), "--rounds", &rounds];
        self.run(&[&program[..], options].concat(), class, variables)
    }

    /// Starts any program that reports as these do, and waits until it works: where there is a service by `forebay run` with
    /// these arguments, as a user would.
    pub fn run(&self, program: &[&str], class: &[&str], variables: &[(&str, &str)]) -> Result<Actor, String> {
        let mut c = if self.service.is_some() {
            self.command(&[&["run"], class, &["--"], program].concat())?
        } else {
            let mut c = Command::new(program[0]);
            c.args(&program[1..]).env(forebay_proto::SOCKET_VARIABLE, "");
            c.stdout(Stdio::piped()).stderr(Stdio::inherit());
            c
        };
        c.envs(variables.iter().copied());
        begin(c)
    }

    /// Starts a program that works on an encrypted file, and waits until it does.
    pub fn encrypted_file(&self, device: Kind) -> Result<Actor, String> {
        self.start(device, &["--encrypted-file".to_owned()])
    }

    /// This program with these arguments, on the stage: its output is piped.
    pub fn command(&self, args: &[&str]) -> Result<Command, String> {
        let mut c = Command::new(this()?);
        // An empty name is no service at all, whatever there is on this machine.
        let socket = if self.service.is_some() { self.socket().into_os_string() } else { "".into() };
        c.args(args).env(forebay_proto::SOCKET_VARIABLE, socket).stdout(Stdio::piped()).stderr(Stdio::inherit());
        Ok(c)
    }

    fn start(&self, device: Kind, args: &[String]) -> Result<Actor, String> {
        let mut c = self.command(&["demo", "sharing-program", "--device", device.name()])?;
        c.args(args);
        begin(c)
    }

    /// Sets a program's class.
    pub fn set(&self, a: &Actor, class: Class) -> Result<(), String> {
        let request = Request::Set { pid: a.pid(), class: Some(class), nice: None };
        self.connect()?.ask(&request).map(drop).map_err(|e| e.to_string())
    }

    /// Sets the nice value by which a program of class normal is weighted.
    pub fn set_nice(&self, a: &Actor, nice: i8) -> Result<(), String> {
        let request = Request::Set { pid: a.pid(), class: None, nice: Some(nice) };
        self.connect()?.ask(&request).map(drop).map_err(|e| e.to_string())
    }

    /// Lets time pass; how every program got on in it. `each` is called about ten times a second, with what is new.
    pub fn watch(&self, all: &[&Actor], time: Duration, mut each: impl FnMut(&[Sample])) -> Vec<Sample> {
        let begun = Instant::now();
        let mut sums = vec![Sample::default(); all.len()];
        all.iter().for_each(|a| drop(a.take()));
        let mut last: Vec<(u64, u64)> = all.iter().map(|a| (a.items(), a.cpu_ns())).collect();
        let first = last.clone();
        let mut at = Instant::now();
        while begun.elapsed() < time {
            std::thread::sleep(Duration::from_millis(100).min(time.saturating_sub(begun.elapsed())));
            let passed = at.elapsed().as_secs_f64();
            at = Instant::now();
            let mut new = Vec::new();
            for ((a, sum), last) in all.iter().zip(&mut sums).zip(&mut last) {
                let now = (a.items(), a.cpu_ns());
                let latencies_ms = a.take();
                sum.latencies_ms.extend(&latencies_ms);
                new.push(Sample {
                    rate: (now.0 - last.0) as f64 / passed,
                    cores: now.1.saturating_sub(last.1) as f64 / passed / 1e9,
                    latencies_ms,
                });
                *last = now;
            }
            each(&new);
        }
        let passed = begun.elapsed().as_secs_f64();
        for ((sum, first), last) in sums.iter_mut().zip(first).zip(last) {
            sum.rate = (last.0 - first.0) as f64 / passed;
            sum.cores = last.1.saturating_sub(first.1) as f64 / passed / 1e9;
        }
        sums
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(s) = &mut self.service {
            // It puts back what it changed, then ends; if not, its guardian does that.
            let pid = i32::try_from(s.id()).ok().and_then(rustix::process::Pid::from_raw);
            let _ = pid.map(|p| rustix::process::kill_process(p, rustix::process::Signal::TERM));
            let begun = Instant::now();
            while matches!(s.try_wait(), Ok(None)) && begun.elapsed() < FAREWELL {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = s.kill();
            let _ = s.wait();
        }
    }
}

impl Actor {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// When it had done how much, if it says that, and when it rested.
    pub fn progress(&self) -> (Progress, Vec<Rest>) {
        let r = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        (r.progress.clone(), r.rests.clone())
    }

    /// Items so far.
    pub fn items(&self) -> u64 {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).items
    }

    fn take(&self) -> Vec<f64> {
        std::mem::take(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner).latencies_ms)
    }

    fn cpu_ns(&self) -> u64 {
        System::default().cpu_time_ns(self.pid()).unwrap_or(0)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
