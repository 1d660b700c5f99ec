"""Two tasks in a row, one a Python function and one a kernel or a function, whichever device there is."""

import sys
from array import array

import forebay

SQUARE = """
KERNEL void square(GLOBAL const float *x, GLOBAL float *y, uint n) {
  size_t i = gid_x();
  if (i < n) y[i] = x[i] * x[i];
}"""

rt = forebay.Runtime(*sys.argv[1:])

plus = forebay.Task("plus", inputs={"x": "f32[8]"}, outputs={"y": "f32[8]"})


@plus.host
def one_more(x):
    return array("f", (v + 1 for v in memoryview(x)))


square = forebay.Task("square", inputs={"x": "f32[8]"}, outputs={"y": "f32[8]"})
square.host(lambda x: array("f", (v * v for v in memoryview(x))))
square.kernel(SQUARE, "square", args=["x", "y", "u32:8"])

g = forebay.Graph("hello")
g.add(plus)
g.add(square)
g.connect("plus.y", "square.x")
g.feed("plus.x")
g.drain("square.y")

with rt.start(g) as run:
    run.push(array("f", range(8)))
    print(memoryview(run.pull()).tolist())
