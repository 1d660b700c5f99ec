//! The accelerator service.
//!
//! - [`service`]: what it knows and decides: processes, classes, credit, pages. No sockets, no clock.
//! - [`system`]: what it asks of the operating system.
//! - [`server`]: the daemon: one loop around both.
//! - [`guardian`] and [`ledger`]: who gives everything back when the service has gone, and how it knows what.
//! - [`metrics`]: figures for Prometheus.
//! - [`daemon`]: the daemon as a program: arguments, signals, systemd.
//! - [`trial`]: what of that works on a machine, tried.
//! - [`agent`]: divides an NVIDIA GPU's time among processes by suspension and slices, or by the driver's process lock;
//!   [`accounts`]: what each has used, by the GPU's own log; [`samples`] and [`nvml`]: the same without the log; [`filled`]:
//!   both together; [`steer`] chooses. Agent and log run on the fake of [`forebay_rm::fake`] (in tests and in
//!   `forebay-sim`), lock and samples on stand-ins; none of it has met a GPU.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod accounts;
pub mod agent;
pub mod cgroup;
pub mod daemon;
pub mod filled;
pub mod guardian;
mod idle;
pub mod ledger;
pub mod metrics;
pub mod mps;
pub mod numbers;
pub mod nvml;
pub mod samples;
pub mod server;
pub mod service;
pub mod spans;
pub mod steer;
pub mod system;
pub mod trial;
