//! `forebay-sim`: runs scenarios and says what the oracles found.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Parser;
use forebay_sim::Outcome;

/// Simulates the service in virtual time: a machine with GPUs that are divided, credit, accelerators
#[derive(Parser)]
struct Options {
    /// First seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Scenarios, with consecutive seeds; one, or as many as there is time for
    #[arg(long)]
    runs: Option<u64>,
    /// Begin no scenario after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Stories of this kind only
    #[arg(long, value_parser = KINDS.map(|(name, _)| name))]
    kind: Option<String>,
    /// With a mistake that the oracles must find
    #[arg(long)]
    broken: bool,
}

/// A kind of story: its name, and how one is told of a seed, with a mistake or without.
type Kind = (&'static str, fn(u64, bool) -> Outcome);

const KINDS: [Kind; 6] = [
    ("gpu", forebay_sim::gpu::run),
    ("gpu, slow", forebay_sim::gpu::run_slow),
    ("machine", forebay_sim::machine::run),
    ("credit", forebay_sim::credit::run),
    ("narrow", forebay_sim::credit::run_narrow),
    ("accelerator", forebay_sim::accelerator::run),
];

/// What came of one seed's scenarios, of this kind or of all: lines, and how many of these had violations.
fn run(seed: u64, kind: Option<&str>, broken: bool) -> (String, usize) {
    let (mut said, mut bad) = (String::new(), 0);
    let told = KINDS.iter().filter(|(name, _)| kind.is_none_or(|k| k == *name));
    for (what, Outcome { hash, judged, violations, .. }) in told.map(|(name, tell)| (name, tell(seed, broken))) {
        let n = violations.len();
        let _ = writeln!(said, "{what} seed {seed}: hash {hash:016x}, {judged} stretches, {n} violations");
        for v in &violations {
            let _ = writeln!(said, "  {v}");
        }
        bad += usize::from(n > 0);
    }
    (said, bad)
}

fn main() -> std::process::ExitCode {
    let o = Options::parse();
    let runs = o.runs.unwrap_or(if o.seconds.is_some() { u64::MAX } else { 1 });
    let (next, last) = (AtomicU64::new(o.seed), o.seed.saturating_add(runs));
    let begun = Instant::now();
    let late = || o.seconds.is_some_and(|s| begun.elapsed() >= Duration::from_secs(s));
    let one_more = |n| (n < last && !late()).then(|| n + 1);
    let take = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok();
    let (send, done) = mpsc::sync_channel(64);
    let mut bad = 0;
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            let (send, take, o) = (send.clone(), &take, &o);
            scope.spawn(move || {
                while let Some(seed) = take() {
                    let _ = send.send((seed, run(seed, o.kind.as_deref(), o.broken)));
                }
            });
        }
        drop(send);
        // In the order of the seeds, whoever is done first.
        let (mut early, mut due) = (BTreeMap::new(), o.seed);
        for (seed, outcome) in done {
            early.insert(seed, outcome);
            while let Some((said, n)) = early.remove(&due) {
                print!("{said}");
                bad += n;
                due += 1;
            }
        }
    });
    let told = next.into_inner() - o.seed;
    eprintln!(
        "{told} seeds from {} in {:.0} s: {bad} scenarios with violations",
        o.seed,
        begun.elapsed().as_secs_f64()
    );
    if bad == 0 { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
