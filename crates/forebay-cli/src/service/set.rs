//! `forebay set`, `suspend` and `resume`: how running programs are served.

use forebay_proto::wire::{Class, Request};

use super::{Serve, connect};

/// Options of `forebay set`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay set 4711 --class background
  forebay set 4711 4712 --share 25
  forebay set 4711 --nice 10
  forebay set 4711 --memory 8G       (--memory none takes the limit away)

You may lower your own programs, and raise them again to where they began. Root and the group `forebay` may do
everything. A program that has more memory of a GPU than its limit is ended.")]
pub struct Options {
    /// The processes
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    #[command(flatten)]
    serve: Serve,
    /// Most memory of each NVIDIA GPU that the service divides, with K, M, G or T for 1024s, or `none`
    #[arg(long, value_name = "LIMIT", value_parser = limit)]
    memory: Option<Limit>,
}

/// A limit of memory, if there is to be one.
#[derive(Clone, Copy)]
struct Limit(Option<u64>);

fn limit(text: &str) -> Result<Limit, String> {
    if text == "none" { Ok(Limit(None)) } else { super::bytes(text).map(|b| Limit(Some(b))) }
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

/// Changes class, share, nice value or limit.
pub fn run(o: &Options) -> Result<(), String> {
    let serve = o.serve.class().is_some() || o.serve.nice().is_some();
    if !serve && o.memory.is_none() {
        return Err("say what to set: --class, --share, --nice or --memory".into());
    }
    if serve {
        each(&o.pids, |pid| Request::Set { pid, class: o.serve.class(), nice: o.serve.nice() })?;
    }
    o.memory.map_or(Ok(()), |m| each(&o.pids, |pid| Request::Limit { pid, memory: m.0 }))
}

/// Takes programs off their devices.
pub fn suspend(o: &Pids) -> Result<(), String> {
    each(&o.pids, |pid| Request::Set { pid, class: Some(Class::Suspended), nice: None })
}

/// Lets programs go on, with the class that they had.
pub fn resume(o: &Pids) -> Result<(), String> {
    each(&o.pids, |pid| Request::Resume { pid })
}
