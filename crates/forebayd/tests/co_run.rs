//! Groups of programs that share a GPU in space, with a stand-in for the control daemon of MPS: a script that lives as long,
//! starts a server when it is started, and ends when it is told to through its pipe.

mod common;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::machine::{Machine, known};
use common::{Program, Service, until};
use forebay_proto::client::{Connection, Error};
use forebay_proto::wire::{Class, Refusal, Reply, Request};
use forebay_rm::fake::Load;

const DAEMON: &str = include_str!("common/mps.sh");

/// The stand-in, as a program that everybody may start.
fn stand_in() -> tempfile::TempPath {
    let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&path, DAEMON).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn folder(s: &Service, uid: u32, group: &str) -> PathBuf {
    // The latest that is there; it is not, for a moment.
    let begins = format!("{uid}-{group}.");
    let all = std::fs::read_dir(s.dir.join("socket.co-run")).into_iter().flatten().flatten();
    let of = all.filter(|e| e.file_name().to_string_lossy().starts_with(&begins)).map(|e| e.path());
    of.max().unwrap_or_default()
}

fn alive(pid: u32) -> bool {
    // A zombie has no memory.
    std::fs::read_to_string(format!("/proc/{pid}/statm")).is_ok_and(|s| !s.starts_with("0 "))
}

/// The group's control daemon and server, once they are there.
fn both(s: &Service, uid: u32, group: &str) -> [u32; 2] {
    let number = |what: &str| {
        let text = std::fs::read_to_string(folder(s, uid, group).join("pipe").join(what)).ok()?;
        text.trim().parse().ok().filter(|pid| alive(*pid))
    };
    until("daemon and server are there", || number("daemon").is_some() && number("server").is_some());
    ["daemon", "server"].map(|w| number(w).unwrap())
}

/// A program that joins the group, and gives it a share if that is not 0; it has joined.
fn member(s: &Service, uid: u32, group: &str, share: u32) -> Program {
    let p = start_member(s, uid, group, share);
    until("the program has joined", || s.connect().ask(&Request::List { after: 0 }).is_ok() && has_joined(&p));
    p
}

fn start_member(s: &Service, uid: u32, group: &str, share: u32) -> Program {
    // The test binary may lie where others cannot go.
    let copy = s.dir.join("member");
    if !copy.exists() {
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    }
    let mut c = Command::new(&copy);
    c.args(["role", "--exact", "--nocapture", "--ignored"]).env(forebay_proto::SOCKET_VARIABLE, s.socket());
    c.env("GROUP", group).env("SHARE", share.to_string()).stdout(std::process::Stdio::null());
    if uid != me() {
        c.uid(uid).gid(uid);
    }
    Program(c.spawn().unwrap())
}

/// It says so with its name.
fn has_joined(p: &Program) -> bool {
    std::fs::read_to_string(format!("/proc/{}/comm", p.pid())).is_ok_and(|n| n.trim() == "joined")
}

#[test]
#[ignore = "a program that other tests start"]
fn role() {
    let Ok(group) = std::env::var("GROUP") else { return };
    let socket = PathBuf::from(std::env::var_os(forebay_proto::SOCKET_VARIABLE).unwrap());
    let c = Connection::open_at(&socket, "member").unwrap();
    let share = std::env::var("SHARE").unwrap().parse().unwrap();
    let class = (share > 0).then_some(Class::Custom(share));
    let begun = Instant::now();
    loop {
        match c.ask(&Request::CoRun { group: group.clone(), class, nice: None }) {
            Ok(Reply::CoRuns { .. }) => break,
            Err(Error::Refused(Refusal::Ending(_))) if begun.elapsed().as_secs() < 10 => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => panic!("{other:?}"),
        }
    }
    // The name of a process is its first thread's, which a test is not.
    std::fs::write("/proc/self/comm", "joined").unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_group_is_divided_as_one_and_outlives_the_service() {
    let mut m = Machine::new("co-run");
    let program = stand_in();
    let other = m.program(5000);
    let mut s =
        Service::start(&["--gpu", "0", "--fake-rm", m.path.to_str().unwrap(), "--mps", program.to_str().unwrap()]);
    let first = member(&s, me(), "lab", 400_000);
    let [mps, server] = both(&s, me(), "lab");
    m.rm.start(server, 2, 5, Load::saturating(1000));
    until("both are found", || known(&s, &[other, server]));
    let listed = s.process(server).unwrap();
    assert_eq!((listed.name.as_str(), listed.class), ("co-run lab", Class::Custom(400_000)));
    std::thread::sleep(Duration::from_millis(500));
    let share = |m: &Machine| m.shares(&[server, other], Duration::from_secs(3))[0];
    assert!((share(&m) - 40.0).abs() < 3.0, "{}", share(&m));
    // A program of the group has no channels of its own.
    let ask = |s: &Service, pid, class| s.connect().ask(&Request::Set { pid, class: Some(class), nice: None });
    let why = ask(&s, first.pid(), Class::Suspended).unwrap_err().to_string();
    assert!(why.contains("lab") && why.contains("server"), "{why}");
    // The service is killed and started again: the daemon is the same, and so is the share.
    s.kill();
    s.restart();
    until("both are found again", || known(&s, &[other, server]));
    let _second = member(&s, me(), "lab", 0);
    assert_eq!(both(&s, me(), "lab"), [mps, server]);
    let listed = s.process(server).unwrap();
    assert_eq!((listed.name.as_str(), listed.class), ("co-run lab", Class::Custom(400_000)));
    // Another share, said by a third program.
    let _third = member(&s, me(), "lab", 200_000);
    std::thread::sleep(Duration::from_millis(500));
    assert!((share(&m) - 20.0).abs() < 3.0, "{}", share(&m));
    ask(&s, server, Class::Suspended).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(share(&m) < 0.1);
    // More than there is is refused before anybody joins.
    s.set(other, Class::Custom(900_000));
    let too_much =
        s.connect().ask(&Request::CoRun { group: "new".into(), class: Some(Class::Custom(200_000)), nice: None });
    assert!(matches!(too_much, Err(Error::Refused(Refusal::Overbooked { .. }))), "{too_much:?}");
    drop(s);
    for pid in [mps, server] {
        let _ = Command::new("kill").arg(pid.to_string()).status();
    }
}

#[test]
fn a_group_without_programs_ends_and_a_daemon_that_died_is_replaced() {
    let program = stand_in();
    let s = Service::start(&["--mps", program.to_str().unwrap()]);
    let first = member(&s, me(), "a", 0);
    let [mps, server] = both(&s, me(), "a");
    // It has nothing of the service's environment but the path.
    let environment = std::fs::read_to_string(folder(&s, me(), "a").join("log/environment")).unwrap();
    assert!(environment.contains("CUDA_MPS_LOG_DIRECTORY") && !environment.contains("CARGO"), "{environment}");
    drop(first);
    let begun = Instant::now();
    until("the empty group has ended", || !alive(mps) && !alive(server));
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}", begun.elapsed());
    let second = member(&s, me(), "a", 0);
    let [again, left] = both(&s, me(), "a");
    assert_ne!(mps, again);
    // Killed: the program that is there has lost its GPU, the next one finds another daemon.
    Command::new("kill").args(["-9", &again.to_string()]).status().unwrap();
    until("it is gone", || !alive(again));
    Command::new("kill").arg(left.to_string()).status().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let third = member(&s, me(), "a", 0);
    let [new, _] = both(&s, me(), "a");
    assert_ne!(new, again);
    // An orderly end leaves it to the next service while programs are there.
    drop((second, third));
    drop(s);
    let _ = Command::new("kill").arg(new.to_string()).status();
}

#[test]
fn names_numbers_and_users_have_their_limits() {
    let program = stand_in();
    let s = Service::start(&["--mps", program.to_str().unwrap()]);
    let c = s.connect();
    let ask = |group: &str| c.ask(&Request::CoRun { group: group.into(), class: None, nice: None });
    for bad in ["", "a/b", "..", "a b", &"n".repeat(33), "\u{e4}"] {
        assert!(matches!(ask(bad), Err(Error::Refused(Refusal::Invalid(_)))), "{bad:?}");
    }
    let groups: Vec<String> = (0..8).map(|i| format!("g{i}")).collect();
    groups.iter().for_each(|g| drop(ask(g).unwrap()));
    assert!(matches!(ask("g8"), Err(Error::Refused(Refusal::Limit { limit: 8, .. }))));
    let mut end: Vec<u32> = groups.iter().map(|g| both(&s, me(), g)[0]).collect();
    if rustix::process::geteuid().is_root() {
        // A share that its user may not have starts nothing.
        let mut asks = start_member(&s, 65534, "h", 100_000);
        let refused = asks.0.wait().unwrap();
        assert!(!refused.success() && !folder(&s, 65534, "h").exists());
        // The same name is another group for another user, whose daemon is that user's.
        let other = member(&s, 65534, "g0", 0);
        let [mps, _] = both(&s, 65534, "g0");
        assert_eq!(std::fs::metadata(format!("/proc/{mps}")).unwrap().uid(), 65534);
        let theirs = std::fs::metadata(folder(&s, 65534, "g0")).unwrap();
        assert_eq!((theirs.uid(), theirs.mode() & 0o777), (65534, 0o700));
        end.push(mps);
        drop(other);
    }
    drop(s);
    end.iter().for_each(|pid| drop(Command::new("kill").arg(pid.to_string()).status()));
}

#[test]
fn without_mps_it_is_said_what_is_missing() {
    let s = Service::start(&["--mps", "/nowhere/mps-control"]);
    let why = s.connect().ask(&Request::CoRun { group: "a".into(), class: None, nice: None }).unwrap_err().to_string();
    assert!(why.contains("/nowhere/mps-control") && why.contains("driver"), "{why}");
}
