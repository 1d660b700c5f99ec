//! A GPU divided by the CUDA driver's process lock, on stand-ins for the driver and NVML: who is locked is stopped, and who
//! uses the processor uses the GPU. Processes, the service, its guardian and their ends are real.

mod common;
#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{Program, Service, until};
use forebay_proto::wire::{Class, Level, Request, Source};
use forebay_rm::fake::Load;

/// Programs on the one GPU of a machine, and a service.
struct Machine {
    libraries: PathBuf,
    states: PathBuf,
    programs: Vec<Program>,
    _dirs: [tempfile::TempDir; 2],
    /// One at a time: they share the processor.
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    /// None without a compiler for the stand-ins.
    fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if !forebayd::system::has_the_machines_numbers() {
            eprintln!("skipped: this is a container with process numbers of its own");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        // A driver keeps nobody waiting for a disk, which a file that is written anew now and then does: half a second in
        // which the service does nothing, and whoever was to be stopped goes on.
        let in_memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let (libraries, states) = (dir.path().join("libraries"), in_memory.path().join("states"));
        [&libraries, &states].into_iter().for_each(|d| std::fs::create_dir(d).unwrap());
        std::fs::copy(stand_in::build()?.join("libcuda.so.1"), libraries.join("libcuda.so.1")).unwrap();
        let source = dir.path().join("nvml.c");
        std::fs::write(&source, include_str!("common/nvml.c")).unwrap();
        // nvml-wrapper's name for it.
        let library = libraries.join("libnvidia-ml.so.1");
        let built = Command::new("gcc").args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success(), "NVML's stand-in does not compile");
        Some(Machine { libraries, states, programs: Vec::new(), _dirs: [dir, in_memory], _turn: turn })
    }

    fn state(&self, pid: u32) -> PathBuf {
        self.states.join(pid.to_string())
    }

    /// A program that is on the GPU and does this in a shell.
    fn program(&mut self, does: &str) -> u32 {
        let child = Command::new("/bin/sh").args(["-c", does]).spawn().unwrap();
        let pid = child.id();
        self.programs.push(Program(child));
        std::fs::write(self.state(pid), "0").unwrap();
        pid
    }

    fn service(&self, more: &[&str]) -> Service {
        self.service_of(1, more)
    }

    /// A service on a machine with so many GPUs; every program is on all of them.
    fn service_of(&self, gpus: u32, more: &[&str]) -> Service {
        let environment = vec![
            ("FOREBAY_STAND_IN_GPUS", gpus.to_string().into()),
            ("LD_LIBRARY_PATH", self.libraries.clone()),
            ("FOREBAY_STAND_IN_STATES", self.states.clone()),
            ("FOREBAY_STAND_IN_STOPS", "1".into()),
        ];
        Service::start_in(&[&["--gpu", "0"], more].concat(), environment)
    }

    /// How long one that does not end was given to do so, each time, ms.
    fn given(&self, pid: u32) -> Vec<u32> {
        let text = std::fs::read_to_string(self.states.join(format!("{pid}.long"))).unwrap();
        text.lines().filter_map(|l| l.parse().ok()).collect()
    }

    fn is_locked(&self, pid: u32) -> bool {
        std::fs::read_to_string(self.state(pid)).unwrap() == "1"
    }

    fn is_stopped(pid: u32) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
    }

    /// Percent of the processor time of all programs.
    fn shares(&self, of: Duration) -> Vec<f64> {
        let cpu = || self.programs.iter().map(Program::cpu).collect::<Vec<_>>();
        let before = cpu();
        std::thread::sleep(of);
        let used: Vec<f64> = cpu().iter().zip(before).map(|(a, b)| (*a - b).as_secs_f64()).collect();
        let all: f64 = used.iter().sum();
        used.iter().map(|u| 100.0 * u / all).collect()
    }
}

const BUSY: &str = "while :; do :; done";

fn known(s: &Service, pids: &[u32]) -> bool {
    pids.iter().all(|p| s.process(*p).is_some_and(|p| p.level == Level::Lock))
}

#[test]
fn programs_get_their_shares_and_who_does_nothing_leaves_its_time_to_others() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program(BUSY), m.program(BUSY), m.program("exec sleep 600")];
    // There is no NVIDIA driver here, so that is the way that is left.
    let s = m.service(&[]);
    until("all are found", || known(&s, &pids));
    s.set(pids[0], Class::Custom(600_000));
    s.set(pids[1], Class::Custom(200_000));
    s.set(pids[2], Class::Custom(200_000));
    // Until the third one has been silent for long enough.
    std::thread::sleep(Duration::from_secs(3));
    let got = m.shares(Duration::from_secs(5));
    assert!((got[0] - 75.0).abs() < 5.0, "{got:?}, where 75:25 were theirs");
    let p = s.process(pids[0]).unwrap();
    assert_eq!((p.source, p.level), (Source::Nvml, Level::Lock));
    assert!((650_000..=850_000).contains(&p.used), "{p:?}");
    assert!(!m.is_locked(pids[2]), "who is idle stays on the GPU");
    // Suspended and resumed.
    s.set(pids[0], Class::Suspended);
    until("it is stopped", || Machine::is_stopped(pids[0]) && m.is_locked(pids[0]));
    std::thread::sleep(Duration::from_millis(500));
    assert!(m.shares(Duration::from_secs(1))[0] < 1.0);
    s.connect().ask(&Request::Resume { pid: pids[0] }).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(m.shares(Duration::from_secs(4))[0] > 60.0);
}

/// The lock is of a whole process: two GPUs that divide it each in its own way would let it on whenever one of them does.
#[test]
fn a_program_on_two_gpus_is_locked_by_the_turns_of_one() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program(BUSY), m.program(BUSY)];
    let s = m.service_of(2, &["--gpu", "1"]);
    until("both are found", || known(&s, &pids));
    s.set(pids[0], Class::Custom(750_000));
    std::thread::sleep(Duration::from_secs(2));
    let got = m.shares(Duration::from_secs(5));
    let listed = s.connect().processes().unwrap();
    assert!((got[0] - 75.0).abs() < 5.0, "{got:?}, where 75:25 were theirs");
    let on: Vec<(u32, &str)> = listed.iter().map(|p| (p.pid, p.device.as_str())).collect();
    assert!(pids.iter().all(|pid| on.contains(&(*pid, "gpu0")) && !on.contains(&(*pid, "gpu1"))), "{on:?}");
}

#[test]
fn who_cannot_be_locked_goes_on_and_who_was_moved_away_is_left_alone() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program(BUSY), m.program(BUSY)];
    let away = m.program("exec sleep 600");
    std::fs::write(m.state(away), "2").unwrap();
    // A kernel that does not end.
    std::fs::write(m.states.join(format!("{}.long", pids[0])), "").unwrap();
    // One that was left locked by somebody.
    std::fs::write(m.state(pids[1]), "1").unwrap();
    let s = m.service(&["--level", "lock"]);
    until("both are found", || known(&s, &pids));
    until("one is locked at times", || m.is_locked(pids[1]));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert!(!Machine::is_stopped(pids[0]));
    }
    assert!(known(&s, &pids), "it was forgotten");
    // Half of the patience after each time in vain.
    let given = m.given(pids[0]);
    assert!(given.len() >= 2 && given.iter().zip([50, 25, 12, 10, 10, 10]).all(|(ms, want)| *ms == want), "{given:?}");
    assert_eq!(std::fs::read_to_string(m.state(away)).unwrap(), "2");
    assert!(!known(&s, &[away]));
    // It ends in the middle of things.
    drop(m.programs.remove(1));
    std::fs::remove_file(m.state(pids[1])).unwrap();
    until("it is forgotten", || !known(&s, &pids[1..]));
    assert!(known(&s, &pids[..1]));
}

/// What the driver refuses once is not the process's fault, which would stand still for ever.
#[test]
fn one_that_the_driver_does_not_unlock_is_unlocked_later() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program(BUSY), m.program(BUSY)];
    let mut s = m.service(&["--level", "lock"]);
    until("both are found", || known(&s, &pids));
    for end in [false, true] {
        until("one is locked", || m.is_locked(pids[0]));
        let stuck = m.states.join(format!("{}.stuck", pids[0]));
        std::fs::write(&stuck, "").unwrap();
        // Longer than rounds of windows are: it should have been let on meanwhile, more than once.
        let begun = Instant::now();
        until("it is held", || m.is_locked(pids[0]) && begun.elapsed() > Duration::from_millis(1500));
        // By the service, or by the guardian, which knows of it.
        if end {
            s.kill();
            std::thread::sleep(Duration::from_millis(300));
        }
        std::fs::remove_file(stuck).unwrap();
        until("it goes on", || !m.is_locked(pids[0]) && !Machine::is_stopped(pids[0]));
        assert!(end || known(&s, &pids));
    }
}

/// Waiting for each of them takes longer than a guardian waits for a service that says nothing.
#[test]
fn many_who_cannot_be_locked_are_no_reason_to_end_the_service() {
    let Some(mut m) = Machine::new() else { return };
    let pids: Vec<u32> = (0..50).map(|_| m.program("exec sleep 600")).collect();
    pids.iter().for_each(|p| std::fs::write(m.states.join(format!("{p}.long")), "").unwrap());
    let s = m.service(&["--level", "lock"]);
    let service = s.pid();
    until("each was to be taken off", || pids.iter().filter(|p| !m.given(**p).is_empty()).count() >= 45);
    assert!(known(&s, &pids) && s.pid() == service);
}

#[test]
fn killed_the_service_leaves_nobody_locked() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program(BUSY), m.program(BUSY), m.program(BUSY)];
    let mut s = m.service(&["--level", "lock"]);
    until("all are found", || known(&s, &pids));
    s.set(pids[2], Class::Suspended);
    let locked = |m: &Machine| pids.iter().filter(|p| m.is_locked(**p)).count();
    let mut somebody = 0;
    for round in 0..5 {
        until("two are locked", || locked(&m) == 2);
        somebody += 1;
        s.kill();
        let begun = Instant::now();
        until("nobody is locked", || locked(&m) == 0 && !pids.iter().any(|p| Machine::is_stopped(*p)));
        assert!(begun.elapsed() < Duration::from_millis(100), "round {round}: {:?}", begun.elapsed());
        s.restart();
        until("all are found again", || known(&s, &pids));
    }
    assert_eq!(somebody, 5);
    // An orderly end, too.
    until("two are locked", || locked(&m) == 2);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(s.pid() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    until("nobody is locked", || locked(&m) == 0);
}

/// The driver has channels that can be steered, as the fake of it says, and NVML answers as above.
#[test]
fn nvml_fills_what_the_log_does_not_tell() {
    let Some(mut m) = Machine::new() else { return };
    let gpu = common::machine::Machine::new("filled");
    let path = gpu.path.to_str().unwrap().to_owned();
    let pids = [m.program(BUSY), m.program("exec sleep 600")];
    // To the log they are the same: both have something on the GPU all the time.
    pids.iter().for_each(|p| gpu.rm.start(*p, 1, 1, Load::saturating(1000)));
    let known = |s: &Service, source| {
        pids.iter().all(|p| s.process(*p).is_some_and(|p| p.level == Level::Hardware && p.source == source))
    };
    // Without the log there is nothing else.
    gpu.rm.refuse_log(Some(0x1B));
    let s = m.service(&["--fake-rm", &path, "--nvml"]);
    until("both are found", || known(&s, Source::Nvml));
    s.set(pids[0], Class::Custom(500_000));
    std::thread::sleep(Duration::from_secs(3));
    let [busy, idle] = pids.map(|p| s.process(p).unwrap());
    assert!(busy.used > 800_000 && idle.used < 100_000 && !idle.active, "{busy:?} {idle:?}");
    drop(s);
    // With it, whoever holds the GPU alone does what NVML says.
    gpu.rm.refuse_log(None);
    let s = m.service(&["--fake-rm", &path, "--nvml"]);
    until("both are found", || known(&s, Source::Switches));
    s.set(pids[0], Class::Suspended);
    until("the idle one's use is sampled", || s.process(pids[1]).is_some_and(|p| p.source == Source::Nvml));
    until("it is known to be idle", || s.process(pids[1]).is_some_and(|p| p.used < 100_000));
}

#[test]
fn who_has_more_memory_than_it_may_is_ended() {
    let Some(mut m) = Machine::new() else { return };
    let pids = [m.program("exec sleep 600"), m.program("exec sleep 600"), m.program("exec sleep 600")];
    let s = m.service(&[]);
    until("all are found", || known(&s, &pids));
    let limit = |pid, memory| s.connect().ask(&Request::Limit { pid, memory });
    limit(pids[0], Some(64 << 20)).unwrap();
    limit(pids[1], Some(64 << 20)).unwrap();
    assert_eq!(pids.map(|p| s.process(p).unwrap().memory_limit), [Some(64 << 20), Some(64 << 20), None]);
    let has = |pid: u32, bytes: u64| {
        // Whole, whenever it is read.
        let (next, path) = (m.states.join("next.memory"), m.states.join(format!("{pid}.memory")));
        std::fs::write(&next, bytes.to_string()).unwrap();
        std::fs::rename(next, path).unwrap();
    };
    pids.iter().for_each(|p| has(*p, 64 << 20));
    std::thread::sleep(Duration::from_millis(600));
    assert!(known(&s, &pids), "nobody has more than it may");
    pids[1..].iter().for_each(|p| has(*p, (64 << 20) + 1));
    let killed = m.programs[1].0.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed), Some(9));
    std::fs::remove_file(m.state(pids[1])).unwrap();
    until("it is forgotten", || !known(&s, &pids[1..2]));
    assert!(known(&s, &[pids[0], pids[2]]));
    // Taken away in time.
    limit(pids[0], None).unwrap();
    has(pids[0], 1 << 40);
    std::thread::sleep(Duration::from_millis(600));
    assert!(known(&s, &[pids[0], pids[2]]));
}

#[test]
fn where_processes_have_other_numbers_no_gpu_is_divided_by_the_lock() {
    let mut c = Command::new("unshare");
    c.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_forebayd"), "--gpu", "0", "--level", "lock"]);
    let dir = tempfile::tempdir().unwrap();
    let out = c.arg("--socket").arg(dir.path().join("socket")).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    if said.contains("unshare:") {
        eprintln!("skipped: {said}");
        return;
    }
    assert!(!out.status.success() && said.contains("--pid=host"), "{said}");
}

#[test]
fn without_nvml_or_a_driver_the_service_says_why() {
    let dir = std::env::temp_dir().join(format!("forebay-no-lock-{}", std::process::id()));
    let start = |level: &str, libraries: Option<&PathBuf>| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
        c.arg("--socket").arg(dir.join("socket")).args(["--gpu", "0", "--level", level]);
        if let Some(l) = libraries {
            c.env("LD_LIBRARY_PATH", l).env("FOREBAY_STAND_IN_STATES", &dir);
        }
        let out = c.output().unwrap();
        assert!(!out.status.success());
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    if std::path::Path::new("/dev/nvidiactl").exists() || !forebayd::system::has_the_machines_numbers() {
        eprintln!("skipped: there is a GPU, or this is a container");
        return;
    }
    let said = start("auto", None);
    assert!(
        said.contains("channels cannot be steered") && said.contains("nor the CUDA driver's process lock"),
        "{said}"
    );
    let _ = std::fs::remove_dir_all(dir);
}
