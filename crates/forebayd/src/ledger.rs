//! What the service may have taken from others, where a guardian finds it after the service's death: memory that both
//! share.
//!
//! Rules:
//! 1. A channel is entered before anything is done to it, and struck out after it has been let on again, or has gone;
//!    a channel group before its slice is changed, with the slice that it had; a process before it is locked.
//! 2. So what is not entered is not suspended; what is entered may be. To let a channel on that is on does nothing.
//! 3. The service says at every turn of its loop that it lives ([`Ledger::beat`]).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use forebay_rm::{ChannelGroup, Handle};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Most channels of all processes together.
pub const MAX_CHANNELS: usize = 32_768;
/// Most channel groups with changed slices.
pub const MAX_GROUPS: usize = 8192;
/// Most processes that are locked.
pub const MAX_LOCKED: usize = 1024;

#[repr(C)]
struct Words {
    beat_ns: AtomicU64,
    /// Client and channel in one word each; 0 is free.
    channels: [AtomicU64; MAX_CHANNELS],
    /// Client and group, then process and slice in µs, which are written first.
    groups: [[AtomicU64; 2]; MAX_GROUPS],
    /// Processes; 0 is free.
    locked: [AtomicU32; MAX_LOCKED],
}

/// The ledger; what is made from it by `fork` shares it.
pub struct Ledger {
    at: NonNull<Words>,
}

// SAFETY: atomics in memory that lives as long as the value.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

fn pack(h: Handle) -> u64 {
    u64::from(h.client) << 32 | u64::from(h.object)
}

fn unpack(word: u64) -> Handle {
    Handle { client: (word >> 32) as u32, object: word as u32 }
}

impl Ledger {
    /// An empty ledger.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> rustix::io::Result<Self> {
        // SAFETY: a fresh mapping; zeroes are valid for atomics.
        let p = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                size_of::<Words>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )?
        };
        NonNull::new(p.cast()).map(|at| Ledger { at }).ok_or(rustix::io::Errno::NOMEM)
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped as long as `self` lives.
        unsafe { self.at.as_ref() }
    }

    /// Enters channels; false, and nothing entered, when there is no room for all.
    #[must_use]
    pub fn enter(&self, channels: &[Handle]) -> bool {
        let mut slots = self.words().channels.iter();
        for (entered, h) in channels.iter().enumerate() {
            let Some(slot) = slots.find(|s| s.load(Ordering::Relaxed) == 0) else {
                self.strike(&channels[..entered]);
                return false;
            };
            slot.store(pack(*h), Ordering::SeqCst);
        }
        true
    }

    /// Strikes channels out.
    pub fn strike(&self, channels: &[Handle]) {
        let gone: std::collections::HashSet<u64> = channels.iter().map(|h| pack(*h)).collect();
        for s in &self.words().channels {
            if gone.contains(&s.load(Ordering::Relaxed)) {
                s.store(0, Ordering::SeqCst);
            }
        }
    }

    /// All channels that are entered.
    pub fn entered(&self) -> Vec<Handle> {
        let all = self.words().channels.iter().map(|s| s.load(Ordering::SeqCst)).filter(|w| *w != 0);
        all.map(unpack).collect()
    }

    /// Enters groups of a process with the slices that they have; false, and nothing entered, when there is no room.
    #[must_use]
    pub fn enter_groups(&self, pid: u32, groups: &[ChannelGroup]) -> bool {
        let mut slots = self.words().groups.iter();
        for (entered, g) in groups.iter().enumerate() {
            let Some([name, rest]) = slots.find(|[name, _]| name.load(Ordering::Relaxed) == 0) else {
                self.strike_groups(&groups[..entered]);
                return false;
            };
            rest.store(u64::from(pid) << 32 | g.slice_us.min(u64::from(u32::MAX)), Ordering::SeqCst);
            name.store(pack(g.handle), Ordering::SeqCst);
        }
        true
    }

    /// Strikes groups out.
    pub fn strike_groups(&self, groups: &[ChannelGroup]) {
        let gone: std::collections::HashSet<u64> = groups.iter().map(|g| pack(g.handle)).collect();
        for [name, _] in &self.words().groups {
            if gone.contains(&name.load(Ordering::Relaxed)) {
                name.store(0, Ordering::SeqCst);
            }
        }
    }

    /// All groups that are entered, by process.
    pub fn entered_groups(&self) -> std::collections::BTreeMap<u32, Vec<ChannelGroup>> {
        let mut all = std::collections::BTreeMap::<u32, Vec<ChannelGroup>>::new();
        for [name, rest] in &self.words().groups {
            let (name, rest) = (name.load(Ordering::SeqCst), rest.load(Ordering::SeqCst));
            if name != 0 {
                let handle = unpack(name);
                all.entry((rest >> 32) as u32).or_default().push(ChannelGroup { handle, slice_us: rest & 0xFFFF_FFFF });
            }
        }
        all
    }

    /// Enters a process that is to be locked; false when there is no room.
    #[must_use]
    pub fn enter_locked(&self, pid: u32) -> bool {
        let slot = self.words().locked.iter().find(|s| s.load(Ordering::Relaxed) == 0);
        slot.inspect(|s| s.store(pid, Ordering::SeqCst)).is_some()
    }

    /// Strikes a process out.
    pub fn strike_locked(&self, pid: u32) {
        let of = self.words().locked.iter().filter(|s| s.load(Ordering::Relaxed) == pid);
        of.for_each(|s| s.store(0, Ordering::SeqCst));
    }

    /// All processes that may be locked.
    pub fn locked(&self) -> Vec<u32> {
        self.words().locked.iter().map(|s| s.load(Ordering::SeqCst)).filter(|p| *p != 0).collect()
    }

    /// Whether nothing is entered.
    pub fn is_empty(&self) -> bool {
        self.entered().is_empty() && self.entered_groups().is_empty() && self.locked().is_empty()
    }

    /// The service lives.
    pub fn beat(&self, now_ns: u64) {
        self.words().beat_ns.store(now_ns, Ordering::Relaxed);
    }

    /// When it said so last; 0 for never.
    pub fn last_beat(&self) -> u64 {
        self.words().beat_ns.load(Ordering::Relaxed)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: our mapping, which nobody borrows any more; the other process has its own.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), size_of::<Words>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(n: u32) -> Handle {
        Handle { client: 0xc1d0_0000 + n, object: 0x5c00_0000 + n }
    }

    #[test]
    fn what_is_entered_stays_until_it_is_struck_out_and_no_more_than_fits_goes_in() {
        let l = Ledger::new().unwrap();
        let all: Vec<Handle> = (1..=MAX_CHANNELS as u32).map(handle).collect();
        assert!(l.enter(&all[..10]));
        l.strike(&all[2..5]);
        assert_eq!(l.entered().len(), 7);
        assert!(l.entered().contains(&all[9]) && !l.entered().contains(&all[3]));
        assert!(!l.enter(&all), "more than fits");
        assert_eq!(l.entered().len(), 0, "the same channels were struck out");
        assert!(l.enter(&all));
        assert!(!l.enter(&[handle(0)]));
        assert_eq!(l.entered().len(), MAX_CHANNELS);
    }

    #[test]
    fn groups_are_kept_with_their_process_and_slice() {
        let l = Ledger::new().unwrap();
        let group = |n| ChannelGroup { handle: handle(n), slice_us: 2048 + u64::from(n) };
        assert!(l.enter_groups(7, &[group(1), group(2)]) && l.enter_groups(8, &[group(3)]));
        l.strike_groups(&[group(1)]);
        assert_eq!(l.entered_groups(), [(7, vec![group(2)]), (8, vec![group(3)])].into());
        let all: Vec<_> = (10..10 + MAX_GROUPS as u32).map(group).collect();
        assert!(!l.enter_groups(9, &all), "more than fits");
        assert_eq!(l.entered_groups().len(), 2);
    }

    #[test]
    fn processes_that_are_locked_are_kept_until_they_are_struck_out() {
        let l = Ledger::new().unwrap();
        assert!(l.enter_locked(7) && l.enter_locked(8) && !l.is_empty());
        l.strike_locked(7);
        assert_eq!(l.locked(), [8]);
        assert!((1..MAX_LOCKED as u32).all(|p| l.enter_locked(100 + p)));
        assert!(!l.enter_locked(9), "more than fits");
        l.strike_locked(8);
        assert!(l.enter_locked(9) && !l.locked().contains(&8));
    }
}
