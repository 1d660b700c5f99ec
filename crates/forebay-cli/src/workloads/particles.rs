//! Forces between particles of neighbouring boxes, as molecular dynamics computes them: boxes in a cube, 32 particles each, every
//! particle with all of the 27 boxes around it.

use forebay::{Arg, Geometry, Kind, Launch, Source, Task, Template};

/// Particles of a box.
pub const EACH: usize = 32;

const SOURCE: &str = "
KERNEL void forces(GLOBAL const float *at, GLOBAL float *force, uint side) {
  const uint i = gid_x(), box = i / 32;
  if (box >= side * side * side) return;
  const int n = (int)side, bx = (int)(box % side), by = (int)(box / side % side), bz = (int)(box / side / side);
  const float x = at[4 * i], y = at[4 * i + 1], z = at[4 * i + 2];
  float fx = 0.0f, fy = 0.0f, fz = 0.0f, energy = 0.0f;
  for (int dz = -1; dz <= 1; dz++) for (int dy = -1; dy <= 1; dy++) for (int dx = -1; dx <= 1; dx++) {
    if (bx + dx < 0 || bx + dx >= n || by + dy < 0 || by + dy >= n || bz + dz < 0 || bz + dz >= n) continue;
    const uint other = (uint)(((bz + dz) * n + by + dy) * n + bx + dx) * 32;
    for (uint j = other; j < other + 32; j++) {
      const float rx = x - at[4 * j], ry = y - at[4 * j + 1], rz = z - at[4 * j + 2], q = at[4 * j + 3];
      const float near = q / (0.25f + rx * rx + ry * ry + rz * rz);
      energy += near;
      fx += near * near * rx;
      fy += near * near * ry;
      fz += near * near * rz;
    }
  }
  force[4 * i] = fx;
  force[4 * i + 1] = fy;
  force[4 * i + 2] = fz;
  force[4 * i + 3] = energy;
}
";

/// The task, for a cube of `side` boxes each way: places and charges `at` to `force` and energy, four numbers a particle.
pub fn task(side: usize) -> Task {
    let n = side * side * side * EACH;
    let launch = || {
        let args = [Arg::port("at"), Arg::port("force"), Arg::U32(side as u32)];
        [Launch::new(Source::Portable(SOURCE.into()), "forces", args).over(Geometry::linear(n))]
    };
    let four = Template::array::<f32>([4 * n]);
    Task::new("particles")
        .input("at", four)
        .output("force", four)
        .kernels(Kind::OpenCl, launch())
        .kernels(Kind::Cuda, launch())
        .host(move |inv| {
            forces(inv.input("at")?, inv.output("force")?, side);
            Ok(())
        })
}

/// The same on the core that calls.
pub fn forces(at: &[f32], force: &mut [f32], side: usize) {
    let at: &[[f32; 4]] = bytemuck::cast_slice(at);
    let around = |b: usize| (b.saturating_sub(1)..(b + 2).min(side)).collect::<Vec<_>>();
    for (i, to) in force.chunks_exact_mut(4).enumerate() {
        let (b, p) = (i / EACH, at[i]);
        let mut sum = [0f32; 4];
        for bz in around(b / side / side) {
            for by in around(b / side % side) {
                for bx in around(b % side) {
                    let first = ((bz * side + by) * side + bx) * EACH;
                    for o in &at[first..first + EACH] {
                        let r = [p[0] - o[0], p[1] - o[1], p[2] - o[2]];
                        let near = o[3] / (0.25 + r[0] * r[0] + r[1] * r[1] + r[2] * r[2]);
                        sum[3] += near;
                        (0..3).for_each(|k| sum[k] += near * near * r[k]);
                    }
                }
            }
        }
        to.copy_from_slice(&sum);
    }
}

/// Particles strewn over their boxes, with charges of both signs.
pub fn strewn(side: usize) -> Vec<f32> {
    let part = |i: usize, salt: usize| ((i * 2_654_435_761 + salt * 40_503) % 1009) as f32 / 1009.0;
    let particle = |i: usize| {
        let b = i / EACH;
        let place = [b % side, b / side % side, b / side / side];
        let at = |k: usize| place[k] as f32 + part(i, k);
        [at(0), at(1), at(2), part(i, 3) - 0.5]
    };
    (0..side * side * side * EACH).flat_map(particle).collect()
}
