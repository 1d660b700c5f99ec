//! The accelerator service, as far as it stands: the agent that divides an NVIDIA GPU's time among processes.
//!
//! There is no daemon to start yet. What is here runs on the fake of [`forebay_rm::fake`] (in tests and in `forebay-sim`)
//! and has not met a GPU.

pub mod agent;
