//! The resident grid's and the heap's device code under ThreadSanitizer, with random schedules: no task is lost, done twice or
//! torn, no two have the same memory, and all of it comes back.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay::resident::Builder;

/// Far longer than it takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Steps of the code become places where another thread may come in between.
const PRELUDE: &str = "
#include <sched.h>
#include <atomic>
static inline void fb_step() {
  static std::atomic<unsigned> seeds{1};
  static thread_local unsigned x = seeds.fetch_add(0x9E3779B9u) | 1;
  x ^= x << 13; x ^= x >> 17; x ^= x << 5;
  if ((x & 15) == 0) sched_yield();
}
#define FB_STEP fb_step
#define FB_LOCAL 4
#define FB_BATCH 3
";

const TASKS: &str = r"
static unsigned long long args_ignored;
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
FB_DEVICE void count(u64 address, u64 by) { __atomic_fetch_add((u64 *)address, by, __ATOMIC_RELAXED); }
TASK(ones) { count(arg(t, 1), t->count); }
TASK(tree) {
  const u64 depth = arg(t, 0);
  if (depth == 0) { count(arg(t, 1), 1); return; }
  const u64 args[2] = {depth - 1, arg(t, 1)};
  for (u32 i = 0; i < 2; i++)
    if (!fb_spawn(c, FN_tree, 0, 1, args, sizeof args)) count(arg(t, 1), 1ull << (depth - 1));
}
TASK(diamond) {
  const u64 n = arg(t, 0);
  const u64 last[2] = {arg(t, 1), n};
  const u32 end = fb_node(c, (u32)n, FN_diamond_end, 0, 1, last, sizeof last);
  if (end == FB_NONE) { fb_fail(c->grid, c->root, FB_FIRST_OWN); return; }
  for (u64 i = 0; i < n; i++) {
    const u64 args[2] = {arg(t, 1), end};
    if (!fb_spawn(c, FN_diamond_side, i, 1, args, sizeof args)) { count(arg(t, 1), 1); fb_release(c, end); }
  }
}
TASK(diamond_side) { count(arg(t, 0), 1); fb_release(c, (u32)arg(t, 1)); }
TASK(diamond_end) { *(u64 *)fb_result(c) = __atomic_load_n((u64 *)arg(t, 0), __ATOMIC_RELAXED) == arg(t, 1); }
";

fn build(dir: &Path, text: &str, sanitizer: &str) -> Option<std::path::PathBuf> {
    let (source, out) = (dir.join("source.cpp"), dir.join(format!("races-{sanitizer}")));
    std::fs::write(&source, format!("{PRELUDE}{text}")).ok()?;
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

fn all(name: &str, text: &str, seeds: [u32; 3]) {
    let dir = std::env::temp_dir().join(format!("forebay-races-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (sanitizer, seeds) in ["", "thread", "undefined"].into_iter().zip(seeds) {
        match build(&dir, text, sanitizer) {
            None => eprintln!("skipped: g++ with {sanitizer:?} is not here"),
            Some(program) => run(&program, 1, seeds).unwrap_or_else(|e| panic!("{sanitizer:?}: {e}")),
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn no_task_is_lost_done_twice_or_torn() {
    let text = Builder::new(TASKS).functions(["ones", "tree", "diamond", "diamond_side", "diamond_end"]).text();
    all("grid", &format!("{text}\n{}", include_str!("grid.cpp")), [400, 60, 60]);
}

/// By the header that any program may include.
#[test]
fn no_two_have_the_same_memory_and_all_of_it_comes_back() {
    all("heap", &format!("#include \"forebay_heap.cuh\"\n{}", include_str!("heap.cpp")), [1500, 100, 100]);
}
