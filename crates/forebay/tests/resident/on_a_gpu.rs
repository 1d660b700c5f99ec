//! The same tests on a real CUDA device, if there is one: each in a process of its own, one after the other, since a grid keeps
//! others from loading code; and one that hangs or faults the device keeps nobody from being tried.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay::hal::{Kind, discover};

/// Set in a process that has the real device.
const HERE: &str = "RESIDENT_TEST_ON_A_GPU";
/// A test that has not ended by then never will: the first one compiles for half a minute perhaps.
const LIMIT: Duration = Duration::from_secs(90);

/// Whether this process is to use the real device.
pub fn is_here() -> bool {
    std::env::var_os(HERE).is_some()
}

fn run(name: &str, variables: &[(&str, &str)]) -> Result<(), String> {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(["--exact", name, "--nocapture"]).env(HERE, "1").envs(variables.iter().copied());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it can be started again");
    let mut pipes: Vec<Box<dyn std::io::Read + Send>> = Vec::new();
    child.stdout.take().into_iter().for_each(|p| pipes.push(Box::new(p)));
    child.stderr.take().into_iter().for_each(|p| pipes.push(Box::new(p)));
    let readers = pipes.into_iter().map(|mut p| {
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = p.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        })
    });
    let readers: Vec<_> = readers.collect();
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            _ if begun.elapsed() > LIMIT => break None,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let Some(status) = status else {
        let _ = child.kill();
        return Err(format!("{name} had not ended after {} s", LIMIT.as_secs()));
    };
    let said: String = readers.into_iter().filter_map(|r| r.join().ok()).collect();
    match status.success() && said.contains("1 passed") {
        true => Ok(()),
        false => Err(format!("{name} ({status}):\n{said}")),
    }
}

/// Runs these tests, with these variables; all of them, whatever becomes of some.
pub fn all(names: &[&str], variables: &[(&str, &str)]) {
    if is_here() || super::stand_in::is_here() {
        return;
    }
    let (devices, missing) = discover(&[Kind::Cuda]);
    if devices.is_empty() {
        return eprintln!("skipped: {}", missing.first().map_or("no CUDA device".into(), |(_, why)| why.to_string()));
    }
    if let Some(why) = devices.iter().find_map(|d| d.compiles().err()) {
        return eprintln!("skipped: {why}");
    }
    drop(devices);
    let failed: Vec<String> = names.iter().filter_map(|name| run(name, variables).err()).collect();
    assert!(failed.is_empty(), "{} of {} tests failed:\n{}", failed.len(), names.len(), failed.join("\n"));
}
