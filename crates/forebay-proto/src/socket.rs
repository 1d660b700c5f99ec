//! Packets with files over a local socket (`SOCK_SEQPACKET`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::{Errno, Result};
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

/// Connects to a service's socket.
///
/// # Errors
/// The kernel's.
pub fn connect_to(path: &Path) -> Result<OwnedFd> {
    let s = new(SocketFlags::empty())?;
    connect(&s, &SocketAddrUnix::new(path)?)?;
    Ok(s)
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
/// The kernel's.
pub fn peer(socket: impl AsFd) -> Result<(u32, u32)> {
    let c = rustix::net::sockopt::socket_peercred(socket)?;
    Ok((c.pid.as_raw_nonzero().get() as u32, c.uid.as_raw()))
}
