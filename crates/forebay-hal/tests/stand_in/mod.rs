//! The stand-in for NVIDIA's driver and compiler (`cuda.cpp` beside this file), for tests on machines without a GPU.
//! Shared by the tests of several crates by path.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A folder with the stand-in as `libcuda.so.1` and `libnvrtc.so.12`; none without g++. It is beside this test program,
/// named after its source, and built once for all test programs there.
pub fn build() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| {
        // From inside the test program, which may run where there is no checkout.
        const SOURCE: &str = include_str!("cuda.cpp");
        const FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"];
        let exe = std::env::current_exe().ok()?;
        let mut hash = DefaultHasher::new();
        (SOURCE, FLAGS).hash(&mut hash);
        let dir = exe.with_file_name(format!("stand-in-{:016x}", hash.finish()));
        if dir.exists() {
            return Some(dir);
        }
        // Made elsewhere and moved: test programs may come here at the same time.
        let own = exe.with_file_name(format!("stand-in-of-{}", std::process::id()));
        std::fs::create_dir_all(&own).ok()?;
        let source = own.join("cuda.cpp");
        let library = own.join("libcuda.so.1");
        std::fs::write(&source, SOURCE).ok()?;
        let built = Command::new("g++").args(FLAGS).arg("-o").arg(&library).arg(source).arg("-ldl").status();
        match built {
            Ok(status) => assert!(status.success(), "the stand-in does not compile"),
            Err(e) => {
                eprintln!("skipped: no g++ for the stand-in: {e}");
                std::fs::remove_dir_all(own).ok()?;
                return None;
            }
        }
        std::fs::copy(&library, own.join("libnvrtc.so.12")).ok()?;
        if std::fs::rename(&own, &dir).is_err() {
            // Somebody else was first.
            std::fs::remove_dir_all(own).ok()?;
        }
        Some(dir)
    })
    .as_deref()
}

/// `command` with the stand-in where the driver would be, and a kernel cache of its own.
pub fn under(dir: &Path, mut command: Command) -> Command {
    command.env("LD_LIBRARY_PATH", dir).env("FOREBAY_NVRTC", dir).env("FOREBAY_CACHE", dir.join("cache"));
    command.env(HERE, "1");
    command
}

/// Whether this process has the stand-in.
#[allow(dead_code, reason = "not every test program that includes this file asks")]
pub fn is_here() -> bool {
    std::env::var_os(HERE).is_some()
}

/// Runs the test `name` of this test binary once more, with the stand-in, in a process of its own.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn again(name: &str) {
    again_with(name, &[]);
}

/// The same, with these variables.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn again_with(name: &str, variables: &[(&str, &str)]) {
    let prepare = |dir, mut c: Command| {
        c.envs(variables.iter().copied());
        under(dir, c)
    };
    if let Some(text) = build().map(|dir| child(name, |c| prepare(dir, c))) {
        assert!(!text.contains("skipped"), "{name} did not find the stand-in:\n{text}");
    }
}

/// Whether this process runs nothing but one test; if not, runs `name` in one that does, on what there is here. For tests
/// that make the process's CUDA context unusable.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn alone(name: &str) -> bool {
    let alone = std::env::var_os(ALONE).is_some();
    if !alone {
        eprint!("{}", child(name, |c| c));
    }
    alone
}

/// Set in a process that has the stand-in.
const HERE: &str = "FOREBAY_TEST_STAND_IN";
/// Set in a process that runs one test.
const ALONE: &str = "FOREBAY_TEST_ALONE";

fn child(name: &str, prepare: impl FnOnce(Command) -> Command) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", name, "--nocapture"]).env(ALONE, "1");
    let out = prepare(command).output().expect("this program can be started again");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{name} in a process of its own:\n{text}");
    assert!(text.contains("1 passed"), "there is no test {name}:\n{text}");
    text
}
