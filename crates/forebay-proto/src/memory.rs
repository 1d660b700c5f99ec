//! Shared memory: a page that one side makes and the other maps, that nobody can resize, and that only those can write
//! who should.

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::page::{PAGE, Page};

/// Seals without which a mapping could fault: the other side could cut the memory off.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A page in this process.
pub struct Mapped<P> {
    at: NonNull<P>,
    _page: PhantomData<P>,
}

// SAFETY: a `Page` is `Sync` memory without an owner thread; the mapping is given back once, by the last owner.
unsafe impl<P: Page> Send for Mapped<P> {}
// SAFETY: as above.
unsafe impl<P: Page> Sync for Mapped<P> {}

impl<P: Page> Mapped<P> {
    fn map(fd: BorrowedFd<'_>, prot: ProtFlags, over: Option<NonNull<P>>) -> Result<NonNull<P>> {
        let (at, flags) = match over {
            Some(p) => (p.as_ptr().cast(), MapFlags::SHARED | MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::SHARED),
        };
        // SAFETY: a fresh mapping, or one over a mapping of ours of the same size, whose readers hold atomics for which
        // any bytes are valid.
        let p = unsafe { mmap(at, PAGE, prot, flags, fd, 0)? };
        NonNull::new(p.cast()).ok_or(rustix::io::Errno::NOMEM)
    }

    /// Maps a page that somebody else made.
    ///
    /// # Errors
    /// `EINVAL` for a file that is no page: of another size, or one that could be cut off.
    pub fn open(fd: BorrowedFd<'_>, writable: bool) -> Result<Self> {
        check(fd)?;
        Ok(Mapped { at: Self::map(fd, prot(writable), None)?, _page: PhantomData })
    }

    /// Maps another page over this one, so that whoever holds a reference sees that one from now on.
    ///
    /// # Errors
    /// As [`Mapped::open`]; this page stays as it was then.
    pub fn replace(&self, fd: BorrowedFd<'_>, writable: bool) -> Result<()> {
        check(fd)?;
        Self::map(fd, prot(writable), Some(self.at)).map(drop)
    }
}

fn prot(writable: bool) -> ProtFlags {
    if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ }
}

fn check(fd: BorrowedFd<'_>) -> Result<()> {
    let whole = fstat(fd)?.st_size == PAGE as i64;
    let fixed = fcntl_get_seals(fd)?.contains(FIXED_SIZE);
    if whole && fixed { Ok(()) } else { Err(rustix::io::Errno::INVAL) }
}

impl<P> std::ops::Deref for Mapped<P> {
    type Target = P;

    fn deref(&self) -> &P {
        // SAFETY: mapped as long as `self` lives; any bytes are a valid `P` (`Page`), and all access is atomic.
        unsafe { self.at.as_ref() }
    }
}

impl<P> Drop for Mapped<P> {
    fn drop(&mut self) {
        // SAFETY: our mapping, which nobody borrows any more.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), PAGE) };
    }
}

/// A page that this side made, with the file to give to others.
pub struct Made<P> {
    page: Mapped<P>,
    file: OwnedFd,
}

impl<P: Page> Made<P> {
    /// A page of zeroes. If `shared_writable` is false, nobody but this process can ever write it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(name: &str, shared_writable: bool) -> Result<Self> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, PAGE as u64)?;
        let page = Mapped { at: Mapped::map(file.as_fd(), prot(true), None)?, _page: PhantomData };
        let writes = if shared_writable { SealFlags::empty() } else { SealFlags::FUTURE_WRITE };
        fcntl_add_seals(&file, FIXED_SIZE | writes | SealFlags::SEAL)?;
        Ok(Made { page, file })
    }

    /// The file, for sending.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl<P> std::ops::Deref for Made<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{DeviceLoad, GlobalPage, ProgramPage};
    use std::sync::atomic::Ordering;

    #[test]
    fn a_read_only_page_can_be_read_and_nothing_else() {
        let made = Made::<GlobalPage>::new("test", false).unwrap();
        let read = Mapped::<GlobalPage>::open(made.file(), false).unwrap();
        let load = DeviceLoad { at_ns: 7, utilisation: 3, ..DeviceLoad::default() };
        made.set(2, &load);
        assert_eq!(read.device(2), Some(load));
        assert_eq!(read.device(0), None);
        assert_eq!(read.device(99), None);
        assert!(Mapped::<GlobalPage>::open(made.file(), true).is_err(), "a program could write it");
        assert!(ftruncate(made.file(), 0).is_err() && ftruncate(made.file(), 1 << 20).is_err());
        assert!(rustix::io::write(made.file(), b"x").is_err());
        assert!(fcntl_add_seals(made.file(), SealFlags::WRITE).is_err());
    }

    /// [`crate::client::Account::less_is_ahead`] relies on it: threads of one program sleep on a word of the service's page.
    /// (The kernel knows nothing of loom's words.)
    #[cfg(not(loom))]
    #[test]
    fn who_sleeps_on_a_page_that_it_cannot_write_is_woken_by_others_who_cannot() {
        use rustix::thread::futex;
        let made = Made::<crate::page::ClientPage>::new("test", false).unwrap();
        let read = Mapped::<crate::page::ClientPage>::open(made.file(), false).unwrap();
        let bell = &read.accounts[1].bell;
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| {
                let long = rustix::time::Timespec { tv_sec: 20, tv_nsec: 0 };
                futex::wait(bell, futex::Flags::empty(), 0, Some(&long))
            });
            let begun = std::time::Instant::now();
            while futex::wake(bell, futex::Flags::empty(), i32::MAX as u32).unwrap() == 0 {
                assert!(begun.elapsed().as_secs() < 10, "it does not sleep, or cannot be woken");
                std::thread::yield_now();
            }
            sleeper.join().unwrap().unwrap();
        });
    }

    #[test]
    fn files_that_are_no_pages_are_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("test", flags).unwrap();
        ftruncate(&file, PAGE as u64).unwrap();
        // Whoever made it could cut it off, and reading would kill us.
        assert!(Mapped::<GlobalPage>::open(file.as_fd(), false).is_err());
        let short = memfd_create("test", flags).unwrap();
        ftruncate(&short, 16).unwrap();
        fcntl_add_seals(&short, FIXED_SIZE).unwrap();
        assert!(Mapped::<GlobalPage>::open(short.as_fd(), false).is_err());
        let pipe = rustix::pipe::pipe().unwrap();
        assert!(Mapped::<GlobalPage>::open(pipe.0.as_fd(), false).is_err());
    }

    #[test]
    fn a_page_is_replaced_under_its_readers() {
        let (a, b) = (Made::<ProgramPage>::new("a", true).unwrap(), Made::<ProgramPage>::new("b", true).unwrap());
        let read = Mapped::<ProgramPage>::open(a.file(), true).unwrap();
        a.accounts[0].spent.store(1, Ordering::Relaxed);
        b.accounts[0].spent.store(2, Ordering::Relaxed);
        let word = &read.accounts[0].spent;
        assert_eq!(word.load(Ordering::Relaxed), 1);
        read.replace(b.file(), true).unwrap();
        assert_eq!(word.load(Ordering::Relaxed), 2);
    }
}
