//! The GPUs whose time the service divides itself.

use std::collections::{BTreeMap, BTreeSet};

use forebay_policy::share::WHOLE;
use forebay_proto::page::{DeviceLoad, MAX_DEVICES};
use forebay_proto::wire::{self, Level, Source};

use super::{Service, World, policy, refusal};
use crate::agent::{Agent, Meter, Refused};

/// Until somebody is there to divide a GPU among, it is looked at this often.
const GPU_LOOK_NS: u64 = 25_000_000;

/// A GPU whose time the service divides itself.
pub(super) struct Gpu {
    pub(super) about: wire::Device,
    pub(super) agent: Agent<Box<dyn Meter>>,
    pub(super) source: Source,
    /// Beginning of the window, and when it is over.
    window: (u64, u64),
    /// Processes that were not adopted, so that each is tried and spoken of once.
    pub(super) refused: BTreeSet<u32>,
    /// Whether somebody says who has how much of its memory.
    pub(super) has_memory: bool,
    /// Processes that had more than their limit of it, at so many looks in a row.
    pub(super) over: BTreeMap<u32, u32>,
}

impl<W: World> Service<W> {
    /// Adds a GPU that is divided by these means; `has_memory` when [`Service::memory`] will be told of it. Its number, or none when there are too many devices.
    pub fn add_gpu(
        &mut self,
        name: &str,
        agent: Agent<Box<dyn Meter>>,
        (level, source): (Level, Source),
        has_memory: bool,
    ) -> Option<usize> {
        let index = self.devices.len() + self.gpus.len();
        if index >= MAX_DEVICES {
            return None;
        }
        let about = wire::Device { name: wire::short_name(name), index: index as u8, units: 1, level };
        let (window, refused, over) = ((self.now_ns, self.now_ns), BTreeSet::new(), BTreeMap::new());
        self.gpus.push(Gpu { about, agent, source, window, refused, has_memory, over });
        Some(self.gpus.len() - 1)
    }

    /// These processes have the GPU's driver open. Those that are new are adopted, with the class that they have; what
    /// went wrong comes back, once for each.
    pub fn gpu_processes(&mut self, gpu: usize, pids: &[u32]) -> Vec<String> {
        let mut wrong = Vec::new();
        let Some(known) = self.gpus.get(gpu).map(|g| g.agent.shares()) else { return wrong };
        for &pid in pids.iter().filter(|p| !known.contains_key(p)) {
            let (class, nice) = match self.known(pid) {
                Ok(p) => (p.class, p.nice),
                Err(_) => continue,
            };
            let Some(g) = self.gpus.get_mut(gpu) else { break };
            if let Some(clients) = self.found.get(&pid) {
                g.agent.expect(pid, clients);
            }
            let why = match g.agent.adopt(pid, policy(class), nice.into()) {
                Ok(()) => {
                    g.refused.remove(&pid);
                    self.dirty = true;
                    continue;
                }
                // It has the driver open and has not begun to use the GPU: the next look may find more.
                Err(Refused::Driver(forebay_rm::Error::NoChannels { .. })) => continue,
                Err(Refused::Driver(e)) => e.to_string(),
                Err(Refused::Policy(e)) => refusal(&g.about.name, e).to_string(),
                Err(Refused::Lock(why)) => why,
                Err(Refused::Ledger) => "the guardian's ledger is full".into(),
            };
            if g.refused.insert(pid) {
                wrong.push(format!("process {pid} is not steered on {}: {why}", g.about.name));
            }
        }
        wrong
    }

    /// What has gone wrong or right on the GPUs, each thing once.
    pub fn trouble(&mut self) -> Vec<String> {
        let of = |g: &mut Gpu| g.agent.trouble().map(|t| format!("{}: {t}", g.about.name));
        self.gpus.iter_mut().filter_map(of).collect()
    }

    /// Ends windows that are over and begins the next; when to call again.
    pub fn turn(&mut self, now_ns: u64) -> Option<u64> {
        for g in self.gpus.iter_mut().filter(|g| g.window.1 <= now_ns) {
            g.agent.end(now_ns.saturating_sub(g.window.0));
            let length = g.agent.begin().map_or(GPU_LOOK_NS, |w| w.length_ns);
            g.window = (now_ns, now_ns.saturating_add(length));
        }
        self.gpus.iter().map(|g| g.window.1).min()
    }

    pub(super) fn refresh_gpus(&mut self) {
        for g in &self.gpus {
            let mut load = DeviceLoad { at_ns: self.now_ns.max(1), units: 1, ..DeviceLoad::default() };
            for (pid, v) in g.agent.views() {
                load.utilisation += v.used;
                load.active += u64::from(v.member.active);
                load.waiting += u64::from(v.off);
                if let Some(p) = self.processes.get(&pid) {
                    load.classes[p.class.index()] += 1;
                }
            }
            load.utilisation = load.utilisation.min(WHOLE);
            self.global.set(g.about.index.into(), &load);
        }
    }
}
