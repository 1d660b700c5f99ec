//! Shares, suspension and precedence among real processes, through credit.

mod common;

use std::time::Duration;

use common::{Program, Service, hog, until};
use forebay_proto::wire::{Class, Request};

/// Not a test: a program that the tests start.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    if std::env::var_os("RECONNECTS").is_some() {
        // Leaves its debts behind, or tries to.
        loop {
            let session = forebay_proto::client::Session::open("cheat").unwrap();
            let account = forebay_proto::client::Account::cpu(&session).unwrap();
            account.look();
            if account.may() {
                common::spin(Duration::from_millis(20));
            } else {
                account.wait(|| 0);
            }
        }
    }
    let number = |name: &str, or: u64| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(or);
    hog(number("THREADS", 2) as usize, Duration::from_micros(number("TASK_US", 1000)));
}

fn start(s: &Service, class: Class, task_us: u64) -> Program {
    let p = Program::start(s, "program", &[("TASK_US", task_us.to_string())]);
    until("the program has joined", || s.process(p.pid()).is_some());
    s.set(p.pid(), class);
    p
}

/// Use of each program in a time, as parts of the sum.
fn parts(programs: &[Program], time: Duration) -> Vec<f64> {
    let before: Vec<_> = programs.iter().map(Program::cpu).collect();
    std::thread::sleep(time);
    let used: Vec<f64> = programs.iter().zip(before).map(|(p, b)| (p.cpu() - b).as_secs_f64()).collect();
    let all: f64 = used.iter().sum();
    used.iter().map(|u| u / all).collect()
}

#[test]
fn saturating_programs_get_their_shares() {
    let s = Service::start(&[]);
    let wanted = [(400_000, 100), (300_000, 1000), (200_000, 5000), (100_000, 20_000)];
    let programs: Vec<Program> = wanted.iter().map(|(c, t)| start(&s, Class::Custom(*c), *t)).collect();
    std::thread::sleep(Duration::from_secs(1));
    let got = parts(&programs, Duration::from_secs(5));
    for ((want, _), got) in wanted.iter().zip(&got) {
        assert!((f64::from(*want) / 1e6 - got).abs() < 0.03, "{got:?} of {want}");
    }
    let listed = s.process(programs[0].pid()).unwrap();
    assert!(listed.active && (listed.share, listed.class) == (400_000, Class::Custom(400_000)), "{listed:?}");

    // One stops: the others have its time, in their proportions; when it goes on it has its share again.
    s.set(programs[0].pid(), Class::Suspended);
    std::thread::sleep(Duration::from_millis(300));
    let got = parts(&programs, Duration::from_secs(2));
    assert!(got[0] < 0.01 && (got[1] - 0.5).abs() < 0.04, "{got:?}");
    s.set(programs[0].pid(), Class::Custom(400_000));
    std::thread::sleep(Duration::from_millis(300));
    let got = parts(&programs, Duration::from_secs(2));
    assert!((got[0] - 0.4).abs() < 0.04, "{got:?}");
}

#[test]
fn connecting_again_does_not_settle_a_debt() {
    let s = Service::start(&[]);
    let cheat = Program::start(&s, "program", &[("RECONNECTS", "1".into())]);
    until("the program has joined", || s.process(cheat.pid()).is_some());
    s.set(cheat.pid(), Class::Custom(100_000));
    let programs = [cheat, start(&s, Class::Custom(900_000), 1000)];
    std::thread::sleep(Duration::from_secs(1));
    let got = parts(&programs, Duration::from_secs(3));
    assert!(got[0] < 0.14, "{got:?}");
}

#[test]
fn a_service_that_dies_leaves_everybody_running_and_its_successor_knows_them() {
    let mut s = Service::start(&[]);
    let a = start(&s, Class::Custom(800_000), 500);
    let b = start(&s, Class::Suspended, 500);
    std::thread::sleep(Duration::from_millis(500));
    let still = |p: &Program| {
        let before = p.cpu();
        std::thread::sleep(Duration::from_millis(300));
        p.cpu() - before
    };
    assert!(still(&b) < Duration::from_millis(5));
    s.kill();
    std::thread::sleep(Duration::from_millis(100));
    assert!(still(&b) > Duration::from_millis(50), "it is still stopped by a service that has gone");
    assert!(still(&a) > Duration::from_millis(50));
    s.restart();
    until("both have come back", || s.process(a.pid()).is_some() && s.process(b.pid()).is_some());
    assert_eq!(s.process(a.pid()).unwrap().class, Class::Custom(800_000));
    assert_eq!(s.process(b.pid()).unwrap().class, Class::Suspended);
    std::thread::sleep(Duration::from_millis(200));
    assert!(still(&b) < Duration::from_millis(5));
    s.connect().ask(&Request::Set { pid: b.pid(), class: Some(Class::Normal), nice: None }).unwrap();
    assert!(still(&b) > Duration::from_millis(20));
}

#[test]
fn a_service_that_is_stopped_holds_nobody_up_for_long() {
    let s = Service::start(&[]);
    let p = start(&s, Class::Suspended, 500);
    std::thread::sleep(Duration::from_millis(300));
    let signal = |signal| {
        let pid = rustix::process::Pid::from_raw(s.pid() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    };
    signal(rustix::process::Signal::STOP);
    let before = p.cpu();
    until("it runs", || p.cpu() > before + Duration::from_millis(300));
    // And is under it again when it goes on.
    signal(rustix::process::Signal::CONT);
    std::thread::sleep(Duration::from_millis(300));
    let before = p.cpu();
    std::thread::sleep(Duration::from_millis(300));
    assert!(p.cpu() - before < Duration::from_millis(10));
}

#[test]
fn killed_twenty_times_the_service_never_leaves_anybody_stopped() {
    let mut s = Service::start(&[]);
    let programs =
        [start(&s, Class::Normal, 200), start(&s, Class::Background, 2000), start(&s, Class::Suspended, 500)];
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(random.u64(0..120)));
        s.kill();
        let before: Vec<_> = programs.iter().map(Program::cpu).collect();
        until("everybody runs", || programs.iter().zip(&before).all(|(p, b)| p.cpu() > *b + Duration::from_millis(2)));
        s.restart();
        until("everybody has come back", || programs.iter().all(|p| s.process(p.pid()).is_some()));
        assert_eq!(s.process(programs[2].pid()).unwrap().class, Class::Suspended, "round {round}");
    }
}

#[test]
fn what_was_used_under_an_earlier_service_holds_nobody_up() {
    let mut s = Service::start(&["--device", "thing=1"]);
    let session = forebay_proto::client::Session::open_at(vec![s.dir.join("socket")], "test").unwrap();
    let account = session.join("thing").unwrap();
    until("there is credit", || account.may());
    account.took(20_000_000_000);
    s.kill();
    until("everybody runs", || !session.is_served());
    s.restart();
    until("it has come back", || session.is_served());
    // The service takes no more for used than the device could do meanwhile: 20 s would be caught up with in ten.
    let begun = std::time::Instant::now();
    until("there is credit again", || account.may());
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

/// A service that comes back and shares fewer devices than the one before shares the rest.
#[test]
fn a_device_that_is_not_shared_any_more_keeps_nobody_from_the_others() {
    let mut s = Service::start(&["--device", "thing=1"]);
    let session = forebay_proto::client::Session::open_at(vec![s.dir.join("socket")], "test").unwrap();
    let cpu = session.join("cpu").unwrap();
    let (thing, gpu) = (session.join("thing").unwrap(), session.bring("gpu").unwrap());
    let me = std::process::id();
    let suspended = |s: &Service| {
        s.set(me, Class::Suspended);
        until("nothing may be begun", || !cpu.may());
    };
    suspended(&s);
    until("nor there", || !thing.may() && !gpu.may());
    s.kill();
    until("everybody runs", || !session.is_served() && thing.may());
    s.restart_with(&[]);
    until("it has come back", || session.is_served());
    suspended(&s);
    // Nobody shares this one now, and nothing is said of it. The other was brought once more.
    assert!(thing.may() && thing.wait(|| u64::MAX) && thing.standing().is_none());
    until("nor there", || !gpu.may());
    thing.took(1);
    let devices: Vec<_> = s.connect().devices().unwrap().into_iter().map(|d| d.name).collect();
    assert_eq!(devices, ["cpu", "gpu"]);
    // Its number is not another's.
    let other = session.bring("other").unwrap();
    until("nor there", || !other.may());
    s.kill();
    until("everybody runs", || !session.is_served());
    s.restart_with(&["--device", "thing=1"]);
    until("it has come back", || session.is_served());
    suspended(&s);
    until("all are shared again", || ![&thing, &gpu, &other].iter().any(|a| a.may()));
}
