// Moving data by hand: the way that is fastest for its size, a transfer that is awaited later, and a stream with real-time
// priority. The address of the device's memory is for kernels of your own.

#include <forebay.h>
#include <stdio.h>
#include <string.h>

#define CHECK(call)                                             \
  do {                                                          \
    if ((call) != FOREBAY_OK) {                                 \
      fprintf(stderr, "%s\n", forebay_error());                 \
      return strstr(forebay_error(), "opencl:") ? 77 : 1;       \
    }                                                           \
  } while (0)

int main(int n, char **arguments) {
  forebay_engine *engine;
  forebay_memory *memory;
  forebay_stream *stream;
  // The first time on a machine this measures for two seconds at most.
  CHECK(forebay_engine_new(n > 1 ? arguments[1] : NULL, &engine));
  CHECK(forebay_memory_new(engine, 1 << 20, &memory));
  CHECK(forebay_stream_new(engine, &stream));

  char back[7] = "";
  CHECK(forebay_write(stream, memory, 0, "hello, device", 13));
  CHECK(forebay_read(stream, memory, 7, back, 6));
  printf("%s\n", back);

  // Page-locked memory is faster; a transfer from it can be awaited later.
  forebay_pinned *image;
  forebay_in_flight *under_way;
  CHECK(forebay_pinned_new(engine, 1 << 19, &image));
  memset(forebay_pinned_bytes(image), 9, 1 << 19);
  CHECK(forebay_start_write(stream, memory, 1 << 19, image, &under_way));
  CHECK(forebay_finish(stream, under_way, &image));
  memset(forebay_pinned_bytes(image), 0, 1 << 19);
  CHECK(forebay_read_pinned(stream, memory, (1 << 20) - 8, image, 100, 8));
  printf("%d\n", ((const char *)forebay_pinned_bytes(image))[107]);

  // With real-time priority, for this thread, until the stream is freed.
  forebay_stream *urgent;
  forebay_protection got;
  CHECK(forebay_stream_new_real_time(engine, NULL, &urgent));
  CHECK(forebay_stream_protection(urgent, &got));
  fprintf(stderr, got.fifo ? "SCHED_FIFO, priority %d\n" : "an ordinary thread: nice %d\n", got.fifo ? got.fifo : got.nice);
  CHECK(forebay_stream_set_deadline(urgent, 1000000));
  CHECK(forebay_write_pinned(urgent, memory, 0, image, 100, 8));
  CHECK(forebay_read(urgent, memory, 0, back, 6));
  printf("%d\n", back[5]);

  forebay_stream_free(urgent);
  forebay_pinned_free(image);
  forebay_stream_free(stream);
  forebay_memory_free(memory);
  forebay_engine_free(engine);
  return 0;
}
