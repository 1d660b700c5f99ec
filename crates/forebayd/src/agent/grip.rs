//! How a process is taken off a GPU and let on again, whatever the means.

use std::collections::HashSet;

use forebay_rm::sys::RawHandle;

use super::Refused;

/// The process has gone.
#[derive(Debug)]
pub struct Gone;

/// The way to the processes on a GPU.
pub trait Reach {
    /// Looks into a process and lets it on the GPU, as it is by itself, whatever state it was left in. `known` are others'
    /// clients, which it cannot have.
    ///
    /// # Errors
    /// [`Refused`]; the process is as it was then.
    fn find(&self, pid: u32, known: &HashSet<RawHandle>) -> Result<Box<dyn Grip>, Refused>;

    /// Whether somebody may be let on before others are taken off, without keeping them from going.
    fn lets_on_first(&self) -> bool {
        false
    }

    /// Why the GPU is not there any more, if it is not: it has fallen off, or is being reset.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Clients that an earlier service found this process to have.
    fn remember(&self, pid: u32, clients: &[RawHandle]) {
        let _ = (pid, clients);
    }

    /// Clients that a process has which was looked for and has nothing on the GPU, as far as they were found.
    fn clients_of(&self, pid: u32) -> Vec<RawHandle> {
        let _ = pid;
        Vec::new()
    }

    /// A process without channels may have some by now: it is not put off at the next look.
    fn look_soon(&self, pid: u32) {
        let _ = pid;
    }

    /// A process is on the GPU and was not found: from now on it is looked for more widely. False when that is over, or
    /// there is no wider.
    fn look_further(&self, pid: u32) -> bool {
        let _ = pid;
        false
    }

    /// A process has gone: whoever comes with its number is another one.
    fn forget(&self, pid: u32) {
        let _ = pid;
    }
}

/// A process in the agent's hands. Dropping it lets the process on, as it is by itself.
pub trait Grip {
    /// Whether it is off the GPU by our doing.
    fn is_off(&self) -> bool;

    /// Takes it off the GPU, if it is on it. One that cannot be taken off in time stays on it.
    ///
    /// # Errors
    /// It has gone.
    fn suspend(&mut self) -> Result<(), Gone>;

    /// It is off by our doing and stays so, and may be on the GPU all the same, which cannot be seen: takes it off once more.
    ///
    /// # Errors
    /// It has gone, or has not any more what was taken off.
    fn hold(&mut self) -> Result<(), Gone> {
        Ok(())
    }

    /// Lets it on the GPU, if it is off it.
    ///
    /// # Errors
    /// It has gone.
    fn resume(&mut self) -> Result<(), Gone>;

    /// Somebody else may have taken it off the GPU, which cannot be seen: lets it on, if it is not off by our doing.
    fn let_on(&mut self) {}

    /// Gives it slices of so many µs, or its own. Where they cannot be changed they stay as they are; whether they are so now.
    fn slice(&mut self, us: Option<u64>) -> bool {
        us.is_none()
    }

    /// Its clients of the driver, where they are known.
    fn clients(&self) -> Vec<RawHandle> {
        Vec::new()
    }

    /// Whether it may have other channels than when it was looked into: a look that costs little, and may be wrong.
    fn may_be_other(&mut self) -> bool {
        false
    }

    /// More of it has been on the GPU than when it was looked into, or other things: once again, also where it had nothing
    /// before, which leaves lines in the kernel's log, or there only if it has nothing else. False when it cannot be steered
    /// any more: it is on the GPU then, and nothing of it in the ledger.
    #[must_use]
    fn look_again(&mut self, known: &HashSet<RawHandle>, widely: bool) -> bool {
        let _ = (known, widely);
        true
    }
}
