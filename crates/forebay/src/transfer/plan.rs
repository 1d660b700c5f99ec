//! Which way a transfer goes, and in which pieces. Pure: what is measured comes in as curves, what is in flight as numbers.
//!
//! Rules:
//! 1. A transfer goes by the way with the least expected time; one with a deadline by the way with the least time that few
//!    copies exceed, because a deadline is missed by the slow ones.
//!    Where the engine takes at most a twentieth longer it is preferred: it occupies no processor, and so small a difference
//!    is not sure. What caches may hold goes by all of the host's cores only if they are faster than any other way by
//!    more than a seventh: it takes them from everybody, and what they gain depends most on whose caches have the bytes.
//! 2. Whatever is queued on the device delays every way alike: a mapped copy, too, waits for those before it.
//! 3. The mapping has one writer at a time. While another stream uses it, and for memory that has none, other ways are
//!    taken.
//! 4. A transfer is split over two ways, engine and mapped, when both together were measured to be faster by more than a
//!    seventh; each gets the part that lets them end at the same time. Less than the smallest size at which they were
//!    measured together is not split.
//! 5. Neighbours in a batch become one transfer. A batch goes by the way with the least total.
//! 6. The pieces of a plan cover the transfer once, in order.

use forebay_hal::{Direction, Method};
use smallvec::SmallVec;

use super::curve::{Cost, Curve, Curves, Host, MAX_POINTS, Way};

/// What every device has.
const ENGINE: Way = Way::Direct(Method::Engine);
/// The engine may take this part longer than the best way.
const NEAR: u64 = 20;
/// All cores must be faster by more than this part of their time: a seventh of what the other way takes.
const ALL_CORES: u64 = 6;
/// Copies up to this size may find in a cache what was used before: after one that wrote past the caches a plain copy of 2 MiB
/// takes twice as long, and one by two cores is faster after another one by two.
pub(super) const CACHED: u64 = 16 << 20;
/// Boundaries of a split lie on multiples of this.
const SPLIT_GRAIN: u64 = 4096;

/// One transfer.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Which way.
    pub direction: Direction,
    /// How much.
    pub bytes: u64,
    /// Where the host's bytes are.
    pub host: Host,
    /// Time until it must have arrived, ns.
    pub deadline: Option<u64>,
    /// Time until the device has done what is queued before it, ns.
    pub backlog: u64,
    /// Whether the mapping is not to be had: another stream uses it, or this memory has none.
    pub no_mapping: bool,
}

impl Request {
    /// A transfer with nothing else in flight.
    pub fn new(direction: Direction, bytes: u64, host: Host) -> Self {
        Request { direction, bytes, host, deadline: None, backlog: 0, no_mapping: false }
    }
}

/// A part of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins, from the transfer's beginning.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// How it goes.
    pub way: Way,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Pieces, which begin together: asynchronous ones first.
    pub pieces: SmallVec<[Piece; 2]>,
    /// What it is expected to take, the backlog included.
    pub cost: Cost,
    /// What the best single way would take, the backlog included, ns.
    pub alone: u64,
    /// No way is believed to meet the deadline.
    pub late: bool,
}

/// Plans one transfer.
pub fn plan(r: &Request, curves: &Curves) -> Plan {
    let whole = |way| Piece { offset: 0, bytes: r.bytes, way };
    let measured = |way: Way| curves.get(way, r.direction, r.host).map(|c| c.cost(r.bytes));
    let open = |way: Way| way.serves(r.host) && !(r.no_mapping && way == Way::Direct(Method::Mapped));
    let wanted = |c: Cost| if r.deadline.is_some() { c.tail } else { c.median };
    let ways = Way::ALL.into_iter().filter(|w| open(*w));
    let best =
        ways.filter_map(|w| measured(w).map(|c| (w, c))).min_by_key(|(w, c)| weighed(*w, wanted(*c), r.bytes, curves));
    let engine = measured(ENGINE).map(|c| (ENGINE, c));
    let near = |b: &(Way, Cost)| engine.filter(|e| wanted(e.1) <= wanted(b.1).saturating_add(wanted(b.1) / NEAR));
    // Nothing known: the way that every device has.
    let (way, alone) = best.map_or((ENGINE, Cost::default()), |b| near(&b).unwrap_or(b));
    let split = split(r, curves).filter(|(_, c)| wanted(*c) < wanted(alone) / 7 * 6);
    let (pieces, cost) = match split {
        Some((at, cost)) if open(Way::Direct(Method::Mapped)) => {
            let first = Piece { offset: 0, bytes: at, way: Way::Direct(Method::Engine) };
            let second = Piece { offset: at, bytes: r.bytes - at, way: Way::Direct(Method::Mapped) };
            (SmallVec::from_slice(&[first, second]), cost)
        }
        _ => (SmallVec::from_slice(&[whole(way)]), alone),
    };
    let alone = alone.median.saturating_add(r.backlog);
    let cost = Cost { median: cost.median.saturating_add(r.backlog), tail: cost.tail.saturating_add(r.backlog) };
    Plan { pieces, alone, late: r.deadline.is_some_and(|d| cost.tail > d), cost }
}

/// What a way that takes so long for so much counts as (rule 1).
fn weighed(way: Way, ns: u64, bytes: u64, curves: &Curves) -> u64 {
    if curves.all_cores == Some(way) && bytes <= CACHED { ns.saturating_add(ns / ALL_CORES) } else { ns }
}

/// Engine and mapping at once: where to cut, and what that takes.
fn split(r: &Request, curves: &Curves) -> Option<(u64, Cost)> {
    let together = curves.together(r.direction, r.bytes)?;
    let at = cut(r, curves)?;
    let alone = curves.get(Way::Direct(Method::Engine), r.direction, r.host)?.cost(r.bytes);
    let of = |v: u64| (u128::from(v) * u128::from(together) / 1000).min(u128::from(u64::MAX)) as u64;
    Some((at, Cost { median: of(alone.median), tail: of(alone.tail) }))
}

/// Where to cut for engine and mapping to end together.
pub(super) fn cut(r: &Request, curves: &Curves) -> Option<u64> {
    let engine = curves.get(Way::Direct(Method::Engine), r.direction, r.host)?;
    let mapped = curves.get(Way::Direct(Method::Mapped), r.direction, r.host)?;
    // The engine's time grows with the cut, the other's falls: halve the interval until it is a grain.
    let (mut low, mut high) = (0, r.bytes / SPLIT_GRAIN);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        let at = middle * SPLIT_GRAIN;
        if engine.cost(at).median < mapped.cost(r.bytes - at).median { low = middle } else { high = middle }
    }
    let at = low * SPLIT_GRAIN;
    (at > 0 && at < r.bytes).then_some(at)
}

/// What [`plan`] answers to requests without deadline or anything in flight, looked up instead of computed: between two
/// points all costs are straight lines, so a way that is best at both is best between them, and where the best ones differ
/// they cross once. (A third one that is best in the middle is passed over: it gains little there.)
pub struct Table {
    ways: [[[Option<Crossing>; MAX_POINTS]; 2]; 2],
}

/// One way below a size, another from there on.
#[derive(Clone, Copy)]
struct Crossing {
    below: Way,
    from: u64,
    above: Way,
}

impl Table {
    /// The table of these curves.
    pub fn new(curves: &Curves) -> Self {
        let mut ways = [[[None; MAX_POINTS]; 2]; 2];
        for (d, h, i) in (0..2).flat_map(|d| (0..2).flat_map(move |h| (0..MAX_POINTS).map(move |i| (d, h, i)))) {
            if curves.together(Direction::ALL[d], Curve::size(i + 1)).is_some() {
                // It may have to be split.
                continue;
            }
            let at = |bytes| plan(&Request::new(Direction::ALL[d], bytes, Host::ALL[h]), curves).pieces[0].way;
            let (mut low, mut high) = (Curve::size(i), Curve::size(i + 1));
            let (below, above) = (at(low), at(high));
            while below != above && low + 1 < high {
                let middle = low + (high - low) / 2;
                if at(middle) == below { low = middle } else { high = middle }
            }
            ways[d][h][i] = Some(Crossing { below, from: if below == above { 0 } else { high }, above });
        }
        Table { ways }
    }

    /// The one way that a transfer goes; none if it must be planned.
    pub fn way(&self, direction: Direction, bytes: u64, host: Host) -> Option<Way> {
        let c = self.ways[direction as usize][host as usize][Curve::below(bytes)?].as_ref()?;
        Some(if bytes < c.from { c.below } else { c.above })
    }
}

/// One transfer of a batch: places on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset in the host's memory.
    pub host: u64,
    /// Offset in the device's.
    pub device: u64,
    /// Length.
    pub bytes: u64,
}

/// Neighbours on both sides become one (rule 5); nothing is reordered, since ranges may overlap.
pub fn merge(ranges: impl IntoIterator<Item = Range>) -> SmallVec<[Range; 16]> {
    let mut out: SmallVec<[Range; 16]> = SmallVec::new();
    for r in ranges.into_iter().filter(|r| r.bytes > 0) {
        match out.last_mut() {
            Some(l)
                if l.host.checked_add(l.bytes) == Some(r.host) && l.device.checked_add(l.bytes) == Some(r.device) =>
            {
                l.bytes = l.bytes.saturating_add(r.bytes);
            }
            _ => out.push(r),
        }
    }
    out
}

/// The way by which all of a (merged) batch goes, and what that takes.
pub fn batch(r: &Request, ranges: &[Range], curves: &Curves) -> (Way, Cost) {
    let further = curves.further[r.direction as usize];
    let total = |way: Way| {
        let curve = curves.get(way, r.direction, r.host)?;
        let each = ranges.iter().map(|p| curve.cost(p.bytes));
        let sum = each.clone().fold(Cost::default(), |a, c| Cost {
            median: a.median.saturating_add(c.median),
            tail: a.tail.saturating_add(c.tail),
        });
        if way == Way::Direct(Method::Mapped) {
            return Some((way, sum));
        }
        // Commands are issued one behind the other and awaited once. The largest is paid in full; of the others what
        // their bytes take, and their issue.
        let fixed = curve.cost(1);
        let largest = each.max_by_key(|c| c.median).unwrap_or_default();
        let n = ranges.len().saturating_sub(1) as u64;
        let rest = |sum: u64, one: u64, fixed: u64| {
            one.saturating_add((sum - one).saturating_sub(n * fixed)).saturating_add(n * further)
        };
        let median = rest(sum.median, largest.median, fixed.median);
        Some((way, Cost { median, tail: rest(sum.tail, largest.tail, fixed.tail).max(median) }))
    };
    let open = |way: &Way| {
        let mapped = *way == Way::Direct(Method::Mapped);
        way.serves(r.host) && *way != Way::Staged && !(mapped && r.no_mapping)
    };
    let wanted = |c: &Cost| if r.deadline.is_some() { c.tail } else { c.median };
    let ways = Way::ALL.into_iter().filter(open).filter_map(total);
    let bytes = ranges.iter().fold(0u64, |sum, p| sum.saturating_add(p.bytes));
    let best = ways.min_by_key(|(w, c)| weighed(*w, wanted(c), bytes, curves));
    best.unwrap_or((Way::Direct(Method::Engine), Cost::default()))
}

#[cfg(test)]
mod tests {
    use super::super::curve::{Measured, Together};
    use super::*;
    use proptest::prelude::*;

    const MAPPED: Way = Way::Direct(Method::Mapped);

    /// `start` ns and then `per_kib` ns a KiB; one in a thousand takes `slow` times as long.
    fn line(way: Way, start: u64, per_kib: u64, slow: u64) -> Measured {
        let cost = |i| start + Curve::size(i) * per_kib / 1024;
        let points = (0..25).map(|i| Cost { median: cost(i), tail: slow * cost(i) }).collect();
        Measured { way, direction: Direction::ToDevice, host: Host::Pinned, curve: Curve::new(points) }
    }

    /// As of a GPU: small copies are the processor's, large ones the engine's.
    fn curves() -> Curves {
        let all = vec![line(ENGINE, 7000, 18, 2), line(MAPPED, 1200, 60, 20)];
        Curves { all, further: [1000; 2], ..Curves::default() }
    }

    fn together(permille: u64) -> [Vec<Together>; 2] {
        let all = vec![Together { bytes: 1 << 20, permille }];
        [all.clone(), all]
    }

    fn request(bytes: u64) -> Request {
        Request::new(Direction::ToDevice, bytes, Host::Pinned)
    }

    fn ways(p: &Plan) -> Vec<Way> {
        p.pieces.iter().map(|p| p.way).collect()
    }

    #[test]
    fn every_size_goes_by_the_way_that_is_faster_for_it() {
        let c = curves();
        assert_eq!(ways(&plan(&request(64), &c)), [MAPPED]);
        assert_eq!(ways(&plan(&request(1 << 20), &c)), [ENGINE]);
        // They cross at 138 KiB, and are near each other from 126 on.
        assert_eq!(ways(&plan(&request(120 << 10), &c)), [MAPPED]);
        assert_eq!(ways(&plan(&request(135 << 10), &c)), [ENGINE]);
        assert_eq!(ways(&plan(&request(145 << 10), &c)), [ENGINE]);
    }

    #[test]
    fn all_cores_must_be_worth_it() {
        const KERNEL: Way = Way::Direct(Method::Kernel);
        // Of one core 60 ns a KiB; of two 53, which is an eighth less, then 50, a sixth.
        let by = |per_kib, all_cores| {
            let all = vec![line(ENGINE, 0, 60, 2), line(KERNEL, 0, per_kib, 2)];
            Curves { all, further: [0; 2], all_cores, ..Curves::default() }
        };
        let way = |c: &Curves| {
            let r = request(4 << 20);
            let range = Range { host: 0, device: 0, bytes: r.bytes };
            let late = plan(&Request { deadline: Some(1), ..r }, c);
            let ways = [plan(&r, c).pieces[0].way, late.pieces[0].way, batch(&r, &[range], c).0];
            assert!(ways.iter().all(|w| *w == ways[0]), "{ways:?}");
            assert_eq!(Table::new(c).way(r.direction, r.bytes, r.host), Some(ways[0]));
            ways[0]
        };
        assert_eq!([53, 50].map(|n| way(&by(n, Some(KERNEL)))), [ENGINE, KERNEL]);
        assert_eq!(way(&by(53, None)), KERNEL, "one that takes nothing from anybody");
        // Caches have nothing of what is larger.
        let large = |bytes| plan(&request(bytes), &by(53, Some(KERNEL))).pieces[0].way;
        assert_eq!([CACHED, CACHED + 1].map(large), [ENGINE, KERNEL]);
        let table = Table::new(&by(53, Some(KERNEL)));
        assert_eq!(
            [CACHED, 2 * CACHED].map(|b| table.way(Direction::ToDevice, b, Host::Pinned)),
            [Some(ENGINE), Some(KERNEL)]
        );
    }

    #[test]
    fn a_deadline_is_judged_by_the_slow_copies() {
        let c = curves();
        // The mapped copy is faster as a rule, and far slower at times.
        assert_eq!(plan(&request(64), &c).pieces[0].way, MAPPED);
        let r = Request { deadline: Some(15_000), ..request(64) };
        let p = plan(&r, &c);
        assert_eq!((ways(&p), p.late), (vec![ENGINE], false));
        assert!(plan(&Request { deadline: Some(10_000), ..r }, &c).late);
        assert!(plan(&Request { backlog: 5_000, ..r }, &c).late, "what is queued before it delays it");
    }

    #[test]
    fn the_mapping_has_one_writer_at_a_time() {
        let mut c = curves();
        let r = Request { no_mapping: true, ..request(64) };
        assert_eq!(ways(&plan(&r, &c)), [ENGINE]);
        c.together = together(700);
        assert_eq!(ways(&plan(&Request { no_mapping: true, ..request(1 << 24) }, &c)), [ENGINE]);
    }

    #[test]
    fn a_transfer_is_split_where_that_was_measured_to_pay() {
        let mut c = curves();
        assert_eq!(ways(&plan(&request(1 << 24), &c)), [ENGINE], "never measured together");
        c.together = together(700);
        let p = plan(&request(1 << 24), &c);
        assert_eq!(ways(&p), [ENGINE, MAPPED]);
        // 18 and 60 ns a KiB: the engine gets 60/78 of it.
        assert!((p.pieces[0].bytes as f64 / (1 << 24) as f64 - 60.0 / 78.0).abs() < 0.02, "{p:?}");
        assert_eq!(ways(&plan(&request((1 << 20) - 1), &c)), [ENGINE], "smaller than any that was measured");
        // They hinder each other.
        c.together = together(950);
        assert_eq!(ways(&plan(&request(1 << 24), &c)), [ENGINE]);
    }

    #[test]
    fn a_batch_of_small_copies_pays_each_wait_once() {
        let c = curves();
        let ranges: Vec<_> = (0..100).map(|i| Range { host: i * 64, device: i * 128, bytes: 64 }).collect();
        // 100 × 1.2 µs by the processor; 7 µs and 99 × 1 µs by the engine.
        assert_eq!(batch(&request(0), &ranges, &c).0, ENGINE);
        assert_eq!(batch(&request(0), &ranges[..5], &c).0, MAPPED);
        let near = |i: u64| Range { host: 10 + i, device: 50 + i, bytes: 1 };
        let merged = merge((0..8).map(near).chain([Range { host: 18, device: 99, bytes: 3 }]));
        assert_eq!(merged[..], [Range { host: 10, device: 50, bytes: 8 }, Range { host: 18, device: 99, bytes: 3 }]);
    }

    #[test]
    fn without_curves_everything_goes_by_engine() {
        assert_eq!(ways(&plan(&request(5), &Curves::default())), [ENGINE]);
        assert_eq!(batch(&request(0), &[], &Curves::default()).0, ENGINE);
    }

    fn any_curves() -> impl Strategy<Value = Curves> {
        let points = proptest::collection::vec((1u64..1 << 36, 1u64..1 << 36), 0..28);
        let one = (0..4usize, any::<bool>(), any::<bool>(), points).prop_map(|(w, d, h, points)| Measured {
            way: Way::ALL[w],
            direction: Direction::ALL[usize::from(d)],
            host: Host::ALL[usize::from(h)],
            curve: Curve::new(points.into_iter().map(|(median, tail)| Cost { median, tail }).collect()),
        });
        let together = (0u64..1 << 30, 0u64..5000).prop_map(|(bytes, permille)| Together { bytes, permille });
        let together = proptest::collection::vec(together, 0..3);
        (proptest::collection::vec(one, 0..12), together, 0u64..100_000).prop_map(|(all, t, f)| Curves {
            all,
            together: [t.clone(), t],
            further: [f; 2],
            all_cores: None,
        })
    }

    proptest! {
        #[test]
        fn any_plan_covers_the_transfer_once_by_ways_that_serve_it(
            curves in any_curves(),
            bytes in prop_oneof![0u64..1 << 20, any::<u64>()],
            (back, pageable, busy, deadline) in any::<(bool, bool, bool, Option<u64>)>(),
            backlog in any::<u64>(),
        ) {
            let r = Request {
                direction: Direction::ALL[usize::from(back)],
                bytes,
                host: Host::ALL[usize::from(pageable)],
                deadline,
                backlog,
                no_mapping: busy,
            };
            let p = plan(&r, &curves);
            let mut at = 0;
            for piece in &p.pieces {
                prop_assert_eq!(piece.offset, at);
                prop_assert!(piece.way.serves(r.host));
                at += piece.bytes;
            }
            prop_assert_eq!(at, bytes);
            prop_assert!(p.cost.median <= p.cost.tail);
            // No single way that may be taken is expected to be faster by more than a twentieth (or, with a deadline,
            // faster at its worst).
            for way in Way::ALL.into_iter().filter(|w| w.serves(r.host) && !(busy && *w == MAPPED)) {
                if let Some(c) = curves.get(way, r.direction, r.host) {
                    let c = c.cost(bytes);
                    let (ours, theirs) =
                        if deadline.is_some() { (p.cost.tail, c.tail) } else { (p.cost.median, c.median) };
                    prop_assert!(ours <= theirs.saturating_add(theirs / 20 + 1).saturating_add(backlog));
                }
            }
        }

        #[test]
        fn the_table_says_what_planning_says(curves in any_curves(), bytes in 0u64..1 << 31, which in 0usize..4) {
            let (direction, host) = (Direction::ALL[which / 2], Host::ALL[which % 2]);
            let planned = plan(&Request::new(direction, bytes, host), &curves);
            if let Some(way) = Table::new(&curves).way(direction, bytes, host) {
                prop_assert!(planned.pieces.len() == 1);
                // At measured sizes: the best one, or one that costs the same. Between them: one of the two ends'.
                let size = Curve::size(Curve::below(bytes).unwrap());
                let best = |bytes| plan(&Request::new(direction, bytes, host), &curves).pieces[0].way;
                prop_assert!(way == best(size) || way == best(2 * size));
                let at_size = Table::new(&curves).way(direction, size, host).unwrap();
                let cost = curves.get(at_size, direction, host).map_or(0, |c| c.cost(size).median);
                let planned = plan(&Request::new(direction, size, host), &curves).cost.median;
                prop_assert!(curves.all.is_empty() || cost == planned || cost == 0);
            }
        }

        #[test]
        fn merging_keeps_every_byte_in_its_place(
            ranges in proptest::collection::vec((0u64..40, 0u64..40, 0u64..9), 0..20),
        ) {
            let ranges = ranges.into_iter().map(|(host, device, bytes)| Range { host, device, bytes });
            let apply = |all: &[Range]| {
                let mut to = [0u8; 64];
                for r in all {
                    (0..r.bytes).for_each(|i| to[(r.device + i) as usize] = (r.host + i) as u8 + 1);
                }
                to
            };
            let all: Vec<_> = ranges.collect();
            prop_assert_eq!(apply(&all), apply(&merge(all.iter().copied())));
        }
    }
}
