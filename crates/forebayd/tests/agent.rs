//! The agent by itself, on the fake of the driver, in the model's own time.

use std::sync::Arc;

use forebay_policy::share::Class;
use forebay_rm::fake::{FakeRm, Load};
use forebay_rm::sys::{CMD_DISABLE_CHANNELS, CMD_FLUSH, CMD_HANDLE_INFO, CMD_SET_TIMESLICE};
use forebay_rm::{Client, Target};
use forebayd::accounts::LogMeter;
use forebayd::agent::{Agent, BURST_WINDOW_NS, CHECK_NS, LET_ON_NS};

/// Lets `us` pass in the agent's windows; the longest of them, ns.
fn pass(rm: &FakeRm, agent: &mut Agent<LogMeter>, us: u64) -> u64 {
    let (mut longest, mut begun) = (0, rm.now_us());
    let end = begun + us;
    while rm.now_us() < end {
        let wanted = agent.begin().map_or(25_000_000, |w| w.length_ns);
        rm.run((begun + wanted / 1000).min(end).saturating_sub(rm.now_us()));
        // What the agent needs for the end of a window is the next one's time.
        let now = rm.now_us();
        agent.end((now - begun) * 1000);
        (longest, begun) = (longest.max(wanted), now);
    }
    longest
}

#[test]
fn one_that_comes_back_at_once_has_the_gpu_to_itself_while_its_reserve_lasts_and_no_longer() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load { kernel_us: 100, depth: 1, think_us: 20 });
    rm.start(20, 1, 1, Load::saturating(20_000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Interactive, 0).unwrap();
    agent.adopt(20, Class::Background, 0).unwrap();
    // Until it is known for what it is.
    pass(&rm, &mut agent, 60_000);
    rm.latencies(10);
    let before = rm.gpu_time(20).unwrap();
    assert_eq!(pass(&rm, &mut agent, 250_000), BURST_WINDOW_NS);
    let mut took = rm.latencies(10);
    took.sort_unstable();
    let at = |q: usize| took[took.len() * q / 100];
    // Alone it takes 100 µs; with the driver's own turns it would wait for 2 ms each time.
    assert!(took.len() > 1500 && at(99) <= 120, "{} times, {} µs, {} µs", took.len(), at(98), at(99));
    assert!(rm.gpu_time(20).unwrap() - before < 25_000, "the other one had {} µs", rm.gpu_time(20).unwrap() - before);
    // In the long run a normal process beside it has what the reserve leaves it, and so has it.
    agent.adopt(20, Class::Normal, 0).unwrap();
    let had = [10, 20].map(|pid| rm.gpu_time(pid).unwrap());
    pass(&rm, &mut agent, 10_000_000);
    let had = [0, 1].map(|i| rm.gpu_time([10, 20][i]).unwrap() - had[i]);
    assert!(had.iter().all(|us| *us > 2_500_000), "{had:?} µs of 10 s");
}

/// Programs whose queues run dry after each kernel, so that slices are no shares.
fn one_at_a_time(kernel_us: u64) -> Load {
    Load { kernel_us, depth: 1, think_us: 1 }
}

/// On an H200 taking somebody off takes the driver 0.7 ms, letting somebody on 0.3, setting slices 1.2, and bringing the log up to
/// the moment 0.2: with fifty windows a second a sixteenth of a core, however many there are; with turns a five-hundredth.
#[test]
fn the_driver_is_asked_no_more_often_when_there_are_many_and_not_at_all_for_nobody() {
    let rm = FakeRm::default();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    let pids = 10..20;
    for pid in pids.clone() {
        rm.start(pid, 1, 1, one_at_a_time(900));
        agent.adopt(pid, Class::Normal, 0).unwrap();
    }
    let asked = |cmd| rm.calls(cmd);
    // Until all are known to have work.
    pass(&rm, &mut agent, 1_000_000);
    let ten_seconds = |agent: &mut Agent<LogMeter>| {
        let kinds = [CMD_DISABLE_CHANNELS, CMD_FLUSH, CMD_SET_TIMESLICE];
        let before = kinds.map(asked);
        let had: Vec<u64> = pids.clone().map(|pid| rm.gpu_time(pid).unwrap()).collect();
        pass(&rm, agent, 10_000_000);
        for (pid, had) in pids.clone().zip(had) {
            let had = rm.gpu_time(pid).unwrap() - had;
            assert!(had.abs_diff(1_000_000) < 50_000, "{pid}: {had} µs");
        }
        [0, 1, 2].map(|i| asked(kinds[i]) - before[i])
    };
    let [switches, flushes, slices] = ten_seconds(&mut agent);
    // One off and one on for each window, and now and then everybody who should be on.
    assert!((950..=1080).contains(&switches) && (480..=530).contains(&flushes), "{switches} and {flushes} in 10 s");
    assert_eq!(slices, 0);
    // Each of them is seen to fill the turns that it has beside another, at the latest after four seconds of its windows.
    pids.clone().for_each(|pid| rm.set_load(pid, Load::saturating(3000)));
    pass(&rm, &mut agent, 100_000_000);
    let [switches, flushes, slices] = ten_seconds(&mut agent);
    assert!(switches <= 25 && flushes <= 45 && slices <= 10, "{switches}, {flushes} and {slices} in 10 s");
    // Nobody has work any more: whoever was last holds the GPU in the log's eyes, and who comes is to be noticed.
    pids.clone().for_each(|pid| rm.set_load(pid, Load::IDLE));
    pass(&rm, &mut agent, 3_000_000);
    let before = [CMD_DISABLE_CHANNELS, CMD_FLUSH].map(asked);
    pass(&rm, &mut agent, 4_000_000);
    assert!(asked(CMD_DISABLE_CHANNELS) - before[0] <= 10 && asked(CMD_FLUSH) - before[1] <= 52);
    // And one has again: soon enough.
    rm.set_load(13, Load::saturating(3000));
    rm.set_load(14, Load::saturating(3000));
    let before = rm.gpu_time(13).unwrap();
    pass(&rm, &mut agent, 1_000_000);
    let had = rm.gpu_time(13).unwrap() - before;
    assert!(had.abs_diff(500_000) < 60_000, "{had} µs of a second");
    // There is nobody.
    pids.for_each(|pid| agent.forget(pid));
    let before = [CMD_DISABLE_CHANNELS, CMD_FLUSH].map(asked);
    pass(&rm, &mut agent, 4_000_000);
    assert_eq!([CMD_DISABLE_CHANNELS, CMD_FLUSH].map(asked), before);
}

/// A monitor has the driver open all the time, and never a channel; a program has none yet.
#[test]
fn whoever_has_no_channels_is_looked_for_seldom_and_taken_in_once_it_has_some() {
    let rm = FakeRm::default();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own.clone()).unwrap());
    rm.start(10, 0, 0, Load::IDLE);
    rm.start(20, 0, 0, Load::IDLE);
    let mut looks = |pid: u32, n: u32| {
        let lines = rm.log_lines();
        let found = (1..=n).find(|_| agent.adopt(pid, Class::Normal, 0).is_ok());
        (found, rm.log_lines() - lines)
    };
    let (found, lines) = looks(10, 1000);
    assert!(found.is_none() && lines < 40 * 128, "{found:?}, {lines} lines for a thousand looks");
    assert!(looks(10, 1000).1 < 12 * 128);
    assert_eq!(looks(20, 3).0, None);
    rm.grow(20, 1, 2);
    assert_eq!(looks(20, 1).0, Some(1));
    rm.grow(10, 1, 2);
    assert!(looks(10, 4).0.is_some());
    // Its number is another one's now, who is looked for as everybody is.
    agent.forget(10);
    rm.kill(10);
    rm.start(10, 1, 1, Load::saturating(1000));
    agent.adopt(10, Class::Normal, 0).unwrap();
}

/// Two that fill turns, and a suspended one.
fn two_in_turns() -> (FakeRm, Agent<LogMeter>) {
    let rm = FakeRm::default();
    for pid in [10, 20, 30] {
        rm.start(pid, 1, 2, Load::saturating(1000));
    }
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Suspended, 0).unwrap();
    agent.adopt(20, Class::Custom(250_000), 0).unwrap();
    agent.adopt(30, Class::Normal, 0).unwrap();
    pass(&rm, &mut agent, 3_000_000);
    assert!(agent.has_turns() && rm.is_sliced(20) && rm.is_suspended(10));
    (rm, agent)
}

/// The same, with looks for processes in between, as the service has them.
fn pass_with(rm: &FakeRm, agent: &mut Agent<LogMeter>, us: u64, processes: &[(u32, Class)]) {
    const LOOK_US: u64 = 150_000;
    for _ in 0..us.div_ceil(LOOK_US) {
        pass(rm, agent, LOOK_US);
        for (pid, class) in processes {
            agent.adopt(*pid, *class, 0).unwrap();
        }
    }
}

/// Ends what it has on the GPU and begins anew.
fn renew(rm: &FakeRm, pid: u32, (groups, channels): (usize, usize)) {
    rm.end_context(0, pid);
    rm.use_gpu(0, pid, groups, channels, Load::saturating(1000));
}

/// As after `cuDevicePrimaryCtxReset`: the new context's channels have the old one's handles and its name in the log, and are
/// on the GPU.
#[test]
fn whoever_makes_its_context_anew_stays_off_and_keeps_its_slices() {
    let (rm, mut agent) = two_in_turns();
    let mut all = [(10, Class::Suspended), (20, Class::Custom(250_000)), (30, Class::Normal)];
    for shape in [(1, 2), (2, 2), (1, 1)] {
        [10, 20].into_iter().for_each(|pid| renew(&rm, pid, shape));
        assert!(!rm.is_suspended(10) && !rm.is_sliced(20));
        // Until that is noticed.
        pass_with(&rm, &mut agent, CHECK_NS / 1000 + 1_000_000, &all);
        let before = [10, 20, 30].map(|p| rm.gpu_time(p).unwrap());
        pass_with(&rm, &mut agent, 4_000_000, &all);
        let had = [0, 1, 2].map(|i| rm.gpu_time([10, 20, 30][i]).unwrap() - before[i]);
        assert!(had[0] == 0 && had[1].abs_diff((had[1] + had[2]) / 4) < 60_000, "{shape:?}: {had:?} µs of 4 s");
    }
    // Beside somebody who is to come through at once.
    rm.set_load(30, Load { kernel_us: 100, depth: 1, think_us: 4000 });
    all[2].1 = Class::Interactive;
    for shape in [(1, 1), (2, 2), (1, 2)] {
        pass_with(&rm, &mut agent, 500_000, &all);
        assert!(rm.is_sliced(20));
        renew(&rm, 20, shape);
        assert!(!rm.is_sliced(20));
        pass_with(&rm, &mut agent, CHECK_NS / 1000 + 500_000, &all);
        assert!(rm.is_sliced(20), "{shape:?}");
    }
}

/// Somebody changes the slices of a process again and again, or the driver does not give them just as they are set: it is looked
/// into more and more seldom, and nobody's clients are asked for in the kernel's log.
#[test]
fn slices_that_are_never_what_they_were_cost_little() {
    let (rm, mut agent) = two_in_turns();
    rm.set_load(30, Load { kernel_us: 100, depth: 1, think_us: 4000 });
    agent.adopt(30, Class::Interactive, 0).unwrap();
    pass(&rm, &mut agent, 2_000_000);
    let other = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let target = Target::find(&other, 20, &Default::default()).unwrap();
    let asked = || (rm.log_lines(), rm.calls(CMD_HANDLE_INFO));
    let mut look = |rounds: u32| {
        let before = asked();
        for _ in 0..rounds {
            std::mem::forget(target.slice(&other, 333).unwrap());
            pass(&rm, &mut agent, CHECK_NS / 1000);
        }
        (asked().0 - before.0, asked().1 - before.1)
    };
    // A client of it is some five hundred questions.
    let first = look(3);
    assert!(first.0 == 0 && (500..3000).contains(&first.1), "{first:?}");
    look(300);
    let then = look(100);
    assert!(then.0 == 0 && then.1 < 3 * 600, "{then:?}");
}

/// What the log would tell of it is not said while the driver has forgotten the log.
#[test]
fn whoever_makes_its_context_anew_while_the_log_is_not_there_is_noticed_when_it_is_back() {
    let rm = FakeRm::default();
    rm.be_silent_of_files();
    rm.start(10, 1, 1, Load::saturating(1000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Suspended, 0).unwrap();
    pass(&rm, &mut agent, 500_000);
    assert!(rm.is_suspended(10));
    rm.forget_logs();
    // With a channel more; the first one has the handle that it had.
    renew(&rm, 10, (1, 2));
    pass(&rm, &mut agent, 3_000_000);
    let before = rm.gpu_time(10);
    pass(&rm, &mut agent, 1_000_000);
    assert!(rm.is_suspended(10) && rm.gpu_time(10) == before);
}

/// Where nobody else has work there is no other record, by which it would be seen that one is missing; somebody may seem to
/// have work, who was on the GPU last by the records that there are.
#[test]
fn whoever_is_suspended_stays_off_when_the_record_of_its_new_context_is_lost() {
    for beside in [false, true] {
        let rm = FakeRm::default();
        rm.be_silent_of_files();
        rm.start(10, 1, 1, Load::saturating(1000));
        rm.start(20, 1, 1, Load::IDLE);
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
        agent.adopt(10, Class::Normal, 0).unwrap();
        agent.adopt(20, Class::Normal, 0).unwrap();
        pass(&rm, &mut agent, 500_000);
        agent.adopt(10, Class::Suspended, 0).unwrap();
        rm.set_load(20, if beside { Load::saturating(1000) } else { Load::IDLE });
        pass(&rm, &mut agent, 500_000);
        rm.set_load(20, Load::IDLE);
        rm.lose_records(2);
        renew(&rm, 10, (1, 1));
        pass(&rm, &mut agent, CHECK_NS / 1000 + 100_000);
        let before = rm.gpu_time(10);
        pass(&rm, &mut agent, 1_000_000);
        assert!(rm.is_suspended(10) && rm.gpu_time(10) == before, "{beside}");
    }
}

/// On drivers of today anybody with access to the device can let channels on, a suspended program its own as well.
#[test]
fn whom_somebody_else_has_let_on_is_off_again_within_two_seconds() {
    let (rm, mut agent) = two_in_turns();
    // It has been on the GPU before.
    agent.adopt(10, Class::Normal, 0).unwrap();
    pass(&rm, &mut agent, 500_000);
    agent.adopt(10, Class::Suspended, 0).unwrap();
    pass(&rm, &mut agent, 500_000);
    let other = Client::open(Arc::new(rm.clone()), 0).unwrap();
    Target::find(&other, 10, &Default::default()).unwrap().release(&other).unwrap();
    assert!(!rm.is_suspended(10));
    pass(&rm, &mut agent, CHECK_NS / 1000 + 1_000_000);
    assert!(rm.is_suspended(10));
    let before = rm.gpu_time(10);
    pass(&rm, &mut agent, 1_000_000);
    assert_eq!(rm.gpu_time(10), before);
}

/// Its new context has the name of the former one in the log.
#[test]
fn whoever_comes_onto_the_gpu_while_it_is_off_has_other_channels() {
    let rm = FakeRm::default();
    rm.be_silent_of_files();
    for pid in [10, 20] {
        rm.start(pid, 1, 1, one_at_a_time(1000));
    }
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Custom(200_000), 0).unwrap();
    agent.adopt(20, Class::Normal, 0).unwrap();
    pass(&rm, &mut agent, 1_000_000);
    rm.end_context(0, 10);
    rm.use_gpu(0, 10, 1, 2, one_at_a_time(1000));
    pass(&rm, &mut agent, CHECK_NS / 1000 + 500_000);
    let before = [10, 20].map(|p| rm.gpu_time(p).unwrap());
    pass(&rm, &mut agent, 4_000_000);
    let had = [0, 1].map(|i| rm.gpu_time([10, 20][i]).unwrap() - before[i]);
    assert!(had[0].abs_diff((had[0] + had[1]) / 5) < 60_000, "{had:?} µs of 4 s");
}

/// It is far below the newest of the driver's clients by then, and above the service's own: nobody looks for it there.
#[test]
fn whoever_cannot_be_taken_off_is_found_again_by_the_clients_that_it_had() {
    let rm = FakeRm::default();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let others = || (0..300).for_each(|_| drop(Client::open(Arc::new(rm.clone()), 0).unwrap()));
    others();
    for pid in [10, 20] {
        rm.start(pid, 1, 2, one_at_a_time(1000));
    }
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Normal, 0).unwrap();
    agent.adopt(20, Class::Normal, 0).unwrap();
    pass(&rm, &mut agent, 1_000_000);
    others();
    // Of the channels to be taken off one is not there.
    rm.end_context(0, 10);
    rm.use_gpu(0, 10, 1, 1, one_at_a_time(1000));
    pass(&rm, &mut agent, 200_000);
    assert!(!agent.shares().contains_key(&10));
    agent.adopt(10, Class::Normal, 0).unwrap();
}

/// The log has seen both names before, and nothing of what was there is different: only the driver's files are more.
#[test]
fn a_second_context_with_a_name_that_the_log_knows_is_seen_by_the_files_that_it_takes() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load { kernel_us: 100, depth: 1, think_us: 4000 });
    rm.start(20, 1, 1, Load::saturating(5000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    let all = [(10, Class::Interactive), (20, Class::Normal)];
    all.iter().for_each(|(pid, class)| agent.adopt(*pid, *class, 0).unwrap());
    let second = || rm.use_gpu(0, 20, 1, 1, Load::saturating(5000));
    let first_only = || {
        rm.end_context(0, 20);
        rm.use_gpu(0, 20, 1, 1, Load::saturating(5000));
    };
    second();
    pass_with(&rm, &mut agent, 2_000_000, &all);
    first_only();
    pass_with(&rm, &mut agent, 2_000_000, &all);
    second();
    pass_with(&rm, &mut agent, 2_000_000, &all);
    rm.latencies(10);
    pass_with(&rm, &mut agent, 2_000_000, &all);
    let mut took = rm.latencies(10);
    took.sort_unstable();
    let p99 = took[took.len() * 99 / 100];
    assert!(p99 <= 700, "{p99} µs, of {} times", took.len());
}

/// The service was kept from running, with an interactive program's context on the GPU all the while.
#[test]
fn a_window_that_ends_late_is_not_at_the_cost_of_the_reserve() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load { kernel_us: 100, depth: 1, think_us: 4000 });
    rm.start(20, 1, 1, Load::saturating(1000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Interactive, 0).unwrap();
    agent.adopt(20, Class::Normal, 0).unwrap();
    pass(&rm, &mut agent, 1_000_000);
    agent.begin().unwrap();
    rm.run(10_000);
    rm.set_load(20, Load::IDLE);
    rm.run(1_490_000);
    agent.end(1_500_000_000);
    rm.set_load(20, Load::saturating(1000));
    rm.latencies(10);
    pass(&rm, &mut agent, 1_000_000);
    let mut took = rm.latencies(10);
    took.sort_unstable();
    let p99 = took[took.len() * 99 / 100];
    assert!(p99 <= 700, "{p99} µs, of {} times", took.len());
}

#[test]
fn whom_somebody_else_has_suspended_is_let_on_again_and_whom_we_have_is_not() {
    let rm = FakeRm::default();
    for pid in [10, 20] {
        rm.start(pid, 1, 1, Load::saturating(1000));
    }
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Normal, 0).unwrap();
    agent.adopt(20, Class::Suspended, 0).unwrap();
    pass(&rm, &mut agent, 500_000);
    // Somebody with a client of their own, who does not come back for it.
    let other = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    std::mem::forget(Target::find(&other, 10, &Default::default()).unwrap().suspend(&other).unwrap());
    assert!(rm.is_suspended(10));
    pass(&rm, &mut agent, LET_ON_NS / 1000 + 500_000);
    let before = [10, 20].map(|p| rm.gpu_time(p).unwrap());
    assert!(!rm.is_suspended(10) && rm.is_suspended(20));
    pass(&rm, &mut agent, 1_000_000);
    let had = [0, 1].map(|i| rm.gpu_time([10, 20][i]).unwrap() - before[i]);
    assert!(had[0] > 900_000 && had[1] == 0, "{had:?} µs of 1 s");
}

#[test]
fn one_with_a_little_work_now_and_then_does_not_keep_the_gpu_from_one_that_is_busy() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load { kernel_us: 300, depth: 1, think_us: 9000 });
    rm.start(20, 1, 1, Load::saturating(20_000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Normal, 0).unwrap();
    agent.adopt(20, Class::Normal, 0).unwrap();
    let mut parts = |us: u64| {
        let had = [10, 20].map(|pid| rm.gpu_time(pid).unwrap());
        pass(&rm, &mut agent, us);
        [0, 1].map(|i| (rm.gpu_time([10, 20][i]).unwrap() - had[i]) as f64 / us as f64)
    };
    parts(2_000_000);
    let [light, busy] = parts(5_000_000);
    assert!(light > 0.025 && busy > 0.85, "{light} {busy}");
    // When it has more to do it has its half, and that of a program with short kernels is no less.
    for load in [Load::saturating(5000), Load::saturating(100), Load { kernel_us: 100, depth: 1, think_us: 20 }] {
        rm.set_load(10, load);
        parts(1_000_000);
        let [more, busy] = parts(10_000_000);
        assert!(more > 0.4 && (busy - 0.5).abs() < 0.02, "{load:?}: {more} {busy}");
    }
}

/// What each of them has of what it does alone, in any two seconds, against its share: the farthest, in points.
/// And what all of them together have of the whole time.
fn farthest_in_two_seconds(shares: &[u32], kernels: &[u64], load: fn(u64) -> Load) -> (f64, f64) {
    const TWO_SECONDS: u64 = 2_000_000;
    let rm = FakeRm::default();
    rm.let_calls_take_time();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    let pids: Vec<u32> = (10..).take(shares.len()).collect();
    for ((pid, share), us) in pids.iter().zip(shares).zip(kernels) {
        rm.start(*pid, 1, 1, load(*us));
        agent.adopt(*pid, Class::Custom(share * 10_000), 0).unwrap();
    }
    pass(&rm, &mut agent, 1_000_000);
    let (mut had, began) = (Vec::<(u64, Vec<u64>)>::new(), rm.now_us());
    let mut look = || had.push((rm.now_us(), pids.iter().map(|p| rm.gpu_time(*p).unwrap()).collect()));
    let mut begun = began;
    while begun < began + 20_000_000 {
        look();
        let end = begun + agent.begin().unwrap().length_ns / 1000;
        while rm.now_us() < end {
            look();
            rm.run(5000.min(end - rm.now_us()));
        }
        let now = rm.now_us();
        agent.end((now - begun) * 1000);
        begun = now;
    }
    let all = |at: Option<&(u64, Vec<u64>)>| at.map_or((0, 0), |(at, had)| (*at, had.iter().sum::<u64>()));
    let ((from, before), (to, after)) = (all(had.first()), all(had.last()));
    let total = (after - before) as f64 / (to - from) as f64;
    let mut farthest = 0f64;
    for (i, (from, before)) in had.iter().enumerate() {
        let Some((to, after)) = had[i..].iter().find(|(at, _)| at - from >= TWO_SECONDS) else { break };
        for (i, ((before, after), share)) in before.iter().zip(after).zip(shares).enumerate() {
            let Load { kernel_us, depth, think_us } = load(kernels[i]);
            // Of what it does alone.
            let alone = if depth == 1 { kernel_us as f64 / (kernel_us + think_us) as f64 } else { 1.0 };
            let part = (after - before) as f64 / (to - from) as f64 * 100.0 / alone;
            farthest = farthest.max((part - f64::from(*share)).abs());
        }
    }
    (farthest, total)
}

#[test]
fn in_any_two_seconds_everybody_has_its_share_whatever_its_kernels() {
    let different = [100, 1000, 5000, 20_000];
    for (shares, kernels) in [
        (&[40, 30, 20, 10][..], &different[..]),
        (&[10, 20, 30, 40], &different),
        (&[97, 1, 1, 1], &different),
        (&[25, 25, 25, 10, 10, 5], &[1000; 6]),
    ] {
        for load in [Load::saturating, one_at_a_time] {
            let (points, total) = farthest_in_two_seconds(shares, kernels, load);
            assert!(points <= 1.5 && total >= 0.98, "{shares:?}, {:?}: {points}, {total}", load(kernels[0]));
        }
    }
}

#[test]
fn one_that_rests_on_the_gpu_leaves_it_to_those_who_wait_and_one_that_works_keeps_it() {
    let rm = FakeRm::default();
    rm.let_calls_take_time();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    for (pid, class, load) in [(10, Class::Normal, one_at_a_time(100)), (20, Class::Background, one_at_a_time(5000))] {
        rm.start(pid, 1, 1, load);
        agent.adopt(pid, class, 0).unwrap();
    }
    pass(&rm, &mut agent, 2_000_000);
    let mut other = |us: u64| {
        let before = rm.gpu_time(20).unwrap();
        pass(&rm, &mut agent, us);
        (rm.gpu_time(20).unwrap() - before) as f64 / us as f64
    };
    let part = other(5_000_000);
    assert!(part < 0.035, "{part}");
    rm.set_load(10, Load::IDLE);
    other(300_000);
    let part = other(1_000_000);
    assert!(part > 0.9, "{part}");
}

/// It stops when the log loses a record, so that the last one is of its coming; whoever waits is let on beside it for a while
/// now and then, stays on the GPU, and so makes no record, either.
#[test]
fn an_owner_whose_last_record_was_lost_is_not_waited_for() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load::saturating(1000));
    rm.start(20, 1, 1, Load::saturating(1000));
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    agent.adopt(10, Class::Normal, 0).unwrap();
    agent.adopt(20, Class::Background, 0).unwrap();
    pass(&rm, &mut agent, 5_000_000);
    let had = |pid| rm.gpu_time(pid).unwrap();
    assert!(had(20) < 500_000, "it has what the other one leaves: {} µs", had(20));
    rm.set_load(10, Load::IDLE);
    rm.lose_records(2);
    pass(&rm, &mut agent, 600_000);
    let before = had(20);
    pass(&rm, &mut agent, 400_000);
    assert!(had(20) - before > 380_000, "{} of 400000 µs", had(20) - before);
}

#[test]
fn who_comes_in_the_middle_of_turns_ends_them_and_everybody_counts_as_before() {
    let rm = FakeRm::default();
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let mut agent = Agent::new(own.clone(), LogMeter::open(own).unwrap());
    for pid in [10, 20] {
        rm.start(pid, 1, 1, Load::saturating(5000));
        agent.adopt(pid, Class::Normal, 0).unwrap();
    }
    while !agent.has_turns() {
        pass(&rm, &mut agent, 100_000);
        assert!(rm.now_us() < 10_000_000);
    }
    // A look has begun, and is not over.
    let length = agent.begin().unwrap().length_ns;
    assert!(agent.has_turns() && !agent.is_to_be_ended());
    rm.run(length / 2000);
    rm.start(30, 1, 1, Load::saturating(1000));
    agent.adopt(30, Class::Custom(500_000), 0).unwrap();
    assert!(agent.is_to_be_ended());
    agent.end(length / 2);
    assert!(!agent.is_to_be_ended() && agent.views().all(|(_, v)| v.member.active));
    let before = [10, 20, 30].map(|pid| rm.gpu_time(pid).unwrap());
    pass(&rm, &mut agent, 1_000_000);
    let had = [0, 1, 2].map(|i| rm.gpu_time([10, 20, 30][i]).unwrap() - before[i]);
    assert!([250_000, 250_000, 500_000].into_iter().zip(had).all(|(due, had)| had.abs_diff(due) < 40_000), "{had:?}");
}
