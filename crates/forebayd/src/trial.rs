//! What of dividing a GPU works on this machine: tried on two programs of the caller's own, which work on it all the time.
//! `forebay doctor` says what came of it, and it is the first that a GPU never met before has to show.
//!
//! Everything that is taken is given back at the end of its step, by the guards of [`forebay_rm`]. There is no guardian: whoever
//! is killed in the middle of a step leaves a program off the GPU, so the programs are to end with him.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_rm::sys::Record;
use forebay_rm::{Client, SwitchLog, Target};

/// What a program says of itself may be so old, and kernels that were under way may end meanwhile.
const SETTLES: Duration = Duration::from_millis(200);
/// How long each step looks on.
const LOOKS: Duration = Duration::from_millis(300);
/// A slice that no program has by itself, µs.
const ODD_SLICE_US: u64 = 777;

/// One of the things that were tried.
#[derive(Debug)]
pub struct Step {
    /// What.
    pub what: &'static str,
    /// How it went, or why it does not work here.
    pub outcome: Result<String, String>,
}

/// The two programs: their processes, and how much each has done.
pub trait Programs {
    /// Their process numbers.
    fn pids(&self) -> [u32; 2];
    /// Items that each has done so far.
    fn items(&self) -> [u64; 2];
    /// Lets time pass.
    fn wait(&self, time: Duration);
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Tries finding, suspension, slices and the log on the GPU of `own`, in this order; nothing further without finding.
pub fn run(own: &Arc<Client>, programs: &dyn Programs) -> Vec<Step> {
    let mut steps = Vec::new();
    let found = find(own, programs);
    let targets = found.as_ref().ok().map(|(targets, _)| targets.clone());
    steps.push(Step { what: "programs are found", outcome: found.map(|(_, said)| said) });
    if let Some([first, _]) = targets {
        steps.push(Step { what: "suspension", outcome: suspension(own, &first, programs) });
        steps.push(Step { what: "time slices", outcome: slices(own, &first) });
    }
    steps.push(Step { what: "the log of context switches", outcome: log(own, programs) });
    steps
}

fn find(own: &Arc<Client>, programs: &dyn Programs) -> Result<([Target; 2], String), String> {
    let begun = Instant::now();
    let find = |pid| Target::find(own, pid, &HashSet::new()).map_err(|e| e.to_string());
    let [a, b] = programs.pids();
    let targets = [find(a)?, find(b)?];
    let took = ms(begun) / 2.0;
    let [t, _] = &targets;
    let mut slices: Vec<u64> = t.groups().iter().map(|g| g.slice_us).collect();
    slices.sort_unstable();
    slices.dedup();
    let said = format!(
        "{} channels in {} groups with slices of {slices:?} µs, by {} questions in {took:.1} ms",
        t.channels().len(),
        t.groups().len(),
        t.calls
    );
    Ok((targets, said))
}

/// The first one stands still while it is off the GPU, the other goes on, and the first one afterwards.
fn suspension(own: &Arc<Client>, target: &Target, programs: &dyn Programs) -> Result<String, String> {
    let begun = Instant::now();
    let suspended = target.suspend(own).map_err(|e| e.to_string())?;
    let off = ms(begun);
    programs.wait(SETTLES);
    let before = programs.items();
    programs.wait(LOOKS);
    let after = programs.items();
    let begun = Instant::now();
    suspended.resume().map_err(|e| e.to_string())?;
    let on = ms(begun);
    programs.wait(SETTLES + LOOKS);
    let later = programs.items();
    if after[0] != before[0] {
        return Err(format!("the driver accepts it, but the program goes on ({} items more)", after[0] - before[0]));
    }
    if after[1] == before[1] {
        return Err("the other program stood still, too".into());
    }
    if later[0] == after[0] {
        return Err("the program did not go on afterwards".into());
    }
    Ok(format!("the program stands still and goes on: off in {off:.2} ms, on in {on:.2} ms"))
}

/// Slices that are set are there, and those of before afterwards.
fn slices(own: &Arc<Client>, target: &Target) -> Result<String, String> {
    let now = || -> Result<Vec<u64>, String> {
        let t = Target::find(own, target.pid(), &HashSet::new()).map_err(|e| e.to_string())?;
        Ok(t.groups().iter().map(|g| g.slice_us).collect())
    };
    let before = now()?;
    let begun = Instant::now();
    let set = target.slice(own, ODD_SLICE_US).map_err(|e| e.to_string())?;
    let took = ms(begun);
    let during = now()?;
    set.restore().map_err(|e| e.to_string())?;
    let after = now()?;
    if during.iter().any(|us| *us != ODD_SLICE_US) {
        return Err(format!("{ODD_SLICE_US} µs were asked for, and {during:?} are there"));
    }
    if after != before {
        return Err(format!("they were {before:?} µs before and are {after:?} afterwards"));
    }
    Ok(format!("set in {took:.2} ms, and restored"))
}

/// Both programs come and go.
fn log(own: &Arc<Client>, programs: &dyn Programs) -> Result<String, String> {
    let mut log = SwitchLog::open(own).map_err(|e| e.to_string())?;
    programs.wait(LOOKS);
    let flushed = log.flush();
    let mut records: Vec<Record> = Vec::new();
    let dropped = log.read(&mut records).map_err(|e| e.to_string())?;
    let pids: HashSet<u32> = records.iter().map(|r| r.pid).collect();
    if records.is_empty() {
        return Err(format!("it is on, but has no records after {} ms", LOOKS.as_millis()));
    }
    let mut said = format!("{} records of {} processes in {} ms", records.len(), pids.len(), LOOKS.as_millis());
    if programs.pids().iter().any(|p| !pids.contains(p)) {
        said += ", whose numbers are not those that processes have here (they are learnt)";
    }
    if dropped > 0 {
        said += &format!("; {dropped} were dropped");
    }
    if let Err(e) = flushed {
        said += &format!("; it comes 30 times a second only: {e}");
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_rm::Rm;
    use forebay_rm::fake::{FakeRm, Load};

    /// Two programs on the model of the driver. One that says nothing of the truth goes on whatever happens.
    struct Two {
        rm: FakeRm,
        lies: bool,
        waited: std::cell::Cell<u64>,
    }

    impl Programs for Two {
        fn pids(&self) -> [u32; 2] {
            [10, 20]
        }
        fn items(&self) -> [u64; 2] {
            self.pids().map(|p| if self.lies { self.waited.get() } else { self.rm.gpu_time(p).unwrap_or(0) / 1000 })
        }
        fn wait(&self, time: Duration) {
            let us = time.as_micros() as u64;
            self.waited.set(self.waited.get() + us);
            self.rm.run(us);
        }
    }

    fn two(rm: &FakeRm) -> (Arc<Client>, Two) {
        rm.start(10, 4, 5, Load::saturating(1000));
        rm.start(20, 4, 5, Load::saturating(5000));
        let own = Client::open(Arc::new(rm.clone()) as Arc<dyn Rm>, 0).unwrap();
        (Arc::new(own), Two { rm: rm.clone(), lies: false, waited: Default::default() })
    }

    fn said(steps: &[Step], what: &str) -> Result<String, String> {
        steps.iter().find(|s| s.what == what).unwrap().outcome.clone()
    }

    #[test]
    fn everything_works_on_the_model_and_is_given_back() {
        let rm = FakeRm::default();
        let (own, programs) = two(&rm);
        let steps = run(&own, &programs);
        assert!(steps.len() == 4 && steps.iter().all(|s| s.outcome.is_ok()), "{steps:?}");
        assert!(
            said(&steps, "programs are found").unwrap().starts_with("20 channels in 4 groups with slices of [2048]")
        );
        assert!(said(&steps, "the log of context switches").unwrap().contains("of 2 processes"), "{steps:?}");
        for pid in [10, 20] {
            assert!(!rm.is_suspended(pid) && !rm.is_sliced(pid), "{pid}");
        }
        assert_eq!(rm.logs(), 0);
    }

    #[test]
    fn what_does_not_work_is_said_and_the_rest_is_tried() {
        let rm = FakeRm::default();
        let (own, programs) = two(&rm);
        let steps = run(&own, &Two { lies: true, ..programs });
        assert!(said(&steps, "suspension").unwrap_err().contains("goes on"), "{steps:?}");
        assert!(said(&steps, "time slices").is_ok() && !rm.is_suspended(10));

        rm.refuse_log(Some(forebay_rm::error::NOT_SUPPORTED));
        let (own, programs) = (own, Two { rm: rm.clone(), lies: false, waited: Default::default() });
        let steps = run(&own, &programs);
        assert!(said(&steps, "the log of context switches").unwrap_err().contains("not supported"), "{steps:?}");
        assert!(said(&steps, "suspension").is_ok());

        rm.kill(10);
        let steps = run(&own, &programs);
        assert!(said(&steps, "programs are found").unwrap_err().contains("10"), "{steps:?}");
        assert_eq!(steps.len(), 2, "nothing is taken from one that was not found");
    }
}
