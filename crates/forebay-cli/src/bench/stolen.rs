//! What a virtual machine's host took: of all that makes a figure doubtful the one thing that nothing in the machine can help.

/// All that the processors' time went to, and what of it the host gave to others, in the kernel's ticks.
#[derive(Clone, Copy)]
pub struct Ticks {
    all: u64,
    stolen: u64,
}

impl Ticks {
    /// Since the machine started; none where the kernel does not tell.
    pub fn now() -> Option<Ticks> {
        Self::of(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// From the first line of `/proc/stat` (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal. What guests had is in
    /// the first two.
    fn of(stat: &str) -> Option<Ticks> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line.split_ascii_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Ticks { all: ticks.iter().sum(), stolen: *ticks.get(7)? })
    }

    /// What the host took since then, percent.
    pub fn stolen_until(self, now: Ticks) -> Option<f64> {
        let all = now.all.checked_sub(self.all).filter(|n| *n > 0)?;
        Some(now.stolen.saturating_sub(self.stolen) as f64 / all as f64 * 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_took_is_a_part_of_all() {
        let before = Ticks::of("cpu  100 10 20 300 5 1 4 60 7 3\ncpu0 1 2 3\n").unwrap();
        assert_eq!((before.all, before.stolen), (500, 60));
        let after = Ticks::of("cpu  180 10 20 310 5 1 4 70 7 3\n").unwrap();
        assert_eq!(before.stolen_until(after), Some(10.0));
        assert_eq!(before.stolen_until(before), None, "no time has passed");
        assert!(["", "cpu0 1 2", "cpu  1 2 3", "cpu  1 2 3 4 5 6 7 x"].iter().all(|s| Ticks::of(s).is_none()));
        assert!(Ticks::now().is_some());
    }
}
