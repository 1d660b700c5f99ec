//! The driver's ABI, as far as it is used: restated from NVIDIA's open kernel modules, tag 580.142 (`nvos.h`,
//! `nv_escape.h`, `ctrl0000client.h`, `ctrl0000gpu.h`, `ctrl0000unix.h`, `ctrl2080fifo.h`, `ctrl2080gpu.h`, `ctrla06cgpfifo.h`, `cl0080.h`,
//! `cl2080.h`).
//!
//! **Other series.** Every size and offset that is asserted below, and every number, was computed from the headers of 555.58.02,
//! too, with a C compiler, and compared with those that others have extracted from 570 and 610 (all but the event buffer's,
//! which are not in there): nothing differs. The code behind the calls was read in 555.58.02: who may call them, the check of
//! files, first handles, and how the log is bound are the same. So 555, 570 and 580 are spoken to ([`SERIES`]): of 570 what could
//! not be compared is the same before and after it. Of 610 nothing says so, and those in between (560, 565, 575) were not looked
//! at. In 535.261.03 the layouts are the same but for [`MemoryAlloc`], which ends before `numa`, and the log takes no
//! [`CLASS_SYSTEM_MEMORY`] of a user's client: it looks for it in a client of the kernel's, where only memory of a virtual GPU is
//! put. Without the log no GPU is divided.
//!
//! All integers are little-endian and naturally aligned; padding is spelled out, so that every struct is plain bytes.

mod events;

use bytemuck::{Pod, Zeroable};

pub use events::*;

/// Driver series whose layouts these are.
pub const SERIES: [u32; 3] = [555, 570, 580];

/// A handle of a client or an object.
pub type RawHandle = u32;

/// The ioctl magic.
pub const MAGIC: u8 = b'F';
/// Escape numbers.
pub const ESC_FREE: u8 = 0x29;
/// Control call.
pub const ESC_CONTROL: u8 = 0x2A;
/// Allocation of an object.
pub const ESC_ALLOC: u8 = 0x2B;
/// Mapping of memory into the caller.
pub const ESC_MAP_MEMORY: u8 = 0x4E;
/// Its end.
pub const ESC_UNMAP_MEMORY: u8 = 0x4F;
/// Ties a GPU's file to a control file.
pub const ESC_REGISTER_FD: u8 = 201;
/// Which cards there are.
pub const ESC_CARD_INFO: u8 = 200;

/// Class of a client.
pub const CLASS_CLIENT: u32 = 0x41;
/// Class of a device.
pub const CLASS_DEVICE: u32 = 0x80;
/// Class of a subdevice.
pub const CLASS_SUBDEVICE: u32 = 0x2080;
/// Class of memory of a GPU.
pub const CLASS_MEMORY: u32 = 0x40;
/// Class of a channel group.
pub const CLASS_GROUP: u32 = 0xA06C;

/// Whether a class is a channel's: 0xA06F (Kepler) to 0xCA6F (Blackwell), whose numbers all end so.
pub const fn is_channel(class: u32) -> bool {
    class & 0xFF == 0x6F && class >= 0xA06F && class <= 0xFFFF
}

/// First client handle that RM gives out.
pub const FIRST_CLIENT: RawHandle = 0xC1D0_0000;
/// First object handle that CUDA's user space gives out.
pub const FIRST_OBJECT: RawHandle = 0x5C00_0000;

/// Class or parent of a handle (read-only), [`HandleInfo`].
pub const CMD_HANDLE_INFO: u32 = 0x0D02;
/// Instance numbers of a GPU, [`IdInfo`].
pub const CMD_ID_INFO: u32 = 0x0205;
/// Sets a group's time slice, [`Timeslice`].
pub const CMD_SET_TIMESLICE: u32 = 0xA06C_0103;
/// Reads it, [`Timeslice`].
pub const CMD_GET_TIMESLICE: u32 = 0xA06C_0104;
/// Makes an object of another client, exported as a file descriptor, one of ours, [`ImportObject`].
pub const CMD_IMPORT_OBJECT: u32 = 0x3D06;
/// Which GPU a subdevice is of (read-only), [`GpuId`].
pub const CMD_GPU_ID: u32 = 0x2080_0142;
/// Takes channels off the GPU or lets them back on, [`DisableChannels`].
pub const CMD_DISABLE_CHANNELS: u32 = 0x2080_110B;

/// [`HandleInfo::index`]: the parent's handle is wanted.
pub const INFO_PARENT: u32 = 1;
/// [`HandleInfo::index`]: the class is wanted.
pub const INFO_CLASS: u32 = 2;

/// [`ImportObject::kind`]: an object of RM.
pub const IMPORT_RM_OBJECT: u32 = 1;

/// Channels of one [`DisableChannels`] call.
pub const MAX_CHANNELS: usize = 64;
/// Cards of one `ESC_CARD_INFO` call.
pub const MAX_CARDS: usize = 32;

/// `NVOS21_PARAMETERS`: allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Alloc {
    /// The client.
    pub root: RawHandle,
    /// Where the object goes.
    pub parent: RawHandle,
    /// Its handle; 0 in a client's allocation, which RM fills in.
    pub new: RawHandle,
    /// Its class.
    pub class: u32,
    /// Address of the class's own parameters.
    pub params: u64,
    /// Their size.
    pub params_size: u32,
    /// Result.
    pub status: u32,
}

/// `NVOS00_PARAMETERS`: release.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Free {
    /// The client.
    pub root: RawHandle,
    /// The object's parent.
    pub parent: RawHandle,
    /// The object.
    pub old: RawHandle,
    /// Result.
    pub status: u32,
}

/// `NVOS54_PARAMETERS`: control call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Control {
    /// The client.
    pub client: RawHandle,
    /// The object.
    pub object: RawHandle,
    /// What to do.
    pub cmd: u32,
    /// 0.
    pub flags: u32,
    /// Address of the command's parameters.
    pub params: u64,
    /// Their size.
    pub params_size: u32,
    /// Result.
    pub status: u32,
}

/// `NVOS33_PARAMETERS` with a file: mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MapMemory {
    /// The client.
    pub client: RawHandle,
    /// Its device.
    pub device: RawHandle,
    /// The memory object.
    pub memory: RawHandle,
    /// Padding.
    pub pad: u32,
    /// First byte of it.
    pub offset: u64,
    /// How many.
    pub length: u64,
    /// RM's name of the mapping, which its end asks for.
    pub linear: u64,
    /// Result.
    pub status: u32,
    /// 0.
    pub flags: u32,
    /// A file of the GPU that nothing else is mapped by.
    pub fd: i32,
    /// Padding.
    pub pad2: u32,
}

/// `NVOS34_PARAMETERS`: end of a mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct UnmapMemory {
    /// The client.
    pub client: RawHandle,
    /// Its device.
    pub device: RawHandle,
    /// The memory object.
    pub memory: RawHandle,
    /// Padding.
    pub pad: u32,
    /// RM's name of the mapping.
    pub linear: u64,
    /// Result.
    pub status: u32,
    /// 0.
    pub flags: u32,
}

/// `NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ImportObject {
    /// What the owner exported.
    pub fd: i32,
    /// [`IMPORT_RM_OBJECT`].
    pub kind: u32,
    /// The device that it is memory of.
    pub device: RawHandle,
    /// Where the object goes.
    pub parent: RawHandle,
    /// Its handle.
    pub object: RawHandle,
}

/// `NV0080_ALLOC_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct DeviceAlloc {
    /// Device instance of the GPU.
    pub device: u32,
    /// Client whose address space is shared.
    pub client_share: RawHandle,
    /// 0.
    pub target_client: RawHandle,
    /// 0.
    pub target_device: RawHandle,
    /// 0.
    pub flags: u32,
    /// Padding.
    pub pad0: u32,
    /// 0: default.
    pub va_size: u64,
    /// 0.
    pub va_start: u64,
    /// 0.
    pub va_limit: u64,
    /// 0.
    pub va_mode: u32,
    /// Padding.
    pub pad1: u32,
}

/// `NV2080_ALLOC_PARAMETERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SubdeviceAlloc {
    /// Subdevice instance; 0.
    pub subdevice: u32,
}

/// `NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HandleInfo {
    /// The handle asked about.
    pub object: RawHandle,
    /// [`INFO_PARENT`] or [`INFO_CLASS`].
    pub index: u32,
    /// The answer, in the low 32 bits.
    pub answer: u64,
}

/// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct IdInfo {
    /// The GPU, as in [`Card::gpu`].
    pub gpu: u32,
    /// Flags.
    pub flags: u32,
    /// For [`DeviceAlloc::device`].
    pub device: u32,
    /// Subdevice instance.
    pub subdevice: u32,
    /// SLI status.
    pub sli: u32,
    /// Board.
    pub board: u32,
    /// GPU instance.
    pub instance: u32,
    /// NUMA node or -1.
    pub numa: i32,
}

/// `NV2080_CTRL_GPU_GET_ID_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GpuId {
    /// As in [`Card::gpu`].
    pub gpu: u32,
}

/// Parameters of both time-slice commands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Timeslice {
    /// µs.
    pub us: u64,
}

/// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DisableChannels {
    /// 1: off; 0: on again.
    pub disable: u8,
    /// Padding.
    pub pad0: [u8; 3],
    /// Entries used of the lists below.
    pub count: u32,
    /// 0: also take a running channel off.
    pub only_scheduling: u8,
    /// 0.
    pub rewind: u8,
    /// Padding.
    pub pad1: [u8; 6],
    /// 0.
    pub event: u64,
    /// Client of each channel.
    pub clients: [RawHandle; MAX_CHANNELS],
    /// Handle of each channel.
    pub channels: [RawHandle; MAX_CHANNELS],
}

/// `nv_ioctl_card_info_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Card {
    /// Whether the entry is used.
    pub valid: u8,
    /// Padding.
    pub pad0: [u8; 3],
    /// PCI domain.
    pub domain: u32,
    /// PCI bus.
    pub bus: u8,
    /// PCI slot.
    pub slot: u8,
    /// PCI function.
    pub function: u8,
    /// Padding.
    pub pad1: u8,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// RM's id of the GPU.
    pub gpu: u32,
    /// Interrupt.
    pub irq: u16,
    /// Padding.
    pub pad2: [u8; 2],
    /// Register aperture.
    pub registers: u64,
    /// Its size.
    pub registers_size: u64,
    /// Memory aperture (BAR1).
    pub aperture: u64,
    /// Its size.
    pub aperture_size: u64,
    /// Number of `/dev/nvidiaN`.
    pub minor: u32,
    /// Name.
    pub name: [u8; 10],
    /// Padding.
    pub pad3: [u8; 2],
}

impl Card {
    /// Whether it is at this place on the PCI bus.
    pub fn is_at(&self, domain: u32, bus: u32, slot: u32) -> bool {
        (self.domain, u32::from(self.bus), u32::from(self.slot)) == (domain, bus, slot)
    }
}

macro_rules! layout {
    ($($t:ty, $size:literal $(, $field:ident at $at:literal)*;)*) => {
        $(const _: () = assert!(size_of::<$t>() == $size $(&& std::mem::offset_of!($t, $field) == $at)*);)*
    };
}
layout! {
    Alloc, 32, params at 16, status at 28;
    Free, 16, status at 12;
    Control, 32, params at 16, status at 28;
    MapMemory, 56, offset at 16, linear at 32, flags at 44, fd at 48;
    UnmapMemory, 32, linear at 16, status at 24;
    ImportObject, 20, object at 16;
    DeviceAlloc, 56, va_size at 24, va_mode at 48;
    SubdeviceAlloc, 4;
    HandleInfo, 16, answer at 8;
    IdInfo, 32, device at 8;
    GpuId, 4;
    Timeslice, 8;
    DisableChannels, 536, count at 4, only_scheduling at 8, event at 16, clients at 24, channels at 280;
    Card, 72, domain at 4, gpu at 16, registers at 24, minor at 56;
    MemoryAlloc, 128, attributes at 24, range_low at 48, size at 64, address at 96, numa at 120;
    EventBufferAlloc, 72, record_size at 16, notification at 40, subdevice at 52, header_memory at 60;
    Header, 32, put at 4, count at 8, dropped at 16;
    Record, 32, tag at 8, sequence at 10, context at 12, pid at 16, at_ns at 24;
    BindLog, 24, all_users at 16, reason at 20;
    EnableEvents, 8, flags at 4;
    UpdateGet, 8, vardata at 4;
    GpuTime, 8;
}
