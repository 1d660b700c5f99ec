//! Memory on the device: tasks build a tree of which nobody knows the size before, on the heap of their grid.

use forebay::resident::{Builder, Call, Error, Result};

const TASKS: &str = r"
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }

struct Branch { Branch *left, *right; u64 value; };

// The numbers that come of `n`: halves and thirds, until there is nothing left.
FB_DEVICE Branch *grow(Context *c, u64 n) {
  Branch *b = (Branch *)fb_new(c, sizeof(Branch));
  if (!b) return 0;
  b->value = n;
  b->left = n < 2 ? 0 : grow(c, n / 2);
  b->right = n < 3 ? 0 : grow(c, n / 3);
  return b;
}

TASK(plant) { *(Branch **)fb_result(c) = grow(c, arg(t, 0)); }

// Adds up the tree, and gives its memory back.
FB_DEVICE u64 fell(Context *c, Branch *b, u64 *pieces) {
  if (!b) return 0;
  const u64 sum = b->value + fell(c, b->left, pieces) + fell(c, b->right, pieces);
  fb_delete(c, b);
  ++*pieces;
  return sum;
}

TASK(harvest) {
  u64 *out = (u64 *)fb_result(c);
  out[1] = 0;
  out[0] = fell(c, (Branch *)arg(t, 0), &out[1]);
}
";

fn expected(n: u64) -> (u64, u64) {
    let (l, r) = (if n < 2 { (0, 0) } else { expected(n / 2) }, if n < 3 { (0, 0) } else { expected(n / 3) });
    (n + l.0 + r.0, 1 + l.1 + r.1)
}

/// Runs the example.
pub fn main() -> Result<()> {
    let grid = match Builder::new(TASKS).functions(["plant", "harvest"]).heap(16 << 20).start_on_cpu() {
        Err(e @ Error::NoCompiler(_)) => {
            println!("{e}");
            return Ok(());
        }
        other => other?,
    };
    let (plant, harvest) = (grid.function("plant")?, grid.function("harvest")?);
    let sizes = [1_000u64, 30_000, 1_000_000];
    let tickets = sizes.map(|n| grid.submit(Call::new(plant).args(&n.to_ne_bytes())));
    let mut trees = Vec::new();
    for ticket in tickets {
        trees.push(grid.wait(ticket?)?.result_as::<u64>());
    }
    println!("planted: {:?}", grid.heap());
    for (n, tree) in sizes.into_iter().zip(trees) {
        let [sum, pieces] =
            grid.wait(grid.submit(Call::new(harvest).args(&tree.to_ne_bytes()))?)?.result_as::<[u64; 2]>();
        assert_eq!((sum, pieces), expected(n));
        println!("from {n}: {pieces} numbers, {sum} in all");
    }
    assert_eq!(grid.heap().map(|h| h.slots + h.large), Some(0));
    Ok(())
}
