"""Graphs: tasks, channels, and what goes through them."""

import concurrent.futures
import gc
import os
import tempfile
import threading
import time
import unittest
import weakref
from array import array

import forebay
from support import EXAMPLE, started, task


class Graphs(unittest.TestCase):
    def test_items_go_through_in_order(self):
        with started(task()) as run:
            for n in range(100):
                run.push(array("f", [n] * 8))
                self.assertEqual(memoryview(run.pull())[7], 2 * n)

    def test_waiting_ends_when_it_should_and_other_threads_run_meanwhile(self):
        with started(task()) as run:
            with self.assertRaises(TimeoutError):
                run.pull(timeout=0)
            ticks = []
            threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(5)]).start()
            with self.assertRaises(TimeoutError):
                run.pull(timeout=0.3)
            self.assertEqual(len(ticks), 5)
            with self.assertRaises(ValueError):
                run.pull(timeout=-1)
            with self.assertRaises(KeyError):
                run.pull("nothing")
            run.stop()
            with self.assertRaises(forebay.Closed):
                run.pull(timeout=0)
        with self.assertRaises(forebay.Closed):
            run.pull()

    def test_who_waits_on_another_thread_hears_that_the_graph_was_closed(self):
        with started(task(f=lambda x: (time.sleep(0.05), x)[1]), capacity=1) as run:
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                def pushes():
                    while True:
                        run.push(array("f", [0] * 8))

                # What is pulled and what is pushed, for ever.
                both = [pool.submit(f) for f in (lambda: [run.pull() for _ in iter(int, 1)], pushes)]
                time.sleep(0.2)
                run.close()
                for waits in both:
                    self.assertIsInstance(waits.exception(timeout=20), forebay.Closed)

    def test_an_exception_is_the_tasks_failure(self):
        def bad(_):
            raise KeyError("no such thing")

        with started(task(f=bad)) as run:
            run.push(array("f", [0] * 8))
            # And where that was.
            with self.assertRaisesRegex(RuntimeError, r"(?s)no such thing.*test_graphs\.py.*in bad"):
                run.pull()
        with started(task(f=lambda _: array("i", range(8)))) as run:
            run.push(array("f", [0] * 8))
            with self.assertRaisesRegex(RuntimeError, 'port "y".*int32.*float32'):
                run.pull()
        for returned in (b"abc", b"x" * 33, None, 5):
            with started(task(f=lambda _, r=returned: r)) as run:
                run.push(array("f", [0] * 8))
                with self.assertRaises(RuntimeError, msg=str(returned)):
                    run.pull()

    def test_several_outputs_records_and_kept_inputs(self):
        kept = []
        t = forebay.Task("t", inputs={"x": "u32<=8"}, outputs={"even": "u32<=8", "odd": "u32<=8"})

        @t.host
        def split(x):
            kept.append(x)
            v = memoryview(x).tolist()
            return array("I", (n for n in v if n % 2 == 0)), array("I", (n for n in v if n % 2))

        g = forebay.Graph("g")
        g.add(t)
        g.feed("t.x")
        even, odd = g.drain("t.even"), g.drain("t.odd")
        with forebay.Runtime("cpu").start(g) as run:
            for n in range(50):
                run.push(array("I", [n, n + 1, n + 2]))
                self.assertEqual(memoryview(run.pull(even)).tolist(), [m for m in (n, n + 1, n + 2) if m % 2 == 0])
                self.assertEqual(memoryview(run.pull(odd)).tolist(), [m for m in (n, n + 1, n + 2) if m % 2])
        # What a function keeps does not change.
        self.assertEqual([memoryview(k)[0] for k in kept], list(range(50)))

    def test_mistakes_are_told_when_they_are_made(self):
        g = forebay.Graph("g")
        t = task()
        g.add(t)
        with self.assertRaisesRegex(RuntimeError, "given away"):
            g.add(t)
        with self.assertRaisesRegex(ValueError, "another task"):
            g.add(task())
        for bad in ("t", "t.q", "u.x", ""):
            with self.assertRaises(ValueError, msg=bad):
                g.feed(bad)
        with self.assertRaises(ValueError):
            g.feed("t.x", 0)
        with self.assertRaises(ValueError):
            g.check()
        with self.assertRaises(TypeError):
            forebay.Task("u").host(3)
        with self.assertRaises(ValueError):
            forebay.Task("u", inputs={"x": "f33"})
        u = task("u")
        with self.assertRaisesRegex(ValueError, "opencl and cuda"):
            u.kernel("", "f", kind="cpu")
        # It is as it was.
        with started(u, name="u") as run:
            run.push(array("f", [4] * 8))
            self.assertEqual(memoryview(run.pull())[0], 8)
        with self.assertRaises(ValueError):
            forebay.Runtime("toaster")

    def test_bounded_iteration(self):
        for meta in (False, True):
            t = forebay.Task("step", inputs={"x": "u64[1]"})
            t.port("initializer", "x0", "x")
            t.port("in-place", "y", "x")
            if meta:
                t.port("iterations", "n")
            else:
                t.iterations(5)
            t.host(lambda x: array("Q", [2 * memoryview(x)[0]]))
            g = forebay.Graph("loop")
            g.add(t)
            g.connect("step.y", "step.x", 1, when="unless end-iteration")
            g.feed("step.x0")
            if meta:
                g.feed("step.n")
            g.drain("step.y", when="only end-iteration")
            with forebay.Runtime("cpu").start(g) as run:
                for v in range(1, 20):
                    if meta:
                        run.push(array("Q", [v]), "step.n")
                    run.push(array("Q", [3]), "step.x0")
                    out = run.pull()
                    self.assertEqual(memoryview(out)[0], 3 << (v if meta else 5))
                    self.assertIn("end-iteration", out.signals)

    def test_what_was_done_where_is_told(self):
        rt = forebay.Runtime("cpu")
        self.assertEqual([kind for _, kind in rt.devices()], ["cpu"])
        g = forebay.Graph("told")
        g.add(task("a"))
        g.add(task("b"))
        g.feed("a.x")
        g.connect("a.y", "b.x")
        g.drain("b.y")
        before = g._repr_svg_()
        self.assertTrue(before.startswith("<svg") and ">a<" in before and "f32[8]" in before, before)
        with rt.start(g) as run:
            for _ in range(5):
                run.push(array("f", range(8)))
                run.pull()
            told = run.tasks()
            self.assertEqual([(t["name"], t["invocations"], t["by_device"], t["refused"]) for t in told],
                             [("a", 5, [5], []), ("b", 5, [5], [])])
            self.assertEqual(run.svg(), run._repr_svg_())
            self.assertIn("5 passed", run.svg())
        with self.assertRaises(forebay.Closed):
            run.tasks()
        f = rt.accelerate(task("c"))
        f(array("f", range(8)))
        self.assertEqual([(t["name"], t["by_device"]) for t in f.tasks()], [("c", [1])])
        # A graph that was started has no picture of its own any more, and leaves the task that it cannot have.
        with self.assertRaisesRegex(RuntimeError, "started"):
            g.svg()
        left = task("left")
        with self.assertRaisesRegex(RuntimeError, "started"):
            g.add(left)
        forebay.Graph("other").add(left)

    def test_one_device_of_several_by_its_number(self):
        for make in (forebay.Runtime, forebay.Engine):
            with self.assertRaisesRegex(RuntimeError, "there is no cpu:7, only cpu:0 "):
                make("cpu:7")
            with self.assertRaisesRegex(ValueError, "no number"):
                make("cpu:x")
        self.assertEqual(forebay.Engine("cpu:0").device, forebay.Engine("cpu").device)
        self.assertEqual(len(forebay.Runtime("cpu:0").devices()), 1)

    def test_streams_have_marks_and_outputs_sizes(self):
        t = forebay.Task("t")
        t.port("input", "x", "u32[4]")
        t.port("output", "y", "u32<=4")
        t.port("size", "n", "y")
        t.host(lambda x: memoryview(x)[:2].tobytes())
        g = forebay.Graph("g")
        g.add(t)
        g.feed("t.x"), g.feed("t.n"), g.drain("t.y", when="open-from begin-stream")
        with forebay.Runtime("cpu").start(g) as run:
            for i, marks in enumerate([[], ["begin-stream"], ["end-stream"]]):
                run.push(array("Q", [2]), "t.n")
                run.push(forebay.Block("u32[4]", array("I", [i] * 4), signals=marks), "t.x")
            for i, marks in [(1, ["begin-stream"]), (2, ["end-stream"])]:
                out = run.pull()
                out.wait()
                self.assertEqual((memoryview(out).tolist(), out.signals), ([i, i], marks))
        for wrong in [("toaster", "x", "u32[1]"), ("input", "x", "f33[1]"), ("meta", "x", "u8[1]")]:
            with self.assertRaises(ValueError):
                t2 = forebay.Task("t")
                t2.port(*wrong)
        for bad in [lambda: forebay.Block("u32[1]", signals=["middle"]), lambda: g.drain("t.y", when="sometimes")]:
            with self.assertRaises((ValueError, RuntimeError)):
                bad()

    def test_a_graph_file(self):
        g = forebay.load(EXAMPLE)
        g.check()
        with forebay.Runtime("cpu").start(g):
            pass
        with self.assertRaisesRegex(FileNotFoundError, "No such file or directory: '/nowhere/g.toml'"):
            forebay.load("/nowhere/g.toml")
        with self.assertRaisesRegex(IsADirectoryError, "'/'"):
            forebay.load("/")
        # What can be read once.
        at, to = os.pipe()
        os.write(to, EXAMPLE.read_bytes().replace(b'file = "', f'file = "{EXAMPLE.parent}/'.encode()))
        os.close(to)
        self.assertIn("multiply", forebay.load(f"/dev/fd/{at}").svg())
        os.close(at)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as f:
            f.write('name = "g"\n[[task]]\nnam = "t"\n')
            f.flush()
            with self.assertRaisesRegex(ValueError, ":3:1: .*nam"):
                forebay.load(f.name)

    def test_functions_and_what_they_hold_are_let_go(self):
        class Held:
            pass

        held = Held()
        gone = weakref.ref(held)
        run = started(task(f=lambda x, h=held: x))
        run.push(array("f", [1] * 8))
        self.assertEqual(memoryview(run.pull())[0], 1)
        del held, run
        for _ in range(100):
            gc.collect()
            if gone() is None:
                break
            time.sleep(0.05)
        self.assertIsNone(gone())


if __name__ == "__main__":
    unittest.main(verbosity=2)
