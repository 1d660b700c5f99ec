//! D: the heap: pieces that come and go at once, sixteen at a time, and of mixed sizes.

use forebay::resident::{Call, Grid, Result};

use super::seconds;
use crate::bench::schema::Row;

/// The device's side: how memory is had is the second argument; the result is how many pieces there were.
pub(super) const TASKS: &str = r"
#include <stdlib.h>
// A pool that was allocated before: 512 bytes, as many as a task holds at a time.
#define HELD 16
struct Pool { unsigned char pieces[HELD][512]; };
FB_DEVICE void *get(Context *c, u64 way, Pool *pool, u32 i, u64 bytes) {
  return way == 0 ? fb_new(c, bytes) : way == 1 ? malloc(bytes) : pool->pieces[i];
}
FB_DEVICE void put(Context *c, u64 way, void *p) {
  if (way == 0) fb_delete(c, p);
  else if (way == 1) free(p);
}
FB_DEVICE u64 random_of(u64 i) { i *= 0x9E3779B97F4A7C15ull; return i >> 40; }

template <u32 N, bool MIXED> FB_DEVICE void pieces(Context *c, const Task *t) {
  static thread_local Pool pool;
  u64 done = 0;
  for (u64 i = t->first; i < t->first + t->count; i++) {
    u32 *held[N];
    for (u32 k = 0; k < N; k++) {
      const u64 bytes = MIXED ? 64 + random_of(i * N + k) % 449 : 64;
      held[k] = (u32 *)get(c, arg(t, 0), &pool, k, bytes);
      if (held[k]) *held[k] = (u32)i + k;
    }
    for (u32 k = 0; k < N; k++) {
      if (held[k] && *held[k] == (u32)i + k) done++;
      put(c, arg(t, 0), held[k]);
    }
  }
  __atomic_fetch_add((u64 *)fb_result(c), done, __ATOMIC_RELAXED);
}
TASK(churn) { pieces<1, false>(c, t); }
TASK(outstanding) { pieces<HELD, false>(c, t); }
TASK(mixed) { pieces<4, true>(c, t); }
";

/// Pieces in each measurement.
const PIECES: u64 = 1 << 20;

pub(super) fn run(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let cases = [
        ("churn", "64 B, freed at once", 1),
        ("outstanding", "64 B, 16 held", 16),
        ("mixed", "64 to 512 B, 4 held", 4),
    ];
    for (name, what, held) in cases {
        let function = grid.function(name)?;
        let rate = |way: u64| -> Result<f64> {
            let mut all = 0;
            let s = seconds(|| {
                let call = Call::new(function).args(&way.to_ne_bytes()).range(0, PIECES / held);
                all = grid.wait(grid.submit(call)?)?.result_as::<u64>();
                Ok(())
            })?;
            assert_eq!(all, PIECES, "{name}: not every piece could be had");
            Ok(PIECES as f64 / s / 1e6)
        };
        let row = Row::new(format!("D, cpu: {what}"), "M pieces/s", Some(rate(0)?));
        rows.push(row.peer("the C library's malloc", Some(rate(1)?)).peer("a pool for each thread", Some(rate(2)?)));
    }
    Ok(())
}
