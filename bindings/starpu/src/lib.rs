//! Forebay's placement for StarPU programs, which need no change.
//!
//! StarPU 1.3: `LD_PRELOAD=libforebay_starpu.so program`; its `starpu_init` then begins with our policy, unless a policy was
//! chosen by the program or by `STARPU_SCHED`. StarPU 1.4: `STARPU_SCHED_LIB=libforebay_starpu.so STARPU_SCHED=forebay program`.
//! `FOREBAY_STARPU_LOG=1` says at the end how many tasks each worker had.
//!
//! What a codelet takes is learned as everywhere in Forebay: normalised by the share that was available, so that load is
//! counted once. StarPU's own history models take load in while they are calibrated.

#![cfg(starpu)]
// A panic here would be the end of somebody else's program.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use forebay::place::{Cpu, Model, Sample, Working};

unsafe extern "C" {
    #[allow(non_upper_case_globals, reason = "C's name")]
    static forebay_policy: c_void;
    fn forebay_init(conf: *mut c_void, real: unsafe extern "C" fn(*mut c_void) -> c_int) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `RTLD_NEXT` of glibc.
const NEXT: *mut c_void = -1isize as *mut c_void;

/// Codelet and kind of worker.
type Key = (usize, u32);

struct State {
    cpu: Cpu,
    models: RwLock<HashMap<Key, Arc<Model>>>,
    workers: Mutex<Option<Working>>,
}

fn state() -> &'static State {
    static STATE: OnceLock<State> = OnceLock::new();
    STATE.get_or_init(|| State { cpu: Cpu::new(), models: RwLock::default(), workers: Mutex::default() })
}

impl State {
    fn model(&self, key: Key) -> Arc<Model> {
        if let Some(m) = self.models.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return m.clone();
        }
        self.models.write().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone()
    }

    /// Threads that a worker of this kind keeps busy.
    fn width(&self, kind: u32) -> usize {
        match kind {
            0 => 1,
            1 => 0,
            _ => self.cpu.cores(),
        }
    }

    /// What others leave to a worker of this kind.
    fn share(&self, kind: u32) -> f64 {
        match self.width(kind) {
            0 => 1.0,
            // No thread of this process counts.
            n => self.cpu.available(n, usize::MAX),
        }
    }
}

thread_local! {
    /// What this worker keeps busy, and the share that was available when it began.
    static BUSY: RefCell<Option<(Option<Working>, f64)>> = const { RefCell::new(None) };
}

/// What a codelet is predicted to take, µs, beside what others do now; NaN while it is not known. What this program does the
/// policy knows itself.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_predict(codelet: *const c_void, kind: u32, bytes: u64) -> f64 {
    let s = state();
    let model = s.model((codelet as usize, kind));
    let told = model.predict(bytes, 0.0).filter(|_| model.knows(bytes)).map_or(f64::NAN, |p| p.ns / 1e3);
    told / s.share(kind)
}

/// So many workers look for tasks from now on: threads of this process that are always at work.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_workers(cores: u32) {
    let s = state();
    *s.workers.lock().unwrap_or_else(PoisonError::into_inner) = Some(s.cpu.works(cores as usize));
}

/// A worker of this kind begins a task.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_begins(kind: u32) {
    let s = state();
    // A core's worker is counted already.
    let working = (kind > 1).then(|| s.cpu.works(s.width(kind)));
    BUSY.with_borrow_mut(|b| *b = Some((working, s.share(kind))));
}

/// A worker of this kind has done a task, which took so long.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_ends(codelet: *const c_void, kind: u32, bytes: u64, us: f64) {
    let s = state();
    let now = s.share(kind);
    let begun = BUSY.with_borrow_mut(Option::take).map_or(now, |(_, share)| share);
    let ns = us * 1e3 * (begun + now) / 2.0;
    s.model((codelet as usize, kind)).record(Sample { size: bytes, hint: 0.0, ns });
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
