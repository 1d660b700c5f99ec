//! The resident grid's and the heap's device code with random schedules: no task is lost, done twice or torn, no two have the
//! same memory, and all of it comes back. Twice: with threads, under ThreadSanitizer, and with threads by turns (turns.cpp),
//! which finds what takes a rare order of steps but no weak order of memory.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay::resident::Builder;

/// Far longer than it takes, on a machine that has other things to do as well.
const PATIENCE: Duration = Duration::from_secs(300);

/// What steps of the code are: places where another thread may come in between, or where it is drawn who goes on.
const THREADS: &str = include_str!("threads.cpp");
const TURNS: &str = include_str!("turns.cpp");

/// A block is a thread, as on the CPU.
const ONE_LANE: &str = "
#define FB_SEES_URGENT 1
#define FB_SEES 1
#define FB_MANY 5
#define FB_AT_A_TIME 5
#define FB_LONG ~0ull
#define FB_LOW 1
#define FB_KEEPS false
#define FB_SEES_WHOLE false
";

/// The same, but it keeps rings while it waits, and sees slots whole and many of them, as a GPU's does.
const KEEPER: &str = "
#define FB_SEES_URGENT 8
#define FB_SEES 9
#define FB_MANY 12
#define FB_AT_A_TIME 12
#define FB_LONG ~0ull
#define FB_LOW 1
#define FB_KEEPS true
#define FB_SEES_WHOLE true
";

const SIX_LANES: &str = include_str!("lanes.cpp");

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

fn build(dir: &Path, text: &str, sanitizer: &str) -> Option<std::path::PathBuf> {
    let (source, out) = (dir.join("source.cpp"), dir.join(format!("races-{sanitizer}")));
    std::fs::write(&source, text).ok()?;
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
    // Read as it comes: who has much to say would wait for that.
    let mut said = child.stderr.take();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = said.as_mut().map(|s| s.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let begun = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            let text = reader.join().unwrap_or_default();
            return Err(format!("not done after {PATIENCE:?}: somebody waits for what never comes\n{text}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = child.wait().map_err(|e| e.to_string())?;
    let text = reader.join().unwrap_or_default();
    // Not every kernel's address space suits the sanitizer.
    if text.contains("unexpected memory mapping") {
        eprintln!("skipped: ThreadSanitizer does not run here");
        return Ok(());
    }
    if status.success() { Ok(()) } else { Err(text) }
}

/// So many seeds without a sanitizer, with ThreadSanitizer, and with that for undefined behaviour; without those that have none.
fn all(name: &str, parts: &[&str], seeds: [u32; 3]) {
    let dir = std::env::temp_dir().join(format!("forebay-races-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (sanitizer, seeds) in ["", "thread", "undefined"].into_iter().zip(seeds).filter(|s| s.1 > 0) {
        match build(&dir, &parts.join("\n"), sanitizer) {
            None => eprintln!("skipped: g++ with {sanitizer:?} is not here"),
            Some(program) => run(&program, 1, seeds).unwrap_or_else(|e| panic!("{sanitizer:?}: {e}")),
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

const HEAP: &str = "#include \"forebay_heap.cuh\"";
const ARENA: &str = include_str!("arena.cpp");

#[test]
fn no_task_is_lost_done_twice_or_torn() {
    all("grid", &[THREADS, ONE_LANE, &grid()], [400, 60, 60]);
}

#[test]
fn no_task_is_lost_whoever_is_away_for_how_long() {
    all("grid-turns", &[TURNS, ONE_LANE, &grid()], [2000, 0, 200]);
}

/// With rings that a block keeps, and slots of which halves appear at different times.
#[test]
fn no_task_is_lost_torn_or_left_to_a_keeper_that_is_away() {
    all("keeper", &[THREADS, KEEPER, &grid()], [200, 30, 30]);
    all("keeper-turns", &[TURNS, KEEPER, &grid()], [2000, 0, 100]);
}

/// What a GPU does with the lanes of a block, with threads for them.
#[test]
fn lanes_of_a_block_take_make_and_end_tasks_at_the_same_time() {
    all("lanes", &[THREADS, SIX_LANES, &grid()], [80, 25, 10]);
}

/// The benchmark's search, of which a block of one lane goes only half the ways.
#[test]
fn lanes_of_a_block_search_a_graph_together() {
    let text = include_str!("../../../forebay-cli/src/bench/resident/tasks.cu");
    let functions = ["echo", "chain", "hop", "work", "tree", "softmax", "sweep", "many", "one_level", "level"];
    let tasks = Builder::new(text).functions(functions);
    all("search", &[THREADS, SIX_LANES, SMALL_GRAPHS, &with_setup(&tasks, include_str!("search.cpp"))], [200, 50, 10]);
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
    all("heap", &[THREADS, HEAP, ARENA, include_str!("heap.cpp")], [1500, 100, 100]);
}

#[test]
fn what_is_free_can_be_had_whoever_is_away_for_how_long() {
    all("heap-turns", &[TURNS, HEAP, ARENA, include_str!("heap_turns.cpp")], [40000, 0, 4000]);
}

/// What lanes of a warp do together, with threads for them.
#[test]
fn lanes_of_a_warp_allocate_and_free_together() {
    all("heap-lanes", &[THREADS, SIX_LANES, HEAP, ARENA, include_str!("heap.cpp")], [300, 40, 40]);
}
