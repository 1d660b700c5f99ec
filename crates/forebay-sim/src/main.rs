//! `forebay-sim`: runs scenarios and says what the oracles found.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use clap::Parser;
use forebay_sim::Outcome;

/// Simulates the service in virtual time: time division on a fake GPU, credit, accelerators
#[derive(Parser)]
struct Options {
    /// First seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Scenarios, with consecutive seeds
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// With a mistake that the oracles must find
    #[arg(long)]
    broken: bool,
}

/// What came of one seed's scenarios: lines, and how many of these had violations.
fn run(seed: u64, broken: bool) -> (String, usize) {
    let (mut said, mut bad) = (String::new(), 0);
    let all = [
        ("gpu", forebay_sim::gpu::run(seed, broken)),
        ("gpu, slow", forebay_sim::gpu::run_slow(seed, broken)),
        ("credit", forebay_sim::credit::run(seed, broken)),
        ("narrow", forebay_sim::credit::run_narrow(seed, broken)),
        ("accelerator", forebay_sim::accelerator::run(seed, broken)),
    ];
    for (what, Outcome { hash, judged, violations, .. }) in all {
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
    let (next, last) = (AtomicU64::new(o.seed), o.seed.saturating_add(o.runs));
    let take = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < last).then(|| n + 1)).ok();
    let (send, done) = mpsc::sync_channel(64);
    let mut bad = 0;
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            let (send, take) = (send.clone(), &take);
            scope.spawn(move || {
                while let Some(seed) = take() {
                    let _ = send.send((seed, run(seed, o.broken)));
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
    if bad == 0 { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
