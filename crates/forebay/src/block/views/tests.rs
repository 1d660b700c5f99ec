//! Coherence on CUDA's stand-in, whose copies and kernels are late now and then, and on devices that vanish.

use super::*;
use crate::run::device::DEPTH_THROUGHPUT;
use crate::stand_in;
use crate::template::Template;
use forebay_hal::sim::{Model, SimDevice};
use forebay_hal::{Kind, discover};

fn handles<const N: usize>() -> [Arc<DeviceHandle>; N] {
    let (devices, why) = discover(&[Kind::Cuda]);
    assert_eq!(devices.len(), N, "{why:?}");
    let made = |i: usize| DeviceHandle::new(i + 1, devices[i].clone(), DEPTH_THROUGHPUT).unwrap();
    std::array::from_fn(made)
}

/// What comes behind this on the device waits for a while.
fn delay(d: &Arc<DeviceHandle>) {
    let wait = || std::thread::sleep(std::time::Duration::from_millis(3));
    d.lock().queue.host_fn(Box::new(wait)).unwrap();
}

/// The bytes of a buffer, all of which are the same.
fn value(d: &Arc<DeviceHandle>, b: &Buffer) -> u8 {
    let host = HostMemory::buffer(b.len()).unwrap();
    let fence = {
        let mut q = d.lock();
        q.queue.copy(b, 0, &host, 0, b.len()).unwrap();
        q.fence_now().unwrap()
    };
    d.wait(fence).unwrap();
    // SAFETY: the copy is done.
    let bytes = unsafe { std::slice::from_raw_parts(host.host_ptr().unwrap().as_ptr(), b.len()) };
    assert!(bytes.iter().all(|v| *v == bytes[0]), "torn");
    bytes[0]
}

/// Fills it there and sends it home.
fn send(b: &Datablock, d: &Arc<DeviceHandle>, value: u8, for_program: bool) {
    let buffer = b.write_on(d, false).unwrap();
    d.lock().queue.fill(&buffer, 0, b.bytes(), value).unwrap();
    b.send_home(d, for_program).unwrap();
    assert!(b.inner().views.lock().unwrap().arriving.is_some());
}

fn fill(b: &mut Datablock, d: &Arc<DeviceHandle>, value: u8) {
    let buffer = b.write_on(d, true).unwrap();
    d.lock().queue.fill(&buffer, 0, b.bytes(), value).unwrap();
    d.leave_unfenced();
}

fn sim() -> (SimDevice, Arc<DeviceHandle>) {
    let sim = SimDevice::new(Model::default());
    (sim.clone(), DeviceHandle::new(1, Arc::new(sim), DEPTH_THROUGHPUT).unwrap())
}

/// Whoever writes next has nothing to do with a device that read these bytes and is gone.
#[test]
fn what_a_lost_device_was_reading_can_be_written() {
    let ((gone, a), (here, b)) = (sim(), sim());
    let t = Template::array::<u8>([1000]);
    let mut block = Datablock::from_slice(t, &[1u8; 1000]).unwrap();
    for d in [&a, &b, &a] {
        block.read_on(d).unwrap();
        d.flush();
    }
    gone.unplug();
    let before = here.now();
    block.assign(&[2u8; 1000]).unwrap();
    assert!(here.now() > before, "the other one, which reads it too, was not waited for");
    assert_eq!(block.as_slice::<u8>().unwrap(), [2; 1000]);
    // Sent to the host, and lost on the way: for nothing, if it is written there.
    let ((gone, a), pool) = (sim(), Pool::new(t, None));
    // SAFETY: not closed yet.
    let p = unsafe { pool.as_ref() };
    p.read_on_host.store(true, Ordering::Relaxed);
    let mut sent = p.acquire();
    send(&sent, &a, 3, true);
    gone.unplug();
    sent.assign(&[4u8; 1000]).unwrap();
    assert_eq!(sent.as_slice::<u8>().unwrap(), [4; 1000]);
    drop(sent);
    // SAFETY: nothing is acquired after this.
    unsafe { Pool::close(pool) };
}

/// Each of those who have a block hears that its bytes are lost, not just the first who looks.
#[test]
fn what_was_lost_on_its_way_to_the_host_is_lost_for_everybody() {
    for for_program in [true, false] {
        let ((gone, a), pool) = (sim(), Pool::new(Template::array::<u8>([1000]), None));
        // SAFETY: not closed yet.
        let p = unsafe { pool.as_ref() };
        p.read_on_host.store(true, Ordering::Relaxed);
        let sent = p.acquire();
        send(&sent, &a, 3, for_program);
        let other = sent.clone();
        gone.unplug();
        for b in [&sent, &other, &sent] {
            assert!(matches!(b.as_slice::<u8>(), Err(Error::Device(forebay_hal::Error::Lost { .. }))));
            assert!(b.wait().is_err());
        }
        drop((sent, other));
        // SAFETY: nothing is acquired after this.
        unsafe { Pool::close(pool) };
    }
}

#[test]
fn what_one_gpu_made_another_one_gets_without_the_host() {
    if !stand_in::is_here() {
        let variables = [("STAND_IN_DEVICES", "2"), ("STAND_IN_DELAYS", "1")];
        let name = "block::views::tests::what_one_gpu_made_another_one_gets_without_the_host";
        return stand_in::again_with(name, &variables);
    }
    for bytes in [1000usize, 1 << 20] {
        let [a, b] = handles();
        let t = Template::array::<u8>([bytes]);
        for i in 0..20u8 {
            let mut block = Datablock::from_slice(t, &vec![0u8; bytes]).unwrap();
            fill(&mut block, &a, i);
            block.read_on(&b).unwrap();
            assert!(block.residency()[1..].iter().all(|r| r.1 == Residency::Shared), "{:?}", block.residency());
            // What it was copied from is written again, and goes back and forth.
            fill(&mut block, &a, 100);
            assert_eq!(block.residency()[2].1, Residency::Invalid);
            fill(&mut block, &b, 200 + i);
            assert_eq!(block.as_slice::<u8>().unwrap(), vec![200 + i; bytes]);
        }
        // Each block went to the first device and came back from the second one by the host, and by no other way.
        let moved = [&a, &b].map(|d| d.copied.load(Ordering::Relaxed) / bytes as u64);
        assert_eq!((moved, b.peer.load(Ordering::Relaxed)), ([20, 20], 40 * bytes as u64));
    }
}

/// A copy to the host that nobody waited for, since the device wrote the block again, is not behind what the host writes.
#[test]
fn what_the_host_writes_is_not_overwritten_by_what_was_sent_there_in_vain() {
    if !stand_in::is_here() {
        let variables = [("STAND_IN_DEVICES", "1"), ("STAND_IN_DELAYS", "1")];
        let name = "block::views::tests::what_the_host_writes_is_not_overwritten_by_what_was_sent_there_in_vain";
        return stand_in::again_with(name, &variables);
    }
    for bytes in [1000usize, 300_000] {
        let [a] = handles();
        let pool = Pool::new(Template::array::<u8>([bytes]), None);
        // SAFETY: not closed yet.
        let p = unsafe { pool.as_ref() };
        // What came back is handed out whoever still uses it.
        p.set_ahead(1);
        let mut first = p.acquire();
        fill(&mut first, &a, 1);
        // The next ones are sent where this one was read.
        assert_eq!(first.as_slice::<u8>().unwrap()[0], 1);
        drop(first);
        for i in 0..10u8 {
            p.read_on_host.store(true, Ordering::Relaxed);
            delay(&a);
            let mut sent = p.acquire();
            let address = sent.0;
            let on_device = sent.write_on(&a, false).unwrap();
            a.lock().queue.fill(&on_device, 0, bytes, 100).unwrap();
            sent.send_home(&a, true).unwrap();
            // Written again where it was, and then by the host: in the same handle, or after it has been in the pool.
            sent.write_on(&a, false).unwrap();
            if i % 2 == 0 {
                drop(sent);
                sent = p.acquire();
                assert_eq!(sent.0, address);
            }
            assert!(!sent.is_free());
            sent.assign(&vec![i; bytes]).unwrap();
            assert!(
                sent.is_free() && {
                    let _other = sent.clone();
                    !sent.is_free()
                }
            );
            a.finish().unwrap();
            assert_eq!(sent.as_slice::<u8>().unwrap(), vec![i; bytes]);
        }
        // SAFETY: nothing is acquired after this.
        unsafe { Pool::close(pool) };
    }
}

#[test]
fn gpus_that_copied_from_each_other_do_not_keep_each_other() {
    if !stand_in::is_here() {
        let name = "block::views::tests::gpus_that_copied_from_each_other_do_not_keep_each_other";
        return stand_in::again_with(name, &[("STAND_IN_DEVICES", "2")]);
    }
    let both: [_; 2] = handles();
    let copied = [(&both[0], &both[1]), (&both[1], &both[0])].map(|(from, to)| {
        let mut block = Datablock::from_slice(Template::array::<u8>([1000]), &[0u8; 1000]).unwrap();
        fill(&mut block, from, 1);
        block.read_on(to).unwrap();
        block
    });
    drop(copied);
    let gone = both.each_ref().map(Arc::downgrade);
    drop(both);
    assert!(gone.iter().all(|d| d.upgrade().is_none()));
}

#[test]
fn copies_between_gpus_are_of_what_was_there_when_they_were_asked_for() {
    if !stand_in::is_here() {
        let variables = [("STAND_IN_DEVICES", "3"), ("STAND_IN_DELAYS", "1")];
        let name = "block::views::tests::copies_between_gpus_are_of_what_was_there_when_they_were_asked_for";
        return stand_in::again_with(name, &variables);
    }
    // Memory that is used again at once, and memory that takes turns.
    for bytes in [1000usize, 300_000] {
        let [a, b, c] = handles();
        let t = Template::array::<u8>([bytes]);
        let fresh = || Datablock::from_slice(t, &vec![0u8; bytes]).unwrap();
        for i in 0..15u8 {
            // What is copied from is written again.
            let mut block = fresh();
            delay(&a);
            fill(&mut block, &a, i);
            delay(&b);
            let there = block.read_on(&b).unwrap();
            fill(&mut block, &a, 100);
            assert_eq!(value(&b, &there), i, "written while it was copied");
            // A block is gone before its copy is done, and its memory another one's.
            let mut gone = fresh();
            fill(&mut gone, &a, 50 + i);
            delay(&b);
            let there = gone.read_on(&b).unwrap();
            drop(gone);
            let mut next = fresh();
            fill(&mut next, &a, 200);
            assert_eq!(value(&b, &there), 50 + i, "used again while it was copied");
            // One device still copies from where another one's bytes come to.
            let mut block = fresh();
            fill(&mut block, &b, 70 + i);
            delay(&c);
            let there = block.read_on(&c).unwrap();
            block.read_on(&a).unwrap();
            let to = block.write_on(&a, true).unwrap();
            a.lock().queue.fill(&to, 0, bytes, 220).unwrap();
            a.leave_unfenced();
            block.read_on(&b).unwrap();
            assert_eq!(value(&c, &there), 70 + i, "overwritten while it was copied");
            assert_eq!(block.as_slice::<u8>().unwrap()[0], 220);
        }
    }
}
