//! `forebay-sim`: runs scenarios and says what the oracles found.

use clap::Parser;

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

fn main() -> std::process::ExitCode {
    let o = Options::parse();
    let mut bad = 0;
    for seed in o.seed..o.seed.saturating_add(o.runs) {
        let all = [
            ("gpu", forebay_sim::gpu::run(seed, o.broken)),
            ("credit", forebay_sim::credit::run(seed, o.broken)),
            ("narrow", forebay_sim::credit::run_narrow(seed, o.broken)),
            ("accelerator", forebay_sim::accelerator::run(seed, o.broken)),
        ];
        for (what, outcome) in all {
            println!(
                "{what} seed {seed}: hash {:016x}, {} stretches, {} violations",
                outcome.hash,
                outcome.judged,
                outcome.violations.len()
            );
            for v in &outcome.violations {
                println!("  {v}");
            }
            bad += usize::from(!outcome.violations.is_empty());
        }
    }
    if bad == 0 { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
