//! Memory that tasks allocate and free on the device (device/heap/, docs/heap.md).

use std::mem::MaybeUninit;

use super::cpu::Code;
use super::{Error, Result};

/// Alignment of a heap's beginning.
pub(super) const ALIGN: usize = 128;

/// What is taken of a heap, and what is left, in bytes of slots and pages (not those that were asked for). Exact while no
/// task allocates or frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HeapUse {
    /// All that could be had.
    pub arena: u64,
    /// In pages that are nobody's.
    pub free: u64,
    /// The longest row of them: the largest piece that could be had now.
    pub longest: u64,
    /// Taken, in slots of up to 32 KiB.
    pub slots: u64,
    /// Taken, in pieces of whole pages.
    pub large: u64,
    /// In pages of slots, and not taken: room for pieces of those sizes only, until all of a page is free.
    pub slack: u64,
    /// Frees of pointers that are not of this heap; they were refused.
    pub foreign: u64,
    /// Frees of pointers that are not the beginning of anything; refused.
    pub interior: u64,
    /// Frees of what had been freed before; refused.
    pub twice: u64,
    /// The last pointer that was refused.
    pub last_bad: u64,
}

/// As device/heap/host.h has it.
const _: () = assert!(size_of::<HeapUse>() == 80);

impl HeapUse {
    /// As the device wrote it.
    pub(super) fn from_bytes(b: &[u8; size_of::<HeapUse>()]) -> Self {
        let mut words = b.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap_or_default()));
        let mut next = || words.next().unwrap_or(0);
        let (arena, free, longest, slots, large, slack) = (next(), next(), next(), next(), next(), next());
        let (foreign, interior, twice, last_bad) = (next(), next(), next(), next());
        HeapUse { arena, free, longest, slots, large, slack, foreign, interior, twice, last_bad }
    }

    /// How much of what is free is not in the longest row, 0 to 1.
    pub fn fragmentation(&self) -> f64 {
        let free = self.free + self.slack;
        if free == 0 { 0.0 } else { 1.0 - self.longest as f64 / free as f64 }
    }
}

/// A heap's memory on the CPU.
pub(super) struct Heap {
    memory: Vec<MaybeUninit<u8>>,
}

impl Heap {
    /// A heap of so many bytes, what describes it included.
    pub(super) fn new(code: &Code, bytes: u64, blocks: usize) -> Result<Self> {
        let there = rustix::system::sysinfo();
        let all = there.totalram as u64 * u64::from(there.mem_unit.max(1));
        let refused = |why: String| Error::Start(format!("a heap of {bytes} bytes: {why}"));
        if bytes > all {
            return Err(refused(format!("the machine has {all}")));
        }
        let mut memory: Vec<MaybeUninit<u8>> = Vec::new();
        memory.try_reserve_exact(bytes as usize).map_err(|e| refused(e.to_string()))?;
        // SAFETY: reserved above; such elements need no values.
        unsafe { memory.set_len(bytes as usize) };
        if !code.heap_setup(&mut memory, blocks as u32) {
            return Err(refused("no room for a page of 65536 and what describes it".into()));
        }
        Ok(Heap { memory })
    }

    /// Where the device finds it.
    pub(super) fn address(&mut self) -> *mut u8 {
        let at = self.memory.as_mut_ptr().cast::<u8>();
        at.wrapping_add(at.align_offset(ALIGN))
    }
}
