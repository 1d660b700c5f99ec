//! The resident grid: tasks that make tasks, wait for each other and work on ranges; and everything that can be wrong with
//! them. On the CPU, on a stand-in for CUDA, whose host side is that of a real one, and on a real one if there is one.

mod counted;
mod cuda_only;
#[path = "../../../forebay-hal/tests/stand_in/bytes.rs"]
mod given_out;
mod on_a_gpu;
mod random;
mod scarce;
#[path = "../../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;
mod together;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay::hal::{Device, Kind, cuda, discover};
use forebay::resident::{ARGS, Builder, Call, Error, FIRST_OWN, Grid, TOGETHER};
use forebay_rm::fake::FakeRm;

/// What the tests submit. Data is passed by address.
const TASKS: &str = include_str!("tasks.cu");

const FUNCTIONS: [&str; 22] = [
    "pend",
    "unpend",
    "again",
    "lift",
    "gather",
    "gathered",
    "add",
    "sum",
    "tree",
    "diamond",
    "diamond_side",
    "diamond_end",
    "endless",
    "deaf",
    "fails",
    "unknown",
    "order",
    "heap",
    "keep",
    "thread_adds",
    "warp_adds",
    "is_whole",
];

fn builder() -> Builder {
    Builder::new(TASKS).functions(FUNCTIONS)
}

/// Set where device memory is not to be mapped into the processor.
const PINNED: &str = "RESIDENT_TEST_PINNED";

/// The CUDA device, in a process that has the stand-in, or that is for the real one.
fn device() -> Option<Arc<dyn Device>> {
    let is_real = on_a_gpu::is_here();
    if !stand_in::is_here() && !is_real {
        return None;
    }
    let refuses = std::env::var_os(PINNED).is_some();
    if refuses || !is_real {
        let rm = FakeRm::default();
        if refuses {
            rm.refuse_mapping(Some(forebay_rm::error::NOT_SUPPORTED));
        }
        cuda::use_rm(Arc::new(rm));
    }
    discover(&[Kind::Cuda]).0.into_iter().next()
}

fn start(b: Builder) -> Option<Grid> {
    words(0);
    if let Some(d) = device() {
        return Some(b.start_on(&d).unwrap());
    }
    match b.start_on_cpu() {
        Err(e @ Error::NoCompiler(_)) => {
            eprintln!("skipped: {e}");
            None
        }
        other => Some(other.unwrap()),
    }
}

fn call(g: &Grid, name: &str, args: &[u64]) -> Call {
    Call::new(g.function(name).unwrap()).args(bytemuck::cast_slice(args))
}

/// Words that a test and its tasks share, all 0 and nobody else's for the rest of the process: on a device page-locked memory
/// of the host, which has one address for both. They are there before the first grid is.
fn words(n: usize) -> &'static [AtomicU64] {
    const ALL: usize = 1 << 14;
    static WORDS: OnceLock<&[AtomicU64]> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let all = WORDS.get_or_init(|| {
        let Some(d) = device() else { return Box::leak((0..ALL).map(|_| AtomicU64::new(0)).collect()) };
        let (here, there) = d.alloc_shared(8 * ALL).unwrap();
        let p = here.host_ptr().unwrap().cast::<AtomicU64>();
        std::mem::forget((here, there));
        // SAFETY: so many words, which are zeroed, and whose memory is never given back.
        unsafe { std::slice::from_raw_parts(p.as_ptr(), ALL) }
    });
    let first = NEXT.fetch_add(n, Ordering::Relaxed);
    &all[first..first + n]
}

fn word() -> &'static AtomicU64 {
    &words(1)[0]
}

fn address(of: &AtomicU64) -> u64 {
    std::ptr::from_ref(of) as u64
}

#[test]
fn every_task_is_done_once_and_answers_its_own_ticket() {
    // More tasks than slots, from several threads; tickets are awaited in any order or not at all.
    let Some(g) = start(builder().ring(16).blocks(3)) else { return };
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let g = &g;
            s.spawn(move || {
                let mut tickets = Vec::new();
                for i in 0..300u64 {
                    let c = call(g, "add", &[t << 32, i]);
                    let ticket = g.submit(if i % 7 == 0 { c.urgent() } else { c }).unwrap();
                    match i % 5 {
                        0 => drop(ticket),
                        1 => assert_eq!(g.wait(ticket).unwrap().result_as::<u64>(), (t << 32) + i),
                        _ => tickets.push((i, ticket)),
                    }
                }
                tickets.reverse();
                for (i, ticket) in tickets {
                    assert_eq!(g.wait(ticket).unwrap().result_as::<u64>(), (t << 32) + i);
                }
            });
        }
    });
}

#[test]
fn ranges_trees_and_diamonds_are_whole() {
    for (blocks, queue, nodes) in [(1, 2, 2), (2, 64, 64), (4, 1 << 16, 256), (7, 4, 2)] {
        let Some(g) = start(builder().blocks(blocks).queue(queue).nodes(nodes).ring(64).grain(100)) else { return };
        let (sum, leaves, at_once, sides) = (word(), word(), word(), AtomicU64::new(0));
        let n = 1_000_003u64;
        let range = g.submit(call(&g, "sum", &[address(sum)]).range(5, n)).unwrap();
        let tree = g.submit(call(&g, "tree", &[14, address(leaves), address(at_once)])).unwrap();
        let diamonds: Vec<_> = (0..20)
            .map(|_| {
                let count = word();
                let t = g.submit(call(&g, "diamond", &[40, address(count)])).unwrap();
                (count, t)
            })
            .collect();
        g.wait(range).unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), (5..5 + n).sum::<u64>(), "{blocks} blocks");
        g.wait(tree).unwrap();
        assert_eq!(leaves.load(Ordering::Relaxed), 1 << 14, "{blocks} blocks");
        for (count, t) in diamonds {
            match g.wait(t) {
                Ok(done) => {
                    assert_eq!((done.result_as::<u64>(), count.load(Ordering::Relaxed)), (1, 40));
                    sides.fetch_add(1, Ordering::Relaxed);
                }
                // No room for its node, or for what it is to become.
                Err(Error::Failed { status: FIRST_OWN, .. }) => assert!(queue < 1 << 16, "{nodes} nodes"),
                Err(e) => panic!("{e}"),
            }
        }
        assert!(sides.load(Ordering::Relaxed) == 20 || queue < 1 << 16);
        // An empty range is done at once.
        g.wait(g.submit(call(&g, "sum", &[address(sum)]).range(0, 0)).unwrap()).unwrap();
    }
}

#[test]
fn what_is_urgent_comes_first() {
    let Some(g) = start(builder().blocks(1)) else { return };
    let gate = word();
    let list = words(12);
    let waiting = g.submit(call(&g, "deaf", &[address(gate)])).unwrap();
    let ordinary: Vec<_> = (0..5u64).map(|i| g.submit(call(&g, "order", &[address(&list[0]), i])).unwrap()).collect();
    let urgent: Vec<_> =
        (10..15u64).map(|i| g.submit(call(&g, "order", &[address(&list[0]), i]).urgent()).unwrap()).collect();
    gate.store(1, Ordering::Release);
    g.wait(waiting).unwrap();
    for t in urgent.into_iter().chain(ordinary) {
        g.wait(t).unwrap();
    }
    let list: Vec<u64> = list.iter().map(|w| w.load(Ordering::Acquire)).collect();
    assert_eq!(list[1..11], [10, 11, 12, 13, 14, 0, 1, 2, 3, 4]);
}

/// Also when the block never runs out of its own.
#[test]
fn what_is_urgent_comes_between_tasks_that_make_tasks() {
    let Some(g) = start(builder().blocks(1)) else { return };
    let gate = word();
    let again = g.submit(call(&g, "again", &[address(gate)])).unwrap();
    // It is at it by then.
    std::thread::sleep(Duration::from_millis(100));
    let lift = g.submit(call(&g, "lift", &[address(gate)]).urgent()).unwrap();
    g.wait_for(lift, Duration::from_secs(20)).map_err(|(e, _)| e).unwrap();
    g.wait(again).unwrap();
}

#[test]
fn what_goes_wrong_with_a_task_is_its_tickets_error_and_nobody_elses() {
    let Some(g) = start(builder().blocks(2).ring(8)) else { return };
    let fine = || {
        let t = g.submit(call(&g, "add", &[2, 3])).unwrap();
        assert_eq!(g.wait(t).unwrap().result_as::<u64>(), 5);
    };
    let fuel = g.submit(call(&g, "endless", &[]).fuel(1000)).unwrap();
    assert!(matches!(g.wait(fuel), Err(Error::OutOfFuel { function }) if function == "endless"));
    fine();
    let leaves = word();
    let tree = g.submit(call(&g, "tree", &[20, address(leaves), address(leaves)]).fuel(500)).unwrap();
    assert!(matches!(g.wait(tree), Err(Error::OutOfFuel { .. })));
    assert!(leaves.load(Ordering::Relaxed) < 1000);
    fine();
    let status = g.wait(g.submit(call(&g, "fails", &[])).unwrap()).unwrap_err();
    assert!(matches!(status, Error::Failed { status, .. } if status == FIRST_OWN << 3), "{status}");
    let unknown = g.wait(g.submit(call(&g, "unknown", &[])).unwrap()).unwrap_err();
    assert!(matches!(unknown, Error::UnknownFunction { .. }), "{unknown}");
    fine();
    assert!(matches!(g.function("nothing"), Err(Error::NoFunction { .. })));
    assert!(matches!(g.submit(Call::new(99)), Err(Error::NoFunction { .. })));
    let add = g.function("add").unwrap();
    assert!(matches!(g.submit(Call::new(add).args(&[0; ARGS + 1])), Err(Error::Arguments { is: 33 })));
    fine();
}

#[test]
fn a_full_ring_pushes_back_and_a_task_that_never_ends_is_named() {
    let Some(mut g) = start(builder().blocks(1).ring(4)) else { return };
    let gate = word();
    let stuck = g.submit(call(&g, "deaf", &[address(gate)])).unwrap();
    let behind: Vec<_> = (0..3).map(|i| g.try_submit(call(&g, "add", &[i, i])).unwrap()).collect();
    assert!(matches!(g.try_submit(call(&g, "add", &[1, 1])), Err(Error::Full(4))));
    // The other ring has room.
    let urgent = g.try_submit(call(&g, "add", &[1, 1]).urgent()).unwrap();
    let (e, stuck) = g.wait_for(stuck, Duration::from_millis(1500)).unwrap_err();
    // The watchdog begins to count when somebody looks.
    let Error::TimedOut { function, .. } = &e else { panic!("{e}") };
    assert_eq!(function, "deaf");
    let (e, stuck) = g.wait_for(stuck.unwrap(), Duration::from_millis(1500)).unwrap_err();
    let Error::TimedOut { stuck: Some(block), .. } = &e else { panic!("{e}") };
    assert_eq!((block.block, &*block.function), (0, "deaf"));
    assert!(e.to_string().contains("block 0") && e.to_string().contains("deaf"), "{e}");
    gate.store(1, Ordering::Release);
    g.wait(stuck.unwrap()).unwrap();
    for (i, t) in behind.into_iter().enumerate() {
        assert_eq!(g.wait(t).unwrap().result_as::<u64>(), 2 * i as u64);
    }
    g.wait(urgent).unwrap();
    assert!(g.stuck().is_none());
    g.drain().unwrap();
    assert!(matches!(g.submit(call(&g, "add", &[1, 1])), Err(Error::Stopped)));
}

#[test]
fn who_takes_long_keeps_nobody_waiting_as_long_as_a_block_is_free() {
    // As many as may look at the host's memory, where that is limited.
    let Some(g) = start(builder().blocks(4).ring(4)) else { return };
    let gate = word();
    let long = [0, 1].map(|_| g.submit(call(&g, "deaf", &[address(gate)])).unwrap());
    for i in 0..50 {
        let quick = g.submit(call(&g, "add", &[i, 1])).unwrap();
        let done = g.wait_for(quick, Duration::from_secs(20)).map_err(|(e, _)| e);
        assert_eq!(done.unwrap().result_as::<u64>(), i + 1);
    }
    gate.store(1, Ordering::Release);
    for t in long {
        g.wait(t).unwrap();
    }
}

/// Far more that are not done for long than an attempt to submit looks at.
#[test]
fn what_is_free_is_found_behind_many_that_take_long() {
    let Some(g) = start(builder().blocks(1).ring(128)) else { return };
    let nodes = words(100);
    let long: Vec<_> = nodes.iter().map(|n| g.submit(call(&g, "pend", &[address(n)])).unwrap()).collect();
    for i in 0..300 {
        let quick = g.submit(call(&g, "add", &[i, 1])).unwrap();
        let done = g.wait_for(quick, Duration::from_secs(20)).map_err(|(e, _)| e);
        assert_eq!(done.unwrap().result_as::<u64>(), i + 1);
    }
    for (n, t) in nodes.iter().zip(long) {
        assert!(!t.is_done());
        let number = n.load(Ordering::Acquire) - 1;
        g.wait(g.submit(call(&g, "unpend", &[number])).unwrap()).unwrap();
        assert_eq!(g.wait(t).unwrap().result_as::<u64>(), 23);
    }
}

#[test]
fn draining_finishes_everything_and_stopping_nothing_more() {
    let Some(mut g) = start(builder().blocks(2).ring(256)) else { return };
    let leaves = word();
    let trees: Vec<_> =
        (0..50).map(|_| g.submit(call(&g, "tree", &[8, address(leaves), address(leaves)])).unwrap()).collect();
    g.drain().unwrap();
    assert!(leaves.load(Ordering::Relaxed) >= 50 << 8);
    assert!(trees.iter().all(|t| t.is_done()));
    // Their completions are there although the grid is not.
    for t in trees {
        g.wait(t).unwrap();
    }
    assert!(matches!(g.drain(), Err(Error::Stopped)));

    let Some(mut g) = start(builder().blocks(1).ring(256)) else { return };
    let gate = word();
    let begun = word();
    let running = g.submit(call(&g, "deaf", &[address(gate), address(begun)])).unwrap();
    while begun.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    let never: Vec<_> = (0..20).map(|i| g.submit(call(&g, "add", &[i, i])).unwrap()).collect();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            gate.store(1, Ordering::Release);
        });
        g.stop().unwrap();
    });
    g.wait(running).unwrap();
    assert!(never.into_iter().all(|t| matches!(g.wait(t), Err(Error::Stopped))));
    // A ticket outlives its grid.
    let Some(g) = start(builder().blocks(2)) else { return };
    let t = g.submit(call(&g, "add", &[1, 2])).unwrap();
    while !t.is_done() {
        std::thread::yield_now();
    }
    drop(g);
    assert!(t.is_done());
}

#[test]
fn draining_a_grid_whose_task_never_ends_says_which_one_and_can_be_gone_on_with() {
    let Some(mut g) = start(builder().blocks(1)) else { return };
    let (gate, begun) = (word(), word());
    let long = g.submit(call(&g, "deaf", &[address(gate), address(begun)])).unwrap();
    let behind = g.submit(call(&g, "add", &[20, 3])).unwrap();
    while begun.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    // The watchdog begins to count at the end of the first wait.
    let time = Duration::from_millis(1200);
    assert!(matches!(g.drain_within(time), Err(Error::TimedOut { waited, .. }) if waited >= time));
    let why = g.drain_within(time).unwrap_err();
    assert!(matches!(&why, Error::TimedOut { stuck: Some(s), .. } if s.function == "deaf"), "{why}");
    assert!(matches!(g.submit(call(&g, "add", &[1, 1])), Err(Error::Stopped)));
    gate.store(1, Ordering::Release);
    g.drain_within(Duration::from_secs(20)).unwrap();
    g.wait(long).unwrap();
    assert_eq!(g.wait(behind).unwrap().result_as::<u64>(), 23);
    assert!(matches!(g.drain_within(Duration::ZERO), Err(Error::Stopped)));
}

#[test]
fn a_grid_whose_task_never_ends_can_be_dropped() {
    let Some(g) = start(builder().blocks(2)) else { return };
    let gate = word();
    let begun = word();
    let t = g.submit(call(&g, "deaf", &[address(gate), address(begun)])).unwrap();
    while begun.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    // Returns, though a block is still in its task, and still uses the grid's memory afterwards.
    drop(g);
    assert!(!t.is_done());
    gate.store(1, Ordering::Release);
    while !t.is_done() {
        std::thread::yield_now();
    }
}

#[test]
fn grids_leave_no_files_open() {
    let open = || {
        std::fs::read_dir("/proc/self/fd").unwrap().filter(|f| {
            f.as_ref().is_ok_and(|f| {
                std::fs::read_link(f.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:resident"))
            })
        })
    };
    // Those of other tests come and go; what is left over stays.
    let before = open().count();
    for _ in 0..30 {
        let Some(mut g) = start(builder().blocks(1)) else { return };
        g.drain().unwrap();
    }
    assert!(open().count() < before + 30, "{} files", open().count());
}

#[test]
fn settings_out_of_bounds_and_broken_functions_are_refused() {
    let bad = |b: Builder| b.start_on_cpu().map(drop).unwrap_err();
    for b in [builder().ring(0), builder().ring(3), builder().ring(1 << 21), builder().nodes(1), builder().queue(5)] {
        assert!(matches!(bad(b), Error::Setting { .. }));
    }
    assert!(matches!(bad(builder().blocks(0)), Error::Setting { what: "blocks", .. }));
    assert!(matches!(bad(builder().blocks(5000)), Error::Setting { .. }));
    assert!(matches!(bad(builder().grain(0)), Error::Setting { what: "grain", .. }));
    assert!(matches!(bad(Builder::new("").functions(["a b"])), Error::NoFunction { .. }));
    match Builder::new("TASK(f) {\n  nonsense;\n}").functions(["f"]).start_on_cpu() {
        Err(Error::NoCompiler(e)) => eprintln!("skipped: {e}"),
        Err(Error::Compile(log)) => assert!(log.contains("tasks:2") && log.contains("nonsense"), "{log}"),
        other => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn an_idle_grid_uses_little_of_a_processor() {
    let Some(g) = start(builder().blocks(2)) else { return };
    // Of all blocks: nanoseconds on a core, and how often they slept.
    let used = || {
        let blocks = std::fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(|t| {
            let of = |file| std::fs::read_to_string(t.path().join(file)).ok();
            let (name, stat, status) = (of("comm")?, of("schedstat")?, of("status")?);
            let slept = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
            let number = |text: &str| text.trim().parse::<u64>().ok();
            name.starts_with("block").then_some([number(stat.split(' ').next()?)?, number(slept)?])
        });
        blocks.fold([0; 2], |sum: [u64; 2], b| [sum[0] + b[0], sum[1] + b[1]])
    };
    g.wait(g.submit(call(&g, "add", &[1, 2])).unwrap()).unwrap();
    // Other tests of this program have blocks, too; in some half second they are all done or idle.
    let share = || {
        let (before, begun) = (used(), std::time::Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        let (after, took) = (used(), begun.elapsed());
        let [ns, slept] = [0, 1].map(|i| after[i].saturating_sub(before[i]) as f64);
        (ns / took.as_nanos() as f64, slept / took.as_secs_f64())
    };
    // What a look costs is the machine's: how often they look is not.
    let least = (0..30).map(|_| share()).find(|(cores, looks)| *cores < 0.2 && *looks < 5000.0);
    assert!(least.is_some(), "two idle blocks use so many cores, and look so often a second: {:.2?}", share());
    // And it still answers.
    assert_eq!(g.wait(g.submit(call(&g, "add", &[4, 5])).unwrap()).unwrap().result_as::<u64>(), 9);
}

#[test]
fn a_function_is_called_when_a_task_is_done_or_never_will_be() {
    let Some(mut g) = start(builder()) else { return };
    let (to, from) = std::sync::mpsc::channel();
    for i in 0..300u64 {
        let to = to.clone();
        let then = move |done: Result<forebay::resident::Completion, Error>| {
            assert!(i != 7, "this function's own fault");
            to.send((i, done.map(|d| d.result_as::<u64>()))).unwrap();
        };
        g.submit_then(call(&g, if i == 9 { "fails" } else { "add" }, &[i, 1]), then).unwrap();
    }
    // One of them panicked; the others are called all the same.
    for _ in 0..299 {
        let (i, done) = from.recv_timeout(Duration::from_secs(20)).unwrap();
        match done {
            Ok(sum) => assert_eq!(sum, i + 1),
            Err(e) => assert!(i == 9 && matches!(e, Error::Failed { .. }), "{i}: {e}"),
        }
    }
    let (gate, begun) = (word(), word());
    for _ in 0..2 {
        let to = to.clone();
        let wait = call(&g, "deaf", &[address(gate), address(begun)]);
        g.submit_then(wait, move |done| to.send((0, done.map(|d| d.result_as::<u64>()))).unwrap()).unwrap();
    }
    while begun.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    // What the grid's end leaves undone is told, too.
    let stuck = g.stop_within(Duration::from_millis(30)).unwrap_err();
    assert!(matches!(stuck, Error::TimedOut { .. }), "{stuck}");
    assert!(from.recv_timeout(Duration::from_millis(30)).is_err());
    gate.store(1, Ordering::Release);
    g.stop_within(Duration::from_secs(20)).unwrap();
    let mut ends: Vec<_> = (0..2).map(|_| from.recv_timeout(Duration::from_secs(20)).unwrap().1.is_ok()).collect();
    ends.sort();
    // Blocks are as many as the machine has cores but one: both may have begun, or one.
    assert!(ends[1], "{ends:?}");
    assert!(matches!(g.stop(), Err(Error::Stopped)));
}

#[test]
fn functions_are_exchanged_and_the_heap_stays() {
    let Some(mut g) = start(builder().blocks(2).threads(256).ring(4).heap(4 << 20)) else { return };
    let add = call(&g, "add", &[2, 3]);
    let kept = g.wait(g.submit(call(&g, "keep", &[64])).unwrap()).unwrap().result_as::<u64>();
    let tickets: Vec<_> = (0..4).map(|_| g.submit(add).unwrap()).collect();
    // What does not compile changes nothing.
    assert!(matches!(g.reload(&Builder::new("TASK(broken) { this; }").functions(["broken"])), Err(Error::Compile(_))));
    let text = "TASK(times) { *(u64 *)fb_result(c) = ((const u64 *)t->args)[0] * 10; }
                TASK(leave) { if (fb_lane() == 0) fb_delete(c, *(void *const *)t->args); }";
    // (Nor does it matter that this says another size.)
    g.reload(&Builder::new(text).functions(["times", "leave"])).unwrap();
    for t in tickets {
        assert_eq!(g.wait(t).unwrap().result_as::<u64>(), 5);
    }
    assert!(matches!(g.function("add"), Err(Error::NoFunction { known, .. }) if known == "times, leave"));
    for i in 0..50u64 {
        let urgent = call(&g, "times", &[i]);
        let urgent = if i % 3 == 0 { urgent.urgent() } else { urgent };
        assert_eq!(g.wait(g.submit(urgent).unwrap()).unwrap().result_as::<u64>(), i * 10);
    }
    assert_eq!(g.heap().unwrap().slots, 64);
    g.wait(g.submit(call(&g, "leave", &[kept])).unwrap()).unwrap();
    assert_eq!(g.heap().unwrap().slots, 0);
    // A number of the old table that the new one does not have.
    assert!(matches!(g.submit(Call::new(5)), Err(Error::NoFunction { .. })));
    g.drain().unwrap();
    assert!(matches!(g.reload(&builder()), Err(Error::Stopped)));
}

#[test]
fn a_tasks_invocations_go_to_the_grid() {
    use forebay::{Datablock, Graph, Runtime, Task, Template};
    let text = "TASK_PER_THREAD(scale) {
        const float *in = (const float *)fb_span(t, 0).data, *by = (const float *)fb_span(t, 1).data;
        ((float *)fb_span(t, 2).data)[i] = in[i] * *by + fb_span(t, 0).bytes / 4;
    }";
    let Some(g) = start(Builder::new(text).functions(["scale"]).grain(100)) else { return };
    let grid = std::sync::Arc::new(g);
    let t = Template::array::<f32>([1000]);
    let mut graph = Graph::new("resident");
    let scale = Task::new("scale").input("in", t).sticky("by", Template::scalar::<f32>()).output("out", t);
    let scale = graph.add(scale.resident(&grid, "scale")).unwrap();
    let (feed, by) = (graph.feed((scale, "in"), 4).unwrap(), graph.feed((scale, "by"), 1).unwrap());
    let drain = graph.drain((scale, "out"), 4).unwrap();
    // Where there is a device it is the grid's, whatever handle of it the runtime has.
    let run = Runtime::new().unwrap().start(graph).unwrap();
    run.push(by, Datablock::scalar(3f32).unwrap()).unwrap();
    for round in 0..20 {
        let data: Vec<f32> = (0..1000).map(|i| (i + round) as f32).collect();
        run.push(feed, Datablock::from_slice(t, &data).unwrap()).unwrap();
        let out = run.pull(drain).unwrap();
        let wanted: Vec<f32> = data.iter().map(|x| x * 3.0 + 1000.0).collect();
        assert_eq!(out.as_slice::<f32>().unwrap(), wanted);
    }
    // A function that the grid does not have is a mistake in the graph.
    let missing = Graph::new("wrong").add(Task::new("t").resident(&grid, "nothing")).unwrap_err();
    assert!(missing.to_string().contains("scale"), "{missing}");
}

#[test]
fn tasks_allocate_and_free_and_the_host_sees_what_is_taken() {
    const ARENA: u64 = 4 << 20;
    let Some(g) = start(builder().blocks(2).heap(ARENA)) else { return };
    let empty = g.heap().unwrap();
    assert!(empty.arena > ARENA * 95 / 100 && empty.arena <= ARENA && empty.free == empty.arena, "{empty:?}");
    let run = |n: u64, bad: u64| g.wait(g.submit(call(&g, "heap", &[n, bad])).unwrap());
    let many: Vec<_> = (0..50).map(|i| g.submit(call(&g, "heap", &[i * 20, 0])).unwrap()).collect();
    for (i, ticket) in many.into_iter().enumerate() {
        let n = i as u64 * 20;
        assert_eq!(g.wait(ticket).unwrap().result_as::<[u64; 2]>(), [n, n * n.saturating_sub(1) / 2]);
    }
    // More than there is: as many as fit, then null. All of it comes back.
    let all = run(1 << 20, 0).unwrap().result_as::<[u64; 2]>()[0];
    assert_eq!(all, empty.arena / 64);
    let after = g.heap().unwrap();
    assert_eq!((after.slots, after.large, after.free + after.slack), (0, 0, empty.arena));
    // Freed twice: that task's error, and the host sees the pointer.
    assert!(matches!(run(3, 1), Err(Error::BadFree { function }) if function == "heap"));
    assert_eq!((g.heap().unwrap().twice, g.heap().unwrap().slots), (1, 0));
    assert!(g.heap().unwrap().last_bad != 0);
    // What is kept is seen, in slots and in pages; all of what is left can be had.
    let keep = |bytes: u64| g.wait(g.submit(call(&g, "keep", &[bytes])).unwrap()).unwrap().result_as::<u64>();
    assert!(keep(100) != 0 && keep(200_000) != 0);
    let used = g.heap().unwrap();
    assert_eq!((used.slots, used.large), (112, 4 << 16));
    assert!(used.longest < used.arena && used.fragmentation() > 0.0);
    assert!(keep(used.longest + 1) == 0 && keep(used.longest) != 0);
}

#[test]
fn a_node_waits_for_every_item_of_a_range() {
    let Some(g) = start(builder().blocks(2).grain(16)) else { return };
    for n in [1u64, 16, 1000, 100_000] {
        let sum = word();
        let done = g.wait(g.submit(call(&g, "gather", &[address(sum), n])).unwrap()).unwrap();
        assert_eq!((sum.load(Ordering::Relaxed), done.result_as::<u64>()), (n, 1), "{n}");
    }
}

#[test]
fn heaps_out_of_bounds_are_refused_and_grids_without_give_null() {
    let Some(g) = start(builder()) else { return };
    assert!(g.heap().is_none());
    assert_eq!(g.wait(g.submit(call(&g, "keep", &[8])).unwrap()).unwrap().result_as::<u64>(), 0);
    for bytes in [0, 1000, 65536, u64::MAX, 1 << 60] {
        let refused = builder().heap(bytes).start_on_cpu().map(drop).unwrap_err();
        assert!(matches!(&refused, Error::Start(why) if why.contains(&bytes.to_string())), "{refused}");
    }
}

#[test]
fn a_function_may_be_for_a_thread_or_a_warp() {
    let Some(g) = start(builder().grain(7)) else { return };
    for name in ["thread_adds", "warp_adds"] {
        let sum = word();
        g.wait(g.submit(call(&g, name, &[address(sum)]).range(5, 1000)).unwrap()).unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), (5..1005).sum::<u64>(), "{name}");
    }
}

/// The part of the host that dies: it says when its task is under way.
#[test]
#[ignore = "a process of the test below"]
fn a_host_whose_task_never_ends() {
    let Some(g) = start(builder().blocks(2)) else { return };
    let begun = word();
    let _awaited_by_nobody = g.submit(call(&g, "deaf", &[address(word()), address(begun)])).unwrap();
    while begun.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    println!("{RESIDENT}");
    std::thread::sleep(Duration::from_secs(60));
}

const RESIDENT: &str = "a task is under way";

/// Whoever comes next finds the device as if the grid had never been there.
#[test]
fn a_host_that_dies_takes_its_grid_with_it() {
    use std::io::{BufRead as _, BufReader};
    for _ in 0..2 {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_host_whose_task_never_ends", "--ignored", "--nocapture"]);
        let mut host = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(host.stdout.take().unwrap()).lines().map_while(Result::ok);
        let is_resident = lines.any(|l| l.contains(RESIDENT));
        let begun = std::time::Instant::now();
        host.kill().unwrap();
        let status = host.wait().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?} to end", begun.elapsed());
        assert_eq!(is_resident, !status.success(), "{status}");
    }
    let Some(g) = start(builder().blocks(2)) else { return };
    let t = g.submit(call(&g, "add", &[2, 3])).unwrap();
    assert_eq!(g.wait(t).unwrap().result_as::<u64>(), 5);
}

/// The same text is CUDA C++ for every architecture from Turing to Blackwell.
#[test]
fn the_device_code_compiles_for_gpus() {
    let Ok(nvrtc) = forebay::hal::cuda::Nvrtc::get() else {
        eprintln!("skipped: no NVRTC here");
        return;
    };
    let options = forebay::hal::portable::NVRTC_OPTIONS;
    for architecture in [75, 90, 100] {
        let binary = nvrtc.compile(&builder().text(), "fb_grid", architecture, &options, "test").unwrap();
        assert!(!binary.is_empty());
    }
    let copy = include_str!("../../../../device/copy.cu");
    assert!(!nvrtc.compile(copy, "forebay_copy", 75, &options, "test").unwrap().is_empty());
}

/// What holds of a grid on the CPU holds of one whose rings are in device memory, and of one that has none of that.
const EVERYWHERE: [&str; 23] = [
    "random::random_programs_are_done_once_and_answer_their_own_tickets",
    "a_host_that_dies_takes_its_grid_with_it",
    "draining_a_grid_whose_task_never_ends_says_which_one_and_can_be_gone_on_with",
    "what_is_free_is_found_behind_many_that_take_long",
    "what_is_urgent_comes_between_tasks_that_make_tasks",
    "every_task_is_done_once_and_answers_its_own_ticket",
    "together::a_slot_is_taken_whole_whether_somebody_waits_for_it_or_not",
    "together::slots_that_are_taken_many_at_a_time_are_whole",
    "ranges_trees_and_diamonds_are_whole",
    "what_is_urgent_comes_first",
    "what_goes_wrong_with_a_task_is_its_tickets_error_and_nobody_elses",
    "a_full_ring_pushes_back_and_a_task_that_never_ends_is_named",
    "draining_finishes_everything_and_stopping_nothing_more",
    "a_grid_whose_task_never_ends_can_be_dropped",
    "a_function_is_called_when_a_task_is_done_or_never_will_be",
    "functions_are_exchanged_and_the_heap_stays",
    "tasks_allocate_and_free_and_the_host_sees_what_is_taken",
    "a_node_waits_for_every_item_of_a_range",
    "a_function_may_be_for_a_thread_or_a_warp",
    "a_tasks_invocations_go_to_the_grid",
    "together::many_are_submitted_together",
    "together::pieces_of_the_table_are_each_one_writers_and_come_back",
    "who_takes_long_keeps_nobody_waiting_as_long_as_a_block_is_free",
];

#[test]
fn all_of_it_holds_on_cuda_with_the_stand_in() {
    EVERYWHERE.iter().for_each(|name| stand_in::again(name));
}

#[test]
fn all_of_it_holds_on_cuda_without_mapped_memory() {
    EVERYWHERE.iter().for_each(|name| stand_in::again_with(name, &[(PINNED, "1")]));
}

/// With what a GPU would run: whole warps, which come apart and meet as they please.
#[test]
fn all_of_it_holds_with_nvidias_compiler() {
    stand_in::again_as_ptx(&EVERYWHERE, &[]);
    stand_in::again_as_ptx(&cuda_only::ALL, &[("STAND_IN_SEED", "2")]);
}

#[test]
fn all_of_it_holds_on_a_gpu() {
    on_a_gpu::all(&EVERYWHERE, &[]);
    on_a_gpu::all(&EVERYWHERE, &[(PINNED, "1")]);
    on_a_gpu::all(&cuda_only::ALL, &[]);
}
