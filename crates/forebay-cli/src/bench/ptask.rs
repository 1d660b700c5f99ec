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

use std::sync::Arc;
use std::time::Instant;

use forebay::hal::{Arg as HalArg, Buffer, Device, Fence, Kernel, Listed, Queue, Recorded, cpu::HostMemory};
use forebay::{Arg, Datablock, Geometry, Graph, Kind, Launch, Result, Runtime, Source, Task, Template};

use super::schema::{Row, median};

/// Repetitions of every measurement, interleaved; the median counts.
const REPEATS: usize = 5;
/// Least time of one measurement, s.
const LEAST: f64 = 0.05;

/// One operation of a graph: `n`×`n` floats in, `n`×`n` floats out.
struct Op {
    entry: &'static str,
    /// Numbers of values: graph inputs first, then outputs of earlier operations.
    inputs: Vec<usize>,
    /// The first input is overwritten and is the output.
    in_place: bool,
    numbers: Vec<u32>,
}

struct Dag {
    name: String,
    n: usize,
    sources: usize,
    ops: Vec<Op>,
}

const KERNELS: &str = "
KERNEL void gemm(GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *c, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float s = 0.0f;
  for (uint k = 0; k < n; k++) s += a[y * n + k] * b[k * n + x];
  c[y * n + x] = s / (float)n;
}
KERNEL void madd(GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *c, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) c[y * n + x] = a[y * n + x] + b[y * n + x];
}
KERNEL void mcopy(GLOBAL const float *a, GLOBAL float *c, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) c[y * n + x] = a[y * n + x];
}
KERNEL void bitonic(GLOBAL float *v, uint n, uint k, uint j) {
  uint i = gid_y() * n + gid_x();
  if (gid_x() >= n || gid_y() >= n) return;
  uint o = i ^ j;
  if (o > i) {
    float a = v[i], b = v[o];
    if ((a > b) == ((i & k) == 0u)) { v[i] = b; v[o] = a; }
  }
}
KERNEL void fdtd_h(GLOBAL const float *e, GLOBAL const float *h, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float right = x + 1 < n ? e[y * n + x + 1] : 0.0f, below = y + 1 < n ? e[(y + 1) * n + x] : 0.0f;
  out[y * n + x] = h[y * n + x] - 0.5f * (right + below - 2.0f * e[y * n + x]);
}
KERNEL void fdtd_e(GLOBAL const float *h, GLOBAL const float *e, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float left = x > 0 ? h[y * n + x - 1] : 0.0f, above = y > 0 ? h[(y - 1) * n + x] : 0.0f;
  out[y * n + x] = e[y * n + x] - 0.7f * (2.0f * h[y * n + x] - left - above);
}
";

/// The same kernels for the CPU.
fn cpu_kernel(entry: &'static str) -> Source {
    Source::Cpu(Arc::new(move |s| {
        let rows = s.start..s.end;
        if entry == "bitonic" {
            let [n, k, j] = [1, 2, 3].map(|i| s.scalar(i) as usize);
            // SAFETY: the pair (i, i ^ j) is touched by the part that owns the smaller index only.
            let v = unsafe { s.slice_mut::<f32>(0) };
            for i in rows.start * n..rows.end * n {
                let o = i ^ j;
                if o > i && (v[i] > v[o]) == (i & k == 0) {
                    v.swap(i, o);
                }
            }
            return;
        }
        if entry == "mcopy" {
            let (a, n) = (s.slice::<f32>(0), s.scalar(2) as usize);
            // SAFETY: each part writes its own rows only.
            let c = unsafe { s.slice_mut::<f32>(1) };
            c[rows.start * n..rows.end * n].copy_from_slice(&a[rows.start * n..rows.end * n]);
            return;
        }
        let (a, b, n) = (s.slice::<f32>(0), s.slice::<f32>(1), s.scalar(3) as usize);
        // SAFETY: each part writes its own rows only.
        let c = unsafe { s.slice_mut::<f32>(2) };
        for y in rows {
            let out = &mut c[y * n..(y + 1) * n];
            match entry {
                "gemm" => {
                    out.fill(0.0);
                    for k in 0..n {
                        let f = a[y * n + k];
                        out.iter_mut().zip(&b[k * n..(k + 1) * n]).for_each(|(o, b)| *o += f * b);
                    }
                    out.iter_mut().for_each(|o| *o /= n as f32);
                }
                "madd" => out.iter_mut().zip(&a[y * n..]).zip(&b[y * n..]).for_each(|((o, a), b)| *o = a + b),
                "fdtd_h" => {
                    for (x, o) in out.iter_mut().enumerate() {
                        let right = if x + 1 < n { a[y * n + x + 1] } else { 0.0 };
                        let below = if y + 1 < n { a[(y + 1) * n + x] } else { 0.0 };
                        *o = b[y * n + x] - 0.5 * (right + below - 2.0 * a[y * n + x]);
                    }
                }
                _ => {
                    for (x, o) in out.iter_mut().enumerate() {
                        let left = if x > 0 { a[y * n + x - 1] } else { 0.0 };
                        let above = if y > 0 { a[(y - 1) * n + x] } else { 0.0 };
                        *o = b[y * n + x] - 0.7 * (2.0 * a[y * n + x] - left - above);
                    }
                }
            }
        }
    }))
}

fn source(kind: Kind, entry: &'static str) -> Source {
    if kind == Kind::Cpu { cpu_kernel(entry) } else { Source::Portable(KERNELS.into()) }
}

/// A binary tree of `leaves` inputs.
fn tree(entry: &'static str, leaves: usize, n: usize) -> Dag {
    let mut ops: Vec<Op> = Vec::new();
    let mut level: Vec<usize> = (0..leaves).collect();
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|pair| {
                ops.push(Op { entry, inputs: pair.to_vec(), in_place: false, numbers: vec![] });
                leaves + ops.len() - 1
            })
            .collect();
    }
    Dag { name: format!("{entry} tree {n}²"), n, sources: leaves, ops }
}

/// `width` chains of `depth`, summed up at the end so that there is one result.
fn rectangle(entry: &'static str, width: usize, depth: usize, n: usize) -> Dag {
    let mut ops: Vec<Op> = Vec::new();
    let mut ends = Vec::new();
    for w in 0..width {
        let mut at = w;
        for _ in 0..depth {
            ops.push(Op { entry, inputs: vec![at], in_place: false, numbers: vec![] });
            at = width + ops.len() - 1;
        }
        ends.push(at);
    }
    while ends.len() > 1 {
        let (a, b) = (ends.remove(0), ends.remove(0));
        ops.push(Op { entry: "madd", inputs: vec![a, b], in_place: false, numbers: vec![] });
        ends.push(width + ops.len() - 1);
    }
    Dag { name: format!("{entry} rectangle {width}×{depth} {n}²"), n, sources: width, ops }
}

/// All stages of a bitonic sort, one task each.
fn sort(n: usize) -> Dag {
    let count = (n * n) as u32;
    let mut ops: Vec<Op> = Vec::new();
    let mut k = 2;
    while k <= count {
        let mut j = k / 2;
        while j > 0 {
            let input = ops.len();
            ops.push(Op { entry: "bitonic", inputs: vec![input], in_place: true, numbers: vec![k, j] });
            j /= 2;
        }
        k *= 2;
    }
    Dag { name: format!("bitonic sort {n}² ({} tasks)", ops.len()), n, sources: 1, ops }
}

/// Leap-frog steps of a two-field grid: each field's step needs both.
fn fdtd(steps: usize, n: usize) -> Dag {
    let (mut e, mut h) = (0, 1);
    let mut ops: Vec<Op> = Vec::new();
    for _ in 0..steps {
        ops.push(Op { entry: "fdtd_h", inputs: vec![e, h], in_place: false, numbers: vec![] });
        h = 1 + ops.len();
        ops.push(Op { entry: "fdtd_e", inputs: vec![h, e], in_place: false, numbers: vec![] });
        e = 1 + ops.len();
    }
    ops.push(Op { entry: "madd", inputs: vec![e, h], in_place: false, numbers: vec![] });
    Dag { name: format!("fdtd {steps} steps {n}²"), n, sources: 2, ops }
}

fn host_error(e: forebay::hal::Error) -> forebay::Error {
    forebay::Error::Device(e)
}

/// What the hand-written variants share: kernels, and one device.
struct Bench<'a> {
    device: &'a Arc<dyn Device>,
    dag: &'a Dag,
    kernels: Vec<Kernel>,
    inputs: Vec<Buffer>,
}

impl<'a> Bench<'a> {
    fn new(device: &'a Arc<dyn Device>, dag: &'a Dag) -> Result<Self> {
        let kind = device.info().kind;
        let kernels = dag.ops.iter().map(|o| device.compile(&source(kind, o.entry), o.entry)).collect::<Result<_, _>>();
        let bytes = 4 * dag.n * dag.n;
        let inputs = (0..dag.sources).map(|i| {
            let b = device.alloc_host(bytes)?;
            fill(&b, i);
            Ok(b)
        });
        Ok(Bench {
            device,
            dag,
            kernels: kernels.map_err(host_error)?,
            inputs: inputs.collect::<Result<_, _>>().map_err(host_error)?,
        })
    }

    fn bytes(&self) -> usize {
        4 * self.dag.n * self.dag.n
    }

    fn args<'b>(&self, op: usize, values: &[&'b Buffer]) -> Vec<HalArg<'b>> {
        let mut args: Vec<HalArg<'b>> = values.iter().map(|b| HalArg::Buffer(b)).collect();
        args.push(HalArg::U32(self.dag.n as u32));
        args.extend(self.dag.ops[op].numbers.iter().map(|n| HalArg::U32(*n)));
        args
    }

    fn space(&self) -> Geometry {
        Geometry::new(self.dag.n, self.dag.n, 1)
    }

    fn launch(&self, q: &mut dyn Queue, op: usize, values: &[&Buffer]) -> Result<()> {
        q.launch(&self.kernels[op], &self.space(), &self.args(op, values)).map_err(host_error)
    }

    /// One operation with its copies: what a component that knows nothing of its neighbours must do.
    fn modular_op(&self, q: &mut dyn Queue, op: usize, host: &[Buffer], device: &[Buffer]) -> Result<()> {
        let (o, bytes) = (&self.dag.ops[op], self.bytes());
        for (i, &v) in o.inputs.iter().enumerate() {
            q.copy(&host[v], 0, &device[i], 0, bytes).map_err(host_error)?;
        }
        let out = if o.in_place { &device[0] } else { &device[o.inputs.len()] };
        let mut values: Vec<&Buffer> = device[..o.inputs.len()].iter().collect();
        if !o.in_place {
            values.push(out);
        }
        self.launch(q, op, &values)?;
        q.copy(out, 0, &host[self.dag.sources + op], 0, bytes).map_err(host_error)?;
        let f = q.fence().map_err(host_error)?;
        q.wait(f).map_err(host_error)
    }

    fn host_values(&self) -> Result<Vec<Buffer>> {
        let made = (0..self.dag.ops.len()).map(|_| self.device.alloc_host(self.bytes())).collect::<Result<Vec<_>, _>>();
        Ok(self.staging()?.into_iter().chain(made.map_err(host_error)?).collect())
    }

    /// Host buffers for an item's inputs.
    fn staging(&self) -> Result<Vec<Buffer>> {
        (0..self.dag.sources)
            .map(|_| self.device.alloc_host(self.bytes()))
            .collect::<Result<_, _>>()
            .map_err(host_error)
    }

    /// What the program does before an item: writes its inputs.
    fn produce(&self, staging: &[Buffer]) {
        for (from, to) in self.inputs.iter().zip(staging) {
            if let (Some(f), Some(t)) = (from.host_ptr(), to.host_ptr()) {
                // SAFETY: both are host memory of `bytes`, different allocations, and no command uses them now: each
                // variant has waited for the item that used `to` last.
                unsafe { std::ptr::copy_nonoverlapping(f.as_ptr(), t.as_ptr(), self.bytes()) };
            }
        }
    }

    fn device_values(&self, n: usize) -> Result<Vec<Buffer>> {
        (0..n).map(|_| self.device.alloc(self.bytes())).collect::<Result<_, _>>().map_err(host_error)
    }

    fn single_threaded_modular(&self, items: usize) -> Result<(f64, Buffer)> {
        let mut q = self.device.queue().map_err(host_error)?;
        let (host, device) = (self.host_values()?, self.device_values(3)?);
        let t = Instant::now();
        for _ in 0..items {
            self.produce(&host);
            for op in 0..self.dag.ops.len() {
                self.modular_op(&mut *q, op, &host, &device)?;
            }
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, host[host.len() - 1].clone()))
    }

    fn modular(&self, items: usize) -> Result<(f64, Buffer)> {
        const THREADS: usize = 4;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let t = Instant::now();
        let results: Vec<Result<Option<Buffer>>> = std::thread::scope(|s| {
            let work = || -> Result<Option<Buffer>> {
                let mut q = self.device.queue().map_err(host_error)?;
                let (host, device) = (self.host_values()?, self.device_values(3)?);
                let mut any = None;
                while next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < items {
                    self.produce(&host);
                    for op in 0..self.dag.ops.len() {
                        self.modular_op(&mut *q, op, &host, &device)?;
                    }
                    any = host.last().cloned();
                }
                Ok(any)
            };
            let handles: Vec<_> = (0..THREADS).map(|_| s.spawn(work)).collect();
            handles.into_iter().map(|h| h.join().unwrap_or(Ok(None))).collect()
        });
        let seconds = t.elapsed().as_secs_f64() / items as f64;
        let all = results.into_iter().collect::<Result<Vec<_>>>()?;
        let last = all.into_iter().flatten().next();
        Ok((seconds, last.unwrap_or(HostMemory::buffer(self.bytes()).map_err(host_error)?)))
    }

    /// All operations of one item on a queue, between a copy in and a copy out.
    fn item(
        &self,
        q: &mut dyn Queue,
        staging: &[Buffer],
        values: &[Buffer],
        out: &Buffer,
        graph: Option<&mut Recorded>,
    ) -> Result<()> {
        self.produce(staging);
        for (i, b) in staging.iter().enumerate() {
            q.copy(b, 0, &values[i], 0, self.bytes()).map_err(host_error)?;
        }
        let mut at: Vec<usize> = (0..self.dag.sources).collect();
        let mut listed = Vec::new();
        for (op, o) in self.dag.ops.iter().enumerate() {
            let to = if o.in_place { at[o.inputs[0]] } else { self.dag.sources + op };
            let mut v: Vec<&Buffer> = o.inputs.iter().map(|&i| &values[at[i]]).collect();
            if !o.in_place {
                v.push(&values[to]);
            }
            match graph {
                None => self.launch(q, op, &v)?,
                Some(_) => listed.push((op, self.args(op, &v), if o.in_place { 1 } else { 1 << o.inputs.len() })),
            }
            at.push(to);
        }
        if let Some(recorded) = graph {
            let list: Vec<Listed<'_>> = listed
                .iter()
                .map(|(op, args, writes)| Listed {
                    kernel: &self.kernels[*op],
                    geometry: self.space(),
                    args,
                    writes: *writes,
                })
                .collect();
            q.launch_list(&list, recorded).map_err(host_error)?;
        }
        q.copy(&values[at[at.len() - 1]], 0, out, 0, self.bytes()).map_err(host_error)
    }

    fn hand_coded(&self, items: usize) -> Result<(f64, Buffer)> {
        let mut q = self.device.queue().map_err(host_error)?;
        let values = self.device_values(self.dag.sources + self.dag.ops.len())?;
        let out = self.device.alloc_host(self.bytes()).map_err(host_error)?;
        let staging = self.staging()?;
        let t = Instant::now();
        for _ in 0..items {
            self.item(&mut *q, &staging, &values, &out, None)?;
            let f = q.fence().map_err(host_error)?;
            q.wait(f).map_err(host_error)?;
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, out))
    }

    fn asynchronous(&self, items: usize) -> Result<(f64, Buffer)> {
        struct Set {
            q: Box<dyn Queue>,
            staging: Vec<Buffer>,
            values: Vec<Buffer>,
            out: Buffer,
            graph: Recorded,
            last: Option<Fence>,
        }
        let captures = self.device.info().kind == Kind::Cuda;
        let mut sets = (0..2)
            .map(|_| {
                Ok(Set {
                    q: self.device.queue().map_err(host_error)?,
                    staging: self.staging()?,
                    values: self.device_values(self.dag.sources + self.dag.ops.len())?,
                    out: self.device.alloc_host(self.bytes()).map_err(host_error)?,
                    graph: Recorded::default(),
                    last: None,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let t = Instant::now();
        for i in 0..items {
            let s = &mut sets[i % 2];
            if let Some(f) = s.last.take() {
                s.q.wait(f).map_err(host_error)?;
            }
            let graph = captures.then_some(&mut s.graph);
            self.item(&mut *s.q, &s.staging, &s.values, &s.out, graph)?;
            s.last = Some(s.q.fence().map_err(host_error)?);
        }
        for s in &mut sets {
            if let Some(f) = s.last.take() {
                s.q.wait(f).map_err(host_error)?;
            }
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, sets[0].out.clone()))
    }

    /// The Forebay graph of the operations.
    fn graph(&self) -> Result<(Graph, Vec<forebay::Feed>, forebay::Drain)> {
        let (dag, kind) = (self.dag, self.device.info().kind);
        let t = Template::array::<f32>([dag.n, dag.n]);
        let mut g = Graph::new(dag.name.clone());
        let mut ids: Vec<forebay::TaskId> = Vec::new();
        let mut feeds = Vec::new();
        for (i, o) in dag.ops.iter().enumerate() {
            let mut task = Task::new(format!("{}{i}", o.entry));
            let mut args = Vec::new();
            for p in 0..o.inputs.len() {
                task = task.input(&format!("i{p}"), t);
                args.push(Arg::Port(format!("i{p}")));
            }
            task = if o.in_place { task.in_place("i0", "o") } else { task.output("o", t) };
            if !o.in_place {
                args.push(Arg::port("o"));
            }
            args.push(Arg::U32(dag.n as u32));
            args.extend(o.numbers.iter().map(|n| Arg::U32(*n)));
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

    fn dataflow(&self, items: usize) -> Result<(f64, Datablock)> {
        let kind = self.device.info().kind;
        let devices = if kind == Kind::Cpu { Vec::new() } else { vec![self.device.clone()] };
        let rt = Runtime::builder().devices(devices).build()?;
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

fn fill(b: &Buffer, seed: usize) {
    if let Some(p) = b.host_ptr() {
        // SAFETY: host memory of that size, used by nobody else yet.
        let v = unsafe { std::slice::from_raw_parts_mut(p.as_ptr().cast::<f32>(), b.len() / 4) };
        for (i, v) in v.iter_mut().enumerate() {
            *v = ((i.wrapping_mul(2_654_435_761) ^ seed) % 1000) as f32 / 1000.0;
        }
    }
}

fn as_floats(b: &Buffer) -> &[f32] {
    match b.host_ptr() {
        // SAFETY: host memory of that size; commands that write it have been waited for.
        Some(p) => unsafe { std::slice::from_raw_parts(p.as_ptr().cast(), b.len() / 4) },
        None => &[],
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs().max(1.0))
}

fn dags(full: bool, kind: Kind) -> Vec<Dag> {
    let mut out = Vec::new();
    let sizes: &[usize] = if full { &[64, 256, 1024] } else { &[64, 256] };
    for &n in sizes {
        // An n³ product of large matrices says nothing about the runtime on a CPU, only takes minutes.
        if n <= 256 || kind == Kind::Cuda {
            out.push(tree("gemm", 8, n));
        }
        out.push(tree("madd", 16, n));
        out.push(rectangle("mcopy", 4, 6, n));
        out.push(fdtd(8, n));
        if n <= 256 || kind == Kind::Cuda {
            out.push(sort(n));
        }
    }
    out
}

fn geometric_mean(v: &[f64]) -> f64 {
    (v.iter().map(|v| v.ln()).sum::<f64>() / v.len().max(1) as f64).exp()
}

/// Runs the benchmark on every device here (or on one kind); `full` adds the 1024² sizes.
pub fn run(only: Option<Kind>, full: bool) -> Result<Vec<Row>> {
    let (devices, _) = forebay::hal::discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
    let mut rows = Vec::new();
    for d in devices.iter().filter(|d| only.is_none_or(|k| d.info().kind == k)) {
        let kind = d.info().kind;
        let mut ratios: [Vec<f64>; 4] = Default::default();
        for dag in dags(full, kind) {
            let b = Bench::new(d, &dag)?;
            b.hand_coded(2)?;
            let (once, first) = b.hand_coded(3)?;
            let (_, flow) = b.dataflow(2)?;
            if !same(as_floats(&first), flow.as_slice()?) {
                let why = "the dataflow result differs from the hand-coded one".into();
                return Err(forebay::Error::Task { task: dag.name.clone(), why });
            }
            let items = ((LEAST / once) as usize).clamp(5, 2000);
            eprintln!("ptask: {kind}: {} ({items} items)", dag.name);
            let mut times: [Vec<f64>; 5] = Default::default();
            for _ in 0..REPEATS {
                times[0].push(b.dataflow(items)?.0);
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
    }
    Ok(rows)
}
