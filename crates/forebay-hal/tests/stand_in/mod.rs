//! The stand-in for NVIDIA's driver and compiler (`cuda.cpp` beside this file), for tests on machines without a GPU; and one
//! for an OpenCL loader (`opencl.cpp`), which only shows devices. With NVIDIA's own compiler beside it, which needs no GPU, it
//! runs what that makes for GPUs, warp by warp (`ptx/`). Where there is an OpenCL driver for processors, `opencl_gpu.cpp` makes it
//! as strict as a GPU's.
//! Shared by the tests of several crates by path.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The loader's stand-in, in the folder of [`build`]: for `OPENCL_DYLIB_PATH`.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub const OPENCL: &str = "stand-in-opencl.so";

/// The same for what makes OpenCL devices behave as GPUs; not there where there is no OpenCL.
const OPENCL_GPU: &str = "stand-in-opencl-gpu.so";

/// A folder with the stand-in as `libcuda.so.1` and `libnvrtc.so.12`, [`OPENCL`], and [`OPENCL_GPU`]; none without g++. It is beside
/// this test program, named after its source, and built once for all test programs there.
pub fn build() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| {
        // From inside the test program, which may run where there is no checkout.
        // The last one needs a loader to be linked to, and may fail.
        const SOURCES: [(&str, &str, &str, &[&str]); 3] = [
            ("cuda.cpp", include_str!("cuda.cpp"), "libcuda.so.1", &["-ldl"]),
            ("opencl.cpp", include_str!("opencl.cpp"), OPENCL, &[]),
            (
                "opencl_gpu.cpp",
                include_str!("opencl_gpu.cpp"),
                OPENCL_GPU,
                &["-Wl,--no-as-needed", "-l:libOpenCL.so.1", "-ldl"],
            ),
        ];
        const HEADERS: [(&str, &str); 13] = [
            ("machine.h", include_str!("machine.h")),
            ("virtual.h", include_str!("virtual.h")),
            ("parts.h", include_str!("parts.h")),
            ("checkpoints.h", include_str!("checkpoints.h")),
            ("nvrtc.h", include_str!("nvrtc.h")),
            ("turns.h", include_str!("turns.h")),
            ("ptx/program.h", include_str!("ptx/program.h")),
            ("ptx/values.h", include_str!("ptx/values.h")),
            ("ptx/lanes.h", include_str!("ptx/lanes.h")),
            ("ptx/meet.h", include_str!("ptx/meet.h")),
            ("ptx/one.h", include_str!("ptx/one.h")),
            ("ptx/timed.h", include_str!("ptx/timed.h")),
            ("ptx/weak.h", include_str!("ptx/weak.h")),
        ];
        const FLAGS: [&str; 6] = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"];
        let exe = std::env::current_exe().ok()?;
        let mut hash = DefaultHasher::new();
        (SOURCES, HEADERS, FLAGS).hash(&mut hash);
        let dir = exe.with_file_name(format!("stand-in-{:016x}", hash.finish()));
        if dir.exists() {
            tidy(&dir);
            return Some(dir);
        }
        // Made elsewhere and moved: test programs may come here at the same time.
        let own = exe.with_file_name(format!("stand-in-of-{}", std::process::id()));
        std::fs::create_dir_all(own.join("ptx")).ok()?;
        for (name, text) in HEADERS {
            std::fs::write(own.join(name), text).ok()?;
        }
        for (name, text, library, linked) in SOURCES {
            let source = own.join(name);
            std::fs::write(&source, text).ok()?;
            match Command::new("g++").args(FLAGS).arg("-o").arg(own.join(library)).arg(source).args(linked).output() {
                Ok(said) if said.status.success() => {}
                Ok(said) => {
                    let said = String::from_utf8_lossy(&said.stderr);
                    assert!(said.contains("-l:libOpenCL.so.1"), "the stand-in {name} does not compile:\n{said}");
                }
                Err(e) => {
                    eprintln!("skipped: no g++ for the stand-in: {e}");
                    std::fs::remove_dir_all(own).ok()?;
                    return None;
                }
            }
        }
        std::fs::copy(own.join("libcuda.so.1"), own.join("libnvrtc.so.12")).ok()?;
        if std::fs::rename(&own, &dir).is_err() {
            // Somebody else was first.
            std::fs::remove_dir_all(own).ok()?;
        }
        Some(dir)
    })
    .as_deref()
}

/// What a command says that has the stand-in where the driver would be, and, unless it says where, the compiler too, and a
/// cache that it shares with others of this process only.
pub fn output_under(dir: &Path, mut command: Command) -> Output {
    let own = dir.join(format!("cache-{}", std::process::id()));
    for (name, usual) in [("FOREBAY_CACHE", own.as_path()), ("FOREBAY_NVRTC", dir)] {
        if !command.get_envs().any(|(set, _)| set == name) {
            command.env(name, usual);
        }
    }
    command.env("LD_LIBRARY_PATH", dir);
    command.env(HERE, "1").output().expect("the command can be started")
}

/// Removes the caches of processes that have ended.
fn tidy(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let gone = |pid: &str| !Path::new("/proc").join(pid).exists();
        if name.strip_prefix("cache-").is_some_and(gone) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
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
    let run = |dir, mut c: Command| {
        c.envs(variables.iter().copied());
        output_under(dir, c)
    };
    if let Some(text) = build().map(|dir| child(name, |c| run(dir, c))) {
        // A machine may well have no OpenCL.
        let skipped = text.lines().any(|l| l.contains("skipped") && !l.contains("no opencl device"));
        assert!(!skipped, "{name} did not find the stand-in:\n{text}");
    }
}

/// The path of what makes OpenCL devices behave as GPUs, for `OPENCL_DYLIB_PATH`; none, and a word about it, where there is no
/// OpenCL.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn opencl_gpu() -> Option<String> {
    let library = build()?.join(OPENCL_GPU);
    if !library.exists() {
        eprintln!("skipped: no OpenCL loader to make a GPU of");
    }
    library.exists().then(|| library.display().to_string())
}

/// Whether this process's OpenCL devices behave as GPUs; if not, runs the test `name` once more in one whose do.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn on_opencl_gpus(name: &str) -> bool {
    let here = std::env::var("OPENCL_DYLIB_PATH").is_ok_and(|p| p.ends_with(OPENCL_GPU));
    if !here && let Some(library) = opencl_gpu() {
        child(name, |mut c| c.env("OPENCL_DYLIB_PATH", library).output().expect("this program can be started again"));
    }
    here
}

/// What makes a command's stand-in run what NVIDIA's own compiler makes: none, and a word about it, where the tests are not told
/// where that is.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn as_ptx() -> Option<[(&'static str, String); 2]> {
    let nvrtc = std::env::var("FOREBAY_NVRTC").ok().filter(|p| !p.is_empty());
    if nvrtc.is_none() {
        eprintln!("skipped: FOREBAY_NVRTC does not say where NVIDIA's compiler is (pip install nvidia-cuda-nvrtc)");
    }
    Some([("FOREBAY_NVRTC", nvrtc?), ("STAND_IN_PTX", "99".into())])
}

/// Runs tests of this binary once more each, on the stand-in as it runs what NVIDIA's compiler makes, with these variables.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn again_as_ptx(names: &[&str], variables: &[(&str, &str)]) {
    let Some(ptx) = as_ptx() else { return };
    let all: Vec<(&str, &str)> = ptx.iter().map(|(k, v)| (*k, v.as_str())).chain(variables.iter().copied()).collect();
    names.iter().for_each(|name| again_with(name, &all));
}

/// Whether this process runs nothing but one test; if not, runs `name` in one that does, on what there is here. For tests
/// that make the process's CUDA context unusable.
#[allow(dead_code, reason = "not every test program that includes this file has such a test")]
pub fn alone(name: &str) -> bool {
    let alone = std::env::var_os(ALONE).is_some();
    if !alone {
        eprint!("{}", child(name, |mut c| c.output().expect("this program can be started again")));
    }
    alone
}

/// Set in a process that has the stand-in.
const HERE: &str = "FOREBAY_TEST_STAND_IN";
/// Set in a process that runs one test.
const ALONE: &str = "FOREBAY_TEST_ALONE";

fn child(name: &str, run: impl FnOnce(Command) -> Output) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", name, "--nocapture"]).env(ALONE, "1");
    let out = run(command);
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{name} in a process of its own:\n{text}");
    assert!(text.contains("1 passed"), "there is no test {name}:\n{text}");
    text
}
