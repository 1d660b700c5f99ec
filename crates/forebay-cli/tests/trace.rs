//! `forebay trace`: the GPU's log (on the fake), the service and a program of the library in one timeline.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use forebay_proto::client::{Account, Session};
use forebay_rm::fake::{FakeRm, Load, remote};

fn forebay(dir: &Path, arguments: &[&str]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
    c.args(arguments).env("FOREBAY_SOCKET", dir.join("socket")).env("TMPDIR", dir).output().unwrap()
}

fn said(o: &Output) -> String {
    String::from_utf8_lossy(&o.stderr).into_owned()
}

/// How often a text occurs in a file.
fn count(file: &Path, text: &str) -> usize {
    let bytes = std::fs::read(file).unwrap();
    bytes.windows(text.len()).filter(|w| *w == text.as_bytes()).count()
}

fn folder(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("forebay-trace-test-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn switches_shares_and_tasks_are_in_one_file() {
    let dir = folder("all");
    let rm = FakeRm::default();
    // Two processes that exist, so that they have names.
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    rm.start(std::process::id(), 1, 1, Load::saturating(1000));
    rm.start(other.id(), 1, 1, Load::saturating(1000));
    remote::serve(rm.clone(), &dir.join("rm")).unwrap();
    let gpu = rm.clone();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(1));
            gpu.run(1000);
        }
    });
    let mut service = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let mut service = service.args(["service"]).env("FOREBAY_SOCKET", dir.join("socket")).spawn().unwrap();
    while !forebay(&dir, &["ps"]).status.success() {
        std::thread::sleep(Duration::from_millis(20));
    }
    // This test is a program of the service for as long as it lasts.
    let session = Session::open_at(vec![dir.join("socket")], "trace-test").unwrap();
    let _account = Account::cpu(&session).unwrap();
    let file = dir.join("t.pftrace");
    let graph = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/6_graph_file.toml");
    let (file_name, rm_name) = (file.to_str().unwrap(), dir.join("rm"));
    let arguments = ["trace", "--seconds", "1", "--fake-rm", rm_name.to_str().unwrap(), file_name, "--"];
    let me = env!("CARGO_BIN_EXE_forebay");
    let program = ["sh", "-c", "sleep 0.3; \"$0\" graph run \"$1\"; sleep 0.3", me, graph];
    let out = forebay(&dir, &[&arguments[..], &program].concat());
    service.kill().unwrap();
    service.wait().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    assert!(said(&out).contains("on 1 GPU,") && said(&out).contains("1 graphs"), "{}", said(&out));
    assert_eq!(count(&file, "GPU 0 (context switches)"), 1);
    // Turns of 2 ms: hundreds of stays.
    let stays = count(&file, "sleep");
    assert!(stays > 100, "{stays}");
    assert_eq!(count(&file, "cpu (the service)"), 1);
    assert!(count(&file, &format!("trace-test ({}) share", std::process::id())) == 1);
    let graph: toml::Value = toml::from_str(&std::fs::read_to_string(graph).unwrap()).unwrap();
    for task in graph["task"].as_array().unwrap() {
        assert!(count(&file, task["name"].as_str().unwrap()) > 0, "{task}");
    }
    // Nothing is left in the folder for temporary files.
    let left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_str().unwrap().starts_with("forebay-trace-")), "{left:?}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn without_anything_to_record_it_says_so_and_a_failing_program_is_told() {
    let dir = folder("nothing");
    let out = forebay(&dir, &["trace", "--seconds", "0.1", "t.pftrace"]);
    // A machine with an NVIDIA GPU, and root, has something.
    assert!(out.status.success() || said(&out).contains("nothing to record"), "{}", said(&out));
    let file = dir.join("t");
    let out = forebay(&dir, &["trace", "--seconds", "5", file.to_str().unwrap(), "--", "false"]);
    assert!(!out.status.success() && said(&out).contains("ended with"), "{}", said(&out));
    assert!(file.exists());
    let out = forebay(&dir, &["trace", "--seconds", "1", "/nowhere/t", "--", "true"]);
    assert!(said(&out).contains("/nowhere/t"), "{}", said(&out));
    let out = forebay(&dir, &["trace", "--seconds", "0", "t"]);
    assert!(said(&out).contains("more than 0"), "{}", said(&out));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_tells_it_to_end_is_told_the_program_too() {
    let dir = folder("ends");
    // In the time that is recorded, and when it waits for the program's end.
    for seconds in ["60", "0.1"] {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let (file, up) = (dir.join("t"), dir.join("up"));
        c.args(["trace", "--seconds", seconds])
            .arg(&file)
            .args(["--", "sh", "-c", "echo > \"$0\"; exec sleep 300"])
            .arg(&up);
        c.env("FOREBAY_SOCKET", dir.join("socket")).stderr(std::process::Stdio::piped());
        let (begun, child) = (std::time::Instant::now(), c.spawn().unwrap());
        while !up.exists() || begun.elapsed() < Duration::from_millis(300) {
            std::thread::sleep(Duration::from_millis(10));
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(60));
        assert!(!out.status.success() && said(&out).contains("signal: 15"), "{}", said(&out));
        assert!(std::fs::metadata(&file).is_ok());
        std::fs::remove_file(up).unwrap();
    }
    std::fs::remove_dir_all(dir).unwrap();
}
