// A scheduling policy for StarPU 1.3 and 1.4: each task on the worker that is predicted to end it first, under the load of the
// moment. What a codelet takes is learned without load (lib.rs, forebay::place): on cores it is the time that threads were at
// work. StarPU's own models are asked only for what moving data costs.
//
// StarPU's workers look for tasks without rest. Where an accelerator is the cores themselves, that takes them from its tasks, so
// the workers of cores rest there while they have nothing to do; and what runs on cores and what runs on that accelerator slow
// each other down, so a task goes where all of them together are done first.
//
// The structure of a policy differs between series of StarPU: designated initialisers, and one build for each series.
#include <starpu.h>
#include <starpu_scheduler.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Kinds of workers: a core, an accelerator of its own, an accelerator that is all cores.
enum { CORE, OWN, CORES, KINDS };

// lib.rs
struct work {
  double us, cores;
};
extern struct work forebay_predict(const void *codelet, uint32_t kind, uint64_t bytes);
extern double forebay_together(const struct work *works, size_t n);
extern void forebay_workers(uint32_t n);
extern void forebay_worker(void);
extern void forebay_begins(uint32_t kind);
extern void forebay_ends(const void *codelet, uint32_t kind, uint64_t bytes);

// Looks for a task before a worker rests, and how long it does before it looks again, ns: by then StarPU may want it to move
// data or to end. A task that is pushed ends its rest at once.
enum { LOOKS = 2, REST = 1000000 };

// What a worker has before it, and how many tasks; how many it has had.
struct worker {
  // us if nothing is beside it, and of cores.
  double ahead, core_us;
  unsigned waiting;
  unsigned long done;
  // For its rest.
  unsigned looked;
  starpu_pthread_mutex_t lock;
  starpu_pthread_cond_t pushed;
};

static struct {
  starpu_pthread_mutex_t lock;
  // StarPU uses OpenCL devices that are CPUs only when told to.
  int opencl_is_cpu;
  // There is one: workers of cores rest.
  int rests;
  struct worker workers[STARPU_NMAXWORKERS];
} state;

static uint32_t kind_of(int worker) {
  const enum starpu_worker_archtype type = starpu_worker_get_type(worker);
  return type == STARPU_CPU_WORKER ? CORE : type == STARPU_OPENCL_WORKER && state.opencl_is_cpu ? CORES : OWN;
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
  state.rests = state.opencl_is_cpu && starpu_opencl_worker_get_count() > 0;
  memset(state.workers, 0, sizeof state.workers);
  for (unsigned w = 0; w < STARPU_NMAXWORKERS; w++) {
    STARPU_PTHREAD_MUTEX_INIT(&state.workers[w].lock, NULL);
    STARPU_PTHREAD_COND_INIT(&state.workers[w].pushed, NULL);
  }
  forebay_workers(state.rests ? 0 : starpu_cpu_worker_get_count());
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
  for (unsigned w = 0; w < STARPU_NMAXWORKERS; w++) {
    STARPU_PTHREAD_MUTEX_DESTROY(&state.workers[w].lock);
    STARPU_PTHREAD_COND_DESTROY(&state.workers[w].pushed);
  }
  STARPU_PTHREAD_MUTEX_DESTROY(&state.lock);
}

// One that may have the task, and what it would have before it then.
struct candidate {
  int worker;
  unsigned implementation;
  struct work length;
  double end;
};

// When this worker is done if it has so much more before it: where an accelerator is the cores, when all are that share them.
static double done(const struct candidate *c) {
  if (!state.rests) {
    const struct work own = {state.workers[c->worker].ahead + c->length.us, starpu_cpu_worker_get_count()};
    return forebay_together(&own, 1);
  }
  struct work all[STARPU_NMAXWORKERS];
  size_t n = 0;
  for (unsigned w = 0; w < starpu_worker_get_count(); w++) {
    if (kind_of((int)w) == OWN) continue;
    const struct worker *had = &state.workers[w];
    const struct work more = (int)w == c->worker ? c->length : (struct work){0, 0};
    const double us = had->ahead + more.us;
    if (us > 0) all[n++] = (struct work){us, (had->core_us + more.us * more.cores) / us};
  }
  return forebay_together(all, n);
}

static int before_other(const struct candidate *a, const struct candidate *b) {
  if (b->worker < 0 || a->end != b->end) return b->worker < 0 || a->end < b->end;
  return state.workers[a->worker].waiting < state.workers[b->worker].waiting;
}

static int push(struct starpu_task *task) {
  struct starpu_worker_collection *workers = starpu_sched_ctx_get_worker_collection(task->sched_ctx);
  struct starpu_sched_ctx_iterator it;
  const uint64_t bytes = bytes_of(task);
  // The best of each kind. What is the same for all workers of a kind is asked once.
  struct candidate best[KINDS] = {{.worker = -1}, {.worker = -1}, {.worker = -1}};
  struct work predicted[KINDS] = {{.us = -1}, {.us = -1}, {.us = -1}};
  STARPU_PTHREAD_MUTEX_LOCK(&state.lock);
  // How long accelerators that are the cores are at one task.
  double between = 0;
  for (unsigned w = 0; w < starpu_worker_get_count(); w++)
    if (kind_of((int)w) == CORES && state.workers[w].waiting) between = fmax(between, state.workers[w].ahead / state.workers[w].waiting);
  workers->init_iterator(workers, &it);
  while (workers->has_next(workers, &it)) {
    struct candidate c = {.worker = workers->get_next(workers, &it)};
    if (!starpu_worker_can_execute_task_first_impl((unsigned)c.worker, task, &c.implementation)) continue;
    const uint32_t kind = kind_of(c.worker);
    if (predicted[kind].us == -1) predicted[kind] = forebay_predict(task->cl, kind, bytes);
    const struct worker *had = &state.workers[c.worker];
    if (isnan(predicted[kind].us)) {
      // Not known yet: it is learned where the fewest wait, a few at a time, before anything else.
      c.end = had->waiting < 2 ? -1.0 / (1 + had->waiting) : INFINITY;
    } else {
      const double copy = starpu_task_expected_data_transfer_time_for(task, (unsigned)c.worker);
      c.length = predicted[kind];
      if (copy > 0) {
        // A worker waits for its data without rest, and data comes from an accelerator once that has ended a task.
        const double wait = copy + (kind == CORE ? between : 0), work = c.length.us * c.length.cores + wait;
        c.length.us += wait;
        c.length.cores = work / c.length.us;
      }
      c.end = had->ahead + c.length.us;
    }
    if (before_other(&c, &best[kind])) best[kind] = c;
  }
  struct candidate *first = NULL;
  for (uint32_t kind = 0; kind < KINDS; kind++) {
    struct candidate *c = &best[kind];
    if (c->worker < 0) continue;
    if (kind != OWN && !isnan(predicted[kind].us)) c->end = done(c);
    if (!first || before_other(c, first)) first = c;
  }
  if (first) {
    struct worker *to = &state.workers[first->worker];
    to->ahead += first->length.us;
    to->core_us += first->length.us * first->length.cores;
    to->waiting++;
    task->predicted = first->length.us;
  }
  STARPU_PTHREAD_MUTEX_UNLOCK(&state.lock);
  if (!first) return -ENODEV;
  starpu_task_set_implementation(task, first->implementation);
  const int worker = first->worker;
  // An accelerator gives data away between its tasks only: the sooner it is asked, the less its cores are waited on.
  if (starpu_get_prefetch_flag()) starpu_prefetch_task_input_for(task, (unsigned)worker);
  const int refused = starpu_push_local_task(worker, task, 0);
  if (state.rests) {
    struct worker *to = &state.workers[worker];
    STARPU_PTHREAD_MUTEX_LOCK(&to->lock);
    to->looked = 0;
    STARPU_PTHREAD_COND_SIGNAL(&to->pushed);
    STARPU_PTHREAD_MUTEX_UNLOCK(&to->lock);
  }
  return refused;
}

// Asked by a worker that has nothing pushed to it. Everything is pushed; but whoever has asked often rests.
static struct starpu_task *pop(unsigned context) {
  (void)context;
  const int w = starpu_worker_get_id();
  if (!state.rests || w < 0) return NULL;
  struct worker *at = &state.workers[w];
  static __thread int known;
  if (!known) forebay_worker(), known = 1;
  if (kind_of(w) != CORE) return NULL;
  // Whoever pushes to a worker waits for it, unless it says that it rests.
  starpu_worker_relax_on();
  STARPU_PTHREAD_MUTEX_LOCK(&at->lock);
  if (++at->looked > LOOKS) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += REST;
    if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
    starpu_pthread_cond_timedwait(&at->pushed, &at->lock, &until);
  }
  STARPU_PTHREAD_MUTEX_UNLOCK(&at->lock);
  starpu_worker_relax_off();
  return NULL;
}

static void before(struct starpu_task *task, unsigned context) {
  (void)context;
  (void)task;
  forebay_begins(kind_of(starpu_worker_get_id()));
}

static void after(struct starpu_task *task, unsigned context) {
  (void)context;
  const int w = starpu_worker_get_id();
  forebay_ends(task->cl, kind_of(w), bytes_of(task));
  STARPU_PTHREAD_MUTEX_LOCK(&state.lock);
  struct worker *at = &state.workers[w];
  if (at->waiting > 0) at->waiting--;
  at->done++;
  // Of what is left, the same part is of cores as before.
  const double left = at->waiting && !isnan(task->predicted) ? fmax(0, at->ahead - task->predicted) : 0;
  at->core_us = at->ahead > 0 ? at->core_us * left / at->ahead : 0;
  at->ahead = left;
  STARPU_PTHREAD_MUTEX_UNLOCK(&state.lock);
}

struct starpu_sched_policy forebay_policy = {
  .init_sched = init,
  .deinit_sched = deinit,
  .push_task = push,
  .pop_task = pop,
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
