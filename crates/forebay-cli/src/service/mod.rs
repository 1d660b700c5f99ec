//! The commands that talk to the accelerator service.

pub mod checkpoint;
mod co_run;
mod nvml;
pub mod ps;
pub mod run;
pub mod set;
pub mod top;
pub mod trace;

use forebay_proto::client::{Connection, Error};
use forebay_proto::wire::Class;

/// A connection, or what to do to get one.
pub fn connect() -> Result<Connection, String> {
    Connection::open("forebay").map_err(|e| match e {
        Error::Absent(_) => format!(
            "{e}\n  Start one with `sudo forebay service`, or `forebay service --user` for your own programs only."
        ),
        other => other.to_string(),
    })
}

/// How a process is to be served, as options.
#[derive(clap::Args, Clone, Debug)]
pub struct Serve {
    /// Class: interactive (a little, at once), normal (an equal part), background (what is left over), suspended
    #[arg(long, short, value_enum)]
    class: Option<ClassName>,
    /// An absolute share of each device, percent, whatever others do
    #[arg(long, short, value_name = "PERCENT", conflicts_with = "class", value_parser = percent)]
    share: Option<u32>,
    /// Nice value here, -20 (much) to 19 (little), for the class `normal`
    #[arg(long, short, allow_negative_numbers = true, value_parser = clap::value_parser!(i8).range(-20..=19))]
    nice: Option<i8>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ClassName {
    /// A little, at once: others begin nothing while it works
    Interactive,
    /// An equal part, weighted by nice
    Normal,
    /// What is left over
    Background,
    /// Nothing
    Suspended,
}

fn percent(text: &str) -> Result<u32, String> {
    let n: f64 = text.trim_end_matches('%').parse().map_err(|_| "say a number, as in 40".to_owned())?;
    if n > 0.0 && n <= 100.0 { Ok((n * 1e4) as u32) } else { Err("a share is more than 0 and at most 100 %".into()) }
}

/// A number of bytes: digits, then perhaps a unit.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err("a number of bytes, as 500M or 2G".into()),
    };
    let number = digits.parse::<u64>().map_err(|_| "a number of bytes, as 500M or 2G".to_owned())?;
    let bytes = number.checked_mul(1 << shift).filter(|b| *b > 0);
    bytes.ok_or_else(|| "a number of bytes above 0 and below 2^64".into())
}

impl Serve {
    /// The class that was asked for.
    pub fn class(&self) -> Option<Class> {
        self.share.map(Class::Custom).or(self.class.map(|c| match c {
            ClassName::Interactive => Class::Interactive,
            ClassName::Normal => Class::Normal,
            ClassName::Background => Class::Background,
            ClassName::Suspended => Class::Suspended,
        }))
    }

    /// The nice value that was asked for.
    pub fn nice(&self) -> Option<i8> {
        self.nice
    }
}

/// A part of a device for people.
pub fn as_percent(millionths: u64) -> String {
    format!("{:.1} %", millionths as f64 / 1e4)
}
