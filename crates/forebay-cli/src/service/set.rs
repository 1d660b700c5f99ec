//! `forebay set`, `suspend` and `resume`: how running programs are served.

use forebay_proto::wire::{Class, Request};

use super::{Serve, connect};

/// Options of `forebay set`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay set 4711 --class background
  forebay set 4711 4712 --share 25
  forebay set 4711 --nice 10

You may lower your own programs, and raise them again to where they began. Root and the group `forebay` may do
everything.")]
pub struct Options {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    #[command(flatten)]
    serve: Serve,
}

/// Options of `forebay suspend` and `forebay resume`.
#[derive(clap::Args)]
pub struct Pids {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
}

fn each(pids: &[u32], request: impl Fn(u32) -> Request) -> Result<(), String> {
    let c = connect()?;
    let failed: Vec<String> =
        pids.iter().filter_map(|&pid| c.ask(&request(pid)).err().map(|e| format!("{pid}: {e}"))).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Changes class, share or nice value.
pub fn run(o: &Options) -> Result<(), String> {
    if o.serve.class().is_none() && o.serve.nice().is_none() {
        return Err("say what to set: --class, --share or --nice".into());
    }
    each(&o.pids, |pid| Request::Set { pid, class: o.serve.class(), nice: o.serve.nice() })
}

/// Takes programs off their devices.
pub fn suspend(o: &Pids) -> Result<(), String> {
    each(&o.pids, |pid| Request::Set { pid, class: Some(Class::Suspended), nice: None })
}

/// Lets programs go on, with the class that they had.
pub fn resume(o: &Pids) -> Result<(), String> {
    each(&o.pids, |pid| Request::Resume { pid })
}
