// The dispatch benchmark on StarPU: prints "case ns" lines. Built by `forebay bench dispatch`.
#include <starpu.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static void add(void *buffers[], void *arg) { (void)arg; (*(uint64_t *)STARPU_VARIABLE_GET_PTR(buffers[0]))++; }
static struct starpu_codelet cl_rw = { .cpu_funcs = { add }, .nbuffers = 1, .modes = { STARPU_RW } };
static void look(void *buffers[], void *arg) { (void)buffers; (void)arg; }
static struct starpu_codelet cl_r = { .cpu_funcs = { look }, .nbuffers = 2, .modes = { STARPU_R, STARPU_W } };
int main(int argc, char **argv) {
    int n = (argc > 1 ? atoi(argv[1]) : 1) * 5000;
    if (starpu_init(NULL) != 0) return 1;
    uint64_t v = 0, outs[64] = { 0 };
    starpu_data_handle_t h, o[64];
    starpu_variable_data_register(&h, STARPU_MAIN_RAM, (uintptr_t)&v, sizeof v);
    for (int i = 0; i < 64; i++) starpu_variable_data_register(&o[i], STARPU_MAIN_RAM, (uintptr_t)&outs[i], sizeof outs[i]);
    for (int warm = 0; warm < 2; warm++) {
        double a = starpu_timing_now();
        for (int i = 0; i < n; i++) starpu_task_insert(&cl_rw, STARPU_RW, h, 0);
        starpu_task_wait_for_all();
        if (warm) printf("chain %.3f\n", (starpu_timing_now() - a) * 1e3 / n);
    }
    for (int warm = 0; warm < 2; warm++) {
        double a = starpu_timing_now();
        for (int i = 0; i < n; i++) starpu_task_insert(&cl_r, STARPU_R, h, STARPU_W, o[i % 64], 0);
        starpu_task_wait_for_all();
        if (warm) printf("fan-out %.3f\n", (starpu_timing_now() - a) * 1e3 / n);
    }
    for (int warm = 0; warm < 2; warm++) {
        double a = starpu_timing_now();
        for (int i = 0; i < n / 3; i++) for (int s = 0; s < 3; s++) starpu_task_insert(&cl_rw, STARPU_RW, o[i % 4], 0);
        starpu_task_wait_for_all();
        if (warm) printf("stream-3 %.3f\n", (starpu_timing_now() - a) * 1e3 / (n / 3));
    }
    starpu_data_unregister(h);
    for (int i = 0; i < 64; i++) starpu_data_unregister(o[i]);
    starpu_shutdown();
    return 0;
}
