//! `forebay graph`: graph files without writing a program.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use forebay::graph::{Drawing, Library, load};
use forebay::{Datablock, Drain, Elem, Error, Feed, Graph, Mode, Running, Runtime, Snapshot, TaskStats, Template};
use serde_json::{Value, json};

/// After so long without anything from a drain it is looked whether anything goes on.
const SILENCE: Duration = Duration::from_secs(1);

/// What to do with a graph file.
#[derive(clap::Subcommand)]
pub enum GraphCommand {
    /// Check a graph file without running it
    #[command(after_help = "Example:
  forebay graph check g.toml         a mistake is told with its line and column")]
    Check {
        /// The file
        file: PathBuf,
    },
    /// Run a graph file: feeds get zeros, or numbers from files, and drains are summarised
    #[command(after_help = "Example:
  forebay graph run g.toml --blocks 100 --feed blur.x=picture.f32 --feed blur.weights=weights.f32
  forebay graph run g.toml --device opencl")]
    Run {
        /// The file
        file: PathBuf,
        #[command(flatten)]
        on: On,
        /// Datablocks pushed into each feed
        #[arg(long, default_value_t = 1)]
        blocks: u64,
        /// Contents of a feed's datablocks: TASK.PORT=FILE, raw little-endian
        #[arg(long, value_name = "TASK.PORT=FILE")]
        feed: Vec<String>,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Draw a graph file as SVG or DOT, by the ending of the output's name
    #[command(after_help = "Example:
  forebay graph draw g.toml -o g.svg --run 10")]
    Draw {
        /// The file
        file: PathBuf,
        /// The picture
        #[arg(short)]
        o: PathBuf,
        /// Run it first with so many datablocks of zeros, and show what its channels held and passed
        #[arg(long)]
        run: Option<u64>,
        #[command(flatten)]
        on: On,
    },
}

/// Where a graph runs.
#[derive(clap::Args)]
pub struct On {
    /// The CPU and devices of this kind: cpu (none besides), opencl, cuda, one of several (cuda:1), or auto for the accelerators
    /// that there are
    #[arg(long, default_value = "auto")]
    device: String,
    /// How tasks are scheduled: first-available, fifo, priority, data-aware or adaptive
    #[arg(long, default_value_t = Mode::DataAware)]
    mode: Mode,
}

/// Runs the command.
pub fn run(command: &GraphCommand) -> Result<(), String> {
    match command {
        GraphCommand::Check { file } => {
            let g = open(file)?;
            let (tasks, channels) = g.size();
            crate::say(&format!("{}: {tasks} tasks, {channels} channels, no error", file.display()));
            Ok(())
        }
        GraphCommand::Run { file, on, blocks, feed, json } => {
            execute(open(file)?, on, *blocks, feed, Some(*json)).map(drop)
        }
        GraphCommand::Draw { file, o, run, on } => {
            let g = open(file)?;
            let drawing = g.drawing();
            // What cannot be drawn there is not run before that is said.
            write(&drawing, None, o)?;
            let Some(n) = *run else { return Ok(()) };
            let live = execute(g, on, n, &[], None)?;
            write(&drawing, Some(&live), o)
        }
    }
}

fn open(file: &Path) -> Result<Graph, String> {
    let g = load(file, &Library::standard()).map_err(|e| e.to_string())?;
    g.check().map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(g)
}

fn write(drawing: &Drawing, live: Option<&Snapshot>, to: &Path) -> Result<(), String> {
    let text = match to.extension().and_then(|e| e.to_str()) {
        Some("svg") => drawing.svg(live),
        Some("dot") => drawing.dot(live),
        _ => return Err(format!("{}: the name must end in .svg or .dot", to.display())),
    };
    std::fs::write(to, text).map_err(|e| format!("{}: {e}", to.display()))
}

/// A feed: its name, and what is pushed there.
struct Given {
    name: String,
    feed: Feed,
    template: Template,
    bytes: Option<Vec<u8>>,
}

impl Given {
    fn block(&self) -> Result<Datablock, String> {
        let made = match &self.bytes {
            Some(bytes) => Datablock::from_bytes(self.template, bytes),
            None => Datablock::zeroed(self.template),
        };
        made.map_err(|e| format!("{}: {e}", self.name))
    }
}

/// All feeds, with what files there are for them.
fn given(g: &Graph, contents: &[String]) -> Result<Vec<Given>, String> {
    let mut all = Vec::new();
    for (name, feed) in g.feeds() {
        let template = g.feed_template(feed).ok_or("a feed without a template")?;
        let file = contents.iter().find_map(|c| c.split_once('=').filter(|(n, _)| *n == name).map(|(_, f)| f));
        let bytes = file.map(|f| std::fs::read(f).map_err(|e| format!("{f}: {e}"))).transpose()?;
        all.push(Given { name, feed, template, bytes });
    }
    if let Some(unknown) = contents.iter().find(|c| !all.iter().any(|s| c.starts_with(&format!("{}=", s.name)))) {
        let known: Vec<&str> = all.iter().map(|s| s.name.as_str()).collect();
        return Err(format!("--feed {unknown}: no such feed; known: {}", known.join(", ")));
    }
    // What does not fit is said before anything runs.
    all.iter().try_for_each(|given| given.block().map(drop))?;
    Ok(all)
}

/// What tasks have done so far, as a number that grows with each of it.
fn done(run: &Running) -> u64 {
    let s = run.snapshot();
    s.tasks.iter().map(|t| t.invocations).sum::<u64>() + s.channels.iter().map(|c| c.passed).sum::<u64>()
}

/// Pulls from all drains until each has given so many, or nothing goes on any more though `all_pushed`: how many came from
/// each, and the last one.
fn pull_all(
    run: &Running,
    drains: &[(String, Drain)],
    blocks: u64,
    all_pushed: impl Fn() -> bool,
) -> Result<Vec<(u64, Option<Datablock>)>, Error> {
    let mut got: Vec<(u64, Option<Datablock>)> = drains.iter().map(|_| (0, None)).collect();
    let (mut quiet, mut seen) = (Instant::now(), 0);
    loop {
        for ((_, d), slot) in drains.iter().zip(&mut got) {
            while let Ok(b) = run.try_pull(*d) {
                *slot = (slot.0 + 1, Some(b));
                quiet = Instant::now();
            }
        }
        if let Some(e) = run.error() {
            return Err(e);
        }
        if all_pushed() {
            // (Without drains nothing but silence says that all is done.)
            if !got.is_empty() && got.iter().all(|g| g.0 >= blocks) {
                return Ok(got);
            }
            // Drains whose predicates let less pass give less. Who is at a task ends it when the graph is stopped; if nothing has
            // come of it since the last time nothing will.
            if quiet.elapsed() > SILENCE {
                run.stop()?;
                let now = done(run);
                if now == seen {
                    return Ok(got);
                }
                run.run()?;
                (quiet, seen) = (Instant::now(), now);
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Pushes `blocks` datablocks into every feed while pulling from every drain; and prints what came of it, maybe as JSON.
fn execute(g: Graph, on: &On, blocks: u64, contents: &[String], print: Option<bool>) -> Result<Snapshot, String> {
    let text = |e: Error| e.to_string();
    let rt = crate::runtime(&on.device, on.mode)?;
    let (drains, feeds) = (g.drains(), given(&g, contents)?);
    let run = rt.start(g).map_err(text)?;
    crate::tell_unused(&rt);
    let begun = Instant::now();
    let failure = OnceLock::new();
    let pulled = std::thread::scope(|s| -> Result<_, String> {
        let (run, failure) = (&run, &failure);
        let push = move |given: &Given| {
            let pushed = (0..blocks).try_for_each(|_| run.push(given.feed, given.block()?).map_err(text));
            if let Err(why) = pushed
                && failure.set(why).is_ok()
            {
                // The others would wait for tasks that wait for this one's.
                let _ = run.stop();
            }
        };
        let pushers = feeds.iter().map(|given| crate::beside(s, move || push(given)));
        let pushers = pushers.collect::<Result<Vec<_>, String>>().inspect_err(|_| {
            // Those that there are would wait for them.
            let _ = run.stop();
        })?;
        let pulled = pull_all(run, &drains, blocks, || pushers.iter().all(ScopedJoinHandle::is_finished));
        drop(pushers);
        failure.get().map_or_else(|| pulled.map_err(text), |why| Err(why.clone()))
    })?;
    // A device may still be at the last ones.
    pulled.iter().filter_map(|(_, last)| last.as_ref()).try_for_each(Datablock::wait).map_err(text)?;
    let seconds = begun.elapsed().as_secs_f64();
    let snapshot = run.snapshot();
    let came = drains.into_iter().map(|(name, _)| name).zip(pulled).collect();
    match print {
        Some(false) => say(blocks, seconds, came, &snapshot, &rt).map_err(text)?,
        Some(true) => {
            let all = as_json(blocks, seconds, came, &snapshot, &rt).map_err(text)?;
            crate::say(&serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?);
        }
        None => {}
    }
    Ok(snapshot)
}

/// What came from each drain: how many, and the last one.
type Came = Vec<(String, (u64, Option<Datablock>))>;

/// How often a task was done on which device.
fn on_which(t: &TaskStats, rt: &Runtime) -> Vec<(String, u64)> {
    let names: Vec<String> = rt.devices().into_iter().map(|(name, _)| name).collect();
    let all = crate::told_apart(&names).into_iter().zip(&t.by_device);
    all.filter(|(_, n)| **n > 0).map(|(name, n)| (name, *n)).collect()
}

fn say(blocks: u64, seconds: f64, came: Came, s: &Snapshot, rt: &Runtime) -> Result<(), Error> {
    crate::say(&format!("{blocks} datablocks into each feed, {seconds:.3} s"));
    for (name, (n, last)) in came {
        let shown = last.map(|b| -> Result<_, Error> {
            let first: Vec<String> = head(&b)?.into_iter().map(|(text, _)| text).collect();
            Ok(format!(", the last of {} elements: [{}]", b.records(), first.join(", ")))
        });
        crate::say(&format!("{name}: {n} datablocks{}", shown.transpose()?.unwrap_or_default()));
    }
    for t in &s.tasks {
        let on: Vec<_> = on_which(t, rt).iter().map(|(device, n)| format!("{n} on {device}")).collect();
        let on = if on.is_empty() { String::new() } else { format!(": {}", on.join(", ")) };
        crate::say(&format!("task {}: {} invocations{on}", t.name, t.invocations));
    }
    Ok(())
}

fn as_json(blocks: u64, seconds: f64, came: Came, s: &Snapshot, rt: &Runtime) -> Result<Value, Error> {
    let drains = came.into_iter().map(|(name, (n, last))| {
        let last = last.map(|b| -> Result<_, Error> {
            let first: Vec<Value> = head(&b)?.into_iter().map(|(_, value)| value).collect();
            Ok(json!({ "elements": b.records(), "first": first }))
        });
        Ok(json!({ "name": name, "datablocks": n, "last": last.transpose()? }))
    });
    let tasks = s.tasks.iter().map(|t| {
        let on: serde_json::Map<_, _> = on_which(t, rt).into_iter().map(|(d, n)| (d, n.into())).collect();
        json!({ "name": t.name, "invocations": t.invocations, "on": on, "region": t.region })
    });
    let (drains, tasks) = (drains.collect::<Result<Vec<_>, Error>>()?, tasks.collect::<Vec<_>>());
    Ok(json!({ "datablocks": blocks, "seconds": seconds, "drains": drains, "tasks": tasks }))
}

/// The first elements of a block, as text and as JSON (which has no NaN and no infinity); of records none.
fn head(b: &Datablock) -> Result<Vec<(String, Value)>, Error> {
    fn of<T: Copy + std::fmt::Debug + Into<V>, V: Into<Value>>(v: &[T]) -> Vec<(String, Value)> {
        v.iter().take(8).map(|v| (format!("{v:?}"), (*v).into().into())).collect()
    }
    match b.template().elem {
        Elem::U8 => b.as_slice::<u8>().map(of::<_, u8>),
        Elem::I8 => b.as_slice::<i8>().map(of::<_, i8>),
        Elem::U16 => b.as_slice::<u16>().map(of::<_, u16>),
        Elem::I16 => b.as_slice::<i16>().map(of::<_, i16>),
        Elem::U32 => b.as_slice::<u32>().map(of::<_, u32>),
        Elem::I32 => b.as_slice::<i32>().map(of::<_, i32>),
        Elem::U64 => b.as_slice::<u64>().map(of::<_, u64>),
        Elem::I64 => b.as_slice::<i64>().map(of::<_, i64>),
        Elem::F16 => b.as_slice::<forebay::f16>().map(of::<_, f32>),
        Elem::F32 => b.as_slice::<f32>().map(of::<_, f32>),
        Elem::F64 => b.as_slice::<f64>().map(of::<_, f64>),
        Elem::Record(_) => Ok(Vec::new()),
    }
}
