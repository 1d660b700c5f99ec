//! The design of GROSR, for comparison: one block that stays, a ring in memory of the host, one task at a time.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::hal::{Arg, Buffer, Device, Fence, Geometry, Kernel, Queue};

/// Slots of the ring, and of the answers.
const SLOTS: usize = 4096;
/// Sizes of `Asked` and `Answer` in tasks.cu.
const ASKED: usize = 64;
const ANSWER: usize = 16;
/// Functions that it knows.
const STOP: u32 = 0;
pub(super) const ECHO: u32 = 1;
pub(super) const WORK: u32 = 2;

/// The block, until it is dropped.
pub(super) struct OneBlock {
    queue: Box<dyn Queue>,
    fence: Option<Fence>,
    ring: (Buffer, NonNull<u8>),
    answers: (Buffer, NonNull<u8>),
    next: u32,
}

fn shared(device: &Arc<dyn Device>, bytes: usize) -> Result<((Buffer, NonNull<u8>), Buffer), String> {
    let (here, there) = device.alloc_shared(bytes).map_err(|e| e.to_string())?;
    let p = here.host_ptr().ok_or("memory of the host without an address")?;
    // SAFETY: the memory has these bytes, and nobody else has it yet.
    unsafe { p.as_ptr().write_bytes(0, bytes) };
    Ok(((here, p), there))
}

impl OneBlock {
    pub(super) fn start(device: &Arc<dyn Device>, kernel: &Kernel, threads: usize) -> Result<Self, String> {
        let (ring, ring_there) = shared(device, SLOTS * ASKED)?;
        let (answers, answers_there) = shared(device, SLOTS * ANSWER)?;
        let mut queue = device.queue().map_err(|e| e.to_string())?;
        let args = [Arg::Buffer(&ring_there), Arg::Buffer(&answers_there), Arg::U32(SLOTS as u32)];
        let shape = Geometry::linear(threads).with_group(threads, 1, 1);
        queue.launch(kernel, &shape, &args).map_err(|e| e.to_string())?;
        let fence = queue.fence().map_err(|e| e.to_string())?;
        Ok(OneBlock { queue, fence: Some(fence), ring, answers, next: 0 })
    }

    /// Its number. No more than [`SLOTS`] may be under way.
    pub(super) fn submit(&mut self, function: u32, args: [u64; 2]) -> u32 {
        let k = self.next;
        self.next += 1;
        // SAFETY: a slot of the ring, which the block reads only once its sequence number says so, and whose last task has
        // been answered.
        unsafe {
            let slot = self.ring.1.as_ptr().add(k as usize % SLOTS * ASKED);
            slot.add(4).cast::<u32>().write(function);
            slot.add(8).cast::<[u64; 2]>().write(args);
            AtomicU32::from_ptr(slot.cast()).store(k + 1, Ordering::Release);
        }
        k
    }

    /// Waits for a task's result.
    pub(super) fn wait(&self, k: u32) -> u64 {
        // SAFETY: an answer of the ring, which the block writes before its sequence number.
        unsafe {
            let answer = self.answers.1.as_ptr().add(k as usize % SLOTS * ANSWER);
            while AtomicU32::from_ptr(answer.cast()).load(Ordering::Acquire) != k + 1 {
                std::hint::spin_loop();
            }
            answer.add(8).cast::<u64>().read_volatile()
        }
    }

    /// `n` tasks, as many at a time as there is room for; the last one's result.
    pub(super) fn many(&mut self, n: u32, args: impl Fn(u32) -> [u64; 2]) -> u64 {
        let mut last = 0;
        for i in 0..n {
            last = self.submit(WORK, args(i));
            if i + 1 >= SLOTS as u32 {
                self.wait(last + 1 - SLOTS as u32);
            }
        }
        self.wait(last)
    }
}

impl Drop for OneBlock {
    fn drop(&mut self) {
        self.submit(STOP, [0; 2]);
        if let Some(f) = self.fence.take() {
            let _ = self.queue.wait(f);
        }
    }
}
