//! The service as a program: its start, its end, what it says to systemd.

mod common;

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Service, until};
use forebay_proto::client::{Connection, PATIENCE};
use forebay_proto::wire::{Class, Request};

fn command(dir: &std::path::Path) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.arg("--socket").arg(dir.join("socket")).stderr(Stdio::piped());
    c
}

#[test]
fn it_tells_systemd_that_it_is_ready_and_lives_and_ends_in_order() {
    let dir = std::env::temp_dir().join(format!("forebayd-notify-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let notify = UnixDatagram::bind(dir.join("notify")).unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut child = command(&dir).env("NOTIFY_SOCKET", dir.join("notify")).spawn().unwrap();
    let hear = || {
        let mut b = [0; 256];
        let n = notify.recv(&mut b).unwrap();
        String::from_utf8_lossy(&b[..n]).trim().to_owned()
    };
    assert_eq!(hear(), "READY=1");
    assert_eq!(hear(), "WATCHDOG=1");
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let mut last = hear();
    while last == "WATCHDOG=1" {
        last = hear();
    }
    assert_eq!(last, "STOPPING=1");
    assert!(child.wait().unwrap().success());
    assert!(!dir.join("socket").exists());
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn one_service_at_a_socket_and_what_a_dead_one_left_is_no_obstacle() {
    let mut s = Service::start(&[]);
    let second = command(&s.dir).output().unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("running already") && said.contains("socket"), "{said}");
    assert!(s.connect().processes().is_ok(), "the first one was disturbed");
    s.kill();
    assert!(s.socket().exists());
    s.restart();
    assert!(s.connect().processes().is_ok());
}

#[test]
fn what_is_no_socket_is_not_taken_away() {
    let dir = scratch("no-way");
    let file = dir.join("notes");
    std::fs::write(&file, "mine").unwrap();
    for (socket, figures) in [("notes", "figures"), ("socket", "notes")] {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebayd"));
        let out = c.arg("--socket").arg(dir.join(socket)).arg("--metrics").arg(dir.join(figures)).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains("notes") && said.contains("no socket"), "{said}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_damaged_state_file_is_no_obstacle_and_a_good_one_is_believed_of_the_same_process_only() {
    let mut s = Service::start(&[]);
    let mut sleeper = Command::new("/bin/sleep").arg("100").spawn().unwrap();
    s.set(sleeper.id(), Class::Custom(250_000));
    let state = s.dir.join("state");
    let state = if state.exists() { state } else { s.socket().with_extension("state") };
    let good = std::fs::read_to_string(&state).unwrap();
    assert!(good.contains("250000"), "{good}");
    s.kill();
    for bad in ["", "{", "[1,2]", "\0\0\0", &good[..good.len() / 2]] {
        std::fs::write(&state, bad).unwrap();
        s.restart();
        assert!(s.connect().processes().is_ok());
        s.kill();
    }
    // The same number, another time of birth: another process.
    let other = good.replace("\"began\":", "\"began\":1");
    std::fs::write(&state, other).unwrap();
    s.restart();
    let nice = s.connect().ask(&Request::Set { pid: sleeper.id(), class: None, nice: Some(1) });
    assert!(nice.is_ok());
    until("it is saved", || {
        let text = std::fs::read_to_string(&state).unwrap();
        !text.contains("250000") && text.contains("Normal")
    });
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

#[test]
fn figures_are_served_to_whoever_asks_and_nobody_can_hold_that_up() {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics");
    let s = Service::start(&["--metrics", path.to_str().unwrap()]);
    // Some who say nothing do not keep others away for long.
    let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let ask = || {
        let mut c = UnixStream::connect(&path).ok()?;
        c.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
        let mut text = String::new();
        c.read_to_string(&mut text).ok()?;
        Some(text)
    };
    until("figures come", || ask().is_some_and(|t| t.contains("forebay_device_utilisation_ratio{device=\"cpu\"}")));
    assert!(ask().unwrap().starts_with("HTTP/1.1 200 OK\r\n"));
    drop(silent);
    drop(s);
}

#[test]
fn what_comes_from_a_program_with_a_class_has_it_too() {
    let s = Service::start(&[]);
    // A shell that is set to background, and a program of the library that it starts.
    let exe = std::env::current_exe().unwrap();
    let script = format!("sleep 0.3; {} program --exact --ignored --nocapture & wait", exe.display());
    let mut shell = Command::new("/bin/sh")
        .args(["-c", &script])
        .env(forebay_proto::SOCKET_VARIABLE, s.socket())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    s.set(shell.id(), Class::Background);
    until("the shell's child has joined", || s.connect().processes().unwrap().iter().any(|p| p.pid != shell.id()));
    let all = s.connect().processes().unwrap();
    let child = all.iter().find(|p| p.pid != shell.id()).unwrap();
    assert_eq!(child.class, Class::Background);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(child.pid as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    shell.wait().unwrap();
}

/// A scratch folder.
fn scratch(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("forebayd-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn a_socket_that_systemd_made_is_served_and_left_where_it_is() {
    use forebay_proto::wire::{self, Reply};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::os::unix::process::CommandExt as _;
    let dir = scratch("activated");
    let path = dir.join("socket");
    let socket = forebay_proto::socket::new(rustix::net::SocketFlags::empty()).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 8).unwrap();
    // Somebody who connects before the service is there is served when it comes, however long that takes (a client of the
    // library's gives up after two seconds).
    let early = forebay_proto::socket::connect_to(&path, PATIENCE).unwrap();
    let hello = Request::Hello { version: wire::VERSION, name: wire::short_name("early") };
    forebay_proto::socket::send(early.as_fd(), &wire::encode(&hello), &[], true).unwrap();
    let mut c = Command::new("/bin/sh");
    let script = "LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" --socket \"$1\"";
    c.args(["-c", script, env!("CARGO_BIN_EXE_forebayd")]).arg(&path);
    let fd = socket.as_raw_fd();
    // SAFETY: dup2 and fcntl may be called between fork and exec; number 3 is free in the child or not needed there.
    unsafe {
        c.pre_exec(move || {
            // A file that has the number already would be closed with all others.
            let done = if fd == 3 { libc::fcntl(fd, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) };
            if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    let mut service = c.spawn().unwrap();
    let mut heard = [PollFd::new(&early, PollFlags::IN)];
    assert_eq!(poll(&mut heard, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })), Ok(1), "no answer in twenty seconds");
    let mut answer = vec![0; wire::MAX_REPLY];
    let (n, files) = forebay_proto::socket::receive(early.as_fd(), &mut answer, false).unwrap();
    let answer = wire::decode(&answer[..n], wire::MAX_REPLY).unwrap();
    assert!(matches!(answer, Reply::Welcome { .. }), "{answer:?}");
    assert_eq!(files.len(), 4);
    assert!(Connection::open_at(&path, "late").unwrap().processes().is_ok());
    let pid = rustix::process::Pid::from_raw(service.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(service.wait().unwrap().success());
    assert!(path.exists(), "the socket is systemd's");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_socket_that_is_none_is_not_served() {
    let dir = scratch("no-socket");
    // The first number is free, and what the service opens first has it by then.
    for (script, why) in [("3<&-", "file 3 is a socket to serve, but"), ("3</dev/null", "but it is none")] {
        let mut c = Command::new("/bin/sh");
        let script = format!("LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" --socket \"$1\" {script}");
        let out = c.args(["-c", &script, env!("CARGO_BIN_EXE_forebayd")]).arg(dir.join("socket")).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code().is_some_and(|c| c != 0) && said.contains(why), "{:?}: {said}", out.status);
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn without_file_descriptors_newcomers_are_sent_away_and_come_again_later() {
    let dir = scratch("descriptors");
    let mut c = Command::new("/bin/sh");
    c.args([
        "-c",
        "ulimit -n 48; exec \"$0\" --socket \"$1\" --metrics \"$1.figures\"",
        env!("CARGO_BIN_EXE_forebayd"),
    ]);
    let mut service = c.arg(dir.join("socket")).stderr(Stdio::null()).spawn().unwrap();
    let connect = || Connection::open_at(&dir.join("socket"), "test");
    until("it serves", || connect().is_ok());
    let mut open = Vec::new();
    let refused = loop {
        match connect() {
            Ok(c) => open.push(c),
            Err(e) => break e,
        }
        assert!(open.len() < 48, "there were descriptors for all");
    };
    println!("after {}: {refused}", open.len());
    assert!(open.len() >= 3);
    // Nor is there one for all who ask for figures: a connection takes several, and what is too few for that is used up here.
    let figures = || std::os::unix::net::UnixStream::connect(dir.join("socket.figures")).unwrap();
    let figures: Vec<_> = (0..6).map(|_| figures()).collect();
    // Those who are there are served, and it does not spin over those who are not.
    assert!(open[0].processes().is_ok());
    let cpu = || {
        use forebayd::service::World as _;
        forebayd::system::System::default().cpu_time_ns(service.id()).unwrap()
    };
    let before = cpu();
    std::thread::sleep(Duration::from_millis(500));
    assert!(cpu() - before < 100_000_000, "{} ns in half a second", cpu() - before);
    drop(figures);
    open.clear();
    until("there is room again", || connect().is_ok());
    service.kill().unwrap();
    service.wait().unwrap();
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_others_send_does_not_fill_the_log() {
    let dir = scratch("log");
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let mut service = command(&dir).stderr(log).spawn().unwrap();
    until("it serves", || Connection::open_at(&dir.join("socket"), "test").is_ok());
    let begun = std::time::Instant::now();
    for _ in 0..500 {
        let s = forebay_proto::socket::connect_to(&dir.join("socket"), PATIENCE).unwrap();
        let _ = forebay_proto::socket::send(std::os::fd::AsFd::as_fd(&s), &[0xFF; 9], &[], false);
        // Until it is closed.
        let mut b = [0; 64];
        while forebay_proto::socket::receive(std::os::fd::AsFd::as_fd(&s), &mut b, true).is_ok_and(|(n, _)| n > 0) {}
    }
    let seconds = begun.elapsed().as_secs() as usize + 2;
    // One more in a later second, which tells of those that were left out.
    std::thread::sleep(Duration::from_millis(1100));
    let s = forebay_proto::socket::connect_to(&dir.join("socket"), PATIENCE).unwrap();
    let _ = forebay_proto::socket::send(std::os::fd::AsFd::as_fd(&s), &[0xFF; 9], &[], false);
    until("it tells of those left out", || std::fs::read_to_string(dir.join("log")).unwrap().contains("more lines"));
    let lines = std::fs::read_to_string(dir.join("log")).unwrap().lines().count();
    assert!(lines > 10 && lines <= 22 * seconds + 5, "{lines} lines in {seconds} s");
    service.kill().unwrap();
    service.wait().unwrap();
    std::fs::remove_dir_all(dir).unwrap();
}

/// Somebody has stopped reading.
#[test]
fn what_nobody_reads_keeps_nobody_waiting() {
    let dir = scratch("unread");
    let (unread, full) = std::io::pipe().unwrap();
    // No room from the beginning.
    rustix::io::ioctl_fionbio(&full, true).unwrap();
    while rustix::io::write(&full, &[b'.'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&full, false).unwrap();
    let mut service = command(&dir).stderr(full).spawn().unwrap();
    let connect = || Connection::open_at(&dir.join("socket"), "test");
    until("it serves", || connect().is_ok());
    for _ in 0..50 {
        let s = forebay_proto::socket::connect_to(&dir.join("socket"), PATIENCE).unwrap();
        let _ = forebay_proto::socket::send(std::os::fd::AsFd::as_fd(&s), &[0xFF; 9], &[], false);
        let mut b = [0; 64];
        while forebay_proto::socket::receive(std::os::fd::AsFd::as_fd(&s), &mut b, true).is_ok_and(|(n, _)| n > 0) {}
    }
    assert!(connect().unwrap().processes().is_ok());
    service.kill().unwrap();
    service.wait().unwrap();
    drop(unread);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn by_priority_the_lower_nice_value_has_it_all() {
    let s = Service::start(&["--order", "priority"]);
    let both = [common::Program::start(&s, "program_wide", &[]), common::Program::start(&s, "program_wide", &[])];
    until("both have joined", || both.iter().all(|p| s.process(p.pid()).is_some()));
    s.connect().ask(&Request::Set { pid: both[1].pid(), class: None, nice: Some(5) }).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let before = both.each_ref().map(common::Program::cpu);
    std::thread::sleep(Duration::from_secs(2));
    let [first, second] = [0, 1].map(|i| (both[i].cpu() - before[i]).as_secs_f64());
    // By shares the weights would give a factor of three; what starves gets a little all the same.
    assert!(first > 8.0 * second, "{first} s and {second} s");
}

/// As in a container.
#[test]
fn a_users_service_needs_no_folder_of_a_login() {
    use std::io::BufRead;
    let user = rustix::process::geteuid().as_raw();
    if std::path::Path::new(&format!("/run/user/{user}")).is_dir() {
        return eprintln!("skipped: a login has made a run-time folder");
    }
    let dir = std::env::temp_dir().join(format!("forebayd-user-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_forebayd"));
    c.arg("--user").env("TMPDIR", &dir).env_remove("XDG_RUNTIME_DIR").env_remove("FOREBAY_SOCKET");
    let mut child = c.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    std::io::BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let found = Connection::open_at(&dir.join(format!("forebay-{user}/socket")), "test").map(drop);
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(said.contains("serving") && found.is_ok(), "{said} {found:?}");
}

#[test]
fn a_service_that_a_stranger_runs_is_not_spoken_to() {
    let s = Service::start(&[]);
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give a socket to somebody else");
        return;
    }
    let stranger = rustix::fs::Uid::from_raw(12_345);
    rustix::fs::chown(s.socket(), Some(stranger), None).unwrap();
    match Connection::open_at(&s.socket(), "test") {
        Err(forebay_proto::client::Error::Stranger { user: 12_345, .. }) => {}
        other => panic!("{:?}", other.map(|_| ())),
    }
}

/// Not a test: a program that the tests start.
#[test]
#[ignore = "a program that other tests start"]
fn program_wide() {
    common::hog(std::thread::available_parallelism().map_or(2, |n| n.get()), Duration::from_millis(1));
}

/// Not a test: a program that the tests start.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    common::hog(1, Duration::from_millis(1));
}
