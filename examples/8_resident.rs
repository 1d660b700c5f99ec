//! The resident grid: blocks that stay and take tasks without a launch for each. A task answers; a task makes tasks; a range
//! is shared by whoever has time. Here on the CPU, where a block is a thread; it needs a C++ compiler at run time.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay::resident::{Builder, Call, Error, Result};

const TASKS: &str = r"
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }

TASK_PER_THREAD(square) { *(u64 *)fb_result(c) = arg(t, 0) * arg(t, 0); }

// Two tasks of one less each, down to the leaves, which count. When there is no room for a task, its work is done at once.
// Tasks for a thread each: on a GPU a block runs as many at a time as it has threads.
TASK_PER_THREAD(tree) {
  const u64 depth = arg(t, 0);
  u64 *leaves = (u64 *)arg(t, 1);
  if (depth == 0) { __atomic_fetch_add(leaves, 1, __ATOMIC_RELAXED); return; }
  const u64 child[2] = {depth - 1, arg(t, 1)};
  for (u32 i = 0; i < 2; i++)
    if (!fb_spawn(c, FN_tree, 0, 1, child, sizeof child))
      __atomic_fetch_add(leaves, 1ull << (depth - 1), __ATOMIC_RELAXED);
}

// A range: one submission, as many pieces as there are idle blocks.
TASK(sum) {
  u64 sum = 0;
  for (u64 i = t->first; i < t->first + t->count; i++) sum += i;
  __atomic_fetch_add((u64 *)arg(t, 0), sum, __ATOMIC_RELAXED);
}
";

/// Runs the example.
pub fn main() -> Result<()> {
    let grid = match Builder::new(TASKS).functions(["square", "tree", "sum"]).start_on_cpu() {
        Err(e @ Error::NoCompiler(_)) => {
            println!("{e}");
            return Ok(());
        }
        other => other?,
    };
    let address = |a: &AtomicU64| (std::ptr::from_ref(a) as u64).to_ne_bytes();

    let ticket = grid.submit(Call::new(grid.function("square")?).args(&12u64.to_ne_bytes()))?;
    println!("12² = {}", grid.wait(ticket)?.result_as::<u64>());

    // Done when all that came of it is done.
    let leaves = AtomicU64::new(0);
    let args = [15u64.to_ne_bytes(), address(&leaves)].concat();
    grid.wait(grid.submit(Call::new(grid.function("tree")?).args(&args))?)?;
    println!("a tree of depth 15 has {} leaves", leaves.load(Ordering::Relaxed));
    assert_eq!(leaves.load(Ordering::Relaxed), 1 << 15);

    // A thousand of them at a time, which are done when all are.
    let trees = (0..1000).map(|i| {
        let args = [(i % 4u64).to_ne_bytes(), address(&leaves)].concat();
        Ok(Call::new(grid.function("tree")?).args(&args))
    });
    for ticket in grid.submit_all(trees.collect::<Result<Vec<_>>>()?)? {
        grid.wait(ticket)?;
    }
    assert_eq!(leaves.load(Ordering::Relaxed), (1 << 15) + 250 * (1 + 2 + 4 + 8));

    let sum = AtomicU64::new(0);
    let call = Call::new(grid.function("sum")?).args(&address(&sum)).range(0, 1_000_000);
    grid.wait(grid.submit(call.urgent())?)?;
    assert_eq!(sum.load(Ordering::Relaxed), 499_999_500_000);
    println!("the numbers below a million sum up to {}", sum.load(Ordering::Relaxed));
    Ok(())
}
