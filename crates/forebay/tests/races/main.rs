//! The resident grid's and the heap's device code under ThreadSanitizer, with random schedules: no task is lost, done twice or
//! torn, no two have the same memory, and all of it comes back.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay::resident::Builder;

/// Far longer than it takes, on a machine that has other things to do as well.
const PATIENCE: Duration = Duration::from_secs(300);

/// Steps of the code become places where another thread may come in between.
const PRELUDE: &str = "
#include <sched.h>
#include <unistd.h>
#include <atomic>
// A test may have a thread be away for so long that others get far, µs.
static thread_local unsigned away;
static inline void fb_step() {
  static std::atomic<unsigned> seeds{1};
  static thread_local unsigned x = seeds.fetch_add(0x9E3779B9u) | 1;
  x ^= x << 13; x ^= x >> 17; x ^= x << 5;
  if ((x & 15) == 0 && away) usleep(away);
  else if ((x & 15) == 0) sched_yield();
}
#define FB_STEP fb_step
#define FB_LOCAL 4
#define FB_TAKES 3
";

/// A block is a thread.
const ONE_LANE: &str = "
#define FB_SEES_URGENT 1
#define FB_SEES 1
#define FB_LOW 1
";

/// A block is six threads, in warps of three.
const SIX_LANES: &str = "
#define FB_SEES_URGENT 2
#define FB_SEES 3
#define FB_LOW 2
#define FB_LANES 6
#define FB_WARP 3
// Where lanes wait for each other. Only a barrier orders what they do elsewhere: what they tell each other does not, and then
// the sanitizer must not believe that it does.
struct Meeting {
  std::atomic<unsigned> here{0}, round{0};
  void meet(unsigned n, std::memory_order come = std::memory_order_acq_rel, std::memory_order go = std::memory_order_acquire) {
    const unsigned is = round.load(std::memory_order_relaxed);
    if (here.fetch_add(1, come) + 1 == n) {
      here.store(0, std::memory_order_relaxed);
      round.fetch_add(1, come);
    } else {
      while (round.load(go) == is) sched_yield();
    }
  }
  void pass(unsigned n) { meet(n, std::memory_order_relaxed, std::memory_order_relaxed); }
};
struct Meetings {
  Meeting all, warp[FB_LANES / FB_WARP];
  std::atomic<unsigned long long> said[FB_LANES];
  void say(unsigned lane, unsigned long long v) { said[lane].store(v, std::memory_order_relaxed); }
  unsigned long long said_by(unsigned lane) { return said[lane].load(std::memory_order_relaxed); }
};
static thread_local Meetings *meetings;
static thread_local unsigned lane;
static inline unsigned fb_lane() { return lane; }
static inline unsigned fb_lanes() { return FB_LANES; }
static inline unsigned fb_in_crew() { return lane; }
static inline unsigned fb_warp() { return lane / FB_WARP; }
static inline unsigned fb_in_warp() { return lane % FB_WARP; }
static inline void fb_barrier() { meetings->all.meet(FB_LANES); }
static inline void fb_together() { meetings->warp[lane / FB_WARP].meet(FB_WARP); }
// Without an order for anything else.
static inline void fb_pass(unsigned lanes) { meetings->warp[lane / FB_WARP].pass(lanes); }
static inline unsigned fb_lane_of(unsigned i) { return lane / FB_WARP * FB_WARP + i; }
static inline unsigned long long fb_tell64(unsigned long long v, unsigned from) {
  meetings->say(lane, v);
  fb_pass(FB_WARP);
  const unsigned long long told = meetings->said_by(fb_lane_of(from));
  fb_pass(FB_WARP);
  return told;
}
static inline unsigned fb_tell(unsigned v, unsigned from) { return (unsigned)fb_tell64(v, from); }
static inline unsigned fb_votes(bool yes) {
  unsigned votes = 0;
  for (unsigned i = 0; i < FB_WARP; i++) votes |= (unsigned)fb_tell64(yes, i) << i;
  return votes;
}
// The lanes that call something together: a test says which of a warp.
static thread_local unsigned together = (1u << FB_WARP) - 1;
static inline void fb_meet(unsigned present) { meetings->warp[lane / FB_WARP].meet(__builtin_popcount(present)); }
static inline unsigned fb_present() { return together; }
static inline unsigned fb_alike(unsigned present, unsigned v) {
  const unsigned lanes = __builtin_popcount(present);
  unsigned alike = 0;
  meetings->say(lane, v);
  fb_pass(lanes);
  for (unsigned i = 0; i < FB_WARP; i++) if (present >> i & 1) alike |= (meetings->said_by(fb_lane_of(i)) == v) << i;
  fb_pass(lanes);
  return alike;
}
static inline bool fb_all_alike(unsigned present, unsigned v) { return fb_alike(present, v) == present; }
static inline unsigned long long fb_from(unsigned present, unsigned long long v, unsigned from) {
  const unsigned lanes = __builtin_popcount(present);
  meetings->say(lane, v);
  fb_pass(lanes);
  const unsigned long long told = meetings->said_by(fb_lane_of(from));
  fb_pass(lanes);
  return told;
}
static inline unsigned fb_union(unsigned present, unsigned bits) {
  unsigned all = 0;
  for (unsigned i = 0; i < FB_WARP; i++) if (present >> i & 1) all |= (unsigned)fb_from(present, bits, i);
  return all;
}
static inline bool fb_some_say(unsigned present, bool yes) { return fb_union(present, yes) != 0; }
static inline unsigned fb_here_add(unsigned *p, unsigned v) { fb_step(); return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline void fb_here_min(unsigned *p, unsigned v) {
  unsigned is = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < is && !__atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
";

/// For graphs of a hundred vertices.
const SMALL_GRAPHS: &str = "
#define FEW 8
#define MANY 4
#define TURNS 3
static thread_local void *shared_by_lanes;
#define SHARED(type, name) static_assert(sizeof(type) <= 256); type &name = *(type *)shared_by_lanes
";

const TASKS: &str = r"
static unsigned long long args_ignored;
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
FB_DEVICE void count(u64 address, u64 by) { __atomic_fetch_add((u64 *)address, by, __ATOMIC_RELAXED); }
FB_DEVICE void grow(Context *c, const Task *t, u32 function) {
  const u64 depth = arg(t, 0);
  if (depth == 0) { count(arg(t, 1), 1); return; }
  const u64 args[2] = {depth - 1, arg(t, 1)};
  if (!fb_spawn(c, function, 0, 1, args, sizeof args)) count(arg(t, 1), 1ull << (depth - 1));
  if (!fb_follow(c, function, 0, 1, args, sizeof args)) count(arg(t, 1), 1ull << (depth - 1));
}
// The same by all lanes of a block, by a warp, by a lane.
TASK(tree) { if (fb_lane() == 0) grow(c, t, FN_tree); }
TASK_PER_WARP(tree_by_warp) { if (fb_in_warp() == 0) grow(c, t, FN_tree_by_warp); }
TASK_PER_THREAD(tree_by_thread) { grow(c, t, FN_tree_by_thread); }
// Lanes that have an item each of one task, and make more.
TASK_PER_THREAD(ones) {
  const u64 args[2] = {0, arg(t, 1)};
  if (i % 3 != 0 || !fb_spawn(c, FN_tree_by_thread, 0, 1, args, sizeof args)) count(arg(t, 1), 1);
}
TASK(diamond) {
  if (fb_lane() != 0) return;
  const u64 n = arg(t, 0);
  const u64 last[2] = {arg(t, 1), n};
  const u32 end = fb_node(c, (u32)n, FN_diamond_end, 0, 1, last, sizeof last);
  if (end == FB_NONE) { fb_fail(c->grid, c->root, FB_FIRST_OWN); return; }
  for (u64 i = 0; i < n; i++) {
    const u64 args[2] = {arg(t, 1), end};
    if (!fb_spawn(c, FN_diamond_side, i, 1, args, sizeof args)) { count(arg(t, 1), 1); fb_release(c, end); }
  }
}
TASK_PER_THREAD(diamond_side) { count(arg(t, 0), 1); fb_release(c, (u32)arg(t, 1)); }
TASK(diamond_end) { if (fb_lane() == 0) *(u64 *)fb_result(c) = __atomic_load_n((u64 *)arg(t, 0), __ATOMIC_RELAXED) == arg(t, 1); }
";

fn build(dir: &Path, prelude: &str, text: &str, sanitizer: &str) -> Option<std::path::PathBuf> {
    let (source, out) = (dir.join("source.cpp"), dir.join(format!("races-{sanitizer}")));
    std::fs::write(&source, format!("{PRELUDE}{prelude}{text}")).ok()?;
    let mut command = Command::new("g++");
    command.args([
        "-std=c++17",
        "-O1",
        "-g",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Wno-unused-function",
        "-Wno-unused-parameter",
        "-I",
    ]);
    // In the checkout, or in the bundle that the tests are in.
    let places = [concat!(env!("CARGO_MANIFEST_DIR"), "/../../device"), "device"];
    command.arg(places.into_iter().find(|p| Path::new(p).exists()).unwrap_or("."));
    if !sanitizer.is_empty() {
        command.arg(format!("-fsanitize={sanitizer}"));
    }
    let built = command.arg(&source).arg("-o").arg(&out).output().ok()?;
    let log = String::from_utf8_lossy(&built.stderr);
    // Only a missing sanitizer is no fault of ours.
    if !built.status.success() && log.contains("cannot find") {
        return None;
    }
    assert!(built.status.success() && !log.contains("warning"), "{log}");
    Some(out)
}

fn run(program: &Path, first: u32, seeds: u32) -> Result<(), String> {
    let mut child = Command::new(program)
        .args([first.to_string(), seeds.to_string()])
        .env("TSAN_OPTIONS", "halt_on_error=1 second_deadlock_stack=1")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let begun = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("not done after {PATIENCE:?}: somebody waits for what never comes"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = child.wait_with_output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    // Not every kernel's address space suits the sanitizer.
    if text.contains("unexpected memory mapping") {
        eprintln!("skipped: ThreadSanitizer does not run here");
        return Ok(());
    }
    if out.status.success() { Ok(()) } else { Err(text) }
}

fn all(name: &str, prelude: &str, text: &str, seeds: [u32; 3]) {
    let dir = std::env::temp_dir().join(format!("forebay-races-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (sanitizer, seeds) in ["", "thread", "undefined"].into_iter().zip(seeds) {
        match build(&dir, prelude, text, sanitizer) {
            None => eprintln!("skipped: g++ with {sanitizer:?} is not here"),
            Some(program) => run(&program, 1, seeds).unwrap_or_else(|e| panic!("{sanitizer:?}: {e}")),
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn no_task_is_lost_done_twice_or_torn() {
    all("grid", ONE_LANE, &grid(), [400, 60, 60]);
}

/// What a GPU does with the lanes of a block, with threads for them.
#[test]
fn lanes_of_a_block_take_make_and_end_tasks_at_the_same_time() {
    all("lanes", SIX_LANES, &grid(), [80, 25, 10]);
}

/// The benchmark's search, of which a block of one lane goes only half the ways.
#[test]
fn lanes_of_a_block_search_a_graph_together() {
    let text = include_str!("../../../forebay-cli/src/bench/resident/tasks.cu");
    let functions = ["echo", "chain", "hop", "work", "tree", "softmax", "sweep", "many", "one_level", "level"];
    let tasks = Builder::new(text).functions(functions);
    let prelude = format!("{SIX_LANES}{SMALL_GRAPHS}");
    all("search", &prelude, &with_setup(&tasks, include_str!("search.cpp")), [200, 50, 10]);
}

fn grid() -> String {
    let trees = ["tree", "tree_by_warp", "tree_by_thread"];
    let tasks = Builder::new(TASKS).functions(trees).functions(["ones", "diamond", "diamond_side", "diamond_end"]);
    with_setup(&tasks, include_str!("grid.cpp"))
}

fn with_setup(tasks: &Builder, test: &str) -> String {
    format!("{}\n{}\n{test}", tasks.text(), include_str!("setup.cpp"))
}

/// By the header that any program may include.
#[test]
fn no_two_have_the_same_memory_and_all_of_it_comes_back() {
    all("heap", "", &heap(), [1500, 100, 100]);
}

/// What lanes of a warp do together, with threads for them.
#[test]
fn lanes_of_a_warp_allocate_and_free_together() {
    all("heap-lanes", SIX_LANES, &heap(), [300, 40, 40]);
}

fn heap() -> String {
    format!("#include \"forebay_heap.cuh\"\n{}", include_str!("heap.cpp"))
}
