//! Running graphs: workers, the task state machine, channels, and the program's ends of them.

pub(crate) mod device;
mod dispatch;
mod elsewhere;
mod exec;
mod exit;
mod fuse;
mod gate;
mod host;
mod issue;
mod life;
mod members;
mod nested;
pub(crate) mod node;
mod notify;
mod ring;
mod running;
mod runtime;
mod scratch;
mod share;
mod start;
mod trace;
mod width;

pub use life::GraphState;
pub use running::{ChannelStats, Running, Snapshot, TaskStats};
pub use runtime::{MAX_DEVICES, Runtime, RuntimeBuilder};
pub use trace::{CopySpan, Recording, Span, TRACE_VARIABLE};
