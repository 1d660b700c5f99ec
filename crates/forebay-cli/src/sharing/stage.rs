//! Starts programs and a service for them, and sees how they get on.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay_proto::client::{Connection, Session};
use forebay_proto::wire::{Class, Request};
use forebayd::service::World as _;
use forebayd::system::System;

/// Longest wait for a program to begin.
const PATIENCE: Duration = Duration::from_secs(20);

/// A service of its own, or none.
pub struct Stage {
    service: Option<Child>,
    dir: PathBuf,
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

/// Rounds that a program needs for a task of this length, measured by a program that is alone.
pub fn rounds(device: Kind, task_us: u64) -> Result<u32, String> {
    let mut c = Command::new(this()?);
    c.args(["demo", "sharing-program", "--measure", "--device", device.name(), "--task-us"]).arg(task_us.to_string());
    let out = c.env(forebay_proto::SOCKET_VARIABLE, "").output().map_err(io("start a program"))?;
    let said = String::from_utf8_lossy(&out.stdout);
    said.trim().parse().map_err(|_| format!("a program measured nothing: {}", String::from_utf8_lossy(&out.stderr)))
}

fn this() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(io("this program's own file"))
}

impl Stage {
    /// A stage with a service, or on which programs are on their own.
    pub fn new(served: bool) -> Result<Self, String> {
        Self::with(served, &[])
    }

    /// A stage whose service, if there is one, has these further arguments.
    pub fn with(served: bool, arguments: &[&str]) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("forebay-stage-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        let mut stage = Stage { service: None, dir };
        if served {
            std::fs::create_dir_all(&stage.dir).map_err(io("a folder for the service"))?;
            let mut c = Command::new(this()?);
            c.arg("service").arg("--socket").arg(stage.socket()).args(arguments).stderr(Stdio::piped());
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
        self.dir.join("socket")
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

    /// Starts a program whose tasks have so many rounds, and waits until it works.
    pub fn program_of(&self, device: Kind, rounds: u32, period_ms: Option<u64>) -> Result<Actor, String> {
        let mut args = vec!["--rounds".to_owned(), rounds.to_string()];
        args.extend(period_ms.into_iter().flat_map(|ms| ["--period-ms".to_owned(), ms.to_string()]));
        self.start(device, &args)
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
        let mut child = c.spawn().map_err(io("start a program"))?;
        let report = Arc::new(Mutex::new(Report::default()));
        let (out, to) = (child.stdout.take(), report.clone());
        std::thread::spawn(move || {
            for line in out.into_iter().flat_map(|o| BufReader::new(o).lines()).map_while(Result::ok) {
                let mut words = line.split(' ');
                let mut r = to.lock().unwrap_or_else(PoisonError::into_inner);
                r.items = words.next().and_then(|n| n.parse().ok()).unwrap_or(r.items);
                r.latencies_ms.extend(words.filter_map(|l| l.parse::<f64>().ok()));
            }
        });
        let mut actor = Actor { child, report };
        let begun = Instant::now();
        while actor.items() == 0 {
            if begun.elapsed() > PATIENCE || !matches!(actor.child.try_wait(), Ok(None)) {
                return Err(format!("a program on {} did not begin", device.name()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(actor)
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
            let _ = s.kill();
            let _ = s.wait();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Actor {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Items so far.
    fn items(&self) -> u64 {
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
