//! `forebay bench ptask`: PTask's figure 11. The same operations as a dataflow graph and written by hand.
//!
//! Every variant runs the same kernels through the same device layer on one queue a thread, so the differences are in
//! who moves data and who waits. In all of them the program writes every item's inputs anew, into memory from which the
//! device copies fastest:
//! - *single-threaded modular*: per operation copy in, run, copy out, wait; one thread.
//! - *modular*: the same operations, each item's operations spread over four threads that own queues of their own.
//! - *hand-coded*: one thread; inputs in once, everything launched, the result out, wait.
//! - *hand-coded asynchronous*: the same with two sets of buffers: an item is issued before the last one is waited for;
//!   on CUDA its kernels are a graph per set, built once and replayed.
//! - *dataflow*: a Forebay graph, fed as fast as it takes.

mod by_hand;
mod dags;
mod kernels;

use std::sync::Arc;
use std::time::Instant;

use forebay::hal::Device;
use forebay::{Arg, Datablock, Graph, Kind, Launch, Result, Runtime, Task, Template};

use super::part::{self, Part};
use super::schema::{Row, median};
use by_hand::{Bench, as_floats};
pub use kernels::source;

/// Repetitions of every measurement, interleaved; the median counts.
const REPEATS: usize = 5;
/// Least time of one measurement, s.
const LEAST: f64 = 0.05;

impl Bench<'_> {
    /// The Forebay graph of the operations.
    fn graph(&self) -> Result<(Graph, Vec<forebay::Feed>, forebay::Drain)> {
        let (dag, kind) = (self.dag, self.device.info().kind);
        let template = |value: usize| Template::array::<f32>([dag.size(value)]);
        let mut g = Graph::new(dag.name.clone());
        let mut ids: Vec<forebay::TaskId> = Vec::new();
        let mut feeds = Vec::new();
        for (i, o) in dag.ops.iter().enumerate() {
            let mut task = Task::new(format!("{}{i}", o.entry));
            let mut args = Vec::new();
            for (p, &v) in o.inputs.iter().enumerate() {
                task = task.input(&format!("i{p}"), template(v));
                args.push(Arg::Port(format!("i{p}")));
            }
            task = if o.in_place { task.in_place("i0", "o") } else { task.output("o", template(dag.sources + i)) };
            if !o.in_place {
                args.push(Arg::port("o"));
            }
            args.extend(o.numbers.iter().map(|n| Arg::U32(*n)));
            let task = task.geometry(o.space);
            let id = g.add(task.kernels(kind, [Launch::new(source(kind, o.entry), o.entry, args)]))?;
            for (p, &v) in o.inputs.iter().enumerate() {
                let port = format!("i{p}");
                if v < dag.sources {
                    feeds.push((v, g.feed((id, &port), 4)?));
                } else {
                    g.connect((ids[v - dag.sources], "o"), (id, &port))?;
                }
            }
            ids.push(id);
        }
        let drain = g.drain((ids[ids.len() - 1], "o"), 4)?;
        // An input that feeds several operations is pushed into each; the handles are one block.
        feeds.sort_by_key(|f| f.0);
        let mut by_source = Vec::new();
        for (v, f) in feeds {
            by_source.push((v, f));
        }
        Ok((g, by_source.into_iter().map(|f| f.1).collect(), drain))
    }

    fn feed_sources(&self) -> Vec<usize> {
        let mut v: Vec<usize> =
            self.dag.ops.iter().flat_map(|o| o.inputs.iter().copied()).filter(|v| *v < self.dag.sources).collect();
        v.sort_unstable();
        v
    }

    fn dataflow(&self, items: usize, fusion: bool) -> Result<(f64, Datablock)> {
        let kind = self.device.info().kind;
        let devices = if kind == Kind::Cpu { Vec::new() } else { vec![self.device.clone()] };
        let rt = Runtime::builder().devices(devices).fusion(fusion).build()?;
        let (g, feeds, drain) = self.graph()?;
        let sources = self.feed_sources();
        let run = rt.start(g)?;
        let produce = || -> Result<()> {
            let mut made: Vec<Option<Datablock>> = vec![None; self.dag.sources];
            for (f, &v) in feeds.iter().zip(&sources) {
                let b = match &made[v] {
                    Some(b) => b.clone(),
                    None => {
                        let mut b = run.acquire(*f)?;
                        b.assign(as_floats(&self.inputs[v]))?;
                        made[v] = Some(b.clone());
                        b
                    }
                };
                run.push(*f, b)?;
            }
            Ok(())
        };
        // One item before the clock starts: the others' kernels have run before, too.
        produce()?;
        let mut last = run.pull(drain)?;
        last.as_slice::<f32>()?;
        let t = Instant::now();
        std::thread::scope(|s| -> Result<()> {
            let pusher = s.spawn(|| (0..items).try_for_each(|_| produce()));
            for _ in 0..items {
                last = run.pull(drain)?;
                // The others end with the result on the host, so does this.
                last.as_slice::<f32>()?;
            }
            pusher.join().unwrap_or(Ok(()))
        })?;
        Ok((t.elapsed().as_secs_f64() / items as f64, last))
    }
}
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs().max(1.0))
}

fn geometric_mean(v: &[f64]) -> f64 {
    (v.iter().map(|v| v.ln()).sum::<f64>() / v.len().max(1) as f64).exp()
}

/// A part for every kind of device here (or for one); `full` adds the 1024² sizes.
pub fn parts(only: Option<Kind>, full: bool) -> std::result::Result<Vec<Part>, String> {
    let kinds = part::kinds(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda], only)?;
    Ok(kinds.into_iter().map(|k| part::on_first(k, move |d, rows| run(d, full, rows))).collect())
}

fn run(d: &Arc<dyn Device>, full: bool, rows: &mut Vec<Row>) -> Result<()> {
    let kind = d.info().kind;
    let mut ratios: [Vec<f64>; 4] = Default::default();
    for dag in dags::all(full, kind) {
        let b = Bench::new(d, &dag)?;
        b.hand_coded(2)?;
        let (once, first) = b.hand_coded(3)?;
        let (_, flow) = b.dataflow(2, true)?;
        if !same(as_floats(&first), flow.as_slice()?) {
            let why = "the dataflow result differs from the hand-coded one".into();
            return Err(forebay::Error::Task { task: dag.name.clone(), why });
        }
        let items = ((LEAST / once) as usize).clamp(5, 2000);
        eprintln!("ptask: {kind}: {} ({items} items)", dag.name);
        let mut times: [Vec<f64>; 5] = Default::default();
        for _ in 0..REPEATS {
            times[0].push(b.dataflow(items, true)?.0);
            times[1].push(b.single_threaded_modular(items)?.0);
            times[2].push(b.modular(items)?.0);
            times[3].push(b.hand_coded(items)?.0);
            times[4].push(b.asynchronous(items)?.0);
        }
        let m = times.map(median);
        for (r, theirs) in ratios.iter_mut().zip(&m[1..]) {
            r.push(theirs / m[0]);
        }
        let us = |s: f64| Some(s * 1e6);
        rows.push(
            Row::new(format!("{kind}: {}", dag.name), "µs per item", us(m[0]))
                .peer("single-threaded modular", us(m[1]))
                .peer("modular", us(m[2]))
                .peer("hand-coded", us(m[3]))
                .peer("hand-coded asynchronous", us(m[4])),
        );
    }
    // The targets are for GPUs; on CPUs dataflow is to be at least as fast as hand-coded.
    let gpu = kind == Kind::Cuda;
    let targets = [
        ("single-threaded modular", None),
        ("modular", gpu.then_some(1.93)),
        ("hand-coded", Some(if gpu { 1.10 } else { 1.0 })),
        ("hand-coded asynchronous", gpu.then_some(1.0)),
    ];
    for (r, (name, target)) in ratios.iter().zip(targets) {
        let mean = geometric_mean(r);
        rows.push(Row {
            ratio: Some(mean),
            target: target.map_or(String::new(), |t| format!("{name} / dataflow ≥ {t}")),
            met: target.map(|t| mean >= t),
            ..Row::new(format!("{kind}: geometric mean, {name} / dataflow"), "ratio", Some(mean))
        });
    }
    Ok(())
}

/// `forebay bench fusion`: chains of small kernels as one region, against the same list by hand.
pub fn chain_parts(only: Option<Kind>) -> std::result::Result<Vec<Part>, String> {
    let kinds = part::kinds(&[Kind::OpenCl, Kind::Cuda], only)?;
    Ok(kinds.into_iter().map(|k| part::on_first(k, chains)).collect())
}

fn chains(d: &Arc<dyn Device>, rows: &mut Vec<Row>) -> Result<()> {
    let kind = d.info().kind;
    for tasks in [10, 100, 1000] {
        let dag = dags::chain(tasks);
        let b = Bench::new(d, &dag)?;
        b.hand_coded(2)?;
        let items = ((LEAST / b.hand_coded(3)?.0) as usize).clamp(5, 2000);
        eprintln!("fusion: {kind}: {tasks} tasks ({items} items)");
        let mut times: [Vec<f64>; 4] = Default::default();
        for _ in 0..REPEATS {
            times[0].push(b.dataflow(items, true)?.0);
            times[1].push(b.dataflow(items, false)?.0);
            times[2].push(b.hand_coded(items)?.0);
            times[3].push(b.asynchronous(items)?.0);
        }
        let m = times.map(|t| Some(median(t) * 1e6 / tasks as f64));
        let row = Row::new(format!("{kind}: chain of {tasks}"), "µs per task", m[0])
            .peer("dataflow, not fused", m[1])
            .peer("hand-coded", m[2])
            .peer("hand-coded list", m[3]);
        rows.push(match (m[0], m[3]) {
            (Some(ours), Some(list)) if kind == Kind::Cuda && tasks >= 100 => Row {
                ratio: Some(ours / list),
                target: "dataflow / hand-coded list ≤ 1.15".into(),
                met: Some(ours / list <= 1.15),
                ..row
            },
            _ => row,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pca_has_the_papers_sizes() {
        assert_eq!([10, 54].map(|c| dags::pca(c, 64).ops.len()), [229, 1197]);
    }

    #[test]
    fn every_operation_gives_the_same_by_hand_in_four_ways_and_as_dataflow() {
        let (devices, _) = forebay::hal::discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
        for d in devices.iter().filter(|d| d.compiles().is_ok()) {
            for dag in dags::of_size(16, true) {
                let b = Bench::new(d, &dag).unwrap();
                let (_, by_hand) = b.hand_coded(2).unwrap();
                let by_hand = as_floats(&by_hand);
                assert!(by_hand.iter().any(|v| *v != 0.0) || dag.name.contains("54"), "{}: all zero", dag.name);
                let others = [b.single_threaded_modular(1), b.modular(2), b.asynchronous(3)];
                for (other, way) in others.into_iter().zip(["single-threaded modular", "modular", "asynchronous"]) {
                    assert!(same(by_hand, as_floats(&other.unwrap().1)), "{}: {way}", dag.name);
                }
                let (_, flow) = b.dataflow(3, true).unwrap();
                assert!(same(by_hand, flow.as_slice().unwrap()), "{}: dataflow on {}", dag.name, d.info().name);
            }
        }
    }

    #[test]
    fn a_gpu_would_give_the_same() {
        const ALL: &str = "bench::ptask::tests::every_operation_gives_the_same_by_hand_in_four_ways_and_as_dataflow";
        crate::stand_in::again_as_ptx(&[ALL], &[]);
    }

    /// Both compute what they say: all components of a matrix leave nothing of it, and groups add up to everything.
    #[test]
    fn pca_and_group_by_are_right() {
        let (devices, _) = forebay::hal::discover(&[Kind::Cpu]);
        let few = dags::pca(2, 16);
        let rest = |dag: &dags::Dag| {
            let b = Bench::new(&devices[0], dag).unwrap();
            as_floats(&b.hand_coded(1).unwrap().1).iter().map(|v| v.abs()).sum::<f32>()
        };
        let (some, none) = (rest(&few), rest(&dags::pca(40, 16)));
        assert!(some > 1.0 && none < 1e-3 * some, "{some} left by 2 components, {none} by 40");
        let groups = dags::of_size(16, true).into_iter().find(|d| d.name.starts_with("group-by")).unwrap();
        let b = Bench::new(&devices[0], &groups).unwrap();
        let mut want = [0f32; kernels::GROUPS];
        for v in b.inputs.iter().flat_map(as_floats) {
            let k = (v * 1000.0 + 0.5) as u32;
            want[(k.wrapping_mul(2_654_435_761) >> 16) as usize % kernels::GROUPS] += v;
        }
        assert!(same(&want, as_floats(&b.hand_coded(1).unwrap().1)), "{want:?}");
    }
}
