//! Listens to the calls of a program and of its children, and answers them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::call::{Answer, Caller};
use crate::files::Files;
use crate::inside::Listening;
use crate::memory::Memory;

/// So often it is looked which files have been closed.
const LOOK: Duration = Duration::from_millis(2);

/// Closes what nobody has open any more, for as long as the machine is there.
pub fn look_after(files: Weak<Mutex<Files>>) -> io::Result<()> {
    let look = move || {
        while let Some(files) = files.upgrade() {
            files.lock().unwrap_or_else(PoisonError::into_inner).close_those_that_are();
            drop(files);
            std::thread::sleep(LOOK);
        }
    };
    std::thread::Builder::new().name("kernel model's files".into()).spawn(look).map(drop)
}

/// Serves a program that is about to start, in a thread that ends with the last of its processes.
pub fn spawn(listening: Listening, files: Arc<Mutex<Files>>) -> io::Result<()> {
    let serve = move || match listening.take() {
        Ok(Some(listener)) => while let Ok(true) = next(&listener, &files) {},
        Ok(None) => {}
        Err(why) => eprintln!("the kernel's model does not hear a program: {why}"),
    };
    std::thread::Builder::new().name("kernel model".into()).spawn(serve).map(drop)
}

/// Answers the next call; false when nobody is left to call.
fn next(listener: &OwnedFd, files: &Mutex<Files>) -> io::Result<bool> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    match poll(&mut fds, None) {
        Err(rustix::io::Errno::INTR) => return Ok(true),
        other => other?,
    };
    if fds[0].revents().contains(PollFlags::HUP) {
        return Ok(false);
    }
    let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
    files.close_those_that_are();
    // SAFETY: all zeroes is what the kernel wants to fill in.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is what this call fills in.
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } != 0 {
        // The caller was killed before it was asked.
        return Ok(true);
    }
    let mut reply = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags: 0 };
    match answer(&call, &mut files) {
        Ok(Answer::Done) => {}
        Ok(Answer::NotOurs) => reply.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        Ok(Answer::Put(file, at)) => {
            if let Err(why) = put(listener, call.id, &file, at) {
                reply.error = -why.raw_os_error().unwrap_or(libc::EIO);
            }
        }
        Err(why) => reply.error = -why.raw_os_error().unwrap_or(libc::EIO),
    }
    // SAFETY: the structure is what this call takes. A caller that was killed meanwhile needs no answer.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut reply) };
    Ok(true)
}

fn answer(call: &libc::seccomp_notif, files: &mut Files) -> io::Result<Answer> {
    let pid = process_of(call.pid)?;
    let known = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(known, PidfdFlags::empty())?;
    let [fd, request, at, ..] = call.data.args;
    let request = ((request & 0xFF) as u8, (request >> 16 & 0x3FFF) as usize);
    Caller { process, pid, memory: Memory(known), request, at }.answer(files, fd as i32)
}

/// The process of a thread.
fn process_of(thread: u32) -> io::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    let number = status.lines().find_map(|l| l.strip_prefix("Tgid:")?.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
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
