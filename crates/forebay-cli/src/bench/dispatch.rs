//! `forebay bench dispatch`: what the runtime itself costs per item, against TBB's flow graph and StarPU.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay::{Datablock, Feed, Graph, Result, Running, Runtime, Task, Template};

use super::peers::build;
use super::schema::{Row, median};

/// Enough for a median on a machine whose speed changes by half from one second to the next.
const REPEATS: usize = 15;
/// StarPU takes ten times as long, and is that far away.
const STARPU_EVERY: usize = 5;

fn word() -> Template {
    Template::scalar::<u64>()
}

/// A task that adds 1 in place.
fn add(name: String) -> Task {
    Task::new(name).inout("x", word()).host(|inv| {
        inv.output::<u64>(0)?[0] += 1;
        Ok(())
    })
}

fn token(run: &Running, feed: Feed) -> Result<Datablock> {
    let mut b = run.acquire(feed)?;
    b.assign(&[0u64])?;
    Ok(b)
}

/// ns per hop of one token through `n` tasks.
fn chain(rt: &Runtime, n: usize, rounds: usize) -> Result<f64> {
    let mut g = Graph::new("chain");
    let ids = (0..n).map(|i| g.add(add(format!("t{i}")))).collect::<Result<Vec<_>>>()?;
    for w in ids.windows(2) {
        g.connect((w[0], "x"), (w[1], "x"))?;
    }
    let (feed, drain) = (g.feed((ids[0], "x"), 4)?, g.drain((ids[n - 1], "x"), 4)?);
    let run = rt.start(g)?;
    let go = |rounds: usize| -> Result<()> {
        for _ in 0..rounds {
            run.push(feed, token(&run, feed)?)?;
            run.pull(drain)?;
        }
        Ok(())
    };
    go(rounds / 10 + 1)?;
    let t = Instant::now();
    go(rounds)?;
    Ok(t.elapsed().as_nanos() as f64 / (n * rounds) as f64)
}

/// ns per consumer when one output feeds `n` tasks that end there.
fn fan_out(rt: &Runtime, n: usize, rounds: usize) -> Result<f64> {
    let mut g = Graph::new("fan-out");
    let src = g.add(add("src".into()))?;
    let done = Arc::new(AtomicU64::new(0));
    for i in 0..n {
        let done = done.clone();
        let mut seen = 0u64;
        let t = g.add(Task::new(format!("t{i}")).input("x", word()).host(move |inv| {
            seen = seen.wrapping_add(inv.input::<u64>(0)?[0] + 1);
            // As TBB counts what is under way.
            done.fetch_add(1 + (seen >> 63), Ordering::Relaxed);
            Ok(())
        }))?;
        g.connect((src, "x"), (t, "x"))?;
    }
    let feed = g.feed((src, "x"), 4)?;
    let run = rt.start(g)?;
    let go = |rounds: usize| -> Result<()> {
        let until = done.load(Ordering::Relaxed) + (n * rounds) as u64;
        for _ in 0..rounds {
            run.push(feed, token(&run, feed)?)?;
        }
        while done.load(Ordering::Relaxed) < until {
            std::thread::yield_now();
        }
        Ok(())
    };
    go(rounds / 10 + 1)?;
    let t = Instant::now();
    go(rounds)?;
    Ok(t.elapsed().as_nanos() as f64 / (n * rounds) as f64)
}

/// ns per message through a source, three stages and channels of capacity 4.
fn stream(rt: &Runtime, messages: u64) -> Result<f64> {
    let mut g = Graph::new("stream");
    let mut next = 0u64;
    let src = g.add(Task::new("src").output("x", word()).host(move |inv| {
        inv.output::<u64>(0)?[0] = next;
        next += 1;
        if next == messages {
            inv.finish();
        }
        Ok(())
    }))?;
    let s1 = g.add(add("s1".into()))?;
    let s2 = g.add(add("s2".into()))?;
    let mut seen = 0u64;
    // The last stage swallows all but the last message.
    let s3 = g.add(Task::new("s3").input("x", word()).output("end", word()).host(move |inv| {
        seen = seen.wrapping_add(inv.input::<u64>(0)?[0]);
        inv.output::<u64>(0)?[0] = seen;
        Ok(())
    }))?;
    g.connect_with((src, "x"), (s1, "x"), 4, forebay::Predicate::Always)?;
    g.connect_with((s1, "x"), (s2, "x"), 4, forebay::Predicate::Always)?;
    g.connect_with((s2, "x"), (s3, "x"), 4, forebay::Predicate::Always)?;
    let drain = g.drain_with((s3, "end"), 4, forebay::Predicate::Only(forebay::Signals::END_STREAM))?;
    let t = Instant::now();
    let run = rt.start(g)?;
    run.pull(drain)?;
    Ok(t.elapsed().as_nanos() as f64 / messages as f64)
}

fn peer(program: &Path) -> HashMap<String, f64> {
    let out = Command::new(program).arg("1").env("STARPU_SILENT", "1").output();
    let text = out.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().filter_map(|l| l.split_once(' ').and_then(|(k, v)| Some((k.to_owned(), v.parse().ok()?)))).collect()
}

/// A graph of PTask's largest size: 1197 tasks, 4140 channels; milliseconds to build and check, MB it takes.
fn large() -> Result<(f64, f64)> {
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        text.split(' ').nth(1).and_then(|v| v.parse::<f64>().ok()).unwrap_or(0.0) * 4096.0 / 1e6
    };
    let before = resident();
    let t = Instant::now();
    let mut g = Graph::new("pca-54");
    let block = Template::array::<f32>([256]);
    let mut ids = Vec::new();
    let mut channels = 0;
    for i in 0..1197usize {
        // Enough edges back to earlier tasks to make 4140 channels with the feeds and drains.
        let inputs =
            if i == 0 { 1 } else { i.min(4).min(if i % 5 == 4 { 3 } else { 4 }).min(3 + usize::from(i % 2 == 0)) };
        let mut task = Task::new(format!("t{i}")).output("y", block);
        for p in 0..inputs {
            task = task.input(&format!("x{p}"), block);
        }
        let id = g.add(task.host(|_| Ok(())))?;
        for p in 0..inputs {
            if i == 0 {
                g.feed((id, "x0"), 4)?;
            } else {
                let from: forebay::TaskId = ids[i - 1 - p.min(i - 1)];
                g.connect((from, "y"), (id, &format!("x{p}")))?;
            }
            channels += 1;
        }
        ids.push(id);
    }
    while channels < 4140 {
        g.drain((ids[channels % ids.len()], "y"), 4)?;
        channels += 1;
    }
    if g.drain_of((ids[1196], "y")).is_none() {
        g.drain((ids[1196], "y"), 4)?;
    }
    g.check()?;
    let ms = t.elapsed().as_secs_f64() * 1e3;
    Ok((ms, (resident() - before).max(0.0)))
}

/// One case of Forebay alone, ten times as long.
pub fn profile(case: &str) -> Result<f64> {
    let rt = Runtime::builder().cpu_only().build()?;
    match case {
        "chain" => chain(&rt, 1000, 2000),
        "fan-out" => fan_out(&rt, 64, 30_000),
        _ => stream(&rt, 2_000_000),
    }
}

/// Runs the benchmark.
pub fn run(rows: &mut Vec<Row>) -> Result<()> {
    let rt = Runtime::builder().cpu_only().build()?;
    let mut ours: HashMap<&str, Vec<f64>> = HashMap::new();
    let mut theirs: HashMap<(&str, &str), Vec<f64>> = HashMap::new();
    let mut programs = Vec::new();
    for (name, source, compiler, pkg) in
        [("tbb", "tbb_dispatch.cpp", "g++", "tbb"), ("starpu", "starpu_dispatch.c", "gcc", "starpu-1.3")]
    {
        match build(source, compiler, pkg, &[]) {
            Ok(p) => programs.push((name, p)),
            Err(why) => eprintln!("{name}: not measured: {why}"),
        }
    }
    const CASES: [&str; 3] = ["chain", "fan-out", "stream-3"];
    // Alternating, so that a slow phase of the machine hits everyone.
    for i in 0..REPEATS {
        eprintln!("dispatch: round {} of {REPEATS}", i + 1);
        ours.entry("chain").or_default().push(chain(&rt, 1000, 1000)?);
        ours.entry("fan-out").or_default().push(fan_out(&rt, 64, 15_000)?);
        ours.entry("stream-3").or_default().push(stream(&rt, 200_000)?);
        for (name, program) in programs.iter().filter(|p| p.0 != "starpu" || i % STARPU_EVERY == 0) {
            let r = peer(&program.path());
            for c in CASES {
                if let Some(v) = r.get(c) {
                    theirs.entry((name, c)).or_default().push(*v);
                }
            }
        }
    }
    let (build_ms, build_mb) = large()?;
    for c in CASES {
        let row = Row::new(c, "ns per item", ours.remove(c).map(median));
        let get = |p| theirs.get(&(p, c)).cloned().map(median);
        let row = row.peer("tbb", get("tbb")).peer("starpu", get("starpu"));
        rows.push(row.clone().at_most("tbb", 1.0));
        rows.push(Row { case: format!("{c}, StarPU"), ..row.faster_than("starpu", 10.0) });
    }
    let limit = |case: &str, unit: &str, v: f64, max: f64| Row {
        target: format!("≤ {max}"),
        met: Some(v <= max),
        ..Row::new(case, unit, Some(v))
    };
    rows.push(limit("build and check 1197 tasks, 4140 channels", "ms", build_ms, 50.0));
    rows.push(limit("memory of that graph", "MB", build_mb, 20.0));
    Ok(())
}
