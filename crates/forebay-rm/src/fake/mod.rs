//! RM from memory: clients and objects with the driver's own checks, processes that die, and a GPU that takes turns.
//!
//! What it is faithful in: handles as the driver and CUDA's user space number them; the check of the open file (a control
//! call for a client made on another file is INVALID_CLIENT, whoever calls); a client lives as long as a file it was made
//! on is open somewhere; suspension by lists is not bound to a file; what was suspended or sliced stays so when whoever
//! did it has gone; questions about clients that do not exist are counted, since the driver logs them.

mod cost;
mod driver;
mod file;
mod gpu;
mod log;
pub mod remote;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use file::FakeFile;
pub use gpu::{Gpu, Load, SWITCH_US};
pub use log::DRAIN_US;

use crate::error::{Error, GPU_IS_LOST, Result};
use crate::finder::Finder;
use crate::rm::{ControlFile, Rm};
use crate::sys::{
    CLASS_DEVICE, CLASS_GROUP, CLASS_MEMORY, CLASS_SUBDEVICE, Card, FIRST_CLIENT, FIRST_OBJECT, RawHandle,
};

pub use crate::target::DEFAULT_SLICE_US;
/// A channel's class on Hopper.
pub const CLASS_CHANNEL: u32 = 0xC86F;
/// RM's id of the first GPU; the others' are so much higher each.
const GPU_ID: u32 = 0x600;
const GPU_ID_STEP: u32 = 0x100;

/// The fake; cheap to clone.
#[derive(Clone)]
pub struct FakeRm(Arc<Mutex<State>>);

struct State {
    version: String,
    clients: BTreeMap<RawHandle, ClientState>,
    next_client: RawHandle,
    processes: HashMap<u32, Vec<Arc<FileId>>>,
    gpus: Vec<Gpu>,
    /// Questions about clients that do not exist.
    log_lines: usize,
    /// Control calls, by command.
    calls: HashMap<u32, u64>,
    /// Mappings of memory, by RM's name.
    mappings: BTreeMap<u64, Mapping>,
    next_mapping: u64,
    /// Memory whose owner's descriptor, mapping or object went before what depends on it.
    wrong_order: usize,
    /// With which status mappings are refused.
    refuse_mapping: Option<u32>,
    /// With which status the log is refused.
    refuse_log: Option<u32>,
    buffers: log::Buffers,
    pending: Vec<log::Pending>,
    /// Records of the log that go missing from now on.
    lose: u32,
    /// What the log adds to processes' numbers.
    apart: u32,
    /// Whoever asks is not root.
    unprivileged: bool,
    /// Which GPU something is of is not said.
    silent_of_gpus: bool,
    /// How many files a process has open is not seen.
    silent_of_files: bool,
    /// Calls take the GPUs' time.
    calls_take_time: bool,
}

struct Mapping {
    client: RawHandle,
    memory: RawHandle,
    /// Lives while the processor's mapping does.
    window: Weak<()>,
    /// The memory.
    file: Arc<OwnedFd>,
}

/// An open file description: lives while any duplicate of it is held.
#[derive(Debug)]
struct FileId;

struct ClientState {
    /// On which it was made. The client goes when the last duplicate has gone.
    file: Weak<FileId>,
    objects: BTreeMap<RawHandle, Object>,
}

/// Whether it was made on one of these.
fn is_of(c: &ClientState, files: &[Arc<FileId>]) -> bool {
    files.iter().any(|f| std::ptr::eq(c.file.as_ptr(), Arc::as_ptr(f)))
}

struct Object {
    class: u32,
    parent: RawHandle,
    /// The GPU that it is of, where that matters.
    gpu: usize,
    /// The group's number in the GPU.
    group: Option<usize>,
    /// The memory itself: a file of the machine's.
    memory: Option<Arc<OwnedFd>>,
}

impl Default for FakeRm {
    fn default() -> Self {
        Self::new("580.159.04")
    }
}

impl FakeRm {
    /// A machine with one GPU and a driver of this version.
    pub fn new(version: &str) -> Self {
        Self::of(version, 1)
    }

    /// A machine with so many GPUs.
    pub fn with_gpus(gpus: usize) -> Self {
        Self::of("580.159.04", gpus)
    }

    fn of(version: &str, gpus: usize) -> Self {
        FakeRm(Arc::new(Mutex::new(State {
            version: version.into(),
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            processes: HashMap::new(),
            gpus: (0..gpus).map(|_| Gpu::default()).collect(),
            log_lines: 0,
            calls: HashMap::new(),
            mappings: BTreeMap::new(),
            next_mapping: 0x4000_0000,
            wrong_order: 0,
            refuse_mapping: None,
            refuse_log: None,
            buffers: BTreeMap::new(),
            pending: (0..gpus).map(|_| log::Pending::default()).collect(),
            lose: 0,
            apart: 0,
            unprivileged: false,
            silent_of_gpus: false,
            silent_of_files: false,
            calls_take_time: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Clients whose last file has been closed are gone, and with them their groups.
        let State { clients, gpus, buffers, mappings, .. } = &mut *s;
        clients.retain(|handle, c| {
            let alive = c.file.strong_count() > 0;
            if !alive {
                c.objects.values().for_each(|o| o.group.into_iter().for_each(|g| gpus[o.gpu].remove(g)));
                buffers.retain(|(client, _), _| client != handle);
                mappings.retain(|_, m| m.client != *handle);
            }
            alive
        });
        s
    }

    /// A process with a client, as CUDA makes it: for every GPU a device and a subdevice, and on the first one per channel
    /// group `channels` channels. The first group carries `load`.
    pub fn start(&self, pid: u32, groups: usize, channels: usize, load: Load) {
        let file = Arc::new(FileId);
        {
            let mut s = self.lock();
            let handle = s.new_client(&file);
            let mut next = FIRST_OBJECT;
            let mut objects = BTreeMap::new();
            for gpu in 0..s.gpus.len() {
                let mut add = |class, parent| {
                    next += 1;
                    objects.insert(next, Object { class, parent, gpu, group: None, memory: None });
                    next
                };
                let device = add(CLASS_DEVICE, handle);
                add(CLASS_SUBDEVICE, device);
            }
            s.clients.entry(handle).and_modify(|c| c.objects = objects);
            s.processes.entry(pid).or_default().push(file);
        }
        self.use_gpu(0, pid, groups, channels, load);
    }

    /// A process makes so many more groups with `channels` channels each, in the client that it has, on the first GPU.
    pub fn grow(&self, pid: u32, groups: usize, channels: usize) {
        self.use_gpu(0, pid, groups, channels, Load::IDLE);
    }

    /// The same on GPU number `on`; the first group carries `load`.
    pub fn use_gpu(&self, on: usize, pid: u32, groups: usize, channels: usize, load: Load) {
        let mut s = self.lock();
        let State { clients, gpus, processes, .. } = &mut *s;
        let files = processes.get(&pid).map_or(&[][..], Vec::as_slice);
        // The last one that it made.
        let Some(client) = clients.values_mut().filter(|c| is_of(c, files)).last() else { return };
        let mut next = client.objects.keys().next_back().copied().unwrap_or(FIRST_OBJECT);
        let is_device = |o: &Object| o.class == CLASS_DEVICE && o.gpu == on;
        let device = client.objects.iter().find(|(_, o)| is_device(o)).map_or(0, |(h, _)| *h);
        for g in 0..groups {
            let number = gpus[on].add(pid, if g == 0 { load } else { Load::IDLE });
            let mut add = |class, parent| {
                next += 1;
                let made = Object { class, parent, gpu: on, group: Some(number), memory: None };
                client.objects.insert(next, made);
                next
            };
            let group = add(CLASS_GROUP, device);
            for _ in 0..channels {
                add(CLASS_CHANNEL, group);
                gpus[on].add_channel(number);
            }
        }
    }

    /// A process ends a context that it has on GPU number `on`: its channels there go. It keeps its clients, where those that
    /// it makes next may have the same handles.
    pub fn end_context(&self, on: usize, pid: u32) {
        let mut s = self.lock();
        let State { clients, gpus, processes, .. } = &mut *s;
        let files = processes.get(&pid).map_or(&[][..], Vec::as_slice);
        for client in clients.values_mut().filter(|c| is_of(c, files)) {
            client.objects.retain(|_, o| {
                let goes = o.gpu == on && o.group.is_some();
                o.group.filter(|_| goes).into_iter().for_each(|g| gpus[on].remove(g));
                !goes
            });
        }
    }

    /// A process lets go of all that it has at the driver, and lives on: it was moved off its GPUs. It is back by
    /// [`FakeRm::start`].
    pub fn leave(&self, pid: u32) {
        let mut s = self.lock();
        let State { clients, gpus, processes, .. } = &mut *s;
        let files = processes.get_mut(&pid).map(std::mem::take).unwrap_or_default();
        // It gives back what it has: others may have its files open.
        clients.retain(|_, c| {
            let goes = is_of(c, &files);
            let groups = c.objects.values().filter(|_| goes).filter_map(|o| Some((o.gpu, o.group?)));
            groups.for_each(|(gpu, group)| gpus[gpu].remove(group));
            !goes
        });
    }

    /// A process makes another one, which has the files that it has open.
    pub fn fork(&self, of: u32, pid: u32) {
        let mut s = self.lock();
        let files = s.processes.get(&of).cloned().unwrap_or_default();
        s.processes.insert(pid, files);
    }

    /// From now on the process asks for this.
    pub fn set_load(&self, pid: u32, load: Load) {
        self.lock().gpus.iter_mut().for_each(|g| g.set_load(pid, load));
    }

    /// A process that has a group on the first GPU has one more kernel to do there, which lasts so long; its number among these.
    pub fn ask(&self, pid: u32, us: u64) -> Option<u64> {
        self.lock().gpus.first_mut()?.ask(pid, us)
    }

    /// No kernel that was asked for ends sooner than in so many µs, if nobody is let on or asks for another meanwhile.
    pub fn soonest_us(&self) -> Option<u64> {
        self.lock().gpus.first()?.soonest_us()
    }

    /// Whether that has ended; that of a process which has gone, too.
    pub fn has_ended(&self, pid: u32, kernel: u64) -> bool {
        self.lock().gpus.first().is_none_or(|g| g.has_ended(pid, kernel))
    }

    /// Whether any channel of a process is disabled.
    pub fn is_suspended(&self, pid: u32) -> bool {
        self.lock().gpus.iter().any(|g| g.is_suspended(pid))
    }

    /// The same, of GPU number `gpu`.
    pub fn is_suspended_on(&self, gpu: usize, pid: u32) -> bool {
        self.lock().gpus[gpu].is_suspended(pid)
    }

    /// The process dies: its files close. What others have the files of is there still, and nobody asks anything of it.
    pub fn kill(&self, pid: u32) {
        self.set_load(pid, Load::IDLE);
        self.lock().processes.remove(&pid);
        // Whatever went with them is noticed by the next lock.
        drop(self.lock());
    }

    /// Lets the GPUs run for `us`.
    pub fn run(&self, us: u64) {
        self.lock().run(us);
    }

    /// GPU number `gpu` falls off the bus: nothing on it goes on, and whatever is asked of it, or of what processes have
    /// there, is refused. What the driver knows by itself it still says: which objects there are, and that it has such a card.
    pub fn lose_gpu(&self, gpu: usize) {
        self.refuse_gpu(gpu, GPU_IS_LOST);
    }

    /// The same with another status.
    pub fn refuse_gpu(&self, gpu: usize, status: u32) {
        self.lock().gpus.iter_mut().skip(gpu).take(1).for_each(|g| g.refuses = Some(status));
    }

    /// The first GPU's time, µs.
    pub fn now_us(&self) -> u64 {
        self.lock().gpus.first().map_or(0, Gpu::now_us)
    }

    /// From now on calls take as much of the GPUs' time as they take an H200's.
    pub fn let_calls_take_time(&self) {
        self.lock().calls_take_time = true;
    }

    /// Time that a process's groups have held GPUs in kernels, µs; none for a process without any.
    pub fn gpu_time(&self, pid: u32) -> Option<u64> {
        self.lock().gpus.iter().filter_map(|g| g.time_of(pid)).reduce(|a, b| a + b)
    }

    /// The same, of GPU number `gpu`.
    pub fn gpu_time_on(&self, gpu: usize, pid: u32) -> Option<u64> {
        self.lock().gpus[gpu].time_of(pid)
    }

    /// How long a process's kernels took from their coming to their end since this was asked last, µs.
    pub fn latencies(&self, pid: u32) -> Vec<u64> {
        self.lock().gpus.iter_mut().flat_map(|g| g.latencies(pid)).collect()
    }

    /// Whether any slice of a process is not the driver's.
    pub fn is_sliced(&self, pid: u32) -> bool {
        self.lock().gpus.iter().any(|g| g.is_sliced(pid))
    }

    /// The same, of GPU number `gpu`.
    pub fn is_sliced_on(&self, gpu: usize, pid: u32) -> bool {
        self.lock().gpus[gpu].is_sliced(pid)
    }

    /// GPUs that the machine has, those included that have fallen off.
    pub fn gpus(&self) -> usize {
        self.lock().gpus.len()
    }

    /// Context switches so far.
    pub fn switches(&self) -> u64 {
        self.lock().gpus.iter().map(Gpu::switches).sum()
    }

    /// Clients that exist.
    pub fn clients(&self) -> usize {
        self.lock().clients.len()
    }

    /// Those of them that these processes have the files of.
    pub fn clients_of(&self, pids: impl IntoIterator<Item = u32>) -> usize {
        let s = self.lock();
        let files: Vec<_> = pids.into_iter().filter_map(|pid| s.processes.get(&pid)).flatten().cloned().collect();
        s.clients.values().filter(|c| is_of(c, &files)).count()
    }

    /// Mappings of memory that exist.
    pub fn mappings(&self) -> usize {
        self.lock().mappings.len()
    }

    /// Objects of memory that exist.
    pub fn memories(&self) -> usize {
        let objects = |c: &ClientState| c.objects.values().filter(|o| o.class == CLASS_MEMORY).count();
        self.lock().clients.values().map(objects).sum()
    }

    /// How often something went before what depends on it: RM's mapping before the processor's, or the object before
    /// RM's mapping.
    pub fn wrong_order(&self) -> usize {
        self.lock().wrong_order
    }

    /// From now on mappings are refused with this status, as in confidential computing; none allows them again.
    pub fn refuse_mapping(&self, status: Option<u32>) {
        self.lock().refuse_mapping = status;
    }

    /// An open control file of a process's, on which it makes its own client, groups and channels: what it has made goes
    /// when this is dropped.
    pub fn file_of(&self, pid: u32) -> Box<dyn ControlFile> {
        Box::new(FakeFile { rm: self.clone(), id: Arc::new(FileId), pid })
    }

    /// The class of an object of a client; none if there is no such object.
    pub fn class_of(&self, client: RawHandle, object: RawHandle) -> Option<u32> {
        self.lock().clients.get(&client)?.objects.get(&object).map(|o| o.class)
    }

    /// The memory of a mapping, by RM's name of it.
    pub fn memory_of(&self, linear: u64) -> Option<Arc<OwnedFd>> {
        self.lock().mappings.get(&linear).map(|m| m.file.clone())
    }

    /// Where another process finds the memory of a mapping.
    fn path_of(&self, linear: u64) -> Option<String> {
        self.memory_of(linear).map(|file| log::path_of(&file))
    }

    /// From now on the log is refused with this status, as without root; none allows it again.
    pub fn refuse_log(&self, status: Option<u32>) {
        self.lock().refuse_log = status;
    }

    /// The next so many records of the log go missing.
    pub fn lose_records(&self, n: u32) {
        self.lock().lose = n;
    }

    /// From now on whoever asks may not have the log, and can know that.
    pub fn without_privilege(&self) {
        self.lock().unprivileged = true;
    }

    /// From now on nobody sees how many files a process has open.
    pub fn be_silent_of_files(&self) {
        self.lock().silent_of_files = true;
    }

    /// From now on nobody is told which GPU a subdevice is of.
    pub fn be_silent_of_gpus(&self) {
        self.lock().silent_of_gpus = true;
    }

    /// From now on this is a container: the log's numbers of processes are the machine's, which are so much higher.
    pub fn number_apart(&self, by: u32) {
        self.lock().apart = by;
    }

    /// The driver forgets all event buffers, as after a reset.
    pub fn forget_logs(&self) {
        self.lock().buffers.clear();
    }

    /// Logs that are switched on.
    pub fn logs(&self) -> usize {
        self.lock().buffers.values().filter(|b| b.bound.is_some()).count()
    }

    /// How often a control call has been made.
    pub fn calls(&self, cmd: u32) -> u64 {
        self.lock().calls.get(&cmd).copied().unwrap_or(0)
    }

    /// Lines that questions about absent clients have left in the kernel's log.
    pub fn log_lines(&self) -> usize {
        self.lock().log_lines
    }
}

impl Rm for FakeRm {
    fn may_log(&self) -> bool {
        !self.lock().unprivileged
    }

    fn driver_version(&self) -> Result<String> {
        Ok(self.lock().version.clone())
    }

    fn open(&self, gpu: u32) -> Result<Box<dyn ControlFile>> {
        if gpu as usize >= self.lock().gpus.len() {
            return Err(Error::NoDriver { path: format!("/dev/nvidia{gpu}"), why: io::ErrorKind::NotFound.into() });
        }
        Ok(Box::new(FakeFile { rm: self.clone(), id: Arc::new(FileId), pid: 0 }))
    }

    fn cards(&self) -> Result<Vec<Card>> {
        Ok(self.lock().cards())
    }

    fn processes(&self, _: &mut Finder) -> Result<Vec<u32>> {
        let s = self.lock();
        Ok(s.processes.iter().filter(|(_, files)| !files.is_empty()).map(|(pid, _)| *pid).collect())
    }

    /// The control files, and one for each channel.
    fn count_files(&self, pid: u32) -> usize {
        let s = self.lock();
        let seen = s.processes.get(&pid).filter(|_| !s.silent_of_files);
        let files = seen.map_or(&[][..], Vec::as_slice);
        let own = s.clients.values().filter(|c| is_of(c, files));
        files.len() + own.flat_map(|c| c.objects.values()).filter(|o| o.class == CLASS_CHANNEL).count()
    }

    fn files_and_count(&self, pid: u32) -> Result<(Vec<Box<dyn ControlFile>>, usize)> {
        let count = self.count_files(pid);
        let s = self.lock();
        let files = s.processes.get(&pid);
        let files = files.ok_or_else(|| Error::Process { pid, why: io::ErrorKind::NotFound.into() })?;
        let file =
            |id: &Arc<FileId>| Box::new(FakeFile { rm: self.clone(), id: id.clone(), pid }) as Box<dyn ControlFile>;
        Ok((files.iter().map(file).collect(), count))
    }
}
