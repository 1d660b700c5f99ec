//! DXT1 (BC1) compression: each 4 × 4 pixels become two colours of 16 bits and two bits a pixel. The colours are the corners of
//! the block's box in colour space; integers only, so that every device gives the same bits.

use forebay::{Arg, Geometry, Kind, Launch, Source, Task, Template};

const SOURCE: &str = "
KERNEL void dxt1(GLOBAL const uchar *rgba, GLOBAL uint *blocks, uint wide, uint high) {
  const uint bx = gid_x(), by = gid_y();
  if (bx >= wide || by >= high) return;
  int low[3] = {255, 255, 255}, top[3] = {0, 0, 0};
  for (int p = 0; p < 16; p++) {
    GLOBAL const uchar *c = rgba + (((by * 4 + p / 4) * wide * 4) + bx * 4 + p % 4) * 4;
    for (int k = 0; k < 3; k++) {
      if (c[k] < low[k]) low[k] = c[k];
      if (c[k] > top[k]) top[k] = c[k];
    }
  }
  const uint a = (uint)(top[0] >> 3) << 11 | (uint)(top[1] >> 2) << 5 | (uint)(top[2] >> 3);
  const uint b = (uint)(low[0] >> 3) << 11 | (uint)(low[1] >> 2) << 5 | (uint)(low[2] >> 3);
  int palette[4][3];
  for (int k = 0; k < 3; k++) {
    palette[0][k] = top[k];
    palette[1][k] = low[k];
    palette[2][k] = (2 * top[k] + low[k]) / 3;
    palette[3][k] = (top[k] + 2 * low[k]) / 3;
  }
  uint bits = 0;
  if (a != b) for (int p = 0; p < 16; p++) {
    GLOBAL const uchar *c = rgba + (((by * 4 + p / 4) * wide * 4) + bx * 4 + p % 4) * 4;
    int best = 1 << 30;
    uint which = 0;
    for (uint i = 0; i < 4; i++) {
      int d = 0;
      for (int k = 0; k < 3; k++) d += (c[k] - palette[i][k]) * (c[k] - palette[i][k]);
      if (d < best) { best = d; which = i; }
    }
    bits |= which << (2 * p);
  }
  blocks[(by * wide + bx) * 2] = a | b << 16;
  blocks[(by * wide + bx) * 2 + 1] = bits;
}
";

/// The task, for an image of `wide` × `high` blocks of 4 × 4 pixels: `rgba` to `blocks`, two words each.
pub fn task(wide: usize, high: usize) -> Task {
    let launch = || {
        let args = [Arg::port("rgba"), Arg::port("blocks"), Arg::Items(0), Arg::Items(1)];
        [Launch::new(Source::Portable(SOURCE.into()), "dxt1", args).over(Geometry::new(wide, high, 1))]
    };
    Task::new("dxt")
        .input("rgba", Template::array::<u8>([wide * high * 64]))
        .output("blocks", Template::array::<u32>([wide * high * 2]))
        .kernels(Kind::OpenCl, launch())
        .kernels(Kind::Cuda, launch())
        .host(move |inv| {
            compress(inv.input("rgba")?, inv.output("blocks")?, wide);
            Ok(())
        })
}

/// The same on the core that calls, for an image that is `wide` blocks wide.
pub fn compress(rgba: &[u8], blocks: &mut [u32], wide: usize) {
    for (at, to) in blocks.chunks_exact_mut(2).enumerate() {
        to.copy_from_slice(&block(rgba, wide, at % wide, at / wide));
    }
}

fn block(rgba: &[u8], wide: usize, bx: usize, by: usize) -> [u32; 2] {
    let pixel = |p: usize| {
        let at = ((by * 4 + p / 4) * wide * 4 + bx * 4 + p % 4) * 4;
        [0, 1, 2].map(|k| i32::from(rgba[at + k]))
    };
    let (mut low, mut top) = ([255; 3], [0; 3]);
    for p in 0..16 {
        for (k, c) in pixel(p).into_iter().enumerate() {
            low[k] = c.min(low[k]);
            top[k] = c.max(top[k]);
        }
    }
    let packed = |c: [i32; 3]| (c[0] as u32 >> 3) << 11 | (c[1] as u32 >> 2) << 5 | c[2] as u32 >> 3;
    let (a, b) = (packed(top), packed(low));
    let between = |x: i32, y: i32| [0, 1, 2].map(|k| (x * top[k] + y * low[k]) / 3);
    let palette = [top, low, between(2, 1), between(1, 2)];
    let mut bits = 0;
    if a != b {
        for p in 0..16 {
            let c = pixel(p);
            let far = |q: &[i32; 3]| (0..3).map(|k| (c[k] - q[k]) * (c[k] - q[k])).sum::<i32>();
            let which = (0..4).min_by_key(|i| far(&palette[*i])).unwrap_or(0);
            bits |= (which as u32) << (2 * p);
        }
    }
    [a | b << 16, bits]
}
