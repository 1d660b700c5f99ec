"""Moving data by hand."""

import concurrent.futures
import os
import threading
import unittest
from array import array

import forebay


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

    def test_what_is_begun_is_waited_for_later(self):
        for device in ("cpu", "opencl", "cuda"):
            try:
                engine = forebay.Engine(device)
            except RuntimeError as e:
                print("skipped:", e)
                continue
            n = 1 << 20
            memory, out, back = engine.memory(2 * n), engine.pinned(n), engine.pinned(n)
            sent = memoryview(out)
            with engine.stream() as s:
                for i in range(5):
                    sent[:] = bytes([i, i + 7]) * (n // 2)
                    # In their order, both on their way at once.
                    a, b = s.start_write(memory, out, offset=n), s.start_read(memory, back, offset=n)
                    for busy in (lambda: s.start_write(memory, out), lambda: s.start_read(memory, back), out.lock):
                        with self.assertRaisesRegex(ValueError, "under way"):
                            busy()
                    b.wait()
                    a.wait()
                    with self.assertRaisesRegex(ValueError, "before"):
                        a.wait()
                    self.assertEqual(bytes(memoryview(back)), bytes([i, i + 7]) * (n // 2))
                for offset in (n + 1, 1 << 40, (1 << 64) - 1):
                    with self.assertRaisesRegex(ValueError, "buffer of"):
                        s.start_write(memory, out, offset=offset)
                # A mistake has not taken it.
                s.start_write(memory, out).wait()
                # Nobody waits for this one; who looks at its memory does all the same.
                s.start_read(memory, back)
            self.assertEqual(bytes(memoryview(back)[:2]), bytes([4, 11]))
            view = memoryview(back)
            s = engine.stream()
            late = s.start_write(memory, out)
            del back, out
            s.close()
            with self.assertRaisesRegex(ValueError, "closed"):
                late.wait()
            with self.assertRaisesRegex(ValueError, "closed"):
                s.start_write(memory, engine.pinned(1))
            del late, s, engine, memory
            self.assertEqual((bytes(view[:2]), bytes(sent[:2])), (bytes([4, 11]),) * 2)

    def test_what_is_posted_arrives(self):
        memory, s = self.engine.memory(16), self.engine.stream()
        for i in range(10):
            s.post(memory, bytes([i] * 4), offset=4)
            back = bytearray(4)
            s.read(memory, back, offset=4)
            self.assertEqual(back, bytes([i] * 4))
        s.post(memory, b"")
        with self.assertRaisesRegex(ValueError, "buffer of 16 B"):
            s.post(memory, bytes(4), offset=13)

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
