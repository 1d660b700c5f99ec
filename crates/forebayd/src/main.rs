//! `forebayd`: the accelerator service. The same as `forebay service`.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    arguments: forebayd::daemon::Arguments,
}

fn main() -> ExitCode {
    match forebayd::daemon::run(&Cli::parse().arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("forebayd: {e}");
            ExitCode::FAILURE
        }
    }
}
