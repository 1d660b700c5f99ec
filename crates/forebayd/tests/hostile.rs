//! Bad input: messages, programs and users that mean no good, against a running service.

mod common;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Service, hog, until};
use forebay_proto::client::{Account, Connection, Error, PATIENCE, Session};
use forebay_proto::memory::Mapped;
use forebay_proto::page::{ClientPage, MAX_DEVICES, ProgramPage};
use forebay_proto::socket;
use forebay_proto::wire::{self, Class, MAX_REQUEST, Refusal, Reply, Request};

fn raw(s: &Service) -> std::os::fd::OwnedFd {
    socket::connect_to(&s.socket(), PATIENCE).unwrap()
}

/// Whether the service closes the connection within a moment.
fn is_closed(fd: &std::os::fd::OwnedFd) -> bool {
    let mut b = [0; 4096];
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        match socket::receive(fd.as_fd(), &mut b, false) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return true,
            Ok(_) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    false
}

fn hello() -> Vec<u8> {
    wire::encode(&Request::Hello { version: wire::VERSION, name: "x".into() })
}

#[test]
fn what_is_no_message_ends_the_connection_and_nothing_else() {
    let s = Service::start(&[]);
    let good = s.connect();
    let long = vec![0; 100_000];
    let old = wire::encode(&Request::Hello { version: 99, name: String::new() });
    let early = wire::encode(&Request::List { after: 0 });
    let noise: Vec<u8> = (0..200u32).map(|i| ((i * 7919) >> 3) as u8).collect();
    for bad in [&[][..], &[0xff], &hello()[..1], &long, &old, &early, &noise, &[&hello()[..], &[1]].concat()] {
        let fd = raw(&s);
        // An empty packet looks like the end.
        let _ = socket::send(fd.as_fd(), bad, &[], true);
        assert!(is_closed(&fd), "{:?}", &bad[..bad.len().min(8)]);
    }
    let twice = raw(&s);
    socket::send(twice.as_fd(), &hello(), &[], true).unwrap();
    socket::send(twice.as_fd(), &hello(), &[], true).unwrap();
    assert!(is_closed(&twice));
    assert!(good.processes().is_ok());
}

#[test]
fn who_says_nothing_floods_or_does_not_listen_is_disconnected() {
    let s = Service::start(&[]);
    let silent = raw(&s);
    let deaf = raw(&s);
    socket::send(deaf.as_fd(), &hello(), &[], true).unwrap();
    let list = wire::encode(&Request::List { after: 0 });
    // Never reads: either its answers have no room any more, or it has sent too much.
    let mut sent = 0;
    while sent < 100_000 && socket::send(deaf.as_fd(), &list, &[], true).is_ok() {
        sent += 1;
    }
    assert!(sent < 100_000);
    let c = s.connect();
    let flood = Instant::now();
    let mut n = 0;
    while c.ask(&Request::Devices).is_ok() && flood.elapsed() < Duration::from_secs(5) {
        n += 1;
    }
    assert!(flood.elapsed() < Duration::from_secs(5), "{n} messages were answered");
    assert!(is_closed(&silent));
    assert!(s.connect().processes().is_ok());
}

#[test]
fn files_that_come_along_are_closed() {
    let s = Service::start(&[]);
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", s.pid())).unwrap().count();
    let fd = raw(&s);
    socket::send(fd.as_fd(), &hello(), &[], true).unwrap();
    let mut b = [0; 4096];
    socket::receive(fd.as_fd(), &mut b, true).unwrap();
    let before = fds();
    let (r, w) = rustix::pipe::pipe().unwrap();
    for _ in 0..100 {
        socket::send(fd.as_fd(), &wire::encode(&Request::Devices), &[w.as_fd(); 4], true).unwrap();
        socket::receive(fd.as_fd(), &mut b, true).unwrap();
    }
    assert_eq!(fds(), before);
    drop((r, w));
}

#[test]
fn limits_are_refusals_and_connections_are_given_back() {
    let s = Service::start(&["--device", "gpu=1"]);
    let c = s.connect();
    let join = |d: &str| c.ask(&Request::Join { device: d.into() });
    assert!(matches!(join("tpu"), Err(Error::Refused(Refusal::NoDevice(_)))));
    for _ in 0..MAX_DEVICES {
        join("gpu").unwrap();
    }
    assert!(matches!(join("cpu"), Err(Error::Refused(Refusal::Limit { limit, .. })) if limit == MAX_DEVICES as u64));
    assert!(matches!(c.ask(&Request::Leave { account: 200 }), Err(Error::Refused(_))));
    c.ask(&Request::Leave { account: 3 }).unwrap();
    assert_eq!(join("cpu").unwrap(), Reply::Joined { account: 3, metered: true });
    let me = std::process::id();
    for bad in [0, WHOLE + 1, u32::MAX] {
        let set = c.ask(&Request::Set { pid: me, class: Some(Class::Custom(bad)), nice: None });
        assert!(matches!(set, Err(Error::Refused(Refusal::Invalid(_)))));
    }
    assert!(c.ask(&Request::Set { pid: me, class: None, nice: Some(20) }).is_err());
    let gone = c.ask(&Request::Set { pid: 0x7fff_fff0, class: None, nice: Some(1) });
    assert!(matches!(gone, Err(Error::Refused(Refusal::NoProcess(_)))));
    // More connections than the service takes; root may have them all.
    let all: Vec<_> = (0..1100).map_while(|_| socket::connect_to(&s.socket(), PATIENCE).ok()).collect();
    assert!(Connection::open_at(&s.socket(), "one too many").is_err());
    drop(all);
    until("there is room again", || Connection::open_at(&s.socket(), "again").is_ok());
}

const WHOLE: u32 = 1_000_000;

#[test]
fn a_program_that_scribbles_over_its_page_harms_only_itself() {
    let s = Service::start(&["--device", "gpu=1"]);
    let fd = raw(&s);
    socket::send(fd.as_fd(), &hello(), &[], true).unwrap();
    let mut b = [0; 4096];
    let (_, files) = socket::receive(fd.as_fd(), &mut b, true).unwrap();
    assert!(Mapped::<ClientPage>::open(files[1].as_fd(), true).is_err(), "a program could raise its own allowance");
    let page = Mapped::<ProgramPage>::open(files[2].as_fd(), true).unwrap();
    for d in ["gpu", "cpu"] {
        socket::send(fd.as_fd(), &wire::encode(&Request::Join { device: d.into() }), &[], true).unwrap();
        socket::receive(fd.as_fd(), &mut b, true).unwrap();
    }
    let mut random = fastrand::Rng::with_seed(1);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        for w in &page.accounts {
            let any = |r: &mut fastrand::Rng| [0, 1, r.u64(..), u64::MAX][r.usize(0..4)];
            w.spent.store(any(&mut random), Ordering::Relaxed);
            w.tasks.store(any(&mut random), Ordering::Relaxed);
            w.demand.store(any(&mut random) as u32, Ordering::Relaxed);
            w.busy.store(any(&mut random) as u32, Ordering::Relaxed);
        }
        // The doorbell, too.
        let _ = rustix::io::write(&files[3], &random.u64(1..1000).to_ne_bytes());
    }
    let all = s.connect().processes().unwrap();
    assert_eq!(all.len(), 2);
    // It has claimed at most what a device can do.
    let gpu = all.iter().find(|p| p.device == "gpu").unwrap();
    assert!(gpu.spent_ns < 4_000_000_000, "{gpu:?}");
}

#[test]
fn a_doorbell_that_never_rests_is_taken_away() {
    let s = Service::start(&[]);
    let fd = raw(&s);
    socket::send(fd.as_fd(), &hello(), &[], true).unwrap();
    let mut b = [0; 4096];
    let (_, files) = socket::receive(fd.as_fd(), &mut b, true).unwrap();
    let begun = Instant::now();
    let mut open = true;
    while open && begun.elapsed() < Duration::from_secs(10) {
        for _ in 0..1000 {
            let _ = rustix::io::write(&files[3], &1u64.to_ne_bytes());
        }
        open = matches!(socket::receive(fd.as_fd(), &mut b, false), Err(rustix::io::Errno::AGAIN));
    }
    assert!(!open, "it is still heard");
    assert!(s.connect().processes().is_ok());
}

/// Not a test: a program that another user runs.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    if std::env::var_os("HOG").is_some() {
        hog(1, Duration::from_millis(1));
    }
    if let Ok(pid) = std::env::var("RESUME") {
        let pid: u32 = pid.parse().unwrap();
        let c = Connection::open("other").unwrap();
        let tries = [Request::Resume { pid }, Request::Set { pid, class: Some(Class::Background), nice: None }];
        let all = tries.iter().all(|r| matches!(c.ask(r), Err(Error::Refused(Refusal::NotPermitted(_)))));
        std::process::exit(if all { 0 } else { 3 });
    }
    let other: u32 = std::env::var("OTHER").unwrap().parse().unwrap();
    let c = Connection::open("other").unwrap();
    let me = std::process::id();
    let set = |pid, class| c.ask(&Request::Set { pid, class: Some(class), nice: None });
    let refused = |r: Result<Reply, Error>| matches!(r, Err(Error::Refused(Refusal::NotPermitted(_))));
    let mut wrong = Vec::new();
    let mut check = |what: &'static str, ok: bool| {
        if !ok {
            wrong.push(what);
        }
    };
    check("raised itself", refused(set(me, Class::Interactive)) && refused(set(me, Class::Custom(1))));
    check("could not lower itself", set(me, Class::Background).is_ok() && set(me, Class::Suspended).is_ok());
    check("could not go back", set(me, Class::Normal).is_ok());
    check("suspended another's", refused(set(other, Class::Suspended)));
    check("touched pid 1", refused(set(1, Class::Background)));
    check("lowered its nice value", refused(c.ask(&Request::Set { pid: me, class: None, nice: Some(-1) })));
    check("could not be nice", c.ask(&Request::Set { pid: me, class: None, nice: Some(5) }).is_ok());
    // 128 connections of one user, no more.
    let many: Vec<_> = (0..200).map_while(|_| Connection::open("many").ok()).collect();
    check("took all connections", many.len() < 130);
    // No way to another's private page: only its own files came, and those of a service cannot be opened again for writing.
    check("sees its own page", Session::open("own").is_err() || Account::cpu(&Session::open("own").unwrap()).is_ok());
    drop(many);
    std::process::exit(if wrong.is_empty() {
        0
    } else {
        eprintln!("{wrong:?}");
        3
    });
}

#[test]
fn another_user_may_lower_and_not_raise_and_touch_only_what_is_its_own() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start another user's program");
        return;
    }
    use std::os::unix::process::CommandExt as _;
    let s = Service::start(&[]);
    let root_hog = common::Program::start(&s, "program", &[("HOG", "1".into())]);
    until("root's program has joined", || s.process(root_hog.pid()).is_some());
    // The test binary may lie where others cannot go.
    let copy = s.dir.join("other-user");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let other = |key: &str, value: String| {
        let mut c = std::process::Command::new(&copy);
        c.args(["program", "--exact", "--nocapture", "--ignored"]).env(forebay_proto::SOCKET_VARIABLE, s.socket());
        c.env(key, value).uid(65534).gid(65534);
        c
    };
    let out = other("OTHER", root_hog.pid().to_string()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(s.process(root_hog.pid()).unwrap().class, Class::Normal);
    // Whoever is in charge suspends it: its user does not undo that.
    let hog = common::Program(other("HOG", "1".into()).spawn().unwrap());
    until("the other user's program has joined", || s.process(hog.pid()).is_some());
    s.set(hog.pid(), Class::Suspended);
    assert!(other("RESUME", hog.pid().to_string()).status().unwrap().success());
    assert_eq!(s.process(hog.pid()).unwrap().class, Class::Suspended);
    s.connect().ask(&Request::Resume { pid: hog.pid() }).unwrap();
    assert_eq!(s.process(hog.pid()).unwrap().class, Class::Normal);
}

#[test]
fn processes_that_end_are_forgotten_and_messages_are_bounded() {
    let s = Service::start(&[]);
    let p = common::Program::start(&s, "program", &[("HOG", "1".into())]);
    let pid = p.pid();
    until("it has joined", || s.process(pid).is_some());
    s.set(pid, Class::Interactive);
    drop(p);
    let begun = Instant::now();
    until("it is forgotten", || s.process(pid).is_none());
    assert!(begun.elapsed() < Duration::from_millis(500));
    assert!(wire::encode(&Request::Join { device: "d".repeat(MAX_REQUEST) }).len() > MAX_REQUEST);
}
