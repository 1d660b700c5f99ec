/* The gesture pipeline for OpenCL and CUDA, in their common subset (forebay_hal::portable).
   Everything up to the disparities is integer arithmetic and equal on every device. */

/* Rectifies both views: map holds source positions in 1/32 pixel, x and y interleaved, left view first. */
KERNEL void rectify(GLOBAL const uchar *left, GLOBAL const uchar *right, GLOBAL const short *map, GLOBAL uchar *rect,
                    uint w, uint h, uint sw, uint sh) {
  uint x = gid_x(), y = gid_y(), v = gid_z();
  if (x >= w || y >= h || v >= 2) return;
  uint at = (v * h + y) * w + x;
  int px = map[2 * at], py = map[2 * at + 1];
  int x0 = px >> 5, y0 = py >> 5, fx = px & 31, fy = py & 31;
  GLOBAL const uchar *src = v == 0 ? left : right;
  if (x0 < 0 || y0 < 0 || x0 + 1 >= (int)sw || y0 + 1 >= (int)sh) { rect[at] = 0; return; }
  GLOBAL const uchar *p = src + y0 * (int)sw + x0;
  int top = p[0] * (32 - fx) + p[1] * fx;
  int low = p[sw] * (32 - fx) + p[sw + 1] * fx;
  rect[at] = (uchar)((top * (32 - fy) + low * fy + 512) >> 10);
}

/* Column sums of absolute differences: cost[d][y][x] over 2 * radius + 1 rows. */
KERNEL void columns(GLOBAL const uchar *rect, GLOBAL ushort *cost, uint w, uint h, uint nd, uint radius) {
  uint x = gid_x(), y = gid_y(), d = gid_z();
  if (x >= w || y >= h || d >= nd) return;
  GLOBAL const uchar *l = rect, *r = rect + w * h;
  int rad = (int)radius, sum = 0;
  if (x < d) {
    sum = 255 * (2 * rad + 1);
  } else {
    for (int j = -rad; j <= rad; j++) {
      int yy = (int)y + j;
      yy = yy < 0 ? 0 : yy >= (int)h ? (int)h - 1 : yy;
      int a = l[yy * (int)w + (int)x], b = r[yy * (int)w + (int)(x - d)];
      sum += a > b ? a - b : b - a;
    }
  }
  cost[(d * h + y) * w + x] = (ushort)sum;
}

/* Sum of a window whose middle is at (x, y) of the left view, at disparity d. */
DEVICE int window_sum(GLOBAL const ushort *cost, int x, int y, int d, int w, int h, int rad) {
  GLOBAL const ushort *row = cost + (d * h + y) * w;
  int sum = 0;
  for (int i = -rad; i <= rad; i++) {
    int xx = x + i;
    xx = xx < 0 ? 0 : xx >= w ? w - 1 : xx;
    sum += row[xx];
  }
  return sum;
}

/* Best disparity of each pixel of both views, in 1/16 pixel; 0 where there is none. */
KERNEL void match(GLOBAL const ushort *cost, GLOBAL int *disp, uint w, uint h, uint nd, uint radius) {
  uint x = gid_x(), y = gid_y(), v = gid_z();
  if (x >= w || y >= h || v >= 2) return;
  int rad = (int)radius, best = 0x7fffffff, at = 0, before = 0, after = 0, last = 0;
  for (int d = 0; d < (int)nd; d++) {
    int lx = v == 0 ? (int)x : (int)x + d;
    int s = lx < (int)w ? window_sum(cost, lx, (int)y, d, (int)w, (int)h, rad) : 0x3fffffff;
    if (s < best) { best = s; at = d; before = last; after = 0x3fffffff; }
    else if (d == at + 1) after = s;
    last = s;
  }
  int result = 0;
  if (at > 0 && at + 1 < (int)nd && after < 0x3fffffff && before < 0x3fffffff) {
    int bend = before - 2 * best + after;
    result = 16 * at + (bend > 0 ? (before - after) * 8 / bend : 0);
  }
  disp[(v * h + y) * w + x] = result;
}

/* Points (x, y, z, brightness) of both views in the left camera's frame; z is 0 where the views disagree. */
KERNEL void reproject(GLOBAL const uchar *rect, GLOBAL const int *disp, GLOBAL float *cloud, uint w, uint h,
                      float focal, float cx, float cy, float baseline, uint least) {
  uint x = gid_x(), y = gid_y(), v = gid_z();
  if (x >= w || y >= h || v >= 2) return;
  uint at = (v * h + y) * w + x;
  int d = disp[at], shift = (d + 8) >> 4;
  int ox = v == 0 ? (int)x - shift : (int)x + shift;
  float z = 0.0f;
  if (d >= (int)least && ox >= 0 && ox < (int)w) {
    int od = disp[((1 - v) * h + y) * w + ox];
    int off = od > d ? od - d : d - od;
    if (off <= 16) z = 16.0f * focal * baseline / (float)d;
  }
  cloud[4 * at] = ((float)x - cx) * z / focal + (v == 1 && z > 0.0f ? baseline : 0.0f);
  cloud[4 * at + 1] = ((float)y - cy) * z / focal;
  cloud[4 * at + 2] = z;
  cloud[4 * at + 3] = (float)rect[at] / 255.0f;
}

/* Bilateral filter of z over 5 x 5 points: weights[0..25] by distance in the image, then 256 by difference of depth. */
KERNEL void bilateral(GLOBAL const float *cloud, GLOBAL const float *weights, GLOBAL float *out, uint w, uint h, float scale) {
  uint x = gid_x(), y = gid_y(), v = gid_z();
  if (x >= w || y >= h || v >= 2) return;
  uint at = 4 * ((v * h + y) * w + x);
  float z = cloud[at + 2], sum = 0.0f, weight = 0.0f;
  float smooth = 0.0f;
  if (z > 0.0f) {
    for (int j = -2; j <= 2; j++) {
      int yy = (int)y + j;
      if (yy < 0 || yy >= (int)h) continue;
      for (int i = -2; i <= 2; i++) {
        int xx = (int)x + i;
        if (xx < 0 || xx >= (int)w) continue;
        float o = cloud[4 * ((v * h + (uint)yy) * w + (uint)xx) + 2];
        if (o > 0.0f) {
          float diff = (o > z ? o - z : z - o) * scale;
          int bin = diff < 255.0f ? (int)diff : 255;
          float k = weights[(j + 2) * 5 + i + 2] * weights[25 + bin];
          sum += k * o;
          weight += k;
        }
      }
    }
    smooth = sum / weight;
  }
  float ratio = z > 0.0f ? smooth / z : 0.0f;
  out[at] = cloud[at] * ratio;
  out[at + 1] = cloud[at + 1] * ratio;
  out[at + 2] = smooth;
  out[at + 3] = cloud[at + 3];
}
