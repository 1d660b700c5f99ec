//! Programs on one NVIDIA GPU, divided by the service, against the driver's own turns. Takes root.

use std::time::Duration;

use forebay::Kind;
use forebay_proto::wire::Class;

use super::{MEASURED, Row, SETTLED, below};
use crate::sharing::{Actor, Stage, quantile, rounds};

/// Lengths of the saturating programs' kernels, µs.
const KERNELS: [u64; 4] = [100, 1000, 5000, 20_000];
const SHARES: [[u32; 4]; 3] = [[40, 30, 20, 10], [10, 20, 30, 40], [97, 1, 1, 1]];
/// Allowed distance from a share, in points of what a program does alone.
const POINTS: f64 = 1.5;
/// Total throughput over the driver's own.
const GAIN: f64 = 1.08;
/// Period of the interactive program, ms.
const PERIOD_MS: u64 = 5;

/// A stage with the service that divides the GPU, or with nothing but the driver.
fn stage(served: bool) -> Result<Stage, String> {
    Stage::with(served, &["--gpu", "0"])
}

struct Lengths {
    rounds: [u32; 4],
    /// Items a second of each, alone.
    alone: [f64; 4],
}

/// How a program does alone.
fn alone(rounds: u32) -> Result<f64, String> {
    let stage = stage(false)?;
    let a = stage.program_of(Kind::Cuda, rounds, None)?;
    stage.watch(&[&a], SETTLED, |_| {});
    Ok(stage.watch(&[&a], MEASURED, |_| {})[0].rate)
}

fn lengths() -> Result<Lengths, String> {
    let mut l = Lengths { rounds: [0; 4], alone: [0.0; 4] };
    for (i, us) in KERNELS.into_iter().enumerate() {
        l.rounds[i] = rounds(Kind::Cuda, us)?;
        l.alone[i] = alone(l.rounds[i])?;
    }
    Ok(l)
}

fn shares(l: &Lengths, rows: &mut Vec<Row>) -> Result<(), String> {
    let run = |percent: Option<[u32; 4]>| -> Result<[f64; 4], String> {
        let stage = stage(percent.is_some())?;
        let all: Vec<Actor> =
            l.rounds.iter().map(|r| stage.program_of(Kind::Cuda, *r, None)).collect::<Result<_, _>>()?;
        for (a, p) in all.iter().zip(percent.into_iter().flatten()) {
            stage.set(a, Class::Custom(p * 10_000))?;
        }
        let all: Vec<&Actor> = all.iter().collect();
        stage.watch(&all, SETTLED, |_| {});
        let got = stage.watch(&all, MEASURED, |_| {});
        Ok([0, 1, 2, 3].map(|i| got[i].rate / l.alone[i]))
    };
    let default = run(None)?;
    for percent in SHARES {
        let got = run(Some(percent))?;
        let off = |got: [f64; 4]| (0..4).map(|i| (got[i] * 100.0 - f64::from(percent[i])).abs()).fold(0.0, f64::max);
        let name = percent.map(|p| p.to_string()).join(":");
        let row =
            Row::new(format!("cuda, shares {name}: farthest from its share of what it does alone"), "points", None);
        rows.push(below(Row { ours: Some(off(got)), ..row }.peer("default", Some(off(default))), POINTS, "points"));
        let (ours, theirs) = (got.iter().sum::<f64>(), default.iter().sum::<f64>());
        let row = Row::new(format!("cuda, shares {name}: total, in GPUs"), "GPUs", Some(ours));
        let row = row.peer("default", Some(theirs));
        let ratio = ours / theirs;
        rows.push(Row { ratio: Some(ratio), target: format!("≥ {GAIN}"), met: Some(ratio >= GAIN), ..row });
    }
    Ok(())
}

/// Latencies of a program with kernels of 100 µs, beside a saturating one or alone; and the other's rate.
fn beside(l: &Lengths, served: bool, period_ms: Option<u64>, hog: Option<u32>) -> Result<(f64, f64, f64), String> {
    let stage = stage(served)?;
    let hog = hog.map(|r| stage.program_of(Kind::Cuda, r, None)).transpose()?;
    let first = stage.program_of(Kind::Cuda, l.rounds[0], period_ms)?;
    if served {
        stage.set(&first, Class::Interactive)?;
        hog.iter().try_for_each(|h| stage.set(h, Class::Background))?;
    }
    let all: Vec<&Actor> = std::iter::once(&first).chain(&hog).collect();
    stage.watch(&all, SETTLED, |_| {});
    let s = stage.watch(&all, 2 * MEASURED, |_| {});
    let us: Vec<f64> = s[0].latencies_ms.iter().map(|ms| ms * 1e3).collect();
    Ok((quantile(&us, 0.5), quantile(&us, 0.99), s.get(1).map_or(0.0, |h| h.rate)))
}

fn interactive(l: &Lengths, rows: &mut Vec<Row>) -> Result<(), String> {
    let run = |served, hog| beside(l, served, Some(PERIOD_MS), hog);
    let (alone, default, ours) = (run(false, None)?, run(false, Some(l.rounds[2]))?, run(true, Some(l.rounds[2]))?);
    let row = |what: &str, get: fn(&(f64, f64, f64)) -> f64| {
        let case = format!("cuda, kernels of 100 µs every {PERIOD_MS} ms beside ones of 5 ms: {what}");
        let row = Row::new(case, "µs", Some(get(&ours)));
        row.peer("default", Some(get(&default))).peer("alone", Some(get(&alone)))
    };
    rows.push(row("median", |v| v.0));
    // The plain figure is 320 µs on an H200, where it takes 158 alone: twice, that is.
    let p99 = row("p99", |v| v.1);
    let ratio = ours.1 / alone.1;
    rows.push(Row { ratio: Some(ratio), target: "≤ 2.03 times alone".into(), met: Some(ratio <= 2.03), ..p99 });
    let other =
        Row::new("cuda, the saturating one beside it", "items/s", Some(ours.2)).peer("default", Some(default.2));
    let ratio = ours.2 / default.2;
    rows.push(Row { ratio: Some(ratio), target: "≥ 0.97".into(), met: Some(ratio >= 0.97), ..other });
    Ok(())
}

/// All of it.
pub fn run(rows: &mut Vec<Row>) -> Result<(), String> {
    // Says at once what stands against it.
    drop(stage(true)?);
    std::thread::sleep(Duration::from_millis(200));
    let l = lengths()?;
    shares(&l, rows)?;
    interactive(&l, rows)
}
