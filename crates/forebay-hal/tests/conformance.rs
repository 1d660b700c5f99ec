//! The conformance suite on every device of this machine.

#[path = "stand_in/bytes.rs"]
mod given_out;
mod stand_in;

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_hal::{Device, Error, Kind, Method, conformance, cuda, discover};
use forebay_rm::error::NOT_SUPPORTED;
use forebay_rm::fake::FakeRm;

fn check(device: &dyn Device) {
    let failed: Vec<_> = conformance::run(device).into_iter().filter(|o| o.failure.is_some()).collect();
    assert!(failed.is_empty(), "{}: {failed:#?}", device.info().name);
}

fn check_kind(kind: Kind) {
    let (devices, missing) = discover(&[kind]);
    for (kind, why) in missing {
        eprintln!("skipped: no {kind} device here: {why}");
    }
    for d in devices {
        if let Err(why) = d.compiles() {
            eprintln!("skipped: {}: {why}", d.info().name);
            continue;
        }
        check(&*d);
        eprintln!("checked: {kind} {}", d.info().name);
    }
}

/// The suite on both parts of each device that can be divided, which share it fairly; how many there were.
fn check_parts(kind: Kind) -> usize {
    let divided = |d: &Arc<dyn Device>| {
        let units = d.info().compute_units;
        for bad in [0, units, units + 1, u32::MAX] {
            let refused = d.split(bad).map(|_| ());
            assert!(matches!(refused, Err(Error::Invalid { .. } | Error::Unsupported { .. })), "{bad}: {refused:?}");
        }
        let parts = match d.split(1) {
            Err(why) => {
                eprintln!("skipped: {why}");
                return false;
            }
            Ok(parts) => parts,
        };
        let of = parts.each_ref().map(|p| p.info().compute_units);
        assert!(of[0] >= 1 && of[1] >= 1 && of[0] + of[1] <= units, "{of:?} of {units}");
        assert!(parts[0].info().name.contains(&format!("({} of {units} ", of[0])), "{}", parts[0].info().name);
        parts.iter().for_each(|p| check(&**p));
        check(&**d);
        true
    };
    discover(&[kind]).0.iter().filter(|d| d.compiles().is_ok() && divided(d)).count()
}

/// They have no memory in common with the processor, begin nothing before they are told to, and take no group that does not fit.
#[test]
fn opencl_gpus_conform() {
    let (devices, why) = discover(&[Kind::OpenCl]);
    let is_child = std::env::var_os("OPENCL_DYLIB_PATH").is_some();
    if devices.is_empty() && !is_child {
        return eprintln!("skipped: no OpenCL device to make a GPU of: {why:?}");
    }
    if !stand_in::on_opencl_gpus("opencl_gpus_conform") {
        return;
    }
    assert!(!devices.is_empty(), "{why:?}");
    for d in devices {
        assert!(!d.info().is_cpu && d.without().is_empty(), "{:?}", d.without());
        assert_eq!(d.plain_copy(), None);
        assert!(matches!(d.alloc_shared(64).map(|_| ()), Err(Error::Unsupported { .. })));
        assert!(matches!(d.split(1).map(|_| ()), Err(Error::Unsupported { .. })));
        // One buffer has less than all buffers.
        let most = d.info().memory_bytes / 4;
        let refused = d.alloc(most as usize + 1).map(|_| ());
        let told = matches!(refused, Err(Error::OutOfMemory { requested, limit, .. }) if requested == most + 1 && limit <= most);
        assert!(told, "{refused:?}");
        check(&*d);
    }
}

#[test]
fn parts_are_devices() {
    if stand_in::is_here() {
        cuda::use_rm(Arc::new(FakeRm::default()));
        assert_eq!(check_parts(Kind::Cuda), 1, "the stand-in can be divided");
        return;
    }
    check_parts(Kind::Cuda);
    check_parts(Kind::OpenCl);
    for (kind, d) in [Kind::Cpu, Kind::Sim].map(|k| (k, discover(&[k]).0)) {
        let refused = d[0].split(1).map(|_| ());
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{kind}: {refused:?}");
    }
    stand_in::again("parts_are_devices");
}

/// Two handles of a device that a kernel has made unusable.
fn lost() -> Option<[Arc<dyn Device>; 2]> {
    let [d, other] = [(); 2].map(|()| discover(&[Kind::Cuda]).0.into_iter().find(|d| d.compiles().is_ok()));
    let d = d?;
    let text = "extern \"C\" __global__ void bad() { *(volatile unsigned *)8 = 1; }";
    let kernel = d.compile(&forebay_hal::Source::CudaCpp(text.into()), "bad").unwrap();
    // SAFETY: the device is not lost, which is what this tests.
    let early = unsafe { d.renew() }.map(drop);
    assert!(matches!(&early, Err(Error::Invalid { what, .. }) if what.contains("not lost")), "{early:?}");
    let mut q = d.queue().unwrap();
    q.launch(&kernel, &forebay_hal::Geometry::linear(1), &[]).unwrap();
    let fence = q.fence();
    let ended = fence.and_then(|f| q.wait(f));
    assert!(matches!(ended, Err(Error::Lost { .. })), "{ended:?}");
    Some([d, other?])
}

#[test]
fn a_lost_device_is_renewed_once_everything_of_it_is_gone() {
    const NAME: &str = "a_lost_device_is_renewed_once_everything_of_it_is_gone";
    if !stand_in::is_here() && !stand_in::alone(NAME) {
        return stand_in::again(NAME);
    }
    if stand_in::is_here() {
        cuda::use_rm(Arc::new(FakeRm::default()));
    }
    let Some([d, other]) = lost() else { return eprintln!("skipped: no CUDA device here") };
    let lost = |r: forebay_hal::Result<()>| matches!(r, Err(Error::Lost { .. }));
    assert!(lost(other.alloc(4).map(drop)), "all handles share what is lost");
    // SAFETY: nobody else uses the device here.
    let refused = unsafe { d.renew() }.map(drop);
    assert!(matches!(&refused, Err(Error::Invalid { what, .. }) if what.starts_with("1 of its")), "{refused:?}");
    drop(other);
    // SAFETY: as above.
    let new = unsafe { d.renew() }.unwrap();
    assert!(lost(d.alloc(4).map(drop)) && lost(d.queue().map(drop)), "the old handle stays what it is");
    // SAFETY: as above; it is no more than refused.
    assert!(unsafe { d.renew() }.is_err(), "once");
    check(&*new);
    drop(d);
    check(&*new);
}

#[test]
fn mapped_memory_of_a_lost_context_is_freed_by_the_next_one() {
    const NAME: &str = "mapped_memory_of_a_lost_context_is_freed_by_the_next_one";
    if !stand_in::is_here() {
        return stand_in::again(NAME);
    }
    cuda::use_rm(Arc::new(FakeRm::default()));
    let d = discover(&[Kind::Cuda]).0.remove(0);
    let text = "extern \"C\" __global__ void bad() { *(volatile unsigned *)8 = 1; }";
    let kernel = d.compile(&forebay_hal::Source::CudaCpp(text.into()), "bad").unwrap();
    // In a piece of its own each.
    let [early, late] = [(); 2].map(|()| d.alloc_mapped(8 << 20).unwrap());
    assert!(early.is_mapped() && late.is_mapped());
    let occupied = d.occupy();
    // Put aside, and the context is lost before its turn comes.
    drop(early);
    let mut q = d.queue().unwrap();
    q.launch(&kernel, &forebay_hal::Geometry::linear(1), &[]).unwrap();
    let ended = q.fence().and_then(|f| q.wait(f));
    assert!(matches!(ended, Err(Error::Lost { .. })), "{ended:?}");
    drop((occupied, late, q, kernel));
    assert!(given_out::bytes() >= 16 << 20);
    // SAFETY: nobody else in this process uses the device.
    let _renewed = unsafe { d.renew() }.unwrap();
    assert_eq!(given_out::bytes(), 0);
}

/// On a machine that others use as well. A context takes half a gigabyte of a GPU and a quarter of a second.
#[test]
fn of_many_gpus_each_is_begun_when_it_is_needed_and_those_that_cannot_be_had_are_left_out() {
    const NAME: &str = "of_many_gpus_each_is_begun_when_it_is_needed_and_those_that_cannot_be_had_are_left_out";
    let begun = std::env::var_os("STAND_IN_CONTEXTS").map(std::path::PathBuf::from);
    let Some(begun) = begun.filter(|_| stand_in::is_here()) else {
        let file = std::env::temp_dir().join(format!("forebay-contexts-{}", std::process::id()));
        let path = file.to_str().unwrap();
        let few = [("STAND_IN_DEVICES", "10"), ("STAND_IN_CLOSED", "1"), ("STAND_IN_TAKEN", "3")];
        stand_in::again_with(NAME, &[&few[..], &[("STAND_IN_CONTEXTS", path)]].concat());
        let _ = std::fs::remove_file(file);
        return;
    };
    let begun = || -> Vec<String> {
        let text = std::fs::read_to_string(&begun).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    let (devices, missing) = discover(&[Kind::Cuda]);
    assert_eq!((devices.len(), begun().len()), (8, 0));
    let why: Vec<String> = missing.iter().map(|(_, e)| e.to_string()).collect();
    assert!(why.len() == 2 && why[0].contains("cuda:1 is closed") && why[1].contains("Retain"), "{why:?}");
    // Neither a queue that nothing is put into, nor a fence of it.
    let mut queues: Vec<_> = devices.iter().map(|d| d.queue().unwrap()).collect();
    for q in &mut queues {
        let fence = q.fence().unwrap();
        assert!(q.done(fence).unwrap());
    }
    assert!(begun().is_empty(), "{:?}", begun());
    let there = devices[5].alloc(16).unwrap();
    queues[5].fill(&there, 0, 16, 3).unwrap();
    let fence = queues[5].fence().unwrap();
    queues[5].wait(fence).unwrap();
    // The sixth of those that can be had.
    assert_eq!(begun(), ["7"]);
    drop(queues);
    assert_eq!(begun(), ["7"]);
    check(&*devices[0]);
}

/// What was asked for was too much: nothing has happened, and nobody else on the device notices.
#[test]
fn a_launch_that_is_refused_loses_nothing() {
    if !stand_in::is_here() {
        stand_in::again("a_launch_that_is_refused_loses_nothing");
    }
    let Some(d) = discover(&[Kind::Cuda]).0.into_iter().find(|d| d.compiles().is_ok()) else {
        return eprintln!("skipped: no CUDA device here");
    };
    let text = "extern \"C\" __global__ void __launch_bounds__(64) narrow(unsigned *p) { if (!threadIdx.x) *p = 7; }";
    let kernel = d.compile(&forebay_hal::Source::CudaCpp(text.into()), "narrow").unwrap();
    let (mut q, there, here) = (d.queue().unwrap(), d.alloc(4).unwrap(), d.alloc_host(4).unwrap());
    let mut launch = |threads: usize| {
        let whole = forebay_hal::Geometry::linear(threads).with_group(threads, 1, 1);
        q.launch(&kernel, &whole, &[forebay_hal::Arg::Buffer(&there)])?;
        q.copy(&there, 0, &here, 0, 4)?;
        let fence = q.fence()?;
        q.wait(fence)
    };
    let refused = launch(128);
    assert!(matches!(&refused, Err(Error::Driver(e)) if e.call == "cuLaunchKernel"), "{refused:?}");
    launch(64).unwrap();
    let seven = here.host_ptr().map(|p| {
        // SAFETY: four bytes that nobody writes any more.
        unsafe { p.cast::<u32>().read() }
    });
    assert_eq!(seven, Some(7));
}

/// Begins `call` on another thread while something runs for whose end the driver waits in it, and then what stays on all
/// streams; says whether the call came back before that ended.
fn comes_back_before_what_stays(d: &Arc<dyn Device>, call: impl FnOnce() + Send) -> bool {
    // Wherever the driver begins: it waits for one stream after the other.
    let mut queues: Vec<_> = (0..8).map(|_| d.queue().unwrap()).collect();
    let (end_first, first) = channel::<()>();
    queues[4].host_fn(Box::new(move || _ = first.recv())).unwrap();
    let (called, is_called) = channel();
    let (end_it, end) = channel::<()>();
    let end = Arc::new(Mutex::new(end));
    std::thread::scope(|s| {
        s.spawn(move || {
            call();
            called.send(()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(100));
        let stays = s.spawn(move || {
            let occupied = d.occupy();
            for q in &mut queues {
                let end = end.clone();
                q.host_fn(Box::new(move || _ = end.lock().unwrap().recv())).unwrap();
            }
            (occupied, queues)
        });
        std::thread::sleep(Duration::from_millis(100));
        drop(end_first);
        let came_back = is_called.recv_timeout(Duration::from_secs(10));
        drop(end_it);
        drop(stays.join().unwrap());
        came_back.is_ok()
    })
}

#[test]
fn what_was_begun_before_a_kernel_comes_that_stays_does_not_wait_for_it() {
    if !stand_in::is_here() {
        return stand_in::again("what_was_begun_before_a_kernel_comes_that_stays_does_not_wait_for_it");
    }
    let (devices, why) = discover(&[Kind::Cuda]);
    let d = devices.first().unwrap_or_else(|| panic!("{why:?}"));
    let buffer = d.alloc(1 << 20).unwrap();
    assert!(comes_back_before_what_stays(d, move || drop(buffer)), "what is freed");
    let text = "extern \"C\" __global__ void seven(unsigned *p) { *p = 7; }";
    let compile = || d.compile(&forebay_hal::Source::CudaCpp(text.into()), "seven").unwrap();
    // From the cache the second time, and so at once.
    drop(compile());
    assert!(comes_back_before_what_stays(d, move || drop(compile())), "code that is loaded");
    assert_eq!(d.allocated(), 0);
}

#[test]
fn cpu() {
    check_kind(Kind::Cpu);
}

#[test]
fn sim() {
    check_kind(Kind::Sim);
}

#[test]
fn opencl() {
    check_kind(Kind::OpenCl);
}

/// A driver whose memory the processor is not to share: by map and unmap, as everywhere else.
#[test]
fn opencl_whose_memory_is_not_shared() {
    const SHARED: &str = "FOREBAY_OPENCL_SHARED";
    let plain = |d: &Arc<dyn forebay_hal::Device>| d.plain_copy();
    if std::env::var_os(SHARED).is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let again = again.args(["--exact", "opencl_whose_memory_is_not_shared", "--nocapture"]).env(SHARED, "off");
        let out = again.output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}");
        for d in discover(&[Kind::OpenCl]).0.iter().filter(|d| d.info().is_cpu) {
            match &d.without()[..] {
                [] => assert_eq!(plain(d), Some(Method::Mapped), "{}", d.info().name),
                // Of the drivers for CPUs that there are Mesa's alone has no such memory.
                [why] => assert!(
                    plain(d).is_none() && why.contains("has no fine-grained") && d.info().name.contains("llvmpipe")
                ),
                more => panic!("{more:?}"),
            }
        }
        return eprint!("{text}");
    }
    check_kind(Kind::OpenCl);
    for d in discover(&[Kind::OpenCl]).0.iter().filter(|d| d.info().is_cpu) {
        let why = &d.without()[0];
        let told = why.contains("FOREBAY_OPENCL_SHARED is off") || d.info().name.contains("llvmpipe");
        assert!(plain(d).is_none() && told, "{why}");
    }
}

#[test]
fn opencl_kernels_that_take_one_group_only_get_it() {
    let text = "__kernel __attribute__((reqd_work_group_size(16, 4, 1))) void sizes(__global uint *a) {
        a[get_global_id(1) * 32 + get_global_id(0)] = get_local_size(0) * 100 + get_local_size(1);
    }";
    let (devices, missing) = discover(&[Kind::OpenCl]);
    missing.iter().for_each(|(kind, why)| eprintln!("skipped: no {kind} device here: {why}"));
    for d in devices {
        let k = d.compile(&forebay_hal::Source::OpenClC(text.into()), "sizes").unwrap();
        let (a, back) = (d.alloc(1024).unwrap(), d.alloc_host(1024).unwrap());
        let mut q = d.queue().unwrap();
        let whole = forebay_hal::Geometry::new(32, 8, 1);
        let refused = q.launch(&k, &whole.with_group(8, 8, 1), &[forebay_hal::Arg::Buffer(&a)]);
        let said = |what: &str| what.contains("[8, 8, 1] for kernel sizes, which takes [16, 4, 1] only");
        assert!(matches!(&refused, Err(Error::Invalid { what, .. }) if said(what)), "{refused:?}");
        q.launch(&k, &whole, &[forebay_hal::Arg::Buffer(&a)]).unwrap();
        q.copy(&a, 0, &back, 0, 1024).unwrap();
        let fence = q.fence().unwrap();
        q.wait(fence).unwrap();
        let p = back.host_ptr().unwrap().cast::<[u32; 256]>();
        // SAFETY: the buffer has these bytes, and the copy into it has ended.
        assert_eq!(unsafe { p.read() }, [1604; 256]);
    }
}

/// Many devices take less in a group than is usual. PoCL can be told to be such a one.
#[test]
fn opencl_with_small_groups() {
    const SMALL: &str = "POCL_MAX_WORK_GROUP_SIZE";
    if std::env::var_os(SMALL).is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let again = again.args(["--exact", "opencl_with_small_groups", "--nocapture"]).env(SMALL, "64");
        let out = again.output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}");
        return eprint!("{text}");
    }
    check_kind(Kind::OpenCl);
    for d in discover(&[Kind::OpenCl]).0 {
        let text = "KERNEL void ones(GLOBAL uint *a) { a[gid_x()] = 1; }";
        let k = d.compile(&forebay_hal::Source::Portable(text.into()), "ones").unwrap();
        let (a, mut q) = (d.alloc(4 << 20).unwrap(), d.queue().unwrap());
        let whole = forebay_hal::Geometry::linear(1 << 20);
        let refused = q.launch(&k, &whole.with_group(1 << 20, 1, 1), &[forebay_hal::Arg::Buffer(&a)]);
        let said = |what: &str| what.contains("[1048576, 1, 1] for kernel ones, which takes");
        assert!(matches!(&refused, Err(Error::Invalid { what, .. }) if said(what)), "{refused:?}");
        let uncountable = q.launch(&k, &forebay_hal::Geometry::linear(usize::MAX), &[forebay_hal::Arg::Buffer(&a)]);
        assert!(matches!(&uncountable, Err(Error::Invalid { .. })), "{uncountable:?}");
        q.launch(&k, &whole, &[forebay_hal::Arg::Buffer(&a)]).unwrap();
        let fence = q.fence().unwrap();
        q.wait(fence).unwrap();
    }
}

#[test]
fn cuda() {
    if !stand_in::is_here() {
        return check_kind(Kind::Cuda);
    }
    // SAFETY: nothing else runs in this process.
    unsafe { std::env::set_var("STAND_IN_DELAYS", "1") };
    let rm = FakeRm::default();
    cuda::use_rm(Arc::new(rm.clone()));
    check_kind(Kind::Cuda);
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0), "mappings, imported memory, wrong order");
}

/// The methods of the CUDA device, and why it lacks any.
fn methods(rm: &FakeRm) -> (Vec<Method>, Vec<String>) {
    cuda::use_rm(Arc::new(rm.clone()));
    let (devices, _) = discover(&[Kind::Cuda]);
    (devices[0].methods().to_vec(), devices[0].without())
}

#[test]
fn device_memory_is_mapped_and_given_back() {
    if !stand_in::is_here() {
        return stand_in::again("device_memory_is_mapped_and_given_back");
    }
    let rm = FakeRm::default();
    assert_eq!(methods(&rm).0, Method::ALL);
    let (devices, _) = discover(&[Kind::Cuda]);
    let d = &devices[0];
    let small: Vec<_> = (0..100).map(|i| d.alloc_mapped(1 + 999 * i).unwrap()).collect();
    let large = d.alloc_mapped(5 << 20).unwrap();
    assert!(small.iter().chain([&large]).all(|b| b.is_mapped()));
    // Small ones share a slab; what does not fit into one has its own.
    assert_eq!(rm.mappings(), 3, "two slabs of small buffers, and a large one");
    assert_eq!(d.allocated(), large.len() as u64 + small.iter().map(|b| b.len() as u64).sum::<u64>());
    let ordinary = d.alloc(64).unwrap();
    let mut word = [1u8; 8];
    // SAFETY: the range is of eight bytes, and refused.
    let refused = unsafe {
        let mut q = d.queue().unwrap();
        q.transfer(Method::Mapped, forebay_hal::Direction::ToDevice, &ordinary, 0, word.as_mut_ptr(), 8)
    };
    assert!(!ordinary.is_mapped() && matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    // No memory left for a slab is no reason to refuse others later.
    let too_large = d.alloc_mapped(3 << 30);
    assert!(matches!(too_large, Err(Error::OutOfMemory { .. })), "{:?}", too_large.map(|b| b.len()));
    assert!(d.alloc_mapped(5 << 20).unwrap().is_mapped() && d.without().is_empty());
    drop((small, large, ordinary));
    assert_eq!((d.allocated(), rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0, 0));
    drop(devices);
    assert_eq!(rm.clients(), 0);
}

/// What a device that has left the bus answers, through all mappings of its memory.
fn ones_everywhere() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|l| l.contains("memfd:vram") && l.contains(" rw")) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [from, to] = [from, to].map(|s| usize::from_str_radix(s, 16).unwrap());
        // SAFETY: mapped for writing, and nothing is on its way there.
        unsafe { std::ptr::write_bytes(from as *mut u8, 0xFF, to - from) };
    }
}

#[test]
fn a_device_that_left_the_bus_is_lost_and_ones_alone_say_nothing() {
    if !stand_in::is_here() {
        return stand_in::again("a_device_that_left_the_bus_is_lost_and_ones_alone_say_nothing");
    }
    let rm = FakeRm::default();
    assert_eq!(methods(&rm).0, Method::ALL);
    let (devices, _) = discover(&[Kind::Cuda]);
    let d = &devices[0];
    let (b, mut q) = (d.alloc_mapped(1000).unwrap(), d.queue().unwrap());
    let mut mapped = |direction, at, bytes: &mut [u8]| {
        // SAFETY: awaited by the copy itself.
        unsafe { q.transfer(Method::Mapped, direction, &b, at, bytes.as_mut_ptr(), bytes.len()) }
    };
    use forebay_hal::Direction::{ToDevice, ToHost};
    let mut some = [0xFFu8; 100];
    mapped(ToDevice, 3, &mut some).unwrap();
    let mut back = [0u8; 100];
    mapped(ToHost, 3, &mut back).unwrap();
    assert_eq!(back, some, "ones are as good as anything");
    ones_everywhere();
    let lost = mapped(ToHost, 500, &mut back);
    assert!(matches!(&lost, Err(Error::Lost { why, .. }) if why.contains("ones")), "{lost:?}");
    let after = mapped(ToDevice, 0, &mut [1]);
    assert!(matches!(after, Err(Error::Lost { .. })), "{after:?}");
    assert!(matches!(q.fence(), Err(Error::Lost { .. })));
}

#[test]
fn without_a_mapping_memory_is_ordinary_and_the_device_says_why() {
    if !stand_in::is_here() {
        return stand_in::again("without_a_mapping_memory_is_ordinary_and_the_device_says_why");
    }
    let rm = FakeRm::default();
    rm.refuse_mapping(Some(NOT_SUPPORTED));
    let (methods, why) = methods(&rm);
    assert_eq!(methods, [Method::Engine, Method::Kernel]);
    assert!(why[0].contains("map memory") && why[0].contains("NOT_SUPPORTED"), "{why:?}");
    let (devices, _) = discover(&[Kind::Cuda]);
    check(&*devices[0]);
    assert!(!devices[0].alloc_mapped(100).unwrap().is_mapped());
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
}

#[test]
fn where_there_is_no_room_to_map_now_there_is_later() {
    if !stand_in::is_here() {
        return stand_in::again("where_there_is_no_room_to_map_now_there_is_later");
    }
    let rm = FakeRm::default();
    cuda::use_rm(Arc::new(rm.clone()));
    let (devices, why) = discover(&[Kind::Cuda]);
    let d = devices.first().unwrap_or_else(|| panic!("{why:?}"));
    rm.refuse_mapping(Some(forebay_rm::error::INSUFFICIENT_RESOURCES));
    assert!(!d.alloc_mapped(100).unwrap().is_mapped());
    rm.refuse_mapping(None);
    // It is not tried at once, and nothing says that it never will be.
    assert!(!d.alloc_mapped(100).unwrap().is_mapped());
    assert_eq!(d.without(), Vec::<String>::new());
    std::thread::sleep(Duration::from_millis(1100));
    assert!(d.alloc_mapped(100).unwrap().is_mapped());
    assert_eq!((d.allocated(), rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0, 0));
}

#[test]
fn a_newer_driver_maps_through_a_dma_buf() {
    if !stand_in::is_here() {
        return stand_in::again("a_newer_driver_maps_through_a_dma_buf");
    }
    // SAFETY: nothing else runs in this process.
    unsafe { std::env::set_var("STAND_IN_DMA_BUF", "1") };
    let (methods, _) = methods(&FakeRm::new("610.12"));
    assert_eq!(methods, Method::ALL);
    let (devices, _) = discover(&[Kind::Cuda]);
    check(&*devices[0]);
    assert!(devices[0].without().is_empty());
}

/// The CUDA backend against a stand-in for the driver that runs kernels on the host: what can be tested without a GPU.
#[test]
fn cuda_with_the_stand_in() {
    stand_in::again("cuda");
}

/// With every copy beside the kernels, and with none; with lists beside each other.
#[test]
fn cuda_with_the_stand_in_whatever_goes_beside() {
    for beside in [("FOREBAY_COPIES_BESIDE", "1"), ("FOREBAY_COPIES_BESIDE", "off"), ("FOREBAY_LISTS_BESIDE", "on")] {
        stand_in::again_with("cuda", &[beside]);
    }
}

/// The same with what a GPU would run: NVIDIA's own compiler makes it, and the stand-in runs it warp by warp.
#[test]
fn cuda_with_nvidias_compiler() {
    stand_in::again_as_ptx(&["cuda"], &[]);
}

/// As another library in the process may.
#[test]
fn a_thread_whose_context_is_another_one_is_no_trap() {
    if !stand_in::is_here() {
        return stand_in::again("a_thread_whose_context_is_another_one_is_no_trap");
    }
    let (devices, _) = discover(&[Kind::Cuda]);
    devices[0].alloc(16).unwrap();
    // SAFETY: the stand-in, which is loaded already; the function has this signature.
    let code = unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        let set: libloading::Symbol<'_, unsafe extern "C" fn(*mut u8) -> i32> = driver.get(b"cuCtxSetCurrent").unwrap();
        set(std::ptr::null_mut())
    };
    assert_eq!(code, 0);
    devices[0].alloc(16).unwrap();
}

/// What a kernel of the CPU asks wrongly of its arguments is its launch's error, in a small space and in one that many work
/// on; nobody else's, and no end of the process.
#[test]
fn a_cpu_kernel_that_mistakes_its_arguments_is_an_error_and_the_device_goes_on() {
    use forebay_hal::{Arg, ArgSpan, Geometry, Source};
    type Mistake = fn(&ArgSpan<'_>);
    let mistakes: [(Mistake, &str); 5] = [
        (|s| assert!(std::hint::black_box(s.slice::<u32>(1).len()) == 0), "argument 1 is not a buffer"),
        (|s| assert!(std::hint::black_box(s.slice::<u32>(9).len()) == 0), "argument 9 is not a buffer"),
        (|s| assert!(std::hint::black_box(s.scalar(0)) == 0), "argument 0 is not an integer"),
        (|s| assert!(std::hint::black_box(s.scalar(2)) == 0), "argument 2 is not an integer"),
        (|s| assert!(std::hint::black_box(s.float(1)) == 0.0), "argument 1 is not a float"),
    ];
    for d in [Kind::Cpu, Kind::Sim].map(|kind| discover(&[kind]).0.remove(0)) {
        let (mut q, memory) = (d.queue().unwrap(), d.alloc(64).unwrap());
        let args = [Arg::Buffer(&memory), Arg::U32(1), Arg::F32(1.0)];
        for items in [4, 100_000] {
            for (mistake, told) in mistakes {
                let kernel = d.compile(&Source::Cpu(Arc::new(mistake)), "mistaken").unwrap();
                let launched = q.launch(&kernel, &Geometry::linear(items), &args);
                let waited = launched.and_then(|()| q.fence()).and_then(|f| q.wait(f));
                assert!(matches!(&waited, Err(Error::Panic { why, .. }) if why.contains(told)), "{told}: {waited:?}");
            }
        }
        check(&*d);
    }
}
