//! `forebay bench resident`: the resident grid against other ways of handing out small pieces of work. On the CPU, and on
//! a CUDA device (gpu.rs).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay::resident::{Builder, Call, Grid, Result};

use crate::bench::part::{self, Part};
use crate::bench::schema::{Row, median, quantile};

mod gpu;
mod graph_while;
mod heap;
mod one_block;
mod search;

/// The same for both kinds of device.
const TASKS: &str = include_str!("tasks.cu");
/// Repetitions of each measurement.
const REPEATS: usize = 9;
/// A measurement is repeated for so long before it counts.
const SETTLING: Duration = Duration::from_millis(20);
/// Round trips.
const TRIPS: usize = 20_000;
/// Depth of the tree: two million tasks.
const DEPTH: u64 = 20;

fn seconds(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    // Until the operating system has given the grid's thread a core of its own, whatever ran before.
    let begun = Instant::now();
    while begun.elapsed() < SETTLING {
        f()?;
    }
    let mut samples = Vec::new();
    for _ in 0..REPEATS {
        let begun = Instant::now();
        f()?;
        samples.push(begun.elapsed().as_secs_f64());
    }
    Ok(median(samples))
}

/// A: from the host to a task and back.
fn round_trips(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let echo = grid.function("echo")?;
    let mut ours = Vec::with_capacity(TRIPS);
    for i in 0..TRIPS as u64 {
        let begun = Instant::now();
        let ticket = grid.submit(Call::new(echo).args(&i.to_ne_bytes()))?;
        let answer = grid.wait(ticket)?.result_as::<u64>();
        ours.push(begun.elapsed().as_secs_f64() * 1e6);
        assert_eq!(answer, i + 1);
    }
    // A thread that waits for work, as one would write it.
    let (to, work) = mpsc::channel::<u64>();
    let (done, from) = mpsc::channel::<u64>();
    let thread = std::thread::spawn(move || work.into_iter().try_for_each(|i| done.send(i + 1)));
    let mut channels = Vec::with_capacity(TRIPS);
    for i in 0..TRIPS as u64 {
        let begun = Instant::now();
        let answer = to.send(i).ok().and_then(|()| from.recv().ok());
        channels.push(begun.elapsed().as_secs_f64() * 1e6);
        assert_eq!(answer, Some(i + 1));
    }
    drop(to);
    let _ = thread.join();
    for (what, q) in [("median", 0.5), ("p99", 0.99)] {
        let row = Row::new(format!("A, cpu: host to task and back, {what}"), "µs", Some(quantile(ours.clone(), q)));
        rows.push(row.peer("thread with channels", Some(quantile(channels.clone(), q))));
    }
    Ok(())
}

/// Submits one call after the other, and awaits each, with some of them on their way.
fn in_a_row(grid: &Grid, calls: impl Iterator<Item = Call>) -> Result<()> {
    const ON_THEIR_WAY: usize = 512;
    let mut tickets = VecDeque::with_capacity(ON_THEIR_WAY);
    for call in calls {
        if tickets.len() == ON_THEIR_WAY
            && let Some(oldest) = tickets.pop_front()
        {
            grid.wait(oldest)?;
        }
        tickets.push_back(grid.submit(call)?);
    }
    tickets.into_iter().try_for_each(|t| grid.wait(t).map(drop_completion))
}

/// B: many small tasks, one by one and as a range, against a loop that does all of it.
fn throughput(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let (work, sweep) = (grid.function("work")?, grid.function("sweep")?);
    for n in [1000usize, 100_000, 10_000_000] {
        let mut data = vec![1u32; n];
        let address = (data.as_mut_ptr() as u64).to_ne_bytes();
        let call = Call::new(work).args(&address);
        let rate = |s: f64| n as f64 / s / 1e6;
        let all = Call::new(sweep).args(&address).range(0, n as u64);
        let range = rate(seconds(|| grid.wait(grid.submit(all)?).map(drop_completion))?);
        let singles = if n > 1_000_000 {
            None
        } else {
            Some(rate(seconds(|| in_a_row(grid, (0..n as u64).map(|i| call.range(i, 1))))?))
        };
        let together = (n <= 1_000_000).then(|| {
            seconds(|| {
                let tickets = grid.submit_all((0..n as u64).map(|i| call.range(i, 1)))?;
                tickets.into_iter().try_for_each(|t| grid.wait(t).map(drop_completion))
            })
        });
        let together = together.transpose()?.map(rate);
        let one_by_one = (n <= 1000).then(|| {
            seconds(|| (0..n as u64).try_for_each(|i| grid.wait(grid.submit(call.range(i, 1))?).map(drop_completion)))
        });
        let one_by_one = one_by_one.transpose()?.map(rate);
        let bulk = rate(seconds(|| {
            for v in std::hint::black_box(&mut data).iter_mut() {
                *v = v.wrapping_mul(2_654_435_761).wrapping_add(1);
            }
            Ok(())
        })?);
        let row = Row::new(format!("B, cpu: {n} items as a range"), "M items/s", Some(range));
        rows.push(row.peer("loop on one core", Some(bulk)));
        if let Some(singles) = singles {
            let row = Row::new(format!("B, cpu: {n} tasks of one item"), "M tasks/s", Some(singles));
            rows.push(row.peer("each awaited", one_by_one).peer("loop on one core", Some(bulk)));
            let row = Row::new(format!("B, cpu: {n} tasks of one item, submitted together"), "M tasks/s", together);
            rows.push(row.peer("one by one", Some(singles)).peer("loop on one core", Some(bulk)));
        }
    }
    Ok(())
}

fn drop_completion(_: forebay::resident::Completion) {}

fn serial(depth: u64) -> u64 {
    if std::hint::black_box(depth) == 0 { 1 } else { 1 + serial(depth - 1) + serial(depth - 1) }
}

/// F: a tree of tasks that the device makes.
fn tree(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let tree = grid.function("tree")?;
    let tasks = ((2u64 << DEPTH) - 1) as f64;
    let inline = AtomicU64::new(0);
    let s = seconds(|| {
        let ticket = grid.submit(Call::new(tree).args(&DEPTH.to_ne_bytes()))?;
        inline.store(grid.wait(ticket)?.result_as::<u64>(), Ordering::Relaxed);
        Ok(())
    })?;
    let done = tasks - inline.load(Ordering::Relaxed) as f64;
    let calls = seconds(|| {
        std::hint::black_box(serial(DEPTH));
        Ok(())
    })?;
    let row =
        Row::new(format!("F, cpu: tasks that make tasks, {} of them", done as u64), "M tasks/s", Some(done / s / 1e6));
    rows.push(row.peer("plain calls on one core", Some(tasks / calls / 1e6)));
    Ok(())
}

/// Experiments on a grid.
type Experiment = fn(&Grid, &mut Vec<Row>) -> Result<()>;

/// E: many small computations, as a range, one by one, and all in one task.
fn softmax(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    const ITEMS: u64 = 5000;
    let function = grid.function("softmax")?;
    let input: Vec<f32> = (0..ITEMS * 256).map(|i| (i * 7919 % 1000) as f32 / 100.0 - 5.0).collect();
    let mut output = vec![0f32; input.len()];
    let args = [input.as_ptr() as u64, output.as_mut_ptr() as u64];
    let call = Call::new(function).args(bytemuck::cast_slice(&args));
    // As much as the grid does at a time, so that it is not divided.
    let pieces = |each: u64| {
        seconds(|| {
            let tickets = (0..ITEMS).step_by(each as usize).map(|i| grid.submit(call.range(i, each.min(ITEMS - i))));
            let tickets = tickets.collect::<Result<Vec<_>>>()?;
            tickets.into_iter().try_for_each(|t| grid.wait(t).map(drop_completion))
        })
    };
    let (range, singles) = (pieces(ITEMS)?, pieces(1)?);
    let alone = seconds(|| {
        for i in 0..ITEMS as usize {
            let (input, output) = (&input[i * 256..][..256], &mut output[i * 256..][..256]);
            let most = input.iter().fold(0f32, |m, x| m.max(*x));
            let mut sum = 0.0;
            for (o, x) in output.iter_mut().zip(input) {
                *o = (x.max(0.0) - most).exp();
                sum += *o;
            }
            output.iter_mut().for_each(|o| *o /= sum);
        }
        std::hint::black_box(&mut output);
        Ok(())
    })?;
    let one: f32 = output[..256].iter().sum();
    assert!((one - 1.0).abs() < 1e-4, "shares add up to {one}");
    let row = Row::new(format!("E, cpu: {ITEMS} × ReLU and softmax of 256, as a range"), "ms", Some(range * 1e3));
    rows.push(row.peer("loop on one core", Some(alone * 1e3)).peer("a task for each", Some(singles * 1e3)));
    Ok(())
}

/// The experiments on this kind of device: the CPU, or CUDA, which is what is taken if it is there.
pub fn parts(device: Option<Kind>, quick: bool) -> std::result::Result<Vec<Part>, String> {
    let kinds = part::kinds(&[Kind::Cuda, Kind::Cpu], device)?;
    Ok(if kinds[0] == Kind::Cuda { gpu::parts(quick) } else { on_cpu() })
}

/// A grid with everything.
fn grid_on_cpu() -> Result<Grid> {
    let text = [TASKS, heap::TASKS].concat();
    let functions = [
        "echo",
        "chain",
        "hop",
        "work",
        "sweep",
        "tree",
        "softmax",
        "level",
        "many",
        "one_level",
        "churn",
        "outstanding",
        "mixed",
    ];
    Builder::new(text).functions(functions).grain(4096).queue(1 << 14).heap(64 << 20).start_on_cpu()
}

fn on_cpu() -> Vec<Part> {
    let parts: [(&str, Experiment); 6] = [
        ("round trips", round_trips),
        ("throughput", throughput),
        ("searches", search::run),
        ("the heap", heap::run),
        ("small computations", softmax),
        ("tasks that make tasks", tree),
    ];
    parts.map(|(name, run)| Part::of_rows(name, move |rows| run(&grid_on_cpu()?, rows))).into()
}
