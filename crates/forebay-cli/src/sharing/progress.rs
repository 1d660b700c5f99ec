//! How programs got on, by what they said of it: rates over any stretch of time, and what became of the time of one that
//! rested.

/// How many items a program had done when.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// ns, and items by then; both only grow.
    points: Vec<(u64, u64)>,
}

/// A program rested: from when to when, and when its first item after that was done, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// Its last item before it was done.
    pub from: u64,
    /// It went on.
    pub to: u64,
    /// Its next item was done.
    pub first: u64,
}

impl Progress {
    /// So many were done by then.
    pub fn push(&mut self, at_ns: u64, items: u64) {
        if self.points.last().is_none_or(|l| l.0 < at_ns && l.1 <= items) {
            self.points.push((at_ns, items));
        }
    }

    /// Items by a time; between two points as if it went on evenly.
    fn by(&self, ns: u64) -> f64 {
        let next = self.points.partition_point(|p| p.0 <= ns);
        match (next.checked_sub(1).and_then(|i| self.points.get(i)), self.points.get(next)) {
            (Some(&(t0, n0)), Some(&(t1, n1))) => n0 as f64 + (n1 - n0) as f64 * (ns - t0) as f64 / (t1 - t0) as f64,
            (Some(&(_, n)), None) | (None, Some(&(_, n))) => n as f64,
            (None, None) => 0.0,
        }
    }

    /// Items a second.
    pub fn rate(&self, from: u64, to: u64) -> f64 {
        if to <= from { 0.0 } else { (self.by(to) - self.by(from)) / (to - from) as f64 * 1e9 }
    }
}

/// What programs got, in parts of what each does alone.
pub fn parts(all: &[Progress], alone: &[f64], from: u64, to: u64) -> Vec<f64> {
    all.iter().zip(alone).map(|(p, a)| p.rate(from, to) / a).collect()
}

/// How far any of them was from what was due to it (in hundredths of what it does alone), in the worst window of this length
/// between two times: points. None if no window is so short.
pub fn farthest(all: &[Progress], alone: &[f64], due: &[f64], (from, to): (u64, u64), window: u64) -> Option<f64> {
    let starts = (from..=to.checked_sub(window)?).step_by((window / 20).max(1) as usize);
    let off = |start| {
        let got = parts(all, alone, start, start + window);
        got.iter().zip(due).map(|(g, d)| (g * 100.0 - d).abs()).fold(0.0, f64::max)
    };
    starts.map(off).reduce(f64::max)
}

/// Of the part that the first one has when it works, how much the others have from `delay` on in its rests: the mean over its
/// rests between two times, and 0 without any. `had` is what each has while all work.
pub fn passed_on(all: &[Progress], alone: &[f64], had: &[f64], rests: &[Rest], delay: u64) -> f64 {
    let others = |parts: &[f64]| parts.iter().skip(1).sum::<f64>();
    let each: Vec<f64> = rests
        .iter()
        .filter(|r| r.to > r.from + 2 * delay)
        .map(|r| (others(&parts(all, alone, r.from + delay, r.to)) - others(had)) / had[0])
        .collect();
    if each.is_empty() { 0.0 } else { each.iter().sum::<f64>() / each.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Items of `ms` in the parts of each cycle that are named by (from, to), ms.
    fn working(cycle: u64, parts: &[(u64, u64)], item: u64, until: u64) -> Progress {
        let mut p = Progress::default();
        let (mut n, mut had) = (0, 0);
        for t in 0..until {
            if parts.iter().any(|(from, to)| (*from..*to).contains(&(t % cycle))) {
                had += 1;
                if had % item == 0 {
                    n += 1;
                    p.push((t + 1) * MS, n);
                }
            }
        }
        p
    }

    #[test]
    fn rates_are_those_of_any_stretch() {
        let p = working(1, &[(0, 1)], 5, 1000);
        for (from, to) in [(100, 200), (103, 907), (111, 112)] {
            assert!((p.rate(from * MS, to * MS) - 200.0).abs() < 1e-6);
        }
        assert_eq!(p.rate(7, 7), 0.0);
        assert_eq!(Progress::default().rate(0, 9), 0.0);
        let mut late = Progress::default();
        late.push(5, 3);
        // Neither time nor items go back.
        late.push(4, 9);
        late.push(6, 2);
        assert_eq!(late.points, [(5, 3)]);
    }

    #[test]
    fn the_worst_window_is_found() {
        let alone = [1000.0, 1000.0];
        let even = [working(100, &[(0, 60)], 1, 6000), working(100, &[(60, 100)], 1, 6000)];
        let whole = (1000 * MS, 6000 * MS);
        assert!(farthest(&even, &alone, &[60.0, 40.0], whole, 2000 * MS).unwrap() < 0.2);
        assert!((farthest(&even, &alone, &[50.0, 50.0], whole, 2000 * MS).unwrap() - 10.0).abs() < 0.2);
        assert_eq!(farthest(&even, &alone, &[50.0, 50.0], whole, 6001 * MS), None);
        // One window of the second is missing: 40 ms of 2 s.
        let mut gap = even.clone();
        gap[1] = Progress::default();
        even[1].points.iter().filter(|p| !(3000 * MS..3100 * MS).contains(&p.0)).for_each(|&(t, n)| {
            gap[1].push(t, if t > 3100 * MS { n - 40 } else { n });
        });
        let worst = farthest(&gap, &alone, &[60.0, 40.0], whole, 2000 * MS).unwrap();
        assert!((1.8..2.2).contains(&worst), "{worst}");
    }

    #[test]
    fn what_one_leaves_is_seen_with_the_others() {
        let alone = [1000.0, 1000.0];
        // The first works for one second and rests for one; the other has all of that after 100 ms.
        let all = [working(2000, &[(0, 500)], 1, 8000), working(2000, &[(500, 1000), (1100, 2000)], 1, 8000)];
        let rests: Vec<Rest> =
            (0..3).map(|i| Rest { from: (1000 + 2000 * i) * MS, to: (2000 + 2000 * i) * MS, first: 0 }).collect();
        let had = [0.5, 0.5];
        assert!((passed_on(&all, &alone, &had, &rests, 200 * MS) - 1.0).abs() < 1e-2);
        // It takes that long: from the rest's beginning on it is a tenth less, of what was half.
        assert!((passed_on(&all, &alone, &had, &rests, 0) - 0.8).abs() < 1e-2);
        assert_eq!(passed_on(&all, &alone, &had, &[], 0), 0.0);
    }
}
