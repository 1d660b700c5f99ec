//! A status of the driver, or a failed call, as an error.

use rustix::io::Errno;

/// Result of a call into RM.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No NVIDIA driver, or no right to open its files.
    #[error("{path}: {why}")]
    NoDriver {
        /// The file.
        path: String,
        /// The system's reason.
        why: std::io::Error,
    },
    /// A driver whose layouts are not known.
    #[error("driver {found} is not known: this build speaks to the series {known:?}; nothing was changed")]
    UnknownDriver {
        /// Its version.
        found: String,
        /// The series that are.
        known: [u32; 3],
    },
    /// On a machine with several GPUs the driver does not say which of them something of our own is of.
    #[error(
        "driver {found} does not say which of several GPUs something is of, so nobody's channels can be told apart; nothing was \
         changed. The service can divide a GPU by the CUDA driver's process lock instead: --level lock"
    )]
    WhichGpu {
        /// Its version.
        found: String,
    },
    /// The kernel refused a call.
    #[error("{call}: {why}")]
    Call {
        /// The call.
        call: &'static str,
        /// The system's reason.
        why: std::io::Error,
    },
    /// RM refused a command.
    #[error("{call}: {} (0x{status:x})", name(*status))]
    Status {
        /// The command.
        call: &'static str,
        /// RM's status.
        status: u32,
    },
    /// The processor's accesses to device memory are emulated.
    #[error("loads from the device's memory take {ns} ns: something emulates them, and mapping it would be of no use")]
    Trapped {
        /// The fastest load, ns.
        ns: u64,
    },
    /// A process that is gone, or not ours to look into.
    #[error("process {pid}: {why}")]
    Process {
        /// The process.
        pid: u32,
        /// The system's reason.
        why: std::io::Error,
    },
    /// A process without channels on this GPU.
    #[error("process {pid} has no channels on the GPU ({files} control files, {calls} questions)")]
    NoChannels {
        /// The process.
        pid: u32,
        /// Its files that were looked at.
        files: usize,
        /// Control calls made.
        calls: usize,
    },
    /// An argument out of bounds.
    #[error("a time slice of {us} µs: {min} to {max} are allowed")]
    Slice {
        /// What was asked.
        us: u64,
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
}

impl Error {
    /// Whether this says that the GPU is not there any more: it has fallen off the bus, or is being reset or taken out.
    /// Whatever is asked of it then fails, and what was opened before does not come back with it.
    pub fn is_lost(&self) -> bool {
        // What the driver's files answer for a GPU that it has given up.
        let gone =
            |why: &std::io::Error| matches!(Errno::from_io_error(why), Some(Errno::IO | Errno::NODEV | Errno::NXIO));
        match self {
            Error::Status { status, .. } => matches!(*status, GPU_IS_LOST | GPU_IN_RESET),
            Error::Call { why, .. } | Error::NoDriver { why, .. } => gone(why),
            _ => false,
        }
    }

    /// Whether this says that something is used up, of which others may give some back: the range through which the processor
    /// reaches the GPU's memory, for one, has 256 MiB on many GPUs.
    pub fn is_full(&self) -> bool {
        match self {
            Error::Status { status, .. } => matches!(*status, INSUFFICIENT_RESOURCES | NO_MEMORY),
            Error::Call { why, .. } => matches!(Errno::from_io_error(why), Some(Errno::NOMEM | Errno::NOSPC)),
            _ => false,
        }
    }
}

/// Success.
pub const OK: u32 = 0;
/// The GPU has fallen off the bus.
pub const GPU_IS_LOST: u32 = 0x0F;
/// It is being reset.
pub const GPU_IN_RESET: u32 = 0x10;
/// Something other than memory is used up.
pub const INSUFFICIENT_RESOURCES: u32 = 0x1A;
/// Refused for this caller.
pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1B;
/// Bad parameters.
pub const INVALID_ARGUMENT: u32 = 0x1F;
/// The client is not one of this file.
pub const INVALID_CLIENT: u32 = 0x23;
/// The command is not one of this object.
pub const INVALID_COMMAND: u32 = 0x24;
/// The object does not exist.
pub const INVALID_OBJECT_HANDLE: u32 = 0x33;
/// No memory is left.
pub const NO_MEMORY: u32 = 0x51;
/// Not on this GPU or driver.
pub const NOT_SUPPORTED: u32 = 0x56;
/// Nothing there.
pub const OBJECT_NOT_FOUND: u32 = 0x57;

/// A status by name.
fn name(status: u32) -> &'static str {
    match status {
        GPU_IS_LOST => "the GPU is lost",
        GPU_IN_RESET => "the GPU is in reset",
        INSUFFICIENT_RESOURCES => "insufficient resources",
        INSUFFICIENT_PERMISSIONS => "insufficient permissions",
        INVALID_ARGUMENT => "invalid argument",
        INVALID_CLIENT => "invalid client",
        INVALID_COMMAND => "invalid command",
        INVALID_OBJECT_HANDLE => "invalid object handle",
        NO_MEMORY => "no memory",
        NOT_SUPPORTED => "not supported",
        OBJECT_NOT_FOUND => "object not found",
        _ => "RM status",
    }
}

/// An error unless `status` is success.
pub(crate) fn check(call: &'static str, status: u32) -> Result<()> {
    if status == OK { Ok(()) } else { Err(Error::Status { call, status }) }
}
