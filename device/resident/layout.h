// Made from crates/forebay/src/resident/layout.rs; `cargo test` says when it is out of date.
#pragma once
#if defined(__CUDACC_RTC__)
#define FB_OFFSET(T, f) __INTADDR__(&((T *)0)->f)
#else
#define FB_OFFSET(T, f) __builtin_offsetof(T, f)
#endif
#define FB_STOP_DRAIN 1u
#define FB_STOP_NOW 2u
#define FB_UNKNOWN_FUNCTION 1u
#define FB_OUT_OF_FUEL 2u
#define FB_ROOT_BITS 21u
#define FB_LIMITED 2u
#define FB_SINGLE 2147483648u
#define FB_BAD_FREE 4u
#define FB_NO_ROOM 8u
#define FB_FIRST_OWN 256u
#define FB_POSTS 256u
#define FB_POST_WORDS 16u
#define FB_NONE 4294967295u
struct alignas(64) Slot {
  u64 first;
  u32 fuel;
  u32 root;
  unsigned char args[32];
  u64 count;
  u32 function;
  u32 seq;
};
static_assert(sizeof(Slot) == 64, "size");
static_assert(FB_OFFSET(Slot, first) == 0, "offset");
static_assert(FB_OFFSET(Slot, fuel) == 8, "offset");
static_assert(FB_OFFSET(Slot, root) == 12, "offset");
static_assert(FB_OFFSET(Slot, args) == 16, "offset");
static_assert(FB_OFFSET(Slot, count) == 48, "offset");
static_assert(FB_OFFSET(Slot, function) == 56, "offset");
static_assert(FB_OFFSET(Slot, seq) == 60, "offset");
struct alignas(16) Quad {
  u32 words[3];
  u32 seq;
};
static_assert(sizeof(Quad) == 16, "size");
static_assert(FB_OFFSET(Quad, words) == 0, "offset");
static_assert(FB_OFFSET(Quad, seq) == 12, "offset");
struct alignas(64) Done {
  struct Quad quads[4];
};
static_assert(sizeof(Done) == 64, "size");
static_assert(FB_OFFSET(Done, quads) == 0, "offset");
struct alignas(8) Task {
  u32 function;
  u32 root;
  u64 first;
  u64 count;
  u32 priority;
  u32 counted;
  unsigned char args[32];
};
static_assert(sizeof(Task) == 64, "size");
static_assert(FB_OFFSET(Task, function) == 0, "offset");
static_assert(FB_OFFSET(Task, root) == 4, "offset");
static_assert(FB_OFFSET(Task, first) == 8, "offset");
static_assert(FB_OFFSET(Task, count) == 16, "offset");
static_assert(FB_OFFSET(Task, priority) == 24, "offset");
static_assert(FB_OFFSET(Task, counted) == 28, "offset");
static_assert(FB_OFFSET(Task, args) == 32, "offset");
struct alignas(64) Root {
  u32 remaining;
  u32 status;
  u32 fuel;
  u32 seq;
  u32 result[10];
};
static_assert(sizeof(Root) == 64, "size");
static_assert(FB_OFFSET(Root, remaining) == 0, "offset");
static_assert(FB_OFFSET(Root, status) == 4, "offset");
static_assert(FB_OFFSET(Root, fuel) == 8, "offset");
static_assert(FB_OFFSET(Root, seq) == 12, "offset");
static_assert(FB_OFFSET(Root, result) == 16, "offset");
struct alignas(8) Cell {
  u32 seq;
  u32 unused;
  struct Task task;
};
static_assert(sizeof(Cell) == 72, "size");
static_assert(FB_OFFSET(Cell, seq) == 0, "offset");
static_assert(FB_OFFSET(Cell, unused) == 4, "offset");
static_assert(FB_OFFSET(Cell, task) == 8, "offset");
struct alignas(128) Queue {
  u32 count;
  u32 pad0[31];
  u32 space;
  u32 pad1[31];
  u32 head;
  u32 pad2[31];
  u32 tail;
  u32 size;
  struct Cell *cells;
};
static_assert(sizeof(Queue) == 512, "size");
static_assert(FB_OFFSET(Queue, count) == 0, "offset");
static_assert(FB_OFFSET(Queue, pad0) == 4, "offset");
static_assert(FB_OFFSET(Queue, space) == 128, "offset");
static_assert(FB_OFFSET(Queue, pad1) == 132, "offset");
static_assert(FB_OFFSET(Queue, head) == 256, "offset");
static_assert(FB_OFFSET(Queue, pad2) == 260, "offset");
static_assert(FB_OFFSET(Queue, tail) == 384, "offset");
static_assert(FB_OFFSET(Queue, size) == 388, "offset");
static_assert(FB_OFFSET(Queue, cells) == 392, "offset");
struct alignas(128) Post {
  u64 words[16];
};
static_assert(sizeof(Post) == 128, "size");
static_assert(FB_OFFSET(Post, words) == 0, "offset");
struct alignas(8) Node {
  u32 pending;
  u32 unused;
  struct Task task;
};
static_assert(sizeof(Node) == 72, "size");
static_assert(FB_OFFSET(Node, pending) == 0, "offset");
static_assert(FB_OFFSET(Node, unused) == 4, "offset");
static_assert(FB_OFFSET(Node, task) == 8, "offset");
struct alignas(8) Ring {
  struct Slot *slots;
  u32 size;
  u32 unused;
};
static_assert(sizeof(Ring) == 16, "size");
static_assert(FB_OFFSET(Ring, slots) == 0, "offset");
static_assert(FB_OFFSET(Ring, size) == 8, "offset");
static_assert(FB_OFFSET(Ring, unused) == 12, "offset");
struct alignas(128) Head {
  u32 next;
  u32 keeper;
};
static_assert(sizeof(Head) == 128, "size");
static_assert(FB_OFFSET(Head, next) == 0, "offset");
static_assert(FB_OFFSET(Head, keeper) == 4, "offset");
struct alignas(64) Beat {
  u32 epoch;
  u32 busy;
  u32 function;
  u32 root;
};
static_assert(sizeof(Beat) == 64, "size");
static_assert(FB_OFFSET(Beat, epoch) == 0, "offset");
static_assert(FB_OFFSET(Beat, busy) == 4, "offset");
static_assert(FB_OFFSET(Beat, function) == 8, "offset");
static_assert(FB_OFFSET(Beat, root) == 12, "offset");
struct alignas(64) Control {
  u32 stop;
  u32 unused;
};
static_assert(sizeof(Control) == 64, "size");
static_assert(FB_OFFSET(Control, stop) == 0, "offset");
static_assert(FB_OFFSET(Control, unused) == 4, "offset");
struct alignas(128) State {
  struct Head heads[2];
  struct Queue queues[2];
  struct Queue free_nodes;
  u32 idle;
  u32 permits;
  u32 stop;
  u32 unused;
  u32 pad[28];
  u64 waiting[4];
};
static_assert(sizeof(State) == 2048, "size");
static_assert(FB_OFFSET(State, heads) == 0, "offset");
static_assert(FB_OFFSET(State, queues) == 256, "offset");
static_assert(FB_OFFSET(State, free_nodes) == 1280, "offset");
static_assert(FB_OFFSET(State, idle) == 1792, "offset");
static_assert(FB_OFFSET(State, permits) == 1796, "offset");
static_assert(FB_OFFSET(State, stop) == 1800, "offset");
static_assert(FB_OFFSET(State, unused) == 1804, "offset");
static_assert(FB_OFFSET(State, pad) == 1808, "offset");
static_assert(FB_OFFSET(State, waiting) == 1920, "offset");
struct alignas(8) Grid {
  struct State *state;
  struct Ring rings[2];
  u32 blocks;
  u32 limited;
  u64 grain;
  struct Node *nodes;
  struct Root *roots;
  struct Done *done;
  struct Beat *beats;
  struct Control *control;
  struct Task *calls;
  struct Task *aside;
  u32 aside_size;
  u32 halves;
  unsigned char *heap;
  struct Post *posts;
};
static_assert(sizeof(Grid) == 136, "size");
static_assert(FB_OFFSET(Grid, state) == 0, "offset");
static_assert(FB_OFFSET(Grid, rings) == 8, "offset");
static_assert(FB_OFFSET(Grid, blocks) == 40, "offset");
static_assert(FB_OFFSET(Grid, limited) == 44, "offset");
static_assert(FB_OFFSET(Grid, grain) == 48, "offset");
static_assert(FB_OFFSET(Grid, nodes) == 56, "offset");
static_assert(FB_OFFSET(Grid, roots) == 64, "offset");
static_assert(FB_OFFSET(Grid, done) == 72, "offset");
static_assert(FB_OFFSET(Grid, beats) == 80, "offset");
static_assert(FB_OFFSET(Grid, control) == 88, "offset");
static_assert(FB_OFFSET(Grid, calls) == 96, "offset");
static_assert(FB_OFFSET(Grid, aside) == 104, "offset");
static_assert(FB_OFFSET(Grid, aside_size) == 112, "offset");
static_assert(FB_OFFSET(Grid, halves) == 116, "offset");
static_assert(FB_OFFSET(Grid, heap) == 120, "offset");
static_assert(FB_OFFSET(Grid, posts) == 128, "offset");
