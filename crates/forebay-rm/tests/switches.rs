//! The log of context switches, on the fake: against what the fake itself knows of who held the GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_rm::fake::{DRAIN_US, FakeRm, Load, SWITCH_US, remote};
use forebay_rm::holds::Holds;
use forebay_rm::sys::{CMD_BIND_LOG, Record};
use forebay_rm::{Client, Error, Host, RECORDS, Rm, SwitchLog};

fn open(rm: &FakeRm) -> SwitchLog {
    SwitchLog::open(&Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap())).unwrap()
}

/// µs for which each process held the GPU.
fn held(holds: &mut Holds, records: &[Record]) -> BTreeMap<u32, u64> {
    let mut sums = BTreeMap::new();
    for h in records.iter().filter_map(|r| holds.feed(r)) {
        *sums.entry(h.pid).or_default() += h.ns() / 1000;
    }
    sums
}

#[test]
fn it_says_of_everybody_what_the_gpu_did() {
    let rm = FakeRm::default();
    rm.start(10, 1, 2, Load { kernel_us: 100, depth: 1, think_us: 20 });
    rm.start(20, 2, 2, Load::saturating(5000));
    let mut log = open(&rm);
    let mut holds = Holds::new(log.now_ns().unwrap());
    let mut records = Vec::new();
    for _ in 0..20 {
        rm.run(100_000);
        assert_eq!(log.read(&mut records).unwrap(), 0);
    }
    // The last ones are not visible yet.
    let before = records.len();
    rm.run(DRAIN_US / 2);
    log.flush().unwrap();
    log.read(&mut records).unwrap();
    assert!(records.len() > before);
    let mut sums = held(&mut holds, &records);
    if let Some(h) = holds.open(log.now_ns().unwrap()) {
        *sums.entry(h.pid).or_default() += h.ns() / 1000;
    }
    assert_eq!((holds.missing, holds.odd), (0, 0));
    for (pid, us) in sums {
        let truth = rm.gpu_time(pid).unwrap();
        // A holder whose queue is empty holds on until somebody else comes: microseconds, here.
        assert!(us >= truth && us - truth <= truth / 10 + 2 * SWITCH_US, "{pid}: {us} instead of {truth}");
    }
}

#[test]
fn a_lone_process_makes_no_records_and_the_holder_stays_until_another_comes() {
    let rm = FakeRm::default();
    rm.start(10, 1, 2, Load::saturating(1000));
    rm.run(50_000);
    let mut log = open(&rm);
    let mut holds = Holds::new(log.now_ns().unwrap());
    let mut records = Vec::new();
    rm.run(100_000);
    log.flush().unwrap();
    log.read(&mut records).unwrap();
    assert!(records.is_empty() && holds.open(1).is_none());
    rm.set_load(10, Load::IDLE);
    rm.run(50_000);
    rm.start(20, 1, 2, Load::saturating(1000));
    rm.run(10_000);
    log.flush().unwrap();
    log.read(&mut records).unwrap();
    // Its first end says that it was there all the time.
    let us = held(&mut holds, &records)[&10];
    assert!(us.abs_diff(150_000) < 1000, "{us}");
    assert_eq!(holds.open(u64::MAX).unwrap().pid, 20);
}

#[test]
fn what_does_not_fit_is_counted_and_what_goes_missing_is_noticed() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load { kernel_us: 50, depth: 1, think_us: 5 });
    rm.start(20, 1, 1, Load { kernel_us: 50, depth: 1, think_us: 5 });
    let mut log = open(&rm);
    let mut holds = Holds::new(0);
    // Nobody reads for much longer than the buffer lasts.
    rm.run(u64::from(RECORDS) * 200);
    let mut records = Vec::new();
    let dropped = log.read(&mut records).unwrap();
    assert!(dropped > 1000 && records.len() == RECORDS as usize - 1, "{dropped}, {}", records.len());
    held(&mut holds, &records);
    assert_eq!(holds.missing, 0);
    records.clear();
    rm.lose_records(3);
    rm.run(100_000);
    assert_eq!(log.read(&mut records).unwrap(), 0, "the count begins anew");
    held(&mut holds, &records);
    assert_eq!(holds.missing, dropped + 3);
}

#[test]
fn it_goes_with_its_owner_and_a_refusal_leaves_nothing() {
    let rm = FakeRm::default();
    let log = open(&rm);
    assert_eq!((rm.logs(), rm.mappings()), (1, 2));
    drop(log);
    assert_eq!((rm.logs(), rm.mappings(), rm.clients(), rm.wrong_order()), (0, 0, 0, 0));
    for status in [0x1B, 0x56] {
        rm.refuse_log(Some(status));
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        let refused = SwitchLog::open(&own);
        assert!(matches!(refused, Err(Error::Status { status: s, .. }) if s == status));
        assert_eq!((rm.logs(), rm.mappings(), rm.wrong_order()), (0, 0, 0));
    }
    rm.refuse_log(None);
    let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
    let log = SwitchLog::open(&own).unwrap();
    // As when its process is killed.
    std::mem::forget(log);
    assert_eq!(rm.logs(), 1);
}

#[test]
fn who_may_not_have_it_does_not_ask_for_it() {
    let rm = FakeRm::default();
    rm.without_privilege();
    let why = SwitchLog::open(&Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap())).err().unwrap();
    assert!(why.to_string().contains("insufficient permissions"), "{why}");
    // A request that is refused would end somebody else's.
    assert_eq!((rm.calls(CMD_BIND_LOG), rm.mappings()), (0, 0));
}

#[test]
fn another_process_reads_the_same() {
    let rm = FakeRm::default();
    rm.start(10, 1, 1, Load::saturating(1000));
    rm.start(20, 1, 1, Load::saturating(1000));
    let path = std::env::temp_dir().join(format!("forebay-switches-{}", std::process::id()));
    remote::serve(rm.clone(), &path).unwrap();
    let far = remote::RemoteRm::connect(&path).unwrap();
    let mut there = SwitchLog::open(&Arc::new(Client::open(Arc::new(far), 0).unwrap())).unwrap();
    let mut here = open(&rm);
    rm.run(200_000);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    here.read(&mut a).unwrap();
    there.read(&mut b).unwrap();
    assert!(a.len() > 20 && a == b, "{} {}", a.len(), b.len());
    drop(there);
    assert_eq!(rm.logs(), 1);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn on_a_machine_with_a_driver_the_log_can_be_read_or_says_why_not() {
    if let Err(e) = Host.driver_version() {
        println!("no NVIDIA driver here: {e}");
        return;
    }
    let own = match Client::open(Arc::new(Host), 0) {
        Ok(own) => Arc::new(own),
        Err(e) => return println!("the driver cannot be asked: {e}"),
    };
    match SwitchLog::open(&own) {
        Ok(mut log) => {
            let (a, b) = (log.now_ns().unwrap(), log.now_ns().unwrap());
            assert!(b >= a && b - a < 1_000_000_000, "{a} {b}");
            log.flush().unwrap();
            log.read(&mut Vec::new()).unwrap();
        }
        Err(e) => println!("no log: {e}"),
    }
}
