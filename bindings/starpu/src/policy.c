// A scheduling policy for StarPU 1.3 and 1.4: each task on the worker that is predicted to end it first, under the load of the
// moment. What a codelet takes is learned without load (lib.rs, forebay::place); StarPU's own models are asked only for what
// moving data costs.
//
// StarPU's workers look for tasks without rest, so the cores that it has are busy whatever is placed where: what this program
// takes from itself is part of what its tasks take, and only others are load.
//
// The structure of a policy differs between series of StarPU: designated initialisers, and one build for each series.
#include <starpu.h>
#include <starpu_scheduler.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// lib.rs. Kinds of workers: 0 a core, 1 an accelerator, 2 an accelerator that is all cores.
extern double forebay_predict(const void *codelet, uint32_t kind, uint64_t bytes);
extern void forebay_workers(unsigned cores);
extern void forebay_begins(uint32_t kind);
extern void forebay_ends(const void *codelet, uint32_t kind, uint64_t bytes, double us);

// What a worker has before it, us, and how many tasks; how many it has had.
struct worker {
  double ahead;
  unsigned waiting;
  unsigned long done;
};

static struct {
  starpu_pthread_mutex_t lock;
  // StarPU uses OpenCL devices that are CPUs only when told to.
  int opencl_is_cpu;
  struct worker workers[STARPU_NMAXWORKERS];
} state;

static __thread double begun;

static uint32_t kind_of(int worker) {
  const enum starpu_worker_archtype type = starpu_worker_get_type(worker);
  return type == STARPU_CPU_WORKER ? 0 : type == STARPU_OPENCL_WORKER && state.opencl_is_cpu ? 2 : 1;
}

static uint64_t bytes_of(struct starpu_task *task) {
  uint64_t bytes = 0;
  for (unsigned i = 0; i < STARPU_TASK_GET_NBUFFERS(task); i++) bytes += starpu_data_get_size(STARPU_TASK_GET_HANDLE(task, i));
  return bytes;
}

static void init(unsigned context) {
  (void)context;
  const char *cpus = getenv("STARPU_OPENCL_ON_CPUS");
  state.opencl_is_cpu = cpus && atoi(cpus) > 0;
  memset(state.workers, 0, sizeof state.workers);
  forebay_workers(starpu_cpu_worker_get_count());
  STARPU_PTHREAD_MUTEX_INIT(&state.lock, NULL);
}

static void deinit(unsigned context) {
  (void)context;
  if (getenv("FOREBAY_STARPU_LOG"))
    for (unsigned w = 0; w < starpu_worker_get_count(); w++) {
      char name[64];
      starpu_worker_get_name((int)w, name, sizeof name);
      fprintf(stderr, "forebay: %lu tasks on %s\n", state.workers[w].done, name);
    }
  forebay_workers(0);
  STARPU_PTHREAD_MUTEX_DESTROY(&state.lock);
}

static int push(struct starpu_task *task) {
  struct starpu_worker_collection *workers = starpu_sched_ctx_get_worker_collection(task->sched_ctx);
  struct starpu_sched_ctx_iterator it;
  const uint64_t bytes = bytes_of(task);
  int best = -1;
  unsigned best_implementation = 0;
  double best_end = INFINITY, best_length = 0;
  // What is the same for all workers of a kind is asked once.
  double predicted[3] = {-1, -1, -1};
  STARPU_PTHREAD_MUTEX_LOCK(&state.lock);
  workers->init_iterator(workers, &it);
  while (workers->has_next(workers, &it)) {
    const int w = workers->get_next(workers, &it);
    unsigned implementation;
    if (!starpu_worker_can_execute_task_first_impl((unsigned)w, task, &implementation)) continue;
    const uint32_t kind = kind_of(w);
    if (predicted[kind] == -1) predicted[kind] = forebay_predict(task->cl, kind, bytes);
    const struct worker *had = &state.workers[w];
    double length = predicted[kind], end;
    if (isnan(length)) {
      // Not known yet: it is learned where the fewest wait, a few at a time, before anything else.
      length = 0;
      end = had->waiting < 2 ? -1.0 / (1 + had->waiting) : INFINITY;
    } else {
      const double copy = starpu_task_expected_data_transfer_time_for(task, (unsigned)w);
      if (!isnan(copy)) length += copy;
      end = had->ahead + length;
    }
    if (best < 0 || end < best_end || (end == best_end && had->waiting < state.workers[best].waiting)) {
      best = w;
      best_end = end;
      best_length = length;
      best_implementation = implementation;
    }
  }
  if (best >= 0) {
    state.workers[best].ahead += best_length;
    state.workers[best].waiting++;
    task->predicted = best_length;
  }
  STARPU_PTHREAD_MUTEX_UNLOCK(&state.lock);
  if (best < 0) return -ENODEV;
  starpu_task_set_implementation(task, best_implementation);
  return starpu_push_local_task(best, task, 0);
}

static void before(struct starpu_task *task, unsigned context) {
  (void)context;
  (void)task;
  forebay_begins(kind_of(starpu_worker_get_id()));
  begun = starpu_timing_now();
}

static void after(struct starpu_task *task, unsigned context) {
  (void)context;
  const int w = starpu_worker_get_id();
  const double us = starpu_timing_now() - begun;
  forebay_ends(task->cl, kind_of(w), bytes_of(task), us);
  STARPU_PTHREAD_MUTEX_LOCK(&state.lock);
  struct worker *at = &state.workers[w];
  if (at->waiting > 0) at->waiting--;
  at->done++;
  at->ahead = at->waiting && !isnan(task->predicted) ? fmax(0, at->ahead - task->predicted) : 0;
  STARPU_PTHREAD_MUTEX_UNLOCK(&state.lock);
}

struct starpu_sched_policy forebay_policy = {
  .init_sched = init,
  .deinit_sched = deinit,
  .push_task = push,
  // No pop_task: everything is pushed to workers.
  .pre_exec_hook = before,
  .post_exec_hook = after,
  .policy_name = "forebay",
  .policy_description = "on the worker that is predicted to end it first, under the load of the moment",
  .worker_type = STARPU_WORKER_LIST,
};

// What a program's starpu_init becomes in StarPU 1.3: with our policy, unless it or its user has chosen one.
int forebay_init(struct starpu_conf *conf, int (*real)(struct starpu_conf *)) {
  struct starpu_conf own;
  if (!conf) {
    starpu_conf_init(&own);
    conf = &own;
  }
  const char *chosen = getenv("STARPU_SCHED");
  const int ours = !conf->sched_policy && (conf->sched_policy_name ? !strcmp(conf->sched_policy_name, "forebay") : !chosen || !strcmp(chosen, "forebay"));
  if (ours) {
    conf->sched_policy = &forebay_policy;
    conf->sched_policy_name = NULL;
    // A name that StarPU does not have would be an error.
    if (chosen) unsetenv("STARPU_SCHED");
  }
  return real(conf);
}
