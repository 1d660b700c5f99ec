//! `forebay bench`: measurements, each against its peers in the same run.

mod dispatch;
pub mod schema;

use std::path::PathBuf;

use schema::{Machine, Report};

/// What can be measured.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// The runtime's own cost per item, against TBB's flow graph and StarPU
    Dispatch,
}

/// Where results go.
#[derive(clap::Args)]
pub struct Output {
    /// Print the result as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Also write JSON, Markdown and SVG into DIR/<machine>/
    #[arg(long, global = true, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs one benchmark.
pub fn run(bench: &Bench, output: &Output) -> Result<(), String> {
    let report = match bench {
        Bench::Dispatch => Report::new("dispatch", dispatch::run().map_err(|e| e.to_string())?),
    };
    if output.json {
        crate::say(&serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?);
    } else {
        crate::say(&report.markdown());
    }
    if let Some(dir) = &output.out {
        let dir = dir.join(Machine::here().folder());
        report.write(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        eprintln!("written to {}", dir.display());
    }
    Ok(())
}
