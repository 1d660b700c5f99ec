//! [`Host`] as it is, in programs that run on the model: this test binary's ignored tests, started again.

use std::collections::HashSet;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_kernel_model::{Kernel, objects_of_cuda};
use forebay_rm::error::NOT_SUPPORTED;
use forebay_rm::fake::{FakeRm, Load};
use forebay_rm::sys::{Control, Free};
use forebay_rm::{Aperture, Client, Error, Finder, Host, Rm, SwitchLog, Target};

fn kernel(rm: FakeRm) -> Option<Kernel> {
    let kernel = Kernel::new(rm);
    if let Err(why) = &kernel {
        eprintln!("skipped: no model of the kernel's driver: {why}");
    }
    kernel.ok()
}

/// Runs a role in the model.
fn run(kernel: &Kernel, role: &str, settings: &[(&str, String)]) {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args([role, "--exact", "--nocapture", "--ignored", "--test-threads=1"]).env("ROLE", "1");
    c.envs(settings.iter().map(|(k, v)| (*k, v)));
    kernel.put_in(&mut c).unwrap();
    let out = c.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that uses the first GPU.
fn program(kernel: &Kernel, groups: u32, channels: u32) -> Program {
    let mut c = Command::new("/bin/sleep");
    c.arg("600");
    kernel.put_in(&mut c).unwrap();
    objects_of_cuda(&mut c, groups, channels);
    let p = Program(c.spawn().unwrap());
    kernel.rm().set_load(p.0.id(), Load::saturating(1000));
    p
}

fn until(what: &str, mut f: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !f() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn client() -> Arc<Client> {
    Arc::new(Client::open(Arc::new(Host), 0).unwrap())
}

/// Whether this is a role's process, on the model.
fn in_role() -> bool {
    std::env::var_os("ROLE").is_some()
}

const SIZE: usize = 2 << 20;

#[test]
fn device_memory_is_mapped_by_the_gpus_own_file() {
    let Some(k) = kernel(FakeRm::default()) else { return };
    run(&k, "maps_device_memory", &[]);
    until("all is given back", || k.rm().clients() == 0);
    assert_eq!((k.rm().mappings(), k.rm().memories()), (0, 0));
    k.rm().refuse_mapping(Some(NOT_SUPPORTED));
    run(&k, "is_refused_device_memory", &[]);
}

fn allocation() -> std::os::fd::OwnedFd {
    let memory = rustix::fs::memfd_create("vram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, SIZE as u64).unwrap();
    memory
}

#[test]
#[ignore = "a role"]
fn maps_device_memory() {
    if !in_role() {
        return;
    }
    let (client, memory) = (client(), allocation());
    for _ in 0..3 {
        let a = Aperture::map(&client, memory.as_fd(), SIZE).unwrap();
        let b = Aperture::map(&client, memory.as_fd(), 4096).unwrap();
        let p = a.ptr().unwrap().as_ptr();
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { std::ptr::copy_nonoverlapping(b"hello".as_ptr(), p.add(64), 5) };
        a.flush();
        let mut back = [0; 5];
        rustix::io::pread(&memory, &mut back, 64).unwrap();
        // SAFETY: as above.
        let other = unsafe { std::slice::from_raw_parts(b.ptr().unwrap().as_ptr().add(64), 5) };
        assert_eq!((&back, other), (b"hello", &b"hello"[..]));
    }
    assert!(matches!(Aperture::map(&client, memory.as_fd(), SIZE + 1), Err(Error::Status { .. })));
    // Nothing of it stays open: what is mapped needs no file.
    let open = |n: &str| {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| std::fs::read_link(e.ok()?.path()).ok());
        all.filter(|to| to.to_string_lossy().contains(n)).count()
    };
    assert_eq!((open("nvidiactl"), open("nvidia0"), open("fake-memory")), (1, 1, 0));
}

#[test]
#[ignore = "a role"]
fn is_refused_device_memory() {
    if !in_role() {
        return;
    }
    let refused = Aperture::map(&client(), allocation().as_fd(), SIZE).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Status { call: "map memory", status: NOT_SUPPORTED }), "{refused}");
}

#[test]
fn another_process_is_found_sliced_and_suspended_through_its_own_file() {
    let Some(k) = kernel(FakeRm::with_gpus(2)) else { return };
    let p = program(&k, 2, 5);
    let pid = p.0.id();
    run(&k, "steers_another", &[("OTHER", pid.to_string())]);
    assert!(!k.rm().is_suspended(pid) && !k.rm().is_sliced(pid));
    assert_eq!(k.rm().clients(), 1);
    drop(p);
    until("what it had has gone with it", || k.rm().clients() == 0 && k.rm().gpu_time(pid).is_none());
}

#[test]
#[ignore = "a role"]
fn steers_another() {
    if !in_role() {
        return;
    }
    let pid: u32 = std::env::var("OTHER").unwrap().parse().unwrap();
    let found = Host.processes(&mut Finder::new(forebay_rm::CONTROL_PATH)).unwrap();
    assert!(found.contains(&pid), "{found:?}");
    let own = client();
    let t = Target::find(&own, pid, &HashSet::new()).unwrap();
    // What it has on the other GPU is not this client's.
    assert_eq!((t.groups().len(), t.channels().len()), (2, 10));
    let suspension = t.suspend(&own).unwrap();
    let slices = t.slice(&own, 500).unwrap();
    let again = Target::find(&own, pid, &HashSet::new()).unwrap();
    assert!(again.groups().iter().all(|g| g.slice_us == 500));
    drop((suspension, slices));
    let again = Target::find(&own, pid, &HashSet::new()).unwrap();
    assert!(again.groups().iter().all(|g| g.slice_us == forebay_rm::DEFAULT_SLICE_US));
    // Its client is asked about on its file only, and nothing of that file stays here.
    let theirs = t.channels()[0].client;
    let mut call = Free { root: theirs, parent: 0, old: theirs, status: 0 };
    Host.open(0).unwrap().free(&mut call).unwrap();
    assert_eq!(call.status, forebay_rm::error::INVALID_CLIENT);
    assert!(Host.files_of(pid).unwrap().len() == 1 && Host.files_of(std::process::id()).unwrap().len() == 1);
    // A command that the driver does not know, and one whose size is wrong.
    let file = Host.open(0).unwrap();
    let mut bad = Control { client: own.handle(), object: own.handle(), cmd: 0x1234, ..Control::default() };
    file.control(&mut bad, &mut [0; 4]).unwrap();
    assert_ne!(bad.status, 0);
    assert!(matches!(Target::find(&own, 1, &HashSet::new()), Err(Error::NoChannels { .. })));
}

#[test]
fn the_log_is_read_where_the_driver_writes_it() {
    let Some(k) = kernel(FakeRm::default()) else { return };
    let programs = [program(&k, 1, 2), program(&k, 2, 2)];
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["reads_the_log", "--exact", "--nocapture", "--ignored"]).env("ROLE", "1");
    c.stdout(Stdio::piped());
    k.put_in(&mut c).unwrap();
    let mut reader = c.spawn().unwrap();
    let mut ran = 0;
    while reader.try_wait().unwrap().is_none() {
        k.rm().run(20_000);
        ran += 20;
        std::thread::sleep(Duration::from_millis(2));
        assert!(ran < 100_000, "it does not end");
    }
    let mut said = String::new();
    reader.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("1 passed"), "{said}");
    for p in &programs {
        assert!(said.contains(&format!("pid {}", p.0.id())), "{said}");
    }
    until("it is switched off", || k.rm().logs() == 0 && k.rm().mappings() == 0);
    assert_eq!(k.rm().wrong_order(), 0);
}

#[test]
#[ignore = "a role"]
fn reads_the_log() {
    if !in_role() {
        return;
    }
    let mut log = SwitchLog::open(&client()).unwrap();
    let mut records = Vec::new();
    while records.len() < 200 {
        log.flush().unwrap();
        assert_eq!(log.read(&mut records).unwrap(), 0);
    }
    let now = log.now_ns().unwrap();
    // The first ones may be older than the log.
    assert!(records.iter().all(|r| r.at_ns <= now) && records.is_sorted_by_key(|r| r.at_ns), "{now}");
    let mut pids: Vec<u32> = records.iter().map(|r| r.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    pids.iter().for_each(|p| println!("pid {p}"));
}

#[test]
fn a_program_that_is_no_client_is_left_alone() {
    let Some(k) = kernel(FakeRm::default()) else { return };
    // A terminal's calls, other files, and a call of the driver's number on something else.
    let script = "import fcntl,os,struct\n\
        f=os.open('/dev/null',os.O_RDWR)\n\
        try: fcntl.ioctl(f,0xC020462A,bytes(32)); print('answered')\n\
        except OSError as e: print('errno',e.errno)\n\
        n=os.open('/dev/nvidiactl',os.O_RDWR)\n\
        for request,size in ((0xC010462A,16),(0xC02046FF,32),(0xC0204629,32)):\n\
        \x20   try: fcntl.ioctl(n,request,bytes(size)); print('answered')\n\
        \x20   except OSError as e: print('errno',e.errno)\n";
    let mut c = Command::new("python3");
    c.args(["-c", script]);
    k.put_in(&mut c).unwrap();
    let Ok(out) = c.output() else {
        eprintln!("skipped: no python3");
        return;
    };
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(said.split_whitespace().collect::<Vec<_>>().join(" "), "errno 25 errno 22 errno 22 errno 22", "{said}");
}
