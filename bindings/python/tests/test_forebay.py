"""What Python programs do right and wrong. Needs nothing but the module; NumPy where it is there."""

import asyncio
import concurrent.futures
import gc
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import weakref
from array import array

import forebay

try:
    import numpy
except ImportError:
    numpy = None

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "6_graph_file.toml"


def task(name="t", f=None, of="f32[8]"):
    t = forebay.Task(name, inputs={"x": of}, outputs={"y": of})
    t.host(f or (lambda x: array("f", (2 * v for v in memoryview(x)))))
    return t


def started(t, capacity=4, name="t"):
    g = forebay.Graph("g")
    g.add(t)
    g.feed(f"{name}.x", capacity)
    g.drain(f"{name}.y", capacity)
    return forebay.Runtime("cpu").start(g)


class Blocks(unittest.TestCase):
    def test_buffers_have_shape_and_type_and_no_copy_is_written(self):
        b = forebay.Block("u16[3x2]", array("H", range(6)))
        v = memoryview(b)
        self.assertEqual((v.format, v.shape, v.readonly, v.tolist()), ("H", (2, 3), True, [[0, 1, 2], [3, 4, 5]]))
        self.assertEqual((len(b), b.template, b.tobytes()), (6, "u16[3×2]", array("H", range(6)).tobytes()))
        with self.assertRaises(TypeError):
            v[0, 0] = 1
        # A view keeps the block alive.
        del b
        gc.collect()
        self.assertEqual(v.tolist()[1], [3, 4, 5])

    def test_rows_may_have_gaps(self):
        of = "u16[3x2] stride 8"
        b = forebay.Block(of, array("H", range(6)))
        v = memoryview(b)
        self.assertEqual((v.shape, v.strides, v.tolist(), b.template), ((2, 3), (8, 2), [[0, 1, 2], [3, 4, 5]], of.replace("x", "×")))
        self.assertEqual(forebay.Block(b.template, b.tobytes()).tobytes(), b.tobytes())
        # What functions return, without gaps or with them.
        t = forebay.Task("t", inputs={"x": of}, outputs={"y": of, "z": of})
        t.host(lambda x: (memoryview(x).tobytes(), x.tobytes()))
        y, z = forebay.Runtime("cpu").accelerate(t)(b)
        self.assertEqual([memoryview(y).tolist(), memoryview(z).tolist()], [v.tolist()] * 2)
        with self.assertRaisesRegex(ValueError, "stride"):
            forebay.Block("u16[3x2] stride 4")

    def test_records_bytes_and_zeros(self):
        r = forebay.Block("u32<=10", array("I", [7, 8, 9]))
        self.assertEqual((len(r), memoryview(r).tolist()), (3, [7, 8, 9]))
        self.assertEqual(bytes(memoryview(forebay.Block("bytes<=9", b"abc"))), b"abc")
        self.assertEqual(memoryview(forebay.Block("f64[2]")).tolist(), [0.0, 0.0])
        self.assertEqual(memoryview(forebay.Block("record3[2]", b"abcdef")).shape, (2, 3))

    def test_mistakes(self):
        for template, data, error in [
            ("f33[8]", None, ValueError),
            ("f32[8", None, ValueError),
            ("f32[0]", None, ValueError),
            ("f64[99999999999x99999999999]", None, ValueError),
            ("f64[99999999999x99999999999]", array("d", range(8)), ValueError),
            ("f32[8]", b"abc", ValueError),
            ("u32<=2", array("I", [1, 2, 3]), ValueError),
            ("f32[8]", 3.5, TypeError),
            ("f32[8]", "text", TypeError),
            # As many bytes, of something else.
            ("f32[8]", array("i", range(8)), ValueError),
            ("f32[16]", array("d", range(8)), ValueError),
            ("u8[8]", array("b", range(8)), ValueError),
            ("u32<=8", array("f", range(8)), ValueError),
            ("f32[4]", memoryview(array("i", range(8)))[::2], ValueError),
        ]:
            with self.assertRaises(error, msg=f"{template} {data}"):
                forebay.Block(template, data)
        with self.assertRaisesRegex(ValueError, r"float64 was given for f32\[16\].*float32"):
            forebay.Block("f32[16]", array("d", range(8)))

    def test_bytes_may_be_anything_and_numbers_what_they_are(self):
        for template, code in [("u8[4]", "B"), ("i8[4]", "b"), ("u16[4]", "H"), ("i16[4]", "h"), ("u32[4]", "I"), ("i32[4]", "i"),
                               ("u64[4]", "Q"), ("i64[4]", "q"), ("i64[4]", "l"), ("f32[4]", "f"), ("f64[4]", "d")]:
            given = array(code, range(4))
            for data in [given, memoryview(array(code, range(8)))[:4], given.tobytes(), memoryview(given).cast("B")]:
                self.assertEqual(memoryview(forebay.Block(template, data)).tolist(), [0, 1, 2, 3], f"{template} {code}")
        half = forebay.Block("f16[2]", bytes.fromhex("003c00c0"))
        self.assertEqual((memoryview(half).format, struct.unpack("2e", half.tobytes())), ("e", (1.0, -2.0)))
        self.assertEqual(bytes(forebay.Block("bytes<=16", array("d", [1]))), array("d", [1]).tobytes())
        self.assertEqual(bytes(forebay.Block("record8[1]", array("d", [1]))), array("d", [1]).tobytes())

    @unittest.skipUnless(numpy, "no NumPy")
    def test_rows_of_another_length_are_not_taken(self):
        a = numpy.arange(24, dtype=numpy.float32)
        # Flat, as the template says, with ones, with what the template puts into one row, and with what it calls planes.
        for template, shape in [("f32[4x6]", (24,)), ("f32[4x6]", (6, 4)), ("f32[4x6]", (1, 6, 4, 1)), ("f32[4x6]", (6, 2, 2)),
                                ("f32[4x3x2]", (2, 3, 4)), ("f32[4x3x2]", (6, 4)), ("f32[24]", (4, 6)), ("f32<=30", (4, 6))]:
            given = a.reshape(shape)
            self.assertEqual(forebay.Block(template, given).tobytes(), a.tobytes(), f"{template} {shape}")
            # Not in one piece.
            self.assertEqual(forebay.Block(template, numpy.asfortranarray(given)).tobytes(), a.tobytes(), f"{template} {shape}")
        for template, shape, told in [("f32[4x6]", (4, 6), "6, 4"), ("f32[4x6]", (2, 12), "6, 4"), ("f32[4x3x2]", (3, 8), "2, 3, 4"),
                                      ("f32[4x3x2]", (3, 2, 4), "2, 3, 4"), ("u8[4x6]", (4, 6), "6, 4")]:
            for order in "CF":
                given = a.astype("u1" if template[0] == "u" else "f4").reshape(shape).copy(order)
                with self.assertRaisesRegex(ValueError, f"shape .{', '.join(map(str, shape))}. .* takes .{told}.", msg=template):
                    forebay.Block(template, given)
        # Bytes of something else have no rows.
        self.assertEqual(forebay.Block("f32[4x6]", a.view("u1").reshape(6, 16)).tobytes(), a.tobytes())
        t = task(f=lambda x: x.numpy().T, of="f32[4x6]")
        with started(t) as run:
            run.push(a.reshape(6, 4))
            with self.assertRaisesRegex(RuntimeError, "port .y.: an array of shape .4, 6."):
                run.pull()

    @unittest.skipUnless(numpy, "no NumPy")
    def test_numpy(self):
        b = forebay.Block("f32[4x3]", numpy.arange(12, dtype=numpy.float32).reshape(3, 4))
        a = b.numpy()
        self.assertEqual((a.shape, a.dtype, a.flags.writeable, float(a[2, 1])), ((3, 4), numpy.float32, False, 9.0))
        t = task(f=lambda x: x.numpy() * 3, of="f32[4x3]")
        with started(t) as run:
            run.push(a.T.copy().T)
            self.assertTrue((run.pull().numpy() == a * 3).all())
            for other in (a.astype("int32"), a.astype(">f4"), a.astype("int32").T.copy().T):
                with self.assertRaisesRegex(ValueError, "float32"):
                    run.push(other)
        for element in ("int8", "int64", "float16"):
            given = numpy.arange(-2, 3).astype(element)
            b = forebay.Block(f"{element[0]}{element.lstrip('floatin')}[5]", given)
            self.assertEqual((b.numpy().dtype, b.numpy().tolist()), (given.dtype, given.tolist()))
        self.assertEqual(forebay.Block("u8[2]", numpy.array([True, False])).numpy().tolist(), [1, 0])


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
            with self.assertRaisesRegex(RuntimeError, r"(?s)no such thing.*test_forebay\.py.*in bad"):
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

    def test_a_graph_that_is_left_running_at_the_end_does_not_hang(self):
        Graphs.left = started(task(f=lambda x: time.sleep(0.01) or x))
        for _ in range(4):
            Graphs.left.push(array("f", [0] * 8))


class Accelerated(unittest.TestCase):
    def test_a_task_is_called_like_a_function(self):
        f = forebay.Runtime("cpu", mode="adaptive").accelerate(task())
        for n in range(20):
            self.assertEqual(memoryview(f(array("f", [n] * 8)))[0], 2 * n)
        with self.assertRaisesRegex(ValueError, "0 inputs instead of 1"):
            f()
        with self.assertRaises(ValueError):
            f(b"abc")

    def test_a_call_that_fails_is_not_the_end_of_the_task(self):
        def unless_negative(x):
            v = memoryview(x)[0]
            if v < 0:
                raise KeyError(f"{v} is below nothing")
            return array("f", [v + 1] * 8)

        f = forebay.Runtime("cpu").accelerate(task(f=unless_negative))
        for n in (1, 2):
            with self.assertRaisesRegex(RuntimeError, f"-{n}.0 is below nothing"):
                f(array("f", [-n] * 8))
            self.assertEqual(memoryview(f(array("f", [n] * 8)))[0], n + 1)

    def test_functions_call_tasks_more_deeply_than_there_are_workers(self):
        rt = forebay.Runtime("cpu")
        f = rt.accelerate(task())
        depth = len(os.sched_getaffinity(0)) + 2
        for _ in range(depth):
            f = rt.accelerate(task(f=lambda x, inner=f: array("f", (v + 1 for v in memoryview(inner(x))))))
        for n in range(20):
            self.assertEqual(memoryview(f(array("f", [n] * 8)))[0], 2 * n + depth)
        # One that calls itself has no lane left to do so.
        itself = rt.accelerate(task(f=lambda x: itself(x)))
        with self.assertRaisesRegex(RuntimeError, "would wait for itself"):
            itself(array("f", [1] * 8))

    def test_calls_whose_outputs_come_later(self):
        f = forebay.Runtime("cpu").accelerate(task())
        calls = [f.spawn(array("f", [n] * 8)) for n in range(8)]
        for n in reversed(range(8)):
            self.assertEqual(memoryview(calls[n].wait())[0], 2 * n)
        with self.assertRaisesRegex(ValueError, "handed out before"):
            calls[0].wait()
        # Nobody waits for these.
        for n in range(40):
            f.spawn(array("f", [n] * 8))
        self.assertEqual(memoryview(f(array("f", [5] * 8)))[0], 10)

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "one core, one worker")
    def test_several_lanes_work_side_by_side(self):
        both = threading.Barrier(2, timeout=20)

        def waits_for_the_other(x):
            both.wait()
            return array("f", memoryview(x).tolist())

        f = forebay.Runtime("cpu").accelerate(lambda: task(f=waits_for_the_other), lanes=2)
        calls = [f.spawn(array("f", [n] * 8)) for n in range(2)]
        self.assertEqual([memoryview(c.wait())[0] for c in calls], [0, 1])
        for lanes in (0, 17):
            with self.assertRaisesRegex(ValueError, f"{lanes} lanes; 1 to 16"):
                forebay.Runtime("cpu").accelerate(task, lanes=lanes)
        with self.assertRaisesRegex(TypeError, "a function that makes a task"):
            forebay.Runtime("cpu").accelerate(task(), lanes=2)
        with self.assertRaises(TypeError):
            forebay.Runtime("cpu").accelerate(lambda: "no task")

    def test_who_waits_can_be_interrupted(self):
        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        gate = threading.Event()

        def waits(x):
            gate.wait()
            return array("f", memoryview(x).tolist())

        before = signal.signal(signal.SIGALRM, interrupt)
        data = array("f", [3] * 8)

        def interrupted(f):
            begun = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with self.assertRaises(Interrupted):
                f()
            self.assertLess(time.monotonic() - begun, 10)

        def pushes(run):
            while True:
                run.push(data)

        try:
            with started(task(f=waits), capacity=1) as run:
                interrupted(run.pull)
                interrupted(lambda: run.pull(timeout=600))
                interrupted(lambda: pushes(run))
                with self.assertRaises(TimeoutError):
                    run.pull(timeout=0.12)
                gate.set()
                self.assertEqual(memoryview(run.pull())[0], 3)
            gate.clear()
            f = forebay.Runtime("cpu").accelerate(task(f=waits))
            interrupted(lambda: f(data))
            # One is at work, this is behind it, and there is room for no more.
            call = f.spawn(data)
            interrupted(lambda: f.spawn(data))
            interrupted(call.wait)
            with self.assertRaises(TimeoutError):
                call.wait(timeout=0.01)
            with self.assertRaisesRegex(ValueError, "seconds"):
                call.wait(timeout=float("nan"))
            gate.set()
            # It can be waited for again, once.
            self.assertEqual(memoryview(call.wait())[0], 3)
            with self.assertRaisesRegex(ValueError, "handed out before"):
                call.wait()
        finally:
            gate.set()
            signal.signal(signal.SIGALRM, before)

    def test_signals_end_a_stop_and_a_close_and_functions_end_when_they_end(self):
        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        begun, gate, ended = threading.Event(), threading.Event(), threading.Semaphore(0)

        def waits(x):
            begun.set()
            gate.wait()
            ended.release()
            return bytes(32)

        def interrupted(f):
            start = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with self.assertRaises(Interrupted):
                f()
            self.assertLess(time.monotonic() - start, 10)

        def busy(make):
            begun.clear()
            made = make()
            (made.push if hasattr(made, "push") else made.spawn)(bytes(32))
            self.assertTrue(begun.wait(30))
            return made

        def ends():
            gate.set()
            self.assertTrue(ended.acquire(timeout=30))
            gate.clear()

        def closes(made):
            with made:
                pass

        def forgets(made):
            # Nothing can be raised while an object goes; what its handler raised is told, and nobody waits any more.
            told = []
            before, sys.unraisablehook = sys.unraisablehook, lambda what: told.append(what.exc_type)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                made.clear()
            finally:
                sys.unraisablehook = before
            self.assertEqual(told, [Interrupted])

        graph = lambda: started(task(f=waits))
        call = lambda: forebay.Runtime("cpu").accelerate(task(f=waits))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            run = busy(graph)
            with self.assertRaisesRegex(TimeoutError, '"t" still runs'):
                run.stop(timeout=0.05)
            with self.assertRaises(TimeoutError):
                run.stop(timeout=0)
            interrupted(run.stop)
            interrupted(run.close)
            with self.assertRaises(forebay.Closed):
                run.stop()
            ends()
            f = busy(call)
            interrupted(f.close)
            with self.assertRaises(forebay.Closed):
                f(bytes(32))
            ends()
            for make in (graph, call):
                interrupted(lambda: closes(busy(make)))
                ends()
                forgets([busy(make)])
                ends()
        finally:
            gate.set()
            signal.signal(signal.SIGALRM, before)
        with busy(graph) as run:
            run.stop(timeout=30)
        with busy(call) as f:
            pass
        with self.assertRaises(forebay.Closed):
            f.tasks()

    def ends(self, function, rest):
        """What a program says that ends while this function of a task runs; none ends by a signal."""
        program = f"""
import forebay, signal, sys, threading, time
begun = threading.Event()
def function(x=None):
    begun.set()
    {function}
    print("function ended", flush=True)
    return bytes(4)
def task():
    t = forebay.Task("t", inputs={{"x": "u8[4]"}}, outputs={{"y": "u8[4]"}})
    t.host(function)
    return t
g = forebay.Graph("g")
g.add(task()); g.feed("t.x", 9); g.drain("t.y", 9)
runtime = forebay.Runtime("cpu")
{rest}
begun.wait()
print("program ended", flush=True)
"""
        start = time.monotonic()
        p = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
        self.assertLess(time.monotonic() - start, 30)
        return p.stdout.split("\n")[:-1], p.stderr

    def test_a_program_that_ends_waits_for_the_functions_that_run_and_no_other_begins(self):
        runs = "run = runtime.start(g); run.push(bytes(4)); run.push(bytes(4))"
        calls = "f = runtime.accelerate(task()); c = f.spawn(bytes(4)); d = f.spawn(bytes(4))"
        # Others wait for it: a thread that nobody waits for.
        waits = "threading.excepthook = lambda e: None; threading.Thread(target=run.pull, daemon=True).start()"
        for rest in (runs, calls, f"{runs}; {waits}", f"{runs}; begun.wait(); del run, runtime", f"{calls}; begun.wait(); del c, d"):
            said, errors = self.ends("time.sleep(0.3)", rest)
            ended = ["program ended", "function ended"]
            # What is let go of is waited for there.
            self.assertEqual(said, ended[::-1] if "del run" in rest else ended, errors)
            self.assertEqual(errors, "")

    def test_a_program_that_ends_while_a_function_never_does_ends_with_ctrl_c(self):
        presses = "signal.signal(signal.SIGALRM, signal.default_int_handler); signal.setitimer(signal.ITIMER_REAL, 1)"
        runs = "run = runtime.start(g); run.push(bytes(4))"
        calls = "f = runtime.accelerate(task()); c = f.spawn(bytes(4))"
        for rest in (runs, calls):
            said, errors = self.ends("while True: time.sleep(0.01)", f"{rest}; {presses}")
            self.assertEqual(said, ["program ended"], errors)
            self.assertIn("KeyboardInterrupt", errors)
        # Nobody waits for what a goal's tracker says.
        pursues = f"f = runtime.accelerate(task()); p = f.pursue(function, throughput=1)"
        said, errors = self.ends("while True: time.sleep(0.01)", pursues)
        self.assertEqual((said, errors), (["program ended"], ""))

    def test_a_forked_child_makes_a_runtime_of_its_own(self):
        f = forebay.Runtime("cpu").accelerate(task())
        data = array("f", [4] * 8)
        with started(task()) as run:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    for parents in (lambda: f(data), lambda: run.push(data), lambda: run.pull()):
                        with self.assertRaisesRegex(RuntimeError, "forked from"):
                            parents()
                    own = forebay.Runtime("cpu").accelerate(task())
                    code = 0 if memoryview(own(data))[0] == 8 else 2
                    del f, own
                    gc.collect()
                finally:
                    os._exit(code)
            self.assertEqual(os.waitpid(pid, 0), (pid, 0))
            run.push(data)
            self.assertEqual(memoryview(run.pull())[0], 8)
        self.assertEqual(memoryview(f(data))[0], 8)

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_what_is_not_in_one_piece_is_taken_in_order(self):
        a = numpy.arange(12, dtype=numpy.uint32).reshape(3, 4)
        for data in [a, numpy.asfortranarray(a), a[::-1][::-1], numpy.repeat(a, 2, axis=1)[:, ::2]]:
            self.assertEqual(forebay.Block("u32[4x3]", data).numpy().tolist(), a.tolist())
        self.assertEqual(len(forebay.Block("u32<=9", numpy.empty(0, dtype=numpy.uint32))), 0)
        with self.assertRaises(TypeError):
            forebay.Block("u32[4x3]", [1, 2, 3])
        # What a function returns, too.
        t = forebay.Task("t", inputs={"x": "u32[4x3]"}, outputs={"y": "u32[3x4]"})
        t.host(lambda x: x.numpy().T)
        f = forebay.Runtime("cpu").accelerate(t)
        self.assertEqual(f(a).numpy().tolist(), a.T.tolist())

    def test_calls_and_pulls_are_awaited_side_by_side(self):
        f = forebay.Runtime("cpu").accelerate(task())

        async def main():
            with started(task()) as run:
                # Nothing comes before something was pushed, and the loop goes on meanwhile.
                pulled = asyncio.ensure_future(asyncio.to_thread(run.pull))
                called = await asyncio.gather(*(asyncio.to_thread(f, array("f", [n] * 8)) for n in range(4)))
                self.assertFalse(pulled.done())
                run.push(array("f", [9] * 8))
                return called, await pulled

        called, pulled = asyncio.run(asyncio.wait_for(main(), 30))
        self.assertEqual([memoryview(y)[0] for y in called], [0, 2, 4, 6])
        self.assertEqual(memoryview(pulled)[0], 18)

    def test_a_goal_is_pursued_with_lanes_and_then_fidelity(self):
        f = forebay.Runtime("cpu").accelerate(task, lanes=2)
        levels, asked = [], []

        def tracker():
            asked.append(None)
            if len(asked) == 2:
                return "much"
            if len(asked) == 3:
                return 1 / 0
            # Enough, once the fidelity is lower.
            return 150 if levels else 1

        told, before = [], sys.unraisablehook
        sys.unraisablehook = lambda what: told.append(what.exc_type)
        try:
            with f.pursue(tracker, throughput=100, lowest=1, fidelity=levels.append) as pursuit:
                end = time.monotonic() + 30
                while not levels and time.monotonic() < end:
                    time.sleep(0.05)
                self.assertEqual(memoryview(f(array("f", [4] * 8)))[0], 8)
                log = pursuit.log()
            self.assertEqual(levels, [1])
            self.assertTrue({TypeError, ZeroDivisionError} <= set(told), told)
            self.assertTrue(any(measured == 1 and "2 lanes" in why for _, measured, why in log), log)
            self.assertGreaterEqual([measured for _, measured, _ in log].count(None), 2, log)
            self.assertEqual(pursuit.log(), [])
            time.sleep(0.7)
            n = len(asked)
            time.sleep(0.7)
            self.assertEqual(len(asked), n)
        finally:
            sys.unraisablehook = before

    def test_goals_that_cannot_be(self):
        f = forebay.Runtime("cpu").accelerate(task())
        for goal in ({}, {"latency": 1, "throughput": 1}, {"latency": 1, "least": True}):
            with self.assertRaisesRegex(TypeError, "one goal"):
                f.pursue(float, **goal)
        with self.assertRaisesRegex(ValueError, "-1 is no latency"):
            f.pursue(float, latency=-1)
        with self.assertRaisesRegex(TypeError, "functions"):
            f.pursue(3, latency=1)
        with self.assertRaisesRegex(TypeError, "a function that is told"):
            f.pursue(float, latency=1, lowest=2)
        # One that is left pursued at the end does not hang.
        Accelerated.left = f.pursue(float, least=True)

    def test_by_a_kernel_where_there_is_opencl(self):
        try:
            rt = forebay.Runtime("opencl")
        except (RuntimeError, ValueError) as e:
            self.skipTest(str(e))
        t = forebay.Task("t", inputs={"x": "f32[8]"}, outputs={"y": "f32[8]"})
        t.kernel("KERNEL void twice(GLOBAL const float *x, GLOBAL float *y) { if (gid_x() < 8) y[gid_x()] = 2 * x[gid_x()]; }", "twice")
        f = rt.accelerate(t)
        self.assertEqual(memoryview(f(array("f", range(8)))).tolist(), [2.0 * n for n in range(8)])


class Transfers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = forebay.Engine("cpu")

    def test_bytes_get_there_and_back_from_any_memory(self):
        for device in ("cpu", "opencl"):
            try:
                engine = forebay.Engine(device)
            except RuntimeError as e:
                print("skipped:", e)
                continue
            memory = engine.memory(1 << 16)
            pinned = engine.pinned(1 << 16)
            view = memoryview(pinned)
            view[:4] = b"abcd"
            with engine.stream() as s:
                s.write(memory, pinned)
                s.write(memory, array("f", [1, 2]), offset=8)
                # A part of page-locked memory, and whatever can be written.
                s.read(memory, view[100:116])
                back = bytearray(16)
                s.read(memory, back)
            self.assertEqual(bytes(view[100:104]), b"abcd")
            self.assertEqual(bytes(back), b"abcd" + bytes(4) + array("f", [1, 2]).tobytes())
            self.assertEqual((len(memory), len(pinned)), (1 << 16, 1 << 16))

    def test_copies_to_another_device(self):
        try:
            far = forebay.Engine("opencl")
        except RuntimeError as e:
            self.skipTest(str(e))
        memory, other = self.engine.memory(1 << 20), far.memory(1 << 20)
        data = bytes(range(256)) * 4096
        with self.engine.stream() as a, far.stream() as b:
            a.write(memory, data)
            a.relay(memory, 1, b, other, 3, (1 << 20) - 3)
            back = bytearray((1 << 20) - 3)
            b.read(other, back, offset=3)
            self.assertEqual(back, data[1:-2])
            b.relay(other, 3, a, memory, 0, 5)
            a.read(memory, back)
            self.assertEqual(back[:6], data[1:6] + data[5:6])
            with self.assertRaisesRegex(ValueError, "same"):
                a.relay(memory, 0, a, memory, 100, 5)
            for bad in [(1 << 20, 0, 1), (0, 1 << 20, 1), (0, 0, (1 << 20) + 1)]:
                with self.assertRaisesRegex(ValueError, "buffer of 1048576 B"):
                    a.relay(memory, bad[0], b, other, bad[1], bad[2])
            # Both ways at once, each wanting both streams.
            def often(one, of_one, two, of_two):
                for _ in range(200):
                    one.relay(of_one, 0, two, of_two, 0, 64)
            both = [threading.Thread(target=often, args=p) for p in [(a, memory, b, other), (b, other, a, memory)]]
            for t in both:
                t.start()
            for t in both:
                t.join(60)
                self.assertFalse(t.is_alive())
        with self.assertRaisesRegex(ValueError, "closed"):
            a.relay(memory, 0, far.stream(), other, 0, 1)

    def test_several_parts_at_once_and_copies_within_the_device(self):
        memory, s = self.engine.memory(1000), self.engine.stream()
        s.write(memory, bytes(1000))
        s.write_batch(memory, b"abcdefgh", [(0, 100, 2), (6, 200, 2), (2, 102, 1)])
        s.copy(memory, 100, memory, 300, 3)
        back = bytearray(8)
        s.read_batch(memory, back, [(0, 300, 3), (4, 200, 2)])
        self.assertEqual(bytes(back), b"abc\0gh\0\0")
        with self.assertRaisesRegex(ValueError, "of the host's"):
            s.read_batch(memory, back, [(7, 0, 2)])
        with self.assertRaisesRegex(ValueError, "overlap"):
            s.copy(memory, 0, memory, 1, 2)
        with self.assertRaisesRegex(ValueError, "tuple of length 3"):
            s.write_batch(memory, back, [(1, 2)])
        with self.assertRaises(OverflowError):
            s.write_batch(memory, back, [(-1, 2, 3)])

    def test_memory_outlives_its_engine_and_buffers_their_memory(self):
        def view():
            pinned = forebay.Engine("cpu").pinned(8)
            return memoryview(pinned)

        v = view()
        v[:] = b"12345678"
        self.assertEqual(v.tobytes(), b"12345678")
        self.assertEqual(memoryview(self.engine.pinned(0)).tobytes(), b"")

    def test_what_cannot_be(self):
        memory, s = self.engine.memory(64), self.engine.stream()
        for offset, n in ((0, 65), (64, 1), (2**63, 1)):
            with self.assertRaisesRegex(ValueError, "of a buffer of 64 B"):
                s.write(memory, bytes(n), offset=offset)
            with self.assertRaisesRegex(ValueError, "of a buffer of 64 B"):
                s.read(memory, bytearray(n), offset=offset)
        s.write(memory, b"", offset=64)
        with self.assertRaises(BufferError):
            s.read(memory, b"cannot be written")
        with self.assertRaises(BufferError):
            s.write(memory, memoryview(bytes(64))[::2])
        with self.assertRaises(TypeError):
            s.write(memory, 3)
        with self.assertRaises(ValueError):
            s.set_deadline(-1)
        s.set_deadline(0.001)
        s.set_deadline(None)
        self.assertIsNone(s.protection)
        s.close()
        s.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            s.write(memory, b"x")
        with self.assertRaises(ValueError):
            forebay.Engine("toaster")
        with self.assertRaises((RuntimeError, ValueError)):
            self.engine.memory(1 << 60)
        # Not of a CUDA device: nobody takes it for that.
        self.assertFalse(hasattr(memory, "__cuda_array_interface__"))
        self.assertGreater(memory.address, 0)

    def test_what_it_costs(self):
        usual, slow = self.engine.cost(1 << 20, to_host=True)
        self.assertTrue(0 < usual <= slow < 1, (usual, slow))
        self.assertLess(self.engine.cost(8, pinned=True)[0], usual)

    def test_a_real_time_stream_stays_with_its_thread(self):
        memory = self.engine.memory(64)
        before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        raised = []

        def elsewhere():
            try:
                s.write(memory, b"x")
            except ValueError as e:
                raised.append(str(e))

        with self.engine.real_time(run=0.01) as s:
            how, locked, overruns = s.protection
            self.assertRegex(how, "SCHED_FIFO, priority 20|SCHED_OTHER, nice")
            self.assertIsInstance(locked, bool)
            self.assertEqual(overruns, 0)
            if "FIFO" in how:
                self.assertNotEqual(os.sched_getscheduler(0), before[0])
            s.write(memory, b"abc")
            t = threading.Thread(target=elsewhere)
            t.start()
            t.join()
        self.assertRegex(raised[0], "the thread that made it")
        after = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.assertEqual(after, before)
        with self.assertRaises(ValueError):
            self.engine.real_time(run=-1)

    def test_streams_of_several_threads(self):
        memory, s = self.engine.memory(1 << 20), self.engine.stream()
        pinned = self.engine.pinned(1 << 19)

        def work(n):
            mine = bytearray([n]) * 1000
            back = bytearray(1000)
            for _ in range(200):
                s.write(memory, mine, offset=n * 1000)
                s.read(memory, back, offset=n * 1000)
                self.assertEqual(back, mine)
                s.write(memory, pinned, offset=1 << 19)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
