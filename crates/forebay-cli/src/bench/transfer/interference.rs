//! Transfers while the machine does something else, by ordinary streams and by real-time ones.
//!
//! Each stream makes a transfer every period, as a program that must answer in time does, and rests in between: a stream
//! that never rests would be measured against its own budget.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::Result;
use forebay::hal::Buffer;
use forebay::transfer::{Budget, Direction, Engine, Host, Pinned, RealTime, Stream, Way};

use super::load::{Load, Running};
use super::pictures::{STATS, under};
use super::ways;
use crate::bench::part::Found;
use crate::bench::schema::{Row, quantile};
use crate::plot;

/// A control message, a camera line, an image.
const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// Transfers of a case: all but one are below its p99.9.
const TRANSFERS: usize = 1000;
/// Shortest period, and how many times as long as a transfer it is.
const PERIOD: Duration = Duration::from_micros(300);
const REST: u32 = 3;
/// A real-time stream under load may be so much slower than without, in the slowest one of a thousand.
const STEADY: f64 = 1.5;

enum Either {
    Ordinary(Box<Stream>),
    RealTime(Box<RealTime>),
}

impl Either {
    fn once(&mut self, direction: Direction, memory: &Buffer, pinned: &mut Pinned, pageable: &mut [u8]) -> Result<()> {
        // Of both kinds of memory one is empty.
        match (self, direction, pageable.is_empty()) {
            (Either::Ordinary(s), Direction::ToDevice, true) => s.write(memory, 0, pinned),
            (Either::Ordinary(s), Direction::ToDevice, false) => s.write(memory, 0, pageable),
            (Either::Ordinary(s), Direction::ToHost, true) => s.read(memory, 0, pinned),
            (Either::Ordinary(s), Direction::ToHost, false) => s.read(memory, 0, pageable),
            (Either::RealTime(s), Direction::ToDevice, true) => s.write(memory, 0, pinned),
            (Either::RealTime(s), Direction::ToDevice, false) => s.write(memory, 0, pageable),
            (Either::RealTime(s), Direction::ToHost, true) => s.read(memory, 0, pinned),
            (Either::RealTime(s), Direction::ToHost, false) => s.read(memory, 0, pageable),
        }
    }
}

/// Median, p99.9 and slowest, µs.
type Times = [f64; 3];

/// By `way`; without one as it is planned for the period as its deadline.
fn measure(
    engine: &Arc<Engine>,
    way: Option<Way>,
    host: Host,
    direction: Direction,
    bytes: usize,
    real_time: bool,
) -> Result<Times> {
    let mut stream = if real_time {
        let mut s = engine.real_time(Budget::default())?;
        s.stream().force(way)?;
        s.stream().set_deadline(way.is_none().then_some(PERIOD));
        Either::RealTime(Box::new(s))
    } else {
        let mut s = engine.stream()?;
        s.force(way)?;
        s.set_deadline(way.is_none().then_some(PERIOD));
        Either::Ordinary(Box::new(s))
    };
    let memory = engine.memory(bytes)?;
    let (mut pinned, mut pageable) = match host {
        Host::Pinned => (engine.pinned(bytes)?, Vec::new()),
        Host::Pageable => (engine.pinned(1)?, vec![1; bytes]),
    };
    if real_time {
        pinned.lock();
    }
    let mut samples = Vec::with_capacity(TRANSFERS);
    for i in 0..TRANSFERS + 20 {
        let begun = Instant::now();
        stream.once(direction, &memory, &mut pinned, &mut pageable)?;
        let took = begun.elapsed();
        if i >= 20 {
            samples.push(took.as_secs_f64() * 1e6);
        }
        std::thread::sleep(PERIOD.saturating_sub(took).max(took.min(Duration::from_millis(5)) * REST));
    }
    Ok([0.5, 0.999, 1.0].map(|q| quantile(samples.clone(), q)))
}

/// A case: way (or as planned), memory, direction, size.
type Case = (Option<Way>, Host, Direction, usize);

/// Every case, for ordinary and real-time streams.
fn all(engine: &Arc<Engine>, cases: &[Case], what: &str) -> Result<Vec<[Times; 2]>> {
    let mut out = Vec::new();
    for (i, &(way, host, direction, bytes)) in cases.iter().enumerate() {
        eprint!("\rtransfer: {} {what}: {} of {}     ", engine.device().info().kind, i + 1, cases.len());
        let of = |real_time| measure(engine, way, host, direction, bytes, real_time);
        out.push([of(false)?, of(true)?]);
    }
    eprintln!();
    Ok(out)
}

/// Measures and draws all of it.
pub fn run(engine: &Arc<Engine>, found: &mut Found) -> std::result::Result<(), String> {
    let text = |e: forebay::Error| e.to_string();
    let device = engine.device();
    let kind = device.info().kind;
    let pinned = ways(&**device, Host::Pinned).into_iter().map(|w| (Some(w), Host::Pinned));
    let by: Vec<_> = pinned.chain([(Some(Way::Staged), Host::Pageable), (None, Host::Pinned)]).collect();
    let each = |(w, h)| Direction::ALL.into_iter().flat_map(move |d| SIZES.map(move |s| (w, h, d, s)));
    let cases: Vec<Case> = by.into_iter().flat_map(each).collect();
    let scheduling = engine.real_time(Budget::default()).map_err(text)?.protection();
    eprintln!("transfer: real-time streams are {}, staging locked: {}", scheduling.scheduling, scheduling.locked);
    let idle = all(engine, &cases, "alone").map_err(text)?;
    for load in Load::ALL {
        let running = Running::start(load)?;
        let loaded = all(engine, &cases, &format!("under {}", load.name())).map_err(text)?;
        drop(running);
        for (((way, _, direction, bytes), idle), loaded) in cases.iter().zip(&idle).zip(&loaded) {
            let way = way.map_or("as planned".into(), |w| format!("by {}", w.name()));
            let what = format!("{} {way} {}", plot::bytes(*bytes as f64), direction.name());
            for (i, stat) in STATS.into_iter().enumerate() {
                let row = Row::new(under(kind.name(), &what, load.name(), stat), "µs", Some(loaded[1][i]))
                    .peer("alone", Some(idle[1][i]))
                    .peer("ordinary", Some(loaded[0][i]))
                    .peer("ordinary, alone", Some(idle[0][i]));
                found.rows.push(if stat == "p99.9" { row.at_most("alone", STEADY) } else { row });
            }
        }
    }
    found.plots.extend(super::pictures::of(&found.rows));
    Ok(())
}
