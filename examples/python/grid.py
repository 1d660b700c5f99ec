"""The resident grid: a task that answers, and one that makes tasks, without a launch for each.

On the CPU it needs a C++ compiler when it runs. python examples/python/grid.py [cpu|cuda]
"""

import struct
import sys

import forebay

TASKS = """
TASK_PER_THREAD(square) { *(u64 *)fb_result(c) = ((const u64 *)t->args)[0] * ((const u64 *)t->args)[0]; }
// Two tasks of one less each, down to the leaves, which are counted in the result.
TASK_PER_THREAD(tree) {
  const u64 depth = ((const u64 *)t->args)[0];
  if (depth == 0) { fb_add64((u64 *)fb_result(c), 1); return; }
  const u64 child = depth - 1;
  for (u32 k = 0; k < 2; k++)
    if (!fb_spawn(c, FN_tree, 0, 1, &child, sizeof child)) fb_add64((u64 *)fb_result(c), 1ull << child);
}
"""


def word(n: int) -> bytes:
    return struct.pack("Q", n)


def number(result: bytes) -> int:
    return int(struct.unpack_from("Q", result)[0])


with forebay.Grid(TASKS, ["square", "tree"], *sys.argv[1:2]) as grid:
    print("square:", number(grid.submit("square", word(12)).wait()))
    print("tree:", number(grid.submit("tree", word(12)).wait()))
    # A thousand small trees at a time, whose leaves add up.
    (ticket,) = grid.submit_all([("tree", word(3))] * 1000)
    print("a thousand trees:", number(ticket.wait()))
