//! What an agent hears of who used the GPU.

/// Where use is measured.
pub trait Meter {
    /// So much time has passed, and the process was on the GPU or kept off it.
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        let _ = (pid, on, ns);
    }

    /// Brings all of it up to this moment, or, when that is not needed, to one a little earlier, which costs less.
    fn refresh(&mut self, to_the_moment: bool) {
        let _ = to_the_moment;
    }

    /// Hears what would not be said any more when the window ends.
    fn glance(&mut self) {}

    /// How often it wants to; none if nothing is lost.
    fn glance_every_ns(&self) -> Option<u64> {
        None
    }

    /// Time for which the process has used the GPU so far, ns; none when it is not known (any more).
    fn used_ns(&mut self, pid: u32) -> Option<u64>;

    /// Whether what it has used lately is from samples, where its use is otherwise logged.
    fn is_sampled(&self, pid: u32) -> bool {
        let _ = pid;
        false
    }

    /// How often it has come onto the GPU; none where nobody counts that.
    fn switches(&self, pid: u32) -> Option<u64> {
        let _ = pid;
        None
    }

    /// The longest time for which it has been off the GPU since this was asked last, ns; none where that is not known.
    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        let _ = pid;
        None
    }

    /// The longest time for which it has been on the GPU at a stretch between the last two times that this was brought up to
    /// the moment, ns; none where that is not known.
    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        let _ = pid;
        None
    }

    /// How often something may have come onto the GPU without being told of, so far.
    fn gaps(&self) -> u64 {
        0
    }

    /// How many channel groups of it have been on the GPU; 0 where nobody counts that.
    fn contexts(&self, pid: u32) -> usize {
        let _ = pid;
        0
    }

    /// The process has gone.
    fn forget(&mut self, pid: u32) {
        let _ = pid;
    }

    /// What has gone wrong or right since this was asked last, for the log.
    fn trouble(&mut self) -> Option<String> {
        None
    }
}

impl<M: Meter + ?Sized> Meter for Box<M> {
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        (**self).passed(pid, on, ns);
    }

    fn refresh(&mut self, to_the_moment: bool) {
        (**self).refresh(to_the_moment);
    }

    fn glance(&mut self) {
        (**self).glance();
    }

    fn glance_every_ns(&self) -> Option<u64> {
        (**self).glance_every_ns()
    }

    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        (**self).used_ns(pid)
    }

    fn is_sampled(&self, pid: u32) -> bool {
        (**self).is_sampled(pid)
    }

    fn switches(&self, pid: u32) -> Option<u64> {
        (**self).switches(pid)
    }

    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        (**self).longest_away_ns(pid)
    }

    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        (**self).longest_stay_ns(pid)
    }

    fn gaps(&self) -> u64 {
        (**self).gaps()
    }

    fn contexts(&self, pid: u32) -> usize {
        (**self).contexts(pid)
    }

    fn forget(&mut self, pid: u32) {
        (**self).forget(pid);
    }

    fn trouble(&mut self) -> Option<String> {
        (**self).trouble()
    }
}
