//! What can go wrong in a graph, with the names of the things involved.

use std::sync::Arc;
use std::time::Duration;

use crate::template::Template;

/// Result of a call into Forebay.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a task's function returns when it fails.
pub type TaskError = Box<dyn std::error::Error + Send + Sync>;

fn place(line: usize, column: usize) -> String {
    if line == 0 { String::new() } else { format!(":{line}:{column}") }
}

/// An error of the dataflow library. Cheap to clone: a graph's failure is reported to everyone who waits for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Two tasks or two ports of a task have the same name, or a name is empty or longer than 128 bytes.
    #[error("bad name {name:?} of {what}: {why}")]
    Name {
        /// Kind of thing.
        what: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A task has no port of that name.
    #[error("task {task:?} has no port {port:?}; it has: {known}")]
    NoPort {
        /// Task.
        task: String,
        /// Port asked for.
        port: String,
        /// Ports that exist.
        known: String,
    },
    /// A handle of another graph, or a number out of range.
    #[error("no such {what} in graph {graph:?}")]
    NoSuch {
        /// Kind of thing.
        what: &'static str,
        /// Graph.
        graph: String,
    },
    /// A channel was to end in an output, or begin at an input.
    #[error("{port} is an {is} port; a channel {end} at it")]
    Direction {
        /// `task.port`.
        port: String,
        /// Its direction.
        is: &'static str,
        /// What was asked of it.
        end: &'static str,
    },
    /// An input port takes only one channel.
    #[error("{port} already has a channel from {from}; a second one from {second} is refused")]
    Occupied {
        /// `task.port`.
        port: String,
        /// Existing source.
        from: String,
        /// Refused source.
        second: String,
    },
    /// The two ends of a channel disagree about the data.
    #[error("channel {from} → {to}: {from} gives {from_template}, {to} takes {to_template}: {why}")]
    Mismatch {
        /// Source port.
        from: String,
        /// Destination port.
        to: String,
        /// What the source gives.
        from_template: Box<Template>,
        /// What the destination takes.
        to_template: Box<Template>,
        /// First difference.
        why: String,
    },
    /// A channel needs room for at least one datablock, and at most 65 536.
    #[error("channel {from} → {to}: capacity {capacity} is not within 1..={max}")]
    Capacity {
        /// Source port.
        from: String,
        /// Destination port.
        to: String,
        /// What was asked for.
        capacity: usize,
        /// Largest capacity.
        max: usize,
    },
    /// A port without a channel.
    #[error("port {port} ({kind}) has no channel; connect it, feed it or drain it")]
    Unbound {
        /// `task.port`.
        port: String,
        /// Its kind.
        kind: &'static str,
    },
    /// A cycle that could never start.
    #[error("cycle without an initializer: {}; give one of its input ports an initializer port", path.join(" → "))]
    Cycle {
        /// The tasks along it, the first one repeated at the end.
        path: Vec<String>,
    },
    /// A size or a number that cannot be, mostly a template's.
    #[error("{what}: {why}")]
    Size {
        /// Whose it is.
        what: String,
        /// What overflows or is zero.
        why: String,
    },
    /// A task that no device of the runtime can run.
    #[error("task {task:?} has no implementation for the devices here ({devices}); it has: {has}")]
    NoImplementation {
        /// Task.
        task: String,
        /// Devices of the runtime.
        devices: String,
        /// Implementations.
        has: String,
    },
    /// Anything else that is wrong with a task's declaration.
    #[error("task {task:?}: {why}")]
    Task {
        /// Task.
        task: String,
        /// What is wrong.
        why: String,
    },
    /// A task's function failed or panicked while running.
    #[error("task {task:?} failed on {device}: {why}")]
    Failed {
        /// Task.
        task: String,
        /// Device that ran it.
        device: String,
        /// The error.
        why: Arc<TaskError>,
    },
    /// A device error outside any task.
    #[error(transparent)]
    Device(#[from] forebay_hal::Error),
    /// The graph is not running, so nothing can be pushed into or pulled from it.
    #[error("graph {graph:?} is {state}")]
    NotRunning {
        /// Graph.
        graph: String,
        /// Its state.
        state: &'static str,
    },
    /// A task asked for something that waits for tasks.
    #[error(
        "graph {graph:?} cannot be {what} from inside a task, which would wait for itself; do it from a thread of the program"
    )]
    InsideTask {
        /// Graph.
        graph: String,
        /// What was asked, as a participle.
        what: &'static str,
    },
    /// A task's function called a task and would have waited for itself.
    #[error(
        "a call of task {task:?} from inside a task would wait for itself: every lane of {task:?} waits for the function that calls it; \
         it needs more lanes, or another way to be called"
    )]
    Circle {
        /// The task that was called.
        task: String,
    },
    /// A task's function would have waited for other tasks while all other threads that could run one do so.
    #[error(
        "{functions} functions of tasks would wait for other tasks at the same time, and no thread is left to run one: let fewer of \
         them call or wait from inside each other, or use the forms that do not wait"
    )]
    AllWait {
        /// All of them, with the one that was refused.
        functions: usize,
    },
    /// It belongs to the process that this one was forked from.
    #[error(
        "{what} was made by the process that this one was forked from, and works there only; make another one here \
         (in Python: multiprocessing's \"spawn\", or a Runtime of the child's own)"
    )]
    Forked {
        /// What it is.
        what: String,
    },
    /// A push found the channel full, or a pull found it empty, and did not want to wait (longer).
    #[error("{what} {port} after {waited:?}")]
    WouldBlock {
        /// What it found: "no room at" or "nothing at".
        what: &'static str,
        /// The port.
        port: String,
        /// How long it waited.
        waited: Duration,
    },
    /// A graph was stopped, and a task that ran did not end while somebody waited for it.
    #[error("graph {graph:?}: task {task:?} still runs after {waited:?}; no other starts")]
    StillRunning {
        /// The graph.
        graph: String,
        /// A task that runs.
        task: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A datablock does not fit what the port takes, or is read as another type.
    #[error("datablock of {block} where {want}")]
    Block {
        /// What the block is.
        block: String,
        /// What was expected.
        want: String,
    },
    /// A graph file that cannot be read.
    #[error("{file}{}: {why}", place(*line, *column))]
    File {
        /// Path, or a placeholder for text.
        file: String,
        /// 1-based line; 0 if it is not about a place in the file.
        line: usize,
        /// 1-based column; 0 as well then.
        column: usize,
        /// What is wrong.
        why: String,
    },
    /// Several errors found by one check.
    #[error("{} errors:\n{}", .0.len(), .0.iter().map(|e| format!("  {e}")).collect::<Vec<_>>().join("\n"))]
    Several(Vec<Error>),
}

impl Error {
    /// One error, or all of them as one.
    pub(crate) fn join(mut all: Vec<Error>) -> Result<()> {
        match all.len() {
            0 => Ok(()),
            1 => Err(all.remove(0)),
            _ => Err(Error::Several(all)),
        }
    }
}
