//! How a stream waits for its device.

use std::time::{Duration, Instant};

use forebay_hal::{Fence, Queue};

use crate::error::Result;

/// Most copies worth waiting for end within this; a blocking wake-up takes longer.
const SHORT: Duration = Duration::from_micros(20);
/// How often a spinning wait looks at the clock: seldom, since that costs as much as asking the device.
const LOOKS: u32 = 32;

/// How long to spin before blocking.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait(Duration);

impl Wait {
    /// A little.
    pub(super) const SHORTLY: Wait = Wait(SHORT);

    /// For as long as this, and no longer: whoever has real-time priority keeps others from running meanwhile.
    pub(super) fn spinning(limit: Duration) -> Self {
        Wait(limit)
    }

    pub(super) fn until(self, queue: &mut dyn Queue, fence: Fence) -> Result<()> {
        if queue.done(fence)? {
            return Ok(());
        }
        let begun = Instant::now();
        while begun.elapsed() < self.0 {
            for _ in 0..LOOKS {
                if queue.done(fence)? {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        Ok(queue.wait(fence)?)
    }
}
