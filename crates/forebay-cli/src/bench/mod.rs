//! `forebay bench`: measurements, each against its peers in the same run.

mod conformance;
mod dispatch;
mod gesture;
mod goals;
pub mod part;
mod peers;
mod placement;
mod ptask;
mod report;
mod resident;
mod schedulers;
pub mod schema;
mod sharing;
mod stolen;
mod transfer;

use std::path::PathBuf;

pub use crate::plot::bytes;

use part::Part;
use schema::Report;

/// What can be measured.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// The runtime's own cost per item, against TBB's flow graph and StarPU
    Dispatch {
        /// Only this case, of Forebay only, ten times as long: for a profiler
        #[arg(long, value_parser = ["chain", "fan-out", "stream-3"])]
        profile: Option<String>,
    },
    /// PTask's table 2: the gesture pipeline written in five ways
    Gesture {
        /// Only this kind of device: cpu, opencl, cuda
        #[arg(long)]
        device: Option<forebay::Kind>,
    },
    /// One process of `bench gesture`'s version with pipes
    #[command(hide = true)]
    GestureStage {
        /// xform, filter or hidinput
        stage: String,
        /// Its device
        device: forebay::Kind,
    },
    /// One way of running of `bench gesture`, in this process
    #[command(hide = true)]
    GestureWay {
        /// dataflow, host-based, hand-coded, modular or pipes
        way: String,
        /// Its device
        device: forebay::Kind,
        /// Frames
        count: usize,
        /// Frames a second; as fast as possible without
        #[arg(long)]
        rate: Option<f64>,
    },
    /// PTask's figure 11: the same operations as dataflow and by hand
    Ptask {
        /// Only this kind of device: cpu, opencl, cuda
        #[arg(long)]
        device: Option<forebay::Kind>,
        /// The 1024² sizes too
        #[arg(long)]
        full: bool,
    },
    /// Chains of small kernels, fused into one region, against the same list by hand
    Fusion {
        /// Only this kind of device: opencl, cuda
        #[arg(long)]
        device: Option<forebay::Kind>,
    },
    /// PTask's figures 12 and 13: competing graphs, and two devices over one
    Schedulers,
    /// Programs that share a device through the service: shares, latency, and what it costs
    Sharing {
        /// Only this kind of device: cpu, opencl, cuda (as root)
        #[arg(long)]
        device: Option<forebay::Kind>,
        /// What is measured on GPUs, without a service, and so little of it that it only shows that it works
        #[arg(long, hide = true, requires = "device")]
        quick: bool,
    },
    /// Adaptive placement: what a decision costs, how good predictions are, and what it gains under load
    Placement,
    /// Programs that want a rate or a latency, alone and beside others: goals that are pursued, and not (about three minutes)
    Goals,
    /// One of the programs of `bench goals`; ends with whoever holds its standard input
    #[command(hide = true)]
    GoalsProgram {
        /// Which
        program: goals::Program,
        /// Its goal; none for whatever it can do
        #[arg(long)]
        goal: Option<f64>,
    },
    /// One of the programs that are alike of `bench placement`
    #[command(hide = true)]
    PlacementAlike,
    /// The six workloads of `bench placement` under StarPU
    #[command(hide = true)]
    PlacementStarpu {
        /// starpu_mix.c as a library
        library: std::path::PathBuf,
    },
    /// The resident grid: round trips, throughput, searches, the heap, tasks that make tasks
    Resident {
        /// On this kind of device: cpu, cuda
        #[arg(long)]
        device: Option<forebay::Kind>,
        /// So little of everything that it only shows that it works
        #[arg(long, requires = "device")]
        quick: bool,
    },
    /// Every way of moving bytes between host and device, at every size, alone and under interference
    Transfer {
        /// Only this kind of device: cpu, opencl, cuda
        #[arg(long)]
        device: Option<forebay::Kind>,
        /// Only the curves: no interference, no second stream
        #[arg(long)]
        quick: bool,
    },
    /// A load beside which `bench transfer` measures; ends with whoever holds its standard input
    #[command(hide = true)]
    TransferLoad {
        /// Which
        load: transfer::load::Load,
    },
    /// The conformance suite on every device here
    Conformance,
    /// Parts with which nothing goes well
    #[command(hide = true)]
    Trial,
    /// Render all committed results as one page
    Report {
        /// Folder with a folder of results per machine
        #[arg(default_value = "benches/results")]
        dir: PathBuf,
    },
}

/// Where results go.
#[derive(clap::Args)]
pub struct Output {
    /// Print the result as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Also write JSON, Markdown and SVG into DIR, in a folder named after the machine
    #[arg(long, global = true, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only this part, for the process that runs one after the other
    #[arg(long, global = true, hide = true)]
    part: Option<String>,
}

/// What a benchmark is called, and its parts.
fn parts(bench: &Bench) -> Result<(&'static str, Vec<Part>), String> {
    Ok(match bench {
        Bench::Gesture { device } => ("gesture", gesture::parts(*device)?),
        Bench::Ptask { device, full } => ("ptask", ptask::parts(*device, *full)?),
        Bench::Fusion { device } => ("fusion", ptask::chain_parts(*device)?),
        Bench::Schedulers => ("schedulers", schedulers::parts()),
        Bench::Sharing { device, quick } => ("sharing", sharing::parts(*device, *quick)?),
        Bench::Placement => ("placement", placement::parts()),
        Bench::Goals => ("goals", goals::parts()),
        Bench::Resident { device, quick } => ("resident", resident::parts(*device, *quick)?),
        Bench::Transfer { device, quick } => ("transfer", transfer::parts(*device, *quick)?),
        Bench::Conformance => ("conformance", conformance::parts()?),
        Bench::Dispatch { .. } => ("dispatch", vec![Part::of_rows("dispatch", dispatch::run)]),
        Bench::Trial => ("trial", part::trial()),
        _ => return Err("this has no parts".into()),
    })
}

/// Runs one benchmark.
pub fn run(bench: &Bench, output: &Output) -> Result<(), String> {
    match bench {
        Bench::Report { dir } => return report::render(dir),
        Bench::GestureStage { stage, device } => return gesture::stage(stage, *device),
        Bench::GestureWay { way, device, count, rate } => return gesture::way(way, *device, *count, *rate),
        Bench::GoalsProgram { program, goal } => return goals::be(*program, *goal),
        Bench::PlacementAlike => return placement::be_alike(),
        Bench::PlacementStarpu { library } => return placement::be_starpu(library),
        Bench::TransferLoad { load } => return transfer::load::be(*load),
        Bench::Dispatch { profile: Some(case) } => {
            let ns = dispatch::profile(case).map_err(|e| e.to_string())?;
            crate::say(&format!("{case}: {ns:.1} ns per item"));
            return Ok(());
        }
        _ => {}
    }
    let (name, parts) = parts(bench)?;
    if let Some(only) = &output.part {
        return part::here(parts, only);
    }
    let mut report = Report::new(name, Vec::new());
    let dir = output.out.as_ref().map(|dir| dir.join(report.machine.folder()));
    let write = |report: &Report| match &dir {
        Some(dir) => report.write(dir).map_err(|e| format!("{}: {e}", dir.display())),
        None => Ok(()),
    };
    let failed = part::all(parts, &mut report, write)?;
    if output.json {
        crate::say(&serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?);
    } else {
        crate::say(&report.markdown());
    }
    if let Some(dir) = dir {
        eprintln!("written to {}", dir.display());
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("these parts did not come to their end: {}", failed.join(", ")))
    }
}
