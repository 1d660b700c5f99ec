//! The `forebay` command.

mod bench;

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
    /// Measure Forebay against its peers
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
        #[command(flatten)]
        output: bench::Output,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
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
