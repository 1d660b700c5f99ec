//! The resident grid: blocks that stay on a device and take tasks from the host and from each other, without a launch for
//! each.
//!
//! A program gives task functions in CUDA C++ ([`Builder`]); the grid is loaded with all of them and started. Tasks are
//! submitted as [`Call`]s and awaited by [`Ticket`]s; they may make further tasks, wait for each other and work on ranges, on
//! the device alone. `docs/resident.md` has the protocol.
//!
//! A grid runs on a CUDA device ([`Builder::start_on`]), where NVRTC compiles the functions, or on the CPU
//! ([`Builder::start_on_cpu`]), where a block is a thread and a C++ compiler is needed: for development, tests and machines
//! without a GPU.
//!
//! layout.rs: what both sides share; memory.rs: where it is; call.rs: what is submitted; heap.rs: memory that tasks allocate;
//! watch.rs: calls of the program's functions; task.rs: tasks of dataflow graphs; together.rs: many tasks at a time; host.rs:
//! rings, completions, the watchdog;
//! site.rs: where it runs, which is cpu.rs or cuda.rs.

mod call;
mod cpu;
mod cuda;
mod heap;
mod host;
mod layout;
mod memory;
mod site;
mod task;
mod together;
mod watch;

pub use call::{Call, Completion};
pub use heap::HeapUse;
pub use host::{Grid, Stuck, Ticket};
pub use layout::{ARGS, FIRST_OWN, RESULT, header};
pub use task::Resident;
pub(crate) use task::Span;
pub use together::TOGETHER;

use std::sync::Arc;

use forebay_hal::{Device, Kind};

/// What can go wrong with a grid.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// No compiler for the task functions.
    #[error("no C++ compiler for resident tasks on the CPU: {0}; install g++ or clang++, or set CXX")]
    NoCompiler(String),
    /// The task functions do not compile.
    #[error("resident tasks do not compile:\n{0}")]
    Compile(String),
    /// Memory, threads or the loader.
    #[error("the grid cannot start: {0}")]
    Start(String),
    /// A setting out of bounds.
    #[error("{what} is {is}; {allowed} is allowed")]
    Setting {
        /// The setting.
        what: &'static str,
        /// What it was.
        is: u64,
        /// What it may be.
        allowed: &'static str,
    },
    /// A function that was not named when the grid was built.
    #[error("the grid has no function {name:?}; it has: {known}")]
    NoFunction {
        /// The name, or number.
        name: String,
        /// What there is.
        known: String,
    },
    /// More arguments than fit.
    #[error("{is} bytes of arguments; a task takes {} at most", layout::ARGS)]
    Arguments {
        /// How many.
        is: usize,
    },
    /// The ring is full.
    #[error("the ring is full: {0} tasks are submitted and not done")]
    Full(usize),
    /// The grid has been stopped.
    #[error("the grid has been stopped")]
    Stopped,
    /// A task did what the device does not let pass, and with it everything on the device has ended.
    #[error("the grid is lost: {why}; blocks were in: {}", if running.is_empty() { "unknown".to_owned() } else { running.join(", ") })]
    Lost {
        /// The driver's words.
        why: String,
        /// Function and ticket of each block that was busy.
        running: Vec<String>,
    },
    /// The root used up its fuel.
    #[error("task {function:?} used up its fuel")]
    OutOfFuel {
        /// The submitted task's function.
        function: String,
    },
    /// Of tasks that were submitted together, one for all lanes of a block found no room to wait.
    #[error(
        "there was no room for one of the tasks that were submitted together; a longer queue, or fewer at a time, helps"
    )]
    NoRoom,
    /// A function number that the device does not know.
    #[error("a task made one of a function that does not exist (submitted: {function:?})")]
    UnknownFunction {
        /// The submitted task's function.
        function: String,
    },
    /// A task gave back memory that was not to be given back.
    #[error("a task freed what is not allocated (submitted: {function:?}); the grid's heap() says which pointer")]
    BadFree {
        /// The submitted task's function.
        function: String,
    },
    /// The program's own status.
    #[error("task {function:?} failed with status {status:#x}")]
    Failed {
        /// The submitted task's function.
        function: String,
        /// Its bits, from [`FIRST_OWN`] on.
        status: u32,
    },
    /// It took too long.
    #[error("task {function:?} is not done after {waited:?}{}", stuck.as_ref().map_or(String::new(), |s| format!("; {s}")))]
    TimedOut {
        /// The submitted task's function.
        function: String,
        /// How long was waited.
        waited: std::time::Duration,
        /// A block that makes no progress, if there is one.
        stuck: Option<Stuck>,
    },
}

/// Result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Most blocks of a grid, and most on the CPU, where each is a thread.
const MAX_BLOCKS: usize = 16_384;
const MAX_THREADS: usize = 1024;
/// Most slots, nodes and places in a queue.
const MAX_SIZE: usize = 1 << 20;
const _: () = assert!(2 * MAX_SIZE <= 1 << layout::ROOT_BITS, "both rings' roots have a number in a slot");

/// Settings and task functions of a grid.
///
/// ```
/// use forebay::resident::{Builder, Call};
///
/// let grid = Builder::new("TASK(square) {
///     const u64 x = *(const u64 *)t->args;
///     *(u64 *)fb_result(c) = x * x;
/// }")
/// .functions(["square"])
/// .start_on_cpu();
/// # if matches!(grid, Err(forebay::resident::Error::NoCompiler(_))) { return Ok(()) }
/// let grid = grid?;
/// let ticket = grid.submit(Call::new(grid.function("square")?).args(&12u64.to_ne_bytes()))?;
/// assert_eq!(grid.wait(ticket)?.result_as::<u64>(), 144);
/// # Ok::<(), forebay::resident::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    source: String,
    functions: Vec<String>,
    sizes: Sizes,
}

/// How large what a grid has is.
#[derive(Clone, Debug)]
struct Sizes {
    /// If not as many as the place has room for.
    blocks: Option<usize>,
    threads: usize,
    ring: usize,
    nodes: usize,
    queue: usize,
    aside: usize,
    grain: u64,
    heap: Option<u64>,
}

impl Builder {
    /// A grid with the task functions in `source`: each is `TASK(name) { … }`, in which `c` is the context and `t` the task
    /// (`device/resident/grid.h` says what they offer).
    pub fn new(source: impl Into<String>) -> Self {
        let functions = Vec::new();
        let (ring, nodes, queue, aside) = (1024, 4096, 4096, 4096);
        let sizes = Sizes { blocks: None, threads: 128, ring, nodes, queue, aside, grain: 256, heap: None };
        Builder { source: source.into(), functions, sizes }
    }

    /// Names of the functions that may be submitted or made by tasks. On the device function `i` of them has the number
    /// `FN_name`.
    pub fn functions<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.functions.extend(names.into_iter().map(Into::into));
        self
    }

    /// Blocks; by default one for each core but one, or for each multiprocessor. More than have room at a time do nothing
    /// until others end.
    pub fn blocks(mut self, n: usize) -> Self {
        self.sizes.blocks = Some(n);
        self
    }

    /// Threads of a block on a GPU, 128 by default; a multiple of 32, 1024 at most. On the CPU a block is one thread.
    pub fn threads(mut self, n: usize) -> Self {
        self.sizes.threads = n;
        self
    }

    /// Tasks that may be submitted and not done, in each of both rings; a power of two.
    pub fn ring(mut self, n: usize) -> Self {
        self.sizes.ring = n;
        self
    }

    /// Tasks that may wait for others at a time; a power of two.
    pub fn nodes(mut self, n: usize) -> Self {
        self.sizes.nodes = n;
        self
    }

    /// Tasks of its own that each block may put aside when it has too many at hand (64 on the CPU, 256 on a GPU); 64 bytes
    /// each, 2^20 at most.
    pub fn aside(mut self, n: usize) -> Self {
        self.sizes.aside = n;
        self
    }

    /// Tasks that may wait for a block, beyond those that blocks keep; a power of two.
    pub fn queue(mut self, n: usize) -> Self {
        self.sizes.queue = n;
        self
    }

    /// Items of a range that a block does at a time, and the fewest that are worth giving to one that is idle (of functions
    /// for a thread or a warp four for each of a block's are enough, if that is less).
    pub fn grain(mut self, items: u64) -> Self {
        self.sizes.grain = items;
        self
    }

    /// Memory that tasks may allocate (`fb_new`, `fb_delete`), in bytes, with what describes it: 1.6 %, and on a CUDA device
    /// 20 KiB for each multiprocessor (1.3 of a heap below 256 MiB). Without, they get none.
    pub fn heap(mut self, bytes: u64) -> Self {
        self.sizes.heap = Some(bytes);
        self
    }

    fn check(&self) -> Result<()> {
        let power = |what, n: usize| {
            let ok = n.is_power_of_two() && (2..=MAX_SIZE).contains(&n);
            if ok { Ok(()) } else { Err(Error::Setting { what, is: n as u64, allowed: "a power of two, 2 to 2^20," }) }
        };
        power("ring", self.sizes.ring)?;
        power("nodes", self.sizes.nodes)?;
        power("queue", self.sizes.queue)?;
        if self.sizes.aside > MAX_SIZE {
            return Err(Error::Setting { what: "aside", is: self.sizes.aside as u64, allowed: "2^20 at most" });
        }
        if let Some(n) = self.sizes.blocks.filter(|n| !(1..=MAX_BLOCKS).contains(n)) {
            return Err(Error::Setting { what: "blocks", is: n as u64, allowed: "1 to 16384" });
        }
        if !self.sizes.threads.is_multiple_of(32) || !(32..=1024).contains(&self.sizes.threads) {
            let is = self.sizes.threads as u64;
            return Err(Error::Setting { what: "threads", is, allowed: "a multiple of 32, 32 to 1024," });
        }
        if self.sizes.grain == 0 {
            return Err(Error::Setting { what: "grain", is: 0, allowed: "1 or more" });
        }
        let name = |n: &String| {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            n.chars().all(word) && n.starts_with(|c: char| !c.is_ascii_digit())
        };
        match self.functions.iter().find(|n| n.is_empty() || !name(n)) {
            Some(bad) => Err(Error::NoFunction { name: bad.clone(), known: "names of C functions only".into() }),
            None => Ok(()),
        }
    }

    /// The whole of the device's code, for CUDA or C++.
    pub fn text(&self) -> String {
        let mut out = include_str!("../../../../device/platform.h").to_owned();
        out.push_str(&layout::header());
        out.push_str(include_str!("../../../../device/heap/set.h"));
        out.push_str(include_str!("../../../../device/heap/heap.h"));
        out.push_str(include_str!("../../../../device/heap/host.h"));
        out.push_str(&format!("#define FB_THREADS {}\n", self.sizes.threads));
        // Behind the program's: what stands for many that are submitted together.
        out.push_str(&format!("#define FB_EACH {}u\n", self.functions.len()));
        for (i, name) in self.functions.iter().enumerate() {
            out.push_str(&format!("#define FN_{name} {i}u\n"));
        }
        out.push_str(include_str!("../../../../device/resident/queue.h"));
        out.push_str(include_str!("../../../../device/resident/own.h"));
        out.push_str(include_str!("../../../../device/resident/post.h"));
        out.push_str(include_str!("../../../../device/resident/grid.h"));
        out.push_str(include_str!("../../../../device/resident/look.h"));
        out.push_str(include_str!("../../../../device/resident/many.h"));
        out.push_str(include_str!("../../../../device/resident/at_once.h"));
        out.push_str(include_str!("../../../../device/resident/stay.h"));
        out.push_str("#line 1 \"tasks\"\n");
        out.push_str(&self.source);
        out.push_str("\n#line 1 \"table\"\nFB_DEVICE bool fb_call(u32 function, Context *c, const Task *t) {\n  switch (function) {\n");
        for (i, name) in self.functions.iter().enumerate() {
            out.push_str(&format!("    case {i}: {name}(c, t); return true;\n"));
        }
        out.push_str("  }\n  return false;\n}\n");
        out.push_str(&self.kinds());
        // Pragmas of headers that are parts of one text say nothing.
        out.replace("#pragma once\n", "\n")
    }

    /// The device's table of what kind each function is: two bits each of a constant, as every task asks.
    fn kinds(&self) -> String {
        let kinds = self.functions.iter().map(|name| format!("fb_kind_{name}()"));
        let kinds: Vec<String> = kinds.chain(["FB_BY_THREAD".into()]).collect();
        let mut out = "FB_DEVICE u32 fb_kind(u32 function) {\n  switch (function / 32) {\n".to_owned();
        for (i, some) in kinds.chunks(32).enumerate() {
            let bits: Vec<String> =
                some.iter().enumerate().map(|(k, kind)| format!("(u64){kind} << {}", 2 * k)).collect();
            out.push_str(&format!("    case {i}: return (u32)(({}) >> 2 * (function % 32)) & 3;\n", bits.join(" | ")));
        }
        out.push_str("  }\n  return FB_BY_BLOCK;\n}\n");
        out
    }

    /// Builds the functions and starts the grid on the CPU, a thread a block.
    ///
    /// # Errors
    /// [`Error::NoCompiler`], [`Error::Compile`] with the compiler's words, [`Error::Setting`], [`Error::Start`].
    pub fn start_on_cpu(&self) -> Result<Grid> {
        self.check()?;
        Grid::start(self, Box::new(cpu::CpuSite::new(self)?))
    }

    /// Builds the functions and starts the grid on a device: of CUDA, or the CPU. On a CUDA device kernels that are to be used
    /// beside it are compiled before it is started, and memory that is freed while it runs is free when it has ended. A grid on
    /// a part of a device ([`Device::split`]) leaves the rest to others.
    ///
    /// # Errors
    /// As [`Builder::start_on_cpu`]; [`Error::Start`] for devices of other kinds.
    pub fn start_on(&self, device: &Arc<dyn Device>) -> Result<Grid> {
        self.check()?;
        match device.info().kind {
            Kind::Cpu => self.start_on_cpu(),
            Kind::Cuda => Grid::start(self, Box::new(cuda::CudaSite::new(self, device)?)),
            other => Err(Error::Start(format!("grids run on CUDA devices and the CPU, not on {other}"))),
        }
    }
}

impl Sizes {
    /// Blocks on the CPU: one core is the host's, who may wait by looking.
    fn blocks(&self) -> usize {
        self.blocks.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get() - 1).max(1))
    }
}
