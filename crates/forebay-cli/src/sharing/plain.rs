//! Another of the programs: it knows nothing of Forebay's dataflow or service. It launches kernels of one length as any program
//! does, and says when they had ended.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::Kind;
use rustix::process::{Signal, set_parent_process_death_signal};

use forebay::hal::{self, Arg, Buffer, Geometry, Kernel, Queue, Source};

/// Threads for each of the device's units: enough that a kernel has all of the device.
const THREADS: usize = 256;
/// Kernels on their way in a program that never waits for one.
const AHEAD: usize = 2;
/// Rounds in the measurement of how long one takes: short, and long.
const TRIAL: [u32; 2] = [2_000, 20_000];
/// Measurements of each length, of which the quickest counts.
const TRIALS: usize = 7;
/// Between two lines of report.
const REPORT: Duration = Duration::from_millis(50);

const SPIN: &str = "
KERNEL void spin(GLOBAL float *x, uint rounds) {
  uint i = gid_x();
  float a = x[i];
  for (uint r = 0; r < rounds; r++) a = a * 0.9999f + 0.5f;
  x[i] = a;
}";

/// Options of a program.
#[derive(clap::Args)]
pub struct Options {
    /// Rounds of a kernel; with --measure, it says how many last --task-us instead
    #[arg(long, default_value_t = 1000)]
    rounds: u32,
    /// Length of a kernel to find the rounds of, microseconds
    #[arg(long, default_value_t = 1000)]
    task_us: u64,
    /// Say how many rounds last so long, and end
    #[arg(long)]
    measure: bool,
    /// Wait for each kernel, and say how long each took
    #[arg(long)]
    each: bool,
    /// Milliseconds between two kernels on the average, from 0.6 to 1.4 times that; each is waited for
    #[arg(long)]
    period_ms: Option<u64>,
    /// Milliseconds of work before a rest
    #[arg(long, requires = "rest_ms")]
    work_ms: Option<u64>,
    /// Milliseconds of rest after work
    #[arg(long, requires = "work_ms")]
    rest_ms: Option<u64>,
    /// Work and rest last from half to one and a half times as long
    #[arg(long)]
    random: bool,
    /// Where it works: opencl or cuda
    #[arg(long, default_value = "cuda")]
    device: Kind,
}

/// ns of the clock that all processes have in common.
pub fn clock_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// From 0 up to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    /// From `1 - spread` to `1 + spread` times as long.
    fn about(&mut self, ms: u64, spread: f64) -> Duration {
        Duration::from_secs_f64(ms as f64 / 1e3 * (1.0 + spread * (2.0 * self.next() - 1.0)))
    }
}

struct Work {
    queue: Box<dyn Queue>,
    kernel: Kernel,
    memory: Buffer,
    space: Geometry,
}

impl Work {
    fn new(kind: Kind) -> hal::Result<Self> {
        let (devices, missing) = hal::discover(&[kind]);
        let none = || hal::Error::Unsupported { device: kind.name().into(), what: "a device of this kind".into() };
        let why = || missing.into_iter().next().map_or_else(none, |m| m.1);
        let device = devices.into_iter().next().ok_or_else(why)?;
        let items = device.info().compute_units.max(1) as usize * THREADS;
        let kernel = device.compile(&Source::Portable(SPIN.into()), "spin")?;
        let (queue, memory) = (device.queue()?, device.alloc(4 * items)?);
        let mut work = Work { queue, kernel, memory, space: Geometry::linear(items) };
        work.queue.fill(&work.memory, 0, 4 * items, 0)?;
        work.once(1)?;
        Ok(work)
    }

    fn launch(&mut self, rounds: u32) -> hal::Result<hal::Fence> {
        self.queue.launch(&self.kernel, &self.space, &[Arg::Buffer(&self.memory), Arg::U32(rounds)])?;
        self.queue.fence()
    }

    fn once(&mut self, rounds: u32) -> hal::Result<()> {
        let fence = self.launch(rounds)?;
        self.queue.wait(fence)
    }

    /// Rounds that last so long, by the clock: what a kernel costs besides is in both lengths.
    fn calibrate(&mut self, task: Duration) -> hal::Result<u32> {
        let mut quickest = |rounds: u32| -> hal::Result<f64> {
            let mut least = f64::MAX;
            for _ in 0..TRIALS {
                let begun = Instant::now();
                self.once(rounds)?;
                least = least.min(begun.elapsed().as_secs_f64());
            }
            Ok(least)
        };
        let (short, long) = (quickest(TRIAL[0])?, quickest(TRIAL[1])?);
        let a_round = ((long - short) / f64::from(TRIAL[1] - TRIAL[0])).max(1e-12);
        Ok((task.as_secs_f64() / a_round).clamp(1.0, f64::from(u32::MAX)) as u32)
    }
}

#[derive(Default)]
struct Said {
    items: u64,
    at_ns: u64,
    latencies_ms: Vec<f64>,
    rests: Vec<[u64; 3]>,
}

fn work(o: &Options, work: &mut Work, said: &Mutex<Said>) -> hal::Result<()> {
    let mut random = Random(u64::from(std::process::id()));
    let spread = if o.random { 0.5 } else { 0.0 };
    let done = |latency: Option<Duration>, rest: Option<[u64; 2]>| {
        let at = clock_ns();
        let mut s = said.lock().unwrap_or_else(PoisonError::into_inner);
        (s.items, s.at_ns) = (s.items + 1, at);
        s.latencies_ms.extend(latency.map(|l| l.as_secs_f64() * 1e3));
        s.rests.extend(rest.map(|[from, to]| [from, to, at]));
    };
    let (mut rested, mut ahead) = (None, VecDeque::new());
    loop {
        let until = o.work_ms.map(|ms| Instant::now() + random.about(ms, spread));
        while until.is_none_or(|u| Instant::now() < u) {
            if let Some(ms) = o.period_ms {
                std::thread::sleep(random.about(ms, 0.4));
            }
            if o.each || o.period_ms.is_some() {
                let begun = Instant::now();
                work.once(o.rounds)?;
                done(Some(begun.elapsed()), rested.take());
                continue;
            }
            ahead.push_back(work.launch(o.rounds)?);
            if ahead.len() >= AHEAD {
                ahead.pop_front().map_or(Ok(()), |f| work.queue.wait(f))?;
                done(None, rested.take());
            }
        }
        for fence in ahead.drain(..) {
            work.queue.wait(fence)?;
            done(None, None);
        }
        let from = clock_ns();
        std::thread::sleep(random.about(o.rest_ms.unwrap_or(0), spread));
        rested = Some([from, clock_ns()]);
    }
}

/// Runs until it is killed.
pub fn run(o: &Options) -> Result<(), String> {
    // One that is off its GPU at that moment would never notice by itself that nobody listens any more.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let text = |e: hal::Error| e.to_string();
    let mut it = Work::new(o.device).map_err(text)?;
    if o.measure {
        crate::say(&it.calibrate(Duration::from_micros(o.task_us)).map_err(text)?.to_string());
        return Ok(());
    }
    let said = Mutex::new(Said::default());
    std::thread::scope(|s| {
        s.spawn(|| {
            loop {
                std::thread::sleep(REPORT);
                let mut s = said.lock().unwrap_or_else(PoisonError::into_inner);
                let (items, at) = (s.items, s.at_ns);
                let (latencies, rests) = (std::mem::take(&mut s.latencies_ms), std::mem::take(&mut s.rests));
                drop(s);
                for [from, to, first] in rests {
                    crate::say(&format!("rest {from} {to} {first}"));
                }
                let all: Vec<String> = latencies.iter().map(|l| format!(" {l:.4}")).collect();
                crate::say(&format!("{items} @{at}{}", all.concat()));
            }
        });
        if let Err(e) = work(o, &mut it, &said) {
            eprintln!("forebay: {e}");
            std::process::exit(1);
        }
    });
    Ok(())
}
