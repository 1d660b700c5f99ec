//! Outputs whose length is known only at run time: a task sets its own record count, and a Meta port sizes another's.

use forebay::{Datablock, Graph, Result, Runtime, Task, Template};

/// Runs the example.
pub fn main() -> Result<()> {
    let (input, kept) = (Template::array::<u32>([100]), Template::records::<u32>(100));
    let mut g = Graph::new("variable length");
    // Keeps what is divisible by seven, and says how many that are.
    let task = Task::new("select").input("in", input).output("kept", kept).output("count", Template::scalar::<u64>());
    let select = g.add(task.host(|inv| {
        let (from, to) = (inv.input::<u32>("in")?, inv.output::<u32>("kept")?);
        let mut n = 0;
        for v in from.iter().filter(|v| **v % 7 == 0) {
            to[n] = *v;
            n += 1;
        }
        inv.out("kept")?.set_records(n)?;
        inv.output::<u64>("count")?[0] = n as u64;
        Ok(())
    }))?;
    // Its output has as many elements as the Meta port says, decided before it runs.
    let task = Task::new("gaps").input("in", kept).output("gaps", kept).meta_size("count", "gaps");
    let gaps = g.add(task.host(|inv| {
        let (from, to) = (inv.input::<u32>("in")?, inv.output::<u32>("gaps")?);
        let mut last = 0;
        for (to, v) in to.iter_mut().zip(from) {
            *to = *v - last;
            last = *v;
        }
        Ok(())
    }))?;
    g.connect((select, "kept"), (gaps, "in"))?;
    g.connect((select, "count"), (gaps, "count"))?;
    let (feed, drain) = (g.feed((select, "in"), 4)?, g.drain((gaps, "gaps"), 4)?);

    let run = Runtime::new()?.start(g)?;
    for start in [0u32, 50, 1000] {
        let data: Vec<u32> = (start..start + 100).collect();
        run.push(feed, Datablock::from_slice(input, &data)?)?;
        let out = run.pull(drain)?;
        let v = out.as_slice::<u32>()?;
        println!("{} kept, gaps {:?}…", out.records(), &v[..4]);
        assert!(v[1..].iter().all(|g| *g == 7));
    }
    Ok(())
}
