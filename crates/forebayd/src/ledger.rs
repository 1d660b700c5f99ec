//! What the service may have taken from others, where a guardian finds it after the service's death: memory that both
//! share.
//!
//! Rules:
//! 1. A channel is entered before anything is done to it, and struck out after it has been let on again, or has gone.
//! 2. So what is not entered is not suspended; what is entered may be. To let a channel on that is on does nothing.
//! 3. The service says at every turn of its loop that it lives ([`Ledger::beat`]).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_rm::Handle;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Most channels of all processes together.
pub const MAX_CHANNELS: usize = 32_768;

#[repr(C)]
struct Words {
    beat_ns: AtomicU64,
    /// Client and channel in one word each; 0 is free.
    channels: [AtomicU64; MAX_CHANNELS],
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
        all.map(|w| Handle { client: (w >> 32) as u32, object: w as u32 }).collect()
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
}
