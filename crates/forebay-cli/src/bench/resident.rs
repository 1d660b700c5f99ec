//! `forebay bench resident`: the resident grid against other ways of handing out small pieces of work. On the CPU, so far.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use forebay::resident::{Builder, Call, Grid, Result};

use super::schema::{Row, median, quantile};

const TASKS: &str = r"
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
TASK(echo) { *(u64 *)fb_result(c) = arg(t, 0) + 1; }
TASK(work) {
  u32 *to = (u32 *)arg(t, 0);
  for (u64 i = t->first; i < t->first + t->count; i++) to[i] = to[i] * 2654435761u + 1;
}
TASK(tree) {
  const u64 depth = arg(t, 0);
  if (depth == 0) return;
  const u64 child[1] = {depth - 1};
  for (u32 i = 0; i < 2; i++)
    if (!fb_spawn(c, FN_tree, 0, 1, child, sizeof child)) __atomic_fetch_add((u64 *)fb_result(c), (2ull << (depth - 1)) - 1, __ATOMIC_RELAXED);
}
";
/// Repetitions of each measurement.
const REPEATS: usize = 9;
/// Round trips.
const TRIPS: usize = 20_000;
/// Depth of the tree: two million tasks.
const DEPTH: u64 = 20;

fn seconds(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
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

/// B: many small tasks, one by one and as a range, against a loop that does all of it.
fn throughput(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let work = grid.function("work")?;
    for n in [1000usize, 100_000, 10_000_000] {
        let mut data = vec![1u32; n];
        let address = (data.as_mut_ptr() as u64).to_ne_bytes();
        let call = Call::new(work).args(&address);
        let rate = |s: f64| n as f64 / s / 1e6;
        let range = rate(seconds(|| grid.wait(grid.submit(call.range(0, n as u64))?).map(drop_completion))?);
        let singles = if n > 1_000_000 {
            None
        } else {
            Some(rate(seconds(|| {
                let mut last = None;
                for i in 0..n as u64 {
                    last = Some(grid.submit(call.range(i, 1))?);
                }
                // They are taken in order, and may end in another.
                let mut all = grid.submit(call.range(0, 0)).map(Some)?;
                for t in last.into_iter().chain(all.take()) {
                    grid.wait(t)?;
                }
                Ok(())
            })?))
        };
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

/// All of it.
pub fn run() -> Result<Vec<Row>> {
    let grid = Builder::new(TASKS).functions(["echo", "work", "tree"]).grain(4096).queue(1 << 14).start_on_cpu()?;
    let mut rows = Vec::new();
    eprintln!("resident: round trips");
    round_trips(&grid, &mut rows)?;
    eprintln!("resident: throughput");
    throughput(&grid, &mut rows)?;
    eprintln!("resident: tasks that make tasks");
    tree(&grid, &mut rows)?;
    Ok(rows)
}
