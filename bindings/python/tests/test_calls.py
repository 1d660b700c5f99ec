"""Tasks that are called like functions, and goals."""

import asyncio
import os
import sys
import threading
import time
import unittest
from array import array

import forebay
from support import numpy, started, task


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


if __name__ == "__main__":
    unittest.main(verbosity=2)
