//! One of the programs: it blurs a signal, without end or once in a while, and says how it is getting on.
//!
//! It is an ordinary program of the dataflow library. That there is a service it does not know.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::{Arg, Datablock, Drain, Feed, Graph, Kind, Launch, Running, Runtime, Source, Task, Template};
use forebay_proto::client::cpu_time_ns;

/// Values of the signal.
const LENGTH: usize = 4096;
/// Rounds of blurring in the measurement of how long one takes.
const TRIAL: u32 = 128;
/// Measurements of each length, of which the quickest counts.
const TRIALS: usize = 5;
/// What an endless program has on its way, µs of the device, and items at least.
const AHEAD_US: u64 = 1500;
const AHEAD: usize = 3;
/// Between two lines of report.
const REPORT: Duration = Duration::from_millis(50);

const BLUR: &str = "
KERNEL void blur(GLOBAL const float *x, GLOBAL float *y, uint rounds, uint n) {
  uint i = gid_x();
  if (i >= n) return;
  float a = x[i == 0 ? 0 : i - 1], b = x[i], c = x[i + 1 == n ? i : i + 1];
  for (uint r = 0; r < rounds; r++) { float m = 0.25f * a + 0.5f * b + 0.25f * c; a = b; b = m; c = 0.5f * (c + m); }
  y[i] = b;
}";

/// Options of a program.
#[derive(clap::Args)]
pub struct Options {
    /// Length of one task, microseconds of the device
    #[arg(long, default_value_t = 1000)]
    task_us: u64,
    /// Instead of blurring, write an encrypted file and read it back, without end
    #[arg(long)]
    encrypted_file: bool,
    /// Milliseconds between two items; without, as many as possible
    #[arg(long)]
    period_ms: Option<u64>,
    /// Where it works: cpu, opencl, cuda
    #[arg(long, default_value = "cpu")]
    device: Kind,
}

fn graph(kind: Kind, chains: usize, ahead: usize, rounds: u32) -> forebay::Result<(Graph, Vec<(Feed, Drain)>)> {
    let t = Template::array::<f32>([LENGTH]);
    let mut g = Graph::new("blur");
    let mut ends = Vec::new();
    for n in 0..chains {
        let task = Task::new(format!("blur{n}")).input("x", t).output("y", t);
        let task = if kind == Kind::Cpu {
            task.host(move |inv| {
                let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
                for (i, to) in y.iter_mut().enumerate() {
                    let (mut a, mut b, mut c) = (x[i.saturating_sub(1)], x[i], x[(i + 1).min(LENGTH - 1)]);
                    for _ in 0..rounds {
                        let m = 0.25 * a + 0.5 * b + 0.25 * c;
                        (a, b, c) = (b, m, 0.5 * (c + m));
                    }
                    *to = b;
                }
                Ok(())
            })
        } else {
            let args = [Arg::port("x"), Arg::port("y"), Arg::U32(rounds), Arg::Items(0)];
            task.kernels(kind, [Launch::new(Source::Portable(BLUR.into()), "blur", args)])
        };
        let id = g.add(task)?;
        ends.push((g.feed((id, "x"), ahead)?, g.drain((id, "y"), ahead)?));
    }
    Ok((g, ends))
}

fn item() -> forebay::Result<Datablock> {
    let signal: Vec<f32> = (0..LENGTH).map(|i| (i % 17) as f32).collect();
    Datablock::from_slice(Template::array::<f32>([LENGTH]), &signal)
}

fn once(run: &Running, (feed, drain): (Feed, Drain)) -> forebay::Result<()> {
    run.push(feed, item()?)?;
    // A block may come before what is in it: reading waits for that.
    run.pull(drain)?.as_slice::<f32>().map(drop)
}

/// Rounds that take so long, by this process's CPU time, or by the clock on a device that is no CPU.
fn calibrate(rt: &Runtime, kind: Kind, by_clock: bool, task: Duration) -> forebay::Result<u32> {
    // What an item costs besides is in both lengths, and compilers and the like are not in the quickest of a few.
    let quickest = |rounds: u32| -> forebay::Result<u64> {
        let (g, ends) = graph(kind, 1, AHEAD, rounds)?;
        let run = rt.start(g)?;
        let mut least = u64::MAX;
        for _ in 0..TRIALS {
            let (cpu, clock) = (cpu_time_ns(), Instant::now());
            (0..4).try_for_each(|_| once(&run, ends[0]))?;
            least = least.min(if by_clock { clock.elapsed().as_nanos() as u64 } else { cpu_time_ns() - cpu });
        }
        Ok(least / 4)
    };
    let (short, long) = (quickest(TRIAL)?, quickest(5 * TRIAL)?);
    let a_round = (long.saturating_sub(short) / u64::from(4 * TRIAL)).max(1);
    let besides = short.saturating_sub(a_round * u64::from(TRIAL));
    let rounds = (task.as_nanos() as u64).saturating_sub(besides) / a_round;
    Ok(u32::try_from(rounds).unwrap_or(u32::MAX).max(1))
}

fn failed(e: &forebay::Error) -> ! {
    eprintln!("forebay: {e}");
    std::process::exit(1)
}

fn encrypted_file(device: Kind) -> Result<(), String> {
    static CHUNKS: AtomicU64 = AtomicU64::new(0);
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(REPORT);
            crate::say(&CHUNKS.load(Ordering::Relaxed).to_string());
        }
    });
    super::file::run(device, || {
        CHUNKS.fetch_add(1, Ordering::Relaxed);
    })
}

/// Runs until it is killed.
pub fn run(o: &Options) -> Result<(), String> {
    if o.encrypted_file {
        return encrypted_file(o.device);
    }
    let text = |e: forebay::Error| e.to_string();
    let rt = Runtime::builder().only(o.device).map_err(text)?.build().map_err(text)?;
    let device = forebay::hal::discover(&[o.device]).0.into_iter().next();
    let by_clock = device.is_some_and(|d| !d.info().is_cpu && o.device != Kind::Cpu);
    let rounds = calibrate(&rt, o.device, by_clock, Duration::from_micros(o.task_us)).map_err(text)?;
    let ahead = AHEAD.max((AHEAD_US / o.task_us.max(1)) as usize);
    // An endless program uses all cores; one of few items has one at a time.
    let chains = if o.period_ms.is_none() && o.device == Kind::Cpu { rt.workers() } else { 1 };
    let (g, ends) = graph(o.device, chains, ahead, rounds).map_err(text)?;
    let run = rt.start(g).map_err(text)?;
    let items = AtomicU64::new(0);
    let latencies = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for &end in &ends {
            let (run, items, latencies) = (&run, &items, &latencies);
            s.spawn(move || {
                let mut next = Instant::now();
                if o.period_ms.is_none() {
                    (1..ahead).for_each(|_| {
                        run.push(end.0, item().unwrap_or_else(|e| failed(&e))).unwrap_or_else(|e| failed(&e))
                    });
                }
                loop {
                    if let Some(ms) = o.period_ms {
                        next += Duration::from_millis(ms);
                        std::thread::sleep(next.saturating_duration_since(Instant::now()));
                        // What could not be had in time is dropped, as a picture would be.
                        next = next.max(Instant::now() - Duration::from_millis(ms));
                    }
                    let begun = Instant::now();
                    once(run, end).unwrap_or_else(|e| failed(&e));
                    items.fetch_add(1, Ordering::Relaxed);
                    if o.period_ms.is_some() {
                        let took = begun.elapsed().as_secs_f64() * 1e3;
                        latencies.lock().unwrap_or_else(PoisonError::into_inner).push(took);
                    }
                }
            });
        }
        loop {
            std::thread::sleep(REPORT);
            let new = std::mem::take(&mut *latencies.lock().unwrap_or_else(PoisonError::into_inner));
            let all: Vec<String> = new.iter().map(|l| format!("{l:.3}")).collect();
            // Whoever started it has gone when nobody reads.
            crate::say(&format!("{} {}", items.load(Ordering::Relaxed), all.join(" ")));
        }
    })
}
