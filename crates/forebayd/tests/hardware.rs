//! The service on the fake of the driver, with real processes: the service and its guardian are killed, stopped and
//! restarted like any others. The GPU is a model whose time passes as fast as the clock's.

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use common::machine::{Machine, known};
use common::{Service, has_ended, until};
use forebay_proto::wire::{Class, Request};
use forebay_rm::fake::{FakeRm, Load, remote};

/// The service's guardian: its one child.
fn guardian(s: &Service) -> u32 {
    let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", s.pid())).unwrap();
    text.split_whitespace().next().expect("the service has no guardian").parse().unwrap()
}

#[test]
fn processes_are_found_and_get_their_shares_whatever_their_kernels() {
    let mut m = Machine::new("shares");
    let first = m.program(100);
    let s = m.service();
    let mut pids = vec![first];
    pids.extend([1000, 5000, 20_000].map(|us| m.program(us)));
    let begun = Instant::now();
    until("all are found", || known(&s, &pids));
    assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
    for (pid, share) in pids.iter().zip([400_000, 300_000, 200_000, 100_000]) {
        s.set(*pid, Class::Custom(share));
    }
    std::thread::sleep(Duration::from_secs(1));
    let got = m.shares(&pids, Duration::from_secs(4));
    for (got, want) in got.iter().zip([40.0, 30.0, 20.0, 10.0]) {
        assert!((got - want).abs() < 3.0, "{got:?} {want}");
    }
    // More than the whole is refused, for a GPU as for the CPU.
    let more = s.connect().ask(&Request::Set { pid: pids[3], class: Some(Class::Custom(100_001)), nice: None });
    assert!(more.is_err());
    // One ends, in the middle of things: the others go on.
    m.rm.kill(pids[0]);
    m.programs[0].kill().unwrap();
    m.programs[0].wait().unwrap();
    until("it is forgotten", || !known(&s, &pids[..1]));
    let got = m.shares(&pids[1..], Duration::from_secs(2));
    assert!((got[0] - 50.0).abs() < 4.0, "{got:?}");
    // Suspended, resumed.
    s.set(pids[1], Class::Suspended);
    std::thread::sleep(Duration::from_millis(300));
    assert!(m.shares(&pids[1..], Duration::from_secs(1))[0] < 0.1);
    s.connect().ask(&Request::Resume { pid: pids[1] }).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!((m.shares(&pids[1..], Duration::from_secs(2))[0] - 50.0).abs() < 5.0);
}

#[test]
fn an_interactive_process_comes_through_at_once_and_everybody_has_their_slices_back() {
    let mut m = Machine::new("interactive");
    let pids = [5000, 20_000].map(|us| m.program(us));
    let calls = m.program_with(Load { kernel_us: 100, depth: 1, think_us: 5000 });
    let mut s = m.service();
    until("all are found", || known(&s, &[pids[0], pids[1], calls]));
    let p99 = |m: &Machine| {
        m.rm.latencies(calls);
        std::thread::sleep(Duration::from_secs(2));
        let mut took = m.rm.latencies(calls);
        took.sort_unstable();
        took[took.len() * 99 / 100]
    };
    let normal = p99(&m);
    s.set(calls, Class::Interactive);
    until("slices are short", || pids.iter().all(|p| m.rm.is_sliced(*p)));
    let interactive = p99(&m);
    // A normal process with so little work waits for another's turn, which is 2 ms.
    assert!(interactive < 700 && normal > 2 * interactive, "{interactive} µs, {normal} when it was normal");
    let p = s.process(calls).unwrap();
    assert!(p.switches.unwrap() > 100, "{p:?}");
    let p = s.process(pids[0]).unwrap();
    assert!(p.off_ns.unwrap() > 0, "{p:?}");
    // Killed: the guardian gives slices back as well.
    let its_guardian = guardian(&s);
    s.kill();
    let begun = Instant::now();
    until("slices are the driver's", || pids.iter().all(|p| !m.rm.is_sliced(*p)));
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    until("its guardian has gone", || has_ended(its_guardian));
    s.restart();
    until("slices are short again", || pids.iter().all(|p| m.rm.is_sliced(*p)));
    s.set(calls, Class::Normal);
    until("slices are the driver's", || pids.iter().all(|p| !m.rm.is_sliced(*p)));
}

#[test]
fn two_gpus_are_divided_each_for_itself_and_both_give_back_when_the_service_is_killed() {
    let mut m = Machine::with_gpus("two", 2);
    let pids = [1000, 5000, 5000].map(|us| m.program(us));
    // The first one is on both, the second on the first GPU only, the third has a little there and most on the second.
    m.rm.use_gpu(1, pids[0], 1, 3, Load::saturating(1000));
    m.rm.set_load(pids[2], Load::IDLE);
    m.rm.use_gpu(1, pids[2], 1, 3, Load::saturating(5000));
    let mut s = Service::start(&["--gpu", "all", "--fake-rm", m.path.to_str().unwrap()]);
    until("all are found", || known(&s, &pids));
    s.set(pids[0], Class::Custom(700_000));
    std::thread::sleep(Duration::from_secs(1));
    let time = || [(0, 0), (0, 1), (1, 0), (1, 2)].map(|(gpu, p)| m.rm.gpu_time_on(gpu, pids[p]).unwrap_or(0));
    let before = time();
    std::thread::sleep(Duration::from_secs(4));
    let used: Vec<f64> = time().into_iter().zip(before).map(|(a, b)| (a - b) as f64).collect();
    let parts = [used[0] / (used[0] + used[1]), used[2] / (used[2] + used[3])];
    assert!(parts.iter().all(|p| (p - 0.7).abs() < 0.04), "{parts:?} of the GPUs, where 0.7 of each was its");
    let on: Vec<String> =
        s.connect().processes().unwrap().into_iter().filter(|p| p.pid == pids[0]).map(|p| p.device).collect();
    assert!(["gpu0", "gpu1"].iter().all(|d| on.iter().any(|o| o == d)), "{on:?}");
    for round in 0..3 {
        let off = |gpu: usize| pids.iter().any(|p| m.rm.is_suspended_on(gpu, *p));
        let sliced = || pids.iter().any(|p| m.rm.is_sliced(*p));
        until("somebody is off each, or there are turns", || (off(0) || sliced()) && (off(1) || sliced()));
        s.kill();
        let begun = Instant::now();
        until("everybody is on both", || !off(0) && !off(1) && !sliced());
        assert!(begun.elapsed() < Duration::from_millis(100), "round {round}: {:?}", begun.elapsed());
        s.restart();
        until("all are found again", || known(&s, &pids));
    }
}

#[test]
fn a_gpu_that_falls_off_is_told_of_once_and_let_go_of_while_the_other_one_is_divided_as_before() {
    let mut m = Machine::with_gpus("falls", 2);
    let pids = [1000, 5000, 5000].map(|us| m.program(us));
    // All are on both.
    pids.iter().for_each(|p| m.rm.use_gpu(1, *p, 1, 3, Load::saturating(2000)));
    let mut s = Service::start(&["--gpu", "all", "--fake-rm", m.path.to_str().unwrap()]);
    until("all are found", || known(&s, &pids));
    let guardians = || {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", s.pid())).unwrap();
        text.split_whitespace().count()
    };
    assert_eq!(guardians(), 2);
    std::thread::sleep(Duration::from_millis(300));
    m.rm.lose_gpu(1);
    until("it is told of", || !s.said("gpu1 has fallen off").is_empty());
    until("its guardian has ended", || guardians() == 1);
    // A class is set as before, and holds on the one that is there; somebody who comes is found.
    s.set(pids[0], Class::Custom(700_000));
    let new = m.program(1000);
    until("it is found", || known(&s, &[new]));
    std::thread::sleep(Duration::from_secs(1));
    let all = [pids[0], pids[1], pids[2], new];
    let time = || all.map(|p| m.rm.gpu_time_on(0, p).unwrap());
    let before = time();
    std::thread::sleep(Duration::from_secs(3));
    let used: Vec<f64> = time().into_iter().zip(before).map(|(a, b)| (a - b) as f64).collect();
    let part = used[0] / used.iter().sum::<f64>();
    assert!((part - 0.7).abs() < 0.04 && used[1..].iter().all(|u| *u > 0.0), "{used:?}");
    assert!(s.connect().processes().unwrap().iter().all(|p| p.device != "gpu1"));
    let (lines, others) = (s.said("gpu1"), s.said("gpu0"));
    assert!(lines.len() == 1 && lines[0].contains("the GPU is lost") && others.is_empty(), "{lines:?} {others:?}");
    // With it gone the next service begins, too, and says what it leaves out; and gives back what it had.
    s.kill();
    until("everybody is on", || all.iter().all(|p| !m.rm.is_suspended_on(0, *p)));
    s.restart();
    until("all are found again", || known(&s, &all));
    let out = s.said("GPU 1");
    assert!(out.len() == 1 && out[0].contains("lost"), "{out:?}");
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.args(["--gpu", "1", "--fake-rm", m.path.to_str().unwrap(), "--socket"]).arg(s.dir.join("another"));
    let out = c.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("GPU 1") && said.contains("lost"), "{said}");
}

#[test]
fn one_that_cannot_be_opened_is_left_out_of_all_and_refused_by_name() {
    let mut m = Machine::with_gpus("left-out", 2);
    let pid = m.program(1000);
    m.rm.refuse_gpu(1, forebay_rm::error::NOT_SUPPORTED);
    let path = m.path.to_str().unwrap().to_owned();
    let s = Service::start(&["--gpu", "all", "--level", "hardware", "--fake-rm", &path]);
    until("it is found on the other one", || known(&s, &[pid]));
    let said = s.said("GPU 1");
    assert!(said.len() == 1 && said[0].contains("not supported"), "{said:?}");
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.args(["--gpu", "0", "--gpu", "1", "--level", "hardware", "--fake-rm", &path, "--socket"])
        .arg(s.dir.join("another"));
    let out = c.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("GPU 1") && said.contains("not supported"), "{said}");
}

#[test]
fn turns_take_the_windows_place_until_somebody_comes_and_slices_come_back_when_the_service_is_killed() {
    let mut m = Machine::new("turns");
    let pids = [1000, 20_000].map(|us| m.program(us));
    let mut s = m.service();
    until("both are found", || known(&s, &pids));
    s.set(pids[0], Class::Custom(700_000));
    let rm = m.rm.clone();
    let turns = |pids: &[u32]| pids.iter().all(|p| rm.is_sliced(*p) && !rm.is_suspended(*p));
    until("there are turns", || turns(&pids));
    let got = m.shares(&pids, Duration::from_secs(2));
    assert!((got[0] - 70.0).abs() < 3.0, "{got:?}");
    assert!(turns(&pids));
    // Killed: everybody goes on by the driver's turns, and by the next one's.
    for _ in 0..2 {
        s.kill();
        let begun = Instant::now();
        until("slices are the driver's", || pids.iter().all(|p| !m.rm.is_sliced(*p)));
        assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
        s.restart();
        until("there are turns again", || turns(&pids));
    }
    // Somebody comes: there are windows.
    let third = m.program(5000);
    let off = |p: &u32| rm.is_suspended(*p);
    until("somebody is off", || pids.iter().chain([&third]).any(off));
    assert!(!turns(&pids));
}

#[test]
fn in_a_container_the_logs_numbers_are_learnt_and_shares_hold() {
    let mut m = Machine::new("container");
    m.rm.number_apart(1 << 20);
    let pids = [100, 5000, 20_000].map(|us| m.program(us));
    let s = Service::start(&["--gpu", "0", "--apart", "--fake-rm", m.path.to_str().unwrap()]);
    until("all are found", || known(&s, &pids));
    for (pid, share) in pids.iter().zip([500_000, 300_000, 200_000]) {
        s.set(*pid, Class::Custom(share));
    }
    // Switches are those of a number.
    until("everybody's number is known", || pids.iter().all(|p| s.process(*p).is_some_and(|p| p.switches.is_some())));
    let got = m.shares(&pids, Duration::from_secs(4));
    for (got, want) in got.iter().zip([50.0, 30.0, 20.0]) {
        assert!((got - want).abs() < 3.0, "{got:?} {want}");
    }
    let used = s.process(pids[0]).unwrap().used;
    assert!((400_000..600_000).contains(&used), "{used}");
}

#[test]
fn a_process_that_makes_more_channels_cannot_slip_away_with_them() {
    let mut m = Machine::new("more");
    let pids = [1000, 1000].map(|us| m.program(us));
    let s = m.service();
    until("all are found", || known(&s, &pids));
    // Another context in the same process.
    m.rm.start(pids[0], 1, 3, Load::saturating(1000));
    std::thread::sleep(Duration::from_millis(500));
    let got = m.shares(&pids, Duration::from_secs(2));
    assert!((got[0] - 50.0).abs() < 5.0, "{got:?}");
    s.set(pids[0], Class::Suspended);
    std::thread::sleep(Duration::from_millis(300));
    assert!(m.shares(&pids, Duration::from_secs(1))[0] < 0.1);
}

#[test]
fn without_the_log_a_gpu_is_not_divided_and_the_service_says_why() {
    let m = Machine::new("no-log");
    m.rm.refuse_log(Some(0x1B));
    let dir = std::env::temp_dir().join(format!("forebay-no-log-{}", std::process::id()));
    let out = Command::new(env!("CARGO_BIN_EXE_forebayd"))
        .arg("--socket")
        .arg(dir.join("socket"))
        .args(["--gpu", "0", "--fake-rm"])
        .arg(&m.path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("log of context switches"), "{said}");
    assert!(said.contains("insufficient permissions"), "{said}");
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn killed_twenty_times_the_service_leaves_nobody_suspended() {
    let mut m = Machine::new("killed");
    let pids = [500, 2000, 5000].map(|us| m.program(us));
    let mut s = m.service();
    until("all are found", || known(&s, &pids));
    s.set(pids[2], Class::Suspended);
    let mut random = fastrand::Rng::with_seed(5);
    let mut somebody = 0;
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(random.u64(20..150)));
        let its_guardian = guardian(&s);
        somebody += m.suspended().len();
        s.kill();
        let begun = Instant::now();
        until("nobody is suspended", || m.suspended().is_empty());
        assert!(begun.elapsed() < Duration::from_millis(100), "round {round}: {:?}", begun.elapsed());
        until("its guardian has gone", || has_ended(its_guardian));
        s.restart();
        until("all are found again", || known(&s, &pids));
        assert_eq!(s.process(pids[2]).unwrap().class, Class::Suspended, "round {round}");
    }
    assert!(somebody > 20, "there was hardly anybody to give back: {somebody}");
}

#[test]
fn a_service_that_is_stopped_or_ended_and_a_guardian_that_is_killed_leave_nobody_suspended() {
    let mut m = Machine::new("stopped");
    let pids = [500, 2000].map(|us| m.program(us));
    let mut s = m.service();
    until("all are found", || known(&s, &pids));
    s.set(pids[0], Class::Suspended);
    until("it is suspended", || m.suspended().contains(&pids[0]));
    // Stopped: it gives nothing back, and is ended for that.
    let signal = |pid: u32, signal| {
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    };
    signal(s.pid(), rustix::process::Signal::STOP);
    until("nobody is suspended", || m.suspended().is_empty());
    s.kill();
    s.restart();
    until("it is suspended again", || m.suspended().contains(&pids[0]));
    // Its guardian is killed: the service gives back, and ends.
    signal(guardian(&s), rustix::process::Signal::KILL);
    until("nobody is suspended", || m.suspended().is_empty());
    s.kill();
    s.restart();
    until("it is suspended again", || m.suspended().contains(&pids[0]));
    // An orderly end. The signals that a terminal or systemd sends to all of them do not end the guardian first.
    let its_guardian = guardian(&s);
    signal(its_guardian, rustix::process::Signal::TERM);
    signal(its_guardian, rustix::process::Signal::INT);
    signal(s.pid(), rustix::process::Signal::TERM);
    until("nobody is suspended", || m.suspended().is_empty());
    until("its guardian has gone", || has_ended(its_guardian));
}

#[test]
fn a_driver_that_is_not_known_is_refused_at_the_start() {
    let rm = FakeRm::new("999.1");
    let path = std::env::temp_dir().join(format!("forebay-rm-{}-unknown", std::process::id()));
    remote::serve(rm, &path).unwrap();
    let dir = std::env::temp_dir().join(format!("forebay-unknown-{}", std::process::id()));
    let out = Command::new(env!("CARGO_BIN_EXE_forebayd"))
        .arg("--socket")
        .arg(dir.join("socket"))
        .args(["--gpu", "0", "--fake-rm"])
        .arg(&path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("999.1") && said.contains("not known"), "{said}");
    let _ = std::fs::remove_file(path);
    let _ = std::fs::remove_dir_all(dir);
}
