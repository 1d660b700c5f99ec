//! Tasks that are called like functions, by threads and by each other's functions: every call comes back, with what it is to bring
//! or with why it failed.

use std::sync::Arc;

use forebay::hal::Device;
use forebay::place::{Accelerated, Models, Pending};
use forebay::{Datablock, Error, Geometry, Kind, Launch, Mode, Runtime, Source, Task, Template};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::{By, all, anybody, mixed};

/// Calls of each thread.
const CALLS: u32 = 12;

#[derive(Clone, Debug)]
struct Callee {
    /// Tasks before it that its function calls, all of them before it waits for any, or one after the other.
    calls: Vec<usize>,
    at_once: bool,
    by: By,
    /// Its function fails with such numbers, if it has no other implementation.
    fails: bool,
    /// There is a kernel for it, too, which no device can run: its function takes over.
    takes_over: bool,
    lanes: usize,
}

#[derive(Clone, Debug)]
struct Case {
    tasks: Vec<Callee>,
    elements: usize,
    mode: Mode,
    workers: usize,
    threads: u32,
}

fn cases() -> impl Strategy<Value = Case> {
    let calls = proptest::collection::vec(any::<Index>(), 0..3);
    let task = (calls, any::<bool>(), anybody(), (prop::bool::weighted(0.3), any::<bool>()), 1usize..4);
    let tasks = proptest::collection::vec(task, 1..6).prop_map(|raw| {
        let mut tasks: Vec<Callee> = Vec::new();
        for (calls, at_once, by, (fails, takes_over), lanes) in raw {
            let at = tasks.len();
            let calls: Vec<usize> = calls.iter().filter(|_| at > 0).map(|c| c.index(at)).collect();
            // A kernel calls nobody.
            let by = if calls.is_empty() { by } else { By::Host };
            let (fails, takes_over) = (fails && by == By::Host, takes_over && by == By::Host);
            tasks.push(Callee { calls, at_once, by, fails, takes_over, lanes });
        }
        tasks
    });
    let sizes = prop_oneof![Just(1usize), Just(700), Just(20_000)];
    (tasks, sizes, 0..Mode::ALL.len(), 1usize..4, 1u32..4).prop_map(|(mut tasks, elements, mode, workers, threads)| {
        let mode = Mode::ALL[mode];
        // Elsewhere what fails is the end.
        tasks.iter_mut().for_each(|t| t.takes_over &= mode == Mode::Adaptive);
        Case { tasks, elements, mode, workers, threads }
    })
}

fn fails(x: u32) -> bool {
    mixed(x, 5).is_multiple_of(5)
}

/// All elements are alike: what comes of `x`.
fn reference(tasks: &[Callee], at: usize, x: u32) -> Option<u32> {
    let task = &tasks[at];
    if task.fails && fails(x) {
        return None;
    }
    let called = task.calls.iter().enumerate().map(|(k, &c)| reference(tasks, c, mixed(x, k as u32)));
    called.into_iter().try_fold(mixed(at as u32 + 1, x), |h, v| Some(mixed(h, v?)))
}

fn block(x: u32, n: usize) -> Result<Datablock, Error> {
    Datablock::from_slice(Template::array::<u32>([n]), &vec![x; n])
}

fn value(outputs: &[Datablock]) -> Result<u32, Error> {
    let all = outputs[0].as_slice::<u32>()?;
    assert!(all.iter().all(|v| *v == all[0]), "torn");
    Ok(all[0])
}

fn task(at: usize, c: &Callee, n: usize, before: &[Accelerated]) -> Task {
    let t = Template::array::<u32>([n]);
    let mut task = Task::new(format!("t{at}")).input("x", t).output("y", t);
    if c.by != By::Host || c.takes_over {
        let text = format!(
            "{}KERNEL void one(GLOBAL const uint *x, GLOBAL uint *y) {{ uint i = gid_x(); \
             if (i < {n}) y[i] = mixed({at}u + 1u, x[i]); }}",
            crate::MIXED
        );
        let mut launch = Launch::new(Source::Portable(text.into()), "one", task.port_args());
        if c.takes_over {
            launch = launch.over(Geometry::linear(1 << 20).with_group(1 << 20, 1, 1));
        }
        task = task.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
    }
    if c.by != By::Kernel {
        let (c, callees) = (c.clone(), c.calls.iter().map(|c| before[*c].clone()).collect::<Vec<_>>());
        task = task.host(move |inv| {
            let x = inv.value::<u32>("x")?;
            if c.fails && fails(x) {
                return Err(format!("{x} was refused").into());
            }
            let mut h = mixed(at as u32 + 1, x);
            if c.at_once {
                let begin = |(k, a): (usize, &Accelerated)| a.spawn(&[block(mixed(x, k as u32), n)?]);
                let pending: Vec<Pending> = callees.iter().enumerate().map(begin).collect::<Result<_, _>>()?;
                for p in pending {
                    h = mixed(h, value(&p.wait()?)?);
                }
            } else {
                for (k, a) in callees.iter().enumerate() {
                    h = mixed(h, value(&a.call(&[block(mixed(x, k as u32), n)?])?)?);
                }
            }
            inv.output::<u32>("y")?.fill(h);
            Ok(())
        });
    }
    task
}

fn check(case: &Case, devices: &[Arc<dyn Device>]) {
    let builder = Runtime::builder().devices(devices.to_vec()).mode(case.mode);
    let rt = builder.workers(case.workers).models(Arc::new(Models::off())).build().unwrap();
    let n = case.elements;
    let mut tasks: Vec<Accelerated> = Vec::new();
    for (at, c) in case.tasks.iter().enumerate() {
        tasks.push(rt.accelerate(c.lanes, || task(at, c, n, &tasks)).unwrap());
    }
    let anything_fails = case.tasks.iter().any(|c| c.fails);
    let came = |at: usize, x: u32, came: Result<Vec<Datablock>, Error>| {
        let want = reference(&case.tasks, at, x);
        match came.and_then(|outputs| value(&outputs)) {
            Ok(v) => assert_eq!(Some(v), want, "task {at} of {x}"),
            // Or a call beside it on the same lane was; or then the kernel was tried, too, and that says why.
            Err(e) => {
                let told = case.tasks.iter().any(|c| c.takes_over) || e.to_string().contains("was refused");
                assert!(anything_fails && told, "task {at} of {x}: {e}");
            }
        }
    };
    std::thread::scope(|s| {
        for t in 0..case.threads {
            let (tasks, came) = (&tasks, &came);
            s.spawn(move || {
                let mut later: Vec<(usize, u32, Pending)> = Vec::new();
                for k in 0..CALLS {
                    let (at, x) = (mixed(t, k) as usize % tasks.len(), mixed(k, t + 9));
                    match tasks[at].spawn(&[block(x, n).unwrap()]) {
                        Err(e) => came(at, x, Err(e)),
                        Ok(pending) => match x % 4 {
                            0 => drop(pending),
                            1 => later.push((at, x, pending)),
                            _ => came(at, x, pending.wait()),
                        },
                    }
                    if later.len() > 3 {
                        let (at, x, pending) = later.swap_remove(x as usize % 4);
                        came(at, x, pending.wait());
                    }
                }
                later.into_iter().for_each(|(at, x, pending)| came(at, x, pending.wait()));
            });
        }
    });
}

#[test]
fn on_opencl() {
    crate::on_opencl(|devices| all(cases(), |case| check(case, devices)));
}

#[test]
fn on_two_gpus() {
    crate::on_two_gpus("calls::on_two_gpus", |devices| all(cases(), |case| check(case, devices)));
}
