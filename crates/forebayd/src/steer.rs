//! How a GPU is steered: what takes processes off it, what says who used it, and who is on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_hal::cuda::checkpoint::Checkpoints;
use forebay_proto::wire::{Level, Source};
use forebay_rm::{CONTROL_PATH, Client, Finder, Rm};

use crate::accounts::LogMeter;
use crate::agent::lock::{self, Locks};
use crate::agent::{Hardware, Meter, PERIOD_NS, Reach};
use crate::filled::Filled;
use crate::ledger::Ledger;
use crate::numbers::Numbers;
use crate::nvml;
use crate::samples::SampleMeter;

/// What goes without in a container.
const APART: &str = "this is a container with process numbers of its own, and the GPU's log has the machine's: whose is whose is \
                     seen in the first seconds; nobody says who has how much of its memory";

/// How a GPU's processes are steered.
pub enum Way {
    /// By the driver's channels.
    Hardware {
        /// The driver.
        rm: Arc<dyn Rm>,
        /// Whether NVML is asked for what the driver's log does not tell.
        nvml: bool,
        /// Processes have other numbers in the log than here. NVML's would be nobody's, or somebody else's.
        apart: bool,
        /// Clients further down that are asked about to find a process that is older than the service.
        search: u32,
    },
    /// By the CUDA driver's process lock.
    Lock,
}

/// Who is on a GPU, as far as can be seen.
pub type Processes = Box<dyn FnMut() -> Result<Vec<u32>, String>>;

/// Memory of a GPU that each process has, bytes.
pub(crate) type Memory = Box<dyn FnMut() -> Result<BTreeMap<u32, u64>, String>>;

/// What it takes to steer a GPU.
pub(crate) struct Means {
    pub(crate) reach: Box<dyn Reach>,
    pub(crate) meter: Box<dyn Meter>,
    /// Length of a round of windows.
    pub(crate) period_ns: u64,
    pub(crate) level: Level,
    pub(crate) source: Source,
    pub(crate) processes: Processes,
    /// None where nobody says.
    pub(crate) memory: Option<Memory>,
    /// What is not as it should be, though it goes without.
    pub(crate) without: Option<String>,
}

impl Way {
    /// Opens what it takes for GPU number `gpu`.
    ///
    /// # Errors
    /// What the driver refused, or that nobody says who uses the GPU.
    pub(crate) fn open(self, gpu: u32, ledger: Arc<Ledger>) -> Result<Means, String> {
        match self {
            Way::Hardware { rm, nvml, apart, search } => by_channels(gpu, rm, (nvml, apart), search, ledger),
            Way::Lock => by_lock(gpu, ledger),
        }
    }
}

fn by_channels(
    gpu: u32,
    rm: Arc<dyn Rm>,
    (nvml, apart): (bool, bool),
    search: u32,
    ledger: Arc<Ledger>,
) -> Result<Means, String> {
    let own = Arc::new(Client::open(rm.clone(), gpu).map_err(|e| e.to_string())?);
    let samples = if nvml && !apart { nvml::Gpu::open(gpu) } else { Err("NVML is not asked".into()) };
    let memory = samples.as_ref().ok().map(memory);
    let (meter, source, without): (Box<dyn Meter>, _, _) = match (LogMeter::open(own.clone()), samples) {
        (Ok(log), _) if apart => (Box::new(Numbers::new(log)), Source::Switches, Some(APART.into())),
        (Ok(log), Ok(s)) => (Box::new(Filled::new(log, SampleMeter::new(s))), Source::Switches, None),
        // Who is alone on the GPU counts as using it, then.
        (Ok(log), Err(_)) => (Box::new(log), Source::Switches, None),
        (Err(e), samples) => {
            let why = format!("its log of context switches, which takes root, is not to be had: {e}");
            let none = |no| format!("it cannot be divided where nobody's use is known: {why}; {no}");
            let samples = samples.map_err(none)?;
            let without = format!("{why}; NVML's samples are used instead");
            (Box::new(SampleMeter::new(samples)), Source::Nvml, Some(without))
        }
    };
    let mut finder = Finder::new(CONTROL_PATH);
    let processes = Box::new(move || rm.processes(&mut finder).map_err(|e| e.to_string()));
    let reach = Box::new(Hardware::new(own, Some(ledger)).searching(search));
    Ok(Means { reach, meter, period_ns: PERIOD_NS, level: Level::Hardware, source, processes, memory, without })
}

fn by_lock(gpu: u32, ledger: Arc<Ledger>) -> Result<Means, String> {
    let driver = Arc::new(Checkpoints::open().map_err(|e| e.to_string())?);
    let samples = nvml::Gpu::open(gpu)?;
    let on = samples.clone();
    let memory = Some(memory(&samples));
    Ok(Means {
        reach: Box::new(Locks::new(driver, ledger)),
        meter: Box::new(SampleMeter::new(samples)),
        period_ns: lock::PERIOD_NS,
        level: Level::Lock,
        source: Source::Nvml,
        processes: Box::new(move || on.processes().map(|all| all.into_keys().collect())),
        memory,
        without: None,
    })
}

fn memory(gpu: &nvml::Gpu) -> Memory {
    let gpu = gpu.clone();
    Box::new(move || gpu.processes().map(|all| all.into_iter().filter_map(|(pid, m)| Some((pid, m?))).collect()))
}
