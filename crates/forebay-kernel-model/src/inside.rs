//! What a program does to itself before it starts: it takes its own view of `/dev` and has its calls listened to.

use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use forebay_rm::sys::MAGIC;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Bit in a request of an ioctl's number that it takes and gives a structure, as all of the driver's do.
const READ_WRITE: u32 = 0xC000_0000;

/// Where the filter of a program that is about to start is told of.
pub struct Listening(UnixStream);

impl Listening {
    /// Waits for the program and takes its filter; none if it did not come so far.
    pub fn take(mut self) -> io::Result<Option<OwnedFd>> {
        let mut said = [0; 8];
        if self.0.read_exact(&mut said).is_err() {
            return Ok(None);
        }
        let [a, b, c, d, fd @ ..] = said;
        let pid = Pid::from_raw(i32::from_ne_bytes([a, b, c, d])).ok_or(io::ErrorKind::InvalidData)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let listener = pidfd_getfd(&process, i32::from_ne_bytes(fd), PidfdGetfdFlags::empty())?;
        self.0.write_all(&[0])?;
        Ok(Some(listener))
    }
}

struct Mount {
    from: CString,
    to: CString,
    flags: libc::c_ulong,
}

impl Mount {
    fn make(&self) -> io::Result<()> {
        let none: *const libc::c_void = std::ptr::null();
        // SAFETY: strings that end in 0 and live; no file system's own data.
        let done = unsafe { libc::mount(self.from.as_ptr(), self.to.as_ptr(), none.cast(), self.flags, none) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Lets the program of `command` enter the model whose files are in `root`.
pub fn enter(command: &mut Command, root: &Path) -> io::Result<Listening> {
    let (ours, theirs) = UnixStream::pair()?;
    let path = |of: &str| CString::new(root.join(of).as_os_str().as_bytes());
    let bind = |from: io::Result<CString>, to: io::Result<CString>, flags| -> io::Result<Mount> {
        Ok(Mount { from: from?, to: to?, flags: flags | libc::MS_BIND })
    };
    let at = |p: &str| CString::new(p).map_err(io::Error::from);
    let mounts = [
        Mount { from: at("none")?, to: at("/")?, flags: libc::MS_REC | libc::MS_PRIVATE },
        bind(at("/dev"), Ok(path("old")?), libc::MS_REC)?,
        bind(Ok(path("dev")?), at("/dev"), 0)?,
        bind(Ok(path("module")?), at("/sys/module"), 0)?,
    ];
    let before_it_starts = move || {
        // SAFETY: mounts are nobody else's yet, in a process of one thread.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS)? };
        mounts.iter().try_for_each(Mount::make)?;
        let listener = filter()?;
        let mut said = [0; 8];
        said[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        said[4..].copy_from_slice(&listener.to_ne_bytes());
        (&theirs).write_all(&said)?;
        // Until it has been taken: it closes when the program starts.
        (&theirs).read_exact(&mut [0])
    };
    // SAFETY: between fork and exec only system calls are made, on what was allocated before.
    unsafe { command.pre_exec(before_it_starts) };
    Ok(Listening(ours))
}

/// From now on calls with the driver's numbers wait for an answer from whoever has the descriptor that this returns.
fn filter() -> io::Result<i32> {
    use std::mem::offset_of;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let word = |at: usize| libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: at as u32 };
    let unless = |k: u32, skip: u8| libc::sock_filter { code: EQUAL, jt: 0, jf: skip, k };
    let end = |k: u32| libc::sock_filter { code: RETURN, jt: 0, jf: 0, k };
    // The low half of the second argument: the request.
    let request = offset_of!(libc::seccomp_data, args) + 8;
    let mut steps = [
        word(offset_of!(libc::seccomp_data, nr)),
        unless(libc::SYS_ioctl as u32, 4),
        word(request),
        libc::sock_filter { code: AND, jt: 0, jf: 0, k: READ_WRITE | 0xFF00 },
        unless(READ_WRITE | u32::from(MAGIC) << 8, 1),
        end(libc::SECCOMP_RET_USER_NOTIF),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program lives for the call, which copies it.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    if listener < 0 { Err(io::Error::last_os_error()) } else { Ok(listener as i32) }
}
