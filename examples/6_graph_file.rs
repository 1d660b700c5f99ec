//! A graph from a file, with a function of this program's own in its library.

use std::path::Path;

use forebay::graph::{Library, load};
use forebay::{Datablock, Error, Result, Runtime, Template};

/// Runs the example.
pub fn main() -> Result<()> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/6_graph_file.toml");
    let g = load(&file, &Library::standard())?;
    g.check()?;
    let task = |n: &str| g.find(n).ok_or_else(|| Error::NoSuch { what: "task", graph: g.name().into() });
    let (split, add, multiply) = (task("split")?, task("add")?, task("multiply")?);
    let missing = || Error::NoSuch { what: "feed or drain", graph: g.name().into() };
    let a = g.feed_of((split, "in")).ok_or_else(missing)?;
    let b = g.feed_of((add, "b")).ok_or_else(missing)?;
    let out = g.drain_of((multiply, "product")).ok_or_else(missing)?;

    let run = Runtime::new()?.start(g)?;
    let t = Template::array::<f32>([8]);
    run.push(a, Datablock::from_slice(t, &[3f32; 8])?)?;
    run.push(b, Datablock::from_slice(t, &[4f32; 8])?)?;
    let product = run.pull(out)?;
    println!("(3 + 4) × 3 = {}", product.as_slice::<f32>()?[0]);
    assert_eq!(product.as_slice::<f32>()?, [21.0; 8]);
    Ok(())
}
