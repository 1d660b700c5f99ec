// Forebay for C. Made by cbindgen from bindings/c/src; the rules are in docs/c.md.

#ifndef FOREBAY_H
#define FOREBAY_H

#include <stddef.h>
#include <stdint.h>

// Success.
#define FOREBAY_OK 0

// An argument that cannot be: NULL, text that is no UTF-8, a number that means nothing.
#define FOREBAY_INVALID 1

// Forebay's own error; the text says which.
#define FOREBAY_FAILED 2

// Not now: the channel is full or empty, or the time is over.
#define FOREBAY_AGAIN 3

// There is nothing any more: the graph was stopped or has ended.
#define FOREBAY_CLOSED 4

// A mistake inside Forebay.
#define FOREBAY_INTERNAL 5

// Mark of the first block of a stream.
#define FOREBAY_BEGIN_STREAM 1

// Mark of the last block of a stream.
#define FOREBAY_END_STREAM 2

// Mark of what the first invocation of a group made.
#define FOREBAY_BEGIN_ITERATION 4

// Mark of what the last invocation of a group made.
#define FOREBAY_END_ITERATION 8

// Bytes of a task's result.
#define FOREBAY_RESULT 40

// Tasks that can be submitted together, at most.
#define FOREBAY_TOGETHER 1024

// Waits for as long as it takes.
#define FOREBAY_FOREVER -1

// A task that is called like a function.
typedef struct forebay_accelerated forebay_accelerated;

// A unit of data.
typedef struct forebay_block forebay_block;

// What knows how data gets to one device fastest. Any thread's.
typedef struct forebay_engine forebay_engine;

// A graph under construction.
typedef struct forebay_graph forebay_graph;

// A grid that runs.
typedef struct forebay_grid forebay_grid;

// A transfer under way.
typedef struct forebay_in_flight forebay_in_flight;

// One invocation of a task's function.
typedef struct forebay_invocation forebay_invocation;

// Memory of a device. Any thread's.
typedef struct forebay_memory forebay_memory;

// A call whose outputs come later.
typedef struct forebay_pending forebay_pending;

// Host memory from which a device copies fastest, zeroed at first. One thread's at a time.
typedef struct forebay_pinned forebay_pinned;

// A goal that is being pursued.
typedef struct forebay_pursuit forebay_pursuit;

// A graph that runs.
typedef struct forebay_running forebay_running;

// The devices of this machine, and the workers.
typedef struct forebay_runtime forebay_runtime;

// Transfers in order, of one thread at a time; a real-time one is only for the thread that made it.
typedef struct forebay_stream forebay_stream;

// A task under construction; each call replaces what is inside.
typedef struct forebay_task forebay_task;

// A task that was submitted; one thread's at a time.
typedef struct forebay_ticket forebay_ticket;

// What a goal is measured by; NaN when there is nothing to say.
typedef double (*forebay_tracker)(void *user);

// Asks the program for a fidelity: 0 is the best, each more is lower.
typedef void (*forebay_fidelity)(void *user, uint32_t level);

// Is called with `user` when the function is no longer needed.
typedef void (*forebay_release)(void *user);

// Hears of a decision: when it was made, in seconds since the beginning, and a line on what was measured and done, and why.
typedef void (*forebay_decision)(void *user, double at, const char *line);

// What to submit. All zeros but the function is a task without arguments, for one item, with all the fuel that it wants.
typedef struct {
  // The number of its function.
  uint32_t function;
  // Units of work that it and all that comes of it may use; 0 for as many as they want.
  uint32_t fuel;
  // Its arguments, and how many bytes they are: 32 at most.
  const void *args;
  // Bytes at `args`.
  size_t bytes;
  // Its first item.
  uint64_t first;
  // How many items it is for, from there on. 0 is 1 item; a range of none is not to be had from C.
  uint64_t count;
  // Not 0: before what is not urgent.
  int32_t urgent;
} forebay_grid_call;

// What is told of a device: its name and its kind, which hold until the function returns.
typedef void (*forebay_device_teller)(void *user, const char *name, const char *kind);

// Numbers of one task; all of it holds until the function that is told of them returns.
typedef struct {
  // Its name.
  const char *name;
  // "waiting", "queued", "executing" or "completed".
  const char *state;
  // How often it was done so far.
  uint64_t invocations;
  // What it takes lately, nanoseconds; 0 for tasks that need no scheduling.
  uint64_t run_ns;
  // How long it waits for a device lately, nanoseconds.
  uint64_t wait_ns;
  // How often it was done on each device, in the order of [`forebay_runtime_list`].
  const uint64_t *by_device;
  // How many devices there are.
  size_t devices;
} forebay_task_numbers;

// What is told of a task.
typedef void (*forebay_task_teller)(void *user, const forebay_task_numbers *task);

// A function that does a task's work on the CPU: 0 for success. It may be called on any thread, never twice at once.
typedef int32_t (*forebay_function)(forebay_invocation *invocation, void *user);

// What a real-time stream may take from others, in microseconds.
typedef struct {
  // Time in transfers, with real-time priority, within a period.
  uint64_t run;
  // The period.
  uint64_t period;
  // Longest time that one wait spins.
  uint64_t spin;
} forebay_budget;

// What a real-time stream got of what it asked for.
typedef struct {
  // Its thread's priority under SCHED_FIFO (or SCHED_RR, if it had that and no less; 100 with SCHED_DEADLINE); 0 when the system
  // refused, and it is an ordinary thread.
  int32_t fifo;
  // The nice value of an ordinary thread.
  int32_t nice;
  // Not 0: what it stages data in is locked into memory.
  int32_t locked;
  // Periods in which it used up its budget, and went on with ordinary priority.
  uint64_t overruns;
} forebay_protection;

// One of several transfers: places on both sides.
typedef struct {
  // Offset in the host's memory.
  uint64_t host;
  // Offset in the device's.
  uint64_t device;
  // Length.
  uint64_t bytes;
} forebay_range;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Why this thread's last call that failed did so; valid until it calls something else. Never NULL.
const char *forebay_error(void);

// Forebay's version, as "0.1.0".
const char *forebay_version(void);

// Makes a block of a template, "f32[640x480]" (an array), "u32<=1000" (at most so many elements) or "bytes<=4096", with these
// bytes: as many as the template has, or fewer for records and bytes. With `data` NULL and `len` 0
// a block of zeros.
int32_t forebay_block_new(const char *of,
                          const void *data,
                          size_t len,
                          forebay_block **block);

// Its bytes, copied to the host first if they are only on a device.
int32_t forebay_block_data(const forebay_block *block, const void **data, size_t *len);

// Its bytes for writing, which needs the only handle: all that fit, not only those of its elements.
int32_t forebay_block_data_mut(forebay_block *block, void **data, size_t *len);

// How many elements it has, of records and bytes.
int32_t forebay_block_records(const forebay_block *block, size_t *n);

// Sets how many elements it has, of records and bytes.
int32_t forebay_block_set_records(forebay_block *block, size_t n);

// Its marks, which predicates go by.
int32_t forebay_block_signals(const forebay_block *block, uint32_t *signals);

// Sets its marks; tasks pass those of streams from their inputs to their outputs.
int32_t forebay_block_set_signals(forebay_block *block, uint32_t signals);

// Waits until its bytes are made, wherever that is; whoever reads them waits of himself.
int32_t forebay_block_wait(const forebay_block *block);

// Another handle to the same block, for pushing it to several places. Neither can be written then.
int32_t forebay_block_share(const forebay_block *block, forebay_block **other);

// Gives a block back.
void forebay_block_free(forebay_block *block);

// Makes a task that is called like a function, each call on the device that is predicted to end it first, if the runtime's mode
// is "adaptive"; takes the task.
int32_t forebay_accelerate(const forebay_runtime *runtime,
                           forebay_task *task,
                           forebay_accelerated **made);

// The same with a lane for each of `n` tasks that are all alike, at most 16: so many calls are done side by side. Takes all
// tasks.
int32_t forebay_accelerate_lanes(const forebay_runtime *runtime,
                                 forebay_task *const *tasks,
                                 size_t n,
                                 forebay_accelerated **made);

// Calls it with blocks for its inputs in the order of their ports, which stay the caller's, and waits for its outputs, which
// are the caller's then.
int32_t forebay_call(const forebay_accelerated *task,
                     const forebay_block *const *inputs,
                     size_t n_inputs,
                     forebay_block **outputs,
                     size_t n_outputs);

// Calls it and does not wait: the outputs come by [`forebay_wait`]. Waits only while each lane has as many calls as it may.
int32_t forebay_spawn(const forebay_accelerated *task,
                      const forebay_block *const *inputs,
                      size_t n_inputs,
                      forebay_pending **call);

// The same, and waits so long for that at most, ms: 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when there
// was no room.
int32_t forebay_spawn_within(const forebay_accelerated *task,
                             const forebay_block *const *inputs,
                             size_t n_inputs,
                             int64_t wait_ms,
                             forebay_pending **call);

// Waits for the outputs of a call, which are the caller's then; takes the call.
int32_t forebay_wait(forebay_pending *call, forebay_block **outputs, size_t n_outputs);

// The same, and waits so long at most, ms: 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when the outputs
// did not come: only then the call is not taken, and can be waited for again.
int32_t forebay_wait_within(forebay_pending *call,
                            int64_t wait_ms,
                            forebay_block **outputs,
                            size_t n_outputs);

// Gives up a call whose outputs nobody wants.
void forebay_pending_free(forebay_pending *call);

// Ends it: no call begins any more, and what is made or has not begun is FOREBAY_CLOSED. Waits for calls that run, so long at most, ms:
// 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when one did not end in time; it ends when it ends.
int32_t forebay_accelerated_stop_within(const forebay_accelerated *task,
                                        int64_t wait_ms);

// Gives it back. Waits for calls that run.
void forebay_accelerated_free(forebay_accelerated *task);

// Pursues a goal from now on: "throughput" (`value` of what the tracker counts in a second), "latency" (`value` seconds for a
// call), "deadline" (all of the work, of which the tracker says the part that is done, within `value` seconds), or "least" (of
// what the tracker says). Every half second the tracker is asked; while the goal is missed the task gets more lanes, then a
// larger share from the service, and last `fidelity` (NULL if `lowest` is 0) is asked for levels up to `lowest`. `release` (or
// NULL) is called with `user` when neither function will be called again, at the latest half a second after the pursuit is
// freed, or when the function that runs then returns; also if this fails.
int32_t forebay_pursue(const forebay_accelerated *task,
                       const char *goal,
                       double value,
                       forebay_tracker tracker,
                       uint32_t lowest,
                       forebay_fidelity fidelity,
                       void *user,
                       forebay_release release,
                       forebay_pursuit **pursuit);

// Calls `hears` for each of the last thousand decisions, before it returns.
int32_t forebay_pursuit_log(const forebay_pursuit *pursuit, forebay_decision hears, void *user);

// Gives the goal up, and what was asked for it back; NULL is nothing to free.
void forebay_pursuit_free(forebay_pursuit *pursuit);

// Makes an empty graph.
int32_t forebay_graph_new(const char *name, forebay_graph **graph);

// Reads a graph file, with the functions of the standard library and the kernels that it names.
int32_t forebay_graph_load(const char *path, forebay_graph **graph);

// Gives a graph back that was not started.
void forebay_graph_free(forebay_graph *graph);

// Adds a task, and takes it.
int32_t forebay_graph_add(forebay_graph *graph, forebay_task *task);

// Connects an output port with an input port, "blur.y" with "edges.x", by a channel of this capacity.
int32_t forebay_graph_connect(forebay_graph *graph, const char *from, const char *to, size_t capacity);

// As forebay_graph_connect, with a predicate: "only MARK", "unless MARK", "open-from MARK" or "close-after MARK", the mark being
// "begin-stream", "end-stream", "begin-iteration" or "end-iteration". Blocks that do not pass are dropped.
int32_t forebay_graph_connect_when(forebay_graph *graph,
                                   const char *from,
                                   const char *to,
                                   size_t capacity,
                                   const char *when);

// Makes a channel into which the program pushes. Feeds are numbered from 0, in the order in which they are made; those of a
// graph file as they stand there.
int32_t forebay_graph_feed(forebay_graph *graph,
                           const char *to,
                           size_t capacity,
                           uint32_t *feed);

// Makes a channel from which the program pulls; numbered as feeds are.
int32_t forebay_graph_drain(forebay_graph *graph, const char *from, size_t capacity, uint32_t *drain);

// As forebay_graph_drain, with a predicate as forebay_graph_connect_when has them.
int32_t forebay_graph_drain_when(forebay_graph *graph,
                                 const char *from,
                                 size_t capacity,
                                 const char *when,
                                 uint32_t *drain);

// Checks a graph as its start would, without running anything.
int32_t forebay_graph_check(forebay_graph *graph);

// Starts a grid with the task functions in `source`, CUDA C++ as docs/resident.md says; `functions` has the names of those
// that may be submitted or made by tasks, with spaces between them. On `device`: "cpu", "cuda", or NULL for CUDA if it is
// there. `blocks`: 0 for as many as there is room for. `heap`: bytes that tasks may allocate, or 0.
int32_t forebay_grid_new(const char *source,
                         const char *functions,
                         const char *device,
                         size_t blocks,
                         uint64_t heap,
                         forebay_grid **grid);

// Ends a grid after the tasks that are running, and gives it back. Tickets stay good, and must be freed.
void forebay_grid_free(forebay_grid *grid);

// The number of a function.
int32_t forebay_grid_function(const forebay_grid *grid, const char *name, uint32_t *number);

// Submits a task. Waits for room if `wait` is not 0; else FOREBAY_AGAIN when there is none. `ticket` may be NULL: nobody
// waits for the task then.
int32_t forebay_grid_submit(const forebay_grid *grid,
                            const forebay_grid_call *call,
                            int32_t wait,
                            forebay_ticket **ticket);

// Submits `n` tasks together, 1 to FOREBAY_TOGETHER of them, which costs a fraction of submitting each: their one ticket is
// done when all of them are, and they share a result. They have their fuel together, if all have some, and are urgent if the
// first one is. Waits for room. `ticket` may be NULL.
int32_t forebay_grid_submit_all(const forebay_grid *grid,
                                const forebay_grid_call *calls,
                                size_t n,
                                forebay_ticket **ticket);

// Waits until a task and all that came of it are done, for so many ms: 0 not at all, FOREBAY_FOREVER for as long as it takes.
// FOREBAY_AGAIN when it is not done by then; the reason names a block that is stuck, if there is one. `result`, if not NULL,
// gets FOREBAY_RESULT bytes. A result is had once; the ticket is freed all the same.
int32_t forebay_grid_wait(const forebay_grid *grid,
                          forebay_ticket *ticket,
                          int64_t wait_ms,
                          void *result);

// Gives a ticket back; its task goes on.
void forebay_ticket_free(forebay_ticket *ticket);

// Ends a grid after all that was submitted is done.
int32_t forebay_grid_drain(forebay_grid *grid);

// The same, but waits so many ms at most: FOREBAY_AGAIN when it takes longer; the reason names a block that is stuck. Nothing
// more can be submitted then, and this or forebay_grid_stop can be called again.
int32_t forebay_grid_drain_within(forebay_grid *grid,
                                  uint32_t wait_ms);

// Ends a grid after the tasks that are running, and waits for them so many ms at most. FOREBAY_AGAIN when they take longer;
// the reason names one that is stuck. What was not begun is FOREBAY_CLOSED for whoever waits for it.
int32_t forebay_grid_stop(forebay_grid *grid,
                          uint32_t wait_ms);

// Makes a runtime with the CPU and devices of this kind: "cpu" (none besides), "opencl", "cuda", one of several ("cuda:1"), or NULL
// for the accelerators that there are. `mode` is "first-available", "fifo", "priority", "data-aware" or "adaptive", or NULL for data-aware.
int32_t forebay_runtime_new(const char *device,
                            const char *mode,
                            forebay_runtime **runtime);

// Gives a runtime back; graphs that it runs go on.
void forebay_runtime_free(forebay_runtime *runtime);

// How many devices a runtime has, the CPU included.
int32_t forebay_runtime_devices(const forebay_runtime *runtime, size_t *n);

// Checks a graph, compiles its kernels and starts it; takes the graph.
int32_t forebay_start(const forebay_runtime *runtime, forebay_graph *graph, forebay_running **running);

// Ends a graph: what is under way is done, what waits is dropped.
void forebay_running_free(forebay_running *running);

// A block for a feed, with any contents: to be filled through forebay_block_data_mut, which waits for a device that still reads
// what the block held last, and pushed there. Where many are pushed this is the way: it takes the feed's own memory again and
// again, which is page-locked where the runtime has a GPU.
int32_t forebay_acquire(const forebay_running *running,
                        uint32_t feed,
                        forebay_block **block);

// Pushes a block into a feed, and takes it. Waits for room for so long, ms: 0 not at all, FOREBAY_FOREVER until there is.
// FOREBAY_AGAIN when there was none; the block is gone then, too.
int32_t forebay_push(const forebay_running *running,
                     uint32_t feed,
                     forebay_block *block,
                     int64_t wait_ms);

// Pulls the next block from a drain; waits as [`forebay_push`] does.
int32_t forebay_pull(const forebay_running *running, uint32_t drain, int64_t wait_ms, forebay_block **block);

// Stops a graph: no task begins any more, and those that run are waited for.
int32_t forebay_stop(const forebay_running *running);

// The same; waits for tasks that run as [`forebay_push`] does for room. FOREBAY_AGAIN when one did not end in time: no other begins,
// and it ends when it ends.
int32_t forebay_stop_within(const forebay_running *running,
                            int64_t wait_ms);

// Lets a stopped graph go on.
int32_t forebay_run(const forebay_running *running);

// Empties a stopped graph's channels and begins anew, also after an error.
int32_t forebay_reset(const forebay_running *running);

// FOREBAY_OK while nothing has failed; otherwise why the graph stopped.
int32_t forebay_running_error(const forebay_running *running);

// Calls `hears` for each device of a runtime, the CPU included, before it returns.
int32_t forebay_runtime_list(const forebay_runtime *runtime, forebay_device_teller hears, void *user);

// Calls `hears` for each task of a running graph, in the order of their addition, before it returns: where it was done, how often
// and how fast.
int32_t forebay_running_tasks(const forebay_running *running,
                              forebay_task_teller hears,
                              void *user);

// The same of a task that is called like a function, for each of its lanes.
int32_t forebay_accelerated_tasks(const forebay_accelerated *task, forebay_task_teller hears, void *user);

// Makes a task of this name.
int32_t forebay_task_new(const char *name, forebay_task **task);

// Gives a task back that was not added to a graph.
void forebay_task_free(forebay_task *task);

// Adds an input port.
int32_t forebay_task_input(forebay_task *task, const char *port, const char *of);

// Adds an input port that keeps its block until another one comes.
int32_t forebay_task_sticky(forebay_task *task, const char *port, const char *of);

// Adds an output port.
int32_t forebay_task_output(forebay_task *task, const char *port, const char *of);

// Adds a port whose block comes in, is changed, and goes out.
int32_t forebay_task_inout(forebay_task *task, const char *port, const char *of);

// Adds a port of any kind. `kind` is "input", "sticky", "output", "inout" or "meta" (one number that kernels may take), with the
// port's template as `of`; "size", with the output that the number at it sizes; "initializer", with the input that it stands in
// for at the start; "in-place", an output, with the input whose block it is; "geometry" (three u64: the iteration space) or
// "iterations" (one u64: how many invocations come as a group), with NULL.
int32_t forebay_task_port(forebay_task *task,
                          const char *kind,
                          const char *port,
                          const char *of);

// Has invocations come in groups of `n`: outputs of the first carry FOREBAY_BEGIN_ITERATION, of the last
// FOREBAY_END_ITERATION, and initializers stand in at the start of each group.
int32_t forebay_task_iterations(forebay_task *task, uint64_t n);

// Lets a function do the work on the CPU. `release` (or NULL) is called with `user` when the function is no longer needed,
// also when this call fails.
int32_t forebay_task_host(forebay_task *task,
                          forebay_function function,
                          void *user,
                          forebay_release release);

// Lets a kernel do the work on devices of one kind, "opencl" (OpenCL C) or "cuda" (CUDA C++), or on both with NULL (a text
// in the subset of both: KERNEL, GLOBAL, gid_x(); docs/c.md). `args` are the kernel's arguments, with spaces between them:
// ports ("x"), numbers ("u32:5", "i32:-5", "f32:0.5"), "items.x" to "items.z" of the iteration space, "records.x" of a port;
// with NULL the ports in the order in which they were declared, inputs first.
int32_t forebay_task_kernel(forebay_task *task,
                            const char *kind,
                            const char *source,
                            const char *entry,
                            const char *args);

// Sets the static priority: more comes first.
int32_t forebay_task_priority(forebay_task *task, int32_t priority);

// Sets the iteration space instead of the one that the templates imply.
int32_t forebay_task_geometry(forebay_task *task, size_t x, size_t y, size_t z);

// The bytes at an input port, for reading.
int32_t forebay_invocation_input(forebay_invocation *invocation, const char *port, const void **data, size_t *len);

// The bytes at an output port, for writing; once in an invocation.
int32_t forebay_invocation_output(forebay_invocation *invocation, const char *port, void **data, size_t *len);

// Sets how many elements go out at a port of records or bytes.
int32_t forebay_invocation_set_records(forebay_invocation *invocation, const char *port, size_t n);

// Which invocation of its group this is, from 0.
int32_t forebay_invocation_iteration(forebay_invocation *invocation, uint64_t *n);

// Has a task without inputs end: this is its last invocation.
int32_t forebay_invocation_finish(forebay_invocation *invocation);

// Says why the function fails; it then returns anything.
int32_t forebay_invocation_fail(forebay_invocation *invocation, const char *why);

// Opens the engine of a device: the first one of a kind ("cuda", "opencl", "cpu"), one of several ("cuda:1"), or with NULL the
// first one that there is, in this order. The first time on a machine it measures all ways of moving data, for two seconds at most.
int32_t forebay_engine_new(const char *device,
                           forebay_engine **engine);

// Lets go of an engine; its memory and its streams stay good.
void forebay_engine_free(forebay_engine *engine);

// What a transfer is expected to take when nothing else is in flight, in nanoseconds: as a rule, and when it is as slow as
// the slowest that was measured. `to_host`: not 0 for from the device; `pinned`: not 0 for memory of `forebay_pinned_new`. Either place may
// be NULL.
int32_t forebay_engine_cost(const forebay_engine *engine,
                            int32_t to_host,
                            uint64_t bytes,
                            int32_t pinned,
                            uint64_t *usual,
                            uint64_t *slow);

// Allocates memory of the device, which every way serves: the processor's own stores included, where the device has that.
int32_t forebay_memory_new(const forebay_engine *engine,
                           size_t bytes,
                           forebay_memory **memory);

// Frees memory, once no transfer uses it any more.
void forebay_memory_free(forebay_memory *memory);

// Its address on the device, for kernels of your own: with CUDA a CUdeviceptr of the device's primary context, which the
// runtime API uses as well. 0 where memory has none (OpenCL).
uint64_t forebay_memory_address(const forebay_memory *memory);

// Allocates host memory from which the device copies fastest.
int32_t forebay_pinned_new(const forebay_engine *engine, size_t bytes, forebay_pinned **pinned);

// Where it is; NULL of NULL.
void *forebay_pinned_bytes(const forebay_pinned *pinned);

// Touches every page and asks the system to keep it in memory, for as long as it lives; FOREBAY_FAILED where it refuses.
int32_t forebay_pinned_lock(forebay_pinned *pinned);

// Frees it.
void forebay_pinned_free(forebay_pinned *pinned);

// Makes a stream.
int32_t forebay_stream_new(const forebay_engine *engine, forebay_stream **stream);

// Makes a real-time stream of the calling thread, which gets real-time priority or the best that the system allows
// (`forebay_stream_protection`) until the stream is freed. `budget` NULL: half of one processor, 50 ms of 100, spinning a
// millisecond at a time.
int32_t forebay_stream_new_real_time(const forebay_engine *engine,
                                     const forebay_budget *budget,
                                     forebay_stream **stream);

// What a real-time stream got of what it asked for.
int32_t forebay_stream_protection(const forebay_stream *stream, forebay_protection *protection);

// From now on transfers of the stream are to arrive within so many nanoseconds: they go by the way whose slow copies are
// fastest. 0 goes back to the way that is fastest as a rule.
int32_t forebay_stream_set_deadline(forebay_stream *stream,
                                    uint64_t deadline);

// Ends a stream after what it began. A real-time one gives its thread's priority back, whoever frees it; where a thread has
// several, the last one does.
void forebay_stream_free(forebay_stream *stream);

// Sends bytes to a device's memory at `offset`, by the way that is fastest for so many; they have arrived when this returns.
int32_t forebay_write(forebay_stream *stream,
                      const forebay_memory *memory,
                      size_t offset,
                      const void *from,
                      size_t bytes);

// Brings bytes from a device's memory at `offset`.
int32_t forebay_read(forebay_stream *stream, const forebay_memory *memory, size_t offset, void *to, size_t bytes);

// As `forebay_write`, from page-locked memory at `at`.
int32_t forebay_write_pinned(forebay_stream *stream,
                             const forebay_memory *memory,
                             size_t offset,
                             const forebay_pinned *from,
                             size_t at,
                             size_t bytes);

// As `forebay_read`, to page-locked memory at `at`.
int32_t forebay_read_pinned(forebay_stream *stream,
                            const forebay_memory *memory,
                            size_t offset,
                            forebay_pinned *to,
                            size_t at,
                            size_t bytes);

// Sends several parts of the `len` bytes at `from` at once, for one wait. What overlaps ends up as if they were sent one after
// the other. A real-time stream's budget does not count it.
int32_t forebay_write_batch(forebay_stream *stream,
                            const forebay_memory *memory,
                            const void *from,
                            size_t len,
                            const forebay_range *ranges,
                            size_t count);

// Brings several parts at once, for one wait, to their places in the `len` bytes at `to`.
int32_t forebay_read_batch(forebay_stream *stream,
                           const forebay_memory *memory,
                           void *to,
                           size_t len,
                           const forebay_range *ranges,
                           size_t count);

// Copies within the device. A real-time stream's budget does not count it.
int32_t forebay_copy(forebay_stream *stream,
                     const forebay_memory *from,
                     size_t from_at,
                     const forebay_memory *to,
                     size_t to_at,
                     size_t bytes);

// Copies to another device, whose stream `other` is: directly, if that one reaches this one's memory, else by way of the host, piece by
// piece. Real-time streams' budgets do not count it.
int32_t forebay_relay(forebay_stream *stream,
                      const forebay_memory *from,
                      size_t from_at,
                      forebay_stream *other,
                      const forebay_memory *to,
                      size_t to_at,
                      size_t bytes);

// Sends bytes without proof of arrival, where the processor stores them itself: they arrive soon, and before whatever this
// stream posts to that memory afterwards. A doorbell for a kernel of your own, that is. Nothing that was started may use that
// part of the memory any more.
int32_t forebay_post(forebay_stream *stream,
                     const forebay_memory *memory,
                     size_t offset,
                     const void *from,
                     size_t bytes);

// Begins to send all of page-locked memory, which is taken until `forebay_finish` gives it back. Later transfers of the stream
// come behind it.
int32_t forebay_start_write(forebay_stream *stream,
                            const forebay_memory *memory,
                            size_t offset,
                            forebay_pinned *from,
                            forebay_in_flight **started);

// Begins to fill page-locked memory, which is taken until `forebay_finish` gives it back.
int32_t forebay_start_read(forebay_stream *stream,
                           const forebay_memory *memory,
                           size_t offset,
                           forebay_pinned *to,
                           forebay_in_flight **started);

// Waits for a transfer that this stream began, which is taken, and gives its memory back.
int32_t forebay_finish(forebay_stream *stream, forebay_in_flight *started, forebay_pinned **pinned);

// Forgets a transfer under way: it is made all the same, and its memory freed after it.
void forebay_in_flight_free(forebay_in_flight *started);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FOREBAY_H */
