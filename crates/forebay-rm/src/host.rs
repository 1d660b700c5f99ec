//! The kernel of this machine.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use bytemuck::Zeroable;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::error::{Error, Result};
use crate::finder::Finder;
use crate::rm::{ControlFile, Rm, Window};
use crate::sys::{
    Alloc, Card, Control, ESC_ALLOC, ESC_CARD_INFO, ESC_CONTROL, ESC_FREE, ESC_MAP_MEMORY, ESC_REGISTER_FD,
    ESC_UNMAP_MEMORY, Free, MAGIC, MAX_CARDS, MapMemory, UnmapMemory,
};

/// The driver's control file.
pub const CONTROL_PATH: &str = "/dev/nvidiactl";
/// Most control files of a process that are taken.
const MAX_FILES: usize = 64;
/// What the names of the driver's files begin with.
const DRIVER: &str = "/dev/nvidia";
/// Most files of a process that are looked at.
const MAX_LISTED: usize = 4096;
/// Times that a call is tried while the driver says "again".
const MAX_TRIES: usize = 1000;

/// Calls into the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

struct HostFile {
    control: OwnedFd,
    /// The GPU's own file, held open.
    _gpu: Option<File>,
}

/// The files that a process has open whose names begin like that, by number.
fn open_files(pid: u32, begin: &str) -> io::Result<impl Iterator<Item = (i32, PathBuf)>> {
    let all = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
    // Files come and go while they are listed.
    let named = |f: io::Result<std::fs::DirEntry>| {
        let f = f.ok()?;
        Some((f.file_name().to_str()?.parse().ok()?, std::fs::read_link(f.path()).ok()?))
    };
    let is = move |(_, to): &(i32, PathBuf)| to.as_os_str().as_encoded_bytes().starts_with(begin.as_bytes());
    Ok(all.take(MAX_LISTED).filter_map(named).filter(is))
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

    fn cards(&self) -> Result<Vec<Card>> {
        let file = HostFile { control: open(CONTROL_PATH)?.into(), _gpu: None };
        file.cards().map_err(|why| Error::NoDriver { path: CONTROL_PATH.into(), why })
    }

    fn may_log(&self) -> bool {
        let read = |of: &str| std::fs::read_to_string(format!("/proc/self/{of}")).unwrap_or_default();
        is_administrator(&read("status"), &read("uid_map"))
    }

    fn count_files(&self, pid: u32) -> usize {
        open_files(pid, DRIVER).map_or(0, Iterator::count)
    }

    fn processes(&self, finder: &mut Finder) -> Result<Vec<u32>> {
        finder.look().map_err(|why| Error::NoDriver { path: "/proc".into(), why })
    }

    fn files_and_count(&self, pid: u32) -> Result<(Vec<Box<dyn ControlFile>>, usize)> {
        let failed = |why: io::Error| Error::Process { pid, why };
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        // The pidfd comes first: whatever is found belongs to this process, not to a later one of the same number.
        let process = pidfd_open(raw, PidfdFlags::empty()).map_err(|e| failed(e.into()))?;
        let (mut out, mut count): (Vec<Box<dyn ControlFile>>, usize) = (Vec::new(), 0);
        for (number, to) in open_files(pid, DRIVER).map_err(failed)? {
            count += 1;
            if to.as_os_str() == CONTROL_PATH
                && out.len() < MAX_FILES
                && let Ok(control) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty())
            {
                out.push(Box::new(HostFile { control, _gpu: None }));
            }
        }
        Ok((out, count))
    }
}

/// Whether a process of this status and map of users is one to the kernel: it has CAP_SYS_ADMIN, and not only in a user
/// namespace.
fn is_administrator(status: &str, uid_map: &str) -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    let effective = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("CapEff:")?.trim(), 16).ok());
    let whole = uid_map.split_whitespace().eq(["0", "0", "4294967295"]);
    whole && effective.is_some_and(|e| e >> CAP_SYS_ADMIN & 1 == 1)
}

impl HostFile {
    /// Maps through a file that nothing else is mapped through: the kernel keeps one mapping in the making for each.
    fn map_through(
        &self,
        file: &File,
        c: &mut MapMemory,
        window: impl FnOnce(BorrowedFd<'_>, usize) -> io::Result<Window>,
    ) -> io::Result<Option<Window>> {
        c.fd = file.as_raw_fd();
        call(|| {
            // SAFETY: the opcode's size is that of `MapMemory`.
            unsafe {
                ioctl(self.control.as_fd(), Updater::<{ escape::<MapMemory>(ESC_MAP_MEMORY) }, MapMemory>::new(c))
            }
        })?;
        if c.status != crate::error::OK {
            return Ok(None);
        }
        match window(file.as_fd(), c.length as usize) {
            Ok(window) => Ok(Some(window)),
            Err(why) => {
                let (client, device, memory, linear) = (c.client, c.device, c.memory, c.linear);
                let mut undo = UnmapMemory { client, device, memory, linear, ..UnmapMemory::default() };
                let _ = self.unmap(&mut undo);
                Err(why)
            }
        }
    }
}

const fn escape<T>(number: u8) -> Opcode {
    opcode::read_write::<T>(MAGIC, number)
}

/// A command's parameters as RM wants them told. It refuses an address without a size, so that nothing has none.
fn address_of(params: &mut [u8]) -> (u64, u32) {
    let address = if params.is_empty() { 0 } else { params.as_mut_ptr() as u64 };
    (address, params.len() as u32)
}

/// Calls the driver again while it asks for that, and not for ever: the service has others to care for.
fn call<T>(mut f: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    for _ in 0..MAX_TRIES {
        match f() {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            other => return other.map_err(io::Error::from),
        }
    }
    Err(rustix::io::Errno::AGAIN.into())
}

impl ControlFile for HostFile {
    fn control(&self, c: &mut Control, params: &mut [u8]) -> io::Result<()> {
        (c.params, c.params_size) = address_of(params);
        call(|| {
            // SAFETY: the opcode's size is that of `Control`; `params` is alive and as long as it says.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Control>(ESC_CONTROL) }, Control>::new(c)) }
        })
    }

    fn alloc(&self, c: &mut Alloc, params: &mut [u8]) -> io::Result<()> {
        (c.params, c.params_size) = address_of(params);
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

    fn map(&self, gpu: u32, c: &mut MapMemory) -> io::Result<Option<Window>> {
        let file = File::options().read(true).write(true).open(format!("/dev/nvidia{gpu}"))?;
        let mut control = self.control.as_raw_fd();
        call(|| {
            // SAFETY: the opcode's size is that of a descriptor.
            unsafe { ioctl(file.as_fd(), Updater::<{ escape::<i32>(ESC_REGISTER_FD) }, i32>::new(&mut control)) }
        })?;
        self.map_through(&file, c, |file, len| Window::map(file, 0, len, None))
    }

    fn map_system(&self, c: &mut MapMemory) -> io::Result<Option<Window>> {
        let file = File::options().read(true).write(true).open(CONTROL_PATH)?;
        self.map_through(&file, c, |file, len| Window::map_read_only(file, len, None))
    }

    fn unmap(&self, c: &mut UnmapMemory) -> io::Result<()> {
        type Call = UnmapMemory;
        call(|| {
            // SAFETY: the opcode's size is that of `UnmapMemory`.
            unsafe { ioctl(self.control.as_fd(), Updater::<{ escape::<Call>(ESC_UNMAP_MEMORY) }, Call>::new(c)) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_root_in_a_namespace_only_or_without_the_right_is_told_from_root() {
        let status = |caps: &str| format!("Name:\tp\nCapPrm:\t000001ffffffffff\nCapEff:\t{caps}\n");
        let all = "         0          0 4294967295\n";
        assert!(is_administrator(&status("000001ffffffffff"), all));
        assert!(!is_administrator(&status("00000000a80425fb"), all), "as Docker gives by itself");
        assert!(!is_administrator(&status("0000000000000000"), all));
        assert!(!is_administrator(&status("000001ffffffffff"), "         0       1000          1\n"));
        assert!(!is_administrator("", ""));
    }

    #[test]
    fn a_file_more_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let begin = dir.path().join("device").into_os_string().into_string().unwrap();
        let files = || open_files(std::process::id(), &begin).unwrap().count();
        assert_eq!(files(), 0);
        let one = std::fs::File::create(format!("{begin}0")).unwrap();
        let two = std::fs::File::create(format!("{begin}ctl")).unwrap();
        let _other = std::fs::File::create(dir.path().join("other")).unwrap();
        assert_eq!(files(), 2);
        drop((one, two));
        assert!(files() == 0 && open_files(u32::MAX, &begin).is_err() && Host.count_files(u32::MAX) == 0);
    }

    #[test]
    fn a_driver_that_always_says_again_is_not_asked_for_ever() {
        let (mut asked, mut later) = (0, 0);
        let why = call(|| -> rustix::io::Result<()> {
            asked += 1;
            Err(rustix::io::Errno::AGAIN)
        });
        assert_eq!((why.unwrap_err().kind(), asked), (io::ErrorKind::WouldBlock, MAX_TRIES));
        let done = call(|| {
            later += 1;
            if later < 5 { Err(rustix::io::Errno::INTR) } else { Ok(later) }
        });
        assert_eq!(done.unwrap(), 5);
    }

    /// The driver's own check of every control call: parameters have an address and a size, or neither.
    #[test]
    fn a_command_without_parameters_passes_no_address() {
        let nobody = HostFile { control: open("/dev/null").unwrap().into(), _gpu: None };
        let mut said = Control::default();
        // The call itself fails, with what it was given in `said`.
        nobody.control(&mut said, &mut []).unwrap_err();
        assert_eq!((said.params, said.params_size), (0, 0));
        nobody.control(&mut said, &mut [0; 8]).unwrap_err();
        assert!(said.params != 0 && said.params_size == 8, "{said:?}");
        let mut said = Alloc::default();
        nobody.alloc(&mut said, &mut []).unwrap_err();
        assert_eq!((said.params, said.params_size), (0, 0));
    }
}
