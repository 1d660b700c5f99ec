//! What the agent knows of a process.

use forebay_policy::reserve::Reserve;
use forebay_policy::share::Class;

use super::grip::Grip;
use super::light::Light;

/// A process.
pub(super) struct Process {
    pub(super) grip: Box<dyn Grip>,
    pub(super) class: Class,
    pub(super) nice: i32,
    /// Its use when it was looked at last.
    pub(super) used_ns: u64,
    /// What it has used while it was on the GPU.
    pub(super) spent_ns: u64,
    /// Its use of a window, averaged.
    pub(super) average_ns: u64,
    /// Time for which it was off the GPU by our doing.
    pub(super) off_ns: u64,
    /// Of an interactive one: how long it may go on being first, and whether it comes back as soon as it can.
    pub(super) reserve: Reserve,
    pub(super) bursts: bool,
    /// Its channel groups that had been on the GPU when it was looked into.
    pub(super) contexts: usize,
    /// Whether it has work all the time.
    pub(super) light: Light,
}

impl Process {
    pub(super) fn new(grip: Box<dyn Grip>, (class, nice): (Class, i32)) -> Self {
        Process {
            grip,
            class,
            nice,
            used_ns: 0,
            spent_ns: 0,
            average_ns: 0,
            off_ns: 0,
            reserve: Reserve::default(),
            bursts: false,
            contexts: 0,
            light: Light::default(),
        }
    }

    pub(super) fn is_off(&self) -> bool {
        self.grip.is_off()
    }
}
