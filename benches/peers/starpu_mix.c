// Six workloads of `bench placement` as StarPU codelets: a library, so that both sides compute with the same functions and the
// same OpenCL C. Who calls has a thread for each workload, and each call is a task that is waited for. It knows nothing of
// Forebay; STARPU_SCHED says who places.
#include <starpu.h>
#include <starpu_opencl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WORKS = 8, STEPS = 4, BUFFERS = 8 };

// What an OpenCL kernel takes: a buffer of the workload by its number, or 32 bits.
struct argument { uint32_t is_buffer, value; };
// One kernel.
struct step { const char *entry; const struct argument *arguments; size_t count, global[3], local[3]; };
// A workload: its buffers (the last one is written; with `in_place` it has contents, too), its kernels, and its function on a
// core, which is given the buffers where they are now.
struct work {
  const char *name, *source;
  const struct step *steps;
  size_t step_count;
  void *const *buffers;
  const size_t *bytes;
  size_t buffer_count, in_place;
  void (*on_core)(const void *context, void *const *buffers);
  const void *context;
};

static struct made {
  const struct work *work;
  struct starpu_opencl_program program;
  struct starpu_perfmodel model;
  struct starpu_codelet codelet;
  starpu_data_handle_t handles[BUFFERS];
  // Kernels are made at the first call on a device: a driver's thread is the only one that uses them.
  cl_kernel kernels[STARPU_MAXOPENCLDEVS][STEPS];
  cl_command_queue queues[STARPU_MAXOPENCLDEVS];
} made[WORKS];
static size_t works;

static void on_core(void *buffers[], void *arg) {
  const struct work *w = ((struct made *)arg)->work;
  void *at[BUFFERS];
  for (size_t i = 0; i < w->buffer_count; i++) at[i] = (void *)STARPU_VECTOR_GET_PTR(buffers[i]);
  w->on_core(w->context, at);
}

static void by_opencl(void *buffers[], void *arg) {
  struct made *m = arg;
  const int device = starpu_worker_get_devid(starpu_worker_get_id());
  for (size_t s = 0; s < m->work->step_count; s++) {
    const struct step *step = &m->work->steps[s];
    cl_kernel *kernel = &m->kernels[device][s];
    if (!*kernel) starpu_opencl_load_kernel(kernel, &m->queues[device], &m->program, step->entry, device);
    for (size_t a = 0; a < step->count; a++) {
      const struct argument *g = &step->arguments[a];
      cl_mem buffer = g->is_buffer ? (cl_mem)STARPU_VECTOR_GET_DEV_HANDLE(buffers[g->value]) : NULL;
      if (g->is_buffer) clSetKernelArg(*kernel, a, sizeof buffer, &buffer);
      else clSetKernelArg(*kernel, a, sizeof g->value, &g->value);
    }
    const cl_int err = clEnqueueNDRangeKernel(m->queues[device], *kernel, 3, NULL, step->global, step->local, 0, NULL, NULL);
    if (err != CL_SUCCESS) STARPU_OPENCL_REPORT_ERROR(err);
  }
  clFinish(m->queues[device]);
}

// 0; 77 without StarPU or room.
int mix_begin(const struct work *all, size_t count) {
  if (count > WORKS) return 77;
  for (size_t i = 0; i < count; i++)
    if (all[i].buffer_count > BUFFERS || all[i].step_count > STEPS) return 77;
  if (starpu_init(NULL) != 0) return 77;
  works = count;
  for (size_t i = 0; i < count; i++) {
    struct made *m = &made[i];
    m->work = &all[i];
    if (starpu_opencl_worker_get_count() > 0) starpu_opencl_load_opencl_from_string(all[i].source, &m->program, NULL);
    m->model.type = STARPU_HISTORY_BASED;
    m->model.symbol = all[i].name;
    starpu_codelet_init(&m->codelet);
    m->codelet.cpu_funcs[0] = on_core;
    m->codelet.opencl_funcs[0] = by_opencl;
    m->codelet.nbuffers = all[i].buffer_count;
    m->codelet.model = &m->model;
    m->codelet.name = all[i].name;
    for (size_t b = 0; b < all[i].buffer_count; b++) {
      const int last = b + 1 == all[i].buffer_count;
      m->codelet.modes[b] = !last ? STARPU_R : all[i].in_place ? STARPU_RW : STARPU_W;
      starpu_vector_data_register(&m->handles[b], STARPU_MAIN_RAM, (uintptr_t)all[i].buffers[b], all[i].bytes[b], 1);
    }
  }
  return 0;
}

// One call of a workload, by one thread at a time. 0, or StarPU's error.
int mix_call(size_t workload) {
  struct made *m = &made[workload];
  struct starpu_task *task = starpu_task_create();
  task->cl = &m->codelet;
  task->cl_arg = m;
  task->synchronous = 1;
  memcpy(task->handles, m->handles, sizeof(starpu_data_handle_t) * m->work->buffer_count);
  return starpu_task_submit(task);
}

// The results go back to the buffers.
void mix_end(void) {
  for (size_t i = 0; i < works; i++)
    for (size_t b = 0; b < made[i].work->buffer_count; b++) starpu_data_unregister(made[i].handles[b]);
  starpu_shutdown();
}
