//! What tasks cost on a GPU, counted where there is none: in instructions, and in an estimate of their time
//! (`STAND_IN_TIMED`). Bounds are far above what it is, and far below what it was when a task took all of a block.

use std::time::Duration;

use forebay::resident::{Builder, Call};

use super::{device, stand_in};

/// Tells the stand-in to count, and where to say what.
const COUNTS: &str = "STAND_IN_TIMED";
/// Tasks of one lane: one that answers, and a chain of which each makes the next and the last one tells how long all took.
const TASKS: &str = "
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
TASK_PER_THREAD(echo) { *(u64 *)fb_result(c) = arg(t, 0) + 1; }
TASK_PER_THREAD(chain) {
  const u64 begun = arg(t, 1) ? arg(t, 1) : fb_cycles();
  const u64 next[2] = {arg(t, 0) - 1, begun};
  if (next[0] == 0 || !fb_follow(c, FN_chain, 0, 1, next, sizeof next)) {
    ((u64 *)fb_result(c))[0] = next[0];
    ((u64 *)fb_result(c))[1] = fb_cycles() - begun;
  }
}
";

/// Runs the test `name` in a process that counts; what that has to say is in its file.
fn again(name: &str) {
    let dir = std::env::temp_dir().join(format!("forebay-counted-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("counts");
    stand_in::again_as_ptx(&[&format!("counted::{name}")], &[(COUNTS, file.to_str().unwrap()), ("STAND_IN_DMA_BUF", "1")]);
    let _ = std::fs::remove_dir_all(dir);
}

/// A task that follows another is the same lane's, without the block.
#[test]
fn a_task_that_follows_another_begins_within_a_thousand_cycles() {
    if std::env::var_os(COUNTS).is_none() {
        return again("a_task_that_follows_another_begins_within_a_thousand_cycles");
    }
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain"]).threads(256).start_on(&d).unwrap();
    let chain = grid.function("chain").unwrap();
    let cycles = |n: u64| {
        let args = [n, 0].map(u64::to_ne_bytes).concat();
        let ticket = grid.submit(Call::new(chain).args(&args)).unwrap();
        let [left, cycles] = grid.wait(ticket).unwrap().result_as::<[u64; 2]>();
        assert_eq!(left, 0);
        cycles
    };
    let (few, many) = (cycles(100), cycles(1100));
    assert!(many < few + 1000 * 1000, "1000 tasks take {} cycles", many - few);
    grid.stop().unwrap();
}

/// A task for one lane that comes while a block waits is run by its first warp alone.
#[test]
fn a_task_for_one_lane_wakes_no_other_warps() {
    if std::env::var_os(COUNTS).is_none() {
        return again("a_task_for_one_lane_wakes_no_other_warps");
    }
    const TRIPS: u64 = 40;
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain"]).threads(256).start_on(&d).unwrap();
    let echo = grid.function("echo").unwrap();
    for i in 0..TRIPS {
        // Until a block waits again.
        std::thread::sleep(Duration::from_millis(3));
        let ticket = grid.submit(Call::new(echo).args(&i.to_ne_bytes())).unwrap();
        assert_eq!(grid.wait(ticket).unwrap().result_as::<u64>(), i + 1);
    }
    grid.stop().unwrap();
    let file = std::env::var_os(COUNTS).unwrap();
    let said = std::fs::read_to_string(file).unwrap();
    let of_grid = said.lines().find(|l| l.starts_with("fb_grid ")).unwrap_or_else(|| panic!("{said}"));
    let others: u64 = of_grid.split(' ').next_back().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    // A block's seven other warps have some eighty instructions each for a task that all of them hear of.
    assert!(others < 200 * TRIPS, "{of_grid}");
}
