//! `forebay demo sharing`: an interactive program beside one that takes everything, first as the system shares by
//! default, then steered by the service.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use forebay::Kind;
use forebay::hal::discover;
use forebay_proto::client::Connection;
use forebay_proto::wire::Class;
use forebay_rm::{Client, Host, Rm as _};

use crate::sharing::{Sample, Stage, number_of_gpu, quantile};

/// The interactive program's item: a picture every 20 ms that takes 4.
const TASK_US: u64 = 4000;
const PERIOD_MS: u64 = 20;
/// The other one's.
const HOG_TASK_US: u64 = 500;

/// Options of `forebay demo sharing`.
#[derive(clap::Args)]
#[command(
    after_help = "It starts a service of its own, for its own programs only, and stops it at the end. An NVIDIA GPU's time is
divided by the hardware, which takes root; elsewhere programs are steered by credit: they ask before they work. Nothing is left
behind.

Examples:
  forebay demo sharing
  sudo forebay demo sharing --device cuda
  forebay demo sharing --device opencl --json"
)]
pub struct Options {
    /// What is shared: cpu, opencl, cuda; without, an NVIDIA GPU if the service can divide it here, or else the CPU
    #[arg(long)]
    device: Option<Kind>,
    /// Seconds of each of the three acts
    #[arg(long, default_value_t = 4.0, value_parser = seconds)]
    seconds: f64,
    /// For machines
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let n: f64 = text.parse().map_err(|_| "say a number of seconds".to_owned())?;
    if (0.5..=600.0).contains(&n) { Ok(n) } else { Err("from 0.5 to 600".into()) }
}

/// An NVIDIA GPU, where programs for it can be compiled, the driver lets us divide it, and no service does so already; the CPU
/// otherwise.
fn usual() -> Kind {
    let compiles = discover(&[Kind::Cuda]).0.first().is_some_and(|d| d.compiles().is_ok());
    let divides = || Host.may_log() && Client::open(Arc::new(Host), number_of_gpu()).is_ok();
    if compiles && divides() && Connection::open("demo").is_err() { Kind::Cuda } else { Kind::Cpu }
}

struct Act {
    name: &'static str,
    samples: Vec<Sample>,
}

/// A line of blocks, the last ones of `values`, up to `most`.
fn spark(values: &[f64], most: f64) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let one = |v: &f64| BLOCKS[((v / most * 7.0).round().clamp(0.0, 7.0)) as usize];
    values[values.len().saturating_sub(40)..].iter().map(one).collect()
}

/// Plays the three acts.
pub fn run(o: &Options) -> Result<(), String> {
    let time = Duration::from_secs_f64(o.seconds);
    let device = o.device.unwrap_or_else(usual);
    let number = (device == Kind::Cuda).then(|| number_of_gpu().to_string());
    let live = !o.json && std::io::stderr().is_terminal();
    let picture = if live { indicatif::ProgressBar::new_spinner() } else { indicatif::ProgressBar::hidden() };
    let act = |name: &'static str, served: bool, hog: bool| -> Result<Act, String> {
        // An NVIDIA GPU's time is divided for any program, which takes root; elsewhere programs ask before they work.
        let gpu: Vec<&str> = number.iter().flat_map(|n| ["--gpu", n]).collect();
        let stage = Stage::with(served, &gpu)?;
        let first = stage.program(device, TASK_US, Some(PERIOD_MS))?;
        let second = hog.then(|| stage.program(device, HOG_TASK_US, None)).transpose()?;
        if let Some(second) = second.as_ref().filter(|_| served) {
            stage.set(&first, Class::Interactive)?;
            stage.set(second, Class::Background)?;
        }
        let all: Vec<_> = std::iter::once(&first).chain(&second).collect();
        std::thread::sleep(Duration::from_millis(300));
        let mut history = Vec::new();
        let samples = stage.watch(&all, time, |now| {
            history.extend(now[0].latencies_ms.iter().copied());
            let hog = now.get(1).map_or(String::new(), |h| format!("   hog {:5.0} items/s", h.rate));
            let last = history.last().copied().unwrap_or(0.0);
            picture.set_message(format!("{name:8} latency {last:6.1} ms {:40}{hog}", spark(&history, 30.0)));
            picture.tick();
        });
        Ok(Act { name, samples })
    };
    let acts = [act("alone", false, false)?, act("default", false, true)?, act("steered", true, true)?];
    picture.finish_and_clear();
    let share = |a: &Act, n: usize| {
        let all: f64 = a.samples.iter().map(|s| s.cores).sum();
        a.samples.get(n).map_or(0.0, |s| s.cores / all * 100.0)
    };
    if o.json {
        let one = |a: &Act| {
            let l = &a.samples[0].latencies_ms;
            serde_json::json!({
                "act": a.name,
                "latency_ms": { "p50": quantile(l, 0.5), "p95": quantile(l, 0.95), "p99": quantile(l, 0.99), "items": l.len() },
                "interactive_share": share(a, 0) / 100.0,
                "hog_items_per_second": a.samples.get(1).map(|s| s.rate),
            })
        };
        let all: Vec<_> = acts.iter().map(one).collect();
        crate::say(&serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?);
        return Ok(());
    }
    crate::say(&format!(
        "A program that needs {} ms of {} every {PERIOD_MS} ms, and one that takes what it can get:\n",
        TASK_US / 1000,
        device.name()
    ));
    crate::say("            latency of the first, ms           share of the   second's");
    crate::say("            p50       p95       p99            first          items/s");
    for a in &acts {
        let l = &a.samples[0].latencies_ms;
        let hog = a.samples.get(1).map_or("–".to_owned(), |s| format!("{:.0}", s.rate));
        crate::say(&format!(
            "{:8} {:>8.1}  {:>8.1}  {:>8.1}          {:>8.0} %   {:>10}",
            a.name,
            quantile(l, 0.5),
            quantile(l, 0.95),
            quantile(l, 0.99),
            share(a, 0),
            hog
        ));
    }
    crate::say(
        "\nalone: without the second. default: as the operating system shares. steered: by `forebay service`, the first",
    );
    crate::say("one in the class interactive, the second in background. To do it yourself:");
    crate::say(
        "  sudo forebay service &   forebay run --class background -- …   and, as root or in the group `forebay`, --class interactive",
    );
    Ok(())
}
