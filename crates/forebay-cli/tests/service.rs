//! The commands around the service, as a user types them.

use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

struct Service(Child, PathBuf);

fn forebay(socket: &std::path::Path, arguments: &[&str]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
    c.args(arguments).env("FOREBAY_SOCKET", socket).output().unwrap()
}

fn text(b: &[u8]) -> String {
    String::from_utf8_lossy(b).into_owned()
}

impl Service {
    fn start(name: &str) -> Self {
        Self::start_with(name, &[])
    }

    fn start_with(name: &str, arguments: &[&str]) -> Self {
        let dir = std::env::temp_dir().join(format!("forebay-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
        c.arg("service").args(arguments).env("FOREBAY_SOCKET", dir.join("socket")).stderr(std::process::Stdio::null());
        let s = Service(c.spawn().unwrap(), dir);
        let begun = Instant::now();
        while !s.run(&["ps"]).status.success() {
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(20));
        }
        s
    }

    fn run(&self, arguments: &[&str]) -> Output {
        forebay(&self.1.join("socket"), arguments)
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let out = self.run(arguments);
        assert!(out.status.success(), "{}", text(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

#[test]
fn run_becomes_the_program_with_its_class_status_and_signals() {
    let s = Service::start("run");
    assert_eq!(s.run(&["run", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(s.run(&["run", "--share", "40", "--", "/nowhere/nothing"]).status.code(), Some(127));
    let killed = s.run(&["run", "--", "sh", "-c", "kill -9 $$"]).status;
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed), Some(9));
    // Nothing here sees device memory, which is said; the library keeps to the limit itself.
    let limited = s.run(&["run", "--memory", "2G", "--", "sh", "-c", "echo $FOREBAY_MEMORY"]);
    assert_eq!((limited.status.code(), text(&limited.stdout).trim()), (Some(0), "2147483648"));
    assert!(text(&limited.stderr).contains("binds programs of Forebay's library only"), "{}", text(&limited.stderr));
    let set = |limit| s.run(&["set", &std::process::id().to_string(), "--memory", limit]);
    assert!(text(&set("2G").stderr).contains("steers no GPU") && set("none").status.success());
    assert!(text(&set("2X").stderr).contains("as 500M or 2G"));
    // The program inside asks for itself: it registers, and has the class.
    let script = format!(
        "{} demo sharing-program --task-us 1000 >/dev/null & sleep 1; {0} ps --json; kill $!",
        env!("CARGO_BIN_EXE_forebay")
    );
    let all = s.json(&["run", "--class", "background", "--nice", "5", "--", "sh", "-c", &script]);
    let p = &all[0];
    assert_eq!(
        (p["class"].as_str(), p["nice"].as_i64(), p["device"].as_str()),
        (Some("background"), Some(5), Some("cpu")),
        "{all}"
    );
}

#[test]
fn set_suspend_and_resume_change_what_ps_and_top_show() {
    let s = Service::start("set");
    let mut c = Command::new(env!("CARGO_BIN_EXE_forebay"));
    c.args(["demo", "sharing-program", "--task-us", "500"]).env("FOREBAY_SOCKET", s.1.join("socket"));
    let mut program = c.stdout(std::process::Stdio::null()).spawn().unwrap();
    let pid = program.id().to_string();
    let listed = || s.json(&["ps", "--json"]).as_array().unwrap().iter().find(|p| p["pid"] == program.id()).cloned();
    let begun = Instant::now();
    while listed().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(s.run(&["set", &pid, "--share", "60%"]).status.success());
    assert_eq!(listed().unwrap()["class"], "custom");
    assert!(s.run(&["suspend", &pid]).status.success());
    assert_eq!(listed().unwrap()["class"], "suspended");
    assert!(s.run(&["resume", &pid]).status.success());
    assert_eq!(listed().unwrap()["class"], "custom");
    std::thread::sleep(Duration::from_millis(300));
    let top = s.json(&["top", "--once", "--json"]);
    assert_eq!(top["devices"][0]["name"], "cpu");
    assert!(top["devices"][0]["utilisation"].as_u64() > Some(100_000), "{top}");
    let table = text(&s.run(&["top", "--once"]).stdout);
    assert!(table.contains(&pid) && table.contains("custom") && table.contains("kernel"), "{table}");
    program.kill().unwrap();
    program.wait().unwrap();
}

#[test]
fn what_cannot_be_done_is_said_with_what_to_do() {
    let nowhere = std::env::temp_dir().join("forebay-no-service/socket");
    for arguments in [&["ps"][..], &["top", "--once"], &["set", "1", "--nice", "3"], &["run", "--", "true"]] {
        let out = forebay(&nowhere, arguments);
        assert!(!out.status.success());
        assert!(text(&out.stderr).contains("forebay service"), "{}", text(&out.stderr));
    }
    assert!(forebay(&nowhere, &["run", "--anyway", "--", "true"]).status.success());
    let s = Service::start("errors");
    for (arguments, part) in [
        (&["set", "1"][..], "--class"),
        (&["set", "999999999", "--nice", "1"], "no process"),
        (&["set", "1", "--share", "101"], "at most 100"),
        (&["set", "1", "--share", "5", "--class", "normal"], "cannot be used with"),
        (&["run"], "COMMAND"),
    ] {
        let out = s.run(arguments);
        assert!(!out.status.success());
        assert!(text(&out.stderr).contains(part), "{arguments:?}: {}", text(&out.stderr));
    }
}

#[test]
fn the_demonstration_plays_its_three_acts() {
    let out = forebay(std::path::Path::new("/nowhere"), &["demo", "sharing", "--seconds", "0.5", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let acts: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let names: Vec<_> = acts.as_array().unwrap().iter().map(|a| a["act"].as_str().unwrap()).collect();
    assert_eq!(names, ["alone", "default", "steered"]);
    assert!(acts.as_array().unwrap().iter().all(|a| a["latency_ms"]["items"].as_u64() > Some(5)), "{acts}");
}

#[test]
fn a_program_gets_no_more_memory_of_an_accelerator_than_it_may() {
    let forebay = env!("CARGO_BIN_EXE_forebay");
    let run = |limit: &str| {
        let program = ["run", "--anyway", "--memory", limit, "--", forebay, "demo", "gesture", "--device", "opencl"];
        let args = [&program[..], &["--frames", "3", "--rate", "max", "--quiet"]].concat();
        self::forebay(std::path::Path::new(""), &args)
    };
    let enough = run("4GiB");
    if text(&enough.stderr).contains("no device") || text(&enough.stderr).contains("cannot open") {
        eprintln!("skipped: no OpenCL device here");
        return;
    }
    assert!(enough.status.success(), "{}", text(&enough.stderr));
    let refused = run("100K");
    let why = text(&refused.stderr);
    assert!(!refused.status.success() && why.contains("out of memory") && why.contains("limit 102400 B"), "{why}");
    for wrong in ["", "x", "5X", "0", "99999999999T"] {
        let out = run(wrong);
        assert!(!out.status.success() && text(&out.stderr).contains("bytes"), "{wrong}: {}", text(&out.stderr));
    }
}

#[test]
fn a_program_of_a_co_run_group_finds_its_daemon_and_what_it_may_use() {
    let stand_in = std::env::temp_dir().join(format!("forebay-mps-{}", std::process::id()));
    std::fs::write(&stand_in, include_str!("../../forebayd/tests/common/mps.sh")).unwrap();
    let mut may = std::fs::metadata(&stand_in).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut may, 0o755);
    std::fs::set_permissions(&stand_in, may).unwrap();
    let s = Service::start_with("co-run", &["--mps", stand_in.to_str().unwrap()]);
    let asks = ["run", "--co-run", "lab", "--sm-percent", "40", "--behind", "--memory", "2G", "--"];
    // What MPS's own clients do: they look for the daemon's pipe.
    let script = "test -p $CUDA_MPS_PIPE_DIRECTORY/control && env | grep CUDA_MPS; cat $CUDA_MPS_PIPE_DIRECTORY/daemon";
    let out = s.run(&[&asks[..], &["sh", "-c", script]].concat());
    let (said, found) = (text(&out.stderr), text(&out.stdout));
    assert!(out.status.success() && said.contains("A fault in one ends the work of all"), "{said}");
    for part in ["THREAD_PERCENTAGE=40", "CLIENT_PRIORITY=1", "PINNED_DEVICE_MEM_LIMIT=0=2048M"] {
        assert!(found.contains(part), "{part}: {found}");
    }
    let alone = s.run(&["run", "--sm-percent", "40", "--", "true"]);
    assert!(!alone.status.success() && text(&alone.stderr).contains("--co-run"), "{}", text(&alone.stderr));
    let bad = s.run(&["run", "--co-run", "a/b", "--", "true"]);
    assert!(!bad.status.success() && text(&bad.stderr).contains("letters"), "{}", text(&bad.stderr));
    let daemon = found.lines().last().unwrap().to_owned();
    drop(s);
    Command::new("kill").arg(daemon).status().unwrap();
    let _ = std::fs::remove_file(stand_in);
}
