//! The `forebay` command.

mod bench;
mod demo;
mod doctor;
mod graph;
mod perfetto;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Accelerators as first-class resources
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a demonstration
    Demo {
        #[command(subcommand)]
        demo: demo::Demo,
    },
    /// Check, run and draw graph files
    Graph {
        #[command(subcommand)]
        graph: graph::GraphCommand,
    },
    /// Say which devices are usable here, and why others are not
    Doctor,
    /// Measure Forebay against its peers
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
        #[command(flatten)]
        output: bench::Output,
    },
}

/// Prints to standard output; ends the command quietly when nobody reads it any more (`forebay … | head`).
pub(crate) fn say(text: &str) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo { demo } => demo::run(&demo),
        Command::Graph { graph } => graph::run(&graph),
        Command::Doctor => doctor::run(),
        Command::Bench { bench, output } => bench::run(&bench, &output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("forebay: {e}");
            ExitCode::FAILURE
        }
    }
}
