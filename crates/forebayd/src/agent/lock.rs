//! A process taken off its GPUs by the CUDA driver's process lock, where the driver's channels are out of reach.
//!
//! Rules:
//! 1. Locking waits for what the process has on the GPU, for [`PATIENCE`] at most, and half of that after each time in vain:
//!    one that takes longer stays on it until its next turn to be taken off. Before each such wait the guardian is told
//!    that the service lives.
//! 2. The lock is of the whole process, on all its GPUs: one that is on several is divided on the first of them only. There are no slices: who is first in line has the driver's turns
//!    beside the owner of the window.
//! 3. A process is in the ledger before it is locked, and struck out when it has been unlocked or has gone.
//!    One that the driver does not unlock is still ours to unlock: it is tried again whenever it should be on the GPU.
//! 4. A process that somebody has moved off the GPU (`forebay checkpoint`) is not touched, nor one that the driver has given
//!    up.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_hal::cuda::checkpoint::{Checkpoints, State};
use forebay_rm::sys::RawHandle;

use super::Refused;
use super::grip::{Gone, Grip, Reach};
use crate::ledger::Ledger;
use crate::system::now_ns;

/// How long a process is given to end what it has on the GPU, at most and at least. The service does nothing else meanwhile.
pub const PATIENCE: Duration = Duration::from_millis(50);
const LEAST_PATIENCE: Duration = Duration::from_millis(10);
/// Length of a round of windows: a turn costs some milliseconds, and use is known several times a second only.
pub const PERIOD_NS: u64 = 400_000_000;

/// The way to processes by the CUDA driver.
pub struct Locks {
    driver: Arc<Checkpoints>,
    ledger: Arc<Ledger>,
}

impl Locks {
    /// By this driver; the guardian finds in the ledger who may have to be unlocked.
    pub fn new(driver: Arc<Checkpoints>, ledger: Arc<Ledger>) -> Self {
        Locks { driver, ledger }
    }
}

impl Reach for Locks {
    fn find(&self, pid: u32, _: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused> {
        let refused = |e: &dyn std::fmt::Display| Refused::Lock(e.to_string());
        match self.driver.state(pid).map_err(|e| refused(&e))? {
            State::Running => {}
            State::Locked => self.driver.unlock(pid).map_err(|e| refused(&e))?,
            State::Saved => return Err(refused(&"its memory was moved off the GPU")),
            State::Failed => return Err(refused(&"the driver says that it cannot go on")),
        }
        let (driver, ledger) = (self.driver.clone(), self.ledger.clone());
        Ok(Box::new(Process { driver, ledger, pid, off: false, patience: PATIENCE }))
    }
}

struct Process {
    driver: Arc<Checkpoints>,
    ledger: Arc<Ledger>,
    pid: u32,
    off: bool,
    patience: Duration,
}

impl Process {
    /// What it means that a call for the process has failed.
    fn after_failure(&self) -> Result<(), Gone> {
        self.driver.state(self.pid).map(|_| ()).map_err(|_| Gone)
    }
}

impl Grip for Process {
    fn is_off(&self) -> bool {
        self.off
    }

    fn suspend(&mut self) -> Result<(), Gone> {
        if self.off || !self.ledger.enter_locked(self.pid) {
            return Ok(());
        }
        self.ledger.beat(now_ns());
        match self.driver.lock(self.pid, self.patience) {
            Ok(()) => {
                (self.off, self.patience) = (true, PATIENCE);
                Ok(())
            }
            Err(_) => {
                self.patience = (self.patience / 2).max(LEAST_PATIENCE);
                self.ledger.strike_locked(self.pid);
                self.after_failure()
            }
        }
    }

    fn resume(&mut self) -> Result<(), Gone> {
        if !self.off {
            return Ok(());
        }
        let unlocked = self.driver.unlock(self.pid);
        if unlocked.is_err() && matches!(self.driver.state(self.pid), Ok(State::Locked)) {
            return Ok(());
        }
        self.off = false;
        self.ledger.strike_locked(self.pid);
        unlocked.or_else(|_| self.after_failure())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.resume();
    }
}
