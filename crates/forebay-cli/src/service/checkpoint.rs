//! `forebay checkpoint` and `restore`: a process's GPU memory out of the way, and back.

use std::time::{Duration, Instant};

use forebay::hal::Error;
use forebay::hal::cuda::checkpoint::{Checkpoints, State};
use forebay_proto::client::Connection;
use forebay_proto::wire::Class;

/// Between two attempts to lock a process that somebody else has locked.
const AGAIN: Duration = Duration::from_millis(5);
/// `CUDA_ERROR_ILLEGAL_STATE`: the process is not in the state that this takes.
const ILLEGAL_STATE: i64 = 401;

/// Options of `forebay checkpoint`.
#[derive(clap::Args)]
#[command(
    after_help = "The process stops at its next CUDA call, what it has on the GPU ends, and its device memory moves to the host's; \
the GPU then has that much more room. `forebay restore` brings it back, and it goes on where it was.

Not every process can be moved: the driver refuses those with managed memory, with memory that they share with other
processes, or under MPS; they go on as they were. Restoring needs as much free device memory as there was. A process
that was restored must have made a CUDA call of its own before it can be moved again.
It takes an NVIDIA driver from 570 on, and the process's user or root.

Example:
  forebay checkpoint 4711 && ./the-urgent-one; forebay restore 4711"
)]
pub struct Options {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    /// How long to wait for what a process has on the GPU, seconds
    #[arg(long, default_value_t = 10.0, value_parser = patience)]
    patience: f64,
}

/// Options of `forebay restore`.
#[derive(clap::Args)]
#[command(after_help = "There must be as much free memory on its GPUs as it had; else it stays as it is.

Example:
  forebay restore 4711")]
pub struct Restore {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
}

fn patience(text: &str) -> Result<f64, String> {
    let n: f64 = text.parse().map_err(|_| "say a number of seconds".to_owned())?;
    if (0.0..=3600.0).contains(&n) { Ok(n) } else { Err("0 to 3600 seconds".into()) }
}

/// What keeps its own process from being locked: one that the service keeps off the GPU never gets done.
fn is_suspended(pid: u32) -> bool {
    let all = Connection::open("forebay").and_then(|c| c.processes());
    all.is_ok_and(|all| all.iter().any(|p| p.pid == pid && p.class == Class::Suspended))
}

fn save(driver: &Checkpoints, pid: u32, patience: Duration) -> Result<String, String> {
    let state = || driver.state(pid).map_err(|e| format!("is no CUDA process, or not yours ({e})"));
    match state()? {
        // The service has it off the GPU for a moment, perhaps.
        State::Running | State::Locked => {}
        State::Saved => return Err("has its memory off the GPU already".into()),
        State::Failed => return Err("has failed and cannot go on".into()),
    }
    if is_suspended(pid) {
        return Err(format!("is suspended, so what it has on the GPU would never end: forebay resume {pid}"));
    }
    let had = super::nvml::memory().get(&pid).copied();
    let end = Instant::now() + patience;
    while let Err(e) = driver.lock(pid, end.saturating_duration_since(Instant::now())) {
        match (state()?, Instant::now() < end) {
            (State::Locked, true) => std::thread::sleep(AGAIN),
            (State::Locked, false) => return Err("is locked by somebody else".into()),
            // It was locked when this was tried, and is not any more.
            (State::Running, true) if matches!(&e, Error::Driver(d) if d.code == ILLEGAL_STATE) => {}
            _ => return Err(format!("was not done in time, and goes on ({e})")),
        }
    }
    if let Err(e) = driver.save(pid) {
        let back = driver.unlock(pid).map_or_else(|u| format!("and cannot go on: {u}"), |()| "and goes on".into());
        return Err(format!(
            "was refused, {back}: {e}\n  Managed memory, memory shared with other processes, and MPS stand against it."
        ));
    }
    Ok(had.map_or("its memory is off the GPU".into(), |b| format!("{:.0} MiB are off the GPU", b as f64 / 1048576.0)))
}

fn bring_back(driver: &Checkpoints, pid: u32) -> Result<String, String> {
    match driver.state(pid).map_err(|e| format!("is no CUDA process, or not yours ({e})"))? {
        State::Saved => {
            let full = |e| format!("could not be brought back and is as it was: {e}\n  Is there room on its GPUs?");
            driver.restore(pid).map_err(full)?;
        }
        // Brought back, and then somebody was interrupted.
        State::Locked => {}
        State::Running => return Err("runs, and was not moved".into()),
        State::Failed => return Err("has failed and cannot go on".into()),
    }
    match driver.unlock(pid) {
        Err(e) if !matches!(driver.state(pid), Ok(State::Running)) => Err(format!("is back and stays locked: {e}")),
        // Or somebody else was faster.
        _ => Ok("goes on".into()),
    }
}

fn each(pids: &[u32], f: impl Fn(&Checkpoints, u32) -> Result<String, String>) -> Result<(), String> {
    let driver = Checkpoints::open().map_err(|e| e.to_string())?;
    let mut failed = Vec::new();
    for &pid in pids {
        match f(&driver, pid) {
            Ok(said) => crate::say(&format!("{pid}: {said}")),
            Err(why) => failed.push(format!("{pid} {why}")),
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Moves processes off their GPUs.
pub fn run(o: &Options) -> Result<(), String> {
    let patience = Duration::from_secs_f64(o.patience);
    each(&o.pids, |driver, pid| save(driver, pid, patience))
}

/// Brings them back.
pub fn restore(o: &Restore) -> Result<(), String> {
    each(&o.pids, bring_back)
}
