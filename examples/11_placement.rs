//! A task with two implementations, called like a function: after a few calls each size is done where it is faster.

use std::sync::Arc;

use forebay::place::Models;
use forebay::{Arg, Datablock, Geometry, Kind, Launch, Mode, Result, Runtime, Source, Task, Template};

const SOURCE: &str = "KERNEL void norm(GLOBAL const float *x, GLOBAL float *y, uint n) {
  const uint i = gid_x();
  if (i >= n) return;
  float sum = 0.0f;
  for (uint k = 0; k < 64; k++) sum += x[(i + k) % n] * x[(i + k) % n];
  y[i] = x[i] / (1.0f + sum);
}";

/// Each number over the sum of the squares of the 64 from it on.
fn norm(n: usize) -> Task {
    let t = Template::array::<f32>([n]);
    let launch = || {
        let args = [Arg::port("x"), Arg::port("y"), Arg::records("x")];
        [Launch::new(Source::Portable(SOURCE.into()), "norm", args).over(Geometry::linear(n))]
    };
    let task = Task::new("norm").input("x", t).output("y", t);
    task.kernels(Kind::OpenCl, launch()).kernels(Kind::Cuda, launch()).host(|inv| {
        let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
        for (i, y) in y.iter_mut().enumerate() {
            let sum: f32 = (0..64).map(|k| x[(i + k) % x.len()]).map(|v| v * v).sum();
            *y = x[i] / (1.0 + sum);
        }
        Ok(())
    })
}

/// Runs the example.
pub fn main() -> Result<()> {
    // Whatever there is beside the CPU, an OpenCL driver for the CPU included.
    let (devices, _) = forebay::hal::discover(&[Kind::OpenCl, Kind::Cuda]);
    // Without this line what is learned stays for the next run.
    let builder = Runtime::builder().mode(Mode::Adaptive).models(Arc::new(Models::off()));
    let rt = builder.devices(devices).build()?;
    let names: Vec<String> = rt.devices().into_iter().map(|(name, kind)| format!("{kind}: {name}")).collect();
    for n in [256usize, 1 << 14, 1 << 18] {
        let data: Vec<f32> = (0..n).map(|i| (i % 100) as f32 / 10.0).collect();
        let input = [Datablock::from_slice(Template::array::<f32>([n]), &data)?];
        for difference in rt.verify(|| norm(n), &input)? {
            assert!(difference.largest < 1e-5, "{difference:?}");
        }
        let task = rt.accelerate(1, || norm(n))?;
        let mut last = Vec::new();
        for _ in 0..30 {
            last = task.call(&input)?;
        }
        assert_eq!(last[0].as_slice::<f32>()?.len(), n);
        let by_device = &task.stats()[0].by_device;
        println!("{n} numbers: {:?} of {names:?}", by_device);
        assert_eq!(by_device.iter().sum::<u64>(), 30);
    }
    Ok(())
}
