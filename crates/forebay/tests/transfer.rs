//! The transfer engine on every device here: every byte in its place by every way, and an error for everything else.

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::Arc;
use std::time::Duration;

use forebay::hal::cache::Cache;
use forebay::hal::sim::{Model, SimDevice};
use forebay::hal::{Buffer, Device, Error as DeviceError, discover};
use forebay::transfer::curve::{Cost, Curve, Measured, Together};
use forebay::transfer::{Curves, Direction, Engine, Host, Method, Range, Stream, Way};
use forebay::{Arg, Datablock, Error, Graph, Kind, Launch, Runtime, Source, Task, Template};
use forebay_rm::fake::FakeRm;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Larger than the staging ring, and no multiple of anything.
const SIZE: usize = (3 << 20) + 12_345;

fn devices() -> Vec<Arc<dyn Device>> {
    let (devices, missing) = discover(&Kind::ALL);
    missing.iter().for_each(|(kind, why)| eprintln!("skipped: no {kind} device here: {why}"));
    devices
}

fn unmeasured(d: &Arc<dyn Device>) -> Arc<Engine> {
    Engine::with_curves(d.clone(), Curves::default())
}

fn pattern(seed: u32, bytes: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as u8
    };
    (0..bytes).map(next).collect()
}

/// Sizes and offsets of every kind: single bytes, cache lines and their neighbours, pages, more than the ring.
fn range() -> impl Strategy<Value = (usize, usize, usize)> {
    let bytes = prop_oneof![0usize..300, 4000usize..4200, 0usize..200_000, 1_000_000usize..3_000_000];
    (bytes, 0usize..200, 0usize..9000)
}

/// Sends random ranges by every way into memory that is followed by hand, and brings others back.
fn every_way_keeps_every_byte(d: &Arc<dyn Device>, cases: u32) {
    let engine = unmeasured(d);
    let mut stream = engine.stream().unwrap();
    let memory = engine.memory(SIZE).unwrap();
    let mut model = pattern(1, SIZE);
    stream.write(&memory, 0, &model).unwrap();
    let mut pinned = engine.pinned(SIZE).unwrap();
    let ways: Vec<_> = Way::of(&**d).map(Some).chain([None]).collect();
    let strategy = (range(), range(), 0..ways.len(), any::<(bool, u32)>());
    let mut runner = TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..Default::default() });
    let model = std::cell::RefCell::new(&mut model);
    let all = std::cell::RefCell::new((&mut stream, &mut pinned));
    let run = runner.run(&strategy, |((bytes, at, shift), (n, from, skip), way, (is_pinned, seed))| {
        let (stream, pinned) = &mut *all.borrow_mut();
        let model = &mut *model.borrow_mut();
        let way = ways[way];
        let is_pinned = is_pinned || way == Some(Way::Direct(Method::Kernel));
        let is_pinned = is_pinned && way != Some(Way::Staged);
        stream.force(way).unwrap();
        let data = pattern(seed, bytes + shift % 64);
        let sent = &data[shift % 64..];
        if is_pinned {
            let p = shift + 3;
            pinned[p..p + bytes].copy_from_slice(sent);
            stream.write(&memory, at, &pinned.part(p..p + bytes)).unwrap();
        } else {
            stream.write(&memory, at, sent).unwrap();
        }
        model[at..at + bytes].copy_from_slice(sent);
        let mut back = vec![0xA5u8; n + 128];
        if is_pinned {
            pinned.fill(0xA5);
            stream.read(&memory, from, &mut pinned.part_mut(skip..skip + n)).unwrap();
            prop_assert!(
                pinned[..skip].iter().chain(&pinned[skip + n..]).all(|b| *b == 0xA5),
                "{way:?}: more was read"
            );
            back[64..64 + n].copy_from_slice(&pinned[skip..skip + n]);
        } else {
            stream.read(&memory, from, &mut back[64..64 + n]).unwrap();
        }
        prop_assert!(back[64..64 + n] == model[from..from + n], "{way:?}: {n} B at {from} came back changed");
        prop_assert!(back[..64].iter().chain(&back[64 + n..]).all(|b| *b == 0xA5), "{way:?}: more was read");
        Ok(())
    });
    run.unwrap_or_else(|e| panic!("{}: {e}", d.info().name));
    let (model, (stream, _)) = (model.into_inner(), all.into_inner());
    let mut whole = vec![0; SIZE];
    stream.force(None).unwrap();
    stream.read(&memory, 0, &mut whole).unwrap();
    assert!(whole == *model, "{}: something was written beside a range", d.info().name);
}

fn on_a_device(kind: Kind) {
    for d in devices().iter().filter(|d| d.info().kind == kind) {
        every_way_keeps_every_byte(d, if kind == Kind::Cuda { 40 } else { 150 });
        batches_and_transfers_under_way(d);
        a_split_transfer_comes_behind_one_that_is_under_way(d);
        refusals(d);
        split_halves_meet(d);
    }
}

#[test]
fn cpu() {
    on_a_device(Kind::Cpu);
}

#[test]
fn opencl() {
    on_a_device(Kind::OpenCl);
}

#[test]
fn sim() {
    on_a_device(Kind::Sim);
}

#[test]
fn cuda() {
    if !stand_in::is_here() {
        return on_a_device(Kind::Cuda);
    }
    // Mapped, split and ordinary memory.
    let rm = FakeRm::default();
    forebay::hal::cuda::use_rm(Arc::new(rm.clone()));
    on_a_device(Kind::Cuda);
    let d = devices().into_iter().find(|d| d.info().kind == Kind::Cuda).unwrap();
    assert_eq!(d.methods(), Method::ALL);
    the_mapping_is_not_used_by_two_or_for_memory_without_one(&d);
    drop(d);
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
}

fn the_mapping_is_not_used_by_two_or_for_memory_without_one(d: &Arc<dyn Device>) {
    // The mapping is said to be faster for everything.
    let (by_engine, mapped) = (Way::Direct(Method::Engine), Way::Direct(Method::Mapped));
    let engine = Engine::with_curves(d.clone(), lines(&[(by_engine, 5000, 100), (mapped, 100, 10)], None));
    let (with, without) = (engine.memory(1 << 20).unwrap(), d.alloc(1 << 20).unwrap());
    assert!(with.is_mapped() && !without.is_mapped());
    std::thread::scope(|s| {
        for (i, memory) in [&with, &without, &with, &with].into_iter().enumerate() {
            let engine = &engine;
            s.spawn(move || {
                let mut stream = engine.stream().unwrap();
                for round in 0..50u32 {
                    let (data, at) = (pattern(round, 10_000), i * 10_240);
                    stream.write(memory, at, &data).unwrap();
                    let mut back = vec![0; 10_000];
                    stream.read(memory, at, &mut back).unwrap();
                    assert!(back == data);
                }
            });
        }
    });
}

#[test]
fn cuda_with_the_stand_in() {
    stand_in::again("cuda");
    stand_in::again_as_ptx(&["cuda"], &[]);
}

fn batches_and_transfers_under_way(d: &Arc<dyn Device>) {
    let engine = unmeasured(d);
    let mut stream = engine.stream().unwrap();
    let memory = engine.memory(1 << 16).unwrap();
    stream.write(&memory, 0, &vec![0u8; 1 << 16]).unwrap();
    let data = pattern(7, 1 << 12);
    // The second overlaps the first on the device; the third and fourth are neighbours; the last is empty, at the end.
    let ranges = [(0, 100, 50), (200, 120, 50), (300, 5000, 7), (307, 5007, 9), (0, 0, 1), (9, 1 << 16, 0)];
    let ranges = ranges.map(|(host, device, bytes)| Range { host, device, bytes });
    let mut model = vec![0u8; 1 << 16];
    for r in ranges {
        let (h, n) = (r.host as usize, r.bytes as usize);
        model[r.device as usize..][..n].copy_from_slice(&data[h..h + n]);
    }
    for way in Way::of(&**d).filter(|w| w.serves(Host::Pageable)) {
        stream.force(Some(way)).unwrap();
        stream.write(&memory, 0, &vec![0u8; 1 << 16]).unwrap();
        stream.write_batch(&memory, &data, &ranges).unwrap();
        let mut back = vec![0u8; 1 << 16];
        let whole =
            [Range { host: 0, device: 0, bytes: 100 }, Range { host: 100, device: 100, bytes: (1 << 16) - 100 }];
        stream.read_batch(&memory, &mut back, &whole).unwrap();
        assert!(back == model, "{}: a batch by {way:?}", d.info().name);
    }
    stream.force(None).unwrap();
    // More than may be in flight at a time; all behind one another.
    let mut under_way = Vec::new();
    for i in 0..200u32 {
        let mut p = engine.pinned(64).unwrap();
        p.fill(i as u8);
        under_way.push(stream.start_write(&memory, i as usize * 8, p).unwrap());
    }
    let back = engine.pinned(200 * 8 + 56).unwrap();
    let back = stream.start_read(&memory, 0, back).unwrap();
    let back = stream.finish(back).unwrap();
    assert!((0..200 * 8).all(|i| back[i] == (i / 8) as u8), "{}: not in order", d.info().name);
    for (i, t) in under_way.into_iter().enumerate() {
        assert_eq!(stream.finish(t).unwrap()[0], i as u8);
    }
    for i in 0..50u8 {
        stream.post(&memory, 60_000 + usize::from(i), &[i]).unwrap();
    }
    let mut posted = [0u8; 52];
    stream.read(&memory, 59_999, &mut posted[..]).unwrap();
    assert!((0..50).all(|i| posted[i + 1] == i as u8), "{posted:?}");
    invalid(stream.post(&memory, (1 << 16) - 1, &[1, 2]));
    let other = d.alloc(1000).unwrap();
    stream.copy(&memory, 96, &other, 8, 800).unwrap();
    let mut there = vec![0; 800];
    stream.read(&other, 8, &mut there).unwrap();
    assert_eq!(there, back[96..896]);
    // A fence is its own queue's: by another one's the memory would come back before it is filled.
    let begun = stream.start_read(&memory, 0, back).unwrap();
    let mut second = engine.stream().unwrap();
    let what = invalid(second.finish(begun).map(drop));
    assert!(what.contains("another stream"), "{what}");
}

/// Both halves of a split transfer come behind what was begun before it, on whichever queue they go.
fn a_split_transfer_comes_behind_one_that_is_under_way(d: &Arc<dyn Device>) {
    const BYTES: usize = 32 << 20;
    let ways = [Way::Direct(Method::Engine), Way::Direct(Method::Mapped)];
    if !Way::of(&**d).any(|w| w == ways[1]) || d.info().memory_bytes < 8 * BYTES as u64 {
        return;
    }
    let engine = Engine::with_curves(d.clone(), lines(&ways.map(|w| (w, 1000, 100)), Some(100)));
    let memory = engine.memory(BYTES).unwrap();
    let mut stream = engine.stream().unwrap();
    assert_eq!(engine.plan(Direction::ToDevice, BYTES as u64, Host::Pinned).pieces.len(), 2);
    let filled = |v: u8| {
        let mut p = engine.pinned(BYTES).unwrap();
        p.fill(v);
        p
    };
    let (first, mut back) = (filled(1), filled(9));
    let first = stream.start_write(&memory, 0, first).unwrap();
    stream.read(&memory, 0, &mut back).unwrap();
    assert!(back.iter().all(|v| *v == 1), "{}: read before it was written", d.info().name);
    let mut first = stream.finish(first).unwrap();
    first.fill(2);
    let first = stream.start_write(&memory, 0, first).unwrap();
    stream.write(&memory, 0, &filled(3)).unwrap();
    stream.finish(first).unwrap();
    stream.read(&memory, 0, &mut back).unwrap();
    assert!(back.iter().all(|v| *v == 3), "{}: overwritten by what was begun before", d.info().name);
}

fn invalid(r: Result<(), Error>) -> String {
    match r {
        Err(Error::Device(DeviceError::Invalid { what, .. })) => what,
        other => panic!("{other:?}"),
    }
}

fn refusals(d: &Arc<dyn Device>) {
    let mut stream = unmeasured(d).stream().unwrap();
    let memory = d.alloc(100).unwrap();
    let mut bytes = vec![7u8; 60];
    stream.write(&memory, 40, &bytes).unwrap();
    stream.write(&memory, 100, &[][..]).unwrap();
    let what = invalid(stream.write(&memory, 41, &bytes));
    assert!(what.contains("60 B at 41") && what.contains("100 B"), "{what}");
    invalid(stream.read(&memory, usize::MAX, &mut bytes));
    invalid(stream.read(&memory, 101, &mut [][..]));
    invalid(stream.copy(&memory, 0, &memory, 10, 11));
    stream.copy(&memory, 40, &memory, 0, 40).unwrap();
    invalid(stream.copy(&memory, 0, &memory, 99, 2));
    for r in [(0, 50, 51), (50, 0, 11), (u64::MAX, 0, 2), (0, u64::MAX, 2), (0, 0, u64::MAX)] {
        let r = Range { host: r.0, device: r.1, bytes: r.2 };
        invalid(stream.write_batch(&memory, &bytes, &[Range { host: 0, device: 0, bytes: 1 }, r]));
    }
    // Memory of somebody else's; devices whose memory is the host's take any.
    let foreign = SimDevice::new(Model::default()).alloc(100).unwrap();
    invalid(stream.write(&foreign, 0, &bytes));
    let missing = Method::ALL.into_iter().find(|m| !d.methods().contains(m));
    if let Some(m) = missing {
        let refused = stream.force(Some(Way::Direct(m)));
        assert!(matches!(refused, Err(Error::Device(DeviceError::Unsupported { .. }))), "{refused:?}");
    }
    // After all that it still works.
    let mut back = [0u8; 100];
    stream.read(&memory, 0, &mut back[..]).unwrap();
    assert_eq!(back, [7; 100]);
}

/// Curves by which each way takes `start` ns and `kib` ns a KiB.
fn lines(all: &[(Way, u64, u64)], together: Option<u64>) -> Curves {
    let together: Vec<_> = together.map(|permille| Together { bytes: 256 << 10, permille }).into_iter().collect();
    let point = |start, kib| move |i| start + kib * Curve::size(i) / 1024;
    let curve = |start, kib| {
        let at = point(start, kib);
        Curve::new((0..24).map(|i| Cost { median: at(i), tail: at(i) }).collect())
    };
    let one = |way, direction, host, start, kib| Measured { way, direction, host, curve: curve(start, kib) };
    let each = |&(way, start, kib): &(Way, u64, u64)| {
        Direction::ALL.map(|d| Host::ALL.map(|h| one(way, d, h, start, kib))).into_iter().flatten()
    };
    Curves {
        all: all.iter().flat_map(each).collect(),
        together: [together.clone(), together],
        further: [100; 2],
        ..Curves::default()
    }
}

/// What is expected to come too late is made all the same, and counted.
#[test]
fn deadlines_that_cannot_be_met_are_counted() {
    let (d, engine) = (devices().remove(0), Way::Direct(Method::Engine));
    // A start of 10 µs, and 100 ns a KiB.
    let mut stream = Engine::with_curves(d.clone(), lines(&[(engine, 10_000, 100)], None)).stream().unwrap();
    let memory = d.alloc(SIZE).unwrap();
    let data = pattern(1, SIZE);
    let all_of = |stream: &mut Stream| {
        let mut back = vec![0u8; SIZE];
        stream.write(&memory, 0, &data).unwrap();
        stream.read(&memory, 0, &mut back).unwrap();
        assert!(back == data);
        let few = [Range { host: 0, device: 0, bytes: 100 }, Range { host: 200, device: 200, bytes: 100 }];
        stream.write_batch(&memory, &data, &few).unwrap();
    };
    all_of(&mut stream);
    assert_eq!(stream.expected_late(), 0, "nobody asked");
    stream.set_deadline(Some(Duration::from_secs(1)));
    all_of(&mut stream);
    assert_eq!(stream.expected_late(), 0, "time enough");
    stream.set_deadline(Some(Duration::from_micros(1)));
    all_of(&mut stream);
    assert_eq!(stream.expected_late(), 3);
    stream.set_deadline(None);
    all_of(&mut stream);
    assert_eq!(stream.expected_late(), 3);
}

/// A device that is the host's cores copies by all of them only where that is worth it.
#[test]
fn all_cores_copy_where_one_takes_a_seventh_longer() {
    let (engine, kernel) = (Way::Direct(Method::Engine), Way::Direct(Method::Kernel));
    for d in devices().iter().filter(|d| d.methods().contains(&Method::Kernel)) {
        // Of the measured ways the kernel takes an eighth less, and a fifth less.
        for (kib, way) in [(70, if d.info().is_cpu { engine } else { kernel }), (64, kernel)] {
            let engine = Engine::with_curves(d.clone(), lines(&[(engine, 0, 80), (kernel, 0, kib)], None));
            let plan = engine.plan(Direction::ToDevice, 4 << 20, Host::Pinned);
            assert_eq!((plan.pieces.len(), plan.pieces[0].way), (1, way), "{}: {kib}", d.info().name);
        }
    }
}

fn split_halves_meet(d: &Arc<dyn Device>) {
    if !d.methods().contains(&Method::Mapped) {
        return;
    }
    // Both are said to be as fast as each other, and not to hinder one another.
    let (engine, mapped) = (Way::Direct(Method::Engine), Way::Direct(Method::Mapped));
    let curves = lines(&[(engine, 1000, 100), (mapped, 1000, 100)], Some(500));
    let mut stream = Engine::with_curves(d.clone(), curves).stream().unwrap();
    let memory = stream.engine().memory(SIZE).unwrap();
    for seed in 1..4 {
        let data = pattern(seed, SIZE - seed as usize);
        stream.write(&memory, 1, &data[1..]).unwrap();
        let mut back = vec![0u8; data.len()];
        stream.read(&memory, 1, &mut back[1..]).unwrap();
        assert!(back[1..] == data[1..], "{}", d.info().name);
    }
}

#[test]
fn memory_gets_from_any_device_to_any_other() {
    let all = devices();
    let data = pattern(3, 1_000_003);
    for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
        let (mut from, mut to) = (unmeasured(a).stream().unwrap(), unmeasured(b).stream().unwrap());
        let (x, y) = (a.alloc(data.len()).unwrap(), b.alloc(data.len() + 5).unwrap());
        from.write(&x, 0, &data).unwrap();
        from.relay(&x, 1, &mut to, &y, 3, data.len() - 1).unwrap();
        let mut back = vec![0; data.len() - 1];
        to.read(&y, 3, &mut back).unwrap();
        assert!(back == data[1..], "{} to {}", a.info().name, b.info().name);
        invalid(from.relay(&x, 1, &mut to, &y, 6, data.len()));
        from.relay(&x, 1, &mut to, &y, 6, 0).unwrap();
    }
}

#[test]
fn a_device_that_vanishes_is_an_error_and_nothing_hangs() {
    let sim = SimDevice::new(Model::default());
    let device: Arc<dyn Device> = Arc::new(sim.clone());
    let engine = unmeasured(&device);
    let mut stream = engine.stream().unwrap();
    let memory = device.alloc(SIZE).unwrap();
    let under_way = stream.start_write(&memory, 0, engine.pinned(4096).unwrap()).unwrap();
    sim.unplug();
    let lost = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Device(DeviceError::Lost { .. }))), "{r:?}");
    lost(stream.finish(under_way).map(drop));
    for way in [Way::Direct(Method::Engine), Way::Staged] {
        stream.force(Some(way)).unwrap();
        lost(stream.write(&memory, 0, &vec![1; SIZE]));
        lost(stream.read(&memory, 0, &mut vec![1; SIZE]));
    }
    lost(engine.stream().map(drop));
    lost(engine.calibrate(Duration::from_millis(10)));
}

#[test]
fn curves_are_measured_once_stored_and_redone_when_damaged() {
    let dir = std::env::temp_dir().join(format!("forebay-transfer-{}", std::process::id()));
    let cache = Cache::at(&dir);
    for d in devices().into_iter().filter(|d| d.info().kind != Kind::Sim) {
        let engine = Engine::with_curves(d.clone(), Curves::default());
        let begun = std::time::Instant::now();
        engine.calibrate(Duration::from_millis(600)).unwrap();
        // A size that was begun is finished; here, with other tests beside it, that may take a while.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let found = engine.curves();
        // Of a device whose memory is the host's, all memory is pinned.
        let hosts: Vec<_> = Host::ALL.into_iter().filter(|h| !d.info().host_memory || *h == Host::Pinned).collect();
        for (way, h) in Way::of(&*d).flat_map(|w| hosts.iter().map(move |h| (w, *h))).filter(|(w, h)| w.serves(*h)) {
            for direction in Direction::ALL {
                let c = found.get(way, direction, h).unwrap();
                assert!(c.points().count() >= 8, "{way:?} {direction:?} {h:?}: {:?}", c.points().count());
                assert!(c.cost(1 << 20).median >= c.cost(8).median);
            }
        }
        let first = Engine::open_in(d.clone(), cache.clone()).unwrap().curves();
        // Measuring twice gives two results; the same one twice was stored.
        let again = Engine::open_in(d.clone(), cache.clone()).unwrap().curves();
        // Both, if they differ: whether it was measured again, or read back wrongly, cannot be told otherwise.
        assert_eq!(again, first);
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
        assert!(Engine::open_in(d.clone(), cache.clone()).unwrap().curves() != first);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn curves_have_points_and_are_stored_however_little_time_there_was() {
    let dir = std::env::temp_dir().join(format!("forebay-hurried-{}", std::process::id()));
    for d in devices().into_iter().filter(|d| d.info().kind != Kind::Sim) {
        let cache = Cache::at(&dir);
        let engine = Engine::open_in(d.clone(), cache.clone()).unwrap();
        engine.calibrate(Duration::ZERO).unwrap();
        let found = engine.curves();
        assert!(found.all.iter().all(|m| m.curve.points().count() >= 8), "{found:?}");
        assert_eq!(Engine::open_in(d.clone(), cache).unwrap().curves(), found);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn splitting_that_gains_nothing_is_given_up() {
    let d = devices().remove(0);
    let (by_engine, mapped) = (Way::Direct(Method::Engine), Way::Direct(Method::Mapped));
    // Nothing is as fast as that: every transfer takes longer than it is said to by one way alone.
    let curves = lines(&[(by_engine, 1, 1), (mapped, 1, 1)], Some(500));
    let engine = Engine::with_curves(d.clone(), curves);
    let memory = engine.memory(1 << 20).unwrap();
    let mut stream = engine.stream().unwrap();
    many(&mut stream, &memory, 9);
    assert!(!engine.curves().together[0].is_empty(), "it takes ten");
    many(&mut stream, &memory, 1);
    assert!(engine.curves().together[0].is_empty() && !engine.curves().together[1].is_empty());
    assert_eq!(engine.departures(), 1);
}

fn many(stream: &mut Stream, memory: &Buffer, n: usize) {
    let data = vec![1u8; 1 << 20];
    (0..n).for_each(|_| stream.write(memory, 0, &data).unwrap());
}

#[test]
fn curves_that_are_wrong_are_noticed_and_corrected() {
    let d = devices().remove(0);
    let (slow, engine, mapped) = (60_000_000_000, Way::Direct(Method::Engine), Way::Direct(Method::Mapped));
    // A mebibyte is said to take ten minutes by the engine, and more by the other.
    let wrong = lines(&[(engine, slow, slow / 100), (mapped, 2 * slow, slow / 100)], None);
    let engine = Engine::with_curves(d.clone(), wrong);
    let memory = d.alloc(1 << 20).unwrap();
    let before = engine.cost(Direction::ToDevice, 1 << 20, Host::Pageable).median;
    let mut stream = engine.stream().unwrap();
    // Ten that are timed; one in sixteen is.
    many(&mut stream, &memory, 159);
    assert_eq!(engine.departures(), 0, "it takes ten");
    many(&mut stream, &memory, 17);
    assert!(engine.departures() >= 1);
    let after = engine.cost(Direction::ToDevice, 1 << 20, Host::Pageable).median;
    assert!(after < before / 1000, "{before} ns became {after} ns");
    // The other direction is another curve.
    assert_eq!(engine.cost(Direction::ToHost, 1 << 20, Host::Pageable).median, before);
}

#[test]
fn streams_of_several_threads_share_an_engine() {
    for d in devices() {
        let engine = unmeasured(&d);
        let memory = d.alloc(8 * 4096).unwrap();
        std::thread::scope(|s| {
            for t in 0..8usize {
                let (engine, memory) = (&engine, &memory);
                s.spawn(move || {
                    let mut stream = engine.stream().unwrap();
                    for round in 0..20u32 {
                        let data = pattern(t as u32 * 1000 + round, 4096);
                        stream.write(memory, t * 4096, &data).unwrap();
                        let mut back = vec![0; 4096];
                        stream.read(memory, t * 4096, &mut back).unwrap();
                        assert!(back == data);
                    }
                });
            }
        });
    }
}

/// The runtime's blocks go by what was measured, once it was.
/// How many copies the processor makes while a graph increments `n` numbers on devices of a kind, twenty times in a row.
fn incremented(kind: Kind, n: u32) -> u64 {
    let t = Template::array::<u32>([n as usize]);
    let source = "KERNEL void inc(GLOBAL const uint *x, GLOBAL uint *y, uint n) {
        uint i = gid_x(); if (i < n) y[i] = x[i] + 1u; }";
    let mut g = Graph::new("inc");
    let args = [Arg::port("x"), Arg::port("y"), Arg::Items(0)];
    let launch = Launch::new(Source::Portable(source.into()), "inc", args);
    let task = Task::new("inc").input("x", t).output("y", t).kernels(kind, [launch]);
    let task = g.add(task).unwrap();
    let (feed, drain) = (g.feed((task, "x"), 4).unwrap(), g.drain((task, "y"), 4).unwrap());
    let runtime = Runtime::builder().devices(discover(&[kind]).0).build().unwrap();
    let running = runtime.start(g).unwrap();
    let data: Vec<u32> = (0..n).collect();
    let mut last = Vec::new();
    for _ in 0..20 {
        running.push(feed, Datablock::from_slice(t, &data).unwrap()).unwrap();
        last = running.pull(drain).unwrap().as_slice::<u32>().unwrap().to_vec();
    }
    assert!(last.iter().enumerate().all(|(i, v)| *v == i as u32 + 1), "{last:?}");
    runtime.mapped().iter().sum()
}

#[test]
fn small_blocks_are_moved_by_the_processor_where_that_is_faster() {
    const NAME: &str = "small_blocks_are_moved_by_the_processor_where_that_is_faster";
    if !stand_in::is_here() {
        let cache = tempfile::tempdir().unwrap();
        return stand_in::again_with(NAME, &[("FOREBAY_CACHE", cache.path().to_str().unwrap())]);
    }
    forebay::hal::cuda::use_rm(Arc::new(FakeRm::default()));
    // Nothing was measured on this device yet.
    assert_eq!(incremented(Kind::Cuda, 100), 0);
    let d = devices().into_iter().find(|d| d.info().kind == Kind::Cuda).unwrap();
    // A thread is woken for every command of the stand-in, so it is faster; though not seen so while others compute.
    let mapped = || {
        let cache = std::env::var_os("FOREBAY_CACHE").unwrap();
        std::fs::remove_dir_all(cache).unwrap();
        let engine = Engine::open(d.clone()).unwrap();
        engine.plan(Direction::ToDevice, 400, Host::Pinned).pieces[0].way == Way::Direct(Method::Mapped)
    };
    assert!((0..20).any(|_| mapped()));
    assert!(incremented(Kind::Cuda, 100) > 0);
}

/// Where the processor has the device's memory, it needs no measurement for that.
#[test]
fn small_blocks_are_moved_by_the_processor_where_that_is_but_a_copy() {
    let is_plain = |d: &Arc<dyn Device>| d.plain_copy() == Some(Method::Mapped);
    match discover(&[Kind::OpenCl]).0 {
        all if all.is_empty() => eprintln!("skipped: no OpenCL device here"),
        all => assert_eq!(incremented(Kind::OpenCl, 100) > 0, all.iter().any(is_plain)),
    }
}

#[test]
fn memory_gets_from_one_gpu_to_another_with_the_stand_in() {
    let two = [("STAND_IN_DEVICES", "2"), ("STAND_IN_DELAYS", "1")];
    stand_in::again_with("memory_gets_from_any_device_to_any_other", &two);
}

/// What is measured while others keep all processors busy is stored as doubtful, and measured anew when it is old.
#[test]
fn curves_of_a_busy_machine_are_measured_anew_later() {
    let dir = std::env::temp_dir().join(format!("forebay-busy-{}", std::process::id()));
    let d = devices().remove(0);
    let cores = std::thread::available_parallelism().unwrap().get();
    let hog = || std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let mut hogs: Vec<_> = (0..cores).map(|_| hog()).collect();
    // Of a machine with more processors than this process may use these may be few.
    let all = std::fs::read_to_string("/proc/stat").unwrap().lines().filter(|l| l.starts_with("cpu")).count() - 1;
    drop(Engine::open_in(d.clone(), Cache::at(&dir)).unwrap());
    hogs.iter_mut().for_each(|h| _ = (h.kill(), h.wait()));
    let entry = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let stored = std::fs::read(&entry).unwrap();
    let says = String::from_utf8_lossy(&stored).contains("doubtful = ");
    assert!(says || 2 * cores < all, "{} of {all} processors were busy", cores);
    // Not at once.
    drop(Engine::open_in(d, Cache::at(&dir)).unwrap());
    assert!(std::fs::read(&entry).unwrap() == stored);
    std::fs::remove_dir_all(dir).unwrap();
}
