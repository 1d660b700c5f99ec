//! One task, one datablock in, one out.

use forebay::{Datablock, Graph, Result, Runtime, Task, Template};

/// Runs the example.
pub fn main() -> Result<()> {
    let t = Template::array::<f32>([8]);
    let mut g = Graph::new("hello");
    let square = g.add(Task::new("square").input("x", t).output("y", t).host(|inv| {
        let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * x);
        Ok(())
    }))?;
    let (feed, drain) = (g.feed((square, "x"), 4)?, g.drain((square, "y"), 4)?);

    let run = Runtime::new()?.start(g)?;
    run.push(feed, Datablock::from_slice(t, &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?)?;
    let out = run.pull(drain)?;
    println!("{:?}", out.as_slice::<f32>()?);
    assert_eq!(out.as_slice::<f32>()?[7], 64.0);
    Ok(())
}
