// A mix of StarPU tasks for `bench placement`: three codelets that take differently long on cores and by OpenCL. Prints the
// seconds that all of them took. It knows nothing of Forebay; STARPU_SCHED says who places.
#include <starpu.h>
#include <starpu_opencl.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 16384, VECTORS = 12 };

static struct starpu_opencl_program programs;

#define BODY(rounds) { float x = v[i]; for (int k = 0; k < rounds; k++) x = x * 0.999f + 0.001f; v[i] = x; }
#define CORE(name, rounds)                                                        \
  static void name##_core(void *buffers[], void *arg) {                           \
    (void)arg;                                                                    \
    float *v = (float *)STARPU_VECTOR_GET_PTR(buffers[0]);                        \
    for (unsigned i = 0; i < STARPU_VECTOR_GET_NX(buffers[0]); i++) BODY(rounds)  \
  }
CORE(light, 20)
CORE(middle, 200)
CORE(heavy, 1000)

static void opencl(const char *name, void *buffers[]) {
  cl_kernel kernel;
  cl_command_queue queue;
  unsigned n = STARPU_VECTOR_GET_NX(buffers[0]);
  cl_mem v = (cl_mem)STARPU_VECTOR_GET_DEV_HANDLE(buffers[0]);
  starpu_opencl_load_kernel(&kernel, &queue, &programs, name, starpu_worker_get_devid(starpu_worker_get_id()));
  clSetKernelArg(kernel, 0, sizeof v, &v);
  clSetKernelArg(kernel, 1, sizeof n, &n);
  size_t global = n, local = 64;
  clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, NULL);
  clFinish(queue);
  starpu_opencl_release_kernel(kernel);
}
#define OPENCL(name) static void name##_opencl(void *buffers[], void *arg) { (void)arg; opencl(#name, buffers); }
OPENCL(light)
OPENCL(middle)
OPENCL(heavy)

#define CODELET(name)                                                                                   \
  static struct starpu_perfmodel name##_model = { .type = STARPU_HISTORY_BASED, .symbol = "forebay_" #name }; \
  static struct starpu_codelet name = { .cpu_funcs = { name##_core }, .opencl_funcs = { name##_opencl },       \
    .nbuffers = 1, .modes = { STARPU_RW }, .model = &name##_model };
CODELET(light)
CODELET(middle)
CODELET(heavy)

#define KERNEL(name, rounds) \
  "__kernel void " #name "(__global float *v, unsigned n) { unsigned i = get_global_id(0); if (i < n) { float x = v[i]; for (int k = 0; k < " #rounds "; k++) x = x * 0.999f + 0.001f; v[i] = x; } }\n"

int main(int argc, char **argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 40;
  if (starpu_init(NULL) != 0) return 77;
  if (starpu_opencl_worker_get_count() > 0)
    starpu_opencl_load_opencl_from_string(KERNEL(light, 20) KERNEL(middle, 200) KERNEL(heavy, 1000), &programs, NULL);
  static float data[VECTORS][N];
  starpu_data_handle_t handles[VECTORS];
  for (int i = 0; i < VECTORS; i++) {
    for (int k = 0; k < N; k++) data[i][k] = 2;
    starpu_vector_data_register(&handles[i], STARPU_MAIN_RAM, (uintptr_t)data[i], N, sizeof(float));
  }
  struct starpu_codelet *all[3] = { &light, &middle, &heavy };
  double begun = 0;
  // The first rounds teach whoever learns.
  for (int phase = 0; phase < 2; phase++) {
    begun = starpu_timing_now();
    for (int r = 0; r < (phase ? rounds : 10); r++) {
      for (int i = 0; i < VECTORS; i++) starpu_task_insert(all[(i + r) % 3], STARPU_RW, handles[i], 0);
      if (r % 10 == 9) starpu_task_wait_for_all();
    }
    starpu_task_wait_for_all();
  }
  printf("seconds %.6f\n", (starpu_timing_now() - begun) / 1e6);
  for (int i = 0; i < VECTORS; i++) starpu_data_unregister(handles[i]);
  starpu_shutdown();
  return 0;
}
