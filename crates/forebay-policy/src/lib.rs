//! Scheduling policy, pure: which ready task goes first, and to which device.
//!
//! No clock, no I/O, no threads, no floats: time comes in as nanoseconds, and everything is integer arithmetic that
//! saturates. The dataflow runtime, the service and the simulator call the same functions.
//!
//! - [`begin`]: when a program that has credit begins what.
//! - [`credit`]: token buckets for devices without hardware control.
//! - [`overlap`]: what each of several programs has had of a device, from when each had work in it.
//! - [`priority`]: PTask's effective priority (SOSP'11, figure 9).
//! - [`queue`]: the ready queue and PTask's four scheduling modes (section 5.3.1).
//! - [`share`]: classes, shares and time division of a device among processes.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod begin;
pub mod credit;
pub mod overlap;
pub mod priority;
pub mod queue;
pub mod reserve;
pub mod share;

pub use priority::{Stats, effective};
pub use queue::{Ahead, Counts, DeviceSet, MAX_PLACED, Mode, Pick, Ready, ReadyQueue};
