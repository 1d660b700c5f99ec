//! An ordinary StarPU program under Forebay's policy: its results are right, and the policy is the one that placed its tasks.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// The library, built as whoever uses it does.
fn library() -> PathBuf {
    let built = run(Command::new(env!("CARGO")).args(["build", "-q", "-p", "forebay-starpu"]));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let exe = std::env::current_exe().unwrap();
    // target/PROFILE/deps/test
    let target = exe.ancestors().nth(3).unwrap();
    let found = target.join("debug/libforebay_starpu.so");
    assert!(found.exists(), "{}", found.display());
    found
}

fn starpu() -> Option<(String, Vec<String>)> {
    ["starpu-1.4", "starpu-1.3"].into_iter().find_map(|name| {
        let out = Command::new("pkg-config").args(["--cflags", "--libs", name]).output().ok()?;
        let flags = String::from_utf8_lossy(&out.stdout).split_whitespace().map(str::to_owned).collect();
        out.status.success().then(|| (name.to_owned(), flags))
    })
}

fn program(dir: &Path, flags: &[String]) -> Option<PathBuf> {
    let out = dir.join("program");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/program.c");
    let built = run(Command::new("gcc")
        .args(["-O1", "-Wno-deprecated-declarations", source, "-o"])
        .arg(&out)
        .args(flags)
        .arg("-lOpenCL"));
    if !built.status.success() {
        eprintln!("skipped: no OpenCL headers or library to build with: {}", String::from_utf8_lossy(&built.stderr));
        return None;
    }
    Some(out)
}

#[test]
fn a_program_that_knows_nothing_of_it_is_placed_by_it() {
    let Some((series, flags)) = starpu() else {
        eprintln!("skipped: no StarPU here");
        return;
    };
    let dir = std::env::temp_dir().join(format!("forebay-starpu-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let Some(program) = program(&dir, &flags) else { return };
    let library = library();
    let start = |ours: bool, opencl: bool| {
        // By way of a shell, which has no StarPU and must not mind.
        let mut c = Command::new("sh");
        c.args(["-c", "\"$0\""]).arg(&program);
        // Whatever StarPU writes is its own.
        c.env("STARPU_HOME", &dir).env("FOREBAY_STARPU_LOG", "1").env("FOREBAY_SOCKET", "");
        c.env("STARPU_NCPU", "2").env("STARPU_NCUDA", "0").env("STARPU_SILENT", "1");
        if opencl {
            c.env("STARPU_OPENCL_ON_CPUS", "1");
        } else {
            c.env("STARPU_NOPENCL", "0");
        }
        if ours && series == "starpu-1.3" {
            c.env("LD_PRELOAD", &library);
        } else if ours {
            c.env("STARPU_SCHED_LIB", &library).env("STARPU_SCHED", "forebay");
        }
        let out = run(&mut c);
        let (said, log) =
            (String::from_utf8_lossy(&out.stdout).into_owned(), String::from_utf8_lossy(&out.stderr).into_owned());
        (out.status, said, log)
    };
    let tasks = |log: &str| -> Vec<u64> {
        let of = |l: &str| l.strip_prefix("forebay: ")?.split(' ').next()?.parse().ok();
        log.lines().filter_map(of).collect()
    };
    for opencl in [false, true] {
        let (status, said, log) = start(false, opencl);
        if status.code() == Some(77) {
            eprintln!("skipped: StarPU finds no worker: {log}");
            continue;
        }
        assert!(said.contains("480 tasks, 0 wrong"), "without us: {said} {log}");
        assert!(tasks(&log).is_empty());
        let (status, said, log) = start(true, opencl);
        assert!(status.success() && said.contains("480 tasks, 0 wrong"), "{status} {said} {log}");
        let each = tasks(&log);
        assert_eq!(each.iter().sum::<u64>(), 480, "{log}");
        // Both cores are used, and an OpenCL worker has been tried at least.
        assert!(each.len() >= 2 && each.iter().filter(|n| **n > 0).count() >= 2, "{log}");
        if opencl && log.contains("OpenCL") {
            assert!(each.iter().all(|n| *n > 0), "{log}");
            // Cores that the OpenCL device needs are left to it.
            let spun = said.lines().find_map(|l| l.strip_suffix(" of 300 ms without a task")?.parse::<f64>().ok());
            assert!(spun.unwrap() < 100.0, "{said}");
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}
