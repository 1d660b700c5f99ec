//! Seeded simulation of the service: its own code, in virtual time, with everything around it drawn from a seed.
//!
//! - [`gpu`]: the agent that divides a GPU by suspension.
//! - [`credit`]: the service's core with programs that take credit; in its narrow stories some have few threads.
//! - [`machine`]: the whole service on a machine with several GPUs, which fall off.
//! - [`accelerator`]: the same on a device whose use programs report themselves, with limits of memory on a GPU.
//!
//! After every calm stretch oracles are asked whether what was promised was kept. The same seed is the same story; the
//! trace's hash says so. A mistake made on purpose must be found.

pub mod accelerator;
pub mod credit;
pub mod gpu;
pub mod machine;
mod office;

/// What a scenario came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Over everything that happened.
    pub hash: u64,
    /// Stretches that were judged.
    pub judged: usize,
    /// What the oracles found wrong.
    pub violations: Vec<String>,
}

/// The hash of nothing (FNV-1a).
const BEGIN: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash with one more value.
fn noted(mut hash: u64, v: u64) -> u64 {
    for b in v.to_le_bytes() {
        hash = (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}
