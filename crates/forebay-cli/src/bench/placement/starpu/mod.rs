//! StarPU under its own policies and under ours, alone and beside load that changes: a program of its own, and the six workloads.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Changing, Result};
use crate::bench::peers::build;
use crate::bench::schema::{Row, median};

mod mix;

pub use self::mix::{Mix, be};

/// Measurements of each policy.
const ROUNDS: usize = 3;
/// Ours is the first.
pub(super) const POLICIES: [&str; 3] = [OURS, "dmda", "eager"];
const OURS: &str = "forebay";

/// The plugin, if it has been built: beside this command, as cargo leaves both.
fn plugin() -> Result<PathBuf> {
    let at = std::env::current_exe().map_err(|e| e.to_string())?.with_file_name("libforebay_starpu.so");
    let missing = "the policy is not built (cargo build --release -p forebay-starpu)";
    Some(at).filter(|p| p.exists()).ok_or_else(|| missing.into())
}

/// Has a command use StarPU with a policy, and with the models in `home`.
fn under(c: &mut Command, policy: &str, home: &Path, calibrate: bool) -> Result<()> {
    c.env("STARPU_HOME", home).env("STARPU_SILENT", "1").env("STARPU_OPENCL_ON_CPUS", "1").env("FOREBAY_SOCKET", "");
    if policy == OURS {
        c.env("LD_PRELOAD", plugin()?).env("FOREBAY_STARPU_LOG", "1");
    } else {
        c.env("STARPU_SCHED", policy).env("STARPU_CALIBRATE", if calibrate { "1" } else { "0" });
    }
    Ok(())
}

/// The number that a command says after `what`.
fn told(mut c: Command, policy: &str, what: &str) -> Result<f64> {
    let out = c.output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let found = said.lines().find_map(|l| l.strip_prefix(what)?.trim().parse().ok());
    // A library that was built without StarPU does nothing: what was measured would be StarPU's own policy.
    if policy == OURS && !String::from_utf8_lossy(&out.stderr).contains("forebay: ") {
        return Err("the policy placed nothing: was it built where StarPU's headers are? (cargo build --release -p forebay-starpu)".into());
    }
    let wrong = || format!("{policy}: the StarPU program said {said:?}, {:?}", String::from_utf8_lossy(&out.stderr));
    found.filter(|_| out.status.success()).ok_or_else(wrong)
}

/// Seconds that the program took.
fn seconds(program: &Path, home: &Path, policy: &str, rounds: u32, calibrate: bool) -> Result<f64> {
    let mut c = Command::new(program);
    c.arg(rounds.to_string());
    under(&mut c, policy, home, calibrate)?;
    told(c, policy, "seconds")
}

pub(super) fn run(rows: &mut Vec<Row>) -> Result<()> {
    let built = plugin().and_then(|_| build("starpu_placement.c", "gcc", "starpu-1.3", &["-lOpenCL"]));
    let program = match built {
        Ok(p) => p,
        Err(why) => {
            eprintln!("starpu: not measured: {why}");
            return Ok(());
        }
    };
    let home = tempfile::tempdir().map_err(|e| e.to_string())?;
    // dmda's models, measured without load as its manual says.
    seconds(&program.path(), home.path(), "dmda", 20, true)?;
    for (what, loaded, target) in [("nothing else", false, 1.0), ("load that changes", true, 1.5)] {
        let load = loaded.then(Changing::start);
        let mut samples: [Vec<f64>; 3] = Default::default();
        for round in 0..ROUNDS {
            for i in 0..POLICIES.len() {
                let i = (i + round) % POLICIES.len();
                samples[i].push(seconds(&program.path(), home.path(), POLICIES[i], 30, false)?);
            }
        }
        drop(load);
        let [ours, dmda, eager] = samples.map(median);
        let row = Row::new(format!("a StarPU program, beside {what}"), "s", Some(ours));
        rows.push(
            row.peer("StarPU dmda", Some(dmda)).peer("StarPU eager", Some(eager)).faster_than("StarPU dmda", target),
        );
    }
    Ok(())
}
