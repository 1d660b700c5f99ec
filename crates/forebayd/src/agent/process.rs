//! What the agent knows of a process.

use forebay_policy::reserve::Reserve;
use forebay_policy::share::Class;

use super::grip::{Gone, Grip};
use super::light::Light;
use super::meter::Meter;

/// Windows over which use is averaged.
pub(super) const AVERAGE: u64 = 16;

/// So much of a window somebody may have used who was taken off at its beginning, ns: until the driver has done so.
pub const LATE_NS: u64 = 2_000_000;

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
    /// It was taken off at the beginning of this window.
    taken_off: bool,
    /// Of an interactive one: how long it may go on being first, and whether it comes back as soon as it can.
    pub(super) reserve: Reserve,
    pub(super) bursts: bool,
    /// Its channel groups that had been on the GPU when it was looked into.
    pub(super) contexts: usize,
    /// Whether it has work all the time.
    pub(super) light: Light,
    /// Whether it filled the driver's turns when somebody was beside it last.
    pub(super) fills: bool,
    /// How often it had come onto the GPU when it was looked at last.
    came: Option<u64>,
    /// It came onto the GPU while it was off.
    pub(super) slipped: bool,
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
            taken_off: false,
            reserve: Reserve::default(),
            bursts: false,
            contexts: 0,
            light: Light::default(),
            fills: false,
            came: None,
            slipped: false,
        }
    }

    /// Lets it on, or takes it off.
    pub(super) fn let_on(&mut self, on: bool) -> Result<(), Gone> {
        let was_on = !self.is_off();
        let done = if on { self.grip.resume() } else { self.grip.suspend() };
        self.taken_off = was_on && self.is_off();
        done
    }

    /// How often it has come onto the GPU since this was asked last, where that is counted.
    pub(super) fn came_since<M: Meter>(&mut self, meter: &M, pid: u32) -> Option<u64> {
        let now = meter.switches(pid);
        let before = std::mem::replace(&mut self.came, now);
        let times = now?.saturating_sub(before?);
        self.slipped |= times > 0 && self.is_off() && !self.taken_off;
        Some(times)
    }

    /// Its use is so much by now, at the end of so much time; how much of that is of this time. Whoever was off has used
    /// nothing, even if its context was still there, but what it used until it was.
    pub(super) fn use_until(&mut self, now_ns: u64, passed_ns: u64) -> u64 {
        let since = now_ns.saturating_sub(std::mem::replace(&mut self.used_ns, now_ns));
        let most = match (self.is_off(), self.taken_off) {
            (false, _) => passed_ns,
            (true, true) => LATE_NS.min(passed_ns),
            (true, false) => 0,
        };
        let used = since.min(most);
        self.average_ns = self.average_ns - self.average_ns / AVERAGE + used;
        self.spent_ns += used;
        self.off_ns += if self.is_off() { passed_ns } else { 0 };
        used
    }

    pub(super) fn is_off(&self) -> bool {
        self.grip.is_off()
    }
}
