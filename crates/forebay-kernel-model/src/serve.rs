//! Listens to the calls of a program and of its children, and answers them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::call::{Answer, Caller};
use crate::files::Files;
use crate::inside::Listening;
use crate::memory::Memory;

/// So often it is looked which files have been closed, and what time it is.
const LOOK: Duration = Duration::from_micros(500);

/// Closes what nobody has open any more, and lets the GPUs' time pass, for as long as the machine is there.
pub fn look_after(files: Weak<Mutex<Files>>) -> io::Result<()> {
    let look = move || {
        while let Some(files) = files.upgrade() {
            let mut f = files.lock().unwrap_or_else(PoisonError::into_inner);
            f.close_those_that_are();
            f.let_time_pass();
            drop(f);
            drop(files);
            std::thread::sleep(LOOK);
        }
    };
    std::thread::Builder::new().name("kernel model's files".into()).spawn(look).map(drop)
}

/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`.
const SYNC_WAKE_UP: libc::c_ulong = 1;

/// A call takes a sixth of the time where the caller's core answers it; but then the two share that core, and one that has its
/// turns would wait for the scheduler's. Older kernels know nothing of it.
fn answer_on_its_core(listener: &OwnedFd, on: bool) {
    let flags = if on { SYNC_WAKE_UP } else { 0 };
    // SAFETY: a number is all that it takes.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, flags) };
}

/// Serves a program that is about to start, in threads that end with the last of its processes.
pub fn spawn(listening: Listening, files: Arc<Mutex<Files>>) -> io::Result<()> {
    let serve = move || match listening.take() {
        Ok(Some(listener)) => {
            answer_on_its_core(&listener, true);
            let served = Served { listener, files, kernels: Mutex::default(), some: Condvar::new() };
            std::thread::scope(|s| {
                s.spawn(|| served.answer_those_that_wait());
                let mut callers = HashMap::new();
                while let Ok(true) = served.next(&mut callers) {}
                served.lock_kernels().ended = true;
                served.some.notify_all();
            });
        }
        Ok(None) => {}
        Err(why) => eprintln!("the kernel's model does not hear a program: {why}"),
    };
    std::thread::Builder::new().name("kernel model".into()).spawn(serve).map(drop)
}

/// After so long it is looked whether a kernel that somebody waits for has ended, at least and at most.
const TURN_US: [u64; 2] = [10, 300];

/// A call that waits for a kernel: its id, the process, and the kernel's number.
struct Waiting {
    call: u64,
    pid: u32,
    kernel: u64,
}

#[derive(Default)]
struct Kernels {
    waiting: Vec<Waiting>,
    /// There have been some.
    some_waited: bool,
    /// Nobody is left to call.
    ended: bool,
}

struct Served {
    listener: OwnedFd,
    files: Arc<Mutex<Files>>,
    kernels: Mutex<Kernels>,
    some: Condvar,
}

impl Served {
    fn lock_kernels(&self) -> MutexGuard<'_, Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the next call; false when nobody is left to call.
    fn next(&self, callers: &mut HashMap<u32, Process>) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => return Ok(true),
            other => other?,
        };
        if fds[0].revents().contains(PollFlags::HUP) {
            return Ok(false);
        }
        // SAFETY: all zeroes is what the kernel wants to fill in.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // Nothing is locked: when the caller was killed since, this waits for the next one.
        // SAFETY: the structure is what this call fills in.
        if unsafe { libc::ioctl(self.listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } != 0 {
            return Ok(true);
        }
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.close_those_that_are();
        files.let_time_pass();
        let answer = answer(&call, callers, &mut files);
        drop(files);
        let error = |why: &io::Error| -why.raw_os_error().unwrap_or(libc::EIO);
        match answer {
            Ok((_, Answer::Done)) => self.reply(call.id, 0, 0),
            Ok((_, Answer::NotOurs)) => self.reply(call.id, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Ok((pid, Answer::Later(kernel))) => {
                let mut kernels = self.lock_kernels();
                if !std::mem::replace(&mut kernels.some_waited, true) {
                    answer_on_its_core(&self.listener, false);
                }
                kernels.waiting.push(Waiting { call: call.id, pid, kernel });
                drop(kernels);
                self.some.notify_all();
            }
            Ok((_, Answer::Put(file, at))) => {
                let put = put(&self.listener, call.id, &file, at);
                self.reply(call.id, put.err().map_or(0, |why| error(&why)), 0);
            }
            Err(why) => self.reply(call.id, error(&why), 0),
        }
        Ok(true)
    }

    /// Answers calls that wait for kernels, until nobody is left to call.
    fn answer_those_that_wait(&self) {
        // Else the kernel would round a wait of microseconds up to fifty.
        // SAFETY: a number is all that it takes.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        loop {
            let none = |k: &mut Kernels| k.waiting.is_empty() && !k.ended;
            let mut kernels = self.some.wait_while(self.lock_kernels(), none).unwrap_or_else(PoisonError::into_inner);
            if kernels.ended {
                return;
            }
            let waiting = std::mem::take(&mut kernels.waiting);
            drop(kernels);
            let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            files.let_time_pass();
            let (ended, waiting): (Vec<Waiting>, Vec<Waiting>) =
                waiting.into_iter().partition(|w| files.rm().has_ended(w.pid, w.kernel));
            let [least, most] = TURN_US;
            let soonest = files.rm().soonest_us().unwrap_or(most).clamp(least, most);
            drop(files);
            ended.iter().for_each(|w| self.reply(w.call, 0, 0));
            let mut kernels = self.lock_kernels();
            let before = kernels.waiting.len();
            kernels.waiting.extend(waiting);
            // One that came meanwhile may end sooner.
            if !kernels.waiting.is_empty() && before == 0 {
                let waited = self.some.wait_timeout(kernels, Duration::from_micros(soonest));
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// A caller that was killed meanwhile needs none.
    fn reply(&self, id: u64, error: i32, flags: u32) {
        let mut reply = libc::seccomp_notif_resp { id, val: 0, error, flags };
        // SAFETY: the structure is what this call takes.
        unsafe { libc::ioctl(self.listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut reply) };
    }
}

/// A caller's process, by its number and held.
struct Process {
    pid: Pid,
    held: OwnedFd,
}

impl Process {
    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.held, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}

fn answer(
    call: &libc::seccomp_notif,
    callers: &mut HashMap<u32, Process>,
    files: &mut Files,
) -> io::Result<(u32, Answer)> {
    // Another one may have the thread's number now.
    if callers.get(&call.pid).is_some_and(Process::has_ended) {
        callers.remove(&call.pid);
    }
    let process = match callers.entry(call.pid) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(place) => {
            let pid = process_of(call.pid)?;
            place.insert(Process { pid, held: pidfd_open(pid, PidfdFlags::empty())? })
        }
    };
    let [fd, request, at, ..] = call.data.args;
    let request = ((request & 0xFF) as u8, (request >> 16 & 0x3FFF) as usize);
    let pid = process.pid.as_raw_nonzero().get() as u32;
    let caller = Caller { process: &process.held, pid, memory: Memory(process.pid), request, at };
    Ok((pid, caller.answer(files, fd as i32)?))
}

/// The process of a thread.
fn process_of(thread: u32) -> io::Result<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    let number = status.lines().find_map(|l| l.strip_prefix("Tgid:")?.trim().parse().ok());
    number.and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Puts a file in the place of a caller's descriptor.
fn put(listener: &OwnedFd, id: u64, file: &OwnedFd, at: i32) -> io::Result<()> {
    let mut place = libc::seccomp_notif_addfd {
        id,
        flags: libc::SECCOMP_ADDFD_FLAG_SETFD as u32,
        srcfd: file.as_fd().as_raw_fd() as u32,
        newfd: at as u32,
        newfd_flags: libc::O_CLOEXEC as u32,
    };
    // SAFETY: the structure is what this call takes.
    let done = unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ADDFD, &raw mut place) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
