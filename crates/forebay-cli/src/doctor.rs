//! `forebay doctor`: which devices are usable, and why others are not.

use forebay::Kind;
use forebay::hal::{conformance, cuda::Nvrtc, discover};

/// Prints the devices, runs the conformance suite on each, and names what is missing.
pub fn run() -> Result<(), String> {
    let (devices, missing) = discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
    let mut broken = 0;
    for d in &devices {
        let i = d.info();
        let mib = i.memory_bytes >> 20;
        crate::say(&format!("{}: {}, {} units, {mib} MiB, {}", i.kind, i.name, i.compute_units, i.driver));
        let failed: Vec<_> = conformance::run(&**d).into_iter().filter(|o| o.failure.is_some()).collect();
        for f in &failed {
            crate::say(&format!("  FAILED {}: {}", f.check, f.failure.as_deref().unwrap_or_default()));
        }
        if failed.is_empty() {
            crate::say("  conformance: all checks passed");
        }
        broken += failed.len();
    }
    for (kind, why) in missing {
        crate::say(&format!("{kind}: not usable: {why}"));
    }
    match Nvrtc::get() {
        Ok(n) => crate::say(&format!("nvrtc: {}.{}", n.version().0, n.version().1)),
        Err(e) => crate::say(&format!("nvrtc: not usable: {e}")),
    }
    if broken == 0 { Ok(()) } else { Err(format!("{broken} conformance checks failed")) }
}
