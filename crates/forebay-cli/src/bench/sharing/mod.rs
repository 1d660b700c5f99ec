//! `forebay bench sharing`: real programs on one device through credit, against what the operating system does by itself.

mod gpu;
mod torch;

use std::time::{Duration, Instant};

use forebay::Kind;
use forebay_proto::client::Account;
use forebay_proto::wire::Class;
use forebayd::service::World as _;
use forebayd::system::System;

use super::part::{self, Part};
use super::schema::Row;
use crate::sharing::file::CHUNK;
use crate::sharing::{Stage, quantile};

/// Shares in percent, and the tasks' lengths, µs; Proteus's figure 5 is the last one.
const CASES: [(&str, &[u32], &[u64]); 4] = [
    ("40:30:20:10", &[40, 30, 20, 10], &[100, 1000, 5000, 20_000]),
    ("10:20:30:40", &[10, 20, 30, 40], &[100, 1000, 5000, 20_000]),
    ("97:1:1:1", &[97, 1, 1, 1], &[1000, 1000, 1000, 1000]),
    ("25:25:25:10:10:5", &[25, 25, 25, 10, 10, 5], &[1000, 1000, 1000, 1000, 1000, 1000]),
];
/// Allowed distance from a share, in points.
const POINTS: f64 = 3.0;
const MEASURED: Duration = Duration::from_secs(5);
const SETTLED: Duration = Duration::from_secs(1);
/// What [`MANY`] programs do on a GPU is known after so long.
const KNOWN: Duration = Duration::from_secs(12);
/// Programs while the service's own cost is measured.
const MANY: usize = 10;

/// With a target that is a limit of our figure itself.
fn below(mut row: Row, limit: f64, unit: &str) -> Row {
    row.target = format!("≤ {limit} {unit}");
    row.ratio = row.ours.map(|v| v / limit);
    row.met = row.ours.map(|v| v <= limit);
    row
}

fn shares(device: Kind, rows: &mut Vec<Row>) -> Result<(), String> {
    for (name, percent, tasks) in CASES {
        let mut got = Vec::new();
        for served in [true, false] {
            let stage = Stage::new(served)?;
            let mut all = Vec::new();
            for (p, task) in percent.iter().zip(tasks) {
                let a = stage.program(device, *task, None)?;
                if served {
                    stage.set(&a, Class::Custom(p * 10_000))?;
                }
                all.push(a);
            }
            let all: Vec<_> = all.iter().collect();
            stage.watch(&all, SETTLED, |_| {});
            got.push(stage.watch(&all, MEASURED, |_| {}));
        }
        let sum = |n: usize| got[n].iter().map(|s| s.cores).sum::<f64>();
        let part = |n: usize, i: usize| got[n][i].cores / sum(n) * 100.0;
        let worst = (0..percent.len()).map(|i| (part(0, i) - f64::from(percent[i])).abs()).fold(0.0, f64::max);
        let default = (0..percent.len()).map(|i| (part(1, i) - f64::from(percent[i])).abs()).fold(0.0, f64::max);
        let case = format!("{}, shares {name}: farthest from its share", device.name());
        rows.push(below(Row::new(case, "points", Some(worst)).peer("default", Some(default)), POINTS, "points"));
        let case = format!("{}, shares {name}: cores in use", device.name());
        rows.push(Row::new(case, "cores", Some(sum(0))).peer("default", Some(sum(1))));
    }
    Ok(())
}

fn interactive(device: Kind, rows: &mut Vec<Row>) -> Result<(), String> {
    let run = |served: bool, hog: bool| -> Result<(f64, f64, f64), String> {
        let stage = Stage::new(served)?;
        let first = stage.program(device, 4000, Some(20))?;
        let hog = hog.then(|| stage.program(device, 500, None)).transpose()?;
        if let Some(hog) = hog.as_ref().filter(|_| served) {
            stage.set(&first, Class::Interactive)?;
            stage.set(hog, Class::Background)?;
        }
        let all: Vec<_> = std::iter::once(&first).chain(&hog).collect();
        stage.watch(&all, SETTLED, |_| {});
        let s = stage.watch(&all, 2 * MEASURED, |_| {});
        let l = &s[0].latencies_ms;
        Ok((quantile(l, 0.5), quantile(l, 0.99), s.get(1).map_or(0.0, |h| h.rate)))
    };
    let (alone, default, ours) = (run(false, false)?, run(false, true)?, run(true, true)?);
    for (what, get) in [("median", 0), ("p99", 1)] {
        let of = |v: (f64, f64, f64)| Some(if get == 0 { v.0 } else { v.1 });
        let row = Row::new(format!("{}, interactive beside a hog: {what}", device.name()), "ms", of(ours));
        rows.push(row.peer("default", of(default)).peer("alone", of(alone)));
    }
    let row = Row::new(format!("{}, the hog beside it", device.name()), "items/s", Some(ours.2));
    rows.push(row.peer("default", Some(default.2)));
    Ok(())
}

/// PTask's table 3: an encrypted file beside programs that take everything; and its table 4: two files whose programs have
/// different nice values.
fn encrypted_file(
    device: Kind,
    stage: &dyn Fn(bool) -> Result<Stage, String>,
    rows: &mut Vec<Row>,
) -> Result<(), String> {
    let mb = |rate: f64| rate * CHUNK as f64 / 1e6;
    let beside = |served: bool, hogs: usize| -> Result<f64, String> {
        let stage = stage(served)?;
        let file = stage.encrypted_file(device)?;
        let hogs = (0..hogs).map(|_| stage.program(device, 1000, None)).collect::<Result<Vec<_>, _>>()?;
        if served {
            // As much as it would have with one other.
            stage.set(&file, Class::Custom(500_000))?;
        }
        let all: Vec<_> = std::iter::once(&file).chain(&hogs).collect();
        stage.watch(&all, SETTLED, |_| {});
        Ok(mb(stage.watch(&all, MEASURED, |_| {})[0].rate))
    };
    let alone = beside(false, 0)?;
    for hogs in [1, 2, 4] {
        let (default, ours) = (beside(false, hogs)?, beside(true, hogs)?);
        let case = format!("{}, table 3: an encrypted file that has half, beside {hogs} hogs", device.name());
        let row = Row::new(case, "MB/s", Some(ours)).peer("default", Some(default)).peer("alone", Some(alone));
        rows.push(Row { ratio: Some(ours / alone), ..row });
    }
    for (a, b) in [(0, 0), (0, 5), (0, 10), (-5, 5)] {
        let stage = stage(true)?;
        let files = [stage.encrypted_file(device)?, stage.encrypted_file(device)?];
        stage.set_nice(&files[0], a)?;
        stage.set_nice(&files[1], b)?;
        let all = [&files[0], &files[1]];
        stage.watch(&all, SETTLED, |_| {});
        let s = stage.watch(&all, MEASURED, |_| {});
        let case = format!("{}, table 4: two encrypted files, nice {a} and {b}", device.name());
        // A step of nice is a factor of 1.25.
        let due = 1.25f64.powi(i32::from(b) - i32::from(a));
        let row = Row::new(case, "MB/s", Some(mb(s[0].rate))).peer("the other", Some(mb(s[1].rate)));
        rows.push(Row { ratio: Some(s[0].rate / s[1].rate), target: format!("by weight {due:.2}"), ..row });
    }
    Ok(())
}

/// What asking and reading cost, in this process.
fn client(rows: &mut Vec<Row>) -> Result<(), String> {
    const N: u64 = 20_000_000;
    let stage = Stage::new(true)?;
    let text = |e: forebay_proto::client::Error| e.to_string();
    let session = stage.session("bench").map_err(text)?;
    let account = Account::cpu(&session).map_err(text)?;
    let best = |f: &dyn Fn()| {
        let one = || {
            let begun = Instant::now();
            f();
            begun.elapsed().as_secs_f64() * 1e9 / N as f64
        };
        (0..5).map(|_| one()).fold(f64::MAX, f64::min)
    };
    let take = best(&|| {
        for _ in 0..N {
            if std::hint::black_box(account.may()) {
                account.took(1);
            }
        }
    });
    rows.push(below(Row::new("a credit taken, uncontended", "ns", Some(take)), 20.0, "ns"));
    let load = best(&|| {
        for _ in 0..N {
            std::hint::black_box(session.load(0));
        }
    });
    rows.push(below(Row::new("the global page read", "ns", Some(load)), 50.0, "ns"));
    let standing = best(&|| {
        for _ in 0..N {
            std::hint::black_box(account.standing());
        }
    });
    rows.push(below(Row::new("the private page read", "ns", Some(standing)), 50.0, "ns"));
    Ok(())
}

fn cost(device: Kind, stage: &Stage, rows: &mut Vec<Row>) -> Result<(), String> {
    let pid = stage.service_pid().ok_or("no service")?;
    let all: Vec<_> = (0..MANY).map(|_| stage.program(device, 1000, None)).collect::<Result<_, _>>()?;
    let all: Vec<_> = all.iter().collect();
    // A GPU is divided by turns once its programs were seen to fill them, which takes half a second of windows of each.
    stage.watch(&all, if device == Kind::Cuda { KNOWN } else { SETTLED }, |_| {});
    let used = || System::default().cpu_time_ns(pid).unwrap_or(0);
    let (before, begun) = (used(), Instant::now());
    std::thread::sleep(MEASURED);
    let percent = (used() - before) as f64 / begun.elapsed().as_nanos() as f64 * 100.0;
    let memory = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = memory.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<f64>().ok());
    rows.push(below(
        Row::new(
            format!("the service with {MANY} saturating programs on {}", device.name()),
            "% of a core",
            Some(percent),
        ),
        1.0,
        "%",
    ));
    let case = format!("the service's memory with {MANY} programs on {}", device.name());
    rows.push(below(Row::new(case, "MB", kib.map(|k| k * 1024.0 / 1e6)), 20.0, "MB"));
    Ok(())
}

/// What is measured on GPUs, on any device that is not the CPU's: without a service, and briefly.
fn try_out(device: Kind, rows: &mut Vec<Row>) -> Result<(), String> {
    gpu::Place::brief(device).run(rows)
}

/// All of it, on these kinds of device.
pub fn parts(device: Option<Kind>, quick: bool) -> Result<Vec<Part>, String> {
    let kinds = part::kinds(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda], device)?;
    if quick {
        return Ok(kinds.into_iter().map(|d| Part::of_rows(d.name(), move |rows| try_out(d, rows))).collect());
    }
    let mut parts = Vec::new();
    for d in kinds {
        let name = |what: &str| format!("{}: {what}", d.name());
        if d == Kind::Cuda {
            parts.extend(gpu::parts());
            parts.push(Part::of_rows(name("encrypted files"), move |rows| encrypted_file(d, &gpu::stage, rows)));
            parts.push(Part::of_rows(name("PyTorch"), torch::run_all));
            parts.push(Part::of_rows(name("what it costs"), move |rows| cost(d, &gpu::stage(true)?, rows)));
        } else if d == Kind::Cpu || device.is_some() || forebay::hal::discover(&[d]).0.iter().any(|d| d.info().is_cpu) {
            parts.push(Part::of_rows(name("shares"), move |rows| shares(d, rows)));
            parts.push(Part::of_rows(name("an interactive program"), move |rows| interactive(d, rows)));
            parts.push(Part::of_rows(name("encrypted files"), move |rows| encrypted_file(d, &Stage::new, rows)));
        }
    }
    parts.push(Part::of_rows("what it costs", |rows| {
        client(rows)?;
        cost(Kind::Cpu, &Stage::new(true)?, rows)
    }));
    Ok(parts)
}
