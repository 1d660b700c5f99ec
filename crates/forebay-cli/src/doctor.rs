//! `forebay doctor`: which devices are usable, and why others are not.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use std::time::Duration;

use forebay::Kind;
use forebay::hal::{Device, Error, conformance, cuda::Nvrtc, discover};
use forebay::transfer::{CALIBRATION, Direction, Engine, Host};
use forebay_proto::wire::Level;
use forebay_rm::{Client, Rm as _};
use forebayd::trial::{self, Programs};

use crate::sharing::{Actor, Stage};

/// What `forebay doctor` takes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  forebay doctor
  forebay doctor --calibrate         when graphs should copy by what is measured now
  sudo \"$(command -v forebay)\" doctor   tries what of dividing a GPU works, on two programs of its own")]
pub struct Options {
    /// Measure every way of moving data to and from each device (two seconds a device) and keep the result, by which
    /// graphs and streams choose from then on
    #[arg(long)]
    calibrate: bool,
}

/// While it exists, what goes to standard error is kept aside: one check has a compiler refuse a source, and some compilers say
/// that to whoever reads.
struct Aside {
    kept: File,
    stderr: OwnedFd,
}

impl Aside {
    fn begin() -> Option<Self> {
        let kept = File::from(rustix::fs::memfd_create("said", rustix::fs::MemfdFlags::CLOEXEC).ok()?);
        let stderr = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 3).ok()?;
        rustix::stdio::dup2_stderr(&kept).ok()?;
        Some(Aside { kept, stderr })
    }

    fn said(&mut self) -> String {
        let mut said = Vec::new();
        // What cannot be read is not told.
        let _ = self.kept.rewind().and_then(|()| self.kept.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = rustix::stdio::dup2_stderr(&self.stderr);
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
    }
}

/// Says how data gets to a device and back, as far as that was measured here.
fn transfer(device: &Arc<dyn Device>, calibrate: bool) {
    let engine = Engine::as_stored(device.clone());
    if calibrate && let Err(e) = engine.calibrate(CALIBRATION) {
        crate::say(&format!("  transfer: cannot be measured: {e}"));
    }
    device.without().iter().for_each(|why| crate::say(&format!("  transfer: without {why}")));
    if engine.curves().all.is_empty() {
        return crate::say(
            "  transfer: not measured here yet: `forebay doctor --calibrate` does, in two seconds a device",
        );
    }
    for (direction, host) in Direction::ALL.into_iter().flat_map(|d| Host::ALL.map(|h| (d, h))) {
        let shown = [64u64, 64 << 10, 64 << 20].map(|bytes| {
            let plan = engine.plan(direction, bytes, host);
            let ways: Vec<_> = plan.pieces.iter().map(|p| p.way.name()).collect();
            let size = crate::bench::bytes(bytes as f64);
            format!("{size} {:.1} µs ({})", plan.cost.median as f64 / 1000.0, ways.join(" and "))
        });
        crate::say(&format!("  transfer {}, {} memory: {}", direction.name(), host.name(), shown.join(", ")));
    }
}

/// Says which cores are alike, if not all are, and how many threads a program had better have now.
fn cores() {
    let all = forebay::place::core_classes();
    for c in all.iter().filter(|_| all.len() > 1) {
        let kind = if c.is_fast(&all) { "fast" } else { "standard" };
        let speed = f64::from(c.capacity) / 10.24;
        crate::say(&format!("  {} {kind} cores, {speed:.0} % as fast as the fastest: {:?}", c.cpus.len(), c.cpus));
    }
    let cpu = forebay::place::Cpu::new();
    // It looks at the load from the first question on.
    cpu.threads();
    std::thread::sleep(std::time::Duration::from_millis(100));
    let n = cpu.threads();
    let s = if n == 1 { "" } else { "s" };
    crate::say(&format!("  load: a parallel program had better have {n} thread{s} now"));
}

/// NVIDIA's control daemon for programs that share a GPU in space.
const MPS: &str = forebayd::mps::PROGRAM;

/// Says which ways of sharing devices among programs work here, and what to do about the others.
fn service() {
    use forebay_proto::client::{Connection, Error};
    let connection = Connection::open("doctor");
    let served = connection.is_ok();
    let mut divided = Vec::new();
    match connection {
        Ok(c) => {
            let (by_credit, others): (Vec<_>, Vec<_>) =
                c.devices().unwrap_or_default().into_iter().partition(|d| d.level == Level::Credit);
            let names: Vec<String> = by_credit.into_iter().map(|d| d.name).collect();
            crate::say(&format!("service: running for {:.0} s, version {}", c.up.as_secs_f64(), c.service));
            crate::say(&format!("  credit: works, on {}", names.join(", ")));
            for d in others {
                match c.global().ok().and_then(|page| page.device(d.index.into())) {
                    Some(_) => divided.push(d.name),
                    None => crate::say(&format!("  {}: not there any more", d.name)),
                }
            }
        }
        Err(e @ Error::Absent(_)) => {
            crate::say(&format!("service: {e}"));
            crate::say("  credit: not used: start one with `sudo forebay service`, or `forebay service --user`");
        }
        Err(e) => crate::say(&format!("service: does not answer as it should: {e}")),
    }
    match forebay_rm::Host.cards() {
        Err(e) => crate::say(&format!("  hardware (suspension, slices): not usable: {e}")),
        Ok(cards) => cards.iter().for_each(|c| {
            let served = served.then(|| divided.contains(&format!("gpu{}", c.minor)));
            hardware(c.minor, cards.len(), served);
        }),
    }
    let calls = forebay::hal::cuda::checkpoint::Checkpoints::open();
    crate::say(&match (&calls, forebayd::nvml::Gpu::open(0)) {
        (Ok(_), Ok(_)) => {
            "  lock (the CUDA driver's process lock): forebay service --gpu 0 --level lock (experimental)".to_owned()
        }
        (Err(e), _) => format!("  lock (the CUDA driver's process lock): not usable: {e}"),
        (_, Err(e)) => {
            format!("  lock (the CUDA driver's process lock): not usable: nobody says who uses the GPU: {e}")
        }
    });
    crate::say(&match calls {
        Ok(_) => "  checkpoint: the driver has it".to_owned(),
        Err(e) => format!("  checkpoint: not usable: {e}"),
    });
    let mps = std::env::var_os("PATH").map(|p| std::env::split_paths(&p).map(|d| d.join(MPS)).collect::<Vec<_>>());
    crate::say(&match mps.into_iter().flatten().find(|p| p.is_file()) {
        Some(path) => format!("  co-running (NVIDIA MPS): {}", path.display()),
        None => format!(
            "  co-running (NVIDIA MPS): not usable: {MPS}, which comes with NVIDIA's driver, is not in the path"
        ),
    });
}

/// Two programs that work on a GPU all the time.
struct Two {
    stage: Stage,
    programs: [Actor; 2],
}

impl Two {
    /// On a GPU of this time kernels of a millisecond or so.
    const ROUNDS: u32 = 400_000;

    /// On the GPU of this name, or else on CUDA's first.
    fn start(uuid: Option<&str>) -> Result<Self, String> {
        let stage = Stage::new(false)?;
        let on: Vec<_> = uuid.map(|uuid| ("CUDA_VISIBLE_DEVICES", uuid)).into_iter().collect();
        let start = || stage.plain_with(Kind::Cuda, Self::ROUNDS, &[], &[], &on);
        let programs = [start()?, start()?];
        Ok(Two { stage, programs })
    }
}

impl Programs for Two {
    fn pids(&self) -> [u32; 2] {
        self.programs.each_ref().map(Actor::pid)
    }
    fn items(&self) -> [u64; 2] {
        self.programs.each_ref().map(Actor::items)
    }
    fn wait(&self, time: Duration) {
        self.stage.watch(&[], time, |_| {});
    }
}

/// Says what of dividing a GPU works here: with root it is tried, on two programs that are started for that and ended again.
/// `served`: there is a service, and whether it divides this one.
fn hardware(gpu: u32, of: usize, served: Option<bool>) {
    let say = |what: &str| crate::say(&format!("  hardware, GPU {gpu}: {what}"));
    let own = match Client::open(Arc::new(forebay_rm::Host), gpu) {
        Ok(own) => Arc::new(own),
        Err(e) => return say(&format!("not usable: {e}")),
    };
    if !forebay_rm::Host.may_log() {
        return say("its driver answers; the rest takes root: sudo forebay doctor");
    }
    match served {
        Some(true) => return say("the service divides it"),
        Some(false) => return say("its driver answers; the rest is not tried beside a service that runs"),
        None => {}
    }
    let uuid = if of > 1 { forebayd::nvml::Gpu::open(gpu).ok().and_then(|g| g.uuid()) } else { None };
    match Two::start(uuid.as_deref()) {
        Err(e) => {
            say(&format!("its driver answers; the rest was not tried, since two programs could not be started: {e}"))
        }
        Ok(two) => {
            let steps = trial::run(&own, &two);
            if of > 1 && uuid.is_none() && steps.first().is_some_and(|s| s.outcome.is_err()) {
                say(
                    "programs go to the first GPU of CUDA; if that is another one, what follows says nothing of this one",
                );
            }
            for s in &steps {
                match &s.outcome {
                    Ok(how) => say(&format!("{}: works: {how}", s.what)),
                    Err(why) => say(&format!("{}: NOT usable: {why}", s.what)),
                }
            }
            if steps.iter().all(|s| s.outcome.is_ok()) {
                say(&format!("to divide it: sudo forebay service --gpu {gpu} (experimental)"));
            } else {
                say(&format!("by the driver's process lock instead: sudo forebay service --gpu {gpu} --level lock"));
            }
        }
    }
}

/// The number by which `--device cuda:1` names a device, of devices in the order in which they are found; none of those that are the
/// only one of their kind.
fn numbers() -> impl FnMut(&Arc<dyn Device>) -> Option<usize> {
    // By itself each kind has what is another one's among all: GPUs that CUDA drives are OpenCL's, too.
    let mut kinds = [Kind::OpenCl, Kind::Cuda].map(|kind| (kind, discover(&[kind]).0, 0));
    move |d| {
        let i = d.info();
        let (_, all, next) = kinds.iter_mut().find(|(kind, ..)| *kind == i.kind)?;
        let is = |o: &Arc<dyn Device>| (&o.info().name, &o.info().driver, o.info().pci) == (&i.name, &i.driver, i.pci);
        let n = *next + all.get(*next..)?.iter().position(is)?;
        *next = n + 1;
        (all.len() > 1).then_some(n)
    }
}

/// Prints the devices, runs the conformance suite on each, and names what is missing.
pub fn run(options: &Options) -> Result<(), String> {
    let (devices, missing) = discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
    let (mut broken, mut number) = (0, numbers());
    for d in &devices {
        let i = d.info();
        let mib = i.memory_bytes >> 20;
        let which = number(d).map(|n| format!(":{n}")).unwrap_or_default();
        crate::say(&format!("{}{which}: {}, {} units, {mib} MiB, {}", i.kind, i.name, i.compute_units, i.driver));
        if let Err(why) = d.compiles() {
            crate::say(&format!("  conformance: not checked, since no kernel can be compiled: {why}"));
            transfer(d, options.calibrate);
            continue;
        }
        let aside = Aside::begin();
        let failed: Vec<_> = conformance::run(&**d).into_iter().filter(|o| o.failure.is_some()).collect();
        let said = aside.map(|mut a| a.said()).unwrap_or_default();
        if !failed.is_empty() && !said.is_empty() {
            eprintln!("{}", said.trim_end());
        }
        for f in &failed {
            crate::say(&format!("  FAILED {}: {}", f.check, f.failure.as_deref().unwrap_or_default()));
        }
        if failed.is_empty() {
            crate::say("  conformance: all checks passed");
        }
        broken += failed.len();
        if i.kind == Kind::Cpu {
            cores();
        }
        transfer(d, options.calibrate);
    }
    for (kind, why) in missing {
        let how = if matches!(why, Error::Twice { .. }) { "left out" } else { "not usable" };
        crate::say(&format!("{kind}: {how}: {why}"));
    }
    match Nvrtc::get() {
        Ok(n) => crate::say(&format!("nvrtc: {}.{}", n.version().0, n.version().1)),
        Err(e) => crate::say(&format!("nvrtc: not usable: {e}")),
    }
    service();
    if broken == 0 { Ok(()) } else { Err(format!("{broken} conformance checks failed")) }
}
