//! Breadth-first search without levels: a task visits a vertex and makes tasks for the neighbours that it brings nearer. The
//! host submits one task and hears when the whole search is done.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::resident::{Builder, Call, Error, Result};

const TASKS: &str = r"
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }

struct Csr { const u32 *offsets, *edges; u32 *distances; };

// Brings the distance down; whoever does has to tell the neighbours.
FB_DEVICE bool nearer(u32 *p, u32 d) {
  u32 there = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (d < there)
    if (__atomic_compare_exchange_n(p, &there, d, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
  return false;
}

// What finds no room as a task of its own is done here, with a stack as deep as any path it may take.
FB_DEVICE void visit_here(Context *c, const Csr *g, u32 v, u32 d);

FB_DEVICE void visit_now(Context *c, const Csr *g, u32 v, u32 d) {
  for (u32 i = g->offsets[v]; i < g->offsets[v + 1]; i++) {
    const u32 w = g->edges[i];
    if (!nearer(&g->distances[w], d + 1)) continue;
    const u64 args[3] = {(u64)g, w, d + 1};
    if (!fb_spawn(c, FN_visit, 0, 1, args, sizeof args)) visit_here(c, g, w, d + 1);
  }
}
FB_DEVICE void visit_here(Context *c, const Csr *g, u32 v, u32 d) { visit_now(c, g, v, d); }

TASK(visit) {
  const Csr *g = (const Csr *)arg(t, 0);
  const u32 v = (u32)arg(t, 1), d = (u32)arg(t, 2);
  // Somebody may have found a shorter way since.
  if (__atomic_load_n(&g->distances[v], __ATOMIC_RELAXED) == d) visit_now(c, g, v, d);
}
";

/// A graph by rows.
#[repr(C)]
struct Csr {
    offsets: *const u32,
    edges: *const u32,
    distances: *const AtomicU32,
}

/// A square grid of which every seventh place is a hole.
fn grid_with_holes(side: u32) -> (Vec<u32>, Vec<u32>) {
    let hole = |v: u32| v.wrapping_mul(2_654_435_761) >> 16 & 7 == 7 && v != 0;
    let (mut offsets, mut edges) = (vec![0], Vec::new());
    for v in 0..side * side {
        let (x, y) = (v % side, v / side);
        let around = [
            (x > 0).then(|| v - 1),
            (x + 1 < side).then(|| v + 1),
            (y > 0).then(|| v - side),
            (y + 1 < side).then(|| v + side),
        ];
        if !hole(v) {
            edges.extend(around.into_iter().flatten().filter(|w| !hole(*w)));
        }
        offsets.push(edges.len() as u32);
    }
    (offsets, edges)
}

/// Runs the example.
pub fn main() -> Result<()> {
    let resident = match Builder::new(TASKS).functions(["visit"]).queue(1 << 16).start_on_cpu() {
        Err(e @ Error::NoCompiler(_)) => {
            println!("{e}");
            return Ok(());
        }
        other => other?,
    };
    let (offsets, edges) = grid_with_holes(120);
    let n = offsets.len() - 1;
    let distances: Vec<AtomicU32> = (0..n).map(|v| AtomicU32::new(if v == 0 { 0 } else { u32::MAX })).collect();
    let graph = Csr { offsets: offsets.as_ptr(), edges: edges.as_ptr(), distances: distances.as_ptr() };
    let args = [std::ptr::from_ref(&graph) as u64, 0, 0].map(u64::to_ne_bytes).concat();
    resident.wait(resident.submit(Call::new(resident.function("visit")?).args(&args))?)?;

    let mut want = vec![u32::MAX; n];
    want[0] = 0;
    let mut queue = VecDeque::from([0usize]);
    while let Some(v) = queue.pop_front() {
        for &w in &edges[offsets[v] as usize..offsets[v + 1] as usize] {
            if want[w as usize] == u32::MAX {
                want[w as usize] = want[v] + 1;
                queue.push_back(w as usize);
            }
        }
    }
    let found: Vec<u32> = distances.iter().map(|d| d.load(Ordering::Relaxed)).collect();
    assert_eq!(found, want);
    let reached = found.iter().filter(|d| **d < u32::MAX);
    println!(
        "{} of {n} places reached, the farthest {} steps away",
        reached.clone().count(),
        reached.max().unwrap_or(&0)
    );
    Ok(())
}
