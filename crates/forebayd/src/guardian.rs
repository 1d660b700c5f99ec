//! A second process that does one thing: when the service ends, however that happens, it lets every channel on that the
//! service may have taken off, gives every channel group its slice back, and unlocks every process.
//!
//! Rules:
//! 1. It is forked before the service does anything, with a way to the driver of its own, and holds nothing else.
//! 2. It hears of the service's end as the end of a pipe, which the kernel closes for whoever dies.
//! 3. A service that has not said for [`SILENCE_NS`] that it lives, while somebody may be suspended, is ended: a process
//!    that is stopped or stuck gives nothing back.
//! 4. Signals that end services do not end it; when its work is done it ends by itself.
//! 5. If the guardian dies first the service gives everything back, and ends: without it, it must not take anything.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_hal::cuda::checkpoint::{Checkpoints, State};
use forebay_rm::{Client, restore_slices};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::ledger::Ledger;
use crate::system::now_ns;

/// A service is taken to be stuck after this.
pub const SILENCE_NS: u64 = 2_000_000_000;
/// Between two looks at whether it is.
const LOOK_NS: i64 = 200_000_000;
/// Processes that the driver does not unlock are tried again for so long, so often.
const UNLOCKING: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_millis(20);

/// The service's side of its guardian.
pub struct Guardian {
    /// What the guardian may have to give back.
    pub ledger: Arc<Ledger>,
    /// Ends when the guardian does.
    alive: OwnedFd,
    /// Its end tells the guardian of ours.
    _pipe: OwnedFd,
    /// Its process.
    pub pid: u32,
}

fn failed(what: &str) -> impl Fn(rustix::io::Errno) -> String + '_ {
    move |e| format!("{what}: {e}")
}

impl Guardian {
    /// Forks a guardian. `way` makes its way to the driver, in the guardian.
    ///
    /// # Errors
    /// Why there is none; then nothing may be suspended.
    ///
    /// # Safety
    /// The process has one thread.
    pub unsafe fn fork(way: impl FnOnce() -> Result<Box<dyn GiveBack>, String>) -> Result<Guardian, String> {
        let ledger = Arc::new(Ledger::new().map_err(failed("memory for the guardian"))?);
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed("a pipe"));
        let (our_end, its_signal) = pipe()?;
        let (its_end, our_signal) = pipe()?;
        let service =
            pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).map_err(failed("pidfd of this process"))?;
        // SAFETY: one thread, says the caller, so the child is a whole copy.
        match unsafe { libc::fork() } {
            -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
            0 => {
                drop((our_end, our_signal));
                let code = guard(way, &ledger, its_end, its_signal, &service);
                std::process::exit(code)
            }
            pid => {
                drop((its_end, its_signal, service));
                // It says one byte when it is ready, or why it is not.
                let mut said = String::new();
                let mut from = std::fs::File::from(our_end.try_clone().map_err(|e| e.to_string())?);
                let mut first = [0];
                match from.read(&mut first) {
                    Ok(1) if first[0] == 0 => {}
                    _ => {
                        let _ = from.read_to_string(&mut said);
                        return Err(if said.is_empty() { "the guardian did not start".into() } else { said });
                    }
                }
                Ok(Guardian { ledger, alive: our_end, _pipe: our_signal, pid: pid as u32 })
            }
        }
    }

    /// A file that can be read when the guardian has ended.
    pub fn alive(&self) -> impl AsFd + '_ {
        self.alive.as_fd()
    }
}

/// How what is in a ledger is given back.
pub trait GiveBack {
    /// All of it.
    fn give_back(&self, ledger: &Ledger);
}

/// Channels are let on, and channel groups have their slices back.
impl GiveBack for Client {
    fn give_back(&self, ledger: &Ledger) {
        self.release(&ledger.entered());
        for (pid, groups) in ledger.entered_groups() {
            // A process that has gone needs no slices.
            let _ = restore_slices(self, pid, &groups);
        }
    }
}

/// Processes are unlocked. One that was not locked yet, or has gone, is refused; one that stays locked is tried again for a while.
impl GiveBack for Checkpoints {
    fn give_back(&self, ledger: &Ledger) {
        let begun = Instant::now();
        let mut locked = ledger.locked();
        loop {
            locked.retain(|pid| self.unlock(*pid).is_err() && matches!(self.state(*pid), Ok(State::Locked)));
            if locked.is_empty() || begun.elapsed() > UNLOCKING {
                return;
            }
            std::thread::sleep(AGAIN);
        }
    }
}

fn guard(
    way: impl FnOnce() -> Result<Box<dyn GiveBack>, String>,
    ledger: &Ledger,
    end: OwnedFd,
    ready: OwnedFd,
    service: &OwnedFd,
) -> i32 {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: to ignore a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut ready = std::fs::File::from(ready);
    let own = match way() {
        Ok(own) => own,
        Err(why) => {
            let _ = ready.write_all(&[&[1], why.as_bytes()].concat());
            return 1;
        }
    };
    if ready.write_all(&[0]).is_err() {
        return 1;
    }
    loop {
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK_NS };
        let mut fds = [PollFd::new(&end, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => {
                let last = ledger.last_beat();
                if last != 0 && now_ns().saturating_sub(last) > SILENCE_NS && !ledger.is_empty() {
                    // Its end is then heard of as any other.
                    let _ = pidfd_send_signal(service, Signal::KILL);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            // The end of the pipe, or something that leaves no other conclusion.
            _ => break,
        }
    }
    own.give_back(ledger);
    0
}
