//! `forebay ps`: who uses which device, and how it is served.

use std::collections::BTreeMap;

use forebay_proto::wire::{Level, Process, Source};

use super::{as_percent, connect};

/// Options of `forebay ps`.
#[derive(clap::Args)]
#[command(after_help = "Columns:
  SHARE   what the program would get of the device now        USED    what it has had of it lately
  TIME    what it has used since it began                     FROM    who says so: kernel, switches (the GPU's log),
                                                                      nvml, program
  OFF     for how long the service kept it off the device     SWITCHES  how often it came onto it
  MEMORY  of NVIDIA GPUs, as their management library says; then of how much, where it has a limit
  BY      how its share is enforced: hardware, lock, credit (the program asks before it works)

Examples:
  forebay ps
  forebay ps --json | jq '.[] | select(.used > 500000)'")]
pub struct Options {
    /// For machines; parts of a device are in millionths
    #[arg(long)]
    json: bool,
}

/// What is said of a state.
pub fn state(p: &Process) -> &'static str {
    match (p.active, p.waiting) {
        (true, true) => "waiting",
        (true, false) => "running",
        _ => "idle",
    }
}

fn source(s: Source) -> &'static str {
    match s {
        Source::Kernel => "kernel",
        Source::Switches => "switches",
        Source::Nvml => "nvml",
        Source::Program => "program",
    }
}

fn level(l: Level) -> &'static str {
    match l {
        Level::Hardware => "hardware",
        Level::Lock => "lock",
        Level::Credit => "credit",
    }
}

/// Device memory of the processes on NVIDIA GPUs.
pub struct Memory(BTreeMap<u32, u64>);

impl Memory {
    /// As it is now.
    pub fn now() -> Self {
        Memory(super::nvml::memory())
    }

    /// A process's, bytes, if it is on a GPU and somebody knows.
    fn of(&self, p: &Process) -> Option<u64> {
        self.0.get(&p.pid).filter(|_| p.level != Level::Credit).copied()
    }
}

/// A process as JSON.
pub fn json(p: &Process, memory: &Memory) -> serde_json::Value {
    serde_json::json!({
        "pid": p.pid, "uid": p.uid, "name": p.name, "device": p.device, "class": p.class.to_string(), "nice": p.nice,
        "state": state(p), "share": p.share, "used": p.used, "spent_ns": p.spent_ns, "source": source(p.source),
        "level": level(p.level), "switches": p.switches, "off_ns": p.off_ns,
        "memory": memory.of(p), "memory_limit": p.memory_limit,
    })
}

fn memory_and_limit(has: Option<u64>, limit: Option<u64>) -> String {
    let mib = |b: u64| format!("{:.0}", b as f64 / 1048576.0);
    match (has.map(mib), limit.map(mib)) {
        (None, None) => "-".into(),
        (Some(has), None) => format!("{has} MiB"),
        (has, Some(limit)) => format!("{}/{limit} MiB", has.unwrap_or("-".into())),
    }
}

/// At most so many characters of a device's name, the last ones among them: they say where it is, and so which of several.
fn shortened(name: &str, most: usize) -> String {
    let all: Vec<char> = name.chars().collect();
    if all.len() <= most {
        return name.into();
    }
    let (first, last) = (most - most / 2 - 1, most / 2);
    all[..first].iter().chain(&['…']).chain(&all[all.len() - last..]).collect()
}

/// The devices' names as they fit into a column, and its width.
pub fn device_column(all: &[Process], most: usize) -> (Vec<String>, usize) {
    let names: Vec<String> = all.iter().map(|p| shortened(&p.device, most)).collect();
    let width = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).max("DEVICE".len());
    (names, width)
}

/// The table.
pub fn table(all: &[Process], memory: &Memory) -> String {
    let (devices, width) = device_column(all, 32);
    let mut text = format!(
        "{:>8} {:>6} {:16} {:width$} {:11} {:>4} {:8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>15} {:8} {}\n",
        "PID",
        "USER",
        "NAME",
        "DEVICE",
        "CLASS",
        "NICE",
        "STATE",
        "SHARE",
        "USED",
        "TIME",
        "OFF",
        "SWITCHES",
        "MEMORY",
        "FROM",
        "BY"
    );
    for (p, device) in all.iter().zip(devices) {
        text += &format!(
            "{:>8} {:>6} {:16.16} {:width$} {:11} {:>4} {:8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>15} {:8} {}\n",
            p.pid,
            p.uid,
            p.name,
            device,
            p.class,
            p.nice,
            state(p),
            as_percent(p.share),
            as_percent(p.used),
            format!("{:.2} s", p.spent_ns as f64 / 1e9),
            p.off_ns.map_or("-".into(), |ns| format!("{:.2} s", ns as f64 / 1e9)),
            p.switches.map_or("-".into(), |n| n.to_string()),
            memory_and_limit(memory.of(p), p.memory_limit),
            source(p.source),
            level(p.level),
        );
    }
    text.truncate(text.trim_end().len());
    text
}

/// Lists the programs.
pub fn run(o: &Options) -> Result<(), String> {
    let all = connect()?.processes().map_err(|e| e.to_string())?;
    let memory = Memory::now();
    if o.json {
        let all: Vec<_> = all.iter().map(|p| json(p, &memory)).collect();
        crate::say(&serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?);
    } else if all.is_empty() {
        crate::say("no program is using a device through the service");
    } else {
        crate::say(&table(&all, &memory));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_keep_what_tells_devices_apart() {
        assert_eq!(shortened("cpu", 24), "cpu");
        let short = shortened("Intel(R) Arc(TM) A770 Graphics at 0000:03:00", 24);
        assert_eq!(short, "Intel(R) Ar…t 0000:03:00");
        assert_eq!(short.chars().count(), 24);
        assert_eq!(shortened(&"ä".repeat(30), 24).chars().count(), 24);
    }
}
