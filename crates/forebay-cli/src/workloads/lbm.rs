//! A step of a lattice Boltzmann fluid (D2Q9, one relaxation time), on a torus.

use forebay::{Arg, Geometry, Kind, Launch, Source, Task, Template};

/// Speeds.
const Q: usize = 9;
/// Relaxation.
const OMEGA: f32 = 1.2;
const X: [i32; Q] = [0, 1, 0, -1, 0, 1, -1, -1, 1];
const Y: [i32; Q] = [0, 0, 1, 0, -1, 1, 1, -1, -1];
const W: [f32; Q] =
    [4.0 / 9.0, 1.0 / 9.0, 1.0 / 9.0, 1.0 / 9.0, 1.0 / 9.0, 1.0 / 36.0, 1.0 / 36.0, 1.0 / 36.0, 1.0 / 36.0];

const SOURCE: &str = "
KERNEL void lbm(GLOBAL const float *from, GLOBAL float *to, uint wide, uint high) {
  const int x = (int)gid_x(), y = (int)gid_y(), w = (int)wide, h = (int)high;
  if (x >= w || y >= h) return;
  const int dx[9] = {0, 1, 0, -1, 0, 1, -1, -1, 1}, dy[9] = {0, 0, 1, 0, -1, 1, 1, -1, -1};
  const float weight[9] = {4.0f / 9.0f, 1.0f / 9.0f, 1.0f / 9.0f, 1.0f / 9.0f, 1.0f / 9.0f, 1.0f / 36.0f, 1.0f / 36.0f,
                           1.0f / 36.0f, 1.0f / 36.0f};
  float f[9], mass = 0.0f, ux = 0.0f, uy = 0.0f;
  for (int q = 0; q < 9; q++) {
    f[q] = from[q * w * h + (y - dy[q] + h) % h * w + (x - dx[q] + w) % w];
    mass += f[q];
    ux += f[q] * (float)dx[q];
    uy += f[q] * (float)dy[q];
  }
  ux /= mass;
  uy /= mass;
  for (int q = 0; q < 9; q++) {
    const float along = 3.0f * ((float)dx[q] * ux + (float)dy[q] * uy);
    const float rest = weight[q] * mass * (1.0f + along + 0.5f * along * along - 1.5f * (ux * ux + uy * uy));
    to[q * w * h + y * w + x] = f[q] + 1.2f * (rest - f[q]);
  }
}
";

/// The task, for `wide` × `high` cells: nine planes `from` to nine planes `to`.
pub fn task(wide: usize, high: usize) -> Task {
    let launch = || {
        let args = [Arg::port("from"), Arg::port("to"), Arg::Items(0), Arg::Items(1)];
        [Launch::new(Source::Portable(SOURCE.into()), "lbm", args).over(Geometry::new(wide, high, 1))]
    };
    let planes = Template::array::<f32>([wide * high * Q]);
    Task::new("lbm")
        .input("from", planes)
        .output("to", planes)
        .kernels(Kind::OpenCl, launch())
        .kernels(Kind::Cuda, launch())
        .host(move |inv| {
            step(inv.input("from")?, inv.output("to")?, wide, high);
            Ok(())
        })
}

/// The same on the core that calls.
pub fn step(from: &[f32], to: &mut [f32], wide: usize, high: usize) {
    let (w, h, cells) = (wide as i32, high as i32, wide * high);
    for y in 0..h {
        for x in 0..w {
            let mut f = [0f32; Q];
            let (mut mass, mut ux, mut uy) = (0f32, 0f32, 0f32);
            for q in 0..Q {
                let at = (y - Y[q] + h) % h * w + (x - X[q] + w) % w;
                f[q] = from[q * cells + at as usize];
                mass += f[q];
                ux += f[q] * X[q] as f32;
                uy += f[q] * Y[q] as f32;
            }
            ux /= mass;
            uy /= mass;
            for q in 0..Q {
                let along = 3.0 * (X[q] as f32 * ux + Y[q] as f32 * uy);
                let rest = W[q] * mass * (1.0 + along + 0.5 * along * along - 1.5 * (ux * ux + uy * uy));
                to[q * cells + (y * w + x) as usize] = f[q] + OMEGA * (rest - f[q]);
            }
        }
    }
}

/// A fluid at rest but for a ripple.
pub fn ripple(wide: usize, high: usize) -> Vec<f32> {
    let cells = wide * high;
    let wave = |i: usize| 1.0 + 0.05 * ((i % wide) as f32 / 7.0).sin() * ((i / wide) as f32 / 5.0).cos();
    (0..Q * cells).map(|i| W[i / cells] * wave(i % cells)).collect()
}
