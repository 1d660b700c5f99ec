"""Blocks: what they hold, what they are made of, and what is refused."""

import gc
import struct
import unittest
from array import array

import forebay
from support import numpy, started, task


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


if __name__ == "__main__":
    unittest.main(verbosity=2)
