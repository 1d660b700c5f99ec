//! `forebay model`: what adaptive placement has learned of tasks.

use std::path::PathBuf;

use clap::Subcommand;
use forebay::place::{ENOUGH, Entry, Model, Models};

use crate::plot::{self, Series};

/// What to do with the models.
#[derive(Subcommand)]
pub enum ModelCommand {
    #[command(after_help = "Example:
  forebay model show blur --json")]
    /// List tasks, devices, and what invocations are predicted to take with all of the device
    Show {
        /// Only this task
        task: Option<String>,
        /// For machines
        #[arg(long)]
        json: bool,
    },
    #[command(after_help = "Example:
  forebay model reset blur")]
    /// Forget what was learned
    Reset {
        /// Of this task; of all without
        task: Option<String>,
    },
    #[command(after_help = "Example:
  forebay model plot blur --out pictures")]
    /// Draw measured and predicted times over sizes, one SVG for each task
    Plot {
        /// Only this task
        task: Option<String>,
        /// Folder for the files
        #[arg(long, default_value = ".")]
        out: PathBuf,
    },
}

/// Sizes at which a model is shown: from the smallest to the largest measured, by powers of two.
fn sizes(e: &Entry) -> Vec<u64> {
    let all = || e.samples.iter().map(|s| s.size.max(1));
    let (Some(min), Some(max)) = (all().min(), all().max()) else { return Vec::new() };
    let mut sizes: Vec<u64> = (0..63).map(|i| 1u64 << i).filter(|n| (min..=max).contains(n)).collect();
    if sizes.is_empty() {
        sizes.push(min);
    }
    sizes
}

fn model(e: &Entry) -> Model {
    let m = Model::default();
    m.import(e.samples.iter().copied());
    m
}

/// The hint that the predictions are shown for: the middle one.
fn usual(e: &Entry) -> f64 {
    let mut hints: Vec<f64> = e.samples.iter().map(|s| s.hint).collect();
    hints.sort_by(f64::total_cmp);
    hints.get(hints.len() / 2).copied().unwrap_or(0.0)
}

fn entries(task: Option<&str>) -> Vec<Entry> {
    let mut all = Models::user().entries();
    all.retain(|e| task.is_none_or(|t| e.task == t));
    all
}

/// Says that there is nothing, of this task or at all, and what there is.
fn nothing(task: Option<&str>) {
    let mut known: Vec<String> = entries(None).into_iter().map(|e| e.task).collect();
    known.dedup();
    match task.filter(|_| !known.is_empty()) {
        Some(task) => crate::say(&format!(
            "Nothing has been learned of {task:?}; of these there are models: {}",
            known.join(", ")
        )),
        None => crate::say("Nothing has been learned yet: programs with Mode::Adaptive do that while they run."),
    }
}

fn show(task: Option<&str>, json: bool) {
    let all = entries(task);
    if json {
        let list: Vec<_> = all
            .iter()
            .map(|e| {
                let (m, hint) = (model(e), usual(e));
                let of = |n: u64| m.predict(n, hint).map(|p| serde_json::json!({ "size": n, "ns": p.ns, "uncertainty": p.uncertainty }));
                let predicted: Vec<_> = sizes(e).into_iter().filter_map(of).collect();
                serde_json::json!({ "task": e.task, "device": e.device, "samples": e.samples, "hint": hint, "predicted": predicted })
            })
            .collect();
        crate::say(&serde_json::Value::from(list).to_string());
        return;
    }
    if all.is_empty() {
        nothing(task);
    }
    for e in all {
        let m = model(&e);
        let few = if e.samples.len() < ENOUGH { ", too few to rely on" } else { "" };
        crate::say(&format!("{} on {}: {} samples{few}", e.task, e.device, e.samples.len()));
        for n in sizes(&e) {
            if let Some(p) = m.predict(n, usual(&e)) {
                crate::say(&format!(
                    "  {:>10}  {:>12.1} µs  ± {:.0} %",
                    plot::bytes(n as f64),
                    p.ns / 1e3,
                    p.uncertainty * 100.0
                ));
            }
        }
    }
}

fn draw(task: Option<&str>, out: &std::path::Path) -> std::io::Result<()> {
    let all = entries(task);
    if all.is_empty() {
        nothing(task);
    }
    let mut tasks: Vec<&str> = all.iter().map(|e| e.task.as_str()).collect();
    tasks.dedup();
    for task in tasks {
        let mut series = Vec::new();
        for e in all.iter().filter(|e| e.task == task) {
            let m = model(e);
            let mut measured: Vec<(f64, f64)> = e.samples.iter().map(|s| (s.size as f64, s.ns / 1e3)).collect();
            measured.sort_by(|a, b| a.0.total_cmp(&b.0));
            let predict = |n: u64| m.predict(n, usual(e)).map(|p| (n as f64, p.ns / 1e3));
            let kind = e.device.split(' ').next().unwrap_or("?");
            series.push(Series { name: format!("{kind}, measured"), points: measured, bold: false });
            let predicted = sizes(e).into_iter().filter_map(predict).collect();
            series.push(Series { name: format!("{kind}, predicted"), points: predicted, bold: true });
        }
        // Names of tasks may be anything.
        let safe: String = task.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let path = out.join(format!("model-{safe}.svg"));
        std::fs::write(
            &path,
            plot::over_bytes(&format!("{task}: time over size"), "µs, with all of the device", &series),
        )?;
        crate::say(&format!("{}", path.display()));
    }
    Ok(())
}

/// Runs the command.
///
/// # Errors
/// What could not be written, in words.
pub fn run(command: &ModelCommand) -> Result<(), String> {
    match command {
        ModelCommand::Show { task, json } => show(task.as_deref(), *json),
        ModelCommand::Reset { task } => match task.as_deref() {
            task @ Some(_) if entries(task).is_empty() => nothing(task),
            task => crate::say(&format!("{} models removed", Models::user().reset(task))),
        },
        ModelCommand::Plot { task, out } => {
            draw(task.as_deref(), out).map_err(|e| format!("{}: {e}", out.display()))?
        }
    }
    Ok(())
}
