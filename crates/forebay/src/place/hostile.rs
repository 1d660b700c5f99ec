//! Decisions against load that is in the way on purpose, in virtual time: a processor of eight cores whose load is told, an
//! accelerator whose load nobody tells, and tasks for both. Everything follows from a seed.
//!
//! What comes out is compared with somebody who knows what each device would take at the very moment (and pays the same for
//! copies), which nobody can know; the factors say how far from that each pattern may be.

use std::sync::Arc;

use super::adapt::{Adapt, Situation};
use super::load::Load;
use super::store::Models;

const CORES: usize = 8;
const MS: f64 = 1e6;

/// What the world is like at a moment.
#[derive(Clone, Copy)]
struct Moment {
    /// Threads of others on the processor, as it is said.
    said: f64,
    /// How many times as long as alone things take on the processor, and on the accelerator.
    slow: [f64; 2],
}

/// The honest case: so many threads, and the processor is shared with them.
fn busy(threads: f64) -> Moment {
    Moment { said: threads, slow: [1.0 + threads / CORES as f64, 1.0] }
}

struct Story {
    /// Time alone on both devices, ns, of a task of this size; copies to the accelerator included.
    alone: fn(u64) -> [f64; 2],
    copies: fn(u64) -> u64,
    sizes: fn(&mut fastrand::Rng) -> u64,
    /// The world at this time; told where the last task ran.
    world: fn(f64, usize, &mut fastrand::Rng) -> Moment,
    /// What a single invocation takes instead of 1.
    noise: fn(&mut fastrand::Rng) -> f64,
    seconds: f64,
}

struct Outcome {
    /// Our time over that of whoever knows everything, and over always the same device, whichever is better.
    behind: f64,
    over_static: f64,
    /// Changes of device from one invocation to the next.
    changes: usize,
    moves: u64,
    /// Parts of the last quarter's invocations that ran on the processor.
    late_on_cpu: f64,
}

fn run(s: &Story, seed: u64) -> Outcome {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (models, load) = (Arc::new(Models::off()), Load::told(0.0));
    let mut adapt = Adapt::new("hostile", &models, &load, CORES, seed);
    adapt.add(0, "processor".into(), Vec::new(), Some(CORES));
    adapt.add(1, "accelerator".into(), Vec::new(), None);
    let (mut now, mut best, mut fixed) = (0.0, 0.0, [0.0; 2]);
    let (mut last, mut changes, mut late) = (0, 0, [0usize; 2]);
    while now < s.seconds * 1e9 {
        let moment = (s.world)(now, last, &mut rng);
        load.tell(moment.said);
        let size = (s.sizes)(&mut rng);
        let (alone, noise) = ((s.alone)(size), (s.noise)(&mut rng));
        let takes = [0, 1].map(|d| alone[d] * moment.slow[d] * noise);
        let mut at = Situation { size, ..Situation::default() };
        at.copies_ns[1] = (s.copies)(size);
        let counts = adapt.weigh(now as u64, at, &|_| None);
        let device = usize::from(counts[1] < counts[0]);
        adapt.took(device, takes[device] as u64, &|_| None);
        changes += usize::from(device != last);
        last = device;
        now += takes[device];
        best += takes[0].min(takes[1]);
        fixed = [fixed[0] + takes[0], fixed[1] + takes[1]];
        if now > s.seconds * 0.75e9 {
            late[device] += 1;
        }
    }
    let over_static = now / fixed[0].min(fixed[1]);
    let late_on_cpu = late[0] as f64 / (late[0] + late[1]).max(1) as f64;
    Outcome { behind: now / best, over_static, changes, moves: adapt.moves(), late_on_cpu }
}

/// Runs some seeds; the worst of each figure.
fn worst(name: &str, s: &Story) -> Outcome {
    let mut w = Outcome { behind: 0.0, over_static: 0.0, changes: 0, moves: 0, late_on_cpu: 1.0 };
    for seed in 0..5 {
        let o = run(s, seed);
        w.behind = w.behind.max(o.behind);
        w.over_static = w.over_static.max(o.over_static);
        w.changes = w.changes.max(o.changes);
        w.moves = w.moves.max(o.moves);
        w.late_on_cpu = w.late_on_cpu.min(o.late_on_cpu);
    }
    println!(
        "{name}: {:.2} times who knows everything, {:.2} times the better device alone, {} changes, {} moves, {:.2} late on the CPU",
        w.behind, w.over_static, w.changes, w.moves, w.late_on_cpu
    );
    w
}

const EVEN: Story = Story {
    // Alone the processor is a little faster; with eight others it takes twice as long.
    alone: |_| [2.0 * MS, 2.6 * MS],
    copies: |_| 300_000,
    sizes: |_| 1 << 20,
    world: |_, _, _| busy(0.0),
    noise: |r| 0.95 + 0.1 * r.f64(),
    seconds: 60.0,
};

#[test]
fn load_that_comes_and_goes_at_any_pace_costs_little_more_than_the_better_device() {
    fn wave<const PERIOD_MS: u64>(now: f64, _: usize, _: &mut fastrand::Rng) -> Moment {
        busy(if (now / MS) as u64 / PERIOD_MS % 2 == 1 { 8.0 } else { 0.0 })
    }
    let all: [(&str, Story); 5] = [
        ("wave of 5 ms", Story { world: wave::<5>, ..EVEN }),
        ("wave of 30 ms", Story { world: wave::<30>, ..EVEN }),
        ("wave of 150 ms", Story { world: wave::<150>, ..EVEN }),
        ("wave of 1 s", Story { world: wave::<1000>, ..EVEN }),
        ("wave of 5 s", Story { world: wave::<5000>, ..EVEN }),
    ];
    for (name, s) in all {
        let o = worst(name, &s);
        assert!(o.behind < 1.4 && o.over_static < 1.2, "{name}");
    }
}

#[test]
fn load_that_follows_the_task_cannot_make_it_run_to_and_fro() {
    // Wherever it goes the load is there at once: the processor's when it runs there, an untold one of the accelerator.
    let world = |_: f64, last: usize, _: &mut fastrand::Rng| {
        if last == 0 { busy(8.0) } else { Moment { said: 0.0, slow: [1.0, 2.0] } }
    };
    let o = worst("load that follows", &Story { world, ..EVEN });
    // Somebody who knows everything would change at every invocation.
    assert!(o.changes < 2500, "{} changes in a minute", o.changes);
    assert!(o.over_static < 1.6);
}

#[test]
fn outliers_do_not_drive_it_away() {
    let noise = |r: &mut fastrand::Rng| if r.f64() < 0.01 { 50.0 } else { 1.0 };
    let o = worst("outliers", &Story { noise, ..EVEN });
    assert!(o.behind < 1.25);
}

#[test]
fn an_accelerator_that_nobody_says_is_slow_is_left_and_found_again() {
    let world = |now: f64, _: usize, _: &mut fastrand::Rng| {
        let slow = if (20e9..40e9).contains(&now) { 8.0 } else { 1.0 };
        Moment { said: 0.0, slow: [1.0, slow] }
    };
    let alone = |_: u64| [4.0 * MS, 1.0 * MS];
    let o = worst("untold", &Story { world, alone, ..EVEN });
    assert!(o.behind < 1.3 && o.late_on_cpu < 0.1);
}

#[test]
fn a_load_that_is_said_and_not_felt_is_seen_through() {
    // A hundred threads are said to run, of the lowest priority; the processor is the better device all the time.
    let world = |_: f64, _: usize, _: &mut fastrand::Rng| Moment { said: 100.0, slow: [1.0, 1.0] };
    let alone = |_: u64| [1.0 * MS, 3.0 * MS];
    let o = worst("said and not felt", &Story { world, alone, ..EVEN });
    assert!(o.behind < 1.3 && o.late_on_cpu > 0.8);
}

#[test]
fn sizes_from_kilobytes_to_tens_of_megabytes_go_where_each_is_faster() {
    let sizes = |r: &mut fastrand::Rng| 1u64 << r.u32(10..25);
    let alone = |size: u64| [size as f64 * 0.8, 60_000.0 + size as f64 * 0.25];
    let copies = |size: u64| 10_000 + size / 20;
    let still = |_: f64, _: usize, _: &mut fastrand::Rng| busy(0.0);
    let o = worst("sizes", &Story { sizes, alone, copies, world: still, ..EVEN });
    assert!(o.behind < 1.1);
    let walk = |now: f64, _: usize, _: &mut fastrand::Rng| busy(8.0 * (now / 3e9).sin().abs());
    let o = worst("sizes under load", &Story { sizes, alone, copies, world: walk, ..EVEN });
    assert!(o.behind < 1.2);
}
