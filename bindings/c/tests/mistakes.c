// What C programs get wrong, one after the other.

#define _POSIX_C_SOURCE 200809L

#include <forebay.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int released;
static void release(void *user) {
  (void)user;
  released++;
}

#define EXPECT(status, call, part)                                                                  \
  do {                                                                                              \
    int got = (call);                                                                               \
    if (got != (status) || (got && !strstr(forebay_error(), part))) {                               \
      printf("line %d: %s: %d %s\n", __LINE__, #call, got, got ? forebay_error() : "");             \
      exit(1);                                                                                      \
    }                                                                                               \
  } while (0)
#define GOOD(call) EXPECT(FOREBAY_OK, call, "")

static int fails(forebay_invocation *in, void *user) {
  (void)user;
  return forebay_invocation_fail(in, "it did not like the data");
}
static int returns(forebay_invocation *in, void *user) {
  (void)in, (void)user;
  return 42;
}
// Twice the input, as records; and what a function may not do.
static int doubles(forebay_invocation *in, void *user) {
  const void *x;
  void *y;
  size_t n, m;
  if (forebay_invocation_input(in, "nothing", &x, &n) != FOREBAY_FAILED) return 1;
  if (forebay_invocation_output(in, "x", &y, &m) != FOREBAY_FAILED) return 2;
  if (forebay_invocation_input(in, "x", &x, &n)) return 3;
  if (forebay_invocation_output(in, "y", &y, &m) || m != 16) return 4;
  if (forebay_invocation_output(in, "y", &y, &m) == FOREBAY_OK) return 5;
  if (forebay_invocation_set_records(in, "y", 5) == FOREBAY_OK) return 6;
  for (size_t i = 0; i < n / 4; i++) ((uint32_t *)y)[i] = 2 * ((const uint32_t *)x)[i];
  ++*(int *)user;
  return forebay_invocation_set_records(in, "y", n / 4);
}
// The same once it may (1); says that it waits (2).
static int waits(forebay_invocation *in, void *user) {
  atomic_fetch_or((atomic_int *)user, 2);
  while (!(atomic_load((atomic_int *)user) & 1)) {}
  int count = 0;
  return doubles(in, &count);
}

// What a program with a goal is asked, how low it is to work, and how often it was let go.
typedef struct {
  atomic_int told, level, gone;
} Goal;
static double tells(void *user) {
  atomic_fetch_add(&((Goal *)user)->told, 1);
  return 1;
}
static void lower(void *user, uint32_t level) { atomic_store(&((Goal *)user)->level, (int)level); }
static void milliseconds(long ms) {
  const struct timespec t = {0, ms * 1000000};
  nanosleep(&t, NULL);
}
static void lets_go(void *user) { atomic_fetch_add(&((Goal *)user)->gone, 1); }
static void counts(void *user, double at, const char *line) {
  if (at > 0 && strstr(line, "1.0000: ")) ++*(int *)user;
}

// Words that nobody knows, and ports that cannot be.
static void words(void) {
  forebay_task *t;
  forebay_graph *g;
  forebay_block *b;
  uint32_t n;
  uint64_t i;
  GOOD(forebay_task_new("t", &t));
  EXPECT(FOREBAY_INVALID, forebay_task_port(t, "toaster", "x", "u32[1]"), "known: input, sticky");
  EXPECT(FOREBAY_INVALID, forebay_task_port(t, "input", "x", NULL), "");
  EXPECT(FOREBAY_INVALID, forebay_task_port(t, "meta", "x", "u8[1]"), "cannot hold u8");
  EXPECT(FOREBAY_INVALID, forebay_task_port(t, NULL, "x", "u8[1]"), "the kind");
  EXPECT(FOREBAY_INVALID, forebay_task_port(NULL, "input", "x", "u8[1]"), "the task");
  GOOD(forebay_task_port(t, "input", "x", "u32[1]"));
  GOOD(forebay_task_port(t, "in-place", "y", "x"));
  EXPECT(FOREBAY_INVALID, forebay_invocation_iteration(NULL, &i), "the invocation");
  EXPECT(FOREBAY_INVALID, forebay_invocation_finish(NULL), "the invocation");
  GOOD(forebay_task_host(t, fails, NULL, NULL));
  GOOD(forebay_graph_new("g", &g));
  GOOD(forebay_graph_add(g, t));
  EXPECT(FOREBAY_INVALID, forebay_graph_connect_when(g, "t.y", "t.x", 1, "sometimes"), "a predicate is");
  EXPECT(FOREBAY_INVALID, forebay_graph_drain_when(g, "t.y", 1, "only middle", &n), "end-iteration");
  EXPECT(FOREBAY_INVALID, forebay_graph_drain_when(g, "t.y", 1, NULL, &n), "the predicate");
  forebay_graph_free(g);
  // An initializer of nothing is told when the task is added.
  GOOD(forebay_task_new("t", &t));
  GOOD(forebay_task_port(t, "initializer", "x0", "x"));
  GOOD(forebay_task_iterations(t, 0));
  GOOD(forebay_graph_new("g", &g));
  EXPECT(FOREBAY_FAILED, forebay_graph_add(g, t), "no input port declared before");
  forebay_graph_free(g);
  GOOD(forebay_block_new("u32[1]", NULL, 0, &b));
  GOOD(forebay_block_set_signals(b, FOREBAY_BEGIN_STREAM | FOREBAY_END_STREAM));
  GOOD(forebay_block_signals(b, &n));
  if (n != 3) printf("signals: %u\n", n), exit(1);
  EXPECT(FOREBAY_INVALID, forebay_block_set_signals(b, 17), "0x10");
  GOOD(forebay_block_wait(b));
  EXPECT(FOREBAY_INVALID, forebay_block_signals(b, NULL), "NULL");
  EXPECT(FOREBAY_INVALID, forebay_block_wait(NULL), "the block");
  forebay_block_free(b);
}

static forebay_task *task(const char *name, forebay_function f, void *user) {
  forebay_task *t;
  GOOD(forebay_task_new(name, &t));
  GOOD(forebay_task_input(t, "x", "u32<=4"));
  GOOD(forebay_task_output(t, "y", "u32<=4"));
  GOOD(forebay_task_host(t, f, user, release));
  return t;
}

// A grid, and what one can get wrong with it.
static void grid(void) {
  static const char *tasks =
      "TASK(wait) { while (fb_load_sys(*(const u32 *const *)t->args) == 0) {} }\n"
      "TASK(endless) { while (fb_burn(c, 1)) {} }\n"
      "TASK(fails) { fb_fail(c->grid, c->root, FB_FIRST_OWN); }\n";
  forebay_grid *g;
  forebay_ticket *t, *other;
  forebay_grid_call call = {0};
  uint32_t gate = 0;
  const uint32_t *at = &gate;
  EXPECT(FOREBAY_INVALID, forebay_grid_new(NULL, "", NULL, 0, 0, &g), "source is NULL");
  EXPECT(FOREBAY_INVALID, forebay_grid_new("", "", NULL, 0, 0, NULL), "grid is NULL");
  EXPECT(FOREBAY_INVALID, forebay_grid_new("", "", "gpu", 0, 0, &g), "gpu");
  EXPECT(FOREBAY_FAILED, forebay_grid_new("", "", "sim", 0, 0, &g), "not on sim");
  EXPECT(FOREBAY_FAILED, forebay_grid_new("", "a-b", "cpu", 0, 0, &g), "a-b");
  int made = forebay_grid_new(tasks, "wait endless fails", "cpu", 1, 0, &g);
  if (made && strstr(forebay_error(), "compiler")) return;
  GOOD(made);
  EXPECT(FOREBAY_FAILED, forebay_grid_function(g, "nothing", &call.function), "wait, endless, fails");
  GOOD(forebay_grid_function(g, "wait", &call.function));
  EXPECT(FOREBAY_INVALID, forebay_grid_submit(g, NULL, 1, &t), "call is NULL");
  call.bytes = 33;
  EXPECT(FOREBAY_FAILED, forebay_grid_submit(g, &call, 1, &t), "33 bytes");
  call.bytes = sizeof at;
  EXPECT(FOREBAY_INVALID, forebay_grid_submit(g, &call, 1, &t), "arguments are NULL");
  EXPECT(FOREBAY_INVALID, forebay_grid_submit_all(g, &call, 1, &t), "arguments are NULL");
  EXPECT(FOREBAY_INVALID, forebay_grid_submit_all(g, &call, 0, &t), "0 tasks");
  EXPECT(FOREBAY_INVALID, forebay_grid_submit_all(g, &call, 1025, &t), "1024");
  EXPECT(FOREBAY_INVALID, forebay_grid_submit_all(g, NULL, 1, &t), "NULL");
  call.args = &at;
  GOOD(forebay_grid_submit(g, &call, 1, &t));
  EXPECT(FOREBAY_AGAIN, forebay_grid_wait(g, t, 5, NULL), "not done");
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  GOOD(forebay_grid_wait(g, t, FOREBAY_FOREVER, NULL));
  EXPECT(FOREBAY_INVALID, forebay_grid_wait(g, t, 0, NULL), "had before");
  forebay_ticket_free(t);
  GOOD(forebay_grid_function(g, "endless", &call.function));
  call.fuel = 1000;
  GOOD(forebay_grid_submit(g, &call, 1, &t));
  EXPECT(FOREBAY_FAILED, forebay_grid_wait(g, t, FOREBAY_FOREVER, NULL), "fuel");
  forebay_ticket_free(t);
  GOOD(forebay_grid_function(g, "fails", &call.function));
  GOOD(forebay_grid_submit(g, &call, 0, NULL));
  GOOD(forebay_grid_submit(g, &call, 0, &t));
  EXPECT(FOREBAY_FAILED, forebay_grid_wait(g, t, FOREBAY_FOREVER, NULL), "0x100");
  forebay_ticket_free(t);
  call.function = 99;
  EXPECT(FOREBAY_FAILED, forebay_grid_submit(g, &call, 1, &other), "number 99");
  // One that is running when the grid is told to stop, and one that is never begun.
  GOOD(forebay_grid_function(g, "wait", &call.function));
  gate = 0;
  call.fuel = 0;
  GOOD(forebay_grid_submit(g, &call, 1, &t));
  GOOD(forebay_grid_submit(g, &call, 1, &other));
  EXPECT(FOREBAY_AGAIN, forebay_grid_drain_within(g, 1), "not done after");
  while (forebay_grid_stop(g, 1) == FOREBAY_AGAIN) __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  EXPECT(FOREBAY_CLOSED, forebay_grid_drain(g), "stopped");
  EXPECT(FOREBAY_CLOSED, forebay_grid_wait(g, other, FOREBAY_FOREVER, NULL), "stopped");
  forebay_ticket_free(t);
  forebay_ticket_free(other);
  forebay_ticket_free(NULL);
  forebay_grid_free(g);
  forebay_grid_free(NULL);
}

static forebay_running *start(forebay_runtime *rt, forebay_task *t, const char *name) {
  forebay_graph *g;
  forebay_running *run;
  uint32_t n;
  char end[32];
  GOOD(forebay_graph_new("g", &g));
  GOOD(forebay_graph_add(g, t));
  snprintf(end, sizeof end, "%s.x", name);
  GOOD(forebay_graph_feed(g, end, 1, &n));
  snprintf(end, sizeof end, "%s.y", name);
  GOOD(forebay_graph_drain(g, end, 1, &n));
  GOOD(forebay_graph_check(g));
  GOOD(forebay_start(rt, g, &run));
  return run;
}

// What is told of devices and tasks.
static void lists(void *user, const char *name, const char *kind) {
  if (strlen(name) && !strcmp(kind, "cpu")) ++*(int *)user;
}
static void adds(void *user, const forebay_task_numbers *t) {
  if (t->devices != 1 || t->by_device[0] != t->invocations || !strlen(t->state)) exit(60);
  if (!strcmp(t->name, "f") || !strcmp(t->name, "bad")) *(uint64_t *)user += t->invocations;
}

static void *elsewhere(void *runtime) {
  // Another thread has reasons of its own.
  if (strlen(forebay_error())) return (void *)1;
  EXPECT(FOREBAY_INVALID, forebay_runtime_devices(runtime, NULL), "NULL");
  return NULL;
}

// Whoever uses a real-time stream on another thread.
typedef struct {
  forebay_stream *stream;
  forebay_memory *memory;
} Urgent;
static void *writes(void *user) {
  const Urgent *u = user;
  EXPECT(FOREBAY_FAILED, forebay_write(u->stream, u->memory, 0, "x", 1), "the thread that made it");
  EXPECT(FOREBAY_FAILED, forebay_stream_set_deadline(u->stream, 1), "the thread that made it");
  EXPECT(FOREBAY_FAILED, forebay_post(u->stream, u->memory, 0, "x", 1), "the thread that made it");
  return NULL;
}
static void *frees(void *user) {
  forebay_stream_free(user);
  return NULL;
}

// Transfers that cannot be.
static void transfers(void) {
  forebay_engine *e;
  forebay_memory *m;
  forebay_pinned *p, *q;
  forebay_stream *s, *other;
  forebay_in_flight *f;
  forebay_protection has;
  char bytes[64] = "";
  EXPECT(FOREBAY_INVALID, forebay_engine_new("toaster", &e), "toaster");
  EXPECT(FOREBAY_INVALID, forebay_engine_new("cpu:x", &e), "no number");
  EXPECT(FOREBAY_FAILED, forebay_engine_new("cpu:1", &e), "only cpu:0 ");
  EXPECT(FOREBAY_INVALID, forebay_engine_new("cpu", NULL), "NULL");
  GOOD(forebay_engine_new("cpu", &e));
  EXPECT(FOREBAY_INVALID, forebay_memory_new(NULL, 64, &m), "engine is NULL");
  EXPECT(FOREBAY_INVALID, forebay_memory_new(e, 64, NULL), "NULL");
  EXPECT(FOREBAY_FAILED, forebay_memory_new(e, SIZE_MAX / 2, &m), "");
  EXPECT(FOREBAY_FAILED, forebay_pinned_new(e, SIZE_MAX / 2, &p), "");
  GOOD(forebay_memory_new(e, 64, &m));
  GOOD(forebay_pinned_new(e, 64, &p));
  EXPECT(FOREBAY_INVALID, forebay_stream_new(e, NULL), "NULL");
  GOOD(forebay_stream_new(e, &s));
  GOOD(forebay_stream_new(e, &other));
  if (!forebay_memory_address(m) || forebay_memory_address(NULL) || forebay_pinned_bytes(NULL)) exit(21);
  uint64_t usual = 0, slow = 0;
  GOOD(forebay_engine_cost(e, 1, 1 << 20, 1, &usual, &slow));
  GOOD(forebay_engine_cost(e, 0, 8, 0, NULL, NULL));
  if (!usual || slow < usual) exit(22);

  EXPECT(FOREBAY_FAILED, forebay_write(s, m, 1, bytes, 64), "of a buffer of 64 B");
  EXPECT(FOREBAY_FAILED, forebay_read(s, m, SIZE_MAX, bytes, 2), "of a buffer of 64 B");
  EXPECT(FOREBAY_INVALID, forebay_write(s, m, 0, NULL, 1), "NULL");
  EXPECT(FOREBAY_INVALID, forebay_write(NULL, m, 0, bytes, 1), "stream is NULL");
  EXPECT(FOREBAY_INVALID, forebay_write(s, NULL, 0, bytes, 1), "memory is NULL");
  EXPECT(FOREBAY_INVALID, forebay_write_pinned(s, m, 0, p, 60, 5), "of 64 B of the host's");
  EXPECT(FOREBAY_INVALID, forebay_read_pinned(s, m, 0, p, SIZE_MAX, 5), "of 64 B of the host's");
  EXPECT(FOREBAY_FAILED, forebay_post(s, m, 60, bytes, 5), "of a buffer of 64 B");
  GOOD(forebay_write(s, m, 64, NULL, 0));
  GOOD(forebay_post(s, m, 0, "0123", 4));
  GOOD(forebay_read(s, m, 2, bytes, 2));
  if (memcmp(bytes, "23", 3)) exit(23);

  const forebay_range ranges[2] = {{0, 10, 3}, {60, 20, 4}}, wrong = {60, 0, 5}, beyond = {0, 60, 5};
  memcpy(bytes, "abc", 3), memcpy(bytes + 60, "wxyz", 4);
  GOOD(forebay_write_batch(s, m, bytes, 64, ranges, 2));
  EXPECT(FOREBAY_FAILED, forebay_write_batch(s, m, bytes, 64, &wrong, 1), "of the host's");
  EXPECT(FOREBAY_FAILED, forebay_read_batch(s, m, bytes, 64, &beyond, 1), "of a buffer of 64 B");
  EXPECT(FOREBAY_INVALID, forebay_read_batch(s, m, bytes, 64, NULL, 1), "ranges are NULL");
  EXPECT(FOREBAY_INVALID, forebay_read_batch(s, m, NULL, 64, ranges, 2), "NULL");
  GOOD(forebay_read_batch(s, m, NULL, 0, NULL, 0));
  GOOD(forebay_copy(s, m, 20, m, 30, 4));
  EXPECT(FOREBAY_FAILED, forebay_copy(s, m, 20, m, 22, 4), "overlap");
  memset(bytes, 0, 64);
  GOOD(forebay_read_batch(s, m, bytes, 64, ranges, 2));
  if (memcmp(bytes, "abc", 4) || memcmp(bytes + 60, "wxyz", 4)) exit(27);
  GOOD(forebay_read(s, m, 30, bytes, 4));
  if (memcmp(bytes, "wxyz", 5)) exit(28);

  // To another device; here to the same one through another stream.
  forebay_stream *far;
  forebay_memory *there;
  GOOD(forebay_stream_new(e, &far));
  GOOD(forebay_memory_new(e, 64, &there));
  GOOD(forebay_relay(s, m, 30, far, there, 50, 4));
  memset(bytes, 0, 64);
  GOOD(forebay_read(far, there, 50, bytes, 4));
  if (memcmp(bytes, "wxyz", 5)) exit(29);
  EXPECT(FOREBAY_INVALID, forebay_relay(s, m, 30, s, there, 50, 4), "both streams are the same");
  EXPECT(FOREBAY_INVALID, forebay_relay(s, m, 30, NULL, there, 50, 4), "other stream is NULL");
  EXPECT(FOREBAY_INVALID, forebay_relay(s, m, 30, far, NULL, 50, 4), "other memory is NULL");
  EXPECT(FOREBAY_FAILED, forebay_relay(s, m, 62, far, there, 0, 4), "buffer of 64 B");
  EXPECT(FOREBAY_FAILED, forebay_relay(s, m, 0, far, there, 62, 4), "buffer of 64 B");
  forebay_memory_free(there);
  forebay_stream_free(far);

  // What is taken is gone even if it fails; what another stream began is not this one's to finish.
  EXPECT(FOREBAY_FAILED, forebay_start_write(s, m, 1, p, &f), "of a buffer of 64 B");
  GOOD(forebay_pinned_new(e, 64, &p));
  EXPECT(FOREBAY_INVALID, forebay_start_read(s, m, 0, p, NULL), "NULL");
  GOOD(forebay_pinned_new(e, 64, &p));
  GOOD(forebay_start_read(s, m, 0, p, &f));
  EXPECT(FOREBAY_FAILED, forebay_finish(other, f, &q), "another stream");
  GOOD(forebay_pinned_new(e, 64, &p));
  GOOD(forebay_start_read(s, m, 0, p, &f));
  forebay_in_flight_free(f);
  GOOD(forebay_pinned_new(e, 64, &p));
  GOOD(forebay_start_read(s, m, 0, p, &f));
  GOOD(forebay_finish(s, f, &q));
  if (memcmp(forebay_pinned_bytes(q), "0123", 4)) exit(24);
  forebay_pinned_free(q);
  forebay_in_flight_free(NULL);
  forebay_pinned_free(NULL);

  // Real time.
  EXPECT(FOREBAY_INVALID, forebay_stream_protection(s, &has), "no real-time stream");
  forebay_stream_free(other);
  const forebay_budget budget = {1000, 100000, 100};
  EXPECT(FOREBAY_INVALID, forebay_stream_new_real_time(e, &budget, NULL), "NULL");
  const int policy = sched_getscheduler(0);
  GOOD(forebay_stream_new_real_time(e, &budget, &other));
  GOOD(forebay_stream_protection(other, &has));
  if (has.fifo != (sched_getscheduler(0) == policy ? 0 : 20) || has.overruns) exit(25);
  GOOD(forebay_write(other, m, 0, "abcd", 4));
  Urgent urgent = {other, m};
  pthread_t thread;
  pthread_create(&thread, NULL, writes, &urgent);
  pthread_join(thread, NULL);
  forebay_stream_free(other);
  if (sched_getscheduler(0) != policy) exit(26);
  // Freed by another thread, it leaves that one alone; this one stays as it is until somebody changes it.
  GOOD(forebay_stream_new_real_time(e, NULL, &other));
  pthread_create(&thread, NULL, frees, other);
  pthread_join(thread, NULL);
  const struct sched_param ordinary = {0};
  sched_setscheduler(0, policy, &ordinary);

  // Streams and memory outlive their engine.
  forebay_engine_free(e);
  forebay_engine_free(NULL);
  GOOD(forebay_write(s, m, 0, "efgh", 4));
  forebay_stream_free(s);
  forebay_stream_free(NULL);
  forebay_memory_free(m);
  forebay_memory_free(NULL);
}

int main(int argc, char **argv) {
  forebay_runtime *rt;
  forebay_block *b;
  forebay_graph *g;
  forebay_task *t;
  const void *data;
  void *to;
  size_t n;
  uint32_t feed;
  if (argc < 2) return 1;
  words();
  EXPECT(FOREBAY_INVALID, forebay_runtime_new("toaster", NULL, &rt), "toaster");
  EXPECT(FOREBAY_INVALID, forebay_runtime_new("cpu", "random", &rt), "random");
  EXPECT(FOREBAY_INVALID, forebay_runtime_new("cpu", NULL, NULL), "NULL");
  EXPECT(FOREBAY_INVALID, forebay_runtime_new("\xff\xfe", NULL, &rt), "UTF-8");
  GOOD(forebay_runtime_new("cpu", "fifo", &rt));

  // Blocks.
  EXPECT(FOREBAY_INVALID, forebay_block_new("f33[8]", NULL, 0, &b), "f33");
  EXPECT(FOREBAY_INVALID, forebay_block_new("f32[8", NULL, 0, &b), "type");
  EXPECT(FOREBAY_FAILED, forebay_block_new("f64[9999999999x9999999999]", NULL, 0, &b), "larger");
  EXPECT(FOREBAY_FAILED, forebay_block_new("f32[8]", "abc", 3, &b), "");
  EXPECT(FOREBAY_INVALID, forebay_block_new("f32[8]", NULL, 3, &b), "NULL");
  GOOD(forebay_block_new("f32[8]", NULL, 0, &b));
  GOOD(forebay_block_data(b, &data, &n));
  if (n != 32 || ((const float *)data)[7] != 0) return 1;
  EXPECT(FOREBAY_INVALID, forebay_block_data(b, NULL, &n), "NULL");
  forebay_block *other;
  GOOD(forebay_block_share(b, &other));
  EXPECT(FOREBAY_FAILED, forebay_block_data_mut(b, &to, &n), "handle");
  forebay_block_free(other);
  GOOD(forebay_block_data_mut(b, &to, &n));
  memset(to, 1, n);
  forebay_block_free(b);
  forebay_block_free(NULL);

  // Tasks and graphs.
  EXPECT(FOREBAY_INVALID, forebay_task_new(NULL, &t), "name");
  EXPECT(FOREBAY_INVALID, forebay_task_host(NULL, fails, NULL, release), "NULL");
  if (released != 1) return 2;
  GOOD(forebay_task_new("k", &t));
  EXPECT(FOREBAY_INVALID, forebay_task_host(t, NULL, NULL, NULL), "NULL");
  EXPECT(FOREBAY_FAILED, forebay_task_kernel(t, "cpu", "", "f", NULL), "cpu");
  EXPECT(FOREBAY_FAILED, forebay_task_kernel(t, "sim", "", "f", NULL), "\"k\"");
  EXPECT(FOREBAY_INVALID, forebay_task_kernel(t, NULL, "", "f", "u32:x"), "u32");
  forebay_task_free(t);
  GOOD(forebay_graph_new("g", &g));
  EXPECT(FOREBAY_FAILED, forebay_graph_feed(g, "a.x", 4, &feed), "no such task");
  GOOD(forebay_graph_add(g, task("a", doubles, NULL)));
  EXPECT(FOREBAY_FAILED, forebay_graph_add(g, task("a", doubles, NULL)), "another task");
  EXPECT(FOREBAY_FAILED, forebay_graph_feed(g, "a", 4, &feed), "TASK.PORT");
  EXPECT(FOREBAY_FAILED, forebay_graph_feed(g, "a.q", 4, &feed), "q");
  EXPECT(FOREBAY_FAILED, forebay_graph_feed(g, "a.x", 0, &feed), "capacity");
  EXPECT(FOREBAY_FAILED, forebay_graph_connect(g, "a.x", "a.y", 1), "");
  EXPECT(FOREBAY_FAILED, forebay_graph_check(g), "");
  forebay_running *run;
  EXPECT(FOREBAY_FAILED, forebay_start(rt, g, &run), "");
  if (released != 3) return 3;
  EXPECT(FOREBAY_FAILED, forebay_graph_load("/nowhere/g.toml", &g), "nowhere");

  // A graph that runs: waiting, and what comes out.
  int calls = 0;
  run = start(rt, task("a", doubles, &calls), "a");
  EXPECT(FOREBAY_AGAIN, forebay_pull(run, 0, 0, &b), "a.y");
  EXPECT(FOREBAY_AGAIN, forebay_pull(run, 0, 20, &b), "a.y");
  EXPECT(FOREBAY_INVALID, forebay_pull(run, 1, 0, &b), "drain 1");
  EXPECT(FOREBAY_INVALID, forebay_pull(run, 0, FOREBAY_FOREVER, NULL), "NULL");
  const uint32_t x[3] = {1, 2, 3};
  GOOD(forebay_block_new("u32<=4", x, sizeof x, &b));
  GOOD(forebay_push(run, 0, b, FOREBAY_FOREVER));
  GOOD(forebay_pull(run, 0, FOREBAY_FOREVER, &b));
  GOOD(forebay_block_records(b, &n));
  GOOD(forebay_block_data(b, &data, &n));
  if (n != 12 || ((const uint32_t *)data)[2] != 6 || calls != 1) return 4;
  forebay_block_free(b);
  // The feed's own memory, again and again.
  const void *before = NULL;
  for (uint32_t i = 0; i < 5; i++) {
    void *room;
    GOOD(forebay_acquire(run, 0, &b));
    GOOD(forebay_block_data_mut(b, &room, &n));
    if (n != 16 || (before && room != before)) return 41;
    before = room;
    ((uint32_t *)room)[0] = 10 + i;
    EXPECT(FOREBAY_FAILED, forebay_block_set_records(b, 5), "5");
    GOOD(forebay_block_set_records(b, 1));
    GOOD(forebay_push(run, 0, b, FOREBAY_FOREVER));
    GOOD(forebay_pull(run, 0, FOREBAY_FOREVER, &b));
    GOOD(forebay_block_data(b, &data, &n));
    if (n != 4 || *(const uint32_t *)data != 2 * (10 + i)) return 42;
    forebay_block_free(b);
  }
  EXPECT(FOREBAY_INVALID, forebay_acquire(run, 1, &b), "feed 1");
  EXPECT(FOREBAY_INVALID, forebay_block_set_records(NULL, 1), "NULL");
  GOOD(forebay_block_new("f32[8]", NULL, 0, &b));
  EXPECT(FOREBAY_FAILED, forebay_push(run, 0, b, 0), "a.x");
  GOOD(forebay_stop(run));
  EXPECT(FOREBAY_CLOSED, forebay_pull(run, 0, 0, &b), "stopped");
  GOOD(forebay_reset(run));
  GOOD(forebay_run(run));
  forebay_running_free(run);
  if (released != 4) return 5;

  // A function that takes its time is waited for as long as is said, and ends when it ends.
  atomic_int open = 0;
  run = start(rt, task("slow", waits, &open), "slow");
  GOOD(forebay_stop_within(run, 10000));
  GOOD(forebay_run(run));
  GOOD(forebay_block_new("u32<=4", x, sizeof x, &b));
  GOOD(forebay_push(run, 0, b, FOREBAY_FOREVER));
  while (!(atomic_load(&open) & 2)) milliseconds(1);
  EXPECT(FOREBAY_AGAIN, forebay_stop_within(run, 0), "\"slow\" still runs");
  EXPECT(FOREBAY_AGAIN, forebay_stop_within(run, 5), "\"slow\" still runs");
  atomic_store(&open, 1);
  GOOD(forebay_stop_within(run, FOREBAY_FOREVER));
  GOOD(forebay_stop_within(run, 10000));
  EXPECT(FOREBAY_INVALID, forebay_stop_within(NULL, 10), "the graph");
  forebay_running_free(run);

  // Functions that fail: the graph says why, and goes on after a reset.
  run = start(rt, task("bad", fails, NULL), "bad");
  GOOD(forebay_block_new("u32<=4", x, sizeof x, &b));
  GOOD(forebay_push(run, 0, b, FOREBAY_FOREVER));
  EXPECT(FOREBAY_FAILED, forebay_pull(run, 0, FOREBAY_FOREVER, &b), "it did not like the data");
  EXPECT(FOREBAY_FAILED, forebay_running_error(run), "\"bad\"");
  GOOD(forebay_reset(run));
  GOOD(forebay_running_error(run));
  uint64_t done = 0;
  GOOD(forebay_running_tasks(run, adds, &done));
  if (done > 1) exit(61);  // It failed.
  EXPECT(FOREBAY_INVALID, forebay_running_tasks(run, NULL, NULL), "function is NULL");
  EXPECT(FOREBAY_INVALID, forebay_running_tasks(NULL, adds, &done), "NULL");
  forebay_running_free(run);
  run = start(rt, task("bad", returns, NULL), "bad");
  GOOD(forebay_block_new("u32<=4", x, sizeof x, &b));
  GOOD(forebay_push(run, 0, b, 1000));
  EXPECT(FOREBAY_FAILED, forebay_pull(run, 0, FOREBAY_FOREVER, &b), "returned 42");
  forebay_running_free(run);

  // A graph file.
  GOOD(forebay_graph_load(argv[1], &g));
  GOOD(forebay_graph_check(g));
  GOOD(forebay_start(rt, g, &run));
  forebay_running_free(run);

  // A task like a function.
  forebay_accelerated *f;
  GOOD(forebay_accelerate(rt, task("f", doubles, &calls), &f));
  GOOD(forebay_block_new("u32<=4", x, sizeof x, &b));
  const forebay_block *in[1] = {b};
  forebay_block *out[1];
  EXPECT(FOREBAY_FAILED, forebay_call(f, in, 0, out, 1), "");
  EXPECT(FOREBAY_INVALID, forebay_call(f, in, 1, out, 2), "1 outputs");
  for (int i = 0; i < 10; i++) {
    GOOD(forebay_call(f, in, 1, out, 1));
    GOOD(forebay_block_data(out[0], &data, &n));
    if (n != 12 || ((const uint32_t *)data)[0] != 2) return 6;
    forebay_block_free(out[0]);
  }
  // What was asked for wrongly was not done.
  int listed = 0;
  done = 0;
  GOOD(forebay_runtime_list(rt, lists, &listed));
  GOOD(forebay_accelerated_tasks(f, adds, &done));
  if (listed != 1 || done != 10) exit(62);
  EXPECT(FOREBAY_INVALID, forebay_runtime_list(rt, NULL, NULL), "function is NULL");
  EXPECT(FOREBAY_INVALID, forebay_accelerated_tasks(NULL, adds, &done), "NULL");
  // The same without waiting, in any order, and one that nobody wants.
  forebay_pending *first, *second, *third;
  EXPECT(FOREBAY_INVALID, forebay_spawn(f, in, 1, NULL), "NULL");
  GOOD(forebay_spawn(f, in, 1, &first));
  GOOD(forebay_spawn(f, in, 1, &second));
  GOOD(forebay_spawn(f, in, 1, &third));
  GOOD(forebay_wait(second, out, 1));
  GOOD(forebay_block_data(out[0], &data, &n));
  if (n != 12 || ((const uint32_t *)data)[0] != 2) return 9;
  forebay_block_free(out[0]);
  forebay_pending_free(third);
  forebay_pending_free(NULL);
  EXPECT(FOREBAY_INVALID, forebay_wait(first, out, 2), "1 outputs");
  EXPECT(FOREBAY_INVALID, forebay_wait(NULL, out, 1), "NULL");
  forebay_accelerated_free(f);
  if (released != 8) return 7;

  // One that was stopped: what runs ends when it ends, and nothing else begins.
  atomic_store(&open, 0);
  GOOD(forebay_accelerate(rt, task("slow", waits, &open), &f));
  GOOD(forebay_spawn(f, in, 1, &first));
  while (!(atomic_load(&open) & 2)) milliseconds(1);
  EXPECT(FOREBAY_AGAIN, forebay_accelerated_stop_within(f, 0), "\"slow\" still runs");
  EXPECT(FOREBAY_CLOSED, forebay_spawn(f, in, 1, &second), "stopped");
  atomic_store(&open, 1);
  GOOD(forebay_accelerated_stop_within(f, FOREBAY_FOREVER));
  GOOD(forebay_wait(first, out, 1));
  forebay_block_free(out[0]);
  EXPECT(FOREBAY_INVALID, forebay_accelerated_stop_within(NULL, 0), "the task");
  forebay_accelerated_free(f);
  if (released != 9) return 18;

  // With a limit to the waiting, for outputs and for room. What did not come can be waited for again.
  atomic_int gate = 0;
  GOOD(forebay_accelerate(rt, task("slow", waits, &gate), &f));
  EXPECT(FOREBAY_INVALID, forebay_spawn_within(f, in, 1, 0, NULL), "NULL");
  GOOD(forebay_spawn_within(f, in, 1, 0, &first));
  EXPECT(FOREBAY_AGAIN, forebay_wait_within(first, 0, out, 1), "");
  EXPECT(FOREBAY_AGAIN, forebay_wait_within(first, 20, out, 1), "");
  forebay_pending *more[100];
  int n_more = 0, status = FOREBAY_OK;
  while (n_more < 100 && !(status = forebay_spawn_within(f, in, 1, n_more % 2, &more[n_more]))) n_more++;
  if (status != FOREBAY_AGAIN || !n_more) return 16;
  atomic_store(&gate, 1);
  GOOD(forebay_wait_within(first, FOREBAY_FOREVER, out, 1));
  GOOD(forebay_block_data(out[0], &data, &n));
  if (n != 12 || ((const uint32_t *)data)[0] != 2) return 17;
  forebay_block_free(out[0]);
  // It has come by now, and is there for who does not wait.
  while ((status = forebay_wait_within(more[0], 0, out, 1)) == FOREBAY_AGAIN) milliseconds(1);
  GOOD(status);
  forebay_block_free(out[0]);
  for (int i = 1; i < n_more; i++) forebay_pending_free(more[i]);
  GOOD(forebay_spawn_within(f, in, 1, FOREBAY_FOREVER, &first));
  EXPECT(FOREBAY_INVALID, forebay_wait_within(first, 1000, out, 2), "1 outputs");
  EXPECT(FOREBAY_INVALID, forebay_wait_within(NULL, 0, out, 1), "NULL");
  forebay_accelerated_free(f);

  // On several lanes, which are all taken, whatever comes of it.
  forebay_task *lanes[2] = {task("f", doubles, &calls), NULL};
  EXPECT(FOREBAY_INVALID, forebay_accelerate_lanes(rt, lanes, 2, &f), "a task is NULL");
  if (released != 11) return 10;
  EXPECT(FOREBAY_INVALID, forebay_accelerate_lanes(rt, NULL, 2, &f), "NULL");
  EXPECT(FOREBAY_FAILED, forebay_accelerate_lanes(rt, lanes, 0, &f), "0 lanes");
  lanes[0] = task("f", doubles, &calls);
  lanes[1] = task("f", doubles, &calls);
  GOOD(forebay_accelerate_lanes(rt, lanes, 2, &f));
  forebay_pending *all[4];
  for (int i = 0; i < 4; i++) GOOD(forebay_spawn(f, in, 1, &all[i]));
  for (int i = 0; i < 4; i++) {
    GOOD(forebay_wait(all[i], out, 1));
    GOOD(forebay_block_data(out[0], &data, &n));
    if (n != 12 || ((const uint32_t *)data)[0] != 2) return 11;
    forebay_block_free(out[0]);
  }
  // A goal: nothing is ever enough, so that all lanes and then the lower fidelity are asked for.
  Goal goal = {0, 0, 0};
  forebay_pursuit *pursuit;
  EXPECT(FOREBAY_INVALID, forebay_pursue(f, "speed", 1, tells, 0, NULL, &goal, lets_go, &pursuit), "no goal \"speed\"");
  EXPECT(FOREBAY_INVALID, forebay_pursue(f, "latency", 0, tells, 0, NULL, &goal, lets_go, &pursuit), "no latency");
  EXPECT(FOREBAY_INVALID, forebay_pursue(f, "latency", 1, NULL, 0, NULL, &goal, lets_go, &pursuit), "tracker is NULL");
  EXPECT(FOREBAY_INVALID, forebay_pursue(f, "latency", 1, tells, 1, NULL, &goal, lets_go, &pursuit), "fidelity is NULL");
  EXPECT(FOREBAY_INVALID, forebay_pursue(NULL, "latency", 1, tells, 0, NULL, &goal, lets_go, &pursuit), "NULL");
  EXPECT(FOREBAY_INVALID, forebay_pursue(f, "latency", 1, tells, 0, NULL, &goal, lets_go, NULL), "NULL");
  if (atomic_load(&goal.gone) != 6) return 13;
  GOOD(forebay_pursue(f, "throughput", 100, tells, 1, lower, &goal, lets_go, &pursuit));
  // A second for each of a lane, a dozen shares at most, and the fidelity.
  for (int i = 0; i < 3000 && !atomic_load(&goal.level); i++) milliseconds(10);
  if (atomic_load(&goal.level) != 1) return 14;
  int lines = 0;
  milliseconds(100);
  EXPECT(FOREBAY_INVALID, forebay_pursuit_log(pursuit, NULL, NULL), "NULL");
  GOOD(forebay_pursuit_log(pursuit, counts, &lines));
  if (lines < 2) return 15;
  forebay_pursuit_free(pursuit);
  forebay_pursuit_free(NULL);
  for (int i = 0; i < 500 && atomic_load(&goal.gone) < 7; i++) milliseconds(10);
  const int told = atomic_load(&goal.told);
  if (atomic_load(&goal.gone) != 7) return 16;
  milliseconds(700);
  if (atomic_load(&goal.told) != told) return 17;
  forebay_block_free(b);
  forebay_accelerated_free(f);
  if (released != 13) return 12;

  pthread_t thread;
  void *result;
  pthread_create(&thread, NULL, elsewhere, rt);
  pthread_join(thread, &result);
  if (result) return 8;
  forebay_runtime_free(rt);
  forebay_runtime_free(NULL);
  grid();
  transfers();
  printf("all as it should be\n");
  return 0;
}
