"""What several of the tests need. They need nothing but the module; NumPy where it is there."""

import pathlib
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
