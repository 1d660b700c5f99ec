//! Two graphs compete for one device; under the priority mode the urgent one gets more of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::hal::sim::{Model, SimDevice};
use forebay::{Arg, Drain, Feed, Graph, Kind, Launch, Mode, Result, Running, Runtime, Source, Task, Template};

fn graph(name: &str, priority: i32) -> Result<(Graph, Feed, Drain)> {
    let t = Template::array::<u32>([256]);
    let work = Source::Cpu(Arc::new(|s| {
        // SAFETY: each part writes its own elements only.
        let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
        s.for_each(|i, _, _| y[i] = x[i] + 1);
        // Long enough for the device to be contended.
        std::thread::sleep(Duration::from_micros(300));
    }));
    let mut g = Graph::new(name);
    let launch = Launch::new(work, "work", [Arg::port("x"), Arg::port("y")]);
    let task = Task::new("work").input("x", t).output("y", t).priority(priority);
    let id = g.add(task.kernels(Kind::Sim, [launch]))?;
    let (feed, drain) = (g.feed((id, "x"), 4)?, g.drain((id, "y"), 4)?);
    Ok((g, feed, drain))
}

/// Runs the example.
pub fn main() -> Result<()> {
    let device = Arc::new(SimDevice::new(Model::default()));
    let rt = Runtime::builder().devices(vec![device]).mode(Mode::Priority).build()?;
    let mut runs: Vec<(Running, Feed, Drain)> = Vec::new();
    for (name, priority) in [("background", 0), ("urgent", 8)] {
        let (g, feed, drain) = graph(name, priority)?;
        runs.push((rt.start(g)?, feed, drain));
    }
    let until = Instant::now() + Duration::from_millis(400);
    let counts: Vec<u64> = std::thread::scope(|s| {
        let workers: Vec<_> = runs
            .iter()
            .map(|(run, feed, drain)| {
                s.spawn(move || {
                    let mut n = 0;
                    while Instant::now() < until {
                        for _ in 0..2 {
                            let _ = run.acquire(*feed).and_then(|b| run.push(*feed, b));
                        }
                        n += u64::from(run.pull(*drain).is_ok()) + u64::from(run.pull(*drain).is_ok());
                    }
                    n
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().unwrap_or(0)).collect()
    });
    println!("background {} invocations, urgent {}", counts[0], counts[1]);
    assert!(counts[1] > 0 && counts[0] > 0);
    Ok(())
}
