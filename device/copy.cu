// Copies n bytes; either side may be page-locked memory of the host. One item copies 16 bytes at a time where both sides
// are aligned alike, four of them in flight, because each crosses the bus; otherwise bytes.
struct alignas(16) Line { unsigned long long a, b; };

extern "C" __global__ void forebay_copy(unsigned char *dst, const unsigned char *src, unsigned long long n) {
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long step = gridDim.x * (unsigned long long)blockDim.x;
  const unsigned long long to = (unsigned long long)dst, from = (unsigned long long)src;
  unsigned long long head = n, lines = 0;
  if (((to ^ from) & 15) == 0) {
    head = (16 - (to & 15)) & 15;
    if (head > n) head = n;
    lines = (n - head) / 16;
  }
  Line *d = (Line *)(dst + head);
  const Line *s = (const Line *)(src + head);
  unsigned long long i = first;
  for (; i + 3 * step < lines; i += 4 * step) {
    const Line a = s[i], b = s[i + step], c = s[i + 2 * step], e = s[i + 3 * step];
    d[i] = a; d[i + step] = b; d[i + 2 * step] = c; d[i + 3 * step] = e;
  }
  for (; i < lines; i += step) d[i] = s[i];
  for (i = first; i < head; i += step) dst[i] = src[i];
  for (i = head + 16 * lines + first; i < n; i += step) dst[i] = src[i];
}
