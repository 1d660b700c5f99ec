//! What CUDA's driver says when it finds no memory for what a command needs; on its stand-in.

use std::time::Duration;

use forebay::{Arg, Drain, Feed, Graph, Kind, Launch, Running, Runtime, Source, Task, Template};

use super::stand_in;

const N: usize = 1000;
/// As many tasks in a row, each of which the GPU and the host can do, by a kernel of this name.
fn chain(rt: &Runtime, tasks: usize, kernel: &str) -> (Running, Feed, Drain) {
    let t = Template::array::<u32>([N]);
    let text = format!(
        "KERNEL void {kernel}(GLOBAL const uint *x, GLOBAL uint *y) {{
           uint i = gid_x();
           if (i < 1000) y[i] = x[i] + 1u;
         }}"
    );
    let task = |i: usize| {
        let launch = Launch::new(Source::Portable(text.as_str().into()), kernel, ["x", "y"].map(Arg::port));
        let task = Task::new(format!("more{i}")).input("x", t).output("y", t).kernels(Kind::Cuda, [launch]);
        task.host(|inv| {
            let (x, y) = (inv.input::<u32>("x")?, inv.output::<u32>("y")?);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = x + 1);
            Ok(())
        })
    };
    let mut g = Graph::new("chain");
    let ids: Vec<_> = (0..tasks).map(|i| g.add(task(i)).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
    let (feed, drain) = (g.feed((ids[0], "x"), 4).unwrap(), g.drain((ids[tasks - 1], "y"), 4).unwrap());
    (rt.start(g).unwrap(), feed, drain)
}

/// Five items; how many of them the GPU did.
fn five((run, feed, drain): &(Running, Feed, Drain), tasks: u32) -> u64 {
    let by_gpu = || run.snapshot().tasks[0].by_device[1];
    let before = by_gpu();
    for v in 0..5 {
        let mut block = run.acquire(*feed).unwrap();
        block.assign(&[v; N]).unwrap();
        run.push(*feed, block).unwrap();
        assert_eq!(run.pull(*drain).unwrap().as_slice::<u32>().unwrap(), [v + tasks; N]);
    }
    by_gpu() - before
}

/// The stand-in looks at that file.
#[test]
fn calls_find_no_memory() {
    if !stand_in::alone("cuda::calls_find_no_memory") {
        return;
    }
    let Some(file) = std::env::var_os("STAND_IN_NO_MEMORY_FOR") else { return };
    let finds_none = |call: &str| std::fs::write(&file, call).unwrap();
    let found = || assert!(!std::fs::exists(&file).unwrap(), "nobody called it");
    let rt = Runtime::builder().build().unwrap();
    // Tried before a graph is made with it, and again after a while.
    finds_none("cuMemAlloc_v2");
    let graph = chain(&rt, 1, "early");
    found();
    let unused = rt.unused();
    assert!(matches!(&unused[..], [(_, why)] if why.is_out_of_memory()), "{unused:?}");
    assert_eq!(five(&graph, 1), 0);
    assert_eq!(five(&chain(&rt, 1, "early"), 1), 0, "it is left alone");
    std::thread::sleep(Duration::from_millis(5100));
    assert_eq!(five(&chain(&rt, 1, "early"), 1), 5);
    assert!(rt.unused().is_empty());
    let refused = |graph: &(Running, Feed, Drain), call: &str| {
        found();
        let refused = graph.0.snapshot().tasks[0].refused.clone();
        assert!(
            matches!(&refused[..], [(1, why)] if why.contains(call) && why.contains("OUT_OF_MEMORY")),
            "{refused:?}"
        );
    };
    // A graph that had no room for its code there does without.
    // (The second time it is in the cache, and is not compiled anew for that.)
    for (tasks, call) in [(1, "cuModuleLoadData"), (1, "cuModuleLoadData"), (3, "cuModuleGetFunction")] {
        let kernel = format!("for_{call}");
        finds_none(call);
        let graph = chain(&rt, tasks, &kernel);
        refused(&graph, call);
        assert_eq!(five(&graph, tasks as u32), 0, "{call}");
        assert_eq!(five(&chain(&rt, tasks, &kernel), tasks as u32), 5, "{call}");
    }
    // A task, or a region, that has no room for once is left to the host for a second.
    let calls = ["cuLaunchKernel", "cuGraphInstantiateWithFlags", "cuGraphLaunch"];
    for call in calls {
        let tasks = if call.starts_with("cuGraph") { 3 } else { 1 };
        let graph = chain(&rt, tasks, "early");
        finds_none(call);
        assert_eq!(five(&graph, tasks as u32), 0, "{call}");
        refused(&graph, call.trim_end_matches("WithFlags"));
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(five(&graph, tasks as u32), 5, "{call}");
    }
}

#[test]
fn a_graph_goes_on_where_a_call_finds_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("call");
    let file = file.to_str().unwrap();
    // With delays the device is waited for, so that it has still something to give back when a graph goes.
    let how = [("STAND_IN_NO_MEMORY_FOR", file), ("STAND_IN_DELAYS", "1")];
    stand_in::again_with("cuda::calls_find_no_memory", &how);
}
