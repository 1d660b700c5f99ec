//! A service of its own for each test, and programs that are real processes: this test binary, started again.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod machine;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernel_model::Kernel;
use forebay_proto::client::{Account, Connection, Session, cpu_time_ns};
use forebay_proto::wire::{Class, Process, Request};

/// A running `forebayd`.
pub struct Service {
    pub dir: PathBuf,
    child: Child,
    arguments: Vec<String>,
    environment: Vec<(&'static str, PathBuf)>,
    /// Whose files of the driver it has.
    kernel: Option<Arc<Kernel>>,
    /// What it has said since it served.
    said: Arc<Mutex<Vec<String>>>,
    /// One service at a time: another one's programs would not keep to this one's shares.
    _turn: MutexGuard<'static, ()>,
}

impl Service {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(arguments, Vec::new())
    }

    /// With these variables, too.
    pub fn start_in(arguments: &[&str], environment: Vec<(&'static str, PathBuf)>) -> Self {
        Self::start_with(arguments, environment, None)
    }

    /// On a machine with the driver's files.
    pub fn start_on(kernel: Arc<Kernel>, arguments: &[&str]) -> Self {
        Self::start_with(arguments, Vec::new(), Some(kernel))
    }

    fn start_with(arguments: &[&str], environment: Vec<(&'static str, PathBuf)>, kernel: Option<Arc<Kernel>>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("forebayd-test-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        let (child, said) = Self::spawn(&dir, &arguments, &environment, kernel.as_deref());
        Service { dir, child, arguments, environment, kernel, said, _turn: turn }
    }

    fn spawn(
        dir: &std::path::Path,
        arguments: &[String],
        environment: &[(&str, PathBuf)],
        kernel: Option<&Kernel>,
    ) -> (Child, Arc<Mutex<Vec<String>>>) {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
        c.arg("--socket").arg(dir.join("socket")).args(arguments).stderr(Stdio::piped());
        c.envs(environment.iter().map(|(k, v)| (*k, v)));
        kernel.into_iter().for_each(|k| k.put_in(&mut c).unwrap());
        let mut child = c.spawn().unwrap();
        let mut err = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("serving") {
            if std::io::BufRead::read_line(&mut err, &mut said).unwrap_or(0) == 0 {
                let _ = child.kill();
                panic!("the service did not start: {said}");
            }
        }
        // What it says later goes where the test's own output goes.
        let all: Vec<String> = said.lines().map(str::to_owned).collect();
        let said = Arc::new(Mutex::new(all));
        let to = said.clone();
        std::thread::spawn(move || {
            for l in std::io::BufRead::lines(err).map_while(Result::ok) {
                println!("{l}");
                to.lock().unwrap().push(l);
            }
        });
        (child, said)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> Connection {
        Connection::open_at(&self.socket(), "test").unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// With other arguments.
    #[allow(dead_code, reason = "not every test program that includes this file has such a test")]
    pub fn restart_with(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(|a| (*a).to_owned()).collect();
        self.restart();
    }

    pub fn restart(&mut self) {
        (self.child, self.said) = Self::spawn(&self.dir, &self.arguments, &self.environment, self.kernel.as_deref());
    }

    /// What it has said that contains this, since it last started.
    pub fn said(&self, what: &str) -> Vec<String> {
        self.said.lock().unwrap().iter().filter(|l| l.contains(what)).cloned().collect()
    }

    pub fn set(&self, pid: u32, class: Class) {
        self.connect().ask(&Request::Set { pid, class: Some(class), nice: None }).unwrap();
    }

    pub fn process(&self, pid: u32) -> Option<Process> {
        self.connect().processes().unwrap().into_iter().find(|p| p.pid == pid)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A program.
pub struct Program(pub Child);

impl Program {
    /// This test binary's test `role` as a process of its own.
    pub fn start(service: &Service, role: &str, settings: &[(&str, String)]) -> Self {
        let mut c = Command::new(std::env::current_exe().unwrap());
        c.args([role, "--exact", "--nocapture", "--ignored", "--test-threads=1"]);
        c.env(forebay_proto::SOCKET_VARIABLE, service.socket()).stdout(Stdio::null()).stderr(Stdio::inherit());
        settings.iter().for_each(|(k, v)| {
            c.env(k, v);
        });
        Program(c.spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Time that it has had of the CPU.
    pub fn cpu(&self) -> Duration {
        use forebayd::service::World as _;
        Duration::from_nanos(forebayd::system::System::default().cpu_time_ns(self.pid()).unwrap_or(0))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a process has ended, be it that nobody has asked how: who inherits it may do that seconds later, or never.
pub fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default();
    state.is_empty() || state.starts_with(['Z', 'X'])
}

/// What a hog does: on so many threads, tasks of this length, asking for credit before each.
pub fn hog(threads: usize, task: Duration) -> ! {
    let session = Session::open("hog").unwrap();
    let account = Account::cpu(&session).unwrap();
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| {
                loop {
                    account.look();
                    while !account.may() {
                        account.wait(|| 0);
                    }
                    spin(task);
                }
            });
        }
    });
    unreachable!("hogs do not end")
}

/// Uses the CPU for so long.
pub fn spin(time: Duration) {
    let clock = || {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    let begun = clock();
    while clock() - begun < time {
        std::hint::black_box((0..2000u64).fold(0, |a, b| a ^ b.wrapping_mul(a)));
    }
}

/// Waits until something is true.
pub fn until(what: &str, mut f: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !f() {
        assert!(begun.elapsed() < Duration::from_secs(10), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// So that it is used in every test binary.
pub fn now() -> u64 {
    cpu_time_ns()
}
