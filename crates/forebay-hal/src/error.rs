//! What a device can report that its caller could not foresee.

use crate::{Kind, PciAddress};

/// Result of a device call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call into a driver, with what a person needs to look it up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed on {device}: {name} ({code})")]
pub struct DriverError {
    /// The driver's function.
    pub call: &'static str,
    /// Its numeric status.
    pub code: i64,
    /// The status by name.
    pub name: String,
    /// The device, or the interface when no device is involved yet.
    pub device: String,
}

/// What can go wrong on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The library is not installed.
    #[error("{kind}: cannot open {library}: {why}")]
    NoLibrary {
        /// Interface that needed it.
        kind: Kind,
        /// File names that were tried.
        library: String,
        /// The loader's words.
        why: String,
    },
    /// The library is there, but too old or damaged: one function is missing.
    #[error("{library} has no function {symbol}; a newer driver has")]
    NoSymbol {
        /// The library.
        library: &'static str,
        /// The function.
        symbol: &'static str,
    },
    /// The interface works and finds no device.
    #[error("{kind}: no device: {why}")]
    NoDevice {
        /// Interface that was asked.
        kind: Kind,
        /// What it answered.
        why: String,
    },
    /// It is there, and another interface drives it.
    #[error("{kind}: {device} at {place} is driven through {through}")]
    Twice {
        /// Interface that leaves it out.
        kind: Kind,
        /// Its name there.
        device: String,
        /// Where it is.
        place: PciAddress,
        /// The other interface, or platform.
        through: &'static str,
    },
    /// An allocation did not fit.
    #[error("out of memory on {device}: requested {requested} B, in use {used} B, limit {limit} B")]
    OutOfMemory {
        /// Device name.
        device: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes allocated through this handle; 0 where it is too much for one buffer.
        used: u64,
        /// Bytes that the device has, or one buffer of it may have.
        limit: u64,
    },
    /// The driver found no memory for a command, or for what belongs to one: a context, code, a queue.
    #[error("no memory is left on {device}: {why}")]
    Full {
        /// Device name.
        device: String,
        /// The call, and what the driver said.
        why: String,
    },
    /// The compiler rejected a kernel.
    #[error("{device} cannot compile kernel {entry:?}:\n{log}")]
    Compile {
        /// Device name.
        device: String,
        /// Entry point asked for.
        entry: String,
        /// The compiler's log, with the offending source lines beneath.
        log: String,
    },
    /// The program compiled and has no such entry point.
    #[error("{device}: the program has no kernel {entry:?}; it has: {known}")]
    NoEntry {
        /// Device name.
        device: String,
        /// Entry point asked for.
        entry: String,
        /// Entry points that exist, where the driver tells.
        known: String,
    },
    /// The device cannot do this at all.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// Device name.
        device: String,
        /// The request.
        what: String,
    },
    /// A range outside a buffer, or a handle of another device.
    #[error("invalid {what} on {device}")]
    Invalid {
        /// Device name.
        device: String,
        /// What was wrong with the request.
        what: String,
    },
    /// A kernel faulted or the device vanished; nothing on it can be trusted any more.
    #[error("{device} is lost: {why}")]
    Lost {
        /// Device name.
        device: String,
        /// The first error that said so.
        why: String,
    },
    /// Any other failure of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A kernel on the CPU panicked; the panic was caught.
    #[error("kernel {kernel} panicked: {why}")]
    Panic {
        /// The kernel.
        kernel: String,
        /// The panic message.
        why: String,
    },
}

impl Error {
    /// Whether the device, or the host, had no memory left for something: others may give some back.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory { .. } | Error::Full { .. })
    }
}
