// An ordinary StarPU program: scales vectors, on cores and by OpenCL, in chains. It knows nothing of Forebay.
#include <starpu.h>
#include <starpu_opencl.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct starpu_opencl_program programs;

static void on_core(void *buffers[], void *arg) {
  (void)arg;
  float *v = (float *)STARPU_VECTOR_GET_PTR(buffers[0]);
  for (unsigned i = 0; i < STARPU_VECTOR_GET_NX(buffers[0]); i++) v[i] = v[i] * 2 + 1;
}

static void by_opencl(void *buffers[], void *arg) {
  (void)arg;
  cl_kernel kernel;
  cl_command_queue queue;
  cl_event event;
  unsigned n = STARPU_VECTOR_GET_NX(buffers[0]);
  cl_mem v = (cl_mem)STARPU_VECTOR_GET_DEV_HANDLE(buffers[0]);
  starpu_opencl_load_kernel(&kernel, &queue, &programs, "scale", starpu_worker_get_devid(starpu_worker_get_id()));
  clSetKernelArg(kernel, 0, sizeof v, &v);
  clSetKernelArg(kernel, 1, sizeof n, &n);
  size_t global = (n + 63) / 64 * 64, local = 64;
  clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, &event);
  clFinish(queue);
  starpu_opencl_release_kernel(kernel);
}

static struct starpu_codelet scale = {
  .cpu_funcs = { on_core },
  .opencl_funcs = { by_opencl },
  .nbuffers = 1,
  .modes = { STARPU_RW },
};

// ms that StarPU's workers of cores have been at work.
static double cores_worked(void) {
  double all = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *e; tasks && (e = readdir(tasks));) {
    char path[512], name[64] = "";
    unsigned long long ns = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
    FILE *f = fopen(path, "r");
    if (f && !fgets(name, sizeof name, f)) name[0] = 0;
    if (f) fclose(f);
    snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", e->d_name);
    if (strncmp(name, "CPU ", 4) == 0 && (f = fopen(path, "r"))) {
      if (fscanf(f, "%llu", &ns) == 1) all += ns / 1e6;
      fclose(f);
    }
  }
  if (tasks) closedir(tasks);
  return all;
}

int main(void) {
  enum { VECTORS = 8, N = 4096, ROUNDS = 60 };
  if (starpu_init(NULL) != 0) return 77;
  static const char *source = "__kernel void scale(__global float *v, unsigned n) { unsigned i = get_global_id(0); if (i < n) v[i] = v[i] * 2 + 1; }";
  if (starpu_opencl_worker_get_count() > 0) starpu_opencl_load_opencl_from_string(source, &programs, NULL);
  static float data[VECTORS][N];
  starpu_data_handle_t handles[VECTORS];
  for (int i = 0; i < VECTORS; i++) {
    for (int k = 0; k < N; k++) data[i][k] = (float)(i % 2);
    starpu_vector_data_register(&handles[i], STARPU_MAIN_RAM, (uintptr_t)data[i], N, sizeof(float));
  }
  for (int r = 0; r < ROUNDS; r++)
    for (int i = 0; i < VECTORS; i++) starpu_task_insert(&scale, STARPU_RW, handles[i], 0);
  starpu_task_wait_for_all();
  for (int i = 0; i < VECTORS; i++) starpu_data_unregister(handles[i]);
  int wrong = 0;
  for (int i = 0; i < VECTORS; i++) {
    float want = (float)(i % 2);
    for (int r = 0; r < ROUNDS; r++) want = want * 2 + 1;
    for (int k = 0; k < N; k++) wrong += data[i][k] != want;
  }
  printf("%d tasks, %d wrong\n", VECTORS * ROUNDS, wrong);
  const double before = cores_worked();
  usleep(300000);
  printf("%.0f of 300 ms without a task\n", cores_worked() - before);
  starpu_shutdown();
  return wrong != 0;
}
