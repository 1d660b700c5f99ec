//! The shared pages. Every word is an atomic and every value of it is valid, so a page can be read whatever the other side
//! does to it; what is read is then checked where it is used.

use crate::seqlock::Words;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Bytes of every page.
pub const PAGE: usize = 4096;
/// Devices on the global page, and accounts of a program.
pub const MAX_DEVICES: usize = 24;

/// Something that may lie in shared memory.
///
/// # Safety
/// `repr(C)`, no larger than [`PAGE`], aligned to at most a page, made of atomics only: any bytes are a valid value.
pub unsafe trait Page: Sync {}

/// Load of the machine, written by the service and readable by every program.
#[repr(C)]
pub struct GlobalPage {
    devices: [Words<DEVICE_WORDS>; MAX_DEVICES],
}

// SAFETY: only `Words`, which are atomics.
unsafe impl Page for GlobalPage {}

const DEVICE_WORDS: usize = 12;

/// How a device is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLoad {
    /// When this was true, ns of the monotonic clock; 0 for a device that is not there.
    pub at_ns: u64,
    /// How much of it was used lately, in millionths.
    pub utilisation: u64,
    /// Things that it does at a time.
    pub units: u64,
    /// Programs that use it now.
    pub active: u64,
    /// Programs of each class on it: interactive, custom, normal, background, suspended.
    pub classes: [u64; 5],
    /// Programs that wait for credit.
    pub waiting: u64,
    /// Average length of a piece of work, ns; 0 when nobody says.
    pub task_ns: u64,
}

impl GlobalPage {
    /// Writes a device's load. The service only.
    pub fn set(&self, device: usize, l: &DeviceLoad) {
        if let Some(d) = self.devices.get(device) {
            let [a, b, c, e, f] = l.classes;
            d.write(&[l.at_ns, l.utilisation, l.units, l.active, a, b, c, e, f, l.waiting, l.task_ns, 0]);
        }
    }

    /// A device's load; none for one that is not there.
    pub fn device(&self, device: usize) -> Option<DeviceLoad> {
        let [at_ns, utilisation, units, active, a, b, c, e, f, waiting, task_ns, _] =
            self.devices.get(device)?.read()?;
        let load = DeviceLoad { at_ns, utilisation, units, active, classes: [a, b, c, e, f], waiting, task_ns };
        (at_ns != 0).then_some(load)
    }
}

/// What the service says to one program; the program can only read it.
#[repr(C)]
pub struct ClientPage {
    /// An account for each device, by the number that joining it gave.
    pub accounts: [AccountWords; MAX_DEVICES],
}

// SAFETY: only `AccountWords`, which are atomics.
unsafe impl Page for ClientPage {}

/// One account.
#[repr(C, align(64))]
pub struct AccountWords {
    /// The program may begin work while what it has used is below this, ns.
    pub allowance: AtomicU64,
    /// Not 0: somebody with precedence works; begin nothing.
    pub hold: AtomicU32,
    /// Counts on whenever `allowance` or `hold` changes; what waiting programs sleep on ([`crate::bell`]).
    pub bell: AtomicU32,
    /// Not 0: ring the doorbell when work begins and ends.
    pub precedence: AtomicU32,
    _gap: AtomicU32,
    standing: Words<4>,
}

/// How a program stands on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it would get of the device now, in millionths.
    pub share: u64,
    /// What it has had lately, in millionths.
    pub used: u64,
    /// The most that it could get if it asked for more now, in millionths.
    pub ceiling: u64,
    /// When this was true, ns of the monotonic clock.
    pub at_ns: u64,
}

impl AccountWords {
    /// Writes the standing. The service only.
    pub fn set_standing(&self, s: &Standing) {
        self.standing.write(&[s.share, s.used, s.ceiling, s.at_ns]);
    }

    /// The standing.
    pub fn standing(&self) -> Option<Standing> {
        let [share, used, ceiling, at_ns] = self.standing.read()?;
        Some(Standing { share, used, ceiling, at_ns })
    }
}

/// What a program says of itself. It may write anything here: the service takes it for what it is.
#[repr(C)]
pub struct ProgramPage {
    /// By account.
    pub accounts: [ProgramWords; MAX_DEVICES],
}

// SAFETY: only `ProgramWords`, which are atomics.
unsafe impl Page for ProgramPage {}

/// What a program says of one account.
#[derive(Default)]
#[repr(C, align(64))]
pub struct ProgramWords {
    /// What it has used of the device, ns: from the issue of work, or the end of what was before it, to its end. Of the CPU
    /// the kernel says it instead.
    pub spent: AtomicU64,
    /// From when on what is in the device now is not in `spent` yet, ns of the monotonic clock; 0 when nothing is. Moved on
    /// before `spent` is, and read after it, so that nothing is counted twice.
    pub since: AtomicU64,
    /// Pieces of work so far.
    pub tasks: AtomicU64,
    /// How much of the device it could use now, in millionths.
    pub demand: AtomicU32,
    /// Not 0 while it works.
    pub busy: AtomicU32,
    /// Threads that sleep on the account's bell.
    pub sleepers: AtomicU32,
}

impl ProgramWords {
    /// What it says it has used, with what is in the device at this moment of the monotonic clock, ns.
    #[inline]
    pub fn used_ns(&self, now_ns: impl FnOnce() -> u64) -> u64 {
        let spent = self.spent.load(Ordering::Acquire);
        match self.since.load(Ordering::Relaxed) {
            0 => spent,
            since => spent.saturating_add(now_ns().saturating_sub(since)),
        }
    }
}

#[cfg(not(all(loom, test)))]
const _: () = {
    assert!(size_of::<GlobalPage>() <= PAGE);
    assert!(size_of::<ClientPage>() <= PAGE);
    assert!(size_of::<ProgramPage>() <= PAGE);
    assert!(size_of::<AccountWords>() == 64 && std::mem::offset_of!(AccountWords, standing) == 24);
    assert!(size_of::<ProgramWords>() == 64);
};
