//! Open files of the driver, as the kernel knows them: by their descriptions, whatever numbers in which processes they have.
//!
//! The files are ordinary ones, and a description has two things that can be seen through any duplicate of it: its
//! position, which nobody else uses and which is made its name here, and a lock that is its own (`F_OFD_SETLK`), which
//! is there until its last duplicate has been closed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_rm::ControlFile;
use forebay_rm::fake::FakeRm;
use rustix::fs::{SeekFrom, fstat, seek};

/// Which of the driver's files one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// That of a GPU.
    Gpu(u32),
}

struct Open {
    node: usize,
    file: Arc<dyn ControlFile>,
    /// The control file that it was tied to, of a GPU's.
    tied: bool,
}

/// All that are open.
pub struct Files {
    rm: FakeRm,
    /// The control file, then the GPUs': each with a description of our own.
    nodes: Vec<File>,
    open: BTreeMap<u64, Open>,
    next: u64,
    /// Since when the GPUs' time is that of the clock, if it is, and how much of it they have had, µs.
    clock: Option<(Instant, u64)>,
    /// Where each call is told.
    calls: Option<Box<dyn Write + Send>>,
}

/// An open one.
pub struct Found {
    /// Which file.
    pub node: Node,
    /// Its name here.
    pub name: u64,
    /// What answers for it.
    pub file: Arc<dyn ControlFile>,
}

impl Files {
    /// The files of these names in `dev`.
    pub fn new(rm: FakeRm, dev: &Path, nodes: &[String]) -> io::Result<Self> {
        let open = |n: &String| File::options().read(true).write(true).open(dev.join(n));
        let nodes = nodes.iter().map(open).collect::<io::Result<_>>()?;
        Ok(Files { rm, nodes, open: BTreeMap::new(), next: 1, clock: None, calls: None })
    }

    /// From now on the GPUs' time is that of the clock.
    pub fn keep_time(&mut self) {
        self.clock = Some((Instant::now(), 0));
    }

    /// The GPUs have had all time that has passed.
    pub fn let_time_pass(&mut self) {
        if let Some((since, had)) = &mut self.clock {
            let now = since.elapsed().as_micros() as u64;
            self.rm.run(now - *had);
            *had = now;
        }
    }

    /// From now on each call is a line there.
    pub fn tell(&mut self, to: Box<dyn Write + Send>) {
        self.calls = Some(to);
    }

    /// A call, if somebody wants to know.
    pub fn note(&mut self, call: impl FnOnce() -> String) {
        if let Some(to) = &mut self.calls {
            // Who wants to know and cannot, does without.
            let _ = writeln!(to, "{}", call());
        }
    }

    /// The fake.
    pub fn rm(&self) -> &FakeRm {
        &self.rm
    }

    /// Which of the driver's files this descriptor, of process `pid`, is; none if it is another one.
    pub fn find(&mut self, pid: u32, fd: BorrowedFd<'_>) -> io::Result<Option<Found>> {
        let is = |a: &File| Some((fstat(a).ok()?, fstat(fd).ok()?));
        let same = |a: &File| is(a).is_some_and(|(a, b)| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino));
        let Some(node) = self.nodes.iter().position(same) else { return Ok(None) };
        let mut name = seek(fd, SeekFrom::Current(0))?;
        if name == 0 {
            name = self.next;
            self.next += 1;
            seek(fd, SeekFrom::Start(name))?;
            lock(fd, libc::F_OFD_SETLK, libc::F_RDLCK, name)?;
            let file = self.rm.file_of(pid).into();
            self.open.insert(name, Open { node, file, tied: false });
        }
        let missing = || io::Error::from_raw_os_error(libc::EBADF);
        let open = self.open.get(&name).ok_or_else(missing)?;
        let which = if node == 0 { Node::Control } else { Node::Gpu(node as u32 - 1) };
        Ok(Some(Found { node: which, name, file: open.file.clone() }))
    }

    /// A GPU's file is tied to a control file.
    pub fn tie(&mut self, name: u64) -> bool {
        self.open.get_mut(&name).is_some_and(|o| !std::mem::replace(&mut o.tied, true))
    }

    /// Whether it is.
    pub fn is_tied(&self, name: u64) -> bool {
        self.open.get(&name).is_some_and(|o| o.tied)
    }

    /// What nobody has open any more is closed, and what was made on it goes.
    pub fn close_those_that_are(&mut self) {
        let nodes = &self.nodes;
        self.open.retain(|name, o| {
            // Where it cannot be told it counts as open.
            lock(nodes[o.node].as_fd(), libc::F_OFD_GETLK, libc::F_WRLCK, *name).unwrap_or(true)
        });
    }
}

/// A lock of the byte that is a description's own; for a question, whether somebody else has one there.
fn lock(fd: BorrowedFd<'_>, command: i32, kind: i32, name: u64) -> io::Result<bool> {
    let mut l = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: name as libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, the structure is what these commands take.
    let done = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut l) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::from(l.l_type) != libc::F_UNLCK) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_rm::sys::{Alloc, CLASS_CLIENT};

    #[test]
    fn a_description_is_one_through_all_its_duplicates_and_lives_as_long_as_they() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = ["nvidiactl".to_owned(), "nvidia0".to_owned()];
        nodes.iter().for_each(|n| std::fs::write(dir.path().join(n), "").unwrap());
        let rm = FakeRm::default();
        let mut files = Files::new(rm.clone(), dir.path(), &nodes).unwrap();
        let open = |n: &str| File::options().read(true).write(true).open(dir.path().join(n)).unwrap();
        let (a, b, gpu) = (open("nvidiactl"), open("nvidiactl"), open("nvidia0"));
        let twin = a.try_clone().unwrap();
        let name = |files: &mut Files, f: &File| files.find(7, f.as_fd()).unwrap().unwrap().name;
        let first = name(&mut files, &a);
        assert_eq!(name(&mut files, &twin), first);
        assert_ne!(name(&mut files, &b), first);
        assert_eq!(files.find(7, gpu.as_fd()).unwrap().unwrap().node, Node::Gpu(0));
        assert!(files.find(7, File::open("/dev/null").unwrap().as_fd()).unwrap().is_none());
        let mut client = Alloc { class: CLASS_CLIENT, ..Alloc::default() };
        files.find(7, a.as_fd()).unwrap().unwrap().file.alloc(&mut client, &mut []).unwrap();
        drop(a);
        files.close_those_that_are();
        assert_eq!((rm.clients(), name(&mut files, &twin)), (1, first));
        drop(twin);
        files.close_those_that_are();
        assert_eq!(rm.clients(), 0);
    }
}
