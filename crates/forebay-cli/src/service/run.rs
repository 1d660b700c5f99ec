//! `forebay run`: starts a program that is served as asked for from its first moment.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

use forebay_proto::client::Error;
use forebay_proto::wire::{Class, Refusal, Reply, Request};

use super::{Serve, co_run, connect};

/// Options of `forebay run`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay run --class background -- ./train.sh
  forebay run --share 40 -- ./render --frames 1000
  forebay run --class interactive -- ./viewer       (for the group `forebay`, or root)
  forebay run --memory 2G -- ./simulate
  forebay run --co-run lab --share 40 -- ./a        two programs side by side on one GPU, which together
  forebay run --co-run lab --sm-percent 50 -- ./b   have 40 percent of its time

The program takes the place of this command: it has its process number, gets its signals and gives its exit status.
Programs that it starts are served in the same way. A program that does not use Forebay's library runs as it always did:
it is steered on NVIDIA GPUs that the service divides (`forebay service --gpu`).

--memory is kept by Forebay's library, which refuses more, and by MPS in a co-run group. Any other program that takes more on
a GPU that the service divides is ended, as one that takes more than its control group's memory is; elsewhere nobody sees it.
What the driver has in the program, some hundred megabytes, counts then.

Programs of a co-run group use the GPU at the same time, under NVIDIA MPS, instead of by turns. --class, --share and --nice
are then the group's. What is lost: a fault in one program ends the work of all, none of them can be suspended by itself,
and checkpoints are not possible.")]
pub struct Options {
    #[command(flatten)]
    serve: Serve,
    /// Most memory of each accelerator that it may use, with K, M, G or T for 1024s
    #[arg(long, value_name = "LIMIT", value_parser = super::bytes)]
    memory: Option<u64>,
    /// Share GPUs in space, at the same time, with your other programs of the group of this name (NVIDIA MPS)
    #[arg(long, value_name = "GROUP")]
    co_run: Option<String>,
    /// Most of a GPU's multiprocessors that it may use beside others of its group; fixed for as long as it runs
    #[arg(long, value_name = "PERCENT", requires = "co_run", value_parser = clap::value_parser!(u8).range(1..=100))]
    sm_percent: Option<u8>,
    /// Its kernels come after those of others of its group; fixed for as long as it runs
    #[arg(long, requires = "co_run")]
    behind: bool,
    /// Run the program unrestricted if no service is there, instead of not at all
    #[arg(long)]
    anyway: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Sets this process's class and becomes the program.
pub fn run(o: &Options) -> Result<(), String> {
    let (class, nice) = (o.serve.class(), o.serve.nice());
    let pid = std::process::id();
    let asked = connect().and_then(|c| match &o.co_run {
        Some(group) => co_run::join(&c, group, class, nice).map(Some),
        None => {
            let class = class.or(nice.is_none().then_some(Class::Normal));
            c.ask(&Request::Set { pid, class, nice }).map_err(|e| e.to_string())?;
            let limited = o.memory.map(|m| c.ask(&Request::Limit { pid, memory: Some(m) }));
            match limited.unwrap_or(Ok(Reply::Done)) {
                Err(Error::Refused(Refusal::Unenforceable(why))) => {
                    eprintln!("forebay: --memory binds programs of Forebay's library only: {why}");
                }
                other => drop(other.map_err(|e| e.to_string())?),
            }
            Ok(None)
        }
    });
    let group = match asked {
        Err(why) if !o.anyway => return Err(why),
        Err(why) => {
            eprintln!("forebay: running unrestricted: {why}");
            None
        }
        Ok(group) => group,
    };
    let Some((program, arguments)) = o.command.split_first() else { return Err("no command".into()) };
    let mut command = std::process::Command::new(program);
    if let Some(limit) = o.memory {
        command.env(forebay::hal::MEMORY_VARIABLE, limit.to_string());
    }
    if let Some(g) = group {
        command.envs(g.variables(o.sm_percent, o.behind, o.memory));
    }
    let why = command.args(arguments).exec();
    let code = if why.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
    eprintln!("forebay: {}: {why}", program.to_string_lossy());
    // As a shell says it.
    std::process::exit(code)
}
