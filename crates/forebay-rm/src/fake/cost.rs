//! How long the driver's calls take the caller, as they did on an H200 under driver 580.159.04 (means, measured 2026-11-20 with
//! programs of our own); the GPU goes on meanwhile.

use super::driver::typed;
use crate::sys::{CMD_DISABLE_CHANNELS, CMD_FLUSH, CMD_SET_TIMESLICE, DisableChannels};

/// A process's channels taken off, and let on again, until it is so and after that. When it is so was not seen; with these, windows
/// of 25 ms lose the 1.8 % that they lost there.
const OFF_US: (u64, u64) = (690, 0);
const ON_US: (u64, u64) = (290, 140);
/// A channel group's slice.
const SLICE_US: u64 = 280;
/// The log brought up to the moment.
const FLUSH_US: u64 = 190;
/// Anything else.
const OTHER_US: u64 = 2;

/// µs of a command, until it has been done and after that.
pub(super) fn of(cmd: u32, params: &mut [u8]) -> (u64, u64) {
    match cmd {
        CMD_DISABLE_CHANNELS if typed::<DisableChannels>(params).is_ok_and(|p| p.disable != 0) => OFF_US,
        CMD_DISABLE_CHANNELS => ON_US,
        CMD_SET_TIMESLICE => (0, SLICE_US),
        CMD_FLUSH => (0, FLUSH_US),
        _ => (0, OTHER_US),
    }
}
