//! The `forebay` command.

mod bench;
mod demo;
mod doctor;
mod graph;
mod model;
mod perfetto;
mod plot;
mod service;
mod sharing;
mod workloads;

#[cfg(test)]
#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

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
    Doctor(doctor::Options),
    /// Run the accelerator service, which shares devices among programs
    Service(forebayd::daemon::Arguments),
    /// Start a program with a class or share
    Run(service::run::Options),
    /// List the programs that use devices through the service
    Ps(service::ps::Options),
    /// Watch devices and programs
    Top(service::top::Options),
    /// Record who had which device when, as a timeline
    Trace(service::trace::Options),
    /// Change how running programs are served
    Set(service::set::Options),
    /// Take programs off their devices
    Suspend(service::set::Pids),
    /// Let suspended programs go on
    Resume(service::set::Pids),
    /// Move programs' GPU memory to the host's, for others to have the room
    Checkpoint(service::checkpoint::Options),
    /// Bring such programs back
    Restore(service::checkpoint::Restore),
    /// Show, draw or forget what adaptive placement has learned
    Model {
        #[command(subcommand)]
        model: model::ModelCommand,
    },
    /// Measure Forebay against its peers
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
        #[command(flatten)]
        output: bench::Output,
    },
}

/// Says which devices a graph that has started does not use: somebody may be looking for their GPU.
pub(crate) fn tell_unused(rt: &forebay::Runtime) {
    for (name, why) in rt.unused() {
        eprintln!("{name} is not used: {why}");
    }
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
        Command::Doctor(o) => doctor::run(&o),
        Command::Service(o) => forebayd::daemon::run(&o),
        Command::Run(o) => service::run::run(&o),
        Command::Ps(o) => service::ps::run(&o),
        Command::Top(o) => service::top::run(&o),
        Command::Trace(o) => service::trace::run(&o),
        Command::Checkpoint(o) => service::checkpoint::run(&o),
        Command::Restore(o) => service::checkpoint::restore(&o),
        Command::Set(o) => service::set::run(&o),
        Command::Suspend(o) => service::set::suspend(&o),
        Command::Resume(o) => service::set::resume(&o),
        Command::Model { model } => model::run(&model),
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
