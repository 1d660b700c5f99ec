//! The kernels of figure 11, for devices that compile (one portable text) and for the CPU's cores.
//!
//! Every kernel takes its buffers, inputs before the output, then its numbers.

use std::sync::{Arc, LazyLock};

use forebay::hal::ArgSpan;
use forebay::{Kind, Source};

/// Work-items, and partial sums, of a reduction.
pub const PARTS: usize = 32;
/// Groups of `group-by`.
pub const GROUPS: usize = 16;
/// Chunks that `group-by` cuts its input into.
pub const CHUNKS: usize = 64;

const KERNELS: &str = "
KERNEL void gemm(GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *c, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float s = 0.0f;
  for (uint k = 0; k < n; k++) s += a[y * n + k] * b[k * n + x];
  c[y * n + x] = s / (float)n;
}
KERNEL void madd(GLOBAL const float *a, GLOBAL const float *b, GLOBAL float *c, uint w, uint h) {
  uint x = gid_x(), y = gid_y();
  if (x < w && y < h) c[y * w + x] = a[y * w + x] + b[y * w + x];
}
KERNEL void mcopy(GLOBAL const float *a, GLOBAL float *c, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) c[y * n + x] = a[y * n + x];
}
KERNEL void bitonic(GLOBAL float *v, uint n, uint k, uint j) {
  uint i = gid_y() * n + gid_x();
  if (gid_x() >= n || gid_y() >= n) return;
  uint o = i ^ j;
  if (o > i) {
    float a = v[i], b = v[o];
    if ((a > b) == ((i & k) == 0u)) { v[i] = b; v[o] = a; }
  }
}
KERNEL void fdtd_h(GLOBAL const float *e, GLOBAL const float *h, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float right = x + 1 < n ? e[y * n + x + 1] : 0.0f, below = y + 1 < n ? e[(y + 1) * n + x] : 0.0f;
  out[y * n + x] = h[y * n + x] - 0.5f * (right + below - 2.0f * e[y * n + x]);
}
KERNEL void fdtd_e(GLOBAL const float *h, GLOBAL const float *e, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  float left = x > 0 ? h[y * n + x - 1] : 0.0f, above = y > 0 ? h[(y - 1) * n + x] : 0.0f;
  out[y * n + x] = e[y * n + x] - 0.7f * (2.0f * h[y * n + x] - left - above);
}
KERNEL void col_mean(GLOBAL const float *r, GLOBAL float *m, uint n) {
  uint x = gid_x();
  if (x >= n) return;
  float s = 0.0f;
  for (uint y = 0; y < n; y++) s += r[y * n + x];
  m[x] = s / (float)n;
}
KERNEL void center(GLOBAL const float *r, GLOBAL const float *m, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) out[y * n + x] = r[y * n + x] - m[x];
}
KERNEL void col_square(GLOBAL const float *r, GLOBAL float *v, uint n) {
  uint x = gid_x();
  if (x >= n) return;
  float s = 0.0f;
  for (uint y = 0; y < n; y++) s += r[y * n + x] * r[y * n + x];
  v[x] = s / (float)n;
}
KERNEL void standardise(GLOBAL const float *r, GLOBAL const float *v, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) out[y * n + x] = v[x] > 0.0f ? r[y * n + x] / sqrt(v[x]) : 0.0f;
}
KERNEL void column(GLOBAL const float *r, GLOBAL float *t, uint n, uint c) {
  uint y = gid_x();
  if (y < n) t[y] = r[y * n + c];
}
KERNEL void partial(GLOBAL const float *v, GLOBAL float *s, uint n, uint parts) {
  uint i = gid_x();
  if (i >= parts) return;
  float sum = 0.0f;
  for (uint k = i; k < n; k += parts) sum += v[k] * v[k];
  s[i] = sum;
}
KERNEL void transposed(GLOBAL const float *r, GLOBAL const float *t, GLOBAL const float *q, GLOBAL float *p, uint n,
                       uint parts) {
  uint x = gid_x();
  if (x >= n) return;
  float all = 0.0f, s = 0.0f;
  for (uint k = 0; k < parts; k++) all += q[k];
  for (uint y = 0; y < n; y++) s += r[y * n + x] * t[y];
  p[x] = all > 0.0f ? s / all : 0.0f;
}
KERNEL void unit(GLOBAL const float *p, GLOBAL const float *s, GLOBAL float *out, uint n, uint parts) {
  uint x = gid_x();
  if (x >= n) return;
  float all = 0.0f;
  for (uint k = 0; k < parts; k++) all += s[k];
  out[x] = all > 0.0f ? p[x] / sqrt(all) : 0.0f;
}
KERNEL void times(GLOBAL const float *r, GLOBAL const float *p, GLOBAL float *t, uint n) {
  uint y = gid_x();
  if (y >= n) return;
  float s = 0.0f;
  for (uint x = 0; x < n; x++) s += r[y * n + x] * p[x];
  t[y] = s;
}
KERNEL void deflate(GLOBAL const float *r, GLOBAL const float *t, GLOBAL const float *p, GLOBAL float *out, uint n) {
  uint x = gid_x(), y = gid_y();
  if (x < n && y < n) out[y * n + x] = r[y * n + x] - t[y] * p[x];
}
KERNEL void hash(GLOBAL const float *v, GLOBAL float *key, uint n, uint groups) {
  uint x = gid_x(), y = gid_y();
  if (x >= n || y >= n) return;
  uint k = (uint)(v[y * n + x] * 1000.0f + 0.5f);
  key[y * n + x] = (float)((k * 2654435761u >> 16) % groups);
}
KERNEL void count(GLOBAL const float *key, GLOBAL float *counts, uint n, uint groups, uint chunks) {
  uint g = gid_x(), c = gid_y();
  if (g >= groups || c >= chunks) return;
  uint each = n * n / chunks, found = 0;
  for (uint i = c * each; i < (c + 1) * each; i++) found += key[i] == (float)g ? 1u : 0u;
  counts[c * groups + g] = (float)found;
}
KERNEL void scan(GLOBAL const float *counts, GLOBAL float *at, uint groups, uint chunks) {
  uint g = gid_x(), c = gid_y();
  if (g >= groups || c >= chunks) return;
  float before = 0.0f;
  for (uint h = 0; h <= g; h++) {
    uint until = h < g ? chunks : c;
    for (uint k = 0; k < until; k++) before += counts[k * groups + h];
  }
  at[c * groups + g] = before;
}
KERNEL void scatter(GLOBAL const float *v, GLOBAL const float *key, GLOBAL const float *at, GLOBAL float *out, uint n,
                    uint groups, uint chunks) {
  uint g = gid_x(), c = gid_y();
  if (g >= groups || c >= chunks) return;
  uint each = n * n / chunks, to = (uint)at[c * groups + g];
  for (uint i = c * each; i < (c + 1) * each; i++) if (key[i] == (float)g) out[to++] = v[i];
}
KERNEL void group_sum(GLOBAL const float *sorted, GLOBAL const float *at, GLOBAL float *sums, uint n, uint groups,
                      uint parts) {
  uint g = gid_x(), i = gid_y();
  if (g >= groups || i >= parts) return;
  uint from = (uint)at[g], until = g + 1 < groups ? (uint)at[g + 1] : n * n;
  float s = 0.0f;
  for (uint k = from + i; k < until; k += parts) s += sorted[k];
  sums[i * groups + g] = s;
}
KERNEL void group_total(GLOBAL const float *sums, GLOBAL float *total, uint groups, uint parts) {
  uint g = gid_x();
  if (g >= groups) return;
  float s = 0.0f;
  for (uint i = 0; i < parts; i++) s += sums[i * groups + g];
  total[g] = s;
}
";

/// A kernel for a kind of device.
pub fn source(kind: Kind, entry: &'static str) -> Source {
    static TEXT: LazyLock<Arc<str>> = LazyLock::new(|| KERNELS.into());
    if kind == Kind::Cpu { Source::Cpu(Arc::new(move |s| cpu(entry, s))) } else { Source::Portable(TEXT.clone()) }
}

/// The same kernels for one part of the CPU's iteration space: rows of two-dimensional ones, items of linear ones.
fn cpu(entry: &'static str, s: &ArgSpan<'_>) {
    let part = s.start..s.end;
    let n = |i: usize| s.scalar(i) as usize;
    let input = |i: usize| s.slice::<f32>(i);
    // SAFETY: each part writes only what belongs to its own rows or items; `scatter` writes only the places that `scan`
    // gave to its chunks, and a pair of `bitonic` is touched only by the part that has the smaller index.
    let output = |i: usize| unsafe { s.slice_mut::<f32>(i) };
    let row = |y: usize, n: usize| y * n..(y + 1) * n;
    match entry {
        "gemm" => {
            let (a, b, c, n) = (input(0), input(1), output(2), n(3));
            for y in part {
                let out = &mut c[row(y, n)];
                out.fill(0.0);
                for k in 0..n {
                    let f = a[y * n + k];
                    out.iter_mut().zip(&b[row(k, n)]).for_each(|(o, b)| *o += f * b);
                }
                out.iter_mut().for_each(|o| *o /= n as f32);
            }
        }
        "madd" => {
            // Vectors are cut by items, matrices by rows.
            let each = if s.items[1] > 1 { n(3) } else { 1 };
            let all = part.start * each..part.end * each;
            let (a, b) = (&input(0)[all.clone()], &input(1)[all.clone()]);
            output(2)[all].iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = a + b);
        }
        "mcopy" => {
            let all = part.start * n(2)..part.end * n(2);
            output(1)[all.clone()].copy_from_slice(&input(0)[all]);
        }
        "bitonic" => {
            let (v, [n, k, j]) = (output(0), [1, 2, 3].map(n));
            for i in part.start * n..part.end * n {
                let o = i ^ j;
                if o > i && (v[i] > v[o]) == (i & k == 0) {
                    v.swap(i, o);
                }
            }
        }
        "fdtd_h" | "fdtd_e" => {
            let (a, b, c, n) = (input(0), input(1), output(2), n(3));
            for y in part {
                for x in 0..n {
                    let at = y * n + x;
                    c[at] = if entry == "fdtd_h" {
                        let right = if x + 1 < n { a[at + 1] } else { 0.0 };
                        let below = if y + 1 < n { a[at + n] } else { 0.0 };
                        b[at] - 0.5 * (right + below - 2.0 * a[at])
                    } else {
                        let left = if x > 0 { a[at - 1] } else { 0.0 };
                        let above = if y > 0 { a[at - n] } else { 0.0 };
                        b[at] - 0.7 * (2.0 * a[at] - left - above)
                    };
                }
            }
        }
        "col_mean" | "col_square" => {
            let (r, m, n) = (input(0), output(1), n(2));
            let m = &mut m[part.clone()];
            m.fill(0.0);
            for y in 0..n {
                let r = &r[y * n + part.start..y * n + part.end];
                m.iter_mut().zip(r).for_each(|(m, r)| *m += if entry == "col_mean" { *r } else { r * r });
            }
            m.iter_mut().for_each(|m| *m /= n as f32);
        }
        "center" | "standardise" => {
            let (r, m, out, n) = (input(0), input(1), output(2), n(3));
            for y in part {
                for (x, o) in out[row(y, n)].iter_mut().enumerate() {
                    let (r, m) = (r[y * n + x], m[x]);
                    *o = match entry {
                        "center" => r - m,
                        _ if m > 0.0 => r / m.sqrt(),
                        _ => 0.0,
                    };
                }
            }
        }
        "column" => {
            let (r, t, n, c) = (input(0), output(1), n(2), n(3));
            part.for_each(|y| t[y] = r[y * n + c]);
        }
        "partial" => {
            let (v, s, n, parts) = (input(0), output(1), n(2), n(3));
            part.for_each(|i| s[i] = v[i.min(n)..n].iter().step_by(parts).map(|v| v * v).sum());
        }
        "transposed" => {
            let (r, t, q, p, n, parts) = (input(0), input(1), input(2), output(3), n(4), n(5));
            let all: f32 = q[..parts].iter().sum();
            let p = &mut p[part.clone()];
            p.fill(0.0);
            for y in 0..n {
                let r = &r[y * n + part.start..y * n + part.end];
                p.iter_mut().zip(r).for_each(|(p, r)| *p += r * t[y]);
            }
            p.iter_mut().for_each(|p| *p = if all > 0.0 { *p / all } else { 0.0 });
        }
        "unit" => {
            let (p, s, out, parts) = (input(0), input(1), output(2), n(4));
            let all: f32 = s[..parts].iter().sum();
            part.for_each(|x| out[x] = if all > 0.0 { p[x] / all.sqrt() } else { 0.0 });
        }
        "times" => {
            let (r, p, t, n) = (input(0), input(1), output(2), n(3));
            part.for_each(|y| t[y] = r[row(y, n)].iter().zip(p).map(|(r, p)| r * p).sum());
        }
        "deflate" => {
            let (r, t, p, out, n) = (input(0), input(1), input(2), output(3), n(4));
            for y in part {
                let (r, out) = (&r[row(y, n)], &mut out[row(y, n)]);
                out.iter_mut().zip(r).zip(p).for_each(|((o, r), p)| *o = r - t[y] * p);
            }
        }
        "hash" => {
            let (v, key, n, groups) = (input(0), output(1), n(2), s.scalar(3) as u32);
            for i in part.start * n..part.end * n {
                let k = (v[i] * 1000.0 + 0.5) as u32;
                key[i] = ((k.wrapping_mul(2_654_435_761) >> 16) % groups) as f32;
            }
        }
        "count" => {
            let (key, counts, [n, groups, chunks]) = (input(0), output(1), [2, 3, 4].map(n));
            let each = n * n / chunks;
            for c in part {
                let counts = &mut counts[row(c, groups)];
                counts.fill(0.0);
                key[row(c, each)].iter().for_each(|k| counts[*k as usize] += 1.0);
            }
        }
        "scan" => {
            let (counts, at, [groups, chunks]) = (input(0), output(1), [2, 3].map(n));
            for c in part {
                let mut before = 0.0;
                for g in 0..groups {
                    let of = |chunks: std::ops::Range<usize>| chunks.map(|k| counts[k * groups + g]).sum::<f32>();
                    at[c * groups + g] = before + of(0..c);
                    before += of(0..chunks);
                }
            }
        }
        "scatter" => {
            let (v, key, at, out, [n, groups, chunks]) = (input(0), input(1), input(2), output(3), [4, 5, 6].map(n));
            let each = n * n / chunks;
            for c in part {
                let mut to: Vec<usize> = at[row(c, groups)].iter().map(|a| *a as usize).collect();
                for i in c * each..(c + 1) * each {
                    let to = &mut to[key[i] as usize];
                    out[*to] = v[i];
                    *to += 1;
                }
            }
        }
        "group_sum" => {
            let (sorted, at, sums, [n, groups, parts]) = (input(0), input(1), output(2), [3, 4, 5].map(n));
            for i in part {
                for g in 0..groups {
                    let until = if g + 1 < groups { at[g + 1] as usize } else { n * n };
                    let mine = sorted[..until].iter().skip(at[g] as usize + i).step_by(parts);
                    sums[i * groups + g] = mine.sum();
                }
            }
        }
        _ => {
            let (sums, total, groups, parts) = (input(0), output(1), n(2), n(3));
            part.for_each(|g| total[g] = sums[..groups * parts].iter().skip(g).step_by(groups).sum());
        }
    }
}
