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
    #[command(after_help = "Examples:
  forebay demo gesture               two cameras, a point cloud, gestures; on a GPU when there is one
  forebay demo sharing               an interactive program beside one that takes everything")]
    Demo {
        #[command(subcommand)]
        demo: demo::Demo,
    },
    /// Check, run and draw graph files
    #[command(after_help = "Examples:
  forebay graph check examples/6_graph_file.toml
  forebay graph run examples/6_graph_file.toml --blocks 100
  forebay graph draw examples/6_graph_file.toml -o graph.svg --run 10

docs/graph-files.md says what a file may have in it.")]
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
    #[command(
        after_help = "A program is taken off a GPU that the service divides in the middle of a kernel; on other devices it begins nothing
more. Your own programs; any, as root or in the group `forebay`.

Example:
  forebay suspend 4711 && ./the-urgent-one; forebay resume 4711"
    )]
    Suspend(service::set::Pids),
    /// Let suspended programs go on
    #[command(after_help = "They have the class again that they had.

Example:
  forebay resume 4711 4712")]
    Resume(service::set::Pids),
    /// Move programs' GPU memory to the host's, for others to have the room
    Checkpoint(service::checkpoint::Options),
    /// Bring such programs back
    Restore(service::checkpoint::Restore),
    /// Show, draw or forget what adaptive placement has learned
    #[command(after_help = "Examples:
  forebay model show                 every task and device, with predictions
  forebay model plot --out pictures
  forebay model reset blur           after a change of what it does that its kernels do not show")]
    Model {
        #[command(subcommand)]
        model: model::ModelCommand,
    },
    /// Measure Forebay against its peers
    #[command(after_help = "Examples:
  forebay bench dispatch             against TBB and StarPU, where they are installed
  forebay bench transfer --out results
  forebay bench report results       one page of all that is there")]
    Bench {
        #[command(subcommand)]
        bench: bench::Bench,
        #[command(flatten)]
        output: bench::Output,
    },
}

/// The runtime that `--device` asks for.
pub(crate) fn runtime(device: &str, mode: forebay::Mode) -> Result<forebay::Runtime, String> {
    let b = forebay::Runtime::builder().mode(mode);
    let b = match device {
        "auto" => b,
        name => b.only(name.parse::<forebay::Wanted>()?).map_err(|e| e.to_string())?,
    };
    b.build().map_err(|e| e.to_string())
}

/// A thread of this scope. There may be as many of a user as the system allows.
pub(crate) fn beside<'scope, T: Send + 'scope>(
    s: &'scope std::thread::Scope<'scope, '_>,
    f: impl FnOnce() -> T + Send + 'scope,
) -> Result<std::thread::ScopedJoinHandle<'scope, T>, String> {
    std::thread::Builder::new().spawn_scoped(s, f).map_err(|e| format!("no thread can be started: {e}"))
}

/// What devices are called: as they are, or with their number in the runtime where others are called so, too.
pub(crate) fn told_apart(names: &[String]) -> Vec<String> {
    let alike = |n: &String| names.iter().filter(|o| *o == n).count();
    let called = |(i, n): (usize, &String)| if alike(n) == 1 { n.clone() } else { format!("{n} (device {i})") };
    names.iter().enumerate().map(called).collect()
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::{Cli, told_apart};

    #[test]
    fn devices_of_one_name_have_numbers() {
        let names = ["cpu", "gpu", "other", "gpu"].map(str::to_owned);
        assert_eq!(told_apart(&names), ["cpu", "gpu (device 1)", "other", "gpu (device 3)"]);
    }

    /// Each command's help, and that of each command below it; `bench` has those of its own in one.
    #[test]
    fn help_has_examples() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands().filter(|c| c.get_name() != "help") {
            let below = command.get_subcommands().filter(|_| command.get_name() != "bench");
            for c in std::iter::once(command).chain(below).filter(|c| !c.is_hide_set() && c.get_name() != "help") {
                let help = c.clone().render_long_help().to_string();
                assert!(help.contains("Example"), "{}: {help}", c.get_name());
            }
        }
    }
}
