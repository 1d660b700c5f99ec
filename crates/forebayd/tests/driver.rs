//! The service as it runs on a machine with a GPU: it finds processes by the driver's files that they have open, borrows
//! these, and calls the driver by ioctls, which the kernel's model answers. The programs have made what they have on the
//! GPU by such calls, too, in mount namespaces of their own.

mod common;

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use common::machine::{Machine, known};
use common::until;
use forebay_kernel_model::Kernel;
use forebay_proto::wire::{Class, Request};
use forebay_rm::fake::{FakeRm, Load};
use forebay_rm::sys::CMD_HANDLE_INFO;

#[test]
fn shares_hold_and_a_program_comes_through_at_once_where_it_is_to() {
    let Some(mut m) = Machine::with_the_drivers_files(1) else { return };
    let first = m.program(100);
    let s = m.service();
    let mut pids = vec![first];
    pids.extend([1000, 5000, 20_000].map(|us| m.program(us)));
    // How soon is measured elsewhere: a call takes twenty times as long here as on hardware.
    until("all are found", || known(&s, &pids));
    for (pid, share) in pids.iter().zip([400_000, 300_000, 200_000, 100_000]) {
        s.set(*pid, Class::Custom(share));
    }
    std::thread::sleep(Duration::from_secs(1));
    let asked = m.rm.calls(CMD_HANDLE_INFO);
    let got = m.shares(&pids, Duration::from_secs(4));
    // Nobody is looked into again; the guardian, which has the driver open, too, never is.
    assert_eq!(m.rm.calls(CMD_HANDLE_INFO), asked);
    for (got, want) in got.iter().zip([40.0, 30.0, 20.0, 10.0]) {
        assert!((got - want).abs() < 3.0, "{got:?} {want}");
    }
    let used = s.process(pids[0]).unwrap();
    assert!((300_000..500_000).contains(&used.used) && used.switches.unwrap() > 10, "by the log: {used:?}");
    // Slices, which are set on the program's own file.
    m.rm.set_load(pids[0], Load { kernel_us: 100, depth: 1, think_us: 5000 });
    s.set(pids[0], Class::Interactive);
    until("the others' slices are short", || pids[1..].iter().all(|p| m.rm.is_sliced(*p)));
    s.set(pids[0], Class::Normal);
    until("slices are the driver's", || pids.iter().all(|p| !m.rm.is_sliced(*p)));
}

#[test]
fn killed_or_ended_the_service_leaves_nobody_suspended_or_sliced() {
    let Some(mut m) = Machine::with_the_drivers_files(2) else { return };
    let pids = [500, 2000, 5000].map(|us| m.program(us));
    let mut s = m.service();
    until("all are found", || known(&s, &pids));
    s.set(pids[2], Class::Suspended);
    let mut random = fastrand::Rng::with_seed(5);
    let mut somebody = 0;
    for round in 0..8 {
        until("the one that is to be is suspended", || m.suspended().contains(&pids[2]));
        std::thread::sleep(Duration::from_millis(random.u64(20..150)));
        somebody += m.suspended().len();
        s.kill();
        let begun = Instant::now();
        until("nobody is suspended", || m.suspended().is_empty() && !pids.iter().any(|p| m.rm.is_sliced(*p)));
        assert!(begun.elapsed() < Duration::from_millis(100), "round {round}: {:?}", begun.elapsed());
        s.restart();
        until("all are found again", || known(&s, &pids));
        assert_eq!(s.process(pids[2]).unwrap().class, Class::Suspended, "round {round}");
    }
    assert!(somebody > 8, "there was hardly anybody to give back: {somebody}");
    let its_own = m.rm.clients() - pids.len();
    assert!(its_own > 0, "the service has a client");
    drop(s);
    until("all is given back", || m.suspended().is_empty() && m.rm.clients() == pids.len() && m.rm.logs() == 0);
    assert_eq!((m.rm.mappings(), m.rm.wrong_order()), (0, 0));
}

/// Its files are borrowed for a look into it, again and again while it is young; held on to, they would keep its memory.
#[test]
fn a_program_that_dies_takes_all_it_had_with_it_whenever_that_is() {
    let Some(mut m) = Machine::with_the_drivers_files(1) else { return };
    let stays = m.program(1000);
    let s = m.service();
    until("it is found", || known(&s, &[stays]));
    let mut random = fastrand::Rng::with_seed(9);
    for round in 0..20 {
        let clients = m.rm.clients();
        let pid = m.program(1000);
        let sleep = random.u64(0..300);
        std::thread::sleep(Duration::from_millis(sleep));
        let mut child = m.programs.pop().unwrap();
        assert_eq!(child.id(), pid);
        child.kill().unwrap();
        child.wait().unwrap();
        let begun = Instant::now();
        // A look that was under way may end first; the service makes a client for a moment now and then.
        until("what it had is gone", || m.rm.gpu_time(pid).is_none() && m.rm.clients() <= clients + 1);
        assert!(begun.elapsed() < Duration::from_millis(200), "round {round}, {sleep} ms: {:?}", begun.elapsed());
    }
    s.set(stays, Class::Suspended);
    until("it is steered as before", || m.suspended() == [stays]);
    s.connect().ask(&Request::Resume { pid: stays }).unwrap();
    until("and let on again", || m.suspended().is_empty());
}

/// What was opened for it would keep it from being reset.
#[test]
fn nothing_of_a_gpu_that_has_fallen_off_is_held_open() {
    let Some(mut m) = Machine::with_the_drivers_files(2) else { return };
    let pids = [1000, 2000].map(|us| m.program(us));
    let s = m.service();
    until("all are found", || known(&s, &pids));
    let opened = |file: &str| {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", s.pid())).unwrap();
        let of = |pid: u32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            files.filter(|f| std::fs::read_link(f.path()).is_ok_and(|to| to.ends_with(file))).count()
        };
        children.split_whitespace().map(|c| of(c.parse().unwrap())).sum::<usize>() + of(s.pid())
    };
    assert!(opened("nvidia0") >= 2 && opened("nvidia1") >= 2, "the service and a guardian have each open");
    let logs = m.rm.logs();
    m.rm.lose_gpu(1);
    until("it is told of", || !s.said("gpu1 has fallen off").is_empty());
    until("it is closed", || opened("nvidia1") == 0);
    assert!(opened("nvidia0") >= 2 && m.rm.logs() == logs - 1);
    let got = m.shares(&pids, Duration::from_secs(2));
    assert!((got[0] - 50.0).abs() < 4.0, "{got:?}");
}

fn start(kernel: &Kernel, prepare: impl FnOnce(&mut Command)) -> (bool, String) {
    let dir = tempfile::tempdir().unwrap();
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.arg("--socket").arg(dir.path().join("socket")).args(["--gpu", "0"]);
    kernel.put_in(&mut c).unwrap();
    prepare(&mut c);
    let out = c.output().unwrap();
    (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn what_it_cannot_steer_it_says_and_does_not_begin() {
    let unknown = FakeRm::new("999.1");
    let Ok(kernel) = Kernel::new(unknown.clone()) else {
        eprintln!("skipped: no model of the kernel's driver");
        return;
    };
    let (went, said) = start(&kernel, |_| {});
    assert!(!went && said.contains("999.1") && said.contains("not known"), "{said}");
    assert_eq!(unknown.clients(), 0, "a driver that is not known is asked nothing");
    // Root without the right that the log takes, as in a container.
    let rm = FakeRm::default();
    let kernel = Kernel::new(rm.clone()).unwrap();
    let (went, said) = start(&kernel, |c| {
        // SAFETY: a system call, with no memory.
        unsafe {
            c.pre_exec(|| {
                Ok(rustix::thread::remove_capability_from_bounding_set(rustix::thread::CapabilitySet::SYS_ADMIN)?)
            })
        };
    });
    assert!(!went && said.contains("log of context switches") && said.contains("insufficient permissions"), "{said}");
    assert!(rm.calls(forebay_rm::sys::CMD_BIND_LOG) == 0 && rm.clients() == 0);
    // No such GPU.
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.args(["--gpu", "7"]);
    kernel.put_in(&mut c).unwrap();
    let out = c.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("/dev/nvidia7"), "{said}");
}
