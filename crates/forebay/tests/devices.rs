//! Graphs on devices other than the CPU: what moves when, who issues, and what becomes of failures.

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay::hal::sim::{Model, SimDevice};
use forebay::place::Models;
use forebay::{Arg, Datablock, Graph, Kind, Launch, Mode, Runtime, Source, Task, Template};

/// `y = 2x + 1` as a kernel for the CPU's iteration space and the simulator.
fn affine() -> Source {
    Source::Cpu(Arc::new(|s| {
        // SAFETY: each part writes its own elements only.
        let (x, y) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
        s.for_each(|i, _, _| y[i] = 2 * x[i] + 1);
    }))
}

const AFFINE: &str = "KERNEL void affine(GLOBAL const uint *x, GLOBAL uint *y, uint n) {
  uint i = gid_x();
  if (i < n) y[i] = 2u * x[i] + 1u;
}";

fn affine_task(name: &str, n: usize, kinds: &[Kind]) -> Task {
    let t = Template::array::<u32>([n]);
    let mut task = Task::new(name).input("x", t).output("y", t);
    for &kind in kinds {
        let source = match kind {
            Kind::Cpu | Kind::Sim => affine(),
            _ => Source::Portable(AFFINE.into()),
        };
        task = task.kernels(kind, [Launch::new(source, "affine", [Arg::port("x"), Arg::port("y"), Arg::Items(0)])]);
    }
    task
}

#[test]
fn data_moves_between_devices_only_when_it_must() {
    let sims: Vec<SimDevice> =
        (0..2).map(|i| SimDevice::new(Model { name: format!("sim{i}"), ..Model::default() })).collect();
    let n = 1000;
    let rt = Runtime::builder().devices(vec![Arc::new(sims[0].clone())]).build().unwrap();
    let mut g = Graph::new("stay");
    let ids: Vec<_> = (0..5).map(|i| g.add(affine_task(&format!("t{i}"), n, &[Kind::Sim])).unwrap()).collect();
    ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
    let (feed, drain) = (g.feed((ids[0], "x"), 2).unwrap(), g.drain((ids[4], "y"), 2).unwrap());
    let run = rt.start(g).unwrap();
    let t = Template::array::<u32>([n]);
    run.push(feed, Datablock::from_slice(t, &vec![1u32; n]).unwrap()).unwrap();
    let out = run.pull(drain).unwrap();
    assert_eq!(out.as_slice::<u32>().unwrap(), vec![63u32; n]);
    // One copy in, one copy out; nothing between the five tasks.
    assert_eq!(rt.copied()[1], 2 * 4 * n as u64);
    assert_eq!(sims[0].launches(), 5);
}

#[test]
fn a_traced_graph_tells_its_invocations_and_copies_and_one_that_is_not_tells_nothing() {
    let n = 1000;
    let graph = || {
        let mut g = Graph::new("traced");
        let t = g.add(affine_task("t", n, &[Kind::Sim])).unwrap();
        let ends = (g.feed((t, "x"), 2).unwrap(), g.drain((t, "y"), 2).unwrap());
        (g, ends)
    };
    for traced in [false, true] {
        let rt = Runtime::builder().devices(vec![Arc::new(SimDevice::new(Model::default()))]).build().unwrap();
        let (g, (feed, drain)) = graph();
        let run = if traced { rt.start_traced(g) } else { rt.start(g) }.unwrap();
        run.push(feed, Datablock::from_slice(Template::array::<u32>([n]), &vec![1u32; n]).unwrap()).unwrap();
        let out = run.pull(drain).unwrap();
        assert_eq!(out.as_slice::<u32>().unwrap()[0], 3);
        let ((spans, no_room), (copies, no_room_either)) = (run.take_trace(), run.take_copies());
        assert_eq!((no_room, no_room_either), (0, 0));
        if !traced {
            assert!(spans.is_empty() && copies.is_empty());
            continue;
        }
        assert_eq!(spans.iter().map(|s| (s.task, s.device)).collect::<Vec<_>>(), [(0, 1)]);
        // In, and out for the program; one after the other.
        let told: Vec<_> = copies.iter().map(|c| (c.device, c.to_device, c.bytes)).collect();
        assert_eq!(told, [(1, true, 4 * n as u64), (1, false, 4 * n as u64)]);
        assert!(copies[0].begin_ns <= copies[0].end_ns && copies[0].end_ns <= copies[1].begin_ns);
        assert!(run.take_copies().0.is_empty(), "they are told once");
    }
}

#[test]
fn results_that_the_program_reads_are_sent_to_it_ahead() {
    let rt = Runtime::builder().devices(vec![Arc::new(SimDevice::new(Model::default()))]).build().unwrap();
    let n = 1000;
    let bytes = 4 * n as u64;
    let mut g = Graph::new("ahead");
    let t = g.add(affine_task("t", n, &[Kind::Sim])).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 2).unwrap(), g.drain((t, "y"), 2).unwrap());
    let run = rt.start(g).unwrap();
    // What one item copies, up to when its result has been pulled; then the result is read or not.
    let item = |v: u32, read: bool| {
        let before = rt.copied()[1];
        let data = vec![v; n];
        run.push(feed, Datablock::from_slice(Template::array::<u32>([n]), &data).unwrap()).unwrap();
        let out = run.pull(drain).unwrap();
        let copied = rt.copied()[1] - before;
        if read {
            assert_eq!(out.as_slice::<u32>().unwrap(), vec![2 * v + 1; n]);
        }
        copied
    };
    assert_eq!(item(1, true), bytes, "nobody has read a result yet");
    assert_eq!(item(2, true), 2 * bytes, "the last result was read, so this one comes by itself");
    assert_eq!(item(3, false), 2 * bytes);
    assert_eq!(item(4, false), bytes, "the last one came for nothing");
    assert_eq!(item(5, true), bytes);
    assert_eq!(item(6, true), 2 * bytes);
}

#[test]
fn who_pushes_and_may_wait_issues_to_an_idle_device_himself() {
    for mode in Mode::ALL.into_iter().filter(|m| *m != Mode::Adaptive) {
        let sim = SimDevice::new(Model { strength: 0, ..Model::default() });
        let rt = Runtime::builder().devices(vec![Arc::new(sim.clone())]).mode(mode).workers(1).build().unwrap();
        let n = 100;
        let mut g = Graph::new("device");
        let t = g.add(affine_task("t", n, &[Kind::Sim])).unwrap();
        let (feed, drain) = (g.feed((t, "x"), 4).unwrap(), g.drain((t, "y"), 4).unwrap());
        let c = g.add(affine_task("c", n, &[Kind::Cpu, Kind::Sim])).unwrap();
        let (to_cpu, from_cpu) = (g.feed((c, "x"), 4).unwrap(), g.drain((c, "y"), 4).unwrap());
        let run = rt.start(g).unwrap();
        let block = |v: u32| Datablock::from_slice(Template::array::<u32>([n]), &vec![v; n]).unwrap();
        let read = |b: Datablock| b.as_slice::<u32>().unwrap()[n - 1];
        // A task is looked at once when its graph starts, by a worker.
        run.push(feed, block(5)).unwrap();
        run.push(to_cpu, block(6)).unwrap();
        assert_eq!([drain, from_cpu].map(|d| read(run.pull(d).unwrap())), [11, 13], "{mode:?}");

        // The only worker is busy from now on.
        let (begun, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut g = Graph::new("busy");
        let (b, o) = (begun.clone(), over.clone());
        let work = move |_: &mut forebay::Invocation<'_>| {
            b.store(true, Ordering::Release);
            while !o.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
            Ok(())
        };
        let t = g.add(Task::new("t").input("x", Template::scalar::<u64>()).host(work)).unwrap();
        let busy_feed = g.feed((t, "x"), 1).unwrap();
        let busy = rt.start(g).unwrap();
        // Also when something below fails: a graph's end waits for its tasks.
        struct Over(Arc<AtomicBool>);
        impl Drop for Over {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let over = Over(over);
        busy.push(busy_feed, Datablock::scalar(1u64).unwrap()).unwrap();
        while !begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        for v in 0..20 {
            run.push(feed, block(v)).unwrap();
            assert_eq!(read(run.try_pull(drain).unwrap()), 2 * v + 1, "{mode:?}");
        }
        // What the processor does, here the stronger one, is the worker's. (In the other modes the busy task has its slot.)
        let strongest = matches!(mode, Mode::FirstAvailable | Mode::DataAware);
        if strongest {
            run.push(to_cpu, block(60)).unwrap();
            assert_eq!(run.snapshot().tasks[1].by_device[0], 1, "{mode:?}");
        }
        // Who is not to wait leaves it to the worker.
        run.try_push(feed, block(70)).map_err(|(_, e)| e).unwrap();
        run.push_timeout(feed, block(71), Duration::from_secs(5)).unwrap();
        assert_eq!(sim.launches(), 21, "{mode:?}");
        drop(over);
        if strongest {
            assert_eq!(read(run.pull_timeout(from_cpu, Duration::from_secs(20)).unwrap()), 121, "{mode:?}");
        }
        for v in [70, 71] {
            assert_eq!(read(run.pull_timeout(drain, Duration::from_secs(20)).unwrap()), 2 * v + 1, "{mode:?}");
        }
    }
}

#[test]
fn results_that_come_back_as_inputs_stay_on_the_device() {
    let rt = Runtime::builder().devices(vec![Arc::new(SimDevice::new(Model::default()))]).build().unwrap();
    let n = 100;
    let mut g = Graph::new("again");
    let t = g.add(affine_task("t", n, &[Kind::Sim])).unwrap();
    let (feed, drain) = (g.feed((t, "x"), 1).unwrap(), g.drain((t, "y"), 1).unwrap());
    let run = rt.start(g).unwrap();
    let mut block = Datablock::from_slice(Template::array::<u32>([n]), &vec![0u32; n]).unwrap();
    let mut copies = Vec::new();
    for round in 1..=8u32 {
        let before = rt.copied()[1];
        run.push(feed, block).unwrap();
        block = run.pull(drain).unwrap();
        assert_eq!(block.as_slice::<u32>().unwrap(), vec![(1 << round) - 1; n]);
        copies.push((rt.copied()[1] - before) / (4 * n as u64));
    }
    // One up, then one down a round; the third round learns that what was sent home is wanted on the device again.
    assert_eq!(copies, [2, 1, 2, 1, 1, 1, 1, 1]);
}

#[test]
fn every_kind_of_device_gives_the_same_result() {
    let n = 3000;
    let t = Template::array::<u32>([n]);
    let data: Vec<u32> = (0..n as u32).collect();
    let want: Vec<u32> = data.iter().map(|v| 2 * (2 * v + 1) + 1).collect();
    for kind in Kind::ALL {
        let rt = match Runtime::builder().only(kind) {
            Ok(b) => b.build().unwrap(),
            Err(e) => {
                eprintln!("skipped: {e}");
                continue;
            }
        };
        let mut g = Graph::new("same");
        let a = g.add(affine_task("a", n, &[kind])).unwrap();
        // The second task in the middle runs on the CPU: down and up again.
        let b = g.add(affine_task("b", n, &[Kind::Cpu])).unwrap();
        g.connect((a, "y"), (b, "x")).unwrap();
        let (feed, drain) = (g.feed((a, "x"), 2).unwrap(), g.drain((b, "y"), 2).unwrap());
        let run = rt.start(g).unwrap();
        for _ in 0..20 {
            run.push(feed, Datablock::from_slice(t, &data).unwrap()).unwrap();
            assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), want, "{kind}");
        }
    }
}

#[test]
fn two_devices_share_the_work_in_every_mode() {
    for mode in Mode::ALL {
        let sims: Vec<SimDevice> =
            (0..2).map(|i| SimDevice::new(Model { name: format!("sim{i}"), ..Model::default() })).collect();
        let rt = Runtime::builder()
            .devices(sims.iter().map(|s| Arc::new(s.clone()) as _).collect())
            .mode(mode)
            // The user's are of real devices.
            .models(Arc::new(Models::off()))
            .workers(3)
            .build()
            .unwrap();
        let n = 500;
        let t = Template::array::<u32>([n]);
        let mut g = Graph::new("wide");
        let tasks: Vec<_> = (0..6)
            .map(|i| {
                let a = g.add(affine_task(&format!("a{i}"), n, &[Kind::Sim])).unwrap();
                let b = g.add(affine_task(&format!("b{i}"), n, &[Kind::Sim])).unwrap();
                g.connect((a, "y"), (b, "x")).unwrap();
                (g.feed((a, "x"), 4).unwrap(), g.drain((b, "y"), 4).unwrap())
            })
            .collect();
        let run = rt.start(g).unwrap();
        for round in 0..50u32 {
            for (i, (f, _)) in tasks.iter().enumerate() {
                run.push(*f, Datablock::from_slice(t, &vec![round + i as u32; n]).unwrap()).unwrap();
            }
            for (i, (_, d)) in tasks.iter().enumerate() {
                assert_eq!(
                    run.pull(*d).unwrap().as_slice::<u32>().unwrap()[n - 1],
                    4 * (round + i as u32) + 3,
                    "{mode}"
                );
            }
        }
        assert_eq!(sims[0].launches() + sims[1].launches(), 600, "{mode}");
    }
}

#[test]
fn a_device_that_faults_or_disappears_fails_its_graph_and_no_other() {
    let faulty = SimDevice::new(Model { name: "faulty".into(), fault_at: 3, ..Model::default() });
    let rt = Runtime::builder().devices(vec![Arc::new(faulty.clone())]).build().unwrap();
    let n = 100;
    let t = Template::array::<u32>([n]);
    let mut g = Graph::new("gpu");
    let a = g.add(affine_task("a", n, &[Kind::Sim])).unwrap();
    let (feed, drain) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    let gpu = rt.start(g).unwrap();
    let word = Template::scalar::<u64>();
    let mut g = Graph::new("host");
    let two = g.add(Task::new("two").inout("x", word).host(|inv| {
        inv.output::<u64>(0)?[0] += 2;
        Ok(())
    }));
    let two = two.unwrap();
    let (cf, cd) = (g.feed((two, "x"), 1).unwrap(), g.drain((two, "x"), 1).unwrap());
    let cpu = rt.start(g).unwrap();
    for i in 1..=3 {
        let pushed = gpu.push(feed, Datablock::from_slice(t, &vec![0u32; n]).unwrap());
        let r = pushed.and_then(|()| gpu.pull(drain)).and_then(|b| b.as_slice::<u32>().map(|_| ()));
        assert_eq!(r.is_ok(), i < 3);
        if let Err(e) = r {
            let e = e.to_string();
            assert!(e.contains("\"a\"") && e.contains("faulty") && e.contains("lost"), "{e}");
        }
    }
    cpu.push(cf, Datablock::scalar(1u64).unwrap()).unwrap();
    assert_eq!(cpu.pull(cd).unwrap().as_slice::<u64>().unwrap(), [3]);
}

#[test]
fn out_of_device_memory_is_a_clear_error_and_memory_comes_back() {
    let small = SimDevice::new(Model { name: "small".into(), memory_bytes: 4096, ..Model::default() });
    let rt = Runtime::builder().devices(vec![Arc::new(small.clone())]).build().unwrap();
    let n = 600;
    let t = Template::array::<u32>([n]);
    let mut g = Graph::new("gpu");
    let a = g.add(affine_task("a", n, &[Kind::Sim])).unwrap();
    let (feed, drain) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    let run = rt.start(g).unwrap();
    run.push(feed, Datablock::from_slice(t, &vec![0u32; n]).unwrap()).unwrap();
    let e = run.pull(drain).unwrap_err().to_string();
    assert!(e.contains("requested 2400") && e.contains("limit 4096"), "{e}");
    drop(run);
    use forebay::hal::Device;
    assert_eq!(small.allocated(), 0);
}

/// Servers have eight GPUs, and some more.
#[test]
fn a_runtime_takes_the_gpus_of_a_large_server_and_the_first_of_a_larger_one() {
    const NAME: &str = "a_runtime_takes_the_gpus_of_a_large_server_and_the_first_of_a_larger_one";
    if !stand_in::is_here() {
        for gpus in ["8", "20"] {
            stand_in::again_with(NAME, &[("STAND_IN_DEVICES", gpus)]);
        }
        return;
    }
    let there = forebay::hal::discover(&[Kind::Cuda]).0;
    let rt = Runtime::builder().service(false).build().unwrap();
    assert_eq!(rt.devices().len(), (there.len() + 1).min(12));
    if there.len() > 11 {
        let refused = Runtime::builder().devices(there).build().map(drop);
        assert!(refused.unwrap_err().to_string().contains("the limit is 12"));
    }
    // Placed in any way, among all of them.
    for mode in [Mode::FirstAvailable, Mode::DataAware, Mode::Adaptive] {
        let models = std::sync::Arc::new(forebay::place::Models::off());
        let rt = Runtime::builder().service(false).mode(mode).models(models).build().unwrap();
        let n = 1000;
        let mut g = Graph::new("many");
        let ids: Vec<_> = (0..3).map(|i| g.add(affine_task(&format!("t{i}"), n, &[Kind::Cuda])).unwrap()).collect();
        ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
        let (feed, drain) = (g.feed((ids[0], "x"), 4).unwrap(), g.drain((ids[2], "y"), 4).unwrap());
        let run = rt.start(g).unwrap();
        let t = Template::array::<u32>([n]);
        for v in 0..60u32 {
            run.push(feed, Datablock::from_slice(t, &vec![v; n]).unwrap()).unwrap();
            assert_eq!(run.pull(drain).unwrap().as_slice::<u32>().unwrap(), vec![8 * v + 7; n], "{mode}");
        }
        let by: Vec<u64> = run.snapshot().tasks[0].by_device.clone();
        assert!(by.len() == rt.devices().len() && by.iter().sum::<u64>() == 60 && by[0] == 0, "{mode}: {by:?}");
    }
}

/// NVIDIA's driver without CUDA's compiler, which is what most machines have: its OpenCL compiles, too.
#[test]
fn a_gpu_without_cudas_compiler_is_used_through_opencl() {
    const NAME: &str = "a_gpu_without_cudas_compiler_is_used_through_opencl";
    if !stand_in::is_here() {
        let Some(dir) = stand_in::build() else { return };
        let library = dir.join(stand_in::OPENCL).display().to_string();
        let nowhere = dir.join("nowhere").display().to_string();
        let variables = [("OPENCL_DYLIB_PATH", &library[..]), ("STAND_IN_BUS", "65"), ("FOREBAY_NVRTC", &nowhere)];
        return stand_in::again_with(NAME, &variables);
    }
    let rt = Runtime::builder().service(false).build().unwrap();
    let names: Vec<String> = rt.devices().into_iter().skip(1).map(|(name, kind)| format!("{kind} {name}")).collect();
    assert_eq!(names, ["opencl first", "opencl second", "opencl third"]);
    assert_eq!(rt.unused(), []);
    let why = Runtime::builder().only(Kind::Cuda).err().unwrap().to_string();
    assert!(why.contains("libnvrtc") && why.contains("pip install nvidia-cuda-nvrtc"), "{why}");
}

/// A number that a kernel made is at hand for the next kernel's arguments, wherever it is.
#[test]
fn a_number_that_a_device_made_is_an_argument() {
    if !stand_in::is_here() {
        stand_in::again("a_number_that_a_device_made_is_an_argument");
    }
    let (found, _) = forebay::hal::discover(&[Kind::OpenCl, Kind::Cuda]);
    if found.is_empty() {
        eprintln!("skipped: no opencl device");
    }
    for d in found.into_iter().filter(|d| d.compiles().is_ok()) {
        for fusion in [false, true] {
            let rt = Runtime::builder().devices(vec![d.clone()]).fusion(fusion).build().unwrap();
            let (word, t) = (Template::scalar::<u32>(), Template::array::<u32>([100]));
            const COUNT: &str =
                "KERNEL void count(GLOBAL const uint *x, GLOBAL uint *n) { if (gid_x() == 0) n[0] = x[0] + 1u; }";
            const SET: &str =
                "KERNEL void set(uint n, GLOBAL uint *y, uint items) { if (gid_x() < items) y[gid_x()] = n; }";
            let mut g = Graph::new("number");
            let count = g.add(Task::new("count").input("x", word).output("n", word).portable(COUNT, "count")).unwrap();
            let launch =
                Launch::new(Source::Portable(SET.into()), "set", [Arg::meta("n"), Arg::port("y"), Arg::Items(0)]);
            let set = Task::new("set").meta::<u32>("n").output("y", t);
            let set = set.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
            let set = g.add(set.geometry(forebay::Geometry::linear(100))).unwrap();
            g.connect((count, "n"), (set, "n")).unwrap();
            let (feed, drain) = (g.feed((count, "x"), 2).unwrap(), g.drain((set, "y"), 2).unwrap());
            let run = rt.start(g).unwrap();
            for v in 0..20u32 {
                run.push(feed, Datablock::scalar(v).unwrap()).unwrap();
                let out = run.pull_timeout(drain, Duration::from_secs(20)).unwrap();
                assert_eq!(out.as_slice::<u32>().unwrap(), [v + 1; 100]);
            }
        }
    }
}
