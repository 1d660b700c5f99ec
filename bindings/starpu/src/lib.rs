//! Forebay's placement for StarPU programs, which need no change.
//!
//! StarPU 1.3: `LD_PRELOAD=libforebay_starpu.so program`; its `starpu_init` then begins with our policy, unless a policy was
//! chosen by the program or by `STARPU_SCHED`. StarPU 1.4: `STARPU_SCHED_LIB=libforebay_starpu.so STARPU_SCHED=forebay program`.
//! `FOREBAY_STARPU_LOG=1` says at the end how many tasks each worker had.
//!
//! What a codelet takes on cores is learned as the time that threads were at work on it: load does not change that. StarPU's
//! own history models take the time that passes, and load in with it.

#![cfg(starpu)]
// A panic here would be the end of somebody else's program.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use forebay::place::{Cpu, Model, Sample, Working};

mod threads;

unsafe extern "C" {
    #[allow(non_upper_case_globals, reason = "C's name")]
    static forebay_policy: c_void;
    fn forebay_init(conf: *mut c_void, real: unsafe extern "C" fn(*mut c_void) -> c_int) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Kinds of workers, as in policy.c: an accelerator, and one that is all cores.
const OWN: u32 = 1;
const CORES: u32 = 2;

/// `RTLD_NEXT` of glibc.
const NEXT: *mut c_void = -1isize as *mut c_void;

/// Codelet and kind of worker.
type Key = (usize, u32);

/// What is known of a codelet on a kind of worker.
#[derive(Default)]
struct Known {
    /// On cores: the time that their threads were at work, which load does not change. Elsewhere: the time that it took.
    model: Model,
    /// Threads that it keeps busy if nothing keeps them from it, below 1 if it waits: bits of a number. The most that was
    /// seen, slowly forgotten: load only ever takes away from it.
    width: AtomicU64,
}

/// What is left of [`Known::width`] with each task.
const FORGETS: f64 = 0.999;
/// A codelet that hardly uses the processor is taken to use so much of one core.
const LEAST: f64 = 0.01;

impl Known {
    fn width(&self) -> f64 {
        f64::from_bits(self.width.load(Ordering::Relaxed)).max(LEAST)
    }
}

struct State {
    cpu: Cpu,
    known: RwLock<HashMap<Key, Arc<Known>>>,
    /// Workers that look for tasks without rest.
    workers: Mutex<Option<Working>>,
}

fn state() -> &'static State {
    static STATE: OnceLock<State> = OnceLock::new();
    STATE.get_or_init(|| State { cpu: Cpu::new(), known: RwLock::default(), workers: Mutex::default() })
}

impl State {
    fn known(&self, codelet: *const c_void, kind: u32) -> Arc<Known> {
        let key = (codelet as usize, kind);
        if let Some(m) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return m.clone();
        }
        self.known.write().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone()
    }
}

thread_local! {
    /// What this worker is at.
    static BEGUN: RefCell<Option<Begun>> = const { RefCell::new(None) };
    /// Room for [`forebay_together`].
    static WORKS: RefCell<Vec<(f64, f64)>> = const { RefCell::new(Vec::new()) };
}

struct Begun {
    at: Instant,
    /// ns that the worker's thread had worked.
    worked: f64,
    _working: Option<Working>,
}

/// Work: µs that it takes if nothing is beside it, and cores that it uses for so long.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Work {
    us: f64,
    cores: f64,
}

/// What a codelet is predicted to be on this kind of worker (as in policy.c); NaN µs while it is not known.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_predict(codelet: *const c_void, kind: u32, bytes: u64) -> Work {
    let known = state().known(codelet, kind);
    let Some(p) = known.model.predict(bytes, 0.0).filter(|_| known.model.knows(bytes)) else {
        return Work { us: f64::NAN, cores: 0.0 };
    };
    let us = p.ns / 1e3;
    if kind == OWN { Work { us, cores: 0.0 } } else { Work { us: us / known.width(), cores: known.width() } }
}

/// µs until all of this work is done, beside each other and beside what others do now.
///
/// # Safety
/// `n` of them are at `works`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_together(works: *const Work, n: usize) -> f64 {
    // SAFETY: by the contract; nothing is read where there are none.
    let given = if n == 0 { &[] } else { unsafe { std::slice::from_raw_parts(works, n) } };
    WORKS.with_borrow_mut(|works| {
        works.clear();
        works.extend(given.iter().map(|w| (w.us, w.cores)));
        state().cpu.together(works)
    })
}

/// So many workers look for tasks without rest from now on: threads of this process that are always at work.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_workers(n: u32) {
    let s = state();
    *s.workers.lock().unwrap_or_else(PoisonError::into_inner) = (n > 0).then(|| s.cpu.works(n as usize));
}

/// The calling thread is a worker.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_worker() {
    threads::is_worker();
}

/// A worker of this kind begins a task.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_begins(kind: u32) {
    let s = state();
    let threads = match kind {
        OWN => 0,
        CORES => s.cpu.cores(),
        // Workers that never rest are counted already.
        _ => usize::from(s.workers.lock().unwrap_or_else(PoisonError::into_inner).is_none()),
    };
    let _working = (threads > 0).then(|| s.cpu.works(threads));
    if kind == CORES {
        threads::begins();
    }
    BEGUN.with_borrow_mut(|b| *b = Some(Begun { at: Instant::now(), worked: threads::own(), _working }));
}

/// A worker of this kind has done the task that it began.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_ends(codelet: *const c_void, kind: u32, bytes: u64) {
    let Some(begun) = BEGUN.with_borrow_mut(Option::take) else { return };
    let took = begun.at.elapsed().as_nanos() as f64;
    let others = if kind == CORES { threads::since() } else { 0.0 };
    let worked = (threads::own() - begun.worked).max(0.0) + others;
    let s = state();
    let known = s.known(codelet, kind);
    if took > 0.0 {
        let most = if kind == CORES { s.cpu.cores() as f64 } else { 1.0 };
        let width = (worked / took).min(most).max(known.width() * FORGETS);
        // Two that end at once: one of them is forgotten.
        known.width.store(width.to_bits(), Ordering::Relaxed);
    }
    let ns = if kind == OWN { took } else { worked };
    known.model.record(Sample { size: bytes, hint: 0.0, ns });
}

/// StarPU 1.3: in the place of the program's.
///
/// # Safety
/// As StarPU's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn starpu_init(conf: *mut c_void) -> c_int {
    // SAFETY: a C string; the next object that has it is StarPU.
    let real = unsafe { dlsym(NEXT, c"starpu_init".as_ptr()) };
    if real.is_null() {
        // ENODEV: StarPU's own answer when it cannot be used.
        return -19;
    }
    // SAFETY: StarPU's function of this name has this type.
    let real: unsafe extern "C" fn(*mut c_void) -> c_int = unsafe { std::mem::transmute(real) };
    // SAFETY: by the contract.
    unsafe { forebay_init(conf, real) }
}

/// StarPU 1.4 asks a library for its policies by this name.
///
/// # Safety
/// `name` is a C string, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn starpu_get_sched_lib_policy(name: *const c_char) -> *const c_void {
    // SAFETY: by the contract.
    let ours = !name.is_null() && unsafe { CStr::from_ptr(name) } == c"forebay";
    if ours { &raw const forebay_policy } else { std::ptr::null() }
}
