//! Development tasks: `cargo xtask bundle`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Largest bundle, bytes.
const MAX_BUNDLE: u64 = 60 << 20;

/// Test programs that only use the processor, or (`examples`) read files of the checkout: a host that is lent by the minute
/// says nothing by them.
const NOT_FOR_DEVICES: [&str; 7] =
    ["allocations", "dataflow", "examples", "patience", "races", "random_graphs", "realtime"];

/// The `run` script.
const RUN: &str = include_str!("run.sh");

fn main() -> ExitCode {
    let task = std::env::args().nth(1);
    let result = match task.as_deref() {
        Some("bundle") => bundle(),
        _ => Err("usage: cargo xtask bundle".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}

/// What a program prints; what it says of its progress and of errors is seen at once: a build takes minutes.
fn output(program: &str, args: &[&str]) -> Result<String, String> {
    let out =
        Command::new(program).args(args).stderr(Stdio::inherit()).output().map_err(|e| format!("{program}: {e}"))?;
    if !out.status.success() {
        return Err(format!("{program} {} ended with {}", args.join(" "), out.status));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Makes `bundle/`: the command, the test programs, sources for compilers that are there, and a `run` script.
fn bundle() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned();
    std::env::set_current_dir(&root).map_err(|e| e.to_string())?;
    let dir = root.join("bundle");
    let _ = std::fs::remove_dir_all(&dir);
    let tests = dir.join("tests");
    std::fs::create_dir_all(&tests).map_err(|e| e.to_string())?;
    // Cargo says in its JSON messages where it puts what.
    let build = ["build", "--release", "--message-format=json", "-p", "forebay-cli"];
    let built = output("cargo", &build)?;
    let command = built.lines().filter_map(|l| field(l, "\"executable\":\"")).find(|p| p.ends_with("/forebay"));
    copy(Path::new(&command.ok_or("cargo built no command")?), &dir.join("forebay"))?;
    let parts = ["-p", "forebay-hal", "-p", "forebay", "-p", "forebay-rm"];
    let test = [&["test", "--profile=bundle", "--no-run", "--message-format=json"][..], &parts].concat();
    for line in
        output("cargo", &test)?.lines().filter(|l| l.contains("\"test\":true") || l.contains("\"kind\":[\"test\"]"))
    {
        let Some(path) = field(line, "\"executable\":\"") else { continue };
        let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Cargo puts a dash and a hash behind it.
        let test = name.rsplit_once('-').map_or(&*name, |(test, _)| test);
        if !NOT_FOR_DEVICES.contains(&test) {
            copy(Path::new(&path), &tests.join(name))?;
        }
    }
    pack(&tests)?;
    // Sources for whatever compiler is there.
    for (from, to) in [("benches/peers", "peers"), ("device", "device"), ("examples/cuda", "examples/cuda")] {
        copy_all(&root.join(from), &dir.join(to))?;
    }
    let commit = output("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|_| "unknown".into());
    write_run(&dir, commit.trim())?;
    let bytes = size(&dir);
    println!("bundle/: {:.1} MB", bytes as f64 / 1e6);
    if bytes > MAX_BUNDLE {
        return Err(format!("larger than {} MB", MAX_BUNDLE >> 20));
    }
    Ok(())
}

/// Writes the script into the bundle.
fn write_run(dir: &Path, commit: &str) -> Result<(), String> {
    let run = dir.join("run");
    std::fs::write(&run, RUN.replace("@COMMIT@", commit)).map_err(|e| e.to_string())?;
    executable(&run)
}

/// Makes an archive of a folder, in the folder's place: test programs are a third as large then.
fn pack(dir: &Path) -> Result<(), String> {
    let archive = dir.with_extension("tar.gz");
    let tar = Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(dir).arg(".").status();
    match tar {
        Ok(status) if status.success() => std::fs::remove_dir_all(dir).map_err(|e| e.to_string()),
        Ok(status) => Err(format!("tar ended with {status}")),
        Err(e) => Err(format!("tar: {e}")),
    }
}

fn field(line: &str, key: &str) -> Option<String> {
    let at = line.find(key)? + key.len();
    Some(line[at..].split('"').next()?.to_owned())
}

/// Copies a file; programs are stripped of debug information.
fn copy(from: &Path, to: &PathBuf) -> Result<(), String> {
    std::fs::copy(from, to).map_err(|e| format!("{}: {e}", from.display()))?;
    let _ = Command::new("strip").arg(to).stderr(Stdio::null()).status();
    Ok(())
}

/// Copies a folder.
fn copy_all(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::create_dir_all(to).map_err(|e| format!("{}: {e}", to.display()))?;
    for entry in std::fs::read_dir(from).map_err(|e| format!("{}: {e}", from.display()))?.flatten() {
        let (file, to) = (entry.path(), to.join(entry.file_name()));
        if file.is_dir() { copy_all(&file, &to)? } else { copy(&file, &to)? }
    }
    Ok(())
}

fn executable(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).map_err(|e| e.to_string())
}

fn size(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.metadata().map_or(0, |m| if m.is_dir() { size(&e.path()) } else { m.len() })).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bundle of scripts: a command that fails when it is to show what may be used, and two tests, one of which fails.
    fn bundle_of_scripts(dir: &Path) {
        let script = |path: &Path, text: &str| {
            std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
            executable(path).unwrap();
        };
        let tests = dir.join("tests");
        std::fs::create_dir_all(&tests).unwrap();
        script(&dir.join("forebay"), "echo \"command: $*\"; [ \"$1\" != doctor ]");
        script(&tests.join("good-1"), "echo \"good: $*\"");
        script(&tests.join("bad-2"), "echo bad; exit 3");
        pack(&tests).unwrap();
        assert!(!tests.exists());
        write_run(dir, "abc").unwrap();
    }

    #[test]
    fn the_script_runs_everything_and_says_at_the_end_what_failed() {
        let dir = std::env::temp_dir().join(format!("forebay-bundle-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        bundle_of_scripts(&dir);
        let run = |parts: &[&str]| {
            let unpacked = dir.join("tmp");
            std::fs::create_dir_all(&unpacked).unwrap();
            let out = dir.join("out");
            let script = Command::new(dir.join("run")).args(parts).env("OUT", &out).env("TMPDIR", &unpacked).output();
            let script = script.unwrap();
            let left = std::fs::read_dir(&unpacked).unwrap().count();
            assert_eq!(left, 0, "what was unpacked is left behind");
            (script.status.code(), String::from_utf8_lossy(&script.stdout).into_owned())
        };
        let (code, said) = run(&["conformance", "transfer"]);
        assert_eq!(code, Some(1), "{said}");
        let (all, failed) = said.split_once("\nFAILED:").expect(&said);
        for part in
            ["command: bench conformance --out", "good: --test-threads=1", "bad\n", "bench transfer --device cuda"]
        {
            assert!(all.contains(part), "{part} in {said}");
        }
        for (part, why) in [("./forebay doctor --calibrate", "status 1"), ("/bad-2 --test-threads=1", "status 3")] {
            assert!(failed.lines().any(|l| l.contains(part) && l.contains(why)), "{part} in {failed}");
        }
        assert_eq!(failed.lines().filter(|l| !l.is_empty()).count(), 2, "{failed}");
        // What each said is kept, and so is the machine.
        let logs: Vec<_> = std::fs::read_dir(dir.join("out/log")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(logs.iter().any(|l| l.to_string_lossy().contains("bad-2")), "{logs:?}");
        assert!(dir.join("out/machine.txt").exists());
        let (code, said) = run(&["transfer"]);
        assert_eq!((code, said.contains("FAILED")), (Some(0), false), "{said}");
        assert_eq!(run(&["everything"]).0, Some(2));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
