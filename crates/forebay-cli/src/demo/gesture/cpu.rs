//! The gesture pipeline's kernels for the CPU, with the same arguments and, up to the disparities, the same integers as
//! `kernels.cl`. Matching is one pass over rows instead of a cost volume in memory, which suits caches better.

use std::sync::Arc;

use forebay::Source;
use forebay::hal::ArgSpan;

fn source(f: impl Fn(&ArgSpan<'_>) + Send + Sync + 'static) -> Source {
    Source::Cpu(Arc::new(f))
}

/// `left, right, map, rect, w, h, sw, sh`
pub fn rectify() -> Source {
    source(|s| {
        let (left, right, map) = (s.slice::<u8>(0), s.slice::<u8>(1), s.slice::<i16>(2));
        // SAFETY: each part writes its own pixels only.
        let rect = unsafe { s.slice_mut::<u8>(3) };
        let [w, h] = [s.scalar(4) as usize, s.scalar(5) as usize];
        let [sw, sh] = [s.scalar(6) as usize, s.scalar(7) as usize];
        for row in s.start..s.end {
            let src = if row < h { left } else { right };
            let (to, from) = (&mut rect[row * w..(row + 1) * w], &map[2 * row * w..2 * (row + 1) * w]);
            for (to, p) in to.iter_mut().zip(from.chunks_exact(2)) {
                let (px, py) = (i32::from(p[0]), i32::from(p[1]));
                let (x0, y0, fx, fy) = (px >> 5, py >> 5, px & 31, py & 31);
                if x0 < 0 || y0 < 0 || x0 as usize + 1 >= sw || y0 as usize + 1 >= sh {
                    *to = 0;
                    continue;
                }
                let at = y0 as usize * sw + x0 as usize;
                let pixel = |i: usize| i32::from(src[i]);
                let top = pixel(at) * (32 - fx) + pixel(at + 1) * fx;
                let low = pixel(at + sw) * (32 - fx) + pixel(at + sw + 1) * fx;
                *to = ((top * (32 - fy) + low * fy + 512) >> 10) as u8;
            }
        }
    })
}

/// Most disparities and widest image that a row's buffers hold.
pub const MAX_DISPARITIES: usize = 256;

/// `rect, disp, w, h, disparities, radius` over `h` rows: both views at once.
pub fn match_rows() -> Source {
    source(|s| {
        let rect = s.slice::<u8>(0);
        // SAFETY: each part writes its own rows of both views only.
        let disp = unsafe { s.slice_mut::<i32>(1) };
        let [w, h, nd, radius] = [2, 3, 4, 5].map(|i| s.scalar(i) as usize);
        let (left, right) = rect[..2 * w * h].split_at(w * h);
        let mut sums = vec![0u16; nd * w];
        let mut columns = vec![0u16; w];
        for y in s.start..s.end {
            for d in 0..nd {
                row_columns(left, right, &mut columns, y, d, [w, h, radius]);
                row_windows(&columns, &mut sums[d * w..(d + 1) * w], radius);
            }
            let (l, r) = disp.split_at_mut(w * h);
            best(&sums, &mut l[y * w..(y + 1) * w], w, nd, false);
            best(&sums, &mut r[y * w..(y + 1) * w], w, nd, true);
        }
    })
}

/// Sums of absolute differences over the window's rows, for one row and disparity.
fn row_columns(left: &[u8], right: &[u8], out: &mut [u16], y: usize, d: usize, [w, h, radius]: [usize; 3]) {
    let d = d.min(w);
    out[..d].fill(255 * (2 * radius as u16 + 1));
    out[d..].fill(0);
    for j in 0..=2 * radius {
        let yy = (y + j).saturating_sub(radius).min(h - 1);
        let (l, r) = (&left[yy * w + d..(yy + 1) * w], &right[yy * w..(yy + 1) * w - d]);
        for ((o, &a), &b) in out[d..].iter_mut().zip(l).zip(r) {
            *o += u16::from(a.abs_diff(b));
        }
    }
}

/// Sums over the window's columns, with the edge columns repeated outside.
fn row_windows(columns: &[u16], out: &mut [u16], radius: usize) {
    let w = columns.len();
    let edge = |i: usize| columns[i.saturating_sub(radius).min(w - 1)];
    for x in (0..radius.min(w)).chain(w.saturating_sub(radius).max(radius.min(w))..w) {
        out[x] = (0..=2 * radius).map(|i| edge(x + i)).sum();
    }
    if w > 2 * radius {
        let inner = &mut out[radius..w - radius];
        inner.fill(0);
        for i in 0..=2 * radius {
            for (o, &c) in inner.iter_mut().zip(&columns[i..]) {
                *o += c;
            }
        }
    }
}

/// The best disparity of each pixel of a row, in 1/16 pixel, as `match` in kernels.cl.
fn best(sums: &[u16], out: &mut [i32], w: usize, nd: usize, right: bool) {
    // Window sums of right pixel x at disparity d are those of left pixel x + d.
    let mut least = vec![u16::MAX; w];
    let mut at = vec![0u16; w];
    for d in 0..nd {
        let from = if right { d.min(w) } else { 0 };
        let row = &sums[d * w + from..(d + 1) * w];
        for ((l, a), &s) in least.iter_mut().zip(&mut at).zip(row) {
            let better = s < *l;
            *l = if better { s } else { *l };
            *a = if better { d as u16 } else { *a };
        }
    }
    for (x, o) in out.iter_mut().enumerate() {
        let d = usize::from(at[x]);
        let sum = |d: usize| {
            let lx = if right { x + d } else { x };
            (lx < w).then(|| i32::from(sums[d * w + lx]))
        };
        *o = 0;
        if d > 0
            && d + 1 < nd
            && let (Some(before), Some(after)) = (sum(d - 1), sum(d + 1))
        {
            let bend = before - 2 * i32::from(least[x]) + after;
            *o = 16 * d as i32 + if bend > 0 { (before - after) * 8 / bend } else { 0 };
        }
    }
}

/// `rect, disp, cloud, w, h, focal, cx, cy, baseline, least`
pub fn reproject() -> Source {
    source(|s| {
        let (rect, disp) = (s.slice::<u8>(0), s.slice::<i32>(1));
        // SAFETY: each part writes its own points only.
        let cloud = unsafe { s.slice_mut::<f32>(2) };
        let [w, h] = [s.scalar(3) as usize, s.scalar(4) as usize];
        let [focal, cx, cy, baseline] = [5, 6, 7, 8].map(|i| s.float(i));
        let least = s.scalar(9) as i32;
        for row in s.start..s.end {
            let (v, y) = (row / h, row % h);
            let other = &disp[((1 - v) * h + y) * w..][..w];
            for x in 0..w {
                let at = row * w + x;
                let d = disp[at];
                let shift = (d + 8) >> 4;
                let ox = if v == 0 { x as i32 - shift } else { x as i32 + shift };
                let mut z = 0.0;
                if d >= least && ox >= 0 && (ox as usize) < w && (other[ox as usize] - d).abs() <= 16 {
                    z = 16.0 * focal * baseline / d as f32;
                }
                let side = if v == 1 && z > 0.0 { baseline } else { 0.0 };
                let p = &mut cloud[4 * at..4 * at + 4];
                p[0] = (x as f32 - cx) * z / focal + side;
                p[1] = (y as f32 - cy) * z / focal;
                p[2] = z;
                p[3] = f32::from(rect[at]) / 255.0;
            }
        }
    })
}

/// `cloud, weights, out, w, h, scale`
pub fn bilateral() -> Source {
    source(|s| {
        let (cloud, weights) = (s.slice::<f32>(0), s.slice::<f32>(1));
        // SAFETY: each part writes its own points only.
        let out = unsafe { s.slice_mut::<f32>(2) };
        let [w, h] = [s.scalar(3) as usize, s.scalar(4) as usize];
        let scale = s.float(5);
        for row in s.start..s.end {
            let (v, y) = (row / h, row % h);
            for x in 0..w {
                let at = 4 * (row * w + x);
                let z = cloud[at + 2];
                let mut smooth = 0.0f32;
                if z > 0.0 {
                    let (mut sum, mut weight) = (0.0f32, 0.0f32);
                    for j in 0..5 {
                        let Some(yy) = (y + j).checked_sub(2).filter(|&yy| yy < h) else { continue };
                        for i in 0..5 {
                            let Some(xx) = (x + i).checked_sub(2).filter(|&xx| xx < w) else { continue };
                            let o = cloud[4 * ((v * h + yy) * w + xx) + 2];
                            if o > 0.0 {
                                let diff = (o - z).abs() * scale;
                                let bin = if diff < 255.0 { diff as usize } else { 255 };
                                let k = weights[j * 5 + i] * weights[25 + bin];
                                sum += k * o;
                                weight += k;
                            }
                        }
                    }
                    smooth = sum / weight;
                }
                let ratio = if z > 0.0 { smooth / z } else { 0.0 };
                let p = [cloud[at] * ratio, cloud[at + 1] * ratio, smooth, cloud[at + 3]];
                out[at..at + 4].copy_from_slice(&p);
            }
        }
    })
}
