//! What tasks cost on a GPU, counted where there is none: in instructions, and in an estimate of their time
//! (`STAND_IN_TIMED`). Bounds are far above what it is, and far below what it was when a task took all of a block.

use std::collections::VecDeque;
use std::time::Duration;

use forebay::resident::{Builder, Call};

use super::{device, stand_in};

/// Tells the stand-in to count, and where to say what.
const COUNTS: &str = "STAND_IN_TIMED";
/// Tasks of one lane: one that answers, and chains of which each makes the next, for itself or for another block, and the last one
/// tells how long all took, and how many began in a block other than the one before.
const TASKS: &str = "
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
TASK_PER_THREAD(echo) { *(u64 *)fb_result(c) = arg(t, 0) + 1; }
TASK_PER_THREAD(begun) { *(u64 *)fb_result(c) = fb_cycles(); }
TASK_PER_THREAD(longer) {
  const u64 begun = fb_cycles();
  while (fb_cycles() - begun < 30000) {}
  ((u64 *)fb_result(c))[0] = begun;
  ((u64 *)fb_result(c))[1] = c->block;
}
TASK_PER_THREAD(chain) {
  const u64 begun = arg(t, 1) ? arg(t, 1) : fb_cycles();
  const u64 next[2] = {arg(t, 0) - 1, begun};
  if (next[0] == 0 || !fb_follow(c, FN_chain, 0, 1, next, sizeof next)) {
    ((u64 *)fb_result(c))[0] = next[0];
    ((u64 *)fb_result(c))[1] = fb_cycles() - begun;
  }
}
TASK_PER_THREAD(hop) {
  const u64 begun = arg(t, 1) ? arg(t, 1) : fb_cycles();
  const u64 next[4] = {arg(t, 0) - 1, begun, c->block, arg(t, 3) + (arg(t, 2) != c->block)};
  if (next[0] == 0 || !fb_spawn(c, FN_hop, 0, 1, next, sizeof next)) {
    ((u64 *)fb_result(c))[0] = next[0];
    ((u64 *)fb_result(c))[1] = fb_cycles() - begun;
    ((u64 *)fb_result(c))[2] = next[3];
  }
}
";

/// Runs the test `name` in a process that counts, on a device with so many multiprocessors; what that has to say is in its file.
fn again(name: &str, units: &str) {
    let dir = std::env::temp_dir().join(format!("forebay-counted-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("counts");
    let variables = [(COUNTS, file.to_str().unwrap()), ("STAND_IN_DMA_BUF", "1"), ("STAND_IN_UNITS", units)];
    stand_in::again_as_ptx(&[&format!("counted::{name}")], &variables);
    let _ = std::fs::remove_dir_all(dir);
}

/// A task that follows another is the same lane's, without the block.
#[test]
fn a_task_that_follows_another_begins_within_a_thousand_cycles() {
    if std::env::var_os(COUNTS).is_none() {
        return again("a_task_that_follows_another_begins_within_a_thousand_cycles", "2");
    }
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain", "hop"]).threads(256).start_on(&d).unwrap();
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

/// A task for a block that waits goes where only that one looks, and begins there at once.
#[test]
fn a_task_for_another_block_begins_within_three_and_a_half_thousand_cycles() {
    if std::env::var_os(COUNTS).is_none() {
        return again("a_task_for_another_block_begins_within_three_and_a_half_thousand_cycles", "6");
    }
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain", "hop"]).threads(256).start_on(&d).unwrap();
    let hop = grid.function("hop").unwrap();
    let cycles = |n: u64| {
        // Until the blocks wait again.
        std::thread::sleep(Duration::from_millis(20));
        let args = [n, 0, u64::MAX, 0].map(u64::to_ne_bytes).concat();
        let ticket = grid.submit(Call::new(hop).args(&args)).unwrap();
        let [left, cycles, hops] = grid.wait(ticket).unwrap().result_as::<[u64; 3]>();
        assert_eq!(left, 0);
        // The first ones come before the block has seen that others wait.
        assert!(hops + 40 > n, "{hops} of {n} went to another block");
        cycles
    };
    let (few, many) = (cycles(100), cycles(600));
    println!("a hop takes {} cycles", (many - few) / 500);
    assert!(many < few + 500 * 3500, "500 tasks take {} cycles", many - few);
    grid.stop().unwrap();
}

/// A task for one lane that comes while a block waits is run by its first warp alone.
#[test]
fn a_task_for_one_lane_wakes_no_other_warps() {
    if std::env::var_os(COUNTS).is_none() {
        return again("a_task_for_one_lane_wakes_no_other_warps", "2");
    }
    const TRIPS: u64 = 40;
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain", "hop"]).threads(256).start_on(&d).unwrap();
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

/// Where many tasks wait that were submitted one by one, blocks take as many as they can run at a time. Sixteen at a time, as many as
/// a look shows, each takes 230 cycles.
#[test]
fn tasks_that_come_one_by_one_are_taken_many_at_a_time() {
    if std::env::var_os(COUNTS).is_none() {
        return again("tasks_that_come_one_by_one_are_taken_many_at_a_time", "16");
    }
    const ALL: usize = 8000;
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain", "hop", "begun"]).ring(4096).start_on(&d).unwrap();
    let call = Call::new(grid.function("begun").unwrap());
    let (mut begun, mut on_their_way) = (Vec::new(), VecDeque::new());
    for _ in 0..ALL {
        if on_their_way.len() == 4000
            && let Some(ticket) = on_their_way.pop_front()
        {
            begun.push(grid.wait(ticket).unwrap().result_as::<u64>());
        }
        on_their_way.push_back(grid.submit(call).unwrap());
    }
    begun.extend(on_their_way.into_iter().map(|t| grid.wait(t).unwrap().result_as::<u64>()));
    begun.sort_unstable();
    let each = (begun[ALL * 3 / 4] - begun[ALL / 4]) as f64 / (ALL / 2) as f64;
    println!("a task each {each} cycles");
    assert!(each < 80.0, "a task each {each} cycles");
    grid.stop().unwrap();
}

/// Those that take long are for all blocks: none takes more at a time than a look shows.
#[test]
fn tasks_that_take_long_are_not_taken_many_at_a_time() {
    if std::env::var_os(COUNTS).is_none() {
        return again("tasks_that_take_long_are_not_taken_many_at_a_time", "4");
    }
    let d = device().expect("the stand-in");
    let mut grid = Builder::new(TASKS).functions(["echo", "chain", "hop", "longer"]).ring(1024).start_on(&d).unwrap();
    let call = Call::new(grid.function("longer").unwrap());
    let tickets: Vec<_> = (0..600).map(|_| grid.submit(call).unwrap()).collect();
    let mut begun: Vec<[u64; 2]> = tickets.into_iter().map(|t| grid.wait(t).unwrap().result_as::<[u64; 2]>()).collect();
    begun.sort_unstable_by_key(|[at, block]| (*block, *at));
    // Those that began in a block before the first of them was done.
    let most = (0..begun.len())
        .map(|i| begun[i..].iter().take_while(|b| b[1] == begun[i][1] && b[0] < begun[i][0] + 20_000).count())
        .max();
    assert!(most <= Some(16), "{most:?}");
    grid.stop().unwrap();
}

/// A warp whose lanes hold many pieces each goes from one word of the heap to the next, without a search for each.
#[test]
fn a_heap_of_which_much_is_held_is_not_searched_for_each_piece() {
    use forebay::hal::{Arg, Direction, Geometry, Method, Source};
    if std::env::var_os(COUNTS).is_none() {
        return again("a_heap_of_which_much_is_held_is_not_searched_for_each_piece", "8");
    }
    const KERNEL: &str = "
        extern \"C\" __global__ void hold(Heap *h, u32 rounds, u64 *cycles) {
          const u64 begun = fb_cycles();
          for (u32 round = 0; round < rounds; round++) {
            void *held[16];
            for (u32 k = 0; k < 16; k++) held[k] = fb_malloc(h, 64);
            for (u32 k = 0; k < 16; k++) fb_free(h, held[k]);
          }
          if (threadIdx.x == 0) cycles[blockIdx.x] = fb_cycles() - begun;
        }
        TASK(nothing) {}";
    const BLOCKS: usize = 8;
    let d = device().expect("the stand-in");
    let source = Source::CudaCpp(Builder::new(KERNEL).functions(["nothing"]).text().into());
    let (setup, hold) = (d.compile(&source, "fb_heap_setup").unwrap(), d.compile(&source, "hold").unwrap());
    let mut q = d.queue().unwrap();
    let bytes = 16 << 20;
    let (memory, cycles) = (d.alloc(bytes).unwrap(), d.alloc(8 * BLOCKS).unwrap());
    let units = d.info().compute_units;
    let args = [Arg::Buffer(&memory), Arg::U64(bytes as u64), Arg::U32(units), Arg::U32(64), Arg::Buffer(&cycles)];
    q.launch(&setup, &Geometry::linear(512).with_group(256, 1, 1), &args).unwrap();
    let heap = memory.address().unwrap().next_multiple_of(128);
    let mut took = |rounds: u32| {
        let args = [Arg::U64(heap), Arg::U32(rounds), Arg::Buffer(&cycles)];
        q.launch(&hold, &Geometry::linear(256 * BLOCKS).with_group(256, 1, 1), &args).unwrap();
        let mut each = [0u64; BLOCKS];
        // SAFETY: awaited here.
        unsafe {
            let to = each.as_mut_ptr().cast();
            q.transfer(Method::Engine, Direction::ToHost, &cycles, 0, to, 8 * BLOCKS).unwrap();
        }
        let fence = q.fence().unwrap();
        q.wait(fence).unwrap();
        each.into_iter().max().unwrap_or(0)
    };
    took(2);
    let each = (took(6) - took(2)) / 4 / 16;
    assert!(each < 5000, "a piece, had and given back, takes {each} cycles");
}
