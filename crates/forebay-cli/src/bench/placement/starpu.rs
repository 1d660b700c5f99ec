//! A StarPU program under its own policies and under ours, alone and beside load that changes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Changing, Result};
use crate::bench::peers::build;
use crate::bench::schema::{Row, median};

/// Measurements of each policy.
const ROUNDS: usize = 3;
const POLICIES: [&str; 3] = ["forebay", "dmda", "eager"];

/// The plugin, if it has been built: beside this command, as cargo leaves both.
fn plugin() -> Option<PathBuf> {
    let at = std::env::current_exe().ok()?.with_file_name("libforebay_starpu.so");
    at.exists().then_some(at)
}

/// Seconds that the program took.
fn seconds(program: &Path, home: &Path, policy: &str, plugin: &Path, rounds: u32, calibrate: bool) -> Result<f64> {
    let mut c = Command::new(program);
    c.arg(rounds.to_string()).env("STARPU_HOME", home).env("STARPU_SILENT", "1").env("STARPU_OPENCL_ON_CPUS", "1");
    c.env("FOREBAY_SOCKET", "");
    if policy == "forebay" {
        c.env("LD_PRELOAD", plugin);
    } else {
        c.env("STARPU_SCHED", policy).env("STARPU_CALIBRATE", if calibrate { "1" } else { "0" });
    }
    let out = c.output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let found = said.lines().find_map(|l| l.strip_prefix("seconds ")?.parse().ok());
    found.ok_or_else(|| format!("{policy}: the StarPU program said {said:?}"))
}

pub(super) fn run(rows: &mut Vec<Row>) -> Result<()> {
    let Some(plugin) = plugin() else {
        eprintln!("starpu: not measured: build the plugin first (cargo build --release -p forebay-starpu)");
        return Ok(());
    };
    let program = match build("starpu_placement.c", "gcc", "starpu-1.3", &["-lOpenCL"]) {
        Ok(p) => p,
        Err(why) => {
            eprintln!("starpu: not measured: {why}");
            return Ok(());
        }
    };
    let home = tempfile::tempdir().map_err(|e| e.to_string())?;
    // dmda's models, measured without load as its manual says.
    seconds(&program.path(), home.path(), "dmda", &plugin, 20, true)?;
    for (what, loaded, target) in [("nothing else", false, 1.0), ("load that changes", true, 1.5)] {
        let load = loaded.then(Changing::start);
        let mut samples: [Vec<f64>; 3] = Default::default();
        for round in 0..ROUNDS {
            for i in 0..POLICIES.len() {
                let i = (i + round) % POLICIES.len();
                samples[i].push(seconds(&program.path(), home.path(), POLICIES[i], &plugin, 30, false)?);
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
