//! Processes that are forked from one that uses Forebay: what they have of it says so, instead of waiting for threads that are not
//! there; what they make themselves works; and the first one notices nothing.

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay::hal::cpu::{Helpers, Pool};
use forebay::hal::fork::Own;
use forebay::hal::{Device, Error as DeviceError, discover};
use forebay::place::{Accelerated, Models};
use forebay::resident::{self, Builder, Call};
use forebay::transfer::{Budget, Curves, Engine};
use forebay::{Datablock, Error, Graph, Kind, Runtime, RuntimeBuilder, Task, Template};
use forebay_rm::fake::FakeRm;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// One test at a time: a process is forked as it is.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs something in a process that is forked now, and sees it end well.
fn in_a_child(f: impl FnOnce()) {
    // SAFETY: the child runs what is tested here, prints by plain calls and ends without anybody's destructors.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        std::panic::set_hook(Box::new(|info| {
            let said = format!("in the child: {info}\n");
            // SAFETY: so many bytes are there.
            unsafe { libc::write(2, said.as_ptr().cast(), said.len()) };
        }));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        // SAFETY: a plain call.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let (begun, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: our child; the status is valid for the call.
        match unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } {
            0 if begun.elapsed() < Duration::from_secs(30) => std::thread::sleep(Duration::from_millis(5)),
            0 => {
                // SAFETY: our child.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                panic!("the child stands still");
            }
            ended => break assert_eq!((ended, status), (pid, 0)),
        }
    }
}

/// Lets go of what the first process has, as that process does not.
fn let_go_of<T>(of: &T) {
    // SAFETY: only in a child, which uses it no more and ends without letting go of it again.
    drop(unsafe { std::ptr::read(of) });
}

fn builder() -> RuntimeBuilder {
    Runtime::builder().cpu_only().models(Arc::new(Models::off()))
}

fn word() -> Template {
    Template::scalar::<u64>()
}

/// Twice its input, after so long.
fn twice(time: Duration) -> Task {
    Task::new("twice").input("x", word()).output("y", word()).host(move |inv| {
        std::thread::sleep(time);
        inv.output::<u64>("y")?[0] = 2 * inv.value::<u64>("x")?;
        Ok(())
    })
}

fn call(a: &Accelerated, x: u64) -> Result<u64, Error> {
    Ok(a.call(&[Datablock::scalar(x)?])?[0].as_slice::<u64>()?[0])
}

fn is_forked<T: std::fmt::Debug>(r: Result<T, Error>) {
    match r {
        Err(e @ Error::Forked { .. }) => assert!(e.to_string().contains("forked from"), "{e}"),
        other => panic!("{other:?}"),
    }
}

/// What a process has one of is locked by another thread, which a process that is forked then has not.
#[test]
fn what_a_process_has_one_of_is_a_forked_ones_own() {
    static LISTED: Own<Vec<u32>> = Own::new();
    let _alone = alone();
    LISTED.lock().push(1);
    let (holds, held) = std::sync::mpsc::channel();
    let (tell, told) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|s| {
        s.spawn(move || {
            let mut listed = LISTED.lock();
            listed.push(2);
            holds.send(()).unwrap();
            // If the child stands still, too, this ends.
            let _ = told.recv_timeout(Duration::from_secs(60));
        });
        held.recv().unwrap();
        in_a_child(|| {
            let mut listed = LISTED.lock();
            assert!(listed.is_empty());
            listed.push(3);
            drop(listed);
            assert_eq!(*LISTED.lock(), [3]);
        });
        tell.send(()).unwrap();
    });
    assert_eq!(*LISTED.lock(), [1, 2]);
}

/// A service that hears everybody and says nothing keeps whoever asks waiting for seconds.
#[test]
fn a_process_is_forked_while_a_service_is_asked() {
    const SOCKET: &str = "FOREBAY_SOCKET";
    const SILENT: &str = "FOREBAY_TEST_SILENT";
    let _alone = alone();
    if std::env::var_os(SILENT).is_none() {
        let folder = std::env::temp_dir().join(format!("forebay-silent-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        let service = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&service, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&service, 16).unwrap();
        let name = "a_process_is_forked_while_a_service_is_asked";
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let done = again.args(["--exact", name, "--nocapture"]).env(SOCKET, &path).env(SILENT, "1").output().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let said = [done.stdout, done.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(done.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let asks = std::thread::spawn(|| builder().build().map(drop));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!asks.is_finished(), "nobody waits for the service");
    in_a_child(|| drop(builder().build().unwrap()));
    asks.join().unwrap().unwrap();
}

/// Others are about to take or to give back such a block at the moment of the fork.
#[test]
fn blocks_that_tasks_share_are_let_go_of() {
    let _alone = alone();
    let t = Template::array::<u8>([4096]);
    let mut g = Graph::new("shared");
    let id = g.add(Task::new("none").input("x", t).host(|_| Ok(()))).unwrap();
    let feed = g.feed((id, "x"), 4).unwrap();
    let run = builder().workers(2).build().unwrap().start(g).unwrap();
    let mut one = run.acquire(feed).unwrap();
    one.assign(&[7u8; 4096]).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drop(run.acquire(feed).unwrap());
                }
            });
        }
        let forked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..100).for_each(|_| {
                in_a_child(|| {
                    assert_eq!(one.as_bytes().unwrap(), [7; 4096]);
                    let_go_of(&one);
                })
            });
        }));
        over.store(true, Ordering::Relaxed);
        forked.unwrap_or_else(|why| std::panic::resume_unwind(why));
    });
}

#[test]
fn graphs_and_calls_say_so_and_new_ones_work() {
    let _alone = alone();
    for own_workers in [false, true] {
        let builder = || if own_workers { builder().workers(2) } else { builder() };
        let rt = builder().build().unwrap();
        let mut g = Graph::new("parents");
        let t = g.add(twice(Duration::ZERO)).unwrap();
        let (feed, drain) = (g.feed((t, "x"), 4).unwrap(), g.drain((t, "y"), 4).unwrap());
        let run = rt.start(g).unwrap();
        run.push(feed, Datablock::scalar(4u64).unwrap()).unwrap();
        let there = run.pull(drain).unwrap();
        let slow = rt.accelerate(2, || twice(Duration::from_millis(300))).unwrap();
        assert_eq!(call(&slow, 3).unwrap(), 6);
        // Two are under way when the process is forked.
        let mut under_way = slow.spawn(&[Datablock::scalar(10u64).unwrap()]).unwrap();
        let forgotten = slow.spawn(&[Datablock::scalar(11u64).unwrap()]).unwrap();
        in_a_child(|| {
            is_forked(run.push(feed, Datablock::scalar(1u64).unwrap()));
            is_forked(run.try_push(feed, Datablock::scalar(1u64).unwrap()).map_err(|(_, e)| e));
            is_forked(run.pull(drain));
            is_forked(run.pull_timeout(drain, Duration::from_secs(60)));
            is_forked(run.try_pull(drain));
            is_forked(run.stop());
            is_forked(run.run());
            is_forked(run.reset());
            is_forked(call(&slow, 1));
            is_forked(under_way.wait_while(|| Some(Duration::MAX)));
            is_forked(rt.accelerate(1, || twice(Duration::ZERO)).map(drop));
            // What is in memory is there.
            assert_eq!(there.as_slice::<u64>().unwrap(), [8]);
            // One's own works, whatever the first process's did.
            let own = builder().build().unwrap();
            let a = own.accelerate(2, || twice(Duration::ZERO)).unwrap();
            assert_eq!((0..100).map(|i| call(&a, i).unwrap()).sum::<u64>(), 9900);
            // And again in one that is forked from there.
            in_a_child(|| {
                is_forked(call(&a, 1));
                let a = builder().build().unwrap().accelerate(1, || twice(Duration::ZERO)).unwrap();
                assert_eq!(call(&a, 21).unwrap(), 42);
            });
            assert_eq!(call(&a, 21).unwrap(), 42);
            let_go_of(&forgotten);
            let_go_of(&under_way);
            let_go_of(&run);
            let_go_of(&slow);
            let_go_of(&there);
            let_go_of(&rt);
        });
        drop(forgotten);
        assert_eq!(under_way.wait_while(|| Some(Duration::MAX)).unwrap()[0].as_slice::<u64>().unwrap(), [20]);
        run.push(feed, Datablock::scalar(5u64).unwrap()).unwrap();
        assert_eq!(run.pull(drain).unwrap().as_slice::<u64>().unwrap(), [10]);
        assert_eq!(call(&slow, 4).unwrap(), 8);
    }
}

/// A device that was used cannot be, and nobody waits for its driver.
///
/// `kept` is what the first process's driver has for it, as far as a child can tell.
fn a_used_device<K: PartialEq + std::fmt::Debug>(kind: Kind, kept: impl Fn() -> K) {
    let Some(d) = discover(&[kind]).0.into_iter().next() else {
        return eprintln!("skipped: no {kind} device here");
    };
    let engine = Engine::with_curves(d.clone(), Curves::default());
    let (memory, mut stream) = (engine.memory(1 << 20).unwrap(), engine.stream().unwrap());
    let data: Vec<u8> = (0..1 << 20).map(|i| (i * 7) as u8).collect();
    stream.write(&memory, 0, &data).unwrap();
    let mut queue = d.queue().unwrap();
    let pinned = engine.pinned(4096).unwrap();
    // Something is under way, and waits for us.
    let (go_on, gate) = std::sync::mpsc::channel::<()>();
    queue.host_fn(Box::new(move || _ = gate.recv())).unwrap();
    queue.fill(&memory, 0, 1 << 20, 3).unwrap();
    let fence = queue.fence().unwrap();
    let completion = queue.completion(fence).unwrap();
    in_a_child(|| {
        let refused = |r: Result<(), DeviceError>| match r {
            Err(e @ DeviceError::Lost { .. }) => assert!(e.to_string().contains("forked from"), "{e}"),
            other => panic!("{other:?}"),
        };
        refused(queue.fill(&memory, 0, 64, 1).and_then(|()| queue.fence().map(drop)));
        refused(completion.as_ref().unwrap().wait());
        let (found, why) = discover(&[kind]);
        assert!(found.is_empty());
        assert!(why[0].1.to_string().contains("forked from has used them"), "{}", why[0].1);
        // What is made without it works.
        let own = Runtime::builder().models(Arc::new(Models::off())).build().unwrap();
        assert_eq!(call(&own.accelerate(1, || twice(Duration::ZERO)).unwrap(), 8).unwrap(), 16);
        let before = kept();
        let_go_of(&completion);
        let_go_of(&queue);
        let_go_of(&stream);
        let_go_of(&pinned);
        let_go_of(&memory);
        let_go_of(&engine);
        let_go_of(&d);
        assert_eq!(kept(), before);
    });
    go_on.send(()).unwrap();
    queue.wait(fence).unwrap();
    let mut back = vec![0; 1 << 20];
    stream.read(&memory, 0, &mut back).unwrap();
    assert!(back.iter().all(|b| *b == 3));
    stream.write(&memory, 0, &data).unwrap();
    stream.read(&memory, 0, &mut back).unwrap();
    assert!(back == data);
}

#[test]
fn opencl() {
    let _alone = alone();
    a_used_device(Kind::OpenCl, || ());
}

#[test]
fn cuda() {
    let _alone = alone();
    if !stand_in::is_here() {
        return stand_in::again("cuda");
    }
    let rm = FakeRm::default();
    forebay::hal::cuda::use_rm(Arc::new(rm.clone()));
    a_used_device(Kind::Cuda, || (rm.mappings(), rm.memories()));
    assert_eq!((rm.mappings(), rm.memories(), rm.wrong_order()), (0, 0, 0));
}

#[test]
fn a_resident_grid_is_lost_to_a_child() {
    let _alone = alone();
    let text = "TASK(square) { const u64 x = *(const u64 *)t->args; *(u64 *)fb_result(c) = x * x; }
                TASK(waits) { while (!fb_load_sys(*(const u32 *const *)t->args)) {} }";
    let mut g = match Builder::new(text).functions(["square", "waits"]).blocks(2).start_on_cpu() {
        Err(e @ resident::Error::NoCompiler(_)) => return eprintln!("skipped: {e}"),
        other => other.unwrap(),
    };
    let square = |g: &resident::Grid, x: u64| g.submit(Call::new(0).args(&x.to_ne_bytes()));
    let gate = AtomicU32::new(0);
    let at = std::ptr::from_ref(&gate) as u64;
    let ticket = g.submit(Call::new(1).args(&at.to_ne_bytes())).unwrap();
    in_a_child(|| {
        let lost = |e: resident::Error| assert!(e.to_string().contains("forked from"), "{e}");
        lost(square(&g, 3).map(drop).unwrap_err());
        // SAFETY: a copy of the ticket, which is the child's to use once.
        let ticket = unsafe { std::ptr::read(&ticket) };
        lost(g.wait(ticket).map(drop).unwrap_err());
        let_go_of(&g);
    });
    in_a_child(|| {
        // SAFETY: as above, of the grid.
        let mut g = unsafe { std::ptr::read(&g) };
        assert!(g.drain().unwrap_err().to_string().contains("forked from"));
        // One's own.
        let own = Builder::new(text).functions(["square", "waits"]).blocks(1).start_on_cpu().unwrap();
        assert_eq!(own.wait(square(&own, 9).unwrap()).unwrap().result_as::<u64>(), 81);
    });
    gate.store(1, Ordering::Release);
    g.wait(ticket).unwrap();
    assert_eq!(g.wait(square(&g, 5).unwrap()).unwrap().result_as::<u64>(), 25);
    g.drain().unwrap();
}

#[test]
fn a_real_time_stream_that_a_child_lets_go_of_is_still_the_threads() {
    let _alone = alone();
    let d: Arc<dyn Device> = discover(&[Kind::Cpu]).0.remove(0);
    let engine = Engine::with_curves(d, Curves::default());
    let policy = || {
        // SAFETY: a plain call about the calling thread.
        unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK }
    };
    let before = policy();
    let stream = engine.real_time(Budget::default()).unwrap();
    let with = policy();
    in_a_child(|| {
        assert_eq!(policy(), before);
        let_go_of(&stream);
        // Its own is its own.
        let own = engine.real_time(Budget::default()).unwrap();
        assert_eq!(policy(), with);
        drop(own);
        assert_eq!(policy(), before);
    });
    assert_eq!(policy(), with);
    drop(stream);
    assert_eq!(policy(), before);
}

#[test]
fn who_forks_while_others_work_has_children_that_work() {
    let _alone = alone();
    let rt = builder().build().unwrap();
    let a = rt.accelerate(2, || twice(Duration::ZERO)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let busy = s.spawn(|| {
            let mut n = 0u64;
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(call(&a, n).unwrap(), 2 * n);
                n += 1;
            }
            n
        });
        for _ in 0..20 {
            in_a_child(|| {
                is_forked(call(&a, 1));
                let own = builder().build().unwrap().accelerate(1, || twice(Duration::ZERO)).unwrap();
                assert_eq!(call(&own, 4).unwrap(), 8);
            });
        }
        stop.store(true, Ordering::Relaxed);
        assert!(busy.join().unwrap() > 0);
    });
}

#[test]
fn a_pool_that_a_child_lets_go_of_is_not_waited_for() {
    let _alone = alone();
    let pool = Pool::new(2);
    let helpers = Helpers::new(&pool, "helper", 1);
    in_a_child(|| {
        assert!(!pool.is_alive() && !Arc::ptr_eq(Pool::global(), &pool) && Pool::global().is_alive());
        let_go_of(&helpers);
        let_go_of(&pool);
        // A loop is its caller's, who has others to help only in a pool of this process.
        let n = AtomicU32::new(0);
        Pool::new(2).parallel_for(1000, 10, &|a, b| _ = n.fetch_add((b - a) as u32, Ordering::Relaxed));
        assert_eq!(n.into_inner(), 1000);
    });
    assert!(pool.is_alive());
}
