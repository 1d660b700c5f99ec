//! Where an invocation is done that has failed on a device.
//!
//! Rules:
//! 1. Only what has its inputs yet is done anew: where outputs overwrite inputs in place, and something has begun, they may be
//!    half done, and the graph fails. Once it is reset rules 4 and 5 hold for such tasks, too.
//! 2. Under adaptive placement the next best implementation does it, whatever failed; what failed is not chosen again until the
//!    graph is reset.
//! 3. Otherwise an implementation fails its graph, unless the device is lost, or has no room for the invocation's memory: the
//!    first that is left does it then.
//! 4. A device that is lost gets nothing more that another one runs ([`super::dispatch::Dispatcher::look_for_lost`]).
//! 5. One without room is no failure of the implementation: others of the GPU may give memory back. The task leaves it alone
//!    for [`PAUSE_NS`].

use std::sync::PoisonError;

use forebay_hal::Error as HalError;
use forebay_policy::DeviceSet;

use super::node::{Core, Node, Own};
use crate::error::{Error, TaskError};

/// A task does not go again to a device that had no room for it before so much time has passed: its inputs are copied there in
/// vain, perhaps, and memory that waits there for another use is given up each time.
const PAUSE_NS: u64 = 1_000_000_000;

/// Devices that had no room for a task.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Full {
    devices: DeviceSet,
    until_ns: u64,
}

impl Full {
    /// Those that are left alone yet.
    pub(crate) fn at(self, now_ns: u64) -> DeviceSet {
        if now_ns < self.until_ns { self.devices } else { DeviceSet::default() }
    }
}

/// Which device is to do what has failed on `own.device`, if one is left.
#[cold]
pub(crate) fn elsewhere(core: &Core, node: &Node, own: &mut Own, why: &TaskError) -> Option<usize> {
    let (rt, failed) = (&core.runtime, own.device);
    let lost = rt.dispatcher.look_for_lost(&rt.devices);
    let (is_lost, is_full) = (lost.has(failed), is_out_of_memory(why) && !rt.devices[failed].is_host());
    if is_full {
        let now = rt.now_ns();
        own.full = Full { devices: own.full.at(now).with(failed), until_ns: now.saturating_add(PAUSE_NS) };
    }
    if own.touched && node.outputs.iter().any(|o| o.from_input.is_some()) {
        return None;
    }
    let not = DeviceSet(lost.0 | own.full.at(rt.now_ns()).0);
    let why = why.to_string();
    let other = match &mut own.adapt {
        Some(a) => {
            if !is_full {
                a.refuse(failed, &why);
            }
            a.best_but(not)
        }
        // Each that was tried is among those, so this comes to an end.
        None if is_lost || is_full => own.imps.iter().map(|(d, _)| *d).find(|d| !not.has(*d)),
        None => None,
    }?;
    // The latest reason of each is told.
    let mut refused = node.refused.lock().unwrap_or_else(PoisonError::into_inner);
    match refused.iter_mut().find(|(d, _)| *d == failed) {
        Some((_, before)) => *before = why,
        None => refused.push((failed, why)),
    }
    // Nothing is kept on the device that it was not done on.
    own.in_buffers.iter_mut().chain(&mut own.out_buffers).for_each(|b| *b = None);
    Some(other)
}

fn is_out_of_memory(why: &TaskError) -> bool {
    let of_block = why.downcast_ref::<Error>().and_then(|e| if let Error::Device(e) = e { Some(e) } else { None });
    let why = of_block.or_else(|| why.downcast_ref::<HalError>());
    why.is_some_and(HalError::is_out_of_memory)
}
