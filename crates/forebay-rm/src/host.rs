//! The kernel of this machine.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bytemuck::Zeroable;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::error::{Error, Result};
use crate::rm::{ControlFile, Rm};
use crate::sys::{Alloc, Card, Control, ESC_ALLOC, ESC_CARD_INFO, ESC_CONTROL, ESC_FREE, Free, MAGIC, MAX_CARDS};

const CONTROL_PATH: &str = "/dev/nvidiactl";
/// Most control files of a process that are looked at.
const MAX_FILES: usize = 64;

/// Calls into the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

struct HostFile {
    control: OwnedFd,
    /// The GPU's own file, held open.
    _gpu: Option<File>,
}

fn open(path: &str) -> Result<File> {
    let file = File::options().read(true).write(true).open(path);
    file.map_err(|why| Error::NoDriver { path: path.into(), why })
}

impl Rm for Host {
    fn driver_version(&self) -> Result<String> {
        const PATH: &str = "/sys/module/nvidia/version";
        let text = std::fs::read_to_string(PATH).map_err(|why| Error::NoDriver { path: PATH.into(), why })?;
        Ok(text.trim().to_owned())
    }

    fn open(&self, gpu: u32) -> Result<Box<dyn ControlFile>> {
        let gpu = open(&format!("/dev/nvidia{gpu}"))?;
        Ok(Box::new(HostFile { control: open(CONTROL_PATH)?.into(), _gpu: Some(gpu) }))
    }

    fn processes(&self) -> Result<Vec<u32>> {
        let all = std::fs::read_dir("/proc").map_err(|why| Error::NoDriver { path: "/proc".into(), why })?;
        let pids = all.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok());
        Ok(pids.filter(|&pid| pid != std::process::id() && has_control_file(pid)).collect())
    }

    fn files_of(&self, pid: u32) -> Result<Vec<Box<dyn ControlFile>>> {
        let failed = |why: io::Error| Error::Process { pid, why };
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        // The pidfd comes first: whatever is found belongs to this process, not to a later one of the same number.
        let process = pidfd_open(raw, PidfdFlags::empty()).map_err(|e| failed(e.into()))?;
        let mut out: Vec<Box<dyn ControlFile>> = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
            // Files come and go while they are listed.
            let Ok(entry) = entry else { continue };
            let number = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok());
            let is_control = std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == CONTROL_PATH);
            let (Some(number), true) = (number, is_control) else { continue };
            if let Ok(control) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
                out.push(Box::new(HostFile { control, _gpu: None }));
            }
            if out.len() >= MAX_FILES {
                break;
            }
        }
        Ok(out)
    }
}

/// Whether a process has the control file open. Files of processes that are not ours to look into count as none.
fn has_control_file(pid: u32) -> bool {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let is = |e: std::fs::DirEntry| std::fs::read_link(e.path()).is_ok_and(|to| to.as_os_str() == CONTROL_PATH);
    fds.filter_map(|e| e.ok()).any(is)
}

const fn escape<T>(number: u8) -> Opcode {
    opcode::read_write::<T>(MAGIC, number)
}

/// Calls the driver again while it asks for that.
fn call<T>(mut f: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match f() {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

impl ControlFile for HostFile {
    fn control(&self, c: &mut Control, params: &mut [u8]) -> io::Result<()> {
        c.params = params.as_mut_ptr() as u64;
        c.params_size = params.len() as u32;
        call(|| {
            // SAFETY: the opcode's size is that of `Control`; `params` is alive and as long as it says.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Control>(ESC_CONTROL) }, Control>::new(c)) }
        })
    }

    fn alloc(&self, c: &mut Alloc, params: &mut [u8]) -> io::Result<()> {
        c.params = if params.is_empty() { 0 } else { params.as_mut_ptr() as u64 };
        c.params_size = params.len() as u32;
        call(|| {
            // SAFETY: as in `control`.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Alloc>(ESC_ALLOC) }, Alloc>::new(c)) }
        })
    }

    fn free(&self, c: &mut Free) -> io::Result<()> {
        call(|| {
            // SAFETY: the opcode's size is that of `Free`.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Free>(ESC_FREE) }, Free>::new(c)) }
        })
    }

    fn cards(&self) -> io::Result<Vec<Card>> {
        type Cards = [Card; MAX_CARDS];
        let mut all = [Card::zeroed(); MAX_CARDS];
        call(|| {
            // SAFETY: the opcode's size is that of the array.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Cards>(ESC_CARD_INFO) }, Cards>::new(&mut all)) }
        })?;
        Ok(all.into_iter().filter(|c| c.valid != 0).collect())
    }
}
