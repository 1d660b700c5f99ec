//! The commands on a machine with a GPU that the service divides by hardware: CUDA is the stand-in, the kernel's driver is the
//! model, and the programs' kernels have their turns there.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernel_model::Kernel;
use forebay_rm::fake::FakeRm;

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

/// Rounds of a kernel that lasts a millisecond, where one takes so many ns.
const ROUNDS_OF_A_MS: u32 = 40_000;
const NS_OF_A_ROUND: &str = "25";

struct Machine {
    kernel: Kernel,
    cuda: &'static Path,
    dir: tempfile::TempDir,
    /// One at a time: a service would find the programs of others.
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cuda = stand_in::build()?;
        match Kernel::new(FakeRm::default()) {
            Ok(kernel) => {
                kernel.keep_time();
                Some(Machine { kernel, cuda, dir: tempfile::tempdir().unwrap(), _turn: turn })
            }
            Err(why) => {
                eprintln!("skipped: no model of the kernel's driver: {why}");
                None
            }
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
        c.args(arguments).env("FOREBAY_SOCKET", self.dir.path().join("socket"));
        c.env("FOREBAY_CACHE", self.dir.path().join("cache")).env("FOREBAY_NVRTC", self.cuda);
        c.env("LD_LIBRARY_PATH", self.cuda).env("STAND_IN_TURNS", "1").env("STAND_IN_SPIN", NS_OF_A_ROUND);
        self.kernel.put_in(&mut c).unwrap();
        c
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn start(&self, arguments: &[&str]) -> Running {
        let mut child = self.command(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let items = Arc::new(Mutex::new(0));
        let (said, out) = (items.clone(), child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let n = line.split_whitespace().next().and_then(|n| n.parse().ok());
                n.into_iter().for_each(|n| *said.lock().unwrap() = n);
            }
        });
        Running(child, items)
    }

    /// A program that keeps the GPU busy with kernels of a length, as `forebay run` starts it.
    fn program(&self, options: &[&str], kernel_ms: u32) -> Running {
        let rounds = (kernel_ms * ROUNDS_OF_A_MS).to_string();
        let program = [env!("CARGO_BIN_EXE_forebay"), "demo", "sharing-plain", "--device", "cuda", "--rounds", &rounds];
        self.start(&[&["run"], options, &["--"], &program].concat())
    }
}

/// A program, and how much of it has done.
struct Running(Child, Arc<Mutex<u64>>);

impl Running {
    fn items(&self) -> u64 {
        *self.1.lock().unwrap()
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(b: &[u8]) -> String {
    String::from_utf8_lossy(b).into_owned()
}

fn until(what: &str, mut f: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !f() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_doctor_tries_what_dividing_takes_and_says_what_works() {
    let Some(m) = Machine::new() else { return };
    let said = text(&m.run(&["doctor"]).stdout);
    for step in ["programs are found", "suspension", "time slices", "the log of context switches"] {
        let line = said.lines().find(|l| l.contains("hardware, GPU 0") && l.contains(step));
        assert!(line.is_some_and(|l| l.contains(": works: ")), "{step}: {line:?}\n{said}");
    }
    assert!(said.contains("to divide it: sudo forebay service --gpu 0"), "{said}");
    until("nothing stays behind", || m.kernel.rm().clients() == 0);
}

#[test]
fn programs_of_cuda_have_their_shares_and_stand_still_while_they_are_suspended() {
    let Some(m) = Machine::new() else { return };
    let mut service = m.start(&["service", "--gpu", "0"]);
    until("the service answers", || m.run(&["ps"]).status.success());
    let programs = [m.program(&["--share", "75"], 5), m.program(&["--share", "25"], 20)];
    let found = || text(&m.run(&["ps"]).stdout).lines().filter(|l| l.contains("hardware")).count();
    until("both are found, and at work", || found() == 2 && programs.iter().all(|p| p.items() > 2));
    std::thread::sleep(Duration::from_secs(1));
    let items = || [programs[0].items(), programs[1].items()];
    let before = items();
    std::thread::sleep(Duration::from_secs(4));
    let [first, second] = [0, 1].map(|i| (items()[i] - before[i]) as f64 * [5.0, 20.0][i]);
    let part = first / (first + second);
    assert!((part - 0.75).abs() < 0.05, "{part} of what both did");
    assert!((first + second) / 4000.0 > 0.9, "{} of the GPU is used", (first + second) / 4000.0);
    // By hand.
    assert!(m.run(&["suspend", &programs[0].pid()]).status.success());
    std::thread::sleep(Duration::from_millis(300));
    let stands = items();
    std::thread::sleep(Duration::from_secs(1));
    let now = items();
    assert!(now[0] == stands[0] && now[1] > stands[1] + 40, "{stands:?}, then {now:?}");
    assert!(m.run(&["resume", &programs[0].pid()]).status.success());
    until("it goes on", || programs[0].items() > now[0]);
    // The service is killed: everybody goes on by the driver's turns.
    service.0.kill().unwrap();
    service.0.wait().unwrap();
    let now = items();
    until("both go on", || items()[0] > now[0] + 20 && items()[1] > now[1] + 5);
}
