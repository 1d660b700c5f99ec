//! RM from memory: clients and objects with the driver's own checks, processes that die, and a GPU that takes turns.
//!
//! What it is faithful in: handles as the driver and CUDA's user space number them; the check of the open file (a control
//! call for a client made on another file is INVALID_CLIENT, whoever calls); a client lives as long as a file it was made
//! on is open somewhere; suspension by lists is not bound to a file; what was suspended or sliced stays so when whoever
//! did it has gone; questions about clients that do not exist are counted, since the driver logs them.

mod cost;
mod gpu;
mod log;
pub mod remote;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use gpu::{Gpu, Load, SWITCH_US};
pub use log::DRAIN_US;

use crate::error::{self, Error, Result};
use crate::finder::Finder;
use crate::rm::{ControlFile, Rm, Window};
use crate::sys::{
    Alloc, BindLog, CLASS_CLIENT, CLASS_DEVICE, CLASS_EVENT_BUFFER, CLASS_GROUP, CLASS_MEMORY, CLASS_SUBDEVICE,
    CLASS_SYSTEM_MEMORY, CMD_BIND_LOG, CMD_DISABLE_CHANNELS, CMD_ENABLE_EVENTS, CMD_FLUSH, CMD_GET_TIMESLICE,
    CMD_GPU_ID, CMD_GPU_TIME, CMD_HANDLE_INFO, CMD_ID_INFO, CMD_IMPORT_OBJECT, CMD_SET_TIMESLICE, CMD_UPDATE_GET, Card,
    Control, DeviceAlloc, DisableChannels, EnableEvents, EventBufferAlloc, FIRST_CLIENT, FIRST_OBJECT, Free, GpuId,
    GpuTime, HandleInfo, IMPORT_RM_OBJECT, INFO_CLASS, INFO_PARENT, IdInfo, ImportObject, MAP_READ_ONLY, MAX_CHANNELS,
    MapMemory, MemoryAlloc, RawHandle, Timeslice, UnmapMemory, UpdateGet, is_channel,
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
        let own = |c: &&mut ClientState| files.iter().any(|f| std::ptr::eq(c.file.as_ptr(), Arc::as_ptr(f)));
        // The last one that it made.
        let Some(client) = clients.values_mut().filter(own).last() else { return };
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

    /// The process dies: its files close.
    pub fn kill(&self, pid: u32) {
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
        self.lock().gpus.iter_mut().skip(gpu).take(1).for_each(|g| g.lost = true);
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

fn id_of(gpu: usize) -> u32 {
    GPU_ID + gpu as u32 * GPU_ID_STEP
}

impl State {
    fn cards(&self) -> Vec<Card> {
        let card = |g| Card { valid: 1, gpu: id_of(g), minor: g as u32, ..Card::default() };
        (0..self.gpus.len()).map(card).collect()
    }

    fn new_client(&mut self, file: &Arc<FileId>) -> RawHandle {
        let handle = self.next_client;
        self.next_client += 1;
        self.clients.insert(handle, ClientState { file: Arc::downgrade(file), objects: BTreeMap::new() });
        handle
    }

    /// The client, if it was made on this file.
    fn client(&mut self, file: &Arc<FileId>, handle: RawHandle) -> Result<&mut ClientState, u32> {
        match self.clients.get_mut(&handle) {
            Some(c) if std::ptr::eq(c.file.as_ptr(), Arc::as_ptr(file)) => Ok(c),
            Some(_) => Err(error::INVALID_CLIENT),
            None => {
                self.log_lines += 1;
                Err(error::INVALID_CLIENT)
            }
        }
    }

    /// Lets the GPUs run.
    fn run(&mut self, us: u64) {
        self.gpus.iter_mut().for_each(|g| g.run(us));
        (0..self.gpus.len()).for_each(|gpu| self.drain(gpu, false));
    }

    /// A command, with the time that it takes.
    fn timed_control(&mut self, file: &Arc<FileId>, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        let (before, after) = if self.calls_take_time { cost::of(call.cmd, params) } else { (0, 0) };
        self.run(before);
        let done = self.control(file, call, params);
        self.run(after);
        done
    }

    fn control(&mut self, file: &Arc<FileId>, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        *self.calls.entry(call.cmd).or_default() += 1;
        let silent = self.silent_of_gpus;
        let client = self.client(file, call.client)?;
        let (class, gpu, group) = match client.objects.get(&call.object) {
            Some(o) => (o.class, o.gpu, o.group),
            None if call.object == call.client => (CLASS_CLIENT, 0, None),
            None => return Err(error::INVALID_OBJECT_HANDLE),
        };
        let of_gpu = class != CLASS_CLIENT && class != CLASS_EVENT_BUFFER;
        if of_gpu && self.gpus[gpu].lost {
            return Err(error::GPU_IS_LOST);
        }
        let Some(client) = self.clients.get_mut(&call.client) else { return Err(error::INVALID_CLIENT) };
        match (call.cmd, class) {
            (CMD_HANDLE_INFO, CLASS_CLIENT) => {
                let p: &mut HandleInfo = typed(params)?;
                let (class, parent) = match client.objects.get(&p.object) {
                    Some(o) => (o.class, o.parent),
                    None if p.object == call.client => (CLASS_CLIENT, 0),
                    None => return Err(error::OBJECT_NOT_FOUND),
                };
                p.answer = match p.index {
                    INFO_CLASS => u64::from(class),
                    INFO_PARENT => u64::from(parent),
                    _ => return Err(error::INVALID_ARGUMENT),
                };
                Ok(())
            }
            (CMD_ID_INFO, CLASS_CLIENT) => {
                let p: &mut IdInfo = typed(params)?;
                let gpu = (0..self.gpus.len()).find(|g| id_of(*g) == p.gpu).ok_or(error::INVALID_ARGUMENT)?;
                p.device = gpu as u32;
                Ok(())
            }
            (CMD_GPU_ID, CLASS_SUBDEVICE) if !silent => {
                typed::<GpuId>(params)?.gpu = id_of(gpu);
                Ok(())
            }
            (CMD_IMPORT_OBJECT, CLASS_CLIENT) => {
                let p: &ImportObject = typed(params)?;
                let parent = client.objects.get(&p.parent).filter(|o| o.class == CLASS_DEVICE).map(|o| o.gpu);
                let gpu = parent.ok_or(error::INVALID_ARGUMENT)?;
                if p.kind != IMPORT_RM_OBJECT || p.fd < 0 || client.objects.contains_key(&p.object) {
                    return Err(error::INVALID_ARGUMENT);
                }
                // SAFETY: borrowed for this call; a number that is no open file is an error of the duplication.
                let file = unsafe { BorrowedFd::borrow_raw(p.fd) };
                let file = rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(|_| error::INVALID_ARGUMENT)?;
                let object =
                    Object { class: CLASS_MEMORY, parent: p.parent, gpu, group: None, memory: Some(Arc::new(file)) };
                client.objects.insert(p.object, object);
                Ok(())
            }
            (CMD_GET_TIMESLICE, CLASS_GROUP) => {
                typed::<Timeslice>(params)?.us = group.map_or(0, |g| self.gpus[gpu].slice(g));
                Ok(())
            }
            (CMD_SET_TIMESLICE, CLASS_GROUP) => {
                let us = typed::<Timeslice>(params)?.us;
                if us == 0 {
                    return Err(error::INVALID_ARGUMENT);
                }
                group.into_iter().for_each(|g| self.gpus[gpu].set_slice(g, us));
                Ok(())
            }
            (CMD_DISABLE_CHANNELS, CLASS_SUBDEVICE) => self.disable(gpu, typed(params)?),
            (CMD_GPU_TIME, CLASS_SUBDEVICE) => {
                typed::<GpuTime>(params)?.ns = self.gpus[gpu].now_us() * 1000;
                Ok(())
            }
            (CMD_BIND_LOG, CLASS_SUBDEVICE) => {
                let p: &BindLog = typed(params)?;
                self.refuse_log.map_or(Ok(()), Err)?;
                let buffer = self.buffers.get_mut(&(call.client, p.buffer)).ok_or(error::INVALID_OBJECT_HANDLE)?;
                if p.record_size != 24 || p.all_users != 1 {
                    return Err(error::INVALID_ARGUMENT);
                }
                buffer.bound = Some(gpu);
                Ok(())
            }
            (CMD_ENABLE_EVENTS | CMD_UPDATE_GET | CMD_FLUSH, CLASS_EVENT_BUFFER) => self.event_buffer(call, params),
            _ => Err(error::INVALID_COMMAND),
        }
    }

    /// What a GPU has recorded goes to its logs.
    fn drain(&mut self, gpu: usize, asked: bool) {
        for c in self.gpus[gpu].changes() {
            self.pending[gpu].note(log::Change { pid: c.pid + self.apart, ..c });
            if self.lose > 0 {
                self.lose -= 1;
                self.pending[gpu].lose();
            }
        }
        let its = self.buffers.values_mut().filter(|b| b.bound.is_none_or(|on| on == gpu));
        self.pending[gpu].drain(self.gpus[gpu].now_us(), asked, its);
    }

    /// RM's part of a mapping: the file, and what lives as long as the processor's part. The status is in `call`.
    fn mapping(
        &mut self,
        id: &Arc<FileId>,
        call: &mut MapMemory,
    ) -> Option<(Arc<OwnedFd>, Box<dyn Any + Send + Sync>)> {
        let file = self.client(id, call.client).and_then(|c| {
            c.objects.get(&call.memory).and_then(|o| o.memory.clone()).ok_or(error::INVALID_OBJECT_HANDLE)
        });
        let fits = |f: &Arc<OwnedFd>| {
            let size = rustix::fs::fstat(f).map_or(0, |s| s.st_size as u64);
            call.length > 0 && call.offset.checked_add(call.length).is_some_and(|end| end <= size)
        };
        let file = file.and_then(|f| if fits(&f) { Ok(f) } else { Err(error::INVALID_ARGUMENT) });
        call.status = status(file.as_ref().map(drop).map_err(|e| *e));
        let file = file.ok()?;
        let alive = Arc::new(());
        call.linear = self.next_mapping;
        self.next_mapping += 1 << 21;
        let mapping =
            Mapping { client: call.client, memory: call.memory, window: Arc::downgrade(&alive), file: file.clone() };
        self.mappings.insert(call.linear, mapping);
        Some((file, Box::new(alive)))
    }

    /// Commands of an event buffer.
    fn event_buffer(&mut self, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        let name = (call.client, call.object);
        if call.cmd == CMD_FLUSH
            && let Some(bound) = self.buffers.get(&name).map(|b| b.bound)
        {
            if bound.is_some_and(|gpu| self.gpus[gpu].lost) {
                return Err(error::GPU_IS_LOST);
            }
            bound.into_iter().for_each(|gpu| self.drain(gpu, true));
            return Ok(());
        }
        let buffer = self.buffers.get_mut(&name).ok_or(error::INVALID_OBJECT_HANDLE)?;
        if call.cmd == CMD_ENABLE_EVENTS {
            buffer.enabled = typed::<EnableEvents>(params)?.enable != 0;
            return Ok(());
        }
        if buffer.read_up_to(typed::<UpdateGet>(params)?.records) { Ok(()) } else { Err(error::INVALID_ARGUMENT) }
    }

    /// Not bound to a file: the lists may name anybody's channels, but only of the subdevice's GPU.
    fn disable(&mut self, gpu: usize, p: &DisableChannels) -> Result<(), u32> {
        let n = p.count as usize;
        if n > MAX_CHANNELS {
            return Err(error::INVALID_ARGUMENT);
        }
        let mut groups = Vec::new();
        for (client, channel) in p.clients.iter().zip(&p.channels).take(n) {
            let object = self.clients.get(client).and_then(|c| c.objects.get(channel));
            let object = object.filter(|o| is_channel(o.class) && o.gpu == gpu).ok_or(error::INVALID_OBJECT_HANDLE)?;
            groups.push((*client, *channel, object.group));
        }
        for (client, channel, group) in groups {
            if let Some(g) = group {
                self.gpus[gpu].enable(g, (client, channel), p.disable == 0);
            }
        }
        Ok(())
    }
}

/// Parameters of the right size, or the driver's complaint.
fn typed<P: bytemuck::Pod>(params: &mut [u8]) -> Result<&mut P, u32> {
    bytemuck::try_from_bytes_mut(params).map_err(|_| error::INVALID_ARGUMENT)
}

/// As [`typed`], of bytes that lie anywhere.
fn read<P: bytemuck::Pod>(params: &[u8]) -> Result<P, u32> {
    bytemuck::try_pod_read_unaligned(params).map_err(|_| error::INVALID_ARGUMENT)
}

struct FakeFile {
    rm: FakeRm,
    id: Arc<FileId>,
    /// Whose the groups are that are made on it.
    pid: u32,
}

fn status(r: Result<(), u32>) -> u32 {
    r.err().unwrap_or(error::OK)
}

impl ControlFile for FakeFile {
    fn control(&self, call: &mut Control, params: &mut [u8]) -> io::Result<()> {
        // The kernel copies parameters in and out; unaligned ones are as good as any.
        let mut words = vec![0u64; params.len().div_ceil(8)];
        let copy = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..params.len()];
        copy.copy_from_slice(params);
        call.status = status(self.rm.lock().timed_control(&self.id, call, copy));
        params.copy_from_slice(copy);
        Ok(())
    }

    fn alloc(&self, call: &mut Alloc, params: &mut [u8]) -> io::Result<()> {
        let mut s = self.rm.lock();
        if call.class == CLASS_CLIENT {
            call.new = s.new_client(&self.id);
            call.status = error::OK;
            return Ok(());
        }
        let (class, parent, new, root) = (call.class, call.parent, call.new, call.root);
        let (mut buffer, mut group, mut made_on) = (None, None, 0);
        let lost: Vec<bool> = s.gpus.iter().map(|g| g.lost).collect();
        call.status = status(s.client(&self.id, root).and_then(|c| {
            let mut memory = None;
            let of_device = c.objects.get(&parent).is_some_and(|o| o.class == CLASS_DEVICE);
            let mut gpu = c.objects.get(&parent).map_or(0, |o| o.gpu);
            let fits = match class {
                CLASS_DEVICE => {
                    gpu = read::<DeviceAlloc>(params)?.device as usize;
                    parent == root && gpu < lost.len()
                }
                CLASS_SUBDEVICE | CLASS_GROUP => of_device,
                _ if is_channel(class) => {
                    group = c.objects.get(&parent).filter(|o| o.class == CLASS_GROUP).and_then(|o| o.group);
                    group.is_some()
                }
                CLASS_SYSTEM_MEMORY => {
                    let p: MemoryAlloc = read(params)?;
                    memory = log::system_memory(p.size).ok().map(Arc::new);
                    of_device && p.size > 0 && memory.is_some()
                }
                CLASS_EVENT_BUFFER => {
                    let p: EventBufferAlloc = read(params)?;
                    let memory = |h| c.objects.get(&h).and_then(|o: &Object| o.memory.clone());
                    let on = c.objects.get(&p.subdevice).is_some_and(|o| o.class == CLASS_SUBDEVICE);
                    let both = memory(p.header_memory).zip(memory(p.record_memory));
                    // A number that is no event of this client the driver would take for an address in the kernel.
                    let harmless = p.notification == 0;
                    buffer = both.and_then(|(h, r)| log::EventBuffer::new(&p, h, r));
                    harmless && parent == root && on && buffer.is_some()
                }
                _ => false,
            };
            if !fits || c.objects.contains_key(&new) {
                return Err(error::INVALID_ARGUMENT);
            }
            if class != CLASS_EVENT_BUFFER && lost[gpu] {
                return Err(error::GPU_IS_LOST);
            }
            c.objects.insert(new, Object { class, parent, gpu, group, memory });
            made_on = gpu;
            Ok(())
        }));
        if call.status == error::OK && class == CLASS_GROUP {
            let number = s.gpus[made_on].add(self.pid, Load::IDLE);
            let made = s.clients.get_mut(&root).and_then(|c| c.objects.get_mut(&new));
            made.into_iter().for_each(|o| o.group = Some(number));
        }
        if let Some(g) = group.filter(|_| call.status == error::OK) {
            s.gpus[made_on].add_channel(g);
        }
        if let Some(b) = buffer.filter(|_| call.status == error::OK) {
            s.buffers.insert((root, new), b);
        }
        Ok(())
    }

    fn free(&self, call: &mut Free) -> io::Result<()> {
        let mut s = self.rm.lock();
        let (root, old) = (call.root, call.old);
        let mut gone = Vec::new();
        call.status = status(s.client(&self.id, root).map(|c| {
            // With an object what hangs from it goes, as in a channel group that of its channels.
            let mut next = vec![old];
            while let Some(handle) = next.pop() {
                next.extend(c.objects.iter().filter(|(_, o)| o.parent == handle).map(|(h, _)| *h));
                gone.extend(c.objects.remove(&handle).filter(|o| o.class == CLASS_GROUP));
            }
        }));
        gone.iter().for_each(|o| o.group.into_iter().for_each(|g| s.gpus[o.gpu].remove(g)));
        let orphans = s.mappings.values().filter(|m| m.client == root && (m.memory == old || root == old)).count();
        s.wrong_order += orphans;
        if call.status == error::OK {
            s.buffers.retain(|(client, buffer), _| *client != root || (*buffer != old && old != root));
        }
        if call.status == error::OK && root == old {
            s.clients.remove(&root);
        }
        Ok(())
    }

    fn map_system(&self, call: &mut MapMemory) -> io::Result<Option<Window>> {
        if call.flags & MAP_READ_ONLY == 0 {
            call.status = error::INVALID_ARGUMENT;
            return Ok(None);
        }
        let Some((file, with)) = self.rm.lock().mapping(&self.id, call) else { return Ok(None) };
        Window::map_read_only(file.as_fd(), call.length as usize, Some(with)).map(Some)
    }

    fn map(&self, gpu: u32, call: &mut MapMemory) -> io::Result<Option<Window>> {
        let mut s = self.rm.lock();
        if let Some(refused) = s.refuse_mapping.filter(|_| gpu == 0) {
            call.status = refused;
            return Ok(None);
        }
        if s.gpus.get(gpu as usize).is_some_and(|g| g.lost) {
            call.status = error::GPU_IS_LOST;
            return Ok(None);
        }
        let Some((file, with)) = s.mapping(&self.id, call) else { return Ok(None) };
        Window::map(file.as_fd(), call.offset, call.length as usize, Some(with)).map(Some)
    }

    fn unmap(&self, call: &mut UnmapMemory) -> io::Result<()> {
        let mut s = self.rm.lock();
        let ours = s.client(&self.id, call.client).map(drop);
        let there = s.mappings.get(&call.linear).is_some_and(|m| (m.client, m.memory) == (call.client, call.memory));
        call.status = status(ours.and(if there { Ok(()) } else { Err(error::INVALID_ARGUMENT) }));
        if call.status == error::OK
            && let Some(m) = s.mappings.remove(&call.linear)
        {
            s.wrong_order += usize::from(m.window.strong_count() > 0);
        }
        Ok(())
    }

    fn cards(&self) -> io::Result<Vec<Card>> {
        Ok(self.rm.lock().cards())
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
        Ok(self.lock().processes.keys().copied().collect())
    }

    fn files_of(&self, pid: u32) -> Result<Vec<Box<dyn ControlFile>>> {
        let s = self.lock();
        let files = s.processes.get(&pid);
        let files = files.ok_or_else(|| Error::Process { pid, why: io::ErrorKind::NotFound.into() })?;
        let file =
            |id: &Arc<FileId>| Box::new(FakeFile { rm: self.clone(), id: id.clone(), pid }) as Box<dyn ControlFile>;
        Ok(files.iter().map(file).collect())
    }
}
