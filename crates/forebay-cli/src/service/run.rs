//! `forebay run`: starts a program that is served as asked for from its first moment.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

use forebay_proto::wire::{Class, Request};

use super::{Serve, connect};

/// Options of `forebay run`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay run --class background -- ./train.sh
  forebay run --share 40 -- ./render --frames 1000
  forebay run --class interactive -- ./viewer       (for the group `forebay`, or root)

The program takes the place of this command: it has its process number, gets its signals and gives its exit status.
Programs that it starts are served in the same way. A program that does not use Forebay's library runs as it always did:
steering it on a GPU is not available yet.")]
pub struct Options {
    #[command(flatten)]
    serve: Serve,
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
    let asked = connect().and_then(|c| {
        let class = class.or(nice.is_none().then_some(Class::Normal));
        c.ask(&Request::Set { pid: std::process::id(), class, nice }).map_err(|e| e.to_string())
    });
    match asked {
        Err(why) if !o.anyway => return Err(why),
        Err(why) => eprintln!("forebay: running unrestricted: {why}"),
        Ok(_) => {}
    }
    let Some((program, arguments)) = o.command.split_first() else { return Err("no command".into()) };
    let why = std::process::Command::new(program).args(arguments).exec();
    let code = if why.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
    eprintln!("forebay: {}: {why}", program.to_string_lossy());
    // As a shell says it.
    std::process::exit(code)
}
