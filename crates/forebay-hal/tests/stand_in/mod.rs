//! The stand-in for NVIDIA's driver and compiler (`cuda.cpp` beside this file), for tests on machines without a GPU.
//! Shared by the tests of several crates by path.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A folder with the stand-in as `libcuda.so.1` and `libnvrtc.so.12`, built once per test process; none without g++.
pub fn build() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../forebay-hal/tests/stand_in/cuda.cpp");
        let dir = std::env::temp_dir().join(format!("forebay-stand-in-{}", std::process::id()));
        std::fs::create_dir_all(&dir).ok()?;
        let library = dir.join("libcuda.so.1");
        let built = Command::new("g++")
            .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-o"])
            .arg(&library)
            .arg(source)
            .arg("-ldl")
            .status();
        match built {
            Ok(status) => assert!(status.success(), "the stand-in does not compile"),
            Err(e) => {
                eprintln!("skipped: no g++ for the stand-in: {e}");
                return None;
            }
        }
        std::fs::copy(&library, dir.join("libnvrtc.so.12")).ok()?;
        Some(dir)
    })
    .as_deref()
}

/// `command` with the stand-in where the driver would be, and a kernel cache of its own.
pub fn under(dir: &Path, mut command: Command) -> Command {
    command.env("LD_LIBRARY_PATH", dir).env("FOREBAY_NVRTC", dir).env("FOREBAY_CACHE", dir.join("cache"));
    command
}

/// Runs the test `name` of this test binary again, with the stand-in; its output.
pub fn again(name: &str) -> Option<String> {
    let dir = build()?;
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(["--exact", name, "--nocapture"]);
    let out = under(dir, command).output().ok()?;
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{name} with the stand-in:\n{text}");
    assert!(!text.contains("skipped"), "{name} did not find the stand-in:\n{text}");
    Some(text)
}
