//! Joining a group of programs that share GPUs in space, under NVIDIA MPS.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_proto::client::{Connection, Error};
use forebay_proto::wire::{Class, Refusal, Reply, Request};

/// How long a control daemon may take to come up, and one that is ending to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks for it.
const LOOK: Duration = Duration::from_millis(10);
/// Most GPUs of a machine.
const MAX_GPUS: u32 = 32;

/// Where a group's control daemon is.
pub struct Group {
    pipe: PathBuf,
    log: PathBuf,
}

/// Makes this process a program of the group, and waits until its control daemon is there; says what is lost by that.
///
/// # Errors
/// What the service refused, or that the daemon does not come up.
pub fn join(c: &Connection, name: &str, class: Option<Class>, nice: Option<i8>) -> Result<Group, String> {
    let begun = Instant::now();
    let group = loop {
        match c.ask(&Request::CoRun { group: name.into(), class, nice }) {
            Ok(Reply::CoRuns { pipe, log }) => break Group { pipe: pipe.into(), log: log.into() },
            Err(Error::Refused(Refusal::Ending(_))) if begun.elapsed() < PATIENCE => std::thread::sleep(LOOK),
            Ok(other) => return Err(format!("the service answered {other:?}")),
            Err(e) => return Err(e.to_string()),
        }
    };
    while !group.pipe.join("control").exists() {
        if begun.elapsed() > PATIENCE {
            let log = group.log.join("control.log");
            return Err(format!("the MPS daemon of {name:?} does not come up; its log, if any: {}", log.display()));
        }
        std::thread::sleep(LOOK);
    }
    eprintln!(
        "forebay: co-run group {name:?}: these programs use the GPU at the same time. A fault in one ends the work of all; \
         none can be suspended or checkpointed by itself."
    );
    Ok(group)
}

impl Group {
    /// What the program finds in its environment.
    pub fn variables(&self, sm_percent: Option<u8>, behind: bool, memory: Option<u64>) -> Vec<(&'static str, String)> {
        let text = |p: &Path| p.to_string_lossy().into_owned();
        let mut all = vec![
            ("CUDA_MPS_PIPE_DIRECTORY", text(&self.pipe)),
            ("CUDA_MPS_LOG_DIRECTORY", text(&self.log)),
            // 0 is normal, 1 is below it.
            ("CUDA_MPS_CLIENT_PRIORITY", u8::from(behind).to_string()),
        ];
        all.extend(sm_percent.map(|p| ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", p.to_string())));
        all.extend(memory.map(|m| ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limits(m, gpus()))));
        all
    }
}

fn gpus() -> u32 {
    (0..MAX_GPUS).take_while(|i| Path::new(&format!("/dev/nvidia{i}")).exists()).count().max(1) as u32
}

/// The same limit for each GPU, as MPS wants it: in whole mebibytes, at least one.
fn limits(bytes: u64, gpus: u32) -> String {
    let each = (0..gpus).map(|i| format!("{i}={}M", (bytes >> 20).max(1)));
    each.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_say_what_was_asked_for_and_nothing_else() {
        let g = Group { pipe: "/p".into(), log: "/l".into() };
        let plain = g.variables(None, false, None);
        assert_eq!(plain.len(), 3);
        assert!(plain.contains(&("CUDA_MPS_CLIENT_PRIORITY", "0".into())));
        let all = g.variables(Some(30), true, Some(2 << 30));
        assert!(all.contains(&("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30".into())));
        assert!(all.contains(&("CUDA_MPS_CLIENT_PRIORITY", "1".into())));
        assert_eq!(limits(2 << 30, 2), "0=2048M,1=2048M");
        assert_eq!(limits(5, 1), "0=1M");
    }
}
