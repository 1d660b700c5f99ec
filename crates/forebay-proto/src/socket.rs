//! Packets with files over a local socket (`SOCK_SEQPACKET`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::{Errno, Result};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};

/// Most files in one packet.
pub const MAX_FILES: usize = 4;
const SPACE: usize = rustix::cmsg_space!(ScmRights(4));

/// A socket for packets, not connected.
///
/// # Errors
/// The kernel's.
pub fn new(flags: SocketFlags) -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)
}

/// Connects to a service's socket. Neither this nor sending by it waits longer than `patience`: a service that was stopped takes
/// no more connections once as many wait as may.
///
/// # Errors
/// The kernel's; `ETIMEDOUT` where there was no place in time.
pub fn connect_to(path: &Path, patience: Duration) -> Result<OwnedFd> {
    let s = new(SocketFlags::empty())?;
    set_socket_timeout(&s, Timeout::Send, Some(patience))?;
    match connect(&s, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => Err(Errno::TIMEDOUT),
        other => other.map(|()| s),
    }
}

/// Sends one packet. Never raises SIGPIPE.
///
/// # Errors
/// The kernel's; `EAGAIN` when the other side does not read.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], files: &[BorrowedFd<'_>], wait: bool) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Receives one packet: its length (more than `buffer` holds when it was cut off; 0 at the end) and its files.
///
/// # Errors
/// The kernel's.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], wait: bool) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let room = buffer.len();
    let got = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut files = Vec::new();
    for m in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = m {
            files.extend(fds);
        }
    }
    let cut = got.flags.contains(ReturnFlags::TRUNC);
    Ok((if cut { room + 1 } else { got.bytes }, files))
}

/// Who is at the other end, says the kernel: process and user when the connection was made.
///
/// # Errors
/// The kernel's; `ESRCH` for a process that this one has no number for, from outside its namespace.
pub fn peer(socket: impl AsFd) -> Result<(u32, u32)> {
    // Not by rustix: its type has no room for the number 0, which is what such a process has.
    let mut c = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut n = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd());
    // SAFETY: `c` and `n` live through the call, and `n` is the size of `c`.
    let failed =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut c).cast(), &raw mut n) } != 0;
    match u32::try_from(c.pid) {
        _ if failed => Err(Errno::NOTSOCK),
        Ok(pid) if pid > 0 => Ok((pid, c.uid)),
        _ => Err(Errno::SRCH),
    }
}
