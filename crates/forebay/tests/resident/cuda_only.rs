//! What is so on a CUDA device only: memory, kernels and faults beside a grid.

use std::sync::Arc;

use forebay::hal::{Kind, discover};
use forebay::resident::{Builder, Error};

use super::{builder, call, device, stand_in};

/// The tests of this file.
pub const ALL: [&str; 5] = [
    "cuda_only::kernels_and_the_grid_work_on_the_same_memory",
    "cuda_only::beside_a_resident_grid_memory_and_code_wait_for_its_end",
    "cuda_only::a_grid_on_a_part_leaves_the_rest_to_others",
    "cuda_only::a_task_that_faults_is_named_and_nobody_waits_for_ever",
    "cuda_only::a_grid_larger_than_the_device_and_one_for_another_kind_are_refused",
];

/// What a kernel leaves on the device the grid finds there, and the other way round; streams stop now and then.
#[test]
fn kernels_and_the_grid_work_on_the_same_memory() {
    use forebay::{Arg, Datablock, Graph, Launch, Runtime, Source, Task, Template};
    const NAME: &str = "cuda_only::kernels_and_the_grid_work_on_the_same_memory";
    let Some(d) = device() else { return stand_in::again_with(NAME, &[("STAND_IN_DELAYS", "1")]) };
    const N: usize = 5000;
    let source = Source::CudaCpp(
        "extern \"C\" __global__ void twice(const float *x, float *y) {
            const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < 5000) y[i] = 2 * x[i];
        }"
        .into(),
    );
    // Before the grid is there, and kept.
    let compiled = d.compile(&source, "twice").unwrap();
    let text = "TASK_PER_THREAD(more) {
        const float *in = (const float *)fb_span(t, 0).data;
        float *out = (float *)fb_span(t, 1).data;
        out[i] = in[i] + 1;
    }";
    let grid = Arc::new(Builder::new(text).functions(["more"]).grain(300).blocks(1).start_on(&d).unwrap());
    let t = Template::array::<f32>([N]);
    let mut g = Graph::new("both");
    let kernel = |name: &str| {
        let launch = Launch::new(source.clone(), "twice", [Arg::port("x"), Arg::port("y")]);
        Task::new(name).input("x", t).output("y", t).kernels(Kind::Cuda, [launch])
    };
    let first = g.add(kernel("first")).unwrap();
    let more = g.add(Task::new("more").input("x", t).output("y", t).resident(&grid, "more")).unwrap();
    let last = g.add(kernel("last")).unwrap();
    g.connect((first, "y"), (more, "x")).unwrap();
    g.connect((more, "y"), (last, "x")).unwrap();
    let (feed, drain) = (g.feed((first, "x"), 4).unwrap(), g.drain((last, "y"), 4).unwrap());
    let rt = Runtime::builder().devices(vec![d.clone()]).build().unwrap();
    let run = rt.start(g).unwrap();
    let push = |k: usize| {
        let data: Vec<f32> = (0..N).map(|i| (i + k) as f32).collect();
        run.push(feed, Datablock::from_slice(t, &data).unwrap()).unwrap();
    };
    (0..3).for_each(push);
    for k in 0..100 {
        push(k + 3);
        let out = run.pull(drain).unwrap();
        let wrong = out.as_slice::<f32>().unwrap().iter().enumerate().find(|(i, v)| **v != 4.0 * (i + k) as f32 + 2.0);
        assert!(wrong.is_none(), "item {k}: {wrong:?}");
    }
    let moved = rt.copied()[1] / (N as u64 * 4);
    assert!(
        (200..=206).contains(&moved),
        "{moved} blocks were copied, where 103 go up and 100 or a few more come down"
    );
    drop((run, compiled));
    // A runtime without the device has nobody for the task.
    let mut g = Graph::new("nowhere");
    let more = g.add(Task::new("more").input("x", t).output("y", t).resident(&grid, "more")).unwrap();
    g.feed((more, "x"), 4).unwrap();
    g.drain((more, "y"), 4).unwrap();
    let refused = Runtime::builder().cpu_only().build().unwrap().start(g).map(drop).unwrap_err().to_string();
    assert!(refused.contains("resident"), "{refused}");
}

#[test]
fn beside_a_resident_grid_memory_and_code_wait_for_its_end() {
    let Some(d) = device() else {
        return stand_in::again("cuda_only::beside_a_resident_grid_memory_and_code_wait_for_its_end");
    };
    let kernel = |text: &str, entry: &str| d.compile(&forebay::hal::Source::CudaCpp(text.into()), entry);
    let before = kernel("extern \"C\" __global__ void set(unsigned *p) { *p = 7; }", "set").unwrap();
    let mut g = builder().blocks(2).start_on(&d).unwrap();
    // What was compiled before runs beside it; memory comes and goes without waiting for it.
    for _ in 0..3 {
        let (b, h) = (d.alloc(1 << 20).unwrap(), d.alloc_host(4).unwrap());
        let mut q = d.queue().unwrap();
        q.launch(&before, &forebay::hal::Geometry::linear(1), &[forebay::hal::Arg::Buffer(&b)]).unwrap();
        q.copy(&b, 0, &h, 0, 4).unwrap();
        let f = q.fence().unwrap();
        q.wait(f).unwrap();
        // SAFETY: the copy is done.
        assert_eq!(unsafe { h.host_ptr().unwrap().cast::<u32>().read() }, 7);
    }
    // Loading code would wait for the grid for ever.
    let text = "extern \"C\" __global__ void other(unsigned *p) { *p = 8; }";
    let refused = kernel(text, "other").map(drop).unwrap_err().to_string();
    assert!(refused.contains("other") && refused.contains("resident"), "{refused}");
    assert_eq!(g.wait(g.submit(call(&g, "add", &[4, 5])).unwrap()).unwrap().result_as::<u64>(), 9);
    g.stop().unwrap();
    drop(g);
    assert!(kernel(text, "other").is_ok());
    assert_eq!(d.allocated(), 0);
}

#[test]
fn a_grid_on_a_part_leaves_the_rest_to_others() {
    let Some(d) = device() else { return stand_in::again("cuda_only::a_grid_on_a_part_leaves_the_rest_to_others") };
    let [part, rest] = d.split(1).unwrap();
    let text = "extern \"C\" __global__ void set(unsigned *p) { *p = 7; }";
    let kernel = rest.compile(&forebay::hal::Source::CudaCpp(text.into()), "set").unwrap();
    // A block for each multiprocessor of the part, and not of the whole.
    let mut g = builder().start_on(&part).unwrap();
    assert_eq!(g.size(), part.info().compute_units as usize);
    let (b, h) = (rest.alloc(4).unwrap(), rest.alloc_host(4).unwrap());
    let mut q = rest.queue().unwrap();
    q.launch(&kernel, &forebay::hal::Geometry::linear(1), &[forebay::hal::Arg::Buffer(&b)]).unwrap();
    q.copy(&b, 0, &h, 0, 4).unwrap();
    let f = q.fence().unwrap();
    q.wait(f).unwrap();
    // SAFETY: the copy is done.
    assert_eq!(unsafe { h.host_ptr().unwrap().cast::<u32>().read() }, 7);
    assert_eq!(g.wait(g.submit(call(&g, "add", &[4, 5])).unwrap()).unwrap().result_as::<u64>(), 9);
    // Both parts have one context: what loads code would wait for the grid.
    let refused = rest.compile(&forebay::hal::Source::CudaCpp(format!("{text}//").into()), "set").map(drop);
    assert!(refused.unwrap_err().to_string().contains("resident"));
    g.stop().unwrap();
}

#[test]
fn a_task_that_faults_is_named_and_nobody_waits_for_ever() {
    let Some(d) = device() else {
        return stand_in::again("cuda_only::a_task_that_faults_is_named_and_nobody_waits_for_ever");
    };
    let text = "TASK(bad) { *(volatile u32 *)8 = 1; }\nTASK(good) {}";
    let b = Builder::new(text).functions(["bad", "good"]).blocks(1).ring(2);
    let mut g = b.start_on(&d).unwrap();
    g.wait(g.submit(call(&g, "good", &[])).unwrap()).unwrap();
    let why = g.wait(g.submit(call(&g, "bad", &[])).unwrap()).unwrap_err();
    let Error::Lost { running, why } = &why else { panic!("{why}") };
    assert!(running == &["bad (ticket 1)"] && why.contains("ILLEGAL_ADDRESS"), "{running:?} {why}");
    // Who wants to be called is.
    let (told, of) = std::sync::mpsc::channel();
    g.submit_then(call(&g, "good", &[]), move |what| told.send(what.map(drop)).unwrap()).unwrap();
    let called = of.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
    assert!(matches!(called, Err(Error::Lost { .. })), "{called:?}");
    // A full ring, whose tasks nobody takes, is no reason to wait either.
    let mut last = Ok(());
    for _ in 0..4 {
        last = g.submit(call(&g, "good", &[])).map(drop);
    }
    assert!(matches!(last, Err(Error::Lost { .. })), "{last:?}");
    assert!(matches!(g.drain(), Err(Error::Lost { .. })));
    assert!(matches!(b.start_on(&d).map(drop), Err(Error::Lost { .. })));
    // The context is made anew once nothing of the old one is held, and a grid goes on there.
    // SAFETY: nobody else in this process uses the device.
    let renewed = || unsafe { d.renew() };
    assert!(renewed().map(drop).unwrap_err().to_string().contains("are in use"));
    drop(g);
    let d = renewed().unwrap();
    let g = b.start_on(&d).unwrap();
    g.wait(g.submit(call(&g, "good", &[])).unwrap()).unwrap();
}

#[test]
fn a_grid_larger_than_the_device_and_one_for_another_kind_are_refused() {
    let (sim, _) = discover(&[Kind::Sim]);
    let why = builder().start_on(&sim[0]).map(drop).unwrap_err().to_string();
    assert!(why.contains("sim") && why.contains("CUDA"), "{why}");
    let Some(d) = device() else {
        return stand_in::again("cuda_only::a_grid_larger_than_the_device_and_one_for_another_kind_are_refused");
    };
    let why = builder().heap(1 << 40).start_on(&d).map(drop).unwrap_err().to_string();
    assert!(why.contains("a heap of") && why.contains("out of memory"), "{why}");
    let why = builder().heap(100).start_on(&d).map(drop).unwrap_err().to_string();
    assert!(why.contains("no room for a page"), "{why}");
    let broken = Builder::new("TASK(f) {\n  nonsense;\n}").functions(["f"]).start_on(&d).map(drop).unwrap_err();
    assert!(matches!(&broken, Error::Compile(log) if log.contains("nonsense")), "{broken}");
    assert!(matches!(builder().threads(33).start_on(&d).map(drop), Err(Error::Setting { what: "threads", .. })));
    assert_eq!(d.allocated(), 0);
}
