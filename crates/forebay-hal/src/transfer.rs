//! How bytes get from host memory into a device's and back.

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

impl Direction {
    /// Both.
    pub const ALL: [Direction; 2] = [Direction::ToDevice, Direction::ToHost];

    /// The other one.
    pub fn opposite(self) -> Self {
        match self {
            Direction::ToDevice => Direction::ToHost,
            Direction::ToHost => Direction::ToDevice,
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Direction::ToDevice => "to device",
            Direction::ToHost => "to host",
        }
    }
}

/// A method of moving bytes between host memory and a device's (docs/transfer.md compares them with those of Fujii et
/// al., "Data Transfer Matters for GPU Computing").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// A command to the device. CUDA: the copy engine. OpenCL: the driver's read and write commands. CPU: `memcpy`.
    Engine,
    /// The processor's own loads and stores into the device's memory. CUDA: through the aperture. OpenCL: into memory
    /// that both sides share, or else by map and unmap. CPU: stores that bypass the caches. Begins when everything before it in the queue has ended, and has arrived on
    /// return.
    Mapped,
    /// Many cores. CUDA: a kernel that reads or writes page-locked host memory. CPU: all workers.
    Kernel,
}

impl Method {
    /// All methods; no device has to have more than the first.
    pub const ALL: [Method; 3] = [Method::Engine, Method::Mapped, Method::Kernel];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Method::Engine => "engine",
            Method::Mapped => "mapped",
            Method::Kernel => "kernel",
        }
    }
}
