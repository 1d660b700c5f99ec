//! Random sequences of everything that streams can do, against memory that is followed by hand: whatever is under way, by whatever
//! way the next one goes, each byte is where one thread that does one thing after the other would have put it.

#[path = "../../forebay-hal/tests/stand_in/bytes.rs"]
mod given_out;
#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::{Buffer, Device, discover};
use forebay::transfer::curve::{Cost, Curve, Measured, Together};
use forebay::transfer::{Curves, Engine, Host, InFlight, Pinned, Range, Stream, Way};
use forebay::transfer::{Direction, Method};
use forebay::{Error, Kind};
use forebay_rm::fake::FakeRm;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// More than the staging ring holds.
const SIZE: usize = (2 << 20) + 4321;
/// Streams, each with its own memory.
const STREAMS: usize = 2;
const MOST_UNDER_WAY: usize = 70;

#[derive(Clone, Debug)]
enum Step {
    Write {
        at: usize,
        bytes: usize,
        pinned: bool,
        way: usize,
    },
    Read {
        at: usize,
        bytes: usize,
        pinned: bool,
        way: usize,
    },
    WriteBatch {
        ranges: Vec<(usize, usize, usize)>,
        pinned: bool,
        way: usize,
    },
    ReadBatch {
        ranges: Vec<(usize, usize, usize)>,
        pinned: bool,
        way: usize,
    },
    StartWrite {
        at: usize,
        bytes: usize,
    },
    StartRead {
        at: usize,
        bytes: usize,
    },
    /// Much is begun, and as much follows at once, as planned.
    Behind {
        at: usize,
        bytes: usize,
        shift: usize,
        reads: bool,
    },
    /// Of those that are under way, whichever.
    Finish(usize),
    /// Its memory is not wanted any more.
    Forget(usize),
    Copy {
        at: usize,
        to: usize,
        bytes: usize,
    },
    Relay {
        at: usize,
        to: usize,
        bytes: usize,
    },
    Deadline(Option<u64>),
    /// The stream is dropped, with all that is under way, and there is a new one.
    Anew,
}

fn bytes() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..300, 2 => 4000usize..4200, 2 => 0usize..100_000, 1 => 300_000usize..1_500_000]
}

fn place() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..200, 0usize..20_000, 0usize..500_000]
}

fn step() -> impl Strategy<Value = Step> {
    let ranges = || proptest::collection::vec((place(), place(), 0usize..9000), 0..6);
    let whole = || (place(), bytes(), any::<bool>(), 0usize..10);
    prop_oneof![
        3 => whole().prop_map(|(at, bytes, pinned, way)| Step::Write { at, bytes, pinned, way }),
        3 => whole().prop_map(|(at, bytes, pinned, way)| Step::Read { at, bytes, pinned, way }),
        1 => (ranges(), any::<bool>(), 0usize..10).prop_map(|(ranges, pinned, way)| Step::WriteBatch { ranges, pinned, way }),
        1 => (ranges(), any::<bool>(), 0usize..10).prop_map(|(ranges, pinned, way)| Step::ReadBatch { ranges, pinned, way }),
        3 => (place(), bytes()).prop_map(|(at, bytes)| Step::StartWrite { at, bytes }),
        3 => (place(), bytes()).prop_map(|(at, bytes)| Step::StartRead { at, bytes }),
        1 => (place(), 300_000usize..1_000_000, 0usize..300_000, any::<bool>())
            .prop_map(|(at, bytes, shift, reads)| Step::Behind { at, bytes, shift, reads }),
        2 => any::<usize>().prop_map(Step::Finish),
        1 => any::<usize>().prop_map(Step::Forget),
        1 => (place(), place(), bytes()).prop_map(|(at, to, bytes)| Step::Copy { at, to, bytes }),
        1 => (place(), place(), bytes()).prop_map(|(at, to, bytes)| Step::Relay { at, to, bytes }),
        1 => prop::option::of(0u64..2_000_000).prop_map(Step::Deadline),
        1 => Just(Step::Anew),
    ]
}

fn pattern(seed: u32, bytes: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9) | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as u8
    };
    (0..bytes).map(next).collect()
}

/// Whether the driver finds no memory now and then.
fn is_scarce() -> bool {
    std::env::var_os("STAND_IN_SCARCE").is_some()
}

/// Whatever finds no memory is tried again, where the driver has little.
fn tried<T>(mut f: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match f() {
            Err(Error::Device(e)) if e.is_out_of_memory() && is_scarce() => {}
            other => return other,
        }
    }
}

struct Lane {
    stream: Stream,
    memory: Buffer,
    model: Vec<u8>,
    /// With what a read is to bring, or what a write had.
    under_way: Vec<(InFlight, Vec<u8>)>,
    ways: Vec<Way>,
}

impl Lane {
    fn new(engine: &Arc<Engine>) -> Result<Lane, Error> {
        let ways = Way::of(&**engine.device()).collect();
        let (stream, memory) = (tried(|| engine.stream())?, tried(|| engine.memory(SIZE))?);
        let mut lane = Lane { stream, memory, model: pattern(1, SIZE), under_way: Vec::new(), ways };
        tried(|| lane.stream.write(&lane.memory, 0, &lane.model))?;
        Ok(lane)
    }

    /// The next transfer goes that way, or as planned.
    fn by(&mut self, way: usize, host: Host) {
        let way = self.ways.get(way).copied().filter(|w| w.serves(host));
        // There may have been no room for memory that is mapped.
        let unmapped = is_scarce() && !self.memory.is_mapped();
        let way = way.filter(|w| *w != Way::Direct(Method::Mapped) || !unmapped);
        self.stream.force(way).unwrap();
    }

    fn finish(&mut self, i: usize) -> Result<(), Error> {
        let (begun, want) = self.under_way.remove(i);
        let got = self.stream.finish(begun)?;
        assert!(got[..] == want[..], "{} B that were under way", want.len());
        Ok(())
    }

    fn room(&mut self) -> Result<(), Error> {
        while self.under_way.len() >= MOST_UNDER_WAY {
            self.finish(0)?;
        }
        Ok(())
    }
}

fn filled(engine: &Engine, data: &[u8]) -> Result<Pinned, Error> {
    let mut p = tried(|| engine.pinned(data.len().max(1)))?;
    p[..data.len()].copy_from_slice(data);
    Ok(p)
}

fn go(lanes: &mut [Lane], engines: &[Arc<Engine>], number: u32, which: usize, step: &Step) -> Result<(), Error> {
    let host = |pinned: bool| if pinned { Host::Pinned } else { Host::Pageable };
    let (first, second) = lanes.split_at_mut(1);
    let (lane, other) = if which == 0 { (&mut first[0], &mut second[0]) } else { (&mut second[0], &mut first[0]) };
    let engine = &engines[which];
    match *step {
        Step::Write { at, bytes, pinned, way } => {
            lane.by(way, host(pinned));
            let data = pattern(number, bytes);
            match pinned {
                true => tried(|| lane.stream.write(&lane.memory, at, &filled(engine, &data)?.part(0..bytes)))?,
                false => tried(|| lane.stream.write(&lane.memory, at, &data))?,
            }
            lane.model[at..at + bytes].copy_from_slice(&data);
        }
        Step::Read { at, bytes, pinned, way } => {
            lane.by(way, host(pinned));
            let mut got = vec![0xA5; bytes];
            if pinned {
                let mut p = filled(engine, &got)?;
                tried(|| lane.stream.read(&lane.memory, at, &mut p.part_mut(0..bytes)))?;
                got.copy_from_slice(&p[..bytes]);
            } else {
                tried(|| lane.stream.read(&lane.memory, at, &mut got))?;
            }
            let wrong = got.iter().zip(&lane.model[at..]).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "{bytes} B at {at}, pinned: {pinned}, way {:?}", lane.ways.get(way));
        }
        Step::WriteBatch { ref ranges, pinned, way } => {
            lane.by(way, host(pinned));
            let data = pattern(number, 600_000);
            let all: Vec<Range> = ranges.iter().map(|r| range(*r)).collect();
            match pinned {
                true => tried(|| lane.stream.write_batch(&lane.memory, &filled(engine, &data)?, &all))?,
                false => tried(|| lane.stream.write_batch(&lane.memory, &data, &all))?,
            }
            for &(host, at, n) in ranges {
                lane.model[at..at + n].copy_from_slice(&data[host..host + n]);
            }
        }
        Step::ReadBatch { ref ranges, pinned, way } => {
            lane.by(way, host(pinned));
            let mut want = vec![0xA5; 600_000];
            let all: Vec<Range> = ranges.iter().map(|r| range(*r)).collect();
            let mut got = want.clone();
            if pinned {
                let mut p = filled(engine, &got)?;
                tried(|| lane.stream.read_batch(&lane.memory, &mut p, &all))?;
                got.copy_from_slice(&p);
            } else {
                tried(|| lane.stream.read_batch(&lane.memory, &mut got, &all))?;
            }
            for &(host, at, n) in ranges {
                want[host..host + n].copy_from_slice(&lane.model[at..at + n]);
            }
            assert!(got == want, "a batch, pinned: {pinned}, way {:?}", lane.ways.get(way));
        }
        Step::StartWrite { at, bytes } => {
            lane.room()?;
            let data = pattern(number, bytes.max(1));
            let begun = tried(|| lane.stream.start_write(&lane.memory, at, filled(engine, &data)?))?;
            lane.model[at..at + data.len()].copy_from_slice(&data);
            lane.under_way.push((begun, data));
        }
        Step::StartRead { at, bytes } => {
            lane.room()?;
            let want = lane.model[at..at + bytes.max(1)].to_vec();
            let begun = tried(|| lane.stream.start_read(&lane.memory, at, engine.pinned(want.len())?))?;
            lane.under_way.push((begun, want));
        }
        Step::Behind { at, bytes, shift, reads } => {
            go(lanes, engines, number, which, &Step::StartWrite { at, bytes })?;
            let (at, pinned, way) = (at + shift, true, usize::MAX);
            let next =
                if reads { Step::Read { at, bytes, pinned, way } } else { Step::Write { at, bytes, pinned, way } };
            go(lanes, engines, !number, which, &next)?;
        }
        Step::Finish(i) if !lane.under_way.is_empty() => lane.finish(i % lane.under_way.len())?,
        Step::Forget(i) if !lane.under_way.is_empty() => drop(lane.under_way.remove(i % lane.under_way.len())),
        Step::Finish(_) | Step::Forget(_) => {}
        Step::Copy { at, to, bytes } => {
            let copied = tried(|| lane.stream.copy(&lane.memory, at, &lane.memory, to, bytes));
            let overlaps = bytes > 0 && at < to + bytes && to < at + bytes;
            if overlaps {
                assert!(copied.is_err());
                return Ok(());
            }
            copied?;
            lane.model.copy_within(at..at + bytes, to);
        }
        Step::Relay { at, to, bytes } => {
            lane.stream.force(None).unwrap();
            tried(|| lane.stream.relay(&lane.memory, at, &mut other.stream, &other.memory, to, bytes))?;
            other.model[to..to + bytes].copy_from_slice(&lane.model[at..at + bytes]);
        }
        Step::Deadline(ns) => lane.stream.set_deadline(ns.map(Duration::from_nanos)),
        Step::Anew => {
            let new = tried(|| engine.stream())?;
            let old = std::mem::replace(&mut lane.stream, new);
            // What it had begun ends before it does.
            lane.under_way.clear();
            drop(old);
        }
    }
    Ok(())
}

fn range((host, device, bytes): (usize, usize, usize)) -> Range {
    Range { host: host as u64, device: device as u64, bytes: bytes as u64 }
}

/// Few bytes go by the mapping, some by the engine or a kernel, many by both halves at once: whether or not that is so here.
fn curves(device: &dyn Device) -> Curves {
    let ways = [
        (Way::Direct(Method::Mapped), 100, 100),
        (Way::Direct(Method::Kernel), 3000, 60),
        (Way::Direct(Method::Engine), 5000, 40),
        (Way::Staged, 6000, 30),
    ];
    let has: Vec<Way> = Way::of(device).collect();
    let curve = |start: u64, kib: u64| {
        let at = |i: usize| start + kib * Curve::size(i) / 1024;
        Curve::new((0..24).map(|i| Cost { median: at(i), tail: at(i) }).collect())
    };
    let ends = || Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h)));
    let ways = ways.into_iter().filter(|(way, ..)| has.contains(way));
    let all = ways.flat_map(|(way, start, kib)| {
        let served = ends().filter(move |(_, host)| way.serves(*host));
        served.map(move |(direction, host)| Measured { way, direction, host, curve: curve(start, kib) })
    });
    let together = vec![Together { bytes: 256 << 10, permille: 700 }];
    Curves { all: all.collect(), together: [together.clone(), together], further: [100; 2], ..Curves::default() }
}

/// All steps, and what there is in the end.
fn case(
    devices: [&Arc<dyn Device>; 2],
    known: impl Fn(&dyn Device) -> Curves,
    steps: &[(usize, Step)],
) -> Result<(), Error> {
    // Anew, since they notice what is not so.
    let engines = devices.map(|d| Engine::with_curves(d.clone(), known(&**d)));
    let mut lanes = engines.iter().map(Lane::new).collect::<Result<Vec<_>, _>>()?;
    let done = all(&mut lanes, &engines, steps);
    if done.is_err() {
        // What came before is right, and whatever comes now says the same.
        for (lane, engine) in lanes.iter_mut().zip(&engines) {
            while !lane.under_way.is_empty() {
                lane.finish(0).map_err(|e| assert_lost(&e)).ok();
            }
            lane.stream.force(None).unwrap();
            let mut some = [0; 100];
            let tried = [
                lane.stream.write(&lane.memory, 0, &some[..]),
                lane.stream.read(&lane.memory, 0, &mut some[..]),
                lane.stream.copy(&lane.memory, 0, &lane.memory, 200, 100),
                filled(engine, &some).and_then(|p| lane.stream.start_write(&lane.memory, 0, p)).map(drop),
            ];
            tried.into_iter().for_each(|t| assert_lost(&t.unwrap_err()));
        }
    }
    done
}

fn assert_lost(e: &Error) {
    assert!(matches!(e, Error::Device(forebay::hal::Error::Lost { .. })), "{e}");
}

fn all(lanes: &mut [Lane], engines: &[Arc<Engine>], steps: &[(usize, Step)]) -> Result<(), Error> {
    for (i, (which, step)) in steps.iter().enumerate() {
        go(lanes, engines, i as u32 + 2, *which, step)?;
    }
    for lane in lanes {
        let mut whole = vec![0; SIZE];
        lane.stream.force(None).unwrap();
        tried(|| lane.stream.read(&lane.memory, 0, &mut whole))?;
        let wrong = whole.iter().zip(&lane.model).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "at the end");
        while !lane.under_way.is_empty() {
            lane.finish(0)?;
        }
    }
    Ok(())
}

/// With so many cases unless somebody asked for others.
fn config(cases: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(cases), failure_persistence: None, ..ProptestConfig::default() }
}

fn on(devices: &[Arc<dyn Device>], cases: u32) {
    for (a, b, known) in devices.iter().flat_map(|a| devices.iter().flat_map(move |b| [(a, b, true), (a, b, false)])) {
        let names = [a, b].map(|d| d.info().name.clone());
        let known = |d: &dyn Device| if known { curves(d) } else { Curves::default() };
        let steps = proptest::collection::vec((0..STREAMS, step()), 1..60);
        let run = TestRunner::new(config(cases)).run(&steps, |steps| {
            if let Err(e) = case([a, b], known, &steps) {
                panic!("{e}");
            }
            Ok(())
        });
        run.unwrap_or_else(|e| panic!("{names:?}: {e}"));
    }
}

fn found(kinds: &[Kind]) -> Vec<Arc<dyn Device>> {
    let (devices, missing) = discover(kinds);
    missing.iter().for_each(|(kind, why)| eprintln!("skipped: no {kind} device here: {why}"));
    devices
}

/// One command in so many faults, and the device is made anew.
#[test]
fn on_a_gpu_that_faults() {
    if !stand_in::is_here() {
        return stand_in::again_with("on_a_gpu_that_faults", &[("STAND_IN_FAULTS", "100"), ("STAND_IN_DELAYS", "1")]);
    }
    let rm = FakeRm::default();
    forebay::hal::cuda::use_rm(Arc::new(rm.clone()));
    let device = std::cell::RefCell::new(found(&[Kind::Cuda]).remove(0));
    let lost = std::cell::Cell::new(0);
    let steps = proptest::collection::vec((0..STREAMS, step()), 1..60);
    let run = TestRunner::new(config(48)).run(&(steps, any::<bool>()), |(steps, known)| {
        let d = device.borrow().clone();
        let curves = |d: &dyn Device| if known { curves(d) } else { Curves::default() };
        let Err(e) = case([&d, &d], curves, &steps) else { return Ok(()) };
        assert_lost(&e);
        lost.set(lost.get() + 1);
        // SAFETY: nobody else in this process uses the device.
        let renewed = unsafe { d.renew() }.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((d.allocated(), rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0, 0));
        assert_eq!(given_out::bytes(), 0);
        device.replace(renewed);
        Ok(())
    });
    run.unwrap_or_else(|e| panic!("{e}"));
    assert!(lost.get() > 10, "{lost:?}");
}

#[test]
fn without_a_gpu() {
    on(&found(&[Kind::Cpu, Kind::OpenCl]), 8);
}

#[test]
fn on_two_gpus_where_memory_is_scarce() {
    if !stand_in::is_here() {
        stand_in::again_with("on_two_gpus", &[("STAND_IN_DEVICES", "2"), ("STAND_IN_SCARCE", "30")]);
    }
}

/// With mapped memory, and now and then a command that takes longer.
#[test]
fn on_two_gpus() {
    if !stand_in::is_here() {
        return stand_in::again_with("on_two_gpus", &[("STAND_IN_DEVICES", "2"), ("STAND_IN_DELAYS", "1")]);
    }
    let rm = FakeRm::default();
    forebay::hal::cuda::use_rm(Arc::new(rm.clone()));
    let devices = found(&[Kind::Cuda]);
    assert_eq!(devices.len(), 2);
    on(&devices, 8);
    drop(devices);
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
}
