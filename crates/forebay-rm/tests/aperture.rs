//! Device memory in the processor's hands, on the fake, whose device memory is a file of this machine.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use forebay_rm::error::NOT_SUPPORTED;
use forebay_rm::fake::FakeRm;
use forebay_rm::{Aperture, Client, Error};

const SIZE: usize = 2 << 20;

/// What CUDA would export.
fn allocation() -> OwnedFd {
    let fd = rustix::fs::memfd_create("vram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, SIZE as u64).unwrap();
    fd
}

fn client(rm: &FakeRm) -> Arc<Client> {
    Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap())
}

#[test]
fn what_is_stored_through_it_is_in_the_allocation_and_dropping_it_gives_everything_back_in_order() {
    let rm = FakeRm::default();
    let client = client(&rm);
    let memory = allocation();
    let a = Aperture::map(&client, memory.as_fd(), SIZE).unwrap();
    assert_eq!((a.len(), rm.mappings(), rm.memories()), (SIZE, 1, 1));
    let p = a.ptr().unwrap().as_ptr();
    let mut back = [0u8; 5];
    // SAFETY: within the mapping, which nobody else uses.
    unsafe { std::ptr::copy_nonoverlapping(b"hello".as_ptr(), p.add(SIZE - 5), 5) };
    a.flush();
    rustix::io::pread(&memory, &mut back, SIZE as u64 - 5).unwrap();
    assert_eq!(&back, b"hello");
    rustix::io::pwrite(&memory, b"there", 64).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { std::slice::from_raw_parts(p.add(64), 5) }, b"there");
    drop(a);
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));

    // The client outlives its handle for as long as something is mapped through it.
    let a = Aperture::map(&client, memory.as_fd(), SIZE).unwrap();
    let b = Aperture::map(&client, memory.as_fd(), 4096).unwrap();
    drop(client);
    assert_eq!((rm.clients(), rm.mappings()), (1, 2));
    drop(a);
    drop(b);
    assert_eq!((rm.clients(), rm.mappings(), rm.wrong_order()), (0, 0, 0));
}

#[test]
fn a_refusal_is_an_error_and_leaves_nothing_behind() {
    let rm = FakeRm::default();
    let client = client(&rm);
    let memory = allocation();
    // Confidential computing.
    rm.refuse_mapping(Some(NOT_SUPPORTED));
    let refused = Aperture::map(&client, memory.as_fd(), SIZE).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Status { call: "map memory", status: NOT_SUPPORTED }), "{refused}");
    assert_eq!((rm.mappings(), rm.memories()), (0, 0));
    rm.refuse_mapping(None);
    // More than there is, and nothing at all.
    for bytes in [SIZE + 1, 0, usize::MAX] {
        assert!(Aperture::map(&client, memory.as_fd(), bytes).is_err(), "{bytes}");
    }
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
    assert!(Aperture::map(&client, memory.as_fd(), SIZE).is_ok());
    // A driver that nobody has met.
    let other = FakeRm::new("610.12");
    assert!(matches!(Client::open(Arc::new(other), 0), Err(Error::UnknownDriver { .. })));
}

#[test]
fn mappings_come_and_go_in_any_order_and_from_several_threads() {
    let rm = FakeRm::default();
    let client = client(&rm);
    let memory = allocation();
    std::thread::scope(|s| {
        for t in 0..4u8 {
            let (client, memory) = (&client, &memory);
            s.spawn(move || {
                for round in 0..50u8 {
                    let a = Aperture::map(client, memory.as_fd(), SIZE).unwrap();
                    let at = usize::from(t) * 4096;
                    // SAFETY: each thread has a page of its own.
                    unsafe {
                        let p = a.ptr().unwrap().as_ptr().add(at);
                        std::ptr::write_volatile(p, round);
                        assert_eq!(std::ptr::read_volatile(p), round);
                    }
                }
            });
        }
    });
    let mut all: Vec<_> = (0..10).map(|_| Aperture::map(&client, memory.as_fd(), SIZE).unwrap()).collect();
    for i in [3, 0, 5, 1, 2, 0, 3, 1, 0, 0] {
        drop(all.swap_remove(i));
    }
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
}

/// A process that was forked has the same file: what it would free there is the first one's.
#[test]
fn a_forked_process_gives_nothing_back_that_is_not_its_own() {
    let rm = FakeRm::default();
    let client = client(&rm);
    let a = Aperture::map(&client, allocation().as_fd(), SIZE).unwrap();
    let has = || (rm.clients(), rm.mappings(), rm.memories());
    let before = has();
    // SAFETY: the child drops what is dropped here, looks, and ends without anybody's destructors.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // (The fake's file is closed with the client, and frees all; the kernel's would be closed once the first process has.)
        drop(a);
        let same = has() == before;
        // SAFETY: a plain call.
        unsafe { libc::_exit(i32::from(!same)) };
    }
    let mut status = 0;
    // SAFETY: our child; the status is valid for the call.
    assert_eq!((unsafe { libc::waitpid(pid, &mut status, 0) }, status), (pid, 0));
    drop(a);
    drop(client);
    assert_eq!((has(), rm.wrong_order()), ((0, 0, 0), 0));
}
