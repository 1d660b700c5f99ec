//! Programs on one NVIDIA GPU that know nothing of Forebay, divided by the service, against the driver's own turns. Takes root.

use std::time::Duration;

use forebay::Kind;

use super::{Part, Row, below};
use crate::sharing::plain::clock_ns;
use crate::sharing::progress::{self, Progress, farthest, passed_on};
use crate::sharing::{Actor, Stage, number_of_gpu, plain_rounds, quantile};

/// Lengths of the saturating programs' kernels, µs.
const KERNELS: [u64; 4] = [100, 1000, 5000, 20_000];
/// Shares in percent, and whose kernels (of those above) each program has; Proteus's figure 5 is the last one.
const CASES: [(&[u32], &[usize]); 4] = [
    (&[40, 30, 20, 10], &[0, 1, 2, 3]),
    (&[10, 20, 30, 40], &[0, 1, 2, 3]),
    (&[97, 1, 1, 1], &[0, 1, 2, 3]),
    (&[25, 25, 25, 10, 10, 5], &[1; 6]),
];
/// Allowed distance from a share, in points of what a program does alone, in any window of this length.
const POINTS: f64 = 1.5;
const WINDOW: Duration = Duration::from_secs(2);
/// Total throughput over the driver's own.
const GAIN: f64 = 1.08;
/// By then the time of one that rests is the others', ns.
const PASSED_ON_NS: u64 = 200_000_000;
/// As much of it at least.
const PASSED_ON: f64 = 0.9;
/// The service's windows are so long together, ms (docs/scheduling.md).
const ROUND_MS: f64 = 80.0;
/// Period of the interactive program, ms.
const PERIOD: &str = "5";
/// An interactive program that comes back at once: bursts that its reserve lasts for, and rests in which that grows again, ms.
const BURST: [&str; 2] = ["400", "1600"];

/// A stage with the service that divides the GPU, or with nothing but the driver.
pub fn stage(served: bool) -> Result<Stage, String> {
    Stage::with(served, &["--gpu", &number_of_gpu().to_string()])
}

/// Where the programs work, and for how long.
#[derive(Clone, Copy)]
pub struct Place {
    device: Kind,
    /// There is a service. Without one the figures are the driver's on both sides.
    served: bool,
    /// Before anything counts, and how long it does.
    settled: Duration,
    measured: Duration,
}

/// The programs' kernels.
struct Lengths {
    rounds: [u32; 4],
    /// Items a second of each, alone.
    alone: [f64; 4],
}

/// All of it, in parts that find out anew how long kernels are.
pub fn parts() -> [Part; 3] {
    let part = |name: &str, run: fn(Place, &Lengths, &mut Vec<Row>) -> Result<(), String>| {
        Part::of_rows(format!("cuda: {name}"), move |rows| {
            let place = Place::new(Kind::Cuda);
            run(place, &place.lengths()?, rows)
        })
    };
    [
        part("shares", Place::shares),
        part("one that rests", Place::resting),
        part("interactive programs", Place::interactive),
    ]
}

/// Everybody's progress over a stretch of time, and when that was.
type Watched = (Vec<Progress>, (u64, u64));

impl Place {
    pub fn new(device: Kind) -> Self {
        Place { device, served: true, settled: Duration::from_secs(2), measured: Duration::from_secs(8) }
    }

    /// Without a service, and so little of everything that it only shows that it works.
    pub fn brief(device: Kind) -> Self {
        Place { device, served: false, settled: Duration::from_millis(100), measured: Duration::from_millis(600) }
    }

    fn watched(self, stage: &Stage, all: &[Actor], time: Duration) -> Watched {
        let named: Vec<&Actor> = all.iter().collect();
        stage.watch(&named, self.settled, |_| {});
        let from = clock_ns();
        stage.watch(&named, time, |_| {});
        let to = clock_ns();
        // The last line tells of the end.
        std::thread::sleep(Duration::from_millis(150));
        (all.iter().map(|a| a.progress().0).collect(), (from, to))
    }

    fn lengths(self) -> Result<Lengths, String> {
        let mut l = Lengths { rounds: [0; 4], alone: [0.0; 4] };
        for (i, us) in KERNELS.into_iter().enumerate() {
            eprint!("\rsharing: kernels of {us} µs alone    ");
            l.rounds[i] = plain_rounds(self.device, us)?;
            let stage = stage(false)?;
            let a = [stage.plain(self.device, l.rounds[i], &[], &[])?];
            let (all, (from, to)) = self.watched(&stage, &a, self.measured / 4);
            l.alone[i] = all[0].rate(from, to);
        }
        eprintln!();
        Ok(l)
    }

    fn shares(self, l: &Lengths, rows: &mut Vec<Row>) -> Result<(), String> {
        let run = |who: &[usize], percent: Option<&[u32]>| -> Result<Watched, String> {
            let stage = stage(percent.is_some() && self.served)?;
            let mut all = Vec::new();
            for (i, n) in who.iter().enumerate() {
                let share = percent.map(|p| p[i].to_string());
                let class: Vec<&str> = share.iter().flat_map(|s| ["--share", s]).collect();
                all.push(stage.plain(self.device, l.rounds[*n], &[], &class)?);
            }
            Ok(self.watched(&stage, &all, self.measured))
        };
        let device = self.device.name();
        let window = WINDOW.min(self.measured / 4).as_nanos() as u64;
        for (percent, who) in CASES {
            let name = percent.iter().map(u32::to_string).collect::<Vec<_>>().join(":");
            eprintln!("sharing: {name}");
            let alone: Vec<f64> = who.iter().map(|n| l.alone[*n]).collect();
            let due: Vec<f64> = percent.iter().map(|p| f64::from(*p)).collect();
            let (got, default) = (run(who, Some(percent))?, run(who, None)?);
            let off = |(all, time): &Watched| farthest(all, &alone, &due, *time, window);
            let total = |(all, (from, to)): &Watched| progress::parts(all, &alone, *from, *to).iter().sum::<f64>();
            let case = format!("{device}, shares {name}: farthest from its share of what it does alone, worst 2 s");
            let row = Row::new(case, "points", off(&got)).peer("default", off(&default));
            rows.push(below(row, POINTS, "points"));
            let row = Row::new(format!("{device}, shares {name}: total, in GPUs"), "GPUs", Some(total(&got)));
            rows.push(row.peer("default", Some(total(&default))).at_least("default", GAIN));
        }
        Ok(())
    }

    /// One of four rests now and then.
    fn resting(self, l: &Lengths, rows: &mut Vec<Row>) -> Result<(), String> {
        eprintln!("sharing: one that rests");
        let (percent, alone) = ([40, 30, 20, 10], [l.alone[2]; 4]);
        let run = |rests: bool, time: Duration| -> Result<_, String> {
            let stage = stage(self.served)?;
            let mut all = Vec::new();
            for (i, p) in percent.iter().enumerate() {
                let [work, rest] = [self.measured * 3 / 16, self.measured / 8].map(|t| t.as_millis().to_string());
                let options = ["--work-ms", &work, "--rest-ms", &rest, "--random"];
                let options = if rests && i == 0 { &options[..] } else { &[] };
                all.push(stage.plain(self.device, l.rounds[2], options, &["--share", &p.to_string()])?);
            }
            let (progress, (from, to)) = self.watched(&stage, &all, time);
            let mut rests = all[0].progress().1;
            rests.retain(|r| r.from > from && r.first < to);
            Ok((progress::parts(&progress, &alone, from, to), progress, rests))
        };
        let (had, ..) = run(false, self.measured / 2)?;
        let (_, progress, rests) = run(true, 2 * self.measured)?;
        let row = |what: &str, unit, value| {
            Row::new(format!("{}, one of four that rests: {what}", self.device.name()), unit, value)
        };
        let part = passed_on(&progress, &alone, &had, &rests, PASSED_ON_NS);
        let some = (!rests.is_empty()).then_some(part);
        rows.push(row("of its time, others have from 200 ms on", "of 1", some).above(PASSED_ON));
        let back = rests.iter().map(|r| (r.first - r.to) as f64 / 1e6).fold(0.0, f64::max);
        // Its first kernel and the one that is on the GPU have to end, too.
        let limit = ROUND_MS + 2.0 * KERNELS[2] as f64 / 1e3;
        rows.push(row("slowest first kernel after a rest", "ms", some.map(|_| back)).below(limit));
        Ok(())
    }

    /// Latencies of a program with kernels of 100 µs, µs, beside a saturating one with kernels of 20 ms or alone; and the
    /// other's part of what it does alone.
    fn beside(self, l: &Lengths, served: bool, options: &[&str], hog: bool) -> Result<(Vec<f64>, f64), String> {
        let stage = stage(served && self.served)?;
        let class = |c| if served { ["--class", c].to_vec() } else { Vec::new() };
        let mut all = Vec::new();
        if hog {
            all.push(stage.plain(self.device, l.rounds[3], &[], &class("background"))?);
        }
        let first = stage.plain(self.device, l.rounds[0], options, &class("interactive"))?;
        stage.watch(&[&first], self.settled, |_| {});
        let from = clock_ns();
        let s = stage.watch(&[&first], 2 * self.measured, |_| {});
        let rate = all.first().map_or(0.0, |h| h.progress().0.rate(from, clock_ns()) / l.alone[3]);
        Ok((s[0].latencies_ms.iter().map(|ms| ms * 1e3).collect(), rate))
    }

    fn interactive(self, l: &Lengths, rows: &mut Vec<Row>) -> Result<(), String> {
        eprintln!("sharing: interactive programs");
        let run = |served, hog| self.beside(l, served, &["--period-ms", PERIOD], hog);
        let (alone, default, ours) = (run(false, false)?, run(false, true)?, run(true, true)?);
        let p99 = |v: &(Vec<f64>, f64)| Some(quantile(&v.0, 0.99));
        let device = self.device.name();
        let case = format!("{device}, kernels of 100 µs every 3 to 7 ms beside ones of 20 ms");
        let row = |what: &str, q| {
            let of = |v: &(Vec<f64>, f64)| Some(quantile(&v.0, q));
            let row = Row::new(format!("{case}: {what}"), "µs", of(&ours));
            row.peer("default", of(&default)).peer("alone", of(&alone))
        };
        rows.push(row("median", 0.5));
        rows.push(row("p99", 0.99).below(320.0));
        // The figure above is an H200's, which takes 158 alone: twice, that is.
        rows.push(row("p99 against alone", 0.99).at_most("alone", 2.03));
        let other = Row::new(format!("{case}: what these have of the GPU"), "of 1", Some(ours.1));
        rows.push(other.peer("default", Some(default.1)).at_least("default", 0.97));

        let run = |served, hog| self.beside(l, served, &["--each", "--work-ms", BURST[0], "--rest-ms", BURST[1]], hog);
        let (alone, default, ours) = (run(false, false)?, run(false, true)?, run(true, true)?);
        let case =
            format!("{device}, kernels of 100 µs back to back (while the reserve lasts) beside ones of 20 ms: p99");
        let row = Row::new(case, "µs", p99(&ours)).peer("default", p99(&default)).peer("alone", p99(&alone));
        rows.push(row.at_most("alone", 1.2));
        Ok(())
    }

    /// All of it, in this process.
    pub fn run(self, rows: &mut Vec<Row>) -> Result<(), String> {
        let l = self.lengths()?;
        self.shares(&l, rows)?;
        self.resting(&l, rows)?;
        self.interactive(&l, rows)
    }
}
