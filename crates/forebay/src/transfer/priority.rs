//! How a thread is scheduled while it has real-time streams.
//!
//! Rules:
//! 1. A thread is promoted with the first of its streams, and scheduled as before when the last has gone, whichever thread drops
//!    that.
//! 2. Promoted is SCHED_FIFO; if the system refuses, the most favourable nice value that it allows; otherwise as it was. A thread
//!    that has better (a deadline, or as much real-time priority as this) stays as it is.
//! 3. While one of its streams is over its budget the thread is scheduled as before.
//! 4. What the thread was changed to by somebody else meanwhile stays.
//! 5. Threads that it makes do not inherit this. The system may allow to promote and not to take that mark back: then the
//!    mark stays with the thread, and nothing else.
//! 6. A thread that ends says so first: its number may be another one's then. In a process that was forked it has another one,
//!    and its streams change nothing.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_hal::fork::Home;

/// Priority under SCHED_FIFO: above ordinary real-time work that has the default of 1, far below the kernel's own
/// threads (50 and above), on which interrupts depend.
const PRIORITY: i32 = 20;
/// The most favourable nice value.
const NICEST: i32 = -20;

/// How a thread is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// SCHED_FIFO with this priority: before every ordinary thread, whenever it is ready.
    Fifo(i32),
    /// SCHED_RR with this priority, which it had before.
    RoundRobin(i32),
    /// SCHED_DEADLINE, which it had before.
    Deadline,
    /// An ordinary thread with this nice value.
    Nice(i32),
}

impl std::fmt::Display for Scheduling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheduling::Fifo(p) => write!(f, "SCHED_FIFO, priority {p}"),
            Scheduling::RoundRobin(p) => write!(f, "SCHED_RR, priority {p}"),
            Scheduling::Deadline => write!(f, "SCHED_DEADLINE"),
            Scheduling::Nice(n) => write!(f, "SCHED_OTHER, nice {n}"),
        }
    }
}

/// A thread as the system schedules it.
#[derive(Clone, Copy)]
struct As {
    policy: i32,
    priority: i32,
    nice: i32,
}

fn set_policy(tid: libc::pid_t, policy: i32, priority: i32) -> bool {
    // SAFETY: all zeros is a valid value; the field that matters is set.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: the parameters are valid for the call.
    unsafe { libc::sched_setscheduler(tid, policy, &param) == 0 }
}

fn set_nice(tid: libc::pid_t, nice: i32) -> bool {
    // SAFETY: plain call; on Linux this is about a single thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, tid as libc::id_t, nice) == 0 }
}

impl As {
    fn now(tid: libc::pid_t) -> Self {
        // SAFETY: as in `set_policy`.
        let (policy, priority, nice) = unsafe {
            let mut param: libc::sched_param = std::mem::zeroed();
            libc::sched_getparam(tid, &mut param);
            let nice = libc::getpriority(libc::PRIO_PROCESS, tid as libc::id_t);
            (libc::sched_getscheduler(tid), param.sched_priority, nice)
        };
        As { policy: policy.max(0), priority, nice }
    }

    fn scheduling(&self) -> Scheduling {
        match self.policy & !libc::SCHED_RESET_ON_FORK {
            libc::SCHED_FIFO => Scheduling::Fifo(self.priority),
            libc::SCHED_RR => Scheduling::RoundRobin(self.priority),
            libc::SCHED_DEADLINE => Scheduling::Deadline,
            _ => Scheduling::Nice(self.nice),
        }
    }

    /// Rule 5.
    fn restore(&self, tid: libc::pid_t) {
        let _ = set_policy(tid, self.policy, self.priority)
            || set_policy(tid, self.policy | libc::SCHED_RESET_ON_FORK, self.priority);
        set_nice(tid, self.nice);
    }

    /// Rule 2.
    fn promote(&self, tid: libc::pid_t) -> Scheduling {
        match self.scheduling() {
            s @ (Scheduling::Fifo(p) | Scheduling::RoundRobin(p)) if p >= PRIORITY => return s,
            Scheduling::Deadline => return Scheduling::Deadline,
            _ => {}
        }
        if set_policy(tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, PRIORITY) {
            return Scheduling::Fifo(PRIORITY);
        }
        if let s @ (Scheduling::Fifo(_) | Scheduling::RoundRobin(_)) = self.scheduling() {
            return s;
        }
        let nice = (NICEST..self.nice).find(|n| set_nice(tid, *n));
        Scheduling::Nice(nice.unwrap_or(self.nice))
    }
}

/// A thread with real-time streams, or that had some.
struct Thread {
    tid: libc::pid_t,
    /// Rule 6.
    ended: bool,
    streams: u32,
    /// Of these, over their budgets.
    over: u32,
    /// Before the first of them.
    before: As,
    promoted: Scheduling,
    home: Home,
}

impl Thread {
    fn this(ended: bool) -> Arc<Mutex<Self>> {
        // SAFETY: plain call.
        let tid = unsafe { libc::gettid() };
        let before = As::now(tid);
        let (promoted, home) = (before.scheduling(), Home::here());
        Arc::new(Mutex::new(Thread { tid, ended, streams: 0, over: 0, before, promoted, home }))
    }

    fn is_promoted(&self) -> bool {
        self.streams > 0 && self.over == 0
    }

    /// Counts its streams anew, and has it scheduled accordingly.
    fn count(&mut self, streams: u32, over: u32) {
        let (had, was) = (self.streams, self.is_promoted());
        (self.streams, self.over) = (streams, over);
        if self.ended || !self.home.is_here() || was == self.is_promoted() {
            return;
        }
        let now = As::now(self.tid);
        if had == 0 {
            self.before = now;
            self.promoted = now.promote(self.tid);
        } else if was && now.scheduling() == self.promoted {
            if self.promoted != self.before.scheduling() {
                self.before.restore(self.tid);
            }
        } else if !was && now.scheduling() == self.before.scheduling() {
            self.promoted = self.before.promote(self.tid);
        }
    }
}

/// The thread's own handle: tells the others when it ends.
struct Own(Arc<Mutex<Thread>>);

impl Drop for Own {
    fn drop(&mut self) {
        lock(&self.0).ended = true;
    }
}

fn lock(thread: &Mutex<Thread>) -> MutexGuard<'_, Thread> {
    thread.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream's part in how its thread is scheduled.
pub(super) struct Priority {
    thread: Arc<Mutex<Thread>>,
    over: bool,
}

impl Priority {
    /// For a stream of the calling thread, and how that is scheduled with it.
    pub(super) fn here() -> (Self, Scheduling) {
        thread_local! {
            static THIS: RefCell<Option<Own>> = const { RefCell::new(None) };
        }
        let known = THIS.try_with(|this| {
            let mut this = this.borrow_mut();
            let known = this.as_ref().map(|t| t.0.clone()).filter(|t| lock(t).home.is_here());
            known.unwrap_or_else(|| this.insert(Own(Thread::this(false))).0.clone())
        });
        // One that is about to end stays as it is.
        let thread = known.unwrap_or_else(|_| Thread::this(true));
        let mut t = lock(&thread);
        let (streams, over) = (t.streams + 1, t.over);
        t.count(streams, over);
        let scheduling = t.promoted;
        drop(t);
        (Priority { thread, over: false }, scheduling)
    }

    /// Whether the stream is over its budget.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Rule 3.
    pub(super) fn set_over(&mut self, over: bool) {
        if self.over == over {
            return;
        }
        self.over = over;
        let mut t = lock(&self.thread);
        let streams = t.streams;
        let over = if over { t.over + 1 } else { t.over.saturating_sub(1) };
        t.count(streams, over);
    }
}

impl Drop for Priority {
    fn drop(&mut self) {
        let mut t = lock(&self.thread);
        let (streams, over) = (t.streams.saturating_sub(1), t.over.saturating_sub(u32::from(self.over)));
        t.count(streams, over);
    }
}
