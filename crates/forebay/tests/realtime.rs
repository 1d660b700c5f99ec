//! Real-time streams: what they get, that others are spared, and that everything is given back.

use std::sync::Arc;
use std::time::Duration;

use forebay::Kind;
use forebay::hal::{Buffer, Device, Error as DeviceError, discover};
use forebay::transfer::{Bound, Budget, Curves, Direction, Engine, Host, RealTime, Scheduling};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

fn device() -> Arc<dyn Device> {
    discover(&[Kind::Cpu]).0.remove(0)
}

fn unmeasured(d: &Arc<dyn Device>) -> Arc<Engine> {
    Engine::with_curves(d.clone(), Curves::default())
}

fn invalid(r: Result<(), forebay::Error>) -> String {
    match r {
        Err(forebay::Error::Device(DeviceError::Invalid { what, .. })) => what,
        other => panic!("{other:?}"),
    }
}

fn scheduling_now() -> Scheduling {
    // SAFETY: plain calls about the calling thread; the parameter is valid.
    unsafe {
        let mut param: libc::sched_param = std::mem::zeroed();
        libc::sched_getparam(0, &mut param);
        match libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK {
            libc::SCHED_FIFO => Scheduling::Fifo(param.sched_priority),
            libc::SCHED_RR => Scheduling::RoundRobin(param.sched_priority),
            libc::SCHED_DEADLINE => Scheduling::Deadline,
            _ => Scheduling::Nice(libc::getpriority(libc::PRIO_PROCESS, 0)),
        }
    }
}

/// Writes until a stream has used up its budget once more.
fn overrun(stream: &mut RealTime, memory: &Buffer, data: &[u8]) {
    let before = stream.overruns();
    for _ in 0..2000 {
        stream.write(memory, 0, data).unwrap();
        if stream.overruns() > before {
            return;
        }
    }
    panic!("the budget was not used up");
}

#[test]
fn a_real_time_stream_says_what_it_got_keeps_its_budget_and_gives_everything_back() {
    let d = device();
    let engine = unmeasured(&d);
    let before = scheduling_now();
    let memory = d.alloc(8 << 20).unwrap();
    let budget =
        Budget { run: Duration::from_millis(40), period: Duration::from_millis(1500), spin: Duration::from_millis(1) };
    let mut stream = engine.real_time(budget).unwrap();
    let got = stream.protection();
    eprintln!("scheduled as {}, ring locked: {}", got.scheduling, got.locked);
    assert_eq!(got.scheduling, scheduling_now());
    assert!(matches!(got.scheduling, Scheduling::Fifo(_)) || got.scheduling == before || got.locked);
    let mut pinned = stream.pinned(1 << 20).unwrap();
    pinned.fill(9);
    stream.write(&memory, 0, &pinned).unwrap();
    assert_eq!((scheduling_now(), stream.overruns()), (got.scheduling, 0));
    // Until the budget is used up: then it goes on, as everybody else does.
    let large = vec![3u8; 8 << 20];
    overrun(&mut stream, &memory, &large);
    assert_eq!((scheduling_now(), stream.overruns()), (before, 1));
    let mut back = vec![0; 8 << 20];
    stream.read(&memory, 0, &mut back).unwrap();
    assert!(back == large);
    // A new period, a new budget.
    std::thread::sleep(Duration::from_millis(1600));
    stream.write(&memory, 0, &pinned).unwrap();
    assert_eq!((scheduling_now(), stream.overruns()), (got.scheduling, 1));
    drop(stream);
    assert_eq!(scheduling_now(), before);
}

#[test]
fn a_real_time_stream_that_is_bound_answers_its_thread_and_leaves_others_alone() {
    let d = device();
    let (engine, memory) = (unmeasured(&d), d.alloc(64).unwrap());
    let before = scheduling_now();
    // SAFETY: eight bytes that nobody else has.
    let write = |b: &mut Bound, mut data: [u8; 8]| unsafe {
        b.transfer(Direction::ToDevice, &memory, 0, data.as_mut_ptr(), 8, Host::Pageable)
    };
    let mut bound = Bound::real_time(&engine, Budget::default()).unwrap();
    let got = bound.protection().unwrap().0;
    write(&mut bound, [1; 8]).unwrap();
    let mut bound = std::thread::scope(|s| {
        let elsewhere = s.spawn(|| {
            let mine = scheduling_now();
            let what = invalid(write(&mut bound, [2; 8]));
            assert!(what.contains("the thread that made it"), "{what}");
            invalid(bound.stream().map(drop));
            assert_eq!(scheduling_now(), mine);
            bound
        });
        elsewhere.join().unwrap()
    });
    assert_eq!(scheduling_now(), got.scheduling);
    let mut back = [0u8; 8];
    bound.stream().unwrap().read(&memory, 0, &mut back[..]).unwrap();
    assert_eq!(back, [1; 8], "nothing of what was refused");
    drop(bound);
    assert_eq!(scheduling_now(), before);
    // Dropped elsewhere it gives its own thread the priority back, and leaves that one alone.
    let dropped_elsewhere = || {
        let bound = Bound::real_time(&engine, Budget::default()).unwrap();
        assert_eq!(scheduling_now(), got.scheduling);
        std::thread::scope(|s| {
            let elsewhere = s.spawn(|| {
                let mine = scheduling_now();
                drop(bound);
                assert_eq!(scheduling_now(), mine);
            });
            elsewhere.join().unwrap();
        });
        assert_eq!(scheduling_now(), before);
    };
    std::thread::scope(|s| s.spawn(dropped_elsewhere).join().unwrap());
    // A thread that has ended has nothing to be given.
    let left =
        std::thread::scope(|s| s.spawn(|| Bound::real_time(&engine, Budget::default()).unwrap()).join().unwrap());
    drop(left);
    assert_eq!(scheduling_now(), before);
    // An ordinary one is anybody's.
    let mut bound = Bound::ordinary(&engine).unwrap();
    assert_eq!(bound.protection(), None);
    std::thread::scope(|s| s.spawn(|| write(&mut bound, [3; 8])).join().unwrap()).unwrap();
}

/// Bytes that this process has locked into memory.
fn locked_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmLck:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The nice value of a process that only runs this: as somebody else, who may not be less nice (-5, where root may allow
/// that, or as it is), and lock so many bytes. None in the process that has started it.
fn as_somebody_else(name: &str, memory: u64) -> Option<i32> {
    const CHILD: &str = "FOREBAY_TEST_SOMEBODY";
    if let Ok(nice) = std::env::var(CHILD) {
        return nice.parse().ok();
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process with other limits");
        return None;
    }
    let prlimit = || std::process::Command::new("prlimit");
    let allowed = prlimit().args(["--nice=25:25", "true"]).output().is_ok_and(|o| o.status.success());
    // SAFETY: takes no memory.
    let own = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    let (nice, limit) = if allowed { (-5, "--nice=25:25") } else { (own, "--nice=0:0") };
    let mut c = prlimit();
    c.args(["--rtprio=0:0", limit, &format!("--memlock={memory}:{memory}")]);
    c.args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]).arg(std::env::current_exe().unwrap());
    c.args(["--exact", name, "--nocapture"])
        .env(CHILD, nice.to_string())
        .env("HOME", "/nonexistent")
        .env("FOREBAY_CACHE", "off");
    let out = c.output().expect("prlimit and setpriv are part of every Linux");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
    None
}

#[test]
fn without_real_time_priority_a_stream_is_as_nice_as_it_may_be() {
    let Some(nice) = as_somebody_else("without_real_time_priority_a_stream_is_as_nice_as_it_may_be", 0) else {
        return;
    };
    let before = scheduling_now();
    let d = device();
    let mut stream = unmeasured(&d).real_time(Budget::default()).unwrap();
    assert_eq!((stream.protection().scheduling, scheduling_now()), (Scheduling::Nice(nice), Scheduling::Nice(nice)));
    assert!(!stream.protection().locked && !stream.pinned(1 << 20).unwrap().is_locked());
    let memory = d.alloc(64).unwrap();
    stream.write(&memory, 0, &vec![1; 64]).unwrap();
    drop(stream);
    assert_eq!(scheduling_now(), before);
}

#[test]
fn locked_memory_is_given_back() {
    // Room for one at a time, so that what is kept would be missed.
    const BYTES: usize = 1 << 20;
    const ROOM: u64 = 4 << 20;
    let Some(_) = as_somebody_else("locked_memory_is_given_back", ROOM) else { return };
    let d = device();
    let engine = unmeasured(&d);
    let before = locked_bytes();
    for round in 0..8 {
        let stream = engine.real_time(Budget::default()).unwrap();
        assert!(stream.protection().locked, "round {round}");
        let alone = locked_bytes();
        let mut pinned = stream.pinned(BYTES).unwrap();
        assert!(pinned.is_locked() && pinned.lock(), "round {round}");
        assert!(locked_bytes() >= alone + BYTES as u64);
        drop(pinned);
        assert_eq!(locked_bytes(), alone, "round {round}");
        // A page in which two have a part is locked until both have gone.
        let [first, second] = [(); 2].map(|()| stream.pinned(1000).unwrap());
        drop(first);
        assert!(locked_bytes() > alone, "round {round}");
        drop((second, stream));
        assert_eq!(locked_bytes(), before, "round {round}");
    }
}

/// A budget that is soon used up, and there again after a second and a half.
const SHORT: Budget =
    Budget { run: Duration::from_millis(40), period: Duration::from_millis(1500), spin: Duration::from_millis(1) };

/// Takes from the calling thread the right to schedule as it likes, as nobody but root has it; whether it had that.
fn without_sys_nice() -> bool {
    let mut sets = capabilities(None).unwrap();
    let had = sets.effective.contains(CapabilitySet::SYS_NICE);
    sets.effective.remove(CapabilitySet::SYS_NICE);
    set_capabilities(None, sets).unwrap();
    had
}

#[test]
fn who_may_not_take_everything_back_gets_the_priority_back_all_the_same() {
    // Whoever is promoted by a limit only (`rtprio`) may be ordinary again, but not take back that its children are: the kernel
    // refuses both together. Limits cannot be raised everywhere; to lose the right meanwhile is the same.
    let d = device();
    let (engine, memory) = (unmeasured(&d), d.alloc(8 << 20).unwrap());
    let one = |over_budget: bool| {
        let before = scheduling_now();
        let mut stream = engine.real_time(SHORT).unwrap();
        let got = stream.protection().scheduling;
        if !without_sys_nice() || got == before {
            return eprintln!("skipped: the system gives us no real-time priority");
        }
        if over_budget {
            overrun(&mut stream, &memory, &vec![3u8; 8 << 20]);
            assert_eq!(scheduling_now(), before);
        }
        drop(stream);
        assert_eq!(scheduling_now(), before);
    };
    for over_budget in [false, true] {
        std::thread::scope(|s| s.spawn(|| one(over_budget)).join().unwrap());
    }
}

#[test]
fn streams_of_one_thread_share_its_priority() {
    let d = device();
    let (engine, memory) = (unmeasured(&d), d.alloc(8 << 20).unwrap());
    let (before, large) = (scheduling_now(), vec![3u8; 8 << 20]);
    let long = Budget { run: Duration::from_secs(60), period: Duration::from_secs(60), ..SHORT };
    let mut first = engine.real_time(SHORT).unwrap();
    let mut second = engine.real_time(long).unwrap();
    let got = first.protection().scheduling;
    assert_eq!((second.protection().scheduling, scheduling_now()), (got, got));
    // One that is over its budget takes the thread along, however the others are.
    overrun(&mut first, &memory, &large);
    second.write(&memory, 0, &large).unwrap();
    let third = engine.real_time(long).unwrap();
    assert_eq!(scheduling_now(), before);
    drop(third);
    assert_eq!(scheduling_now(), before);
    // In the order in which they were made, as a list's are dropped.
    drop(first);
    assert_eq!(scheduling_now(), got);
    drop(second);
    assert_eq!(scheduling_now(), before);
}

/// SCHED_DEADLINE for the calling thread: 10 ms of 100; whether the system allows it.
fn set_deadline() -> bool {
    // size and policy, flags, nice and priority, runtime, deadline, period (sched_setattr(2)).
    let attributes: [u64; 6] = [48 | (libc::SCHED_DEADLINE as u64) << 32, 0, 0, 10_000_000, 100_000_000, 100_000_000];
    // SAFETY: the attributes have the size that they say, and are valid for the call; 0 is this thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attributes.as_ptr(), 0) == 0 }
}

#[test]
fn a_thread_that_has_better_keeps_it() {
    let set = |policy, priority| {
        // SAFETY: all zeros is a valid value; the parameters are valid for the call.
        unsafe {
            let mut param: libc::sched_param = std::mem::zeroed();
            param.sched_priority = priority;
            libc::sched_setscheduler(0, policy, &param) == 0
        }
    };
    type Set<'a> = &'a (dyn Fn() -> bool + Sync);
    let cases: [(Set<'_>, Scheduling, Scheduling); 5] = [
        (&|| set(libc::SCHED_FIFO, 50), Scheduling::Fifo(50), Scheduling::Fifo(50)),
        (&|| set(libc::SCHED_RR, 30), Scheduling::RoundRobin(30), Scheduling::RoundRobin(30)),
        (&set_deadline, Scheduling::Deadline, Scheduling::Deadline),
        (&|| set(libc::SCHED_FIFO, 1), Scheduling::Fifo(1), Scheduling::Fifo(20)),
        (&|| set(libc::SCHED_RR, 1), Scheduling::RoundRobin(1), Scheduling::Fifo(20)),
    ];
    let d = device();
    let engine = unmeasured(&d);
    for (set, before, with) in cases {
        let one = || {
            if !set() {
                return eprintln!("skipped: the system does not allow {before}");
            }
            assert_eq!(scheduling_now(), before);
            let stream = engine.real_time(Budget::default()).unwrap();
            assert_eq!((stream.protection().scheduling, scheduling_now()), (with, with));
            drop(stream);
            assert_eq!(scheduling_now(), before);
        };
        std::thread::scope(|s| s.spawn(one).join().unwrap());
    }
}

#[test]
fn a_thread_that_was_changed_meanwhile_stays_so() {
    let d = device();
    let engine = unmeasured(&d);
    let one = || {
        let stream = engine.real_time(Budget::default()).unwrap();
        // Nobody else's, and allowed to everybody.
        // SAFETY: plain calls about the calling thread; the parameter is valid.
        unsafe {
            let param: libc::sched_param = std::mem::zeroed();
            assert_eq!(libc::sched_setscheduler(0, libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, &param), 0);
            assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, 7), 0);
        }
        drop(stream);
        assert_eq!(scheduling_now(), Scheduling::Nice(7));
    };
    std::thread::scope(|s| s.spawn(one).join().unwrap());
}
