//! The control interface of NVIDIA's kernel driver (its resource manager, RM), from user space and on a stock driver.
//!
//! Three layers and a seam:
//! - [`sys`]: the ABI: layouts with their sizes and offsets asserted, command and class numbers.
//! - [`error`]: a status or a failed call as a typed error that names the call.
//! - [`Client`] and [`Target`]: a client of our own, and another process whose channels can be found, given time slices,
//!   suspended and resumed. What was changed is undone when the value that changed it is dropped.
//! - [`SwitchLog`]: the GPU's log of context switches; [`holds`] makes of it who held the GPU from when to when.
//! - [`Aperture`]: device memory that CUDA allocated, mapped into this process.
//! - [`Rm`]: what lies beneath, the calls into the kernel: [`Host`] makes them, [`fake::FakeRm`] answers them from memory
//!   with the driver's own checks and a model of the hardware's round-robin.
//!
//! **State**: the layouts restate NVIDIA's open kernel modules 580.142, and are the same in 555 and 570 ([`sys`] says how that
//! was found out). The driver promises no stability, so a driver of another series is refused ([`Client::open`]). No GPU has
//! been met so far: [`Host`] has been tested on a model of the driver's files and ioctls (`forebay-kernel-model`), which
//! answers from the fake. Programs in C that were verified on an H200 under 580.159.04 run on that model too, and pass for
//! the log, suspension and slices the words that are passed here, but for names of handles and an owner's tag.
//!
//! **Rules**
//! 1. RM accepts a control call for a client only on the file on which that client was made: its check compares files,
//!    not processes. So another process's objects are asked about on a duplicate of its own file (pidfd_getfd).
//! 2. A duplicate keeps the other process's client, and its GPU memory, alive after its death. So a duplicate lives for
//!    one discovery and no longer.
//! 3. Suspension takes lists of (client, channel) and is not bound to a file, so it goes through our own client; it
//!    therefore works, and can be undone, whatever has become of the duplicates.
//! 4. A suspended channel stays suspended, and a slice stays as set, when everybody who set them has gone. So something
//!    must always be left that undoes both: here the drop of [`Suspension`] and of [`Slices`], above this crate a guardian.
//! 5. A process has what it has on all its GPUs in one client. What is done to it on a GPU is done to the channels of that
//!    GPU only; where the machine has several, each channel's ancestors are asked for whose they are.
//! 6. Discovery only reads. Handles are looked for in bounded ranges, downwards from our own client's, because a question
//!    about a client that does not exist leaves a line in the kernel's log.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod aperture;
mod client;
pub mod error;
pub mod fake;
mod finder;
pub mod holds;
mod host;
mod rm;
mod several;
mod switches;
pub mod sys;
mod target;

pub use aperture::Aperture;
pub use client::Client;
pub use error::{Error, Result};
pub use finder::Finder;
pub use host::{CONTROL_PATH, Host};
pub use rm::{ControlFile, Rm, Window};
pub use switches::{RECORDS, SwitchLog};
pub use target::{
    ChannelGroup, DEFAULT_SLICE_US, Handle, MAX_SLICE_US, MIN_SLICE_US, Search, Slices, Suspension, Target,
    restore_slices,
};
