// One task, one block in, one out: on the CPU by a C function, on accelerators by a kernel.
//
//   gcc hello.c -I../../bindings/c/include -L../../target/release -lforebay_c -o hello && ./hello [cpu|opencl|cuda]

#include <forebay.h>
#include <stdio.h>
#include <stdlib.h>

static const char *SQUARE =
    "KERNEL void square(GLOBAL const float *x, GLOBAL float *y) { size_t i = gid_x(); if (i < 8) y[i] = x[i] * x[i]; }";

static int square(forebay_invocation *in, void *user) {
  const void *x;
  void *y;
  size_t n, m;
  (void)user;
  if (forebay_invocation_input(in, "x", &x, &n) || forebay_invocation_output(in, "y", &y, &m)) return 1;
  for (size_t i = 0; i < n / sizeof(float); i++) ((float *)y)[i] = ((const float *)x)[i] * ((const float *)x)[i];
  return 0;
}

static void check(int status) {
  if (status == FOREBAY_OK) return;
  fprintf(stderr, "%s\n", forebay_error());
  exit(1);
}

int main(int argc, char **argv) {
  const char *device = argc > 1 ? argv[1] : NULL;
  forebay_runtime *runtime;
  if (forebay_runtime_new(device, NULL, &runtime)) {
    fprintf(stderr, "no %s device: %s\n", device, forebay_error());
    return 77;
  }

  forebay_task *task;
  check(forebay_task_new("square", &task));
  check(forebay_task_input(task, "x", "f32[8]"));
  check(forebay_task_output(task, "y", "f32[8]"));
  check(forebay_task_host(task, square, NULL, NULL));
  check(forebay_task_kernel(task, NULL, SQUARE, "square", NULL));

  forebay_graph *graph;
  uint32_t feed, drain;
  check(forebay_graph_new("hello", &graph));
  check(forebay_graph_add(graph, task));
  check(forebay_graph_feed(graph, "square.x", 4, &feed));
  check(forebay_graph_drain(graph, "square.y", 4, &drain));

  forebay_running *run;
  check(forebay_start(runtime, graph, &run));
  const float x[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  forebay_block *block;
  check(forebay_block_new("f32[8]", x, sizeof x, &block));
  check(forebay_push(run, feed, block, FOREBAY_FOREVER));
  check(forebay_pull(run, drain, FOREBAY_FOREVER, &block));

  const void *y;
  size_t n;
  check(forebay_block_data(block, &y, &n));
  for (size_t i = 0; i < 8; i++) printf(i < 7 ? "%g " : "%g\n", ((const float *)y)[i]);

  forebay_block_free(block);
  forebay_running_free(run);
  forebay_runtime_free(runtime);
  return 0;
}
