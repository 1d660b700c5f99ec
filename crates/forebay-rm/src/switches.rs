//! The GPU's own log of context switches: who was on it from when to when, of all processes, to tens of microseconds.
//!
//! Rules:
//! 1. The driver writes records into memory of the system, which is mapped here for reading. What has been read is said
//!    back, so that there is room; when there is none, what comes is dropped and counted.
//! 2. The GPU's records become visible about 30 times a second, or at once after [`SwitchLog::flush`], which takes
//!    0.2 ms of the caller.
//! 3. Compute and graphics only, no copy engines. Whoever was on the GPU when the log began shows at its first end.
//! 4. Binding switches the GPU's recording on, and freeing the buffer switches it off again; so does the end of the
//!    process. No notification is asked for: the driver would trust whatever number it is given.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::client::Client;
use crate::error::{Error, INSUFFICIENT_PERMISSIONS, Result, check};
use crate::rm::{Window, alloc};
use crate::sys::{
    BindLog, CLASS_EVENT_BUFFER, CLASS_SYSTEM_MEMORY, CMD_BIND_LOG, CMD_ENABLE_EVENTS, CMD_FLUSH, CMD_UPDATE_GET,
    EnableEvents, EventBufferAlloc, Free, Header, KEEP_OLDEST, MAP_READ_ONLY, MapMemory, MemoryAlloc, PAGES_CACHED,
    READ_ONLY_UNCACHED, RawHandle, Record, SIMPLE, UnmapMemory, UpdateGet,
};

/// Records that the buffer holds: seconds, at the usual few hundred switches a second.
pub const RECORDS: u32 = 16_384;
/// Size of the header's memory: a page.
const HEADER_BYTES: u64 = 4096;
/// Size of a record's payload.
const PAYLOAD_BYTES: u32 = 24;

/// Memory of the system that the driver writes and this process reads. Dropping it unmaps and frees it, in that order.
struct SystemMemory {
    client: Arc<Client>,
    memory: RawHandle,
    linear: Option<u64>,
    window: Option<Window>,
}

impl SystemMemory {
    fn new(client: &Arc<Client>, size: u64) -> Result<Self> {
        let root = client.handle();
        let mut params = MemoryAlloc {
            owner: 0x4642_4159,
            attributes: PAGES_CACHED,
            attributes2: READ_ONLY_UNCACHED,
            size,
            alignment: 4096,
            ..MemoryAlloc::default()
        };
        let wanted = [root, client.device(), client.next_object()];
        let memory = alloc(client.file(), "allocate memory", wanted, CLASS_SYSTEM_MEMORY, &mut params)?;
        let mut made = SystemMemory { client: client.clone(), memory, linear: None, window: None };
        let mut call = MapMemory {
            client: root,
            device: client.device(),
            memory,
            length: size,
            flags: MAP_READ_ONLY,
            ..MapMemory::default()
        };
        let failed = |why| Error::Call { call: "map memory", why };
        let window = client.file().map_system(&mut call).map_err(failed)?;
        check("map memory", call.status)?;
        made.linear = Some(call.linear);
        made.window = window.filter(|w| w.len() as u64 >= size);
        if made.window.is_none() {
            return Err(failed(std::io::ErrorKind::InvalidData.into()));
        }
        Ok(made)
    }

    fn at<T>(&self, index: usize) -> Option<*const T> {
        let w = self.window.as_ref()?;
        let end = index.checked_add(1)?.checked_mul(size_of::<T>())?;
        // SAFETY: inside the window, says the line above.
        (end <= w.len()).then(|| unsafe { w.ptr().as_ptr().cast_const().cast::<T>().add(index) })
    }
}

impl Drop for SystemMemory {
    fn drop(&mut self) {
        // As for an aperture: the processor's mapping, RM's mapping, the memory.
        self.window = None;
        if !self.client.is_ours() {
            return;
        }
        let (client, device, memory) = (self.client.handle(), self.client.device(), self.memory);
        if let Some(linear) = self.linear {
            let mut call = UnmapMemory { client, device, memory, linear, ..UnmapMemory::default() };
            let _ = self.client.file().unmap(&mut call);
        }
        let _ = self.client.file().free(&mut Free { root: client, parent: device, old: memory, status: 0 });
    }
}

/// The log, switched on. Dropping it switches it off.
pub struct SwitchLog {
    client: Arc<Client>,
    buffer: RawHandle,
    header: SystemMemory,
    records: SystemMemory,
    /// First record that was not read.
    get: u32,
}

impl SwitchLog {
    /// Switches the log on for the processes of all users, which takes root.
    ///
    /// # Errors
    /// What the driver refused: without root, in confidential computing, or where the log is switched off.
    pub fn open(client: &Arc<Client>) -> Result<Self> {
        if !client.rm().may_log() {
            return Err(Error::Status { call: "bind the switch log", status: INSUFFICIENT_PERMISSIONS });
        }
        let header = SystemMemory::new(client, HEADER_BYTES)?;
        let records = SystemMemory::new(client, u64::from(RECORDS) * size_of::<Record>() as u64)?;
        let root = client.handle();
        let mut params = EventBufferAlloc {
            record_size: size_of::<Record>() as u32,
            record_count: RECORDS,
            subdevice: client.subdevice(),
            header_memory: header.memory,
            record_memory: records.memory,
            ..EventBufferAlloc::default()
        };
        let wanted = [root, root, client.next_object()];
        let buffer = alloc(client.file(), "allocate event buffer", wanted, CLASS_EVENT_BUFFER, &mut params)?;
        // From here on dropping it frees the buffer, before the memory.
        let mut log = SwitchLog { client: client.clone(), buffer, header, records, get: 0 };
        log.get = log.put()?;
        let mut enable = EnableEvents { enable: 1, flags: KEEP_OLDEST, ..EnableEvents::default() };
        log.control("enable events", buffer, CMD_ENABLE_EVENTS, &mut enable)?;
        let mut bind =
            BindLog { buffer, record_size: PAYLOAD_BYTES, detail: SIMPLE, all_users: 1, ..BindLog::default() };
        log.control("bind the switch log", client.subdevice(), CMD_BIND_LOG, &mut bind)?;
        Ok(log)
    }

    fn control<P: bytemuck::Pod>(&self, name: &'static str, object: RawHandle, cmd: u32, p: &mut P) -> Result<()> {
        self.client.control(name, object, cmd, p)
    }

    /// Where the driver puts the next record; it is not believed beyond the buffer's end.
    fn put(&self) -> Result<u32> {
        let nothing = Error::Call { call: "read the switch log", why: std::io::ErrorKind::InvalidData.into() };
        let Some(header) = self.header.at::<Header>(0) else { return Err(nothing) };
        // SAFETY: inside the window and aligned; the driver writes it while we read, hence the atomic. The memory is mapped
        // for reading only, where no more than relaxed loads are allowed.
        let put = unsafe { AtomicU32::from_ptr((&raw const (*header).put).cast_mut()) }.load(Ordering::Relaxed);
        // Records up to there are read after it.
        fence(Ordering::Acquire);
        if put < RECORDS { Ok(put) } else { Err(nothing) }
    }

    /// Takes what has become visible since the last call, in order; how many records were dropped for want of room since.
    ///
    /// # Errors
    /// What the driver refused. The records that were read are in `out` all the same.
    pub fn read(&mut self, out: &mut Vec<Record>) -> Result<u64> {
        let put = self.put()?;
        let dropped = self.header.at::<Header>(0).map_or(0, |h| {
            // SAFETY: as in `put`.
            unsafe { AtomicU64::from_ptr((&raw const (*h).dropped).cast_mut()) }.load(Ordering::Relaxed)
        });
        let before = self.get;
        while self.get != put {
            if let Some(r) = self.records.at::<Record>(self.get as usize) {
                // SAFETY: inside the window and aligned. The driver does not write it again before it is told below
                // that it has been read.
                out.push(unsafe { r.read_volatile() });
            }
            self.get = (self.get + 1) % RECORDS;
        }
        if self.get != before || dropped > 0 {
            self.say_read()?;
        }
        Ok(dropped)
    }

    /// Says up to where records have been read. A buffer that the driver has no more is an error, where reading finds nothing new.
    ///
    /// # Errors
    /// What the driver refused.
    pub fn say_read(&self) -> Result<()> {
        let mut p = UpdateGet { records: self.get, vardata: 0 };
        self.control("update get", self.buffer, CMD_UPDATE_GET, &mut p)
    }

    /// Makes everything that the GPU has recorded visible to the next [`SwitchLog::read`].
    ///
    /// # Errors
    /// What the driver refused; records then come by themselves, 30 times a second.
    pub fn flush(&self) -> Result<()> {
        self.control("flush the switch log", self.buffer, CMD_FLUSH, &mut [0u8; 0])
    }

    /// The clock of the records, ns.
    ///
    /// # Errors
    /// What the driver refused.
    pub fn now_ns(&self) -> Result<u64> {
        self.client.now_ns()
    }
}

impl Drop for SwitchLog {
    fn drop(&mut self) {
        if !self.client.is_ours() {
            return;
        }
        let root = self.client.handle();
        let mut off = EnableEvents { enable: 0, flags: KEEP_OLDEST, ..EnableEvents::default() };
        let _ = self.control("disable events", self.buffer, CMD_ENABLE_EVENTS, &mut off);
        let _ = self.client.file().free(&mut Free { root, parent: root, old: self.buffer, status: 0 });
    }
}
