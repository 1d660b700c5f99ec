"""Whoever waits and is told to end, graphs that are closed, programs that end, and processes that are forked."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from array import array

import forebay
from support import started, task


class Ends(unittest.TestCase):
    def test_a_graph_that_is_left_running_at_the_end_does_not_hang(self):
        Ends.left = started(task(f=lambda x: time.sleep(0.01) or x))
        for _ in range(4):
            Ends.left.push(array("f", [0] * 8))


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


if __name__ == "__main__":
    unittest.main(verbosity=2)
