//! When a process was on a GPU and when it was kept off it, as far back as samples may be about.

use std::collections::VecDeque;

/// So far back is remembered: a driver's period, and what a sample may be late.
pub const KEPT_NS: u64 = 3_000_000_000;
/// Most stretches that are remembered.
const MAX_SPANS: usize = 512;

/// Stretches of time on the GPU and off it, by turns; the last one ends now.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    spans: VecDeque<(bool, u64)>,
    all_ns: u64,
}

impl Spans {
    /// So much time has passed since.
    pub fn push(&mut self, on: bool, ns: u64) {
        match self.spans.back_mut() {
            Some((last, span)) if *last == on => *span = span.saturating_add(ns),
            _ => self.spans.push_back((on, ns)),
        }
        self.all_ns = self.all_ns.saturating_add(ns);
        while let Some(&(_, first)) = self.spans.front()
            && (self.all_ns - first.min(self.all_ns) >= KEPT_NS || self.spans.len() > MAX_SPANS)
        {
            self.spans.pop_front();
            self.all_ns = self.spans.iter().fold(0, |all, (_, ns)| all.saturating_add(*ns));
        }
    }

    /// Of the `ns` that ended `age_ns` ago: the time on the GPU, and all that is remembered.
    pub fn within(&self, age_ns: u64, ns: u64) -> (u64, u64) {
        let (from, to) = (age_ns, age_ns.saturating_add(ns));
        let (mut on_ns, mut all_ns, mut begin) = (0, 0, 0u64);
        for &(on, span) in self.spans.iter().rev() {
            let end = begin.saturating_add(span);
            let part = end.min(to).saturating_sub(begin.max(from));
            all_ns += part;
            on_ns += if on { part } else { 0 };
            if end >= to {
                break;
            }
            begin = end;
        }
        (on_ns, all_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_stretch_of_the_past_is_told_apart() {
        let mut s = Spans::default();
        assert_eq!(s.within(0, 100), (0, 0));
        for (on, ns) in [(true, 10), (true, 20), (false, 40), (true, 5)] {
            s.push(on, ns);
        }
        assert_eq!(s.spans.len(), 3);
        // 30 on, 40 off, 5 on, now.
        assert_eq!(s.within(0, 5), (5, 5));
        assert_eq!(s.within(0, 15), (5, 15));
        assert_eq!(s.within(3, 10), (2, 10));
        assert_eq!(s.within(10, 20), (0, 20));
        assert_eq!(s.within(40, 10), (5, 10));
        assert_eq!(s.within(0, u64::MAX), (35, 75));
        assert_eq!(s.within(75, 10), (0, 0));
        assert_eq!(s.within(u64::MAX, u64::MAX), (0, 0));
    }

    #[test]
    fn what_is_long_past_is_forgotten() {
        let mut s = Spans::default();
        (0..100_000u64).for_each(|i| s.push(i % 2 == 0, 1_000_000));
        assert!(s.spans.len() <= MAX_SPANS);
        assert_eq!(s.within(0, 1_000_000_000).1, MAX_SPANS as u64 * 1_000_000);
        let mut s = Spans::default();
        (0..1000u64).for_each(|i| s.push(i % 2 == 0, 100_000_000));
        assert_eq!(s.within(0, KEPT_NS), (KEPT_NS / 2, KEPT_NS));
        assert!(s.spans.len() <= 32);
        s.push(true, u64::MAX);
        s.push(false, u64::MAX);
        assert_eq!(s.within(0, 10), (0, 10));
    }
}
