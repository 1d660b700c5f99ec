//! `forebay bench goals`: programs that want a rate or a latency, alone, beside programs that take everything, and alone again
//! (Proteus, section 4.5 and figure 6); with a goal that is pursued, and without.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay_proto::wire::Class;

use super::part::{Found, Part};
use super::schema::Row;
use crate::plot::{self, Series};
use crate::sharing::Stage;

mod programs;

pub use programs::{Program, be};

type Result<T, E = String> = std::result::Result<T, E>;

/// The phases: alone, beside others, alone again; and how much of the end of each counts.
const PHASES: [(&str, Duration); 3] = [
    ("alone", Duration::from_secs(8)),
    ("beside two that take everything", Duration::from_secs(16)),
    ("alone again", Duration::from_secs(10)),
];
const COUNTS: Duration = Duration::from_secs(4);
/// Length of the others' tasks, µs.
const TASK_US: u64 = 1000;
/// As near to its goal a program is to be.
const NEAR: f64 = 0.95;

/// A program, its goal as a part of what it reaches alone, and what the others have for themselves, in millionths.
struct Case {
    program: Program,
    goal: f64,
    others: Option<u32>,
    what: &'static str,
}

const CASES: [Case; 3] = [
    // So much is promised to others that no share is enough: the range of search must shrink.
    Case {
        program: Program::Video,
        goal: 0.65,
        others: Some(300_000),
        what: "video, 30 % promised to each of the others",
    },
    Case { program: Program::Query, goal: 1.5, others: None, what: "queries" },
    Case { program: Program::File, goal: 0.45, others: None, what: "file encryption" },
];

/// A moment of a program: since its beginning, its figure, fidelity (0 is the best) and lanes.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: f64,
    value: f64,
    level: u32,
}

/// A program with a goal, as a process.
struct Runs {
    child: Child,
    moments: Arc<Mutex<Vec<Moment>>>,
}

impl Runs {
    fn start(stage: &Stage, program: Program, goal: Option<f64>) -> Result<Self> {
        let name = format!("{program:?}").to_lowercase();
        let goal = goal.map(|g| format!("{g}"));
        let mut args = vec!["bench", "goals-program", &name];
        args.extend(goal.iter().flat_map(|g| ["--goal", g]));
        let mut child = stage.command(&args)?.stdin(Stdio::piped()).spawn().map_err(|e| format!("a program: {e}"))?;
        let moments = Arc::new(Mutex::new(Vec::new()));
        let (out, to) = (child.stdout.take(), moments.clone());
        std::thread::spawn(move || {
            let mut begun = None;
            for line in out.into_iter().flat_map(|o| BufReader::new(o).lines()).map_while(Result::ok) {
                let begun = *begun.get_or_insert_with(Instant::now);
                let mut words = line.split(' ');
                let value = words.next().and_then(|w| w.parse().ok());
                let level = words.next().and_then(|w| w.parse().ok());
                if let (Some(value), Some(level)) = (value, level) {
                    let m = Moment { at: begun.elapsed().as_secs_f64(), value, level };
                    to.lock().unwrap_or_else(PoisonError::into_inner).push(m);
                }
            }
        });
        let mut runs = Runs { child, moments };
        let begun = Instant::now();
        while runs.all().is_empty() {
            if begun.elapsed() > Duration::from_secs(60) || !matches!(runs.child.try_wait(), Ok(None)) {
                return Err(format!("the program {name} did not begin"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(runs)
    }

    fn all(&self) -> Vec<Moment> {
        self.moments.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The mean figure of the last seconds, and the lowest fidelity in them.
    fn lately(&self) -> (f64, u32) {
        let all = self.all();
        let end = all.last().map_or(0.0, |m| m.at);
        let last: Vec<&Moment> = all.iter().filter(|m| m.at > end - COUNTS.as_secs_f64()).collect();
        let mean = last.iter().map(|m| m.value).sum::<f64>() / last.len().max(1) as f64;
        (mean, last.iter().map(|m| m.level).max().unwrap_or(0))
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// At the end of each phase: the figure, and by how much fidelity was lowered.
type Ends = [(f64, u32); 3];
/// The phases with a program: its figure at the end of each, with its fidelity; and all of it.
fn play(case: &Case, goal: Option<f64>) -> Result<(Ends, Vec<Moment>)> {
    let stage = Stage::new(true)?;
    let runs = Runs::start(&stage, case.program, goal)?;
    let mut ends = [(0.0, 0); 3];
    for (at, (_, time)) in PHASES.into_iter().enumerate() {
        let mut others = Vec::new();
        for _ in 0..if at == 1 { 2 } else { 0 } {
            let other = stage.program(Kind::Cpu, TASK_US, None)?;
            if let Some(share) = case.others {
                stage.set(&other, Class::Custom(share))?;
            }
            others.push(other);
        }
        std::thread::sleep(time);
        ends[at] = runs.lately();
    }
    Ok((ends, runs.all()))
}

/// All of it: the rows, and a plot of each program.
pub fn parts() -> Vec<Part> {
    CASES.iter().map(|case| Part::new(case.what, move |found| run(case, found))).collect()
}

fn run(case: &Case, found: &mut Found) -> Result<()> {
    let (p, unit) = (case.program, case.program.unit());
    // What it reaches alone, with everything.
    let peak = {
        let stage = Stage::new(true)?;
        let runs = Runs::start(&stage, p, None)?;
        std::thread::sleep(COUNTS);
        runs.lately().0
    };
    let goal = peak * case.goal;
    let (without, plain) = play(case, None)?;
    let (with, pursued) = play(case, Some(goal))?;
    for (((name, _), (value, level)), (other, _)) in PHASES.into_iter().zip(with).zip(without) {
        let fidelity = if level > 0 { format!(" (fidelity lowered by {level})") } else { String::new() };
        let row = Row::new(format!("{}, {name}{fidelity}", case.what), unit, Some(value));
        let row = row.peer("the goal", Some(goal)).peer("without goals", Some(other));
        found.rows.push(if p.is_latency() {
            row.at_most("the goal", 2.0 - NEAR)
        } else {
            row.at_least("the goal", NEAR)
        });
    }
    let line = |name: &str, of: &[Moment]| Series {
        name: name.into(),
        points: of.iter().map(|m| (m.at, m.value)).collect(),
        bold: false,
    };
    let end = pursued.last().map_or(1.0, |m| m.at);
    let flat = Series { name: "goal".into(), points: vec![(0.0, goal), (end, goal)], bold: true };
    let series = [line("with a goal", &pursued), line("without", &plain), flat];
    let name = format!("goals-{p:?}").to_lowercase();
    found.plots.push((name, plot::over_time(case.what, unit, &series)));
    Ok(())
}
