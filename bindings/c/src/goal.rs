//! Goals of tasks that are called like functions.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use forebay::place::{Decision, Goal, Pursuit};

use crate::call::forebay_accelerated;
use crate::task::{User, forebay_release};
use crate::{FOREBAY_FAILED, Failure, free, give, invalid, shared, status, text};

/// A goal that is being pursued.
pub struct forebay_pursuit(Pursuit);

/// What a goal is measured by; NaN when there is nothing to say.
pub type forebay_tracker = Option<unsafe extern "C" fn(user: *mut c_void) -> f64>;
/// Asks the program for a fidelity: 0 is the best, each more is lower.
pub type forebay_fidelity = Option<unsafe extern "C" fn(user: *mut c_void, level: u32)>;
/// Hears of a decision: when it was made, in seconds since the beginning, and a line on what was measured and done, and why.
pub type forebay_decision = Option<unsafe extern "C" fn(user: *mut c_void, at: f64, line: *const c_char)>;

/// What both functions of a goal get.
struct Both(User);

// SAFETY: C was told that its two functions may be called at the same time, on two threads.
unsafe impl Sync for Both {}

impl Both {
    fn user(&self) -> *mut c_void {
        self.0.user
    }
}

/// Pursues a goal from now on: "throughput" (`value` of what the tracker counts in a second), "latency" (`value` seconds for a
/// call), "deadline" (all of the work, of which the tracker says the part that is done, within `value` seconds), or "least" (of
/// what the tracker says). Every half second the tracker is asked; while the goal is missed the task gets more lanes, then a
/// larger share from the service, and last `fidelity` (NULL if `lowest` is 0) is asked for levels up to `lowest`. `release` (or
/// NULL) is called with `user` when neither function will be called again, at the latest half a second after the pursuit is
/// freed, or when the function that runs then returns; also if this fails.
///
/// # Safety
/// As the rules say; both functions may be called at the same time and on any thread, until they are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pursue(
    task: *const forebay_accelerated,
    goal: *const c_char,
    value: f64,
    tracker: forebay_tracker,
    lowest: u32,
    fidelity: forebay_fidelity,
    user: *mut c_void,
    release: forebay_release,
    pursuit: *mut *mut forebay_pursuit,
) -> i32 {
    let user = Arc::new(Both(User { user, release }));
    // SAFETY: C's promises.
    status(|| unsafe {
        let (task, goal) = (shared(task, "the task")?, text(goal, "the goal")?);
        let goal = Goal::named(goal, value).map_err(|why| invalid(&why))?;
        let tracker = tracker.ok_or_else(|| invalid("the tracker is NULL"))?;
        if fidelity.is_none() && lowest > 0 {
            return Err(invalid("the function for the fidelity is NULL"));
        }
        if pursuit.is_null() {
            return Err(invalid("the place for the result is NULL"));
        }
        let (tells, hears) = (user.clone(), user);
        // C's functions as they were given, with what they belong to, which lives as long as they do.
        let tracker = move || tracker(tells.user());
        let fidelity = move |level| {
            if let Some(f) = fidelity {
                f(hears.user(), level);
            }
        };
        let pursued = task.0.pursue(goal, tracker, lowest, fidelity);
        give(pursuit, forebay_pursuit(pursued.map_err(|e| Failure(FOREBAY_FAILED, e.to_string()))?))
    })
}

/// Calls `hears` for each of the last thousand decisions, before it returns.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pursuit_log(
    pursuit: *const forebay_pursuit,
    hears: forebay_decision,
    user: *mut c_void,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let pursuit = shared(pursuit, "the pursuit")?;
        let hears = hears.ok_or_else(|| invalid("the function is NULL"))?;
        for d in pursuit.0.log() {
            let Decision { at, .. } = d;
            let line = CString::new(d.line().replace('\0', " ")).unwrap_or_default();
            hears(user, at.as_secs_f64(), line.as_ptr());
        }
        Ok(())
    })
}

/// Gives the goal up, and what was asked for it back; NULL is nothing to free.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pursuit_free(pursuit: *mut forebay_pursuit) {
    // SAFETY: C's promise.
    unsafe { free(pursuit) }
}
