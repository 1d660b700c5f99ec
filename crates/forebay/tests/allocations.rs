//! Steady state allocates nothing per item on the CPU path.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::{Graph, Result, Runtime, Task, Template};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator; counting has no effect on it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn items_pass_through_a_warm_graph_without_an_allocation() -> Result<()> {
    // Blocks of tasks' own, and such that tasks share.
    [64, 4096].into_iter().try_for_each(items_pass)
}

fn items_pass(elements: usize) -> Result<()> {
    let t = Template::array::<u32>([elements]);
    let mut g = Graph::new("warm");
    let a = g.add(Task::new("a").input("x", t).output("y", t).host(|inv| {
        let (x, y) = (inv.input::<u32>("x")?, inv.output::<u32>("y")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x + 1);
        Ok(())
    }))?;
    // Two consumers: one in place, one not; and a join.
    let b = g.add(Task::new("b").inout("x", t).host(|inv| {
        inv.output::<u32>("x")?[0] += 1;
        Ok(())
    }))?;
    let c = g.add(Task::new("c").input("p", t).input("q", t).output("sum", t).host(|inv| {
        let (p, q) = (inv.input::<u32>("p")?, inv.input::<u32>("q")?);
        inv.output::<u32>("sum")?[0] = p[0] + q[0];
        Ok(())
    }))?;
    g.connect((a, "y"), (b, "x"))?;
    g.connect((a, "y"), (c, "p"))?;
    g.connect((b, "x"), (c, "q"))?;
    let (feed, drain) = (g.feed((a, "x"), 4)?, g.drain((c, "sum"), 4)?);
    let run = Runtime::builder().cpu_only().workers(2).build()?.start(g)?;
    let data = vec![7u32; elements];
    let pass = |n: u32| -> Result<()> {
        for _ in 0..n {
            let mut block = run.acquire(feed)?;
            block.assign(&data)?;
            run.push(feed, block)?;
            assert_eq!(run.pull(drain)?.as_slice::<u32>()?[0], 17);
        }
        Ok(())
    };
    pass(2000)?;
    // A pool may still grow by a block when threads meet in a new way; per item there is nothing.
    let fewest = (0..5)
        .map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            pass(1000).map(|()| ALLOCATIONS.load(Ordering::Relaxed) - before)
        })
        .collect::<Result<Vec<_>>>()?;
    assert_eq!(fewest.iter().min(), Some(&0), "allocations per 1000 items: {fewest:?}");
    Ok(())
}

#[test]
fn transfers_of_a_real_time_stream_allocate_nothing() -> Result<()> {
    use forebay::transfer::{Budget, Curves, Engine, Way};
    let (devices, _) = forebay::hal::discover(&[forebay::Kind::Cpu]);
    let engine = Engine::with_curves(devices[0].clone(), Curves::default());
    let memory = devices[0].alloc(1 << 20)?;
    let mut stream = engine.real_time(Budget::default())?;
    let mut pinned = stream.pinned(1 << 20)?;
    for way in [None, Some(Way::Staged)] {
        stream.stream().force(way)?;
        let mut pass = |n: usize| -> Result<u64> {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for i in 0..n {
                let bytes = 1 << (i % 21);
                stream.write(&memory, 0, &pinned.part(0..bytes))?;
                stream.read(&memory, 0, &mut pinned.part_mut(0..bytes))?;
            }
            Ok(ALLOCATIONS.load(Ordering::Relaxed) - before)
        };
        pass(50)?;
        // The other test of this program allocates meanwhile.
        let fewest = (0..50).map(|_| pass(40)).collect::<Result<Vec<_>>>()?;
        assert_eq!(fewest.iter().min(), Some(&0), "by {way:?}: {fewest:?}");
    }
    Ok(())
}
