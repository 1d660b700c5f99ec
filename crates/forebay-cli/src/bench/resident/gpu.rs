//! The same experiments on a CUDA device, against ordinary launches, CUDA graphs and one kernel that does all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::hal::{Arg, Buffer, Device, Direction, Geometry, Kernel, Kind, Listed, Method, Queue, Recorded, Source};
use forebay::resident::{Builder, Call, Grid};

use super::graph_while::GraphWhile;
use super::one_block::{ECHO, OneBlock};
use super::search::Csr;
use super::{TASKS, in_a_row};
use crate::bench::part::{self, Part};
use crate::bench::schema::{Row, median, quantile};

const FUNCTIONS: [&str; 9] = ["echo", "chain", "hop", "work", "sweep", "tree", "softmax", "level", "many"];
/// What the grid is compared with.
const KERNELS: [&str; 10] = [
    "echo_alone",
    "work_alone",
    "softmax_alone",
    "level_alone",
    "search_at_once",
    "one_block_at_once",
    "churn",
    "outstanding",
    "mixed",
    "fb_heap_setup",
];
/// Items of a range that a block does at a time: of little work, and where the work in them differs.
const LIGHT: u64 = 1 << 15;
const UNEVEN: u64 = 64;
/// Most bytes of the heap that is compared with others.
const HEAP: u64 = 4 << 30;
/// The numbers of threads at which heaps are compared.
const THREADS: [usize; 2] = [16_384, 270_336];
/// Pieces that each of them has from the device's malloc, which takes so long for them as others for a hundred times as many.
const FEW_PIECES: usize = 16;
/// Threads of a block of the kernels that are compared with.
const GROUP: usize = 256;

/// Where the counts are in `Search` of tasks.cu.
const COUNTS: usize = 40;

/// What a measurement can fail with.
type Failure = String;
type Result<T> = std::result::Result<T, Failure>;

fn text(e: impl std::fmt::Display) -> Failure {
    e.to_string()
}

/// How much is done.
#[derive(Clone, Copy)]
struct Effort {
    repeats: usize,
    trips: usize,
    /// Most items and tasks of a measurement.
    items: usize,
    /// Depth of the tree of tasks.
    depth: u64,
    chain: u32,
    scale: u32,
    threads: usize,
    /// Pieces that a thread has from a heap, one after another: so many that a kernel takes milliseconds.
    pieces: usize,
}

const FULL: Effort = Effort {
    repeats: 7,
    trips: 20_000,
    items: 10_000_000,
    depth: 24,
    chain: 20_000,
    scale: 20,
    threads: usize::MAX,
    pieces: 1024,
};
const QUICK: Effort =
    Effort { repeats: 1, trips: 50, items: 1000, depth: 6, chain: 100, scale: 8, threads: 512, pieces: 16 };

struct Gpu {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    /// While an experiment needs it: what it is compared with has the device to itself.
    grid: Option<Grid>,
    kernels: Vec<(&'static str, Kernel)>,
    effort: Effort,
    rows: Vec<Row>,
}

/// A graph to be searched from vertex 0.
struct Searched {
    name: String,
    graph: Csr,
    /// The distances.
    expected: Vec<u32>,
    /// What a CUDA graph that repeats itself takes, ms. That is another process, which would share the GPU's time with a
    /// grid that waits: it is measured before there is one.
    repeating: Option<f64>,
}

impl Searched {
    fn all(Effort { repeats, chain, scale, .. }: Effort, text: &str) -> Result<Vec<Self>> {
        let graphs = [
            (format!("a chain of {chain}"), Csr::chain(chain)),
            ("a square of 600 with holes".into(), Csr::holes(600.min(8 * scale * scale))),
            (format!("Kronecker, scale {}", scale - 4), Csr::kronecker(scale - 4)),
            (format!("Kronecker, scale {scale}"), Csr::kronecker(scale)),
            (format!("Erdős–Rényi, 2^{} vertices", scale - 2), Csr::anywhere(1 << (scale - 2))),
        ];
        let program = GraphWhile::new(text);
        let search = |(name, graph): (String, Csr)| {
            let expected = graph.serial();
            let repeating = program.search(&graph, &expected, repeats)?;
            Ok(Searched { name, graph, expected, repeating })
        };
        graphs.into_iter().map(search).collect()
    }
}

/// One that takes longer hangs: most take seconds, the searches with their graphs a minute.
const LIMIT: Duration = Duration::from_secs(300);

/// The experiments; with `quick` so little of each that it only shows that it works.
pub fn parts(quick: bool) -> Vec<Part> {
    let effort = if quick { QUICK } else { FULL };
    let of = |name: &str, run: Experiment| {
        let part = Part::of_rows(format!("cuda: {name}"), move |rows| {
            let mut gpu = Gpu::open(effort)?;
            let done = run(&mut gpu).and_then(|()| gpu.end());
            rows.append(&mut gpu.rows);
            done
        });
        part.within(LIMIT)
    };
    vec![
        of("round trips", Gpu::round_trips),
        of("throughput", Gpu::throughput),
        of("searches", Gpu::searches),
        of("the heap", Gpu::heaps),
        of("small computations", Gpu::softmax),
        of("an idle grid beside other work, and its end", Gpu::idle),
        of("an idle grid on a part of the device", Gpu::idle_on_a_part),
        of("tasks that make tasks", Gpu::trees),
    ]
}

fn builder() -> Builder {
    Builder::new(TASKS).functions(FUNCTIONS).grain(LIGHT).queue(1 << 16).ring(1 << 14).threads(GROUP)
}

/// An experiment.
type Experiment = fn(&mut Gpu) -> Result<()>;

fn seconds(repeats: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let mut samples = Vec::new();
    for _ in 0..repeats {
        let begun = Instant::now();
        f()?;
        samples.push(begun.elapsed().as_secs_f64());
    }
    Ok(median(samples))
}

fn filled(device: &Arc<dyn Device>, q: &mut dyn Queue, bytes: &[u8]) -> Result<Buffer> {
    let b = device.alloc(bytes.len()).map_err(text)?;
    put(q, &b, bytes)?;
    Ok(b)
}

fn put(q: &mut dyn Queue, to: &Buffer, bytes: &[u8]) -> Result<()> {
    // SAFETY: only read, and awaited here.
    unsafe {
        q.transfer(Method::Engine, Direction::ToDevice, to, 0, bytes.as_ptr().cast_mut(), bytes.len()).map_err(text)?;
    }
    finish(q)
}

fn get(q: &mut dyn Queue, from: &Buffer, bytes: &mut [u8]) -> Result<()> {
    // SAFETY: awaited here.
    unsafe {
        q.transfer(Method::Engine, Direction::ToHost, from, 0, bytes.as_mut_ptr(), bytes.len()).map_err(text)?;
    }
    finish(q)
}

fn finish(q: &mut dyn Queue) -> Result<()> {
    let f = q.fence().map_err(text)?;
    q.wait(f).map_err(text)
}

fn address(b: &Buffer) -> u64 {
    b.address().unwrap_or(0)
}

/// Bytes of the heap that is compared with others.
fn heap_bytes(device: &dyn Device, effort: Effort) -> u64 {
    if effort.threads == usize::MAX { HEAP.min(device.info().memory_bytes / 4) } else { 16 << 20 }
}

/// Enough threads for all of the device, each for several of `n` items at most.
fn shape(device: &Arc<dyn Device>, n: usize) -> Geometry {
    let most = device.info().compute_units as usize * 2048;
    Geometry::linear(n.clamp(1, most).next_multiple_of(GROUP)).with_group(GROUP, 1, 1)
}

impl Gpu {
    /// With all that is compared with compiled: loading would wait for a grid.
    fn open(effort: Effort) -> Result<Self> {
        let device = part::first(Kind::Cuda)?;
        // The device's own heap is given as much as all threads hold at a time, or it would only say that it has nothing. Once
        // code that uses it is loaded, its size stays. (What is allocated first makes the context current here.)
        drop(device.alloc(1).map_err(text)?);
        forebay::hal::cuda::set_malloc_heap((heap_bytes(&*device, effort) / 2) as usize).map_err(text)?;
        let source = Source::CudaCpp(builder().text().into());
        let kernels = KERNELS.map(|n| device.compile(&source, n).map(|k| (n, k))).into_iter();
        let kernels = kernels.collect::<std::result::Result<Vec<_>, _>>().map_err(text)?;
        let queue = device.queue().map_err(text)?;
        Ok(Gpu { device, queue, grid: None, kernels, effort, rows: Vec::new() })
    }

    fn kernel(&self, name: &str) -> Result<Kernel> {
        let found = self.kernels.iter().find(|(n, _)| *n == name);
        found.map(|(_, k)| k.clone()).ok_or_else(|| format!("no kernel {name}"))
    }

    fn begin(&mut self, with: Builder) -> Result<()> {
        self.end()?;
        self.grid = Some(with.start_on(&self.device).map_err(text)?);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.grid.take().map_or(Ok(()), |mut g| g.stop().map_err(text))
    }

    fn grid(&self) -> Result<&Grid> {
        self.grid.as_ref().ok_or_else(|| "no grid".into())
    }

    fn call(&self, name: &str, args: &[u64]) -> Result<Call> {
        Ok(Call::new(self.grid()?.function(name).map_err(text)?).args(bytemuck::cast_slice(args)))
    }

    fn wait(&self, call: Call) -> Result<u64> {
        let ticket = self.grid()?.submit(call).map_err(text)?;
        Ok(self.grid()?.wait(ticket).map_err(text)?.result_as::<u64>())
    }

    /// Submits all of these together, and waits for them.
    fn together(&self, calls: impl Iterator<Item = Call>) -> Result<()> {
        let tickets = self.grid()?.submit_all(calls).map_err(text)?;
        tickets.into_iter().try_for_each(|t| self.grid()?.wait(t).map(drop).map_err(text))
    }

    /// A: from the host to a task and back; and from a task to the one that it makes.
    fn round_trips(&mut self) -> Result<()> {
        let Effort { trips, repeats, .. } = self.effort;
        self.begin(builder())?;
        let mut ours = Vec::with_capacity(trips);
        for i in 0..trips as u64 {
            let call = self.call("echo", &[i])?;
            let begun = Instant::now();
            let answer = self.wait(call)?;
            ours.push(begun.elapsed().as_secs_f64() * 1e6);
            assert_eq!(answer, i + 1);
        }
        let n = trips as u64;
        let chain = self.call("chain", &[n])?;
        let dependent = seconds(repeats, || self.wait(chain).map(|left| assert_eq!(left, 0)))?;
        let hop = self.call("hop", &[n, u64::MAX, 0])?;
        let mut elsewhere = 0;
        let across = seconds(repeats, || {
            let grid = self.grid()?;
            let done = grid.wait(grid.submit(hop).map_err(text)?).map_err(text)?;
            let [left, changes] = done.result_as::<[u64; 2]>();
            elsewhere = changes * 100 / n;
            if left == 0 { Ok(()) } else { Err(format!("{left} of {n} tasks had no room")) }
        })?;
        self.end()?;
        let (echo, to) = (self.kernel("echo_alone")?, self.device.alloc(8).map_err(text)?);
        let mut launches = Vec::with_capacity(trips);
        for i in 0..trips.min(2000) as u64 {
            let begun = Instant::now();
            let args = [Arg::Buffer(&to), Arg::U64(i)];
            self.queue.launch(&echo, &Geometry::linear(1).with_group(1, 1, 1), &args).map_err(text)?;
            finish(&mut *self.queue)?;
            launches.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        let mut one_block = Vec::with_capacity(trips);
        {
            let mut block = OneBlock::start(&self.device, &self.kernel("one_block_at_once")?, GROUP)?;
            for i in 0..trips as u64 {
                let begun = Instant::now();
                let k = block.submit(ECHO, [i, 0]);
                let answer = block.wait(k);
                one_block.push(begun.elapsed().as_secs_f64() * 1e6);
                assert_eq!(answer, i + 1);
            }
        }
        for (what, q, limit) in [("median", 0.5, 2.2), ("p99", 0.99, 2.6)] {
            let row =
                Row::new(format!("A, cuda: host to task and back, {what}"), "µs", Some(quantile(ours.clone(), q)));
            let row = row.peer("launch and wait", Some(quantile(launches.clone(), q)));
            self.rows.push(row.peer("one block, as GROSR", Some(quantile(one_block.clone(), q))).below(limit));
        }
        let row = Row::new(
            "A, cuda: a task and the one that it makes, on the same multiprocessor",
            "µs",
            Some(dependent / n as f64 * 1e6),
        );
        let launches = Some(2.0 * quantile(launches, 0.5));
        self.rows.push(row.peer("two launches, each awaited", launches).below(0.4));
        let what =
            format!("A, cuda: a task and the one that it makes for others ({elsewhere} % on another multiprocessor)");
        let row = Row::new(what, "µs", Some(across / n as f64 * 1e6));
        self.rows.push(row.peer("two launches, each awaited", launches).below(1.5));
        Ok(())
    }

    /// B: many small tasks, one by one and as a range.
    fn throughput(&mut self) -> Result<()> {
        let Effort { repeats, items, .. } = self.effort;
        for n in [1000usize, 100_000, 10_000_000].map(|n| n.min(items)) {
            let data = filled(&self.device, &mut *self.queue, bytemuck::cast_slice(&vec![1u32; n]))?;
            let rate = |s: f64| n as f64 / s / 1e6;
            let (work, device) = (self.kernel("work_alone")?, self.device.clone());
            let q = &mut *self.queue;
            let bulk = rate(seconds(repeats, || {
                let args = [Arg::Buffer(&data), Arg::U64(0), Arg::U64(n as u64)];
                q.launch(&work, &shape(&device, n), &args).map_err(text)?;
                finish(q)
            })?);
            let few = n.min(1000);
            let one = Geometry::linear(1).with_group(1, 1, 1);
            let mut each = |awaited: bool| -> Result<f64> {
                let s = seconds(repeats, || {
                    for i in 0..few as u64 {
                        q.launch(&work, &one, &[Arg::Buffer(&data), Arg::U64(i), Arg::U64(1)]).map_err(text)?;
                        if awaited {
                            finish(q)?;
                        }
                    }
                    finish(q)
                })?;
                Ok(few as f64 / s / 1e6)
            };
            let (synced, batched) = (each(true)?, each(false)?);
            let args: Vec<[Arg<'_>; 3]> =
                (0..few as u64).map(|i| [Arg::Buffer(&data), Arg::U64(i), Arg::U64(1)]).collect();
            let list: Vec<Listed<'_>> =
                args.iter().map(|a| Listed { kernel: &work, geometry: one, args: a, writes: 1 }).collect();
            let mut recorded = Recorded::default();
            let graph = seconds(repeats, || {
                q.launch_list(&list, &mut recorded).map_err(text)?;
                finish(q)
            })?;
            let block = {
                let mut block = OneBlock::start(&self.device, &self.kernel("one_block_at_once")?, GROUP)?;
                let (n, to) = (n.min(50_000) as u32, address(&data));
                let s = seconds(repeats, || {
                    block.many(n, |i| [to, u64::from(i)]);
                    Ok(())
                })?;
                f64::from(n) / s / 1e6
            };
            self.begin(builder())?;
            let all = self.call("sweep", &[address(&data)])?.range(0, n as u64);
            let range = rate(seconds(repeats, || self.wait(all).map(drop))?);
            let call = self.call("work", &[address(&data)])?;
            let calls = || (0..n as u64).map(|i| call.range(i, 1));
            let singles = (n <= 1_000_000).then(|| {
                let grid = self.grid()?;
                seconds(repeats, || in_a_row(grid, calls()).map_err(text))
            });
            let singles = singles.transpose()?.map(rate);
            let together = rate(seconds(repeats, || self.together(calls()))?);
            self.end()?;
            let row = Row::new(format!("B, cuda: {n} items as a range"), "M items/s", Some(range));
            self.rows.push(
                row.peer("one kernel for all", Some(bulk))
                    .at_least("one kernel for all", if n > 1000 { 0.9 } else { 1.0 }),
            );
            if let Some(singles) = singles {
                let row = Row::new(format!("B, cuda: {n} tasks of one item, one producer"), "M tasks/s", Some(singles));
                let row = row.peer("a launch each, awaited", Some(synced)).peer("a launch each", Some(batched));
                let row = row.peer("one block, as GROSR", Some(block));
                self.rows.push(row.peer("a CUDA graph", Some(few as f64 / graph / 1e6)));
            }
            let what = format!("B, cuda: {n} tasks of one item, one producer, submitted together");
            let row = Row::new(what, "M tasks/s", Some(together)).peer("one by one", singles);
            let row = row.peer("a launch each", Some(batched)).peer("one block, as GROSR", Some(block));
            self.rows.push(row.peer("a CUDA graph", Some(few as f64 / graph / 1e6)).above(150.0));
        }
        Ok(())
    }

    /// C: breadth-first search that stays on the device.
    fn searches(&mut self) -> Result<()> {
        let repeats = self.effort.repeats;
        for Searched { name, graph, expected, repeating } in Searched::all(self.effort, &builder().text())? {
            let n = graph.vertices();
            let device = self.device.clone();
            let mut place = |words: &[u32]| filled(&device, &mut *self.queue, bytemuck::cast_slice(words));
            let (offsets, edges) = (place(&graph.offsets)?, place(&graph.edges)?);
            let (distances, a, b) = (place(&vec![0; n])?, place(&vec![0; n])?, place(&vec![0; n])?);
            // `Search` of tasks.cu.
            let counts = u64::from_ne_bytes(bytemuck::cast([1u32, 0]));
            let image = [address(&offsets), address(&edges), address(&distances), address(&a), address(&b), counts];
            let search = filled(&device, &mut *self.queue, bytemuck::cast_slice(&image))?;
            let mut first = vec![u32::MAX; n];
            first[0] = 0;
            let meet = device.alloc(16).map_err(text)?;
            let mut timed = [const { Vec::new() }; 3];
            // The grid's turn comes last: the others have the device to themselves.
            for which in (0..=repeats).flat_map(|_| [1, 2]).chain((0..=repeats).map(|_| 0)) {
                if which == 0 && self.grid.is_none() {
                    self.begin(builder().grain(UNEVEN))?;
                }
                put(&mut *self.queue, &distances, bytemuck::cast_slice(&first))?;
                put(&mut *self.queue, &a, bytemuck::cast_slice(&[0u32]))?;
                put(&mut *self.queue, &search, bytemuck::cast_slice(&image))?;
                // Who has come to the end of a level, and the counts of three levels.
                put(&mut *self.queue, &meet, bytemuck::cast_slice(&[0u32, 1, 0, 0]))?;
                let begun = Instant::now();
                match which {
                    0 => drop(self.wait(self.call("level", &[address(&search), 0])?)?),
                    1 => self.by_level(&search)?,
                    _ => self.at_once(&search, &meet)?,
                }
                timed[which].push(begun.elapsed().as_secs_f64() * 1e3);
                let mut found = vec![0u32; n];
                get(&mut *self.queue, &distances, bytemuck::cast_slice_mut(&mut found))?;
                if found != expected {
                    let wrong = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                    return Err(format!("a search of {name} went wrong ({which}): {wrong} of {n} distances"));
                }
            }
            self.end()?;
            let [ours, theirs, at_once] = timed.map(|t| median(t[1..].to_vec()));
            let row = Row::new(format!("C, cuda: search of {name}"), "ms", Some(ours))
                .peer("a launch for each level", Some(theirs))
                .peer("one kernel whose blocks wait for each other", Some(at_once))
                .peer("a CUDA graph that repeats itself", repeating);
            self.rows.push(if name.starts_with("a chain") {
                row.below(15.0)
            } else {
                row.at_most("a launch for each level", 1.0)
            });
        }
        Ok(())
    }

    /// As many blocks as are there at once for certain, beside the grid.
    fn at_once(&mut self, search: &Buffer, meet: &Buffer) -> Result<()> {
        let (kernel, units) = (self.kernel("search_at_once")?, self.device.info().compute_units as usize);
        let shape = Geometry::linear(units * GROUP).with_group(GROUP, 1, 1);
        let args = [Arg::Buffer(search), Arg::Buffer(meet), Arg::U64(address(meet) + 4)];
        self.queue.launch(&kernel, &shape, &args).map_err(text)?;
        finish(&mut *self.queue)
    }

    fn by_level(&mut self, search: &Buffer) -> Result<()> {
        let kernel = self.kernel("level_alone")?;
        let mut n = 1u32;
        for level in 0u32.. {
            if n == 0 {
                break;
            }
            // The other one of `Search::count`.
            let next = COUNTS + 4 * ((level as usize + 1) & 1);
            self.queue.fill(search, next, 4, 0).map_err(text)?;
            let args = [Arg::Buffer(search), Arg::U32(level), Arg::U32(n)];
            self.queue.launch(&kernel, &shape(&self.device, n as usize * 32), &args).map_err(text)?;
            let mut count = [0u8; 4];
            // SAFETY: awaited here.
            unsafe {
                let to = count.as_mut_ptr();
                self.queue.transfer(Method::Engine, Direction::ToHost, search, next, to, 4).map_err(text)?;
            }
            finish(&mut *self.queue)?;
            n = u32::from_ne_bytes(count);
        }
        Ok(())
    }

    /// E: many small computations.
    fn softmax(&mut self) -> Result<()> {
        let (repeats, items) = (self.effort.repeats, 5000.min(self.effort.items) as u64);
        let input: Vec<f32> = (0..items * 256).map(|i| (i * 7919 % 1000) as f32 / 100.0 - 5.0).collect();
        let from = filled(&self.device, &mut *self.queue, bytemuck::cast_slice(&input))?;
        let to = self.device.alloc(input.len() * 4).map_err(text)?;
        let (kernel, device) = (self.kernel("softmax_alone")?, self.device.clone());
        let q = &mut *self.queue;
        let bulk = seconds(repeats, || {
            let args = [Arg::Buffer(&from), Arg::Buffer(&to), Arg::U64(items)];
            q.launch(&kernel, &shape(&device, items as usize * 32), &args).map_err(text)?;
            finish(q)
        })?;
        self.begin(builder().grain(UNEVEN))?;
        let call = self.call("softmax", &[address(&from), address(&to)])?;
        let singles = seconds(repeats, || in_a_row(self.grid()?, (0..items).map(|i| call.range(i, 1))).map_err(text))?;
        let together = seconds(repeats, || self.together((0..items).map(|i| call.range(i, 1))))?;
        let mut sums = vec![0f32; input.len()];
        get(&mut *self.queue, &to, bytemuck::cast_slice_mut(&mut sums))?;
        let wrong = sums.chunks(256).filter(|c| (c.iter().sum::<f32>() - 1.0).abs() > 1e-3).count();
        if wrong > 0 {
            return Err(format!("the shares of {wrong} of {items} rows do not add up to 1"));
        }
        let range = seconds(repeats, || self.wait(call.range(0, items)).map(drop))?;
        let row = |what: &str, s: f64| {
            let row = Row::new(format!("E, cuda: {items} × ReLU and softmax of 256, {what}"), "ms", Some(s * 1e3));
            row.peer("one kernel for all", Some(bulk * 1e3)).at_most("one kernel for all", 1.3)
        };
        let each = [row("a task for each", singles), row("a task for each, submitted together", together)];
        let rows = [row("as a range", range)].into_iter().chain(each);
        self.rows.extend(rows);
        Ok(())
    }

    /// F: a tree of tasks that the device makes.
    fn trees(&mut self) -> Result<()> {
        let Effort { repeats, depth, .. } = self.effort;
        self.begin(builder().queue(1 << 18))?;
        let (call, mut inline) = (self.call("tree", &[depth])?, 0);
        let s = seconds(repeats, || {
            inline = self.wait(call)?;
            Ok(())
        })?;
        let done = ((2u64 << depth) - 1).saturating_sub(inline);
        let row = Row::new(
            format!("F, cuda: tasks that make tasks, {done} of them"),
            "M tasks/s",
            Some(done as f64 / s / 1e6),
        );
        self.rows.push(row.above(2000.0));
        Ok(())
    }

    /// What a grid that waits costs others, and how long it takes to end.
    fn idle(&mut self) -> Result<()> {
        let n = self.effort.items;
        let (work, device) = (self.kernel("work_alone")?, self.device.clone());
        let data = filled(&device, &mut *self.queue, bytemuck::cast_slice(&vec![1u32; n]))?;
        let repeats = self.effort.repeats;
        let time = |q: &mut dyn Queue| {
            seconds(repeats, || {
                for _ in 0..20 {
                    let args = [Arg::Buffer(&data), Arg::U64(0), Arg::U64(n as u64)];
                    q.launch(&work, &shape(&device, n), &args).map_err(text)?;
                }
                finish(q)
            })
        };
        self.begin(builder())?;
        let beside = time(&mut *self.queue)?;
        let begun = Instant::now();
        self.end()?;
        let end = begun.elapsed().as_secs_f64() * 1e3;
        let alone = time(&mut *self.queue)?;
        let row = Row::new("a kernel for the whole device, beside a grid that waits", "ms", Some(beside * 1e3));
        self.rows.push(row.peer("without the grid", Some(alone * 1e3)).at_most("without the grid", 1.02));
        self.rows.push(Row::new("from being told to the grid's end", "ms", Some(end)).below(1.0));
        Ok(())
    }

    /// The same, where the grid has a part of the device and the kernels have the rest. No other grid runs.
    fn idle_on_a_part(&mut self) -> Result<()> {
        let units = self.device.info().compute_units;
        let [few, rest] = match self.device.split((units / 8).max(1)) {
            Ok(parts) => parts,
            Err(why) => {
                eprintln!("resident: no grid on a part of the device: {why}");
                return Ok(());
            }
        };
        let n = self.effort.items;
        let (work, mut q) = (self.kernel("work_alone")?, rest.queue().map_err(text)?);
        let data = filled(&rest, &mut *q, bytemuck::cast_slice(&vec![1u32; n]))?;
        let mut time = || {
            seconds(self.effort.repeats, || {
                for _ in 0..20 {
                    let args = [Arg::Buffer(&data), Arg::U64(0), Arg::U64(n as u64)];
                    q.launch(&work, &shape(&rest, n), &args).map_err(text)?;
                }
                finish(&mut *q)
            })
        };
        let mut grid = Builder::new(TASKS).functions(FUNCTIONS).start_on(&few).map_err(text)?;
        let beside = time()?;
        grid.stop().map_err(text)?;
        let alone = time()?;
        let (few, rest) = (few.info().compute_units, rest.info().compute_units);
        let what = format!("a kernel on {rest} multiprocessors, beside a grid that waits on {few} others");
        let row = Row::new(what, "ms", Some(beside * 1e3)).peer("without the grid", Some(alone * 1e3));
        self.rows.push(row.at_most("without the grid", 1.02));
        Ok(())
    }

    /// D: the heap against the device's own malloc and a pool that was divided before, in ordinary kernels.
    fn heaps(&mut self) -> Result<()> {
        let (effort, device) = (self.effort, &self.device.clone());
        let bytes = heap_bytes(&**device, effort);
        let (memory, done) = (device.alloc(bytes as usize).map_err(text)?, device.alloc(8).map_err(text)?);
        let units = device.info().compute_units.max(1);
        let args = [Arg::Buffer(&memory), Arg::U64(bytes), Arg::U32(units), Arg::U32(64), Arg::Buffer(&done)];
        let setup = self.kernel("fb_heap_setup")?;
        let q = &mut *self.queue;
        q.launch(&setup, &shape(device, 4 * units as usize * GROUP), &args).map_err(text)?;
        finish(q)?;
        let heap = address(&memory).next_multiple_of(128);
        // What Gallatin reaches on an H200, in G/s: measured before, since it is another program.
        let cases = [
            ("churn", "64 B, freed at once", 1usize, [2.42, 4.27]),
            ("outstanding", "64 B, 16 held", 16, [2.24, 4.69]),
            ("mixed", "64 to 512 B, 4 held", 4, [1.59, 3.20]),
        ];
        for (name, what, held, gallatin) in cases {
            for (threads, gallatin) in THREADS.into_iter().zip(gallatin) {
                let threads = threads.min(effort.threads);
                let pool = device.alloc(threads * held * 512).map_err(text)?;
                let kernel = self.kernel(name)?;
                let q = &mut *self.queue;
                let mut rate = |way: u32| -> Result<(f64, f64)> {
                    let pieces = if way == 1 { effort.pieces.min(FEW_PIECES) } else { effort.pieces };
                    let rounds = (pieces / held).max(1);
                    let all = (threads * rounds * held) as u64;
                    let mut had = 0;
                    let s = seconds(effort.repeats, || {
                        q.fill(&done, 0, 8, 0).map_err(text)?;
                        let args = [
                            Arg::U64(heap),
                            Arg::U32(way),
                            Arg::Buffer(&pool),
                            Arg::U32(rounds as u32),
                            Arg::Buffer(&done),
                        ];
                        let shape = Geometry::linear(threads).with_group(GROUP, 1, 1);
                        q.launch(&kernel, &shape, &args).map_err(text)?;
                        let mut n = [0u8; 8];
                        get(q, &done, &mut n)?;
                        had = u64::from_ne_bytes(n);
                        Ok(())
                    })?;
                    Ok((all as f64 / s / 1e6, had as f64 / all as f64))
                };
                let (ours, success) = rate(0)?;
                if success < 1.0 {
                    return Err(format!("{name}: {:.2} % of the pieces could be had", success * 100.0));
                }
                let row = Row::new(format!("D, cuda: {threads} threads, {what}"), "M pieces/s", Some(ours));
                let (theirs, success) = rate(1)?;
                if success < 1.0 {
                    eprintln!("resident: the device's malloc had {:.2} % of the pieces of {name}", success * 100.0);
                }
                let row = row.peer("the device's malloc", (success == 1.0).then_some(theirs));
                self.rows.push(row.peer("a pool for each thread", Some(rate(2)?.0)).above(2.0 * 1000.0 * gallatin));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tasks_compile_for_gpus() {
        let Ok(nvrtc) = forebay::hal::cuda::Nvrtc::get() else {
            eprintln!("skipped: no NVRTC here");
            return;
        };
        let text = Builder::new(TASKS).functions(FUNCTIONS).text();
        let options = forebay::hal::portable::NVRTC_OPTIONS;
        for architecture in [75, 90, 100] {
            assert!(!nvrtc.compile(&text, "fb_grid", architecture, &options, "test").unwrap().is_empty());
        }
    }

    #[test]
    fn the_graph_that_repeats_itself_compiles() {
        let text = Builder::new(TASKS).functions(FUNCTIONS).text();
        match crate::bench::peers::build_cuda("graph_while.cu", &text, "sm_90") {
            Ok(program) => assert!(program.path().exists()),
            Err(why) if why.contains("no nvcc") => eprintln!("skipped: {why}"),
            Err(why) => panic!("{why}"),
        }
    }
}
