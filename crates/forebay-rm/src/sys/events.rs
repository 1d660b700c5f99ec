//! The ABI of the context-switch log: an event buffer over memory of the system (`cl90cd.h`, `cl90cdfecs.h`, `ctrl90cd.h`,
//! `ctrl2080gr.h`, `ctrl2080tmr.h`, `nvos.h`; the same in every tag of the series).

use bytemuck::{Pod, Zeroable};

use super::RawHandle;

/// Class of memory of the system.
pub const CLASS_SYSTEM_MEMORY: u32 = 0x3E;
/// Class of an event buffer.
pub const CLASS_EVENT_BUFFER: u32 = 0x90CD;

/// Switches an event buffer on or off, [`EnableEvents`].
pub const CMD_ENABLE_EVENTS: u32 = 0x90CD_0101;
/// Says how far the records have been read, and sets the count of dropped ones to zero, [`UpdateGet`].
pub const CMD_UPDATE_GET: u32 = 0x90CD_0102;
/// Makes what the GPU has recorded visible at once.
pub const CMD_FLUSH: u32 = 0x90CD_0104;
/// Sends context switches to an event buffer, [`BindLog`].
pub const CMD_BIND_LOG: u32 = 0x2080_1238;
/// The GPU's clock, [`GpuTime`].
pub const CMD_GPU_TIME: u32 = 0x2080_0403;

/// [`EnableEvents::flags`]: when the buffer is full, what comes is dropped.
pub const KEEP_OLDEST: u32 = 1;
/// [`BindLog::detail`]: begins and ends only.
pub const SIMPLE: u32 = 1;
/// [`MapMemory::flags`](super::MapMemory::flags): for reading only.
pub const MAP_READ_ONLY: u32 = 1;

/// [`MemoryAlloc::attributes`]: pages of 4 KiB, in memory of the system, scattered, written back.
pub const PAGES_CACHED: u32 = 1 << 23 | 1 << 25 | 1 << 27 | 5 << 29;
/// [`MemoryAlloc::attributes2`]: user space reads it only; the GPU does not cache it.
pub const READ_ONLY_UNCACHED: u32 = 1 << 22 | 2 << 2;

/// A context is on the GPU from here on.
pub const TAG_START: u8 = 6;
/// A context has been saved.
pub const TAG_END: u8 = 7;
/// The same with full detail.
pub const TAG_CONTEXT_START: u8 = 5;
/// The same with full detail.
pub const TAG_SAVE_END: u8 = 3;
/// The engine was reset.
pub const TAG_RESET: u8 = 0xFE;

/// `NV_MEMORY_ALLOCATION_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemoryAlloc {
    /// Anything but 0.
    pub owner: u32,
    /// 0: image.
    pub kind: u32,
    /// 0.
    pub flags: u32,
    /// 0.
    pub width: u32,
    /// 0.
    pub height: u32,
    /// 0.
    pub pitch: i32,
    /// [`PAGES_CACHED`].
    pub attributes: u32,
    /// [`READ_ONLY_UNCACHED`].
    pub attributes2: u32,
    /// 0.
    pub format: u32,
    /// 0.
    pub compression: u32,
    /// 0.
    pub zcull: u32,
    /// Padding.
    pub pad0: u32,
    /// 0.
    pub range_low: u64,
    /// 0.
    pub range_high: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes.
    pub alignment: u64,
    /// Result.
    pub offset: u64,
    /// Result.
    pub limit: u64,
    /// Result.
    pub address: u64,
    /// 0.
    pub tags: u32,
    /// 0.
    pub va_space: RawHandle,
    /// 0.
    pub internal: u32,
    /// 0.
    pub tag: u32,
    /// 0.
    pub numa: i32,
    /// Padding.
    pub pad1: u32,
}

/// `NV_EVENT_BUFFER_ALLOC_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct EventBufferAlloc {
    /// 0: kernel clients only.
    pub header: u64,
    /// 0: kernel clients only.
    pub records: u64,
    /// Size of a [`Record`].
    pub record_size: u32,
    /// How many fit.
    pub record_count: u32,
    /// 0.
    pub vardata: u64,
    /// 0.
    pub vardata_size: u32,
    /// 0.
    pub records_threshold: u32,
    /// 0. The driver takes any other number for a live event of this client, and trusts it.
    pub notification: u64,
    /// 0.
    pub vardata_threshold: u32,
    /// The GPU.
    pub subdevice: RawHandle,
    /// 0.
    pub flags: u32,
    /// Memory of the [`Header`].
    pub header_memory: RawHandle,
    /// Memory of the records.
    pub record_memory: RawHandle,
    /// 0.
    pub vardata_memory: RawHandle,
}

/// `NV_EVENT_BUFFER_HEADER`, which the driver writes and we read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Header {
    /// First record that was not read.
    pub get: u32,
    /// Where the next one goes.
    pub put: u32,
    /// Records so far.
    pub count: u64,
    /// Records for which there was no room, since they were asked for last.
    pub dropped: u64,
    /// The same of data that we have none of.
    pub vardata_dropped: u64,
}

/// `NV_EVENT_BUFFER_RECORD` with `NV_EVENT_BUFFER_FECS_RECORD_V2` in it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Record {
    /// Kind of event.
    pub kind: u16,
    /// Its variant.
    pub subkind: u16,
    /// 0.
    pub vardata: u32,
    /// [`TAG_START`], [`TAG_END`] and others.
    pub tag: u8,
    /// Virtual machine.
    pub vm: u8,
    /// Counts records.
    pub sequence: u16,
    /// The channel group's context.
    pub context: u32,
    /// The process, as the host numbers it; all ones for the kernel, 0 for one that may not be shown.
    pub pid: u32,
    /// 0.
    pub reserved: u16,
    /// GPU instance.
    pub gpu_instance: u8,
    /// Compute instance.
    pub compute_instance: u8,
    /// When, on the GPU's clock, ns.
    pub at_ns: u64,
}

/// `NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct BindLog {
    /// The event buffer.
    pub buffer: RawHandle,
    /// Size of the payload of a record: 24.
    pub record_size: u32,
    /// [`SIMPLE`].
    pub detail: u32,
    /// 0.
    pub filter: u32,
    /// 1: of everybody, for root.
    pub all_users: u8,
    /// Padding.
    pub pad: [u8; 3],
    /// Result: why not.
    pub reason: u32,
}

/// `NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct EnableEvents {
    /// 1 or 0.
    pub enable: u8,
    /// Padding.
    pub pad: [u8; 3],
    /// [`KEEP_OLDEST`].
    pub flags: u32,
}

/// `NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct UpdateGet {
    /// First record that was not read.
    pub records: u32,
    /// 0.
    pub vardata: u32,
}

/// `NV2080_CTRL_TIMER_GET_TIME_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GpuTime {
    /// ns.
    pub ns: u64,
}
