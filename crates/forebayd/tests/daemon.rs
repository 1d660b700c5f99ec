//! The service as a program: its start, its end, what it says to systemd.

mod common;

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Service, until};
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
    let path = std::env::temp_dir().join(format!("forebay-metrics-{}", std::process::id()));
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

/// Not a test: a program that the tests start.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    common::hog(1, Duration::from_millis(1));
}
