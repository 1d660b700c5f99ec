"""The resident grid, on the CPU, which needs a C++ compiler; on a GPU where FOREBAY_TEST_GRID says so."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import unittest
from array import array

import forebay

TASKS = r"""
TASK_PER_THREAD(square) { *(u64 *)fb_result(c) = ((const u64 *)t->args)[0] * ((const u64 *)t->args)[0]; }
// Two tasks of one less each, down to the leaves, which are counted in the result.
TASK_PER_THREAD(tree) {
  const u64 depth = ((const u64 *)t->args)[0];
  if (depth == 0) { fb_add64((u64 *)fb_result(c), 1); return; }
  const u64 child = depth - 1;
  for (u32 k = 0; k < 2; k++)
    if (!fb_spawn(c, FN_tree, 0, 1, &child, sizeof child)) fb_add64((u64 *)fb_result(c), 1ull << child);
}
// Each item of a range.
TASK_PER_THREAD(add) { fb_add64((u64 *)fb_result(c), i); }
TASK(endless) { while (fb_burn(c, 1)) {} }
// Says that it has begun, and waits for a word of the host's.
TASK(deaf) {
  u32 *words = (u32 *)((const u64 *)t->args)[0];
  if (fb_lane() == 0) fb_store_sys(words + 1, 1);
  while (!fb_load_sys(words)) {}
}
TASK(fails) { if (fb_lane() == 0) fb_fail(c->grid, c->root, FB_FIRST_OWN); }
TASK(keep) { if (fb_lane() == 0) *(void **)fb_result(c) = fb_new(c, 1000); }
// y = 2 x of a graph's task.
TASK_PER_THREAD(twice) { ((u32 *)fb_span(t, 1).data)[i] = 2 * ((const u32 *)fb_span(t, 0).data)[i]; }
"""
FUNCTIONS = ["square", "tree", "add", "endless", "deaf", "fails", "keep", "twice"]


def number(result):
    return struct.unpack_from("Q", result)[0]


def word(n):
    return struct.pack("Q", n)


DEVICE = os.environ.get("FOREBAY_TEST_GRID", "cpu")


class Gate:
    """What a task waits for."""

    def __init__(self):
        self.memory = forebay.Engine(DEVICE).pinned(8)
        self.words = (ctypes.c_uint32 * 2).from_buffer(self.memory)

    def submit_to(self, grid):
        ticket = grid.submit("deaf", word(ctypes.addressof(self.words)))
        until = time.monotonic() + 30
        while not self.words[1] and time.monotonic() < until:
            time.sleep(0.001)
        return ticket

    def open(self):
        self.words[0] = 1


def start(**more):
    try:
        return forebay.Grid(TASKS, FUNCTIONS, DEVICE, **more)
    except RuntimeError as e:
        if "compiler" in str(e):
            raise unittest.SkipTest(str(e)) from None
        raise


class Grids(unittest.TestCase):
    def test_tasks_answer_make_others_and_work_on_ranges(self):
        with start(blocks=2) as grid:
            self.assertEqual(grid.blocks, 2)
            tickets = [grid.submit("square", word(n)) for n in range(100)]
            self.assertEqual([number(t.wait()) for t in tickets], [n * n for n in range(100)])
            self.assertEqual(number(grid.submit(grid.function("tree"), array("Q", [7])).wait(timeout=30)), 128)
            # Urgent ones, and ranges, of no item, too.
            for first, count in [(0, 10_000), (5, 3), (9, 0)]:
                t = grid.submit("add", first=first, count=count, urgent=count == 3)
                self.assertEqual(number(t.wait()), sum(range(first, first + count)))
            last = grid.submit("tree", word(10))
        # The end of it has waited for that.
        self.assertTrue(last.done())
        self.assertEqual(number(last.wait()), 1024)
        with self.assertRaisesRegex(ValueError, "handed out"):
            last.wait()
        for late in (lambda: grid.submit("square"), lambda: grid.blocks, grid.drain, grid.stop):
            with self.assertRaises(forebay.Closed):
                late()

    def test_many_are_submitted_together(self):
        with start(blocks=1) as grid:
            tree = grid.function("tree")
            tickets = grid.submit_all([(tree, word(3))] * 1500 + [("add", None)] * 1000)
            self.assertEqual(len(tickets), 3)
            self.assertEqual(sum(number(t.wait()) for t in tickets), 1500 * 8)
            self.assertEqual(grid.submit_all([]), [])
            # None of them is, when one is wrong.
            with self.assertRaisesRegex(ValueError, "no function \"none\""):
                grid.submit_all([(tree, word(3)), ("none", None)])

    def test_mistakes_are_told(self):
        for wrong in (dict(blocks=0), dict(ring=3), dict(threads=33)):
            with self.assertRaisesRegex(ValueError, "is allowed"):
                start(**wrong)
        with self.assertRaisesRegex(RuntimeError, "(?s)do not compile.*nonsense"):
            start() and forebay.Grid("TASK(f) { nonsense; }", ["f"], "cpu")
        with self.assertRaises(ValueError):
            forebay.Grid(TASKS, ["not a name"], "cpu")
        with self.assertRaises(ValueError):
            forebay.Grid(TASKS, FUNCTIONS, "toaster")
        with start(blocks=1) as grid:
            for bad in ("sqare", 99):
                with self.assertRaisesRegex(ValueError, "no function"):
                    grid.submit(bad)
            for bad in (-1, 1.5, None):
                with self.assertRaises((TypeError, OverflowError)):
                    grid.submit(bad)
            with self.assertRaisesRegex(ValueError, "negative"):
                grid.submit("square", word(1), timeout=-1)
            with self.assertRaisesRegex(ValueError, "40 bytes of arguments"):
                grid.submit("square", bytes(40))
            with self.assertRaisesRegex(RuntimeError, "\"fails\" failed with status"):
                grid.submit("fails").wait()
            with self.assertRaisesRegex(RuntimeError, "fuel"):
                grid.submit("endless", fuel=10).wait()
            self.assertIsNone(grid.heap())

    def test_what_is_allocated_is_seen(self):
        with start(blocks=1, heap=1 << 20) as grid:
            self.assertEqual(grid.heap()["slots"], 0)
            self.assertGreater(number(grid.submit("keep").wait()), 0)
            heap = grid.heap()
            self.assertGreaterEqual(heap["slots"], 1000)
            self.assertEqual(heap["refused"], 0)

    def interrupted(self, wait):
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            wait()
            # A signal that came when it was over ends nothing else.
            timer.join()
        timer.join()

    def test_whatever_waits_ends(self):
        gate = Gate()
        grid = start(blocks=1, ring=2)
        deaf = gate.submit_to(grid)
        for t in (0, 0.05):
            with self.assertRaisesRegex(TimeoutError, "\"deaf\" is not done"):
                deaf.wait(timeout=t)
        self.assertFalse(deaf.done())
        behind = grid.submit("square", word(3))
        for t in (0, 0.05):
            with self.assertRaisesRegex(TimeoutError, "the ring is full"):
                grid.submit("square", word(2), timeout=t)
        # Of those that are submitted together two slots are taken, and there is no third one.
        together = [("square", word(1))] * 3000
        with self.assertRaisesRegex(TimeoutError, "full"):
            grid.submit_all(together, urgent=True, timeout=0)
        self.interrupted(deaf.wait)
        self.interrupted(lambda: grid.submit("square", word(2)))
        self.interrupted(lambda: grid.submit_all(together, urgent=True))
        for t in (0, 0.05):
            with self.assertRaisesRegex(TimeoutError, "deaf"):
                grid.drain(timeout=t)
        self.interrupted(grid.drain)
        # It ends, if it may take as long as it likes.
        with self.assertRaises(forebay.Closed):
            grid.submit("square", word(2), urgent=True)
        # Others run meanwhile.
        threading.Timer(0.3, gate.open).start()
        grid.drain()
        self.assertEqual([number(t.wait()) for t in (deaf, behind)], [0, 9])

    def test_what_is_stopped_or_fails_does_not_wait_for_what_was_not_begun(self):
        gate = Gate()
        grid = start(blocks=1)
        tasks = [gate.submit_to(grid), grid.submit("square", word(3))]
        with self.assertRaises(TimeoutError):
            grid.stop(timeout=0.05)
        gate.open()
        grid.stop()
        tasks[0].wait()
        with self.assertRaises(forebay.Closed):
            tasks[1].wait()
        gate = Gate()
        with self.assertRaisesRegex(KeyError, "mine"), start(blocks=1) as grid:
            tasks = [gate.submit_to(grid), grid.submit("square", word(3))]
            # Within the second that is given to tasks that run.
            threading.Timer(0.2, gate.open).start()
            raise KeyError("mine")
        with self.assertRaises(forebay.Closed):
            tasks[1].wait()

    def test_a_program_ends_its_grids(self):
        start(blocks=1).stop()
        for rest in ("", "raise SystemExit(3)", "os.fork() or os._exit(0); os.wait()"):
            # In a reference to itself, which nobody lets go of; a task that never ends is left behind after a second.
            program = f"""
import forebay, os
grid = forebay.Grid({TASKS!r}, {FUNCTIONS!r}, {DEVICE!r}, blocks=1)
grid.submit("endless")
kept = [grid]
kept.append(kept)
{rest}
"""
            begun = time.monotonic()
            p = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
            self.assertEqual((p.returncode, p.stderr), (3 if "Exit" in rest else 0, ""))
            self.assertLess(time.monotonic() - begun, 30)

    @unittest.skipUnless(DEVICE == "cpu", "CUDA does not survive a fork")
    def test_a_forked_child_is_told_that_the_grid_is_not_its_own(self):
        with start(blocks=1) as grid:
            ticket = grid.submit("square", word(5))
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    for use in (lambda: grid.submit("square", word(2)), grid.drain):
                        with self.assertRaisesRegex(RuntimeError, "fork"):
                            use()
                    with start(blocks=1) as own:
                        self.assertEqual(number(own.submit("square", word(4)).wait()), 16)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            self.assertEqual(os.waitpid(pid, 0)[1], 0)
            self.assertEqual(number(ticket.wait()), 25)

    def test_a_graphs_task_is_the_grids(self):
        grid = start(blocks=1)
        t = forebay.Task("t", inputs={"x": "u32[1000]"}, outputs={"y": "u32[1000]"})
        with self.assertRaisesRegex(ValueError, "no function"):
            t.resident(grid, "none")
        t.resident(grid, "twice")
        g = forebay.Graph("g")
        g.add(t)
        g.feed("t.x")
        g.drain("t.y")
        with forebay.Runtime(DEVICE).start(g) as run:
            for n in range(5):
                run.push(array("I", range(n, n + 1000)))
                self.assertEqual(list(memoryview(run.pull())), [2 * i for i in range(n, n + 1000)])
            with self.assertRaisesRegex(RuntimeError, "graphs use it"):
                grid.drain()
        grid.drain()


if __name__ == "__main__":
    unittest.main()
