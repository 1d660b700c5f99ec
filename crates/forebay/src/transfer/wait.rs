//! How a stream waits for its device.

use std::time::{Duration, Instant};

use forebay_hal::{Fence, Kind, Queue};

use crate::error::Result;

/// Most copies worth waiting for end within this; a blocking wake-up takes longer.
const SHORT: Duration = Duration::from_micros(20);
/// The same for OpenCL, whose commands take longer to begin: through PoCL a wake-up took 20 to 45 µs.
const SHORT_OPENCL: Duration = Duration::from_micros(50);
/// How often a spinning wait looks at the clock: seldom, since that costs as much as asking the device.
const LOOKS: u32 = 32;
/// Between two questions to an OpenCL driver: each takes a lock that the driver's own threads need to end the command.
const APART_OPENCL: Duration = Duration::from_micros(2);

/// How long to spin before blocking.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    limit: Duration,
    /// Between two questions.
    apart: Duration,
}

impl Wait {
    /// A little.
    pub(super) fn shortly(kind: Kind) -> Wait {
        Wait::spinning(kind, if kind == Kind::OpenCl { SHORT_OPENCL } else { SHORT })
    }

    /// For as long as this, and no longer: whoever has real-time priority keeps others from running meanwhile.
    pub(super) fn spinning(kind: Kind, limit: Duration) -> Wait {
        Wait { limit, apart: if kind == Kind::OpenCl { APART_OPENCL } else { Duration::ZERO } }
    }

    pub(super) fn until(self, queue: &mut dyn Queue, fence: Fence) -> Result<()> {
        if queue.done(fence)? {
            return Ok(());
        }
        let begun = Instant::now();
        let (mut asked, looks) = (begun, if self.apart.is_zero() { LOOKS } else { 1 });
        // Whoever sets a budget may set any: a limit is compared with, not added to a time, which could be too late for one.
        while asked - begun < self.limit {
            for _ in 0..looks {
                std::hint::spin_loop();
                while !self.apart.is_zero() && asked.elapsed() < self.apart {
                    std::hint::spin_loop();
                }
                if queue.done(fence)? {
                    return Ok(());
                }
            }
            asked = Instant::now();
        }
        Ok(queue.wait(fence)?)
    }
}

#[cfg(test)]
mod tests {
    use forebay_hal::{Direction, Method, discover};

    use super::*;

    #[test]
    fn a_limit_may_be_as_long_as_there_are_durations() {
        // On the simulated device time goes on only when somebody blocks.
        for d in discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]).0 {
            let (memory, mut queue, mut from) = (d.alloc(1 << 20).unwrap(), d.queue().unwrap(), vec![1u8; 1 << 20]);
            // SAFETY: both have the bytes, and they are awaited below.
            unsafe { queue.transfer(Method::Engine, Direction::ToDevice, &memory, 0, from.as_mut_ptr(), 1 << 20) }
                .unwrap();
            let fence = queue.fence().unwrap();
            Wait::spinning(d.info().kind, Duration::MAX).until(&mut *queue, fence).unwrap();
            assert!(queue.done(fence).unwrap());
        }
    }
}
