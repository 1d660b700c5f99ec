//! Forebay's dataflow library: a program says which data flows where; Forebay decides when each piece runs, on which
//! device, and copies what must be copied.
//!
//! ```
//! use forebay::{Datablock, Graph, Runtime, Task, Template};
//!
//! let t = Template::array::<f32>([4]);
//! let mut g = Graph::new("hello");
//! let double = g.add(Task::new("double").input("x", t).output("y", t).host(|inv| {
//!     let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
//!     y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
//!     Ok(())
//! }))?;
//! let feed = g.feed((double, "x"), 4)?;
//! let drain = g.drain((double, "y"), 4)?;
//!
//! let run = Runtime::new()?.start(g)?;
//! run.push(feed, Datablock::from_slice(t, &[1f32, 2.0, 3.0, 4.0])?)?;
//! assert_eq!(run.pull(drain)?.as_slice::<f32>()?, [2.0, 4.0, 6.0, 8.0]);
//! # Ok::<(), forebay::Error>(())
//! ```
//!
//! Terms are PTask's (Rossbach et al., SOSP'11): see [`graph`] for building, [`Runtime`] and [`Running`] for running,
//! [`Datablock`] for data, and `docs/ptask.md` for the correspondence with the paper's system calls.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod block;
mod error;
pub mod graph;
pub mod place;
pub mod resident;
mod run;
mod sync;
mod template;
pub mod transfer;

#[cfg(test)]
#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

pub use block::{Datablock, Residency, Signals};
pub use error::{Error, Result, TaskError};
pub use forebay_hal as hal;
pub use forebay_hal::{Geometry, Kind, Source, Wanted};
pub use forebay_policy::Mode;
pub use graph::{Arg, Drain, Feed, Graph, Impl, Invocation, Launch, Outgoing, PortKind, Predicate, Task, TaskId};
pub use half::f16;
pub use run::{ChannelStats, GraphState, MAX_DEVICES, Running, Runtime, RuntimeBuilder, Snapshot, Span, TaskStats};
pub use run::{CopySpan, Recording, TRACE_VARIABLE};
pub use template::{Elem, Element, Layout, Template};
