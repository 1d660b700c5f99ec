//! What a copy costs, by size: measured at powers of two, straight lines between.

use forebay_hal::{Device, Direction, Method};
use serde::{Deserialize, Serialize};

/// Smallest size with a point of its own: 8 B.
const FIRST: u32 = 3;
/// Largest: 1 GiB.
const LAST: u32 = 30;
/// Most points of a curve.
pub const MAX_POINTS: usize = (LAST - FIRST + 1) as usize;
/// No copy is believed to take longer, ns; bounds what a stored curve may say.
const MAX_NS: u64 = 3_600_000_000_000;

/// What a copy takes, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Half of all copies take less.
    pub median: u64,
    /// Few take more: the slowest of those measured at calibration.
    pub tail: u64,
}

/// Cost against size. Larger copies never cost less.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Curve {
    points: Vec<Cost>,
}

impl Curve {
    /// The size of point `i`, bytes.
    pub fn size(i: usize) -> u64 {
        1 << (FIRST as usize + i.min(MAX_POINTS - 1))
    }

    /// The last point that is not above `bytes`, which lies before another one; none beyond the last.
    pub(super) fn below(bytes: u64) -> Option<usize> {
        let i = bytes.max(1).ilog2().saturating_sub(FIRST) as usize;
        (i + 1 < MAX_POINTS).then_some(i)
    }

    /// The point that stands for `bytes`: the power of two from which it is least far.
    pub fn nearest(bytes: u64) -> usize {
        let bytes = bytes.clamp(1 << FIRST, 1 << LAST);
        let below = bytes.ilog2();
        // Beyond the geometric mean of two sizes the upper one is nearer.
        let above = u128::from(bytes).pow(2) > 1u128 << (2 * below + 1);
        ((below + u32::from(above)).min(LAST) - FIRST) as usize
    }

    /// A curve through `points`, the first of which is for 8 B and each next one for twice as much.
    pub fn new(mut points: Vec<Cost>) -> Self {
        points.truncate(MAX_POINTS);
        let mut least = Cost { median: MAX_NS, tail: MAX_NS };
        for p in points.iter_mut().rev() {
            // A point above a larger size's is noise; and nothing takes no time at all.
            least = Cost { median: p.median.clamp(1, least.median), tail: p.tail.clamp(1, least.tail) };
            *p = Cost { median: least.median, tail: least.tail.max(least.median) };
        }
        Curve { points }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Sizes measured and what they took.
    pub fn points(&self) -> impl Iterator<Item = (u64, Cost)> + '_ {
        self.points.iter().enumerate().map(|(i, c)| (Curve::size(i), *c))
    }

    /// What `bytes` take: between two points in proportion, beyond the last one at its rate.
    #[inline]
    pub fn cost(&self, bytes: u64) -> Cost {
        let Some(last) = self.points.len().checked_sub(1) else { return Cost { median: MAX_NS, tail: MAX_NS } };
        let i = (bytes.max(1).ilog2().saturating_sub(FIRST) as usize).min(last);
        let (a, below) = (Curve::size(i), self.points[i]);
        if bytes <= a {
            return below;
        }
        // To divide by a power of two is no division.
        let shift = a.trailing_zeros();
        if i == last {
            let whole = |v: u64| ((u128::from(v) * u128::from(bytes)) >> shift).min(u128::from(MAX_NS)) as u64;
            // Halves of the last point are start-up cost, as far as anybody knows; of large copies there is little.
            return Cost { median: whole(below.median), tail: whole(below.tail) };
        }
        let above = self.points[i + 1];
        let between = |x: u64, y: u64| x + ((u128::from(y - x) * u128::from(bytes - a)) >> shift) as u64;
        Cost { median: between(below.median, above.median), tail: between(below.tail, above.tail) }
    }

    /// The curve with another cost at point `i`; as it was if there is no such point.
    pub fn with(&self, i: usize, cost: Cost) -> Curve {
        let mut points = self.points.clone();
        if let Some(p) = points.get_mut(i) {
            *p = cost;
            // Where a neighbour contradicts, the newer figure is right.
            points[..i].iter_mut().for_each(|p| p.median = p.median.min(cost.median));
            points[i + 1..].iter_mut().for_each(|p| p.median = p.median.max(cost.median));
            points[i + 1..].iter_mut().for_each(|p| p.tail = p.tail.max(cost.tail));
        }
        Curve::new(points)
    }
}

/// Where the host's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Host {
    /// In page-locked memory of the device ([`super::Engine::pinned`]).
    Pinned,
    /// Anywhere.
    Pageable,
}

impl Host {
    /// Both.
    pub const ALL: [Host; 2] = [Host::Pinned, Host::Pageable];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Host::Pinned => "pinned",
            Host::Pageable => "pageable",
        }
    }
}

/// A way by which a piece goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// From where the bytes are.
    Direct(Method),
    /// Through a ring of page-locked buffers and the device's engine.
    Staged,
}

impl Way {
    /// All ways.
    pub const ALL: [Way; 4] =
        [Way::Direct(Method::Engine), Way::Direct(Method::Mapped), Way::Direct(Method::Kernel), Way::Staged];

    /// The name in reports and in stored curves.
    pub fn name(self) -> &'static str {
        match self {
            Way::Direct(m) => m.name(),
            Way::Staged => "staged",
        }
    }

    /// Whether it is but a copy within the host's memory by threads of the program: of few bytes too short for some clocks.
    pub fn is_copy_by_host(self, device: &dyn Device) -> bool {
        device.info().host_memory || device.plain_copy().is_some_and(|m| self == Way::Direct(m))
    }

    /// The one of a device by which all of the host's cores copy: where those are what its kernels run on.
    pub fn by_all_cores(device: &dyn Device) -> Option<Way> {
        (device.info().is_cpu && device.methods().contains(&Method::Kernel)).then_some(Way::Direct(Method::Kernel))
    }

    /// Those that a device has.
    pub fn of(device: &dyn Device) -> impl Iterator<Item = Way> + '_ {
        Way::ALL.into_iter().filter(|w| match w {
            Way::Direct(m) => device.methods().contains(m),
            Way::Staged => true,
        })
    }

    /// Whether it can take bytes from there: kernels cannot reach pageable memory, and pinned memory needs no ring.
    pub fn serves(self, host: Host) -> bool {
        match self {
            Way::Direct(Method::Kernel) => host == Host::Pinned,
            Way::Staged => host == Host::Pageable,
            Way::Direct(_) => true,
        }
    }
}

/// One measured curve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// By which way.
    pub way: Way,
    /// In which direction.
    pub direction: Direction,
    /// From or to which memory.
    pub host: Host,
    /// What it takes.
    pub curve: Curve,
}

/// What splitting a transfer over engine and mapping gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Together {
    /// Size of the whole transfer, bytes.
    pub bytes: u64,
    /// Time of the split transfer over that of the engine alone, in thousandths.
    pub permille: u64,
}

/// Everything that calibration found out about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Curves {
    /// All curves; of each way, direction and memory at most one.
    pub all: Vec<Measured>,
    /// What engine and mapping gain together, by direction; empty where they cannot go at the same time.
    pub together: [Vec<Together>; 2],
    /// What each further copy of a batch adds, ns, by direction.
    pub further: [u64; 2],
    /// The way that takes all of the host's cores ([`Way::by_all_cores`]).
    pub all_cores: Option<Way>,
}

impl Curves {
    /// What a split transfer of `bytes` takes over one by the engine alone, in thousandths: the worse of what was measured
    /// at the sizes around it.
    pub fn together(&self, direction: Direction, bytes: u64) -> Option<u64> {
        let all = &self.together[direction as usize];
        let below = all.iter().filter(|t| t.bytes <= bytes).max_by_key(|t| t.bytes)?;
        let above = all.iter().filter(|t| t.bytes >= bytes).min_by_key(|t| t.bytes).unwrap_or(below);
        Some(below.permille.max(above.permille))
    }

    /// The place of a curve in [`Curves::all`].
    pub fn position(&self, way: Way, direction: Direction, host: Host) -> Option<usize> {
        self.all.iter().position(|m| (m.way, m.direction, m.host) == (way, direction, host))
    }

    /// The curve of a way, if it was measured.
    pub fn get(&self, way: Way, direction: Direction, host: Host) -> Option<&Curve> {
        self.position(way, direction, host).map(|i| &self.all[i].curve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(median: u64) -> Cost {
        Cost { median, tail: 2 * median }
    }

    #[test]
    fn between_points_cost_is_in_proportion_and_beyond_the_last_at_its_rate() {
        let c = Curve::new(vec![cost(100), cost(200), cost(400)]);
        assert_eq!([1, 8, 12, 16, 24, 32, 64].map(|b| c.cost(b).median), [100, 100, 150, 200, 300, 400, 800]);
        assert_eq!(c.cost(12).tail, 300);
        assert!(Curve::default().cost(8).median > 1_000_000_000);
    }

    #[test]
    fn noise_does_not_make_a_larger_copy_cheaper() {
        let c = Curve::new(vec![cost(500), cost(100), cost(300)]);
        assert_eq!(c.points().map(|p| p.1.median).collect::<Vec<_>>(), [100, 100, 300]);
    }

    #[test]
    fn the_nearest_point_is_nearest_in_proportion() {
        assert_eq!([1, 8, 11, 12, 16, 22, 23, u64::MAX].map(Curve::nearest), [0, 0, 0, 1, 1, 1, 2, MAX_POINTS - 1]);
    }

    proptest! {
        #[test]
        fn cost_grows_with_size_and_the_tail_is_not_below_the_median(
            points in proptest::collection::vec((0u64..1 << 40, 0u64..1 << 40), 0..MAX_POINTS + 3),
            changed in any::<(usize, u64, u64)>(),
            mut sizes in proptest::collection::vec(any::<u64>(), 2..20),
        ) {
            let curve = Curve::new(points.into_iter().map(|(median, tail)| Cost { median, tail }).collect());
            let changed = curve.with(changed.0 % MAX_POINTS, Cost { median: changed.1, tail: changed.2 });
            sizes.sort_unstable();
            for c in [curve, changed] {
                for pair in sizes.windows(2) {
                    let (a, b) = (c.cost(pair[0]), c.cost(pair[1]));
                    prop_assert!(a.median <= b.median && a.tail <= b.tail && a.median <= a.tail && a.median > 0);
                }
            }
        }
    }
}
