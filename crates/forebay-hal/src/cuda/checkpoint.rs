//! Another process's CUDA work stopped, moved off the GPU and brought back, by the driver's own calls (`cuda.h` from CUDA
//! 12.8 on). No context is made here.
//!
//! Rules:
//! 1. `lock` waits for what is on the GPU and lets nothing new begin; `save` moves the process's device memory to the
//!    host's and frees the GPU of it; `restore` and `unlock` are the way back. Each step needs the one before.
//! 2. The driver refuses processes with managed (UVM) memory, memory shared between processes (IPC), or under MPS.
//! 3. A restore needs as much free device memory as there was, on the same GPUs.
//! 4. A process that was restored has to make a CUDA call of its own before it is saved again.
//! 5. The caller is the process's user, or root.

use std::ffi::{c_int, c_uint};
use std::time::Duration;

use super::sys::{self, CuResult, SUCCESS};
use crate::{DriverError, Error, Result};

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub(super) struct LockArgs {
    pub(super) timeout_ms: c_uint,
    pub(super) reserved0: c_uint,
    reserved: [u64; 7],
}
/// The other calls' arguments, all reserved.
pub(super) type NoArgs = [u64; 8];
const _: () = assert!(size_of::<LockArgs>() == 64);

type Call<T> = unsafe extern "C" fn(c_int, *mut T) -> CuResult;

sys::optional! {
    /// The driver's calls, from CUDA 12.8 on.
    struct Calls {
        state / "cuCheckpointProcessGetState": Call<c_int>;
        lock / "cuCheckpointProcessLock": Call<LockArgs>;
        save / "cuCheckpointProcessCheckpoint": Call<NoArgs>;
        restore / "cuCheckpointProcessRestore": Call<NoArgs>;
        unlock / "cuCheckpointProcessUnlock": Call<NoArgs>;
    }
}

/// What the driver says of a process's CUDA work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs, as far as the driver is concerned.
    Running,
    /// Nothing of it runs or begins.
    Locked,
    /// Its memory is off the GPU.
    Saved,
    /// Something went wrong; it cannot go on.
    Failed,
}

/// What can be done with other processes' CUDA work.
pub struct Checkpoints {
    calls: Calls,
    driver: &'static sys::Driver,
}

impl Checkpoints {
    /// Opens the driver's library.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::NoSymbol`] for a driver older than 570, or that there is no GPU.
    pub fn open() -> Result<Self> {
        let driver = sys::driver()?;
        // SAFETY: no arguments but flags, which must be 0.
        check(driver, "CUDA", "cuInit", unsafe { (driver.cuInit)(0) })?;
        Ok(Checkpoints { calls: Calls::find(driver)?, driver })
    }

    fn call<T>(&self, name: &'static str, f: Call<T>, pid: u32, args: &mut T) -> Result<()> {
        let device = format!("process {pid}");
        let Ok(pid) = c_int::try_from(pid) else { return Err(Error::Invalid { device, what: "its number".into() }) };
        // SAFETY: the arguments are those of this function, alive for the call.
        check(self.driver, &device, name, unsafe { f(pid, args) })
    }

    /// What state a process is in.
    ///
    /// # Errors
    /// A process without CUDA, or of somebody else.
    pub fn state(&self, pid: u32) -> Result<State> {
        let mut s: c_int = -1;
        self.call("cuCheckpointProcessGetState", self.calls.state, pid, &mut s)?;
        match s {
            0 => Ok(State::Running),
            1 => Ok(State::Locked),
            2 => Ok(State::Saved),
            3 => Ok(State::Failed),
            other => {
                Err(Error::Invalid { device: format!("process {pid}"), what: format!("the driver's state {other}") })
            }
        }
    }

    /// Waits for what the process has on the GPU, for at most `patience` (a millisecond at least), and lets nothing begin.
    ///
    /// # Errors
    /// The driver's: not ready in time, for instance. The process goes on then.
    pub fn lock(&self, pid: u32, patience: Duration) -> Result<()> {
        // To the driver 0 is no limit at all.
        let timeout_ms = c_uint::try_from(patience.as_millis()).unwrap_or(c_uint::MAX).max(1);
        self.call(
            "cuCheckpointProcessLock",
            self.calls.lock,
            pid,
            &mut LockArgs { timeout_ms, reserved0: 0, reserved: [0; 7] },
        )
    }

    /// Lets the process begin again.
    ///
    /// # Errors
    /// The driver's.
    pub fn unlock(&self, pid: u32) -> Result<()> {
        self.call("cuCheckpointProcessUnlock", self.calls.unlock, pid, &mut [0; 8])
    }

    /// Moves the device memory of a locked process to the host's.
    ///
    /// # Errors
    /// The driver's; rule 2.
    pub fn save(&self, pid: u32) -> Result<()> {
        self.call("cuCheckpointProcessCheckpoint", self.calls.save, pid, &mut [0; 8])
    }

    /// Brings it back; the process is locked then.
    ///
    /// # Errors
    /// The driver's; rule 3.
    pub fn restore(&self, pid: u32) -> Result<()> {
        self.call("cuCheckpointProcessRestore", self.calls.restore, pid, &mut [0; 8])
    }
}

fn check(driver: &sys::Driver, device: &str, call: &'static str, status: CuResult) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    let name = driver.error_name(status);
    Err(Error::Driver(DriverError { call, code: i64::from(status), name, device: device.into() }))
}
