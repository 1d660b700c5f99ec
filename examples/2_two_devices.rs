//! A task with two implementations: a portable kernel for whatever accelerator there is, a function for the CPU.
//! Nothing in the graph says where it runs or when data is copied.

use forebay::{Arg, Datablock, Graph, Kind, Launch, Result, Runtime, Source, Task, Template};

const SAXPY: &str = "
KERNEL void saxpy(GLOBAL const float *x, GLOBAL float *y, float a, uint n) {
  uint i = gid_x();
  if (i < n) y[i] = a * x[i] + 1.0f;
}";

/// Runs the example.
pub fn main() -> Result<()> {
    let n = 100_000;
    let t = Template::array::<f32>([n]);
    let kernel = || {
        let args = [Arg::port("x"), Arg::port("y"), Arg::F32(2.0), Arg::Items(0)];
        [Launch::new(Source::Portable(SAXPY.into()), "saxpy", args)]
    };
    let saxpy = |name: &str| {
        let task = Task::new(name).input("x", t).output("y", t);
        task.kernels(Kind::OpenCl, kernel()).kernels(Kind::Cuda, kernel()).host(|inv| {
            let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x + 1.0);
            Ok(())
        })
    };
    let mut g = Graph::new("two devices");
    let (a, b) = (g.add(saxpy("a"))?, g.add(saxpy("b"))?);
    g.connect((a, "y"), (b, "x"))?;
    let (feed, drain) = (g.feed((a, "x"), 4)?, g.drain((b, "y"), 4)?);

    // All devices of the machine, OpenCL on CPUs included.
    let (devices, _) = forebay::hal::discover(&[Kind::OpenCl, Kind::Cuda]);
    let rt = Runtime::builder().devices(devices).build()?;
    let run = rt.start(g)?;
    for i in 0..20 {
        run.push(feed, Datablock::from_slice(t, &vec![i as f32; n])?)?;
        let out = run.pull(drain)?;
        assert_eq!(out.as_slice::<f32>()?[n - 1], 4.0 * i as f32 + 3.0);
    }
    for (task, devices) in run.snapshot().tasks.iter().map(|t| (&t.name, &t.by_device)) {
        println!("{task}: invocations by device {devices:?} of {:?}", rt.devices());
    }
    Ok(())
}
