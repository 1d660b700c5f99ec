//! The memory of a grid as it begins: on the CPU that is where it runs, for other devices it is what is copied to them.

use super::Sizes;
use super::heap::Heap;
use super::layout::{self, Beat, Cell, Control, Done, Node, Post, Queue, Ring, Root, Slot, State, Task};
use super::together::{PIECES, TOGETHER};

/// Everything that blocks and host share; freed when the last of them has gone.
pub(super) struct Memory {
    _heap: Option<Heap>,
    pub(super) grid: Box<layout::Grid>,
    pub(super) state: Box<State>,
    slots: [Box<[Slot]>; 2],
    done: Box<[Done]>,
    pub(super) roots: Box<[Root]>,
    pub(super) cells: [Box<[Cell]>; 3],
    pub(super) nodes: Box<[Node]>,
    aside: Box<[Task]>,
    pub(super) posts: Box<[Post]>,
    calls: Box<[Task]>,
    beats: Box<[Beat]>,
    control: Box<Control>,
}

// SAFETY: what both sides touch is atomic words and what their protocol (docs/resident.md) gives to one side at a time;
// blocks get an address, the host goes through `Shared`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Not touched, so that it takes no memory before it is used.
fn zeroed<T: bytemuck::Zeroable>(n: usize) -> Box<[T]> {
    bytemuck::zeroed_slice_box(n)
}

fn queue(cells: &mut [Cell]) -> Queue {
    cells.iter_mut().zip(0..).for_each(|(c, i)| c.seq = i);
    let size = cells.len() as u32;
    let pad = [0; 31];
    Queue { count: 0, pad0: pad, space: size, pad1: pad, head: 0, pad2: pad, tail: 0, size, cells: cells.as_mut_ptr() }
}

impl Memory {
    pub(super) fn new(sizes: &Sizes, blocks: usize, mut heap: Option<Heap>) -> Box<Self> {
        let &Sizes { ring, nodes, queue: places, aside, grain, .. } = sizes;
        let rings = [ring; 2];
        let roots = rings[0] + rings[1];
        let heap_at = heap.as_mut().map_or(std::ptr::null_mut(), Heap::address);
        let mut m = Box::new(Memory {
            _heap: heap,
            grid: bytemuck::zeroed_box(),
            state: bytemuck::zeroed_box(),
            slots: rings.map(zeroed),
            done: zeroed(roots),
            roots: zeroed(roots),
            cells: [zeroed(places), zeroed(places), zeroed(nodes)],
            nodes: zeroed(nodes),
            aside: zeroed(aside * blocks),
            posts: zeroed(blocks.min(layout::POSTS)),
            calls: zeroed(TOGETHER * PIECES),
            beats: zeroed(blocks),
            control: Box::new(Control { stop: layout::RUN, unused: 0 }),
        });
        // All nodes are free.
        let mut free = queue(&mut m.cells[2]);
        for (cell, i) in m.cells[2].iter_mut().zip(0..) {
            cell.task.first = u64::from(i);
            cell.seq = i + 1;
        }
        (free.count, free.space, free.tail) = (nodes as u32, 0, nodes as u32);
        let ring = |slots: &mut [Slot]| Ring { slots: slots.as_mut_ptr(), size: slots.len() as u32, unused: 0 };
        let [urgent, ordinary] = &mut m.slots;
        let rings = [ring(urgent), ring(ordinary)];
        let [a, b, _] = &mut m.cells;
        let queues = [queue(a), queue(b)];
        (m.state.queues, m.state.free_nodes) = (queues, free);
        *m.grid = layout::Grid {
            state: &raw mut *m.state,
            rings,
            blocks: blocks as u32,
            limited: 0,
            grain,
            nodes: m.nodes.as_mut_ptr(),
            roots: m.roots.as_mut_ptr(),
            done: m.done.as_mut_ptr(),
            beats: m.beats.as_mut_ptr(),
            control: &raw mut *m.control,
            calls: m.calls.as_mut_ptr(),
            aside: m.aside.as_mut_ptr(),
            aside_size: aside as u32,
            halves: 0,
            heap: heap_at,
            posts: m.posts.as_mut_ptr(),
        };
        m
    }
}

/// The device's own layout of a task is what nodes and cells hold.
const _: () = assert!(size_of::<Task>() == 64);
