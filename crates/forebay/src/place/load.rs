//! How much of each device is available now.
//!
//! Of the CPU, and of OpenCL devices that are the CPU: what the kernel says is runnable beside this process, and what the
//! service gives it. Of other devices: what the service says of this process's standing. Without a service they count as free:
//! then models are static.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use forebay_hal::fork::Own;
use forebay_proto::client::Account;

use super::cores::Cores;

/// Between looks.
const EVERY: Duration = Duration::from_millis(25);
/// Weight of a look.
const SMOOTHING: f64 = 0.4;
/// Less than this part of a device is not believed: predictions stay finite.
const LEAST: f64 = 0.01;
/// What a thread is to have of a fast core at least, to be worth while.
const FUNDED: f64 = 0.5;
/// Looks for nobody after which the thread ends.
const UNUSED: u32 = 40;

/// The load of the machine, and this process's part of it.
#[derive(Default)]
pub(crate) struct Load {
    /// Threads of others that are running or could, smoothed, in thousandths.
    others: AtomicU64,
    /// Threads that this process's tasks keep busy.
    own: AtomicU32,
    /// Somebody asked since the last look.
    asked: AtomicBool,
    running: Mutex<bool>,
}

/// Runnable threads on the machine.
fn runnable() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|l| l.strip_prefix("procs_running "))?.trim().parse().ok()
}

impl Load {
    pub(crate) fn of_process() -> Arc<Load> {
        static LOAD: Own<Weak<Load>> = Own::new();
        let mut held = LOAD.lock();
        held.upgrade().unwrap_or_else(|| {
            let load = Arc::new(Load::default());
            *held = Arc::downgrade(&load);
            load
        })
    }

    /// A load that says what it is told, for tests.
    #[cfg(test)]
    pub(crate) fn told(others: f64) -> Arc<Load> {
        let load = Load { running: Mutex::new(true), ..Load::default() };
        load.tell(others);
        Arc::new(load)
    }

    /// So many threads of others, from now on.
    #[cfg(test)]
    pub(crate) fn tell(&self, others: f64) {
        self.others.store((others * 1000.0) as u64, Ordering::Relaxed);
    }

    /// Begins to look, if nobody does. Until then others count as absent.
    fn watch(self: &Arc<Self>) {
        // A look costs less than an exchange.
        if self.asked.load(Ordering::Relaxed) || self.asked.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if !*running {
            let load = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("forebay-load".into()).spawn(move || look(&load));
            *running = thread.is_ok();
        }
    }

    /// Threads that are at work or want to be, others' and those that are counted as busy here but `itself`.
    #[inline]
    pub(crate) fn threads(self: &Arc<Self>, itself: usize) -> f64 {
        let (others, own) = self.both();
        others + f64::from(own.saturating_sub(itself as u32))
    }

    /// The same of others, and here.
    #[inline]
    pub(crate) fn both(self: &Arc<Self>) -> (f64, u32) {
        self.watch();
        (self.others.load(Ordering::Relaxed) as f64 * 0.001, self.own.load(Ordering::Relaxed))
    }

    /// The part of the CPU that a task which uses `width` of its cores would get of them beside so many threads, above 0 and
    /// up to 1.
    #[inline]
    pub(crate) fn part(of: &Cores, width: usize, threads: f64, account: Option<&Account>) -> f64 {
        let cores = of.count();
        let width = width.clamp(1, cores.max(1)) as f64;
        let told = account.map_or(1.0, |a| standing(a) * cores as f64 / width);
        of.part(width + threads).min(told).clamp(LEAST, 1.0)
    }

    /// Both: this process's other tasks want the cores, too, on whatever device that is the CPU.
    pub(crate) fn cpu(self: &Arc<Self>, of: &Cores, width: usize, itself: usize, account: Option<&Account>) -> f64 {
        Self::part(of, width, self.threads(itself), account)
    }

    /// This process keeps so many threads busy from now on, until the guard is dropped.
    pub(crate) fn busy(self: &Arc<Self>, width: usize) -> Busy {
        self.own.fetch_add(width as u32, Ordering::Relaxed);
        Busy(self.clone(), width as u32)
    }
}

/// The processor as others leave it, for whoever places work on it by other means than a [`crate::Runtime`].
pub struct Cpu {
    load: Arc<Load>,
    account: Option<Account>,
    cores: &'static Cores,
}

/// Threads of this process that are at work, until it is dropped.
pub struct Working(#[allow(dead_code, reason = "its end counts")] Busy);

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// This machine's. With the service's say, if there is a service.
    pub fn new() -> Self {
        let account = forebay_proto::client::Session::open("forebay").and_then(|s| Account::cpu(&s)).ok();
        Cpu { load: Load::of_process(), account, cores: Cores::here() }
    }

    /// Cores.
    pub fn cores(&self) -> usize {
        self.cores.count()
    }

    /// How many threads a parallel program had better have now: as many as would each be funded with half of a fast core at
    /// least, by what others leave and by what the service gives this process. More would wait for each other.
    pub fn threads(&self) -> usize {
        (2..=self.cores()).take_while(|n| self.available(*n, 0) >= FUNDED).last().unwrap_or(1)
    }

    /// The part of `width` cores that work on them would get now, above 0 and up to 1. `itself` is how many threads that are
    /// said to be at work are that work's own.
    pub fn available(&self, width: usize, itself: usize) -> f64 {
        self.load.cpu(self.cores, width, itself, self.account.as_ref())
    }

    /// The part of a fast core that each of so many threads of this process gets while all of them work, above 0 and up to 1.
    pub fn each(&self, threads: f64) -> f64 {
        let others = self.load.threads(usize::MAX);
        let told = self.account.as_ref().map_or(1.0, |a| standing(a) * self.cores() as f64 / threads.max(1.0));
        self.cores.part(threads + others).min(told).clamp(LEAST, 1.0)
    }

    /// How long it takes until all of these are done, beside each other and beside what others run. Each would take so long
    /// alone, in any unit, and keeps so many threads busy. Sorts them.
    pub fn together(&self, works: &mut [(f64, f64)]) -> f64 {
        works.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut threads: f64 = works.iter().map(|w| w.1).sum();
        let (mut done, mut passed) = (0.0, 0.0);
        // All come forward alike, until the shortest that is left is done and leaves its part to the others.
        for (alone, own) in works {
            if *alone > done {
                passed += (*alone - done) / self.each(threads);
                done = *alone;
            }
            threads -= *own;
        }
        passed
    }

    /// So many threads of this process are at work from now on.
    pub fn works(&self, width: usize) -> Working {
        Working(self.load.busy(width))
    }
}

/// What is available of a device that the service divides.
pub(crate) fn standing(account: &Account) -> f64 {
    if !account.session().is_served() {
        return 1.0;
    }
    account.standing().map_or(1.0, |s| s.share as f64 / 1e6).clamp(LEAST, 1.0)
}

/// Threads that are counted as this process's own.
pub(crate) struct Busy(Arc<Load>, u32);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.own.fetch_sub(self.1, Ordering::Relaxed);
    }
}

fn look(load: &Weak<Load>) {
    let mut unused = 0;
    loop {
        let Some(l) = load.upgrade() else { return };
        if let Some(all) = runnable() {
            // This thread is one of them.
            let own = u64::from(l.own.load(Ordering::Relaxed)) + 1;
            let others = all.saturating_sub(own) as f64 * 1000.0;
            let before = l.others.load(Ordering::Relaxed) as f64;
            l.others.store((before + (others - before) * SMOOTHING) as u64, Ordering::Relaxed);
        }
        unused = if l.asked.swap(false, Ordering::Relaxed) { 0 } else { unused + 1 };
        if unused > UNUSED {
            let mut running = l.running.lock().unwrap_or_else(PoisonError::into_inner);
            if !l.asked.load(Ordering::Relaxed) {
                *running = false;
                l.others.store(0, Ordering::Relaxed);
                return;
            }
        }
        drop(l);
        std::thread::sleep(EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_threads_are_advised_as_are_funded() {
        let cores = Box::leak(Box::new(Cores::alike(8)));
        let advised = |others: f64| Cpu { load: Load::told(others), account: None, cores }.threads();
        // With w of one's own each has 8 / (w + others).
        assert_eq!([0.0, 4.0, 8.0, 10.0, 14.0, 15.0, 100.0].map(advised), [8, 8, 8, 6, 2, 1, 1]);
    }

    #[test]
    fn what_runs_beside_each_other_takes_its_part_of_the_cores() {
        let cores = Box::leak(Box::new(Cores::alike(2)));
        let cpu = |others: f64| Cpu { load: Load::told(others), account: None, cores };
        let alone = cpu(0.0);
        assert_eq!([1.0, 2.0, 3.0, 4.0].map(|n| alone.each(n)), [1.0, 1.0, 2.0 / 3.0, 0.5]);
        assert_eq!([1.0, 2.0].map(|n| cpu(4.0).each(n)), [2.0 / 5.0, 2.0 / 6.0]);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(alone.together(&mut []), 0.0);
        close(alone.together(&mut [(7.0, 1.0), (9.0, 1.0)]), 9.0);
        // Three threads for two cores until the short one is done.
        close(alone.together(&mut [(100.0, 2.0), (20.0, 1.0)]), 20.0 * 1.5 + 80.0);
        close(alone.together(&mut [(10.0, 2.0), (20.0, 1.0)]), 10.0 * 1.5 + 10.0);
        close(cpu(4.0).together(&mut [(20.0, 1.0), (100.0, 2.0)]), 20.0 * 3.5 + 80.0 * 3.0);
        // With threads of the process that are at work already: they are among those that the caller names.
        let _own = alone.works(2);
        close(alone.together(&mut [(5.0, 2.0)]), 5.0);
    }

    /// Threads that spin are others to whoever does not count them as its own.
    #[test]
    fn load_is_seen_and_goes_away() {
        let load = Arc::new(Load::default());
        let cores = std::thread::available_parallelism().unwrap().get();
        let of = Cores::alike(cores);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..cores * 3 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let begun = std::time::Instant::now();
            while load.cpu(&of, 1, 0, None) > 0.5 && begun.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let seen = load.cpu(&of, 1, 0, None);
            stop.store(true, Ordering::Relaxed);
            assert!(seen <= 0.5, "three others for each core, and {seen} are available");
        });
        let own = load.busy(2);
        assert_eq!(load.own.load(Ordering::Relaxed), 2);
        // Others of its own are load for a task, it itself is none.
        let (with, without) = (load.cpu(&Cores::alike(2), 2, 0, None), load.cpu(&Cores::alike(2), 2, 2, None));
        assert!(with < without, "{with} {without}");
        drop(own);
        assert_eq!(load.own.load(Ordering::Relaxed), 0);
    }
}
