//! The transfer engine: the fastest path between host and device memory for every size, found by measurement.
//!
//! [`Engine::open`] measures every way of moving bytes that a device has (once for a machine; two seconds at most) and
//! keeps the curves true while it works. A [`Stream`] moves data by them: the processor itself, the device's engine, a
//! kernel, a staging ring, or two at once, whatever the curves say is fastest, or ([`Stream::set_deadline`]) slowest at
//! its worst. A [`RealTime`] stream does so with real-time priority, from locked memory, without sleeping.
//!
//! `docs/transfer.md` explains the ways, shows measured curves and says how to choose.
//!
//! One file per step: [`plan`] (pure: which way, which pieces), stream.rs (does it), ring.rs (staging), wait.rs, engine.rs
//! (what streams share; drift), calibrate.rs, others.rs (who kept the machine busy meanwhile), store.rs, realtime.rs, priority.rs (of its thread), bound.rs (for C and
//! Python), pinned.rs, [`curve`].

mod bound;
mod calibrate;
pub mod curve;
mod engine;
mod others;
mod pinned;
pub mod plan;
mod priority;
mod realtime;
mod ring;
mod store;
mod stream;
mod wait;

pub use bound::Bound;
pub use calibrate::BUDGET as CALIBRATION;
pub use curve::{Cost, Curves, Host, Way};
pub use engine::Engine;
pub use forebay_hal::{Direction, Method};
pub use pinned::{HostBytes, HostBytesMut, Kept, Pinned, PinnedPart, PinnedPartMut};
pub use plan::{Plan, Range};
pub use priority::Scheduling;
pub use realtime::{Budget, Protection, RealTime};
pub use stream::{InFlight, Stream};
