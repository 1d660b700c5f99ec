//! A sticky port keeps its datablock until another comes; a Meta port's number is a kernel's or a function's argument.

use forebay::{Datablock, Graph, Result, Runtime, Task, Template};

/// Runs the example.
pub fn main() -> Result<()> {
    let t = Template::array::<f32>([4]);
    let mut g = Graph::new("sticky");
    let task = Task::new("axpb").input("x", t).sticky("b", t).meta::<f32>("a").output("y", t);
    let axpb = g.add(task.host(|inv| {
        let (x, b, a) = (inv.input::<f32>("x")?, inv.input::<f32>("b")?, inv.value::<f32>("a")?);
        for (i, y) in inv.output::<f32>("y")?.iter_mut().enumerate() {
            *y = a * x[i] + b[i];
        }
        Ok(())
    }))?;
    let (x, b, a) = (g.feed((axpb, "x"), 4)?, g.feed((axpb, "b"), 1)?, g.feed((axpb, "a"), 4)?);
    let y = g.drain((axpb, "y"), 4)?;

    let run = Runtime::new()?.start(g)?;
    // Pushed once, used three times.
    run.push(b, Datablock::from_slice(t, &[0f32, 10.0, 20.0, 30.0])?)?;
    for factor in [1f32, 2.0, 3.0] {
        run.push(a, Datablock::scalar(factor)?)?;
        run.push(x, Datablock::from_slice(t, &[1f32; 4])?)?;
        let out = run.pull(y)?;
        println!("{:?}", out.as_slice::<f32>()?);
        assert_eq!(out.as_slice::<f32>()?, [factor, 10.0 + factor, 20.0 + factor, 30.0 + factor]);
    }
    Ok(())
}
