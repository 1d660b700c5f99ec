//! `forebay graph`: graph files without writing a program.

use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay::graph::{Drawing, Library, load};
use forebay::{Datablock, Elem, Graph, Runtime, Snapshot};

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
  forebay graph run g.toml --blocks 100 --feed blur.x=picture.f32 --feed blur.weights=weights.f32")]
    Run {
        /// The file
        file: PathBuf,
        /// Datablocks pushed into each feed
        #[arg(long, default_value_t = 1)]
        blocks: u64,
        /// Contents of a feed's datablocks: TASK.PORT=FILE, raw little-endian
        #[arg(long, value_name = "TASK.PORT=FILE")]
        feed: Vec<String>,
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
    },
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
        GraphCommand::Run { file, blocks, feed } => execute(open(file)?, *blocks, feed, true).map(|_| ()),
        GraphCommand::Draw { file, o, run } => {
            let g = open(file)?;
            let drawing = g.drawing();
            let live = run.map(|n| execute(g, n, &[], false)).transpose()?;
            write(&drawing, live.as_ref(), o)
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

/// Pushes `blocks` datablocks into every feed while pulling from every drain.
fn execute(g: Graph, blocks: u64, contents: &[String], print: bool) -> Result<Snapshot, String> {
    let rt = Runtime::new().map_err(|e| e.to_string())?;
    let (feeds, drains) = (g.feeds(), g.drains());
    let mut sources = Vec::new();
    for (name, feed) in feeds {
        let template = g.feed_template(feed).ok_or("a feed without a template")?;
        let given = contents.iter().find_map(|c| c.split_once('=').filter(|(n, _)| *n == name).map(|(_, f)| f));
        let bytes = given.map(|f| std::fs::read(f).map_err(|e| format!("{f}: {e}"))).transpose()?;
        sources.push((name, feed, template, bytes));
    }
    if let Some(unknown) = contents.iter().find(|c| !sources.iter().any(|s| c.starts_with(&format!("{}=", s.0)))) {
        let known: Vec<&str> = sources.iter().map(|s| s.0.as_str()).collect();
        return Err(format!("--feed {unknown}: no such feed; known: {}", known.join(", ")));
    }
    let run = rt.start(g).map_err(|e| e.to_string())?;
    crate::tell_unused(&rt);
    let begun = Instant::now();
    let pulled: Result<Vec<(u64, Option<Datablock>)>, String> = std::thread::scope(|s| {
        let mut pushers = Vec::new();
        for (name, feed, template, bytes) in &sources {
            let run = &run;
            pushers.push(s.spawn(move || -> Result<(), String> {
                for _ in 0..blocks {
                    let b = Datablock::zeroed(*template).map_err(|e| e.to_string())?;
                    let b = match bytes {
                        Some(bytes) => Datablock::from_bytes(*template, bytes).map_err(|e| format!("{name}: {e}"))?,
                        None => b,
                    };
                    run.push(*feed, b).map_err(|e| e.to_string())?;
                }
                Ok(())
            }));
        }
        // Drains whose predicates let less pass give less; silence for a second after all pushes ends the run.
        let mut got: Vec<(u64, Option<Datablock>)> = drains.iter().map(|_| (0, None)).collect();
        let mut quiet = Instant::now();
        loop {
            let before: u64 = got.iter().map(|g| g.0).sum();
            for ((_, d), slot) in drains.iter().zip(&mut got) {
                while let Ok(b) = run.try_pull(*d) {
                    *slot = (slot.0 + 1, Some(b));
                }
            }
            if got.iter().map(|g| g.0).sum::<u64>() > before {
                quiet = Instant::now();
            }
            let all = got.iter().all(|g| g.0 >= blocks);
            let pushed = pushers.iter().all(|p| p.is_finished());
            if run.error().is_some() || (pushed && (all || quiet.elapsed().as_secs_f64() > 1.0)) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        if let Some(e) = run.error() {
            return Err(e.to_string());
        }
        for p in pushers {
            p.join().unwrap_or_else(|_| Err("a feed's thread panicked".into()))?;
        }
        Ok(got)
    });
    let pulled = pulled?;
    if print {
        let seconds = begun.elapsed().as_secs_f64();
        crate::say(&format!("{blocks} datablocks into each feed, {seconds:.3} s"));
        for ((name, _), (n, last)) in drains.iter().zip(&pulled) {
            let shown = last.as_ref().map(summary).unwrap_or_default();
            crate::say(&format!("{name}: {n} datablocks{shown}"));
        }
        for t in run.snapshot().tasks {
            crate::say(&format!("task {}: {} invocations, {}", t.name, t.invocations, t.state));
        }
    }
    Ok(run.snapshot())
}

/// The first numbers of a block.
fn summary(b: &Datablock) -> String {
    fn head<T: std::fmt::Debug>(v: &[T]) -> String {
        format!("{:?}", &v[..v.len().min(8)])
    }
    let values = match b.template().elem {
        Elem::U8 => b.as_slice::<u8>().map(head),
        Elem::I8 => b.as_slice::<i8>().map(head),
        Elem::U16 => b.as_slice::<u16>().map(head),
        Elem::I16 => b.as_slice::<i16>().map(head),
        Elem::U32 => b.as_slice::<u32>().map(head),
        Elem::I32 => b.as_slice::<i32>().map(head),
        Elem::U64 => b.as_slice::<u64>().map(head),
        Elem::I64 => b.as_slice::<i64>().map(head),
        Elem::F16 => b.as_slice::<forebay::f16>().map(head),
        Elem::F32 => b.as_slice::<f32>().map(head),
        Elem::F64 => b.as_slice::<f64>().map(head),
        Elem::Record(_) => Ok(String::new()),
    };
    format!(", the last of {} elements: {}", b.records(), values.unwrap_or_else(|e| e.to_string()))
}
