//! Finding, slicing and suspending other processes, on the fake; and what can be asked of a real driver, where one is.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_rm::fake::{DEFAULT_SLICE_US, FakeRm, Load};
use forebay_rm::{Client, Error, Host, Rm, Search, Target};
use proptest::prelude::*;

fn find(own: &Client, pid: u32) -> Target {
    Target::find(own, pid, &HashSet::new()).unwrap()
}

fn setup() -> (FakeRm, Arc<Client>) {
    let rm = FakeRm::default();
    // One kernel in flight: its queue runs dry after each, and the hardware moves on.
    rm.start(10, 4, 5, Load { kernel_us: 100, depth: 1, think_us: 20 });
    rm.start(20, 4, 5, Load::saturating(20_000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    (rm, own)
}

#[test]
fn a_process_is_found_with_all_it_has_and_nothing_of_others() {
    let (rm, own) = setup();
    let clients = rm.clients();
    let (a, b) = (find(&own, 10), find(&own, 20));
    for t in [&a, &b] {
        assert_eq!((t.groups().len(), t.channels().len()), (4, 20));
        assert!(t.groups().iter().all(|g| g.slice_us == DEFAULT_SLICE_US));
        assert!(t.calls < 3000, "{} calls", t.calls);
    }
    let of = |t: &Target| t.channels().iter().map(|h| h.client).collect::<HashSet<_>>();
    assert!(of(&a).is_disjoint(&of(&b)));
    // A channel hangs from a group of its own process.
    let parent = a.parent_of(&own, a.channels()[7]).unwrap();
    assert!(a.groups().iter().any(|g| g.handle.object == parent));
    assert_eq!(rm.clients(), clients);
    // A known client is not asked about, and nothing outside the narrow range is.
    let log = rm.log_lines();
    assert!(log < 2 * 128, "{log} lines in the kernel's log");
    assert!(matches!(Target::find(&own, 10, &of(&a)), Err(Error::NoChannels { pid: 10, .. })));
    assert!(matches!(Target::find(&own, 999, &HashSet::new()), Err(Error::Process { pid: 999, .. })));
}

/// RM numbers clients upwards for as long as the machine is up, and every program and every look at the GPU makes some.
#[test]
fn processes_are_found_however_many_clients_there_have_been() {
    let (rm, own) = setup();
    let many = || (0..500).for_each(|_| drop(Client::open(Arc::new(rm.clone()), 0).unwrap()));
    many();
    rm.start(30, 2, 3, Load::saturating(1000));
    let lines = rm.log_lines();
    assert_eq!(find(&own, 30).channels().len(), 6);
    assert!(rm.log_lines() - lines < 128);
    // One that is not near the newest any more is near our own, or was found before.
    many();
    assert_eq!(find(&own, 10).channels().len(), 20);
    let mut search = Search::default();
    let lost = Target::search(&own, 30, &HashSet::new(), &mut search);
    assert!(matches!(lost, Err(Error::NoChannels { pid: 30, .. })) && search.clients.is_empty());
    rm.start(40, 2, 3, Load::saturating(1000));
    Target::search(&own, 40, &HashSet::new(), &mut search).unwrap();
    assert_eq!(search.clients.len(), 1);
    many();
    rm.grow(40, 1, 4);
    let lines = rm.log_lines();
    search.nowhere_else = true;
    let grown = Target::search(&own, 40, &HashSet::new(), &mut search).unwrap();
    assert_eq!((grown.channels().len(), rm.log_lines() - lines), (10, 0));
}

#[test]
fn a_process_without_channels_tells_its_clients() {
    let (rm, own) = setup();
    rm.start(30, 0, 0, Load::IDLE);
    let mut search = Search::default();
    assert!(matches!(
        Target::search(&own, 30, &HashSet::new(), &mut search),
        Err(Error::NoChannels { pid: 30, files: 1, .. })
    ));
    assert_eq!(search.clients.len(), 1);
    let lines = rm.log_lines();
    search.nowhere_else = true;
    assert!(Target::search(&own, 30, &HashSet::new(), &mut search).is_err());
    rm.grow(30, 1, 2);
    assert_eq!(Target::search(&own, 30, &HashSet::new(), &mut search).unwrap().channels().len(), 2);
    assert_eq!(rm.log_lines(), lines);
    // Somebody else has its client by now.
    let known = search.clients.iter().copied().collect();
    assert!(Target::search(&own, 30, &known, &mut search).is_err());
}

/// A machine with two GPUs: one program uses both, one the first, one the second.
fn with_two() -> (FakeRm, [Arc<Client>; 2]) {
    let rm = FakeRm::with_gpus(2);
    rm.start(10, 2, 3, Load::saturating(1000));
    rm.use_gpu(1, 10, 1, 4, Load::saturating(1000));
    rm.start(20, 1, 5, Load::saturating(1000));
    rm.start(30, 0, 0, Load::IDLE);
    rm.use_gpu(1, 30, 1, 5, Load::saturating(1000));
    let open = |gpu| Arc::new(Client::open(Arc::new(rm.clone()), gpu).unwrap());
    let own = [open(0), open(1)];
    (rm, own)
}

#[test]
fn of_a_process_on_two_gpus_only_what_it_has_on_this_one_is_found() {
    let (rm, own) = with_two();
    let has = |gpu: usize, pid| {
        let t = find(&own[gpu], pid);
        (t.groups().len(), t.channels().len())
    };
    assert_eq!([has(0, 10), has(1, 10), has(0, 20), has(1, 30)], [(2, 6), (1, 4), (1, 5), (1, 5)]);
    let none = |gpu: usize, pid| matches!(Target::find(&own[gpu], pid, &HashSet::new()), Err(Error::NoChannels { .. }));
    assert!(none(1, 20) && none(0, 30));
    let progress = |pid| {
        let before = [0, 1].map(|gpu| rm.gpu_time_on(gpu, pid).unwrap());
        rm.run(500_000);
        [0, 1].map(|gpu| rm.gpu_time_on(gpu, pid).unwrap() - before[gpu] > 0)
    };
    assert_eq!(progress(10), [true, true]);
    let off = find(&own[0], 10).suspend(&own[0]).unwrap();
    assert_eq!(progress(10), [false, true]);
    let short = find(&own[1], 10).slice(&own[1], 100).unwrap();
    let slices = |gpu: usize| find(&own[gpu], 10).groups().iter().map(|g| g.slice_us).collect::<HashSet<_>>();
    assert_eq!([slices(0), slices(1)], [HashSet::from([DEFAULT_SLICE_US]), HashSet::from([100])]);
    drop((off, short));
    assert_eq!(progress(10), [true, true]);
    assert!(!rm.is_sliced(10));
}

/// The driver itself refuses a list with a channel of another GPU; so it has to be known whose each one is.
#[test]
fn a_list_with_another_gpus_channel_is_refused_and_changes_nothing() {
    let (rm, own) = with_two();
    let elsewhere = find(&own[1], 30);
    assert!(elsewhere.suspend(&own[0]).is_err());
    assert!(!rm.is_suspended(30));
}

/// Then nobody is touched, and what needs no answer (memory in the processor's hands) goes on.
#[test]
fn where_the_driver_does_not_say_whose_a_channel_is_nobody_is_found() {
    let (rm, own) = with_two();
    rm.be_silent_of_gpus();
    let found = Target::find(&own[0], 10, &HashSet::new());
    assert!(matches!(&found, Err(e @ Error::WhichGpu { .. }) if e.to_string().contains("--level lock")), "{found:?}");
    assert!(Client::open(Arc::new(rm.clone()), 1).is_ok());
    // With one GPU there is nothing to say.
    let (rm, own) = setup();
    rm.be_silent_of_gpus();
    assert_eq!(find(&own, 10).channels().len(), 20);
}

#[test]
fn on_a_machine_with_one_gpu_nobody_is_asked_whose_a_channel_is() {
    use forebay_rm::sys::CMD_GPU_ID;
    let (rm, own) = setup();
    find(&own, 10);
    assert_eq!(rm.calls(CMD_GPU_ID), 0);
    let (rm, own) = with_two();
    find(&own[0], 10);
    assert!(rm.calls(CMD_GPU_ID) > 0);
}

#[test]
fn a_suspended_process_makes_no_progress_until_it_is_resumed_or_the_guard_is_dropped() {
    let (rm, own) = setup();
    let b = find(&own, 20);
    let progress = |us| {
        let before = rm.gpu_time(20).unwrap();
        rm.run(us);
        rm.gpu_time(20).unwrap() - before
    };
    assert!(progress(100_000) > 20_000);
    let s = b.suspend(&own).unwrap();
    assert_eq!(progress(1_000_000), 0);
    s.resume().unwrap();
    assert!(progress(100_000) > 20_000);
    let s = b.suspend(&own).unwrap();
    assert_eq!(progress(100_000), 0);
    drop(s);
    assert!(progress(100_000) > 20_000);
}

#[test]
fn what_nobody_undoes_stays_and_another_client_can_undo_it() {
    let (rm, own) = setup();
    let b = find(&own, 20);
    std::mem::forget(b.suspend(&own).unwrap());
    drop(own);
    let before = rm.gpu_time(20).unwrap();
    rm.run(100_000);
    assert_eq!(rm.gpu_time(20).unwrap(), before, "the driver gave the channels back by itself");
    // A guardian with a client of its own.
    let guardian = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let b = find(&guardian, 20);
    assert!(rm.is_suspended(20));
    b.release(&guardian).unwrap();
    assert!(!rm.is_suspended(20));
    rm.run(100_000);
    assert!(rm.gpu_time(20).unwrap() > before);
}

#[test]
fn slices_are_set_for_all_groups_bounded_and_given_back() {
    let (_rm, own) = setup();
    let b = find(&own, 20);
    let slices = || find(&own, 20).groups().iter().map(|g| g.slice_us).collect::<HashSet<_>>();
    for bad in [0, 1, 49, 100_001, u64::MAX] {
        assert!(matches!(b.slice(&own, bad), Err(Error::Slice { .. })));
    }
    let s = b.slice(&own, 200).unwrap();
    assert_eq!(slices(), HashSet::from([200]));
    s.restore().unwrap();
    assert_eq!(slices(), HashSet::from([DEFAULT_SLICE_US]));
    let s = b.slice(&own, 500).unwrap();
    drop(s);
    assert_eq!(slices(), HashSet::from([DEFAULT_SLICE_US]));
}

#[test]
fn a_short_slice_of_the_heavy_process_lets_the_interactive_one_through() {
    // The measured pattern: default slices leave a saturating process with short kernels about a twentieth of the GPU.
    let share = |slice: Option<u64>| {
        let (rm, own) = setup();
        let b = find(&own, 20);
        let s = slice.map(|us| b.slice(&own, us).unwrap());
        rm.run(2_000_000);
        let (a, b) = (rm.gpu_time(10).unwrap() as f64, rm.gpu_time(20).unwrap() as f64);
        drop(s);
        a / (a + b)
    };
    let (default, short) = (share(None), share(Some(200)));
    assert!(default < 0.15 && short > 3.0 * default, "{default} by default, {short} with slices of 200 µs");
}

#[test]
fn time_division_gives_every_process_its_window_with_fewer_switches() {
    let (rm, own) = setup();
    let targets = [find(&own, 10), find(&own, 20)];
    rm.run(1_000_000);
    let default = rm.switches();
    let times = || [10, 20].map(|p| rm.gpu_time(p).unwrap());
    let before = times();
    // 40 % and 60 % of 50 ms, twenty times.
    for _ in 0..20 {
        for (i, window) in [(0, 20_000), (1, 30_000)] {
            let other = targets[1 - i].suspend(&own).unwrap();
            rm.run(window);
            other.resume().unwrap();
        }
    }
    let got = times();
    let [a, b] = [0, 1].map(|i| (got[i] - before[i]) as f64);
    assert!((a / (a + b) - 0.4).abs() < 0.08, "{}", a / (a + b));
    assert!(rm.switches() - default < default / 4, "{} and {default}", rm.switches() - default);
}

#[test]
fn a_process_that_dies_is_gone_whatever_was_done_to_it() {
    let (rm, own) = setup();
    let b = find(&own, 20);
    let (s, l) = (b.suspend(&own).unwrap(), b.slice(&own, 100).unwrap());
    rm.kill(20);
    // No duplicate of its file was kept, so its client, and its memory, went with it.
    assert_eq!(rm.clients(), 2);
    assert_eq!(rm.gpu_time(20), None);
    assert!(s.resume().is_err());
    assert!(matches!(l.restore(), Err(Error::Process { pid: 20, .. })));
    drop(b.suspend(&own));
    let a = find(&own, 10);
    rm.run(10_000);
    assert!(rm.gpu_time(10).unwrap() > 0 && !a.channels().is_empty());
}

#[test]
fn an_unknown_driver_and_a_missing_one_are_refused_without_a_change() {
    for version in ["590.10", "575.64", "550.163.01", "535.261.03", "57", "", "580a.1"] {
        let rm = FakeRm::new(version);
        assert!(matches!(Client::open(Arc::new(rm.clone()), 0), Err(Error::UnknownDriver { .. })), "{version}");
        assert_eq!(rm.clients(), 0);
    }
    assert!(matches!(Client::open(Arc::new(FakeRm::default()), 7), Err(Error::NoDriver { .. })));
    for version in ["555.58.02", "570.211.01", "580.95.05"] {
        let rm = FakeRm::new(version);
        let client = Client::open(Arc::new(rm.clone()), 0).unwrap_or_else(|e| panic!("{version}: {e}"));
        drop(client);
        assert_eq!(rm.clients(), 0);
    }
}

#[test]
fn the_file_decides_not_the_caller() {
    use forebay_rm::sys::{CMD_HANDLE_INFO, Control, HandleInfo, INFO_CLASS};
    let (rm, own) = setup();
    let b = find(&own, 20);
    let client = b.channels()[0].client;
    let ask = |file: &dyn forebay_rm::ControlFile| {
        let mut call = Control { client, object: client, cmd: CMD_HANDLE_INFO, ..Control::default() };
        let mut p = HandleInfo { object: client, index: INFO_CLASS, answer: 0 };
        file.control(&mut call, bytes(&mut p)).unwrap();
        call.status
    };
    assert_eq!(ask(&*rm.files_of(20).unwrap()[0]), 0);
    assert_ne!(ask(&*rm.files_of(10).unwrap()[0]), 0);
    assert_ne!(ask(&*rm.open(0).unwrap()), 0);
    // Parameters of another size are refused, not read past.
    let mut call = Control { client, object: client, cmd: CMD_HANDLE_INFO, ..Control::default() };
    rm.files_of(20).unwrap()[0].control(&mut call, &mut [0; 3]).unwrap();
    assert_ne!(call.status, 0);
}

#[test]
fn a_gpu_that_falls_off_says_so_of_itself_alone() {
    let rm = FakeRm::with_gpus(2);
    rm.start(10, 1, 2, Load::saturating(1000));
    rm.use_gpu(1, 10, 1, 2, Load::saturating(1000));
    let [own, other] = [0, 1].map(|gpu| Arc::new(Client::open(Arc::new(rm.clone()), gpu).unwrap()));
    let [here, there] = [&own, &other].map(|c| find(c, 10));
    let off = there.suspend(&other).unwrap();
    assert_eq!((own.lost(), other.lost()), (None, None));
    rm.lose_gpu(1);
    let lost = |e: forebay_rm::Error| e.is_lost();
    assert!(there.suspend(&other).is_err_and(lost) && there.release(&other).is_err_and(lost));
    assert!(there.slice(&other, 100).is_err_and(lost) && off.resume().is_err_and(lost));
    assert!(Target::find(&other, 10, &HashSet::new()).is_err_and(lost));
    assert!(Client::open(Arc::new(rm.clone()), 1).is_err_and(lost));
    assert!(other.lost().unwrap().contains("the GPU is lost"));
    // Whoever only asks hears it, too.
    let asks = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    assert_eq!(asks.lost(), None);
    // The process is looked into and steered on the other one, though it has things on both.
    let again = find(&own, 10);
    assert_eq!(again.channels(), here.channels());
    let off = again.suspend(&own).unwrap();
    assert!(rm.is_suspended_on(0, 10));
    off.resume().unwrap();
    let before = [0, 1].map(|gpu| rm.gpu_time_on(gpu, 10).unwrap());
    rm.run(10_000);
    let after = [0, 1].map(|gpu| rm.gpu_time_on(gpu, 10).unwrap());
    assert!(after[0] > before[0] && after[1] == before[1], "{before:?} {after:?}");
    rm.lose_gpu(0);
    assert!(asks.lost().is_some());
}

fn bytes<T: Copy>(p: &mut T) -> &mut [u8] {
    // SAFETY: the structs of `sys` are plain bytes without hidden padding.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(p).cast(), size_of::<T>()) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    /// Whatever is done in whatever order, once all guards are gone everybody has what they had.
    #[test]
    fn everything_taken_is_given_back(steps in proptest::collection::vec((0usize..3, 0usize..3, 50u64..5000), 1..20)) {
        let rm = FakeRm::default();
        let pids = [10, 20, 30];
        for (i, pid) in pids.into_iter().enumerate() {
            rm.start(pid, 1 + i, 1 + 40 * i, Load::saturating(1000));
        }
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        let targets = pids.map(|p| find(&own, p));
        {
            let (mut off, mut slow) = (Vec::new(), Vec::new());
            for (who, what, us) in steps {
                match what {
                    0 => off.push(targets[who].suspend(&own).unwrap()),
                    1 => slow.push(targets[who].slice(&own, us).unwrap()),
                    _ => rm.run(us),
                }
            }
        }
        let before = pids.map(|p| rm.gpu_time(p).unwrap());
        rm.run(100_000);
        for (pid, before) in pids.into_iter().zip(before) {
            prop_assert!(rm.gpu_time(pid).unwrap() > before, "{} is still off", pid);
            prop_assert!(find(&own, pid).groups().iter().all(|g| g.slice_us == DEFAULT_SLICE_US));
        }
    }
}

/// On a machine with the driver: our own client opens, answers and goes. Nothing of anybody else is touched.
#[test]
fn the_real_driver_answers_or_is_refused_cleanly() {
    match Client::open(Arc::new(Host), 0) {
        Ok(own) => assert!(own.handle() >= forebay_rm::sys::FIRST_CLIENT && own.card().valid == 1),
        Err(e @ (Error::NoDriver { .. } | Error::UnknownDriver { .. })) => eprintln!("skipped: {e}"),
        Err(e) => panic!("{e}"),
    }
    // Process 1 has no channels, and looking at our own files finds nothing of the driver.
    let none = Host.files_of(std::process::id()).unwrap();
    assert!(none.is_empty());
    assert!(matches!(Host.files_of(u32::MAX), Err(Error::Process { .. })));
}
