//! Checks of a whole graph: what single calls cannot see.

use super::{End, Graph, PortKind};
use crate::error::{Error, Result};

impl Graph {
    /// Checks the graph without running it: every port bound, no cycle that could never start.
    ///
    /// # Errors
    /// All errors at once ([`Error::Several`] when there is more than one).
    pub fn check(&self) -> Result<()> {
        let mut errors = Vec::new();
        for (t, task) in self.tasks.iter().enumerate() {
            for (p, port) in task.inputs.iter().enumerate() {
                if self.into[t][p].is_none() {
                    errors.push(Error::Unbound { port: task.port_name(&port.name), kind: port.kind.name() });
                }
            }
            for (p, port) in task.outputs.iter().enumerate() {
                if self.out_of[t][p].is_empty() {
                    errors.push(Error::Unbound { port: task.port_name(&port.name), kind: "output" });
                }
            }
            if task.impls.is_empty() {
                errors.push(Error::Task { task: task.name.clone(), why: "it has no implementation".into() });
            }
        }
        if let Some(path) = self.cycle() {
            errors.push(Error::Cycle { path });
        }
        Error::join(errors)
    }

    /// A cycle along channels whose input ports are not started by an initializer, if there is one.
    fn cycle(&self) -> Option<Vec<String>> {
        let n = self.tasks.len();
        // Successors of each task over channels that must carry a block before the successor can start.
        let mut next: Vec<Vec<usize>> = vec![Vec::new(); n];
        for c in &self.channels {
            if let (End::Task { task: from, .. }, End::Task { task: to, port }) = (c.from, c.to) {
                let task = &self.tasks[to as usize];
                let initialised =
                    task.inputs.iter().any(|p| p.kind == PortKind::Initializer && p.target == Some(port as usize));
                if !initialised {
                    next[from as usize].push(to as usize);
                }
            }
        }
        // Depth-first without recursion: 0 unseen, 1 on the path, 2 done.
        let mut state = vec![0u8; n];
        for root in 0..n {
            if state[root] != 0 {
                continue;
            }
            let mut path = vec![(root, 0usize)];
            state[root] = 1;
            while let Some(top) = path.last_mut() {
                let (at, edge) = *top;
                top.1 += 1;
                match next[at].get(edge) {
                    None => {
                        state[at] = 2;
                        path.pop();
                    }
                    Some(&to) if state[to] == 1 => {
                        let from = path.iter().position(|&(t, _)| t == to).unwrap_or(0);
                        let mut names: Vec<String> =
                            path[from..].iter().map(|&(t, _)| self.tasks[t].name.clone()).collect();
                        names.push(self.tasks[to].name.clone());
                        return Some(names);
                    }
                    Some(&to) if state[to] == 0 => {
                        state[to] = 1;
                        path.push((to, 0));
                    }
                    Some(_) => {}
                }
            }
        }
        None
    }
}
