//! Fusion: a static region that can run on accelerators only, all of one kind, becomes one task with many launches.
//!
//! The device then gets a region as one list ([`forebay_hal::Queue::launch_list`]), which CUDA replays as a graph, and
//! blocks inside a region are scratch memory with fixed addresses ([`super::scratch`]). Rules:
//! 1. A member runs on accelerators of one kind only, by kernels; it has at least one input, only Input and Sticky
//!    ports, and no iteration groups. Everything about one invocation is known beforehand, save the geometry. Under data-aware
//!    scheduling, where the CPU only helps out if all that are stronger have enough to do, its implementation does not count,
//!    and a region has none.
//! 2. A channel inside a region has no predicate, does not end in a Sticky port, has one template at both ends (a port may have
//!    room for more than comes), and is the only one from its port if the block is overwritten in place behind it.
//! 3. Whatever leaves a region depends on everything that enters it, and so does every task at its end. So running the
//!    region at once withholds nothing that the tasks alone would have given.
//! 4. What the channels inside would have held, the channels into the region hold instead: a program that pushes ahead
//!    blocks no sooner than before. (A blocking push uses that room only after it has waited a little: running.rs.)
//! 5. Where there are several such accelerators a region is a chain. What could run side by side may be worth as many of them;
//!    a chain on several would only carry its data from one to the other, and as one task its items go to all of them.
//! 6. Under [`Mode::Priority`](forebay_policy::Mode) nothing is fused: a decision between tasks needs tasks apart.

use std::collections::HashMap;

use forebay_hal::Kind;

use super::exec::MAX_ARGS;
use super::scratch::{self, Need};
use crate::graph::task::{InPort, OutPort};
use crate::graph::{Arg, Channel, End, Impl, Launch, MAX_PORTS, PortKind, Predicate, Task};
use crate::template::Template;

/// Most tasks of a region.
const MAX_REGION: usize = 4096;
/// Passes over the channels of a component that is no region as a whole, each merging what it can.
const PASSES: usize = 4;

/// The parts of a graph that fusion looks at.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) tasks: &'a [Task],
    pub(crate) channels: &'a [Channel],
    pub(crate) into: &'a [Vec<Option<u32>>],
    pub(crate) out_of: &'a [Vec<Vec<u32>>],
}

/// A region as one task, its first member in the order of data standing for all.
pub(crate) struct Fused {
    pub(crate) task: Task,
    pub(crate) into: Vec<Option<u32>>,
    pub(crate) out_of: Vec<Vec<u32>>,
    /// In the order of data.
    pub(crate) members: Vec<u32>,
    /// Channels inside.
    pub(crate) inside: Vec<u32>,
    /// Channels into the region, and how much more they hold (rule 4).
    pub(crate) room: Vec<(u32, usize)>,
}

/// Finds the regions of a graph. `device` tells the kind of the accelerators that a task can run on, if there is no other way to
/// run it, and whether there are several.
pub(crate) fn fuse(parts: Parts<'_>, device: impl Fn(&Task) -> Option<Able>) -> Vec<Fused> {
    let planner = Planner::new(parts, device);
    planner.regions().into_iter().map(|members| planner.merge(members)).collect()
}

/// What can run a task: accelerators of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Able {
    pub(crate) kind: Kind,
    pub(crate) several: bool,
}

struct Planner<'a> {
    g: Parts<'a>,
    /// What can run each candidate (rule 1).
    able: Vec<Option<Able>>,
    /// Whether each channel may lie inside a region (rule 2).
    joins: Vec<bool>,
    /// Position of each candidate in the order of data.
    rank: Vec<usize>,
}

fn ends(c: &Channel) -> Option<((usize, usize), (usize, usize))> {
    match (c.from, c.to) {
        (End::Task { task: a, port: p }, End::Task { task: b, port: q }) => {
            Some(((a as usize, p as usize), (b as usize, q as usize)))
        }
        _ => None,
    }
}

impl<'a> Planner<'a> {
    fn new(g: Parts<'a>, device: impl Fn(&Task) -> Option<Able>) -> Self {
        let candidate = |t: &Task| {
            let static_ports = t.inputs.iter().all(|p| matches!(p.kind, PortKind::Input | PortKind::Sticky));
            let simple = static_ports && !t.inputs.is_empty() && t.iterations.is_none();
            device(t).filter(|_| simple)
        };
        let able: Vec<Option<Able>> = g.tasks.iter().map(candidate).collect();
        let joins = |c: &Channel| {
            let Some(((a, p), (b, q))) = ends(c) else { return false };
            let in_place = g.tasks[b].outputs.iter().any(|o| o.from_input == Some(q));
            able[a].is_some()
                && able[a] == able[b]
                && g.tasks[a].priority == g.tasks[b].priority
                && c.predicate == Predicate::Always
                && g.tasks[b].inputs[q].kind == PortKind::Input
                && g.tasks[b].inputs[q].template.elements() == g.tasks[a].outputs[p].template.elements()
                && (!in_place || g.out_of[a][p].len() == 1)
        };
        let joins: Vec<bool> = g.channels.iter().map(joins).collect();
        let rank = Self::order(g, &able);
        Planner { g, able, joins, rank }
    }

    /// Candidates in the order of data: the checked graph has no cycle without an initializer, and no candidate has one.
    fn order(g: Parts<'_>, able: &[Option<Able>]) -> Vec<usize> {
        let mut before = vec![0usize; g.tasks.len()];
        let between = |c: &&Channel| ends(c).is_some_and(|((a, _), (b, _))| able[a].is_some() && able[b].is_some());
        for c in g.channels.iter().filter(between) {
            if let Some((_, (b, _))) = ends(c) {
                before[b] += 1;
            }
        }
        let mut free: Vec<usize> = (0..g.tasks.len()).rev().filter(|&t| able[t].is_some() && before[t] == 0).collect();
        let mut rank = vec![usize::MAX; g.tasks.len()];
        let mut next = 0;
        while let Some(t) = free.pop() {
            rank[t] = next;
            next += 1;
            for &c in g.out_of[t].iter().flatten() {
                if let Some((_, (b, _))) = ends(&g.channels[c as usize]).filter(|(_, (b, _))| able[*b].is_some()) {
                    before[b] -= 1;
                    if before[b] == 0 {
                        free.push(b);
                    }
                }
            }
        }
        rank
    }

    /// Whole components where the rules allow it, otherwise what can be merged channel by channel.
    fn regions(&self) -> Vec<Vec<u32>> {
        let all: Vec<usize> = (0..self.g.channels.len()).filter(|&c| self.joins[c]).collect();
        let mut out = Vec::new();
        for component in self.grow(&all, |_| true) {
            if self.valid(&component) {
                out.push(component);
                continue;
            }
            let mut inside: Vec<usize> = all.iter().copied().filter(|&c| self.within(&component, c)).collect();
            inside.sort_by_key(|&c| ends(&self.g.channels[c]).map(|(_, (b, _))| self.rank[b]));
            out.extend(self.grow(&inside, |members| self.valid(members)));
        }
        out
    }

    fn within(&self, members: &[u32], channel: usize) -> bool {
        let has = |t: usize| members.binary_search_by_key(&self.rank[t], |&m| self.rank[m as usize]).is_ok();
        ends(&self.g.channels[channel]).is_some_and(|((a, _), (b, _))| has(a) && has(b))
    }

    /// Sets of two tasks or more, joined along `channels` as long as `allowed` agrees; each in the order of data.
    fn grow(&self, channels: &[usize], allowed: impl Fn(&[u32]) -> bool) -> Vec<Vec<u32>> {
        let mut set_of: HashMap<usize, usize> = HashMap::new();
        let mut sets: Vec<Vec<u32>> = Vec::new();
        for _ in 0..PASSES {
            let mut changed = false;
            for ((a, _), (b, _)) in channels.iter().filter_map(|&c| ends(&self.g.channels[c])) {
                let mut set = |t: usize| {
                    *set_of.entry(t).or_insert_with(|| {
                        sets.push(vec![t as u32]);
                        sets.len() - 1
                    })
                };
                let (x, y) = (set(a), set(b));
                if x == y || sets[x].len() + sets[y].len() > MAX_REGION {
                    continue;
                }
                let mut merged = [sets[x].as_slice(), sets[y].as_slice()].concat();
                merged.sort_unstable_by_key(|&t| self.rank[t as usize]);
                if allowed(&merged) {
                    sets[y].iter().for_each(|&t| {
                        set_of.insert(t as usize, x);
                    });
                    sets[x] = merged;
                    sets[y].clear();
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        sets.into_iter().filter(|s| s.len() > 1).collect()
    }

    /// Rule 5.
    fn is_chain(&self, members: &[u32], inside: &std::collections::HashSet<usize>) -> bool {
        let within = |c: &&u32| {
            ends(&self.g.channels[**c as usize])
                .is_some_and(|((a, _), (b, _))| inside.contains(&a) && inside.contains(&b))
        };
        members.iter().all(|&m| {
            let before = self.g.into[m as usize].iter().flatten().filter(within).count();
            let behind = self.g.out_of[m as usize].iter().flatten().filter(within).count();
            before <= 1 && behind <= 1
        })
    }

    /// Rules 2, 3 and 5, and the limits on ports. `members` are in the order of data.
    fn valid(&self, members: &[u32]) -> bool {
        let g = self.g;
        // Inputs from outside that each member depends on, a bit each.
        let mut reach: HashMap<usize, u64> = HashMap::with_capacity(members.len());
        let (mut entering, mut leaving) = (0usize, 0usize);
        let inside: std::collections::HashSet<usize> = members.iter().map(|&m| m as usize).collect();
        let several = members.iter().any(|&m| self.able[m as usize].is_some_and(|a| a.several));
        if several && !self.is_chain(members, &inside) {
            return false;
        }
        for &m in members {
            let m = m as usize;
            let mut bits = 0;
            for (i, c) in g.into[m].iter().enumerate() {
                let Some(c) = c.map(|c| c as usize) else { return false };
                match ends(&g.channels[c]).map(|(from, _)| from.0).filter(|a| inside.contains(a)) {
                    Some(_) if !self.joins[c] => return false,
                    Some(a) => bits |= reach.get(&a).copied().unwrap_or(0),
                    None if entering == MAX_PORTS => return false,
                    None => {
                        bits |= 1 << entering;
                        entering += 1;
                        leaving += usize::from(g.tasks[m].outputs.iter().any(|o| o.from_input == Some(i)));
                    }
                }
            }
            reach.insert(m, bits);
        }
        let everything = if entering == 64 { u64::MAX } else { (1 << entering) - 1 };
        for &m in members {
            let m = m as usize;
            let out = |c: &u32| !ends(&g.channels[*c as usize]).is_some_and(|(_, (b, _))| inside.contains(&b));
            let outside = g.out_of[m].iter().filter(|all| all.iter().any(out)).count();
            leaving += outside;
            let last = g.out_of[m].iter().flatten().all(out);
            if (outside > 0 || last) && reach.get(&m) != Some(&everything) {
                return false;
            }
        }
        entering > 0 && leaving <= MAX_PORTS
    }

    /// Positions of the members whose data `m` uses.
    fn before(&self, m: usize, position: &HashMap<usize, usize>) -> Vec<usize> {
        let makers = self.g.into[m].iter().flatten().filter_map(|&c| ends(&self.g.channels[c as usize]));
        makers.filter_map(|((a, _), _)| position.get(&a).copied()).collect()
    }

    fn merge(&self, members: Vec<u32>) -> Fused {
        let mut merge = Merge::new(self, &members);
        for (at, &m) in members.iter().enumerate() {
            merge.place_values(at, m as usize);
        }
        merge.place_scratch(&members);
        let launches = members.iter().flat_map(|&m| merge.launches(m as usize)).collect();
        merge.finish(members, launches)
    }
}

/// A value inside a region or leaving it: one buffer, over any number of in-place steps.
struct Value {
    template: Template,
    /// Name of the input from outside that it begins as, if it does.
    begins: Option<usize>,
    /// `task.port` of the last step, and the channels that leave from there.
    name: String,
    leaving: Vec<u32>,
    /// Members that use it, by position; the first one makes it.
    users: Vec<usize>,
    /// Its scratch memory, if it is no output.
    scratch: Option<usize>,
}

struct Merge<'a> {
    p: &'a Planner<'a>,
    inside: HashMap<usize, usize>,
    inputs: Vec<InPort>,
    into: Vec<Option<u32>>,
    /// Input of the fused task by (task, input).
    input_at: HashMap<(usize, usize), usize>,
    values: Vec<Value>,
    /// Value by (task, output).
    value_at: HashMap<(usize, usize), usize>,
    scratch: Vec<usize>,
    /// Scratch by (task, number among its own).
    own_scratch: HashMap<(usize, usize), usize>,
}

impl<'a> Merge<'a> {
    fn new(p: &'a Planner<'a>, members: &[u32]) -> Self {
        Merge {
            p,
            inside: members.iter().enumerate().map(|(at, &m)| (m as usize, at)).collect(),
            inputs: Vec::new(),
            into: Vec::new(),
            input_at: HashMap::new(),
            values: Vec::new(),
            value_at: HashMap::new(),
            scratch: Vec::new(),
            own_scratch: HashMap::new(),
        }
    }

    /// The value that comes in at an input, if it comes from inside.
    fn incoming(&self, m: usize, input: usize) -> Option<usize> {
        let c = self.p.g.into[m][input]? as usize;
        let (from, _) = ends(&self.p.g.channels[c])?;
        self.value_at.get(&from).copied().filter(|_| self.inside.contains_key(&from.0))
    }

    fn leaves(&self, c: u32) -> bool {
        !ends(&self.p.g.channels[c as usize]).is_some_and(|(_, (b, _))| self.inside.contains_key(&b))
    }

    /// Declares what enters at `m` and what it makes.
    fn place_values(&mut self, at: usize, m: usize) {
        let g = self.p.g;
        let task = &g.tasks[m];
        for (i, port) in task.inputs.iter().enumerate() {
            match self.incoming(m, i) {
                Some(v) => self.values[v].users.push(at),
                None => {
                    self.input_at.insert((m, i), self.inputs.len());
                    self.into.push(g.into[m][i]);
                    self.inputs.push(InPort { name: task.port_name(&port.name), ..port.clone() });
                }
            }
        }
        for (o, port) in task.outputs.iter().enumerate() {
            let leaving = g.out_of[m][o].iter().copied().filter(|&c| self.leaves(c)).collect();
            let name = task.port_name(&port.name);
            let v = match port.from_input.map(|i| (i, self.incoming(m, i))) {
                Some((_, Some(v))) => {
                    let value = &mut self.values[v];
                    (value.name, value.leaving) = (name, leaving);
                    v
                }
                begins => {
                    let begins = begins.and_then(|(i, _)| self.input_at.get(&(m, i)).copied());
                    let template = port.template;
                    self.values.push(Value { template, begins, name, leaving, users: vec![at], scratch: None });
                    self.values.len() - 1
                }
            };
            self.value_at.insert((m, o), v);
        }
    }

    /// Gives memory to what stays inside, and to the members' own scratch.
    fn place_scratch(&mut self, members: &[u32]) {
        let inside = |v: &&mut Value| v.leaving.is_empty() && v.begins.is_none();
        let own = members.iter().enumerate().flat_map(|(at, &m)| {
            let scratch = self.p.g.tasks[m as usize].scratch.iter().enumerate();
            scratch.map(move |(n, (_, bytes))| ((m as usize, n), Need { bytes: *bytes, users: vec![at] }))
        });
        let (own, own_needs): (Vec<_>, Vec<_>) = own.unzip();
        let mut values: Vec<&mut Value> = self.values.iter_mut().filter(inside).collect();
        let of_value = |v: &&mut Value| Need { bytes: v.template.bytes(), users: v.users.clone() };
        let needs: Vec<Need> = values.iter().map(of_value).chain(own_needs).collect();
        let before: Vec<Vec<usize>> = members.iter().map(|&m| self.p.before(m as usize, &self.inside)).collect();
        let placed = scratch::place(&before, &needs);
        let (of_values, of_members) = placed.piece.split_at(values.len());
        values.iter_mut().zip(of_values).for_each(|(v, &s)| v.scratch = Some(s));
        self.own_scratch = own.into_iter().zip(of_members.iter().copied()).collect();
        self.scratch = placed.bytes;
    }

    fn scratch_name(s: usize) -> String {
        format!("~{s}")
    }

    fn value_name(&self, v: usize) -> String {
        self.values[v].scratch.map_or_else(|| self.values[v].name.clone(), Self::scratch_name)
    }

    /// A member's argument in terms of the fused task, and whether the kernel only reads it.
    fn arg(&self, m: usize, a: &Arg) -> (Arg, bool) {
        let t = &self.p.g.tasks[m];
        let output = |n: &str| t.outputs.iter().position(|o| o.name == *n);
        let input = |n: &str| t.inputs.iter().position(|i| i.name == *n);
        let moved = |i: usize| t.outputs.iter().position(|o| o.from_input == Some(i));
        // The value behind a port, and whether it is one that the task writes.
        let value = |n: &str| match (output(n), input(n)) {
            (Some(o), _) => Some((self.value_at[&(m, o)], true)),
            (None, Some(i)) => match moved(i) {
                Some(o) => Some((self.value_at[&(m, o)], true)),
                None => self.incoming(m, i).map(|v| (v, false)),
            },
            (None, None) => None,
        };
        match a {
            Arg::Port(n) => match value(n) {
                Some((v, written)) => (Arg::Port(self.value_name(v)), !written),
                None => match t.scratch.iter().position(|(s, _)| s == n) {
                    Some(s) if input(n).is_none() => (Arg::Port(Self::scratch_name(self.own_scratch[&(m, s)])), false),
                    _ => (Arg::Port(t.port_name(n)), true),
                },
            },
            Arg::Records(n) => match value(n) {
                // Blocks from a pool are full: nothing in a region sizes them.
                Some((v, _)) if self.values[v].begins.is_none() => {
                    (Arg::U32(self.values[v].template.elements() as u32), true)
                }
                Some((v, _)) => (Arg::Records(self.value_name(v)), true),
                None => (Arg::Records(t.port_name(n)), true),
            },
            other => (other.clone(), true),
        }
    }

    fn launches(&self, m: usize) -> Vec<Launch> {
        let of = |i: &Impl| match i {
            Impl::Kernels(k, launches) if self.p.able[m].is_some_and(|a| a.kind == *k) => Some(launches.clone()),
            _ => None,
        };
        let mut launches = self.p.g.tasks[m].impls.iter().find_map(of).unwrap_or_default();
        for l in &mut launches {
            l.member = Some(m as u32);
            for (i, a) in l.args.iter_mut().enumerate().take(MAX_ARGS) {
                let (fused, read_only) = self.arg(m, a);
                *a = fused;
                l.read_only |= u64::from(read_only) << i;
            }
        }
        launches
    }

    fn finish(self, members: Vec<u32>, launches: Vec<Launch>) -> Fused {
        let g = self.p.g;
        let names: Vec<&str> = members.iter().map(|&m| g.tasks[m as usize].name()).collect();
        let name = match names.as_slice() {
            [first, .., last] if names.len() > 4 => format!("{first} … {last} ({} tasks)", names.len()),
            few => few.join(" + "),
        };
        let lead = &g.tasks[members[0] as usize];
        let inside = (0..g.channels.len()).filter(|&c| {
            let both = |((a, _), (b, _)): ((usize, usize), (usize, usize))| {
                self.inside.contains_key(&a) && self.inside.contains_key(&b)
            };
            ends(&g.channels[c]).is_some_and(both)
        });
        let inside: Vec<u32> = inside.map(|c| c as u32).collect();
        let room = self.room(&members);
        let mut task = Task::new(name);
        task.geometry = Some(lead.geometry.unwrap_or_else(|| lead.inferred_geometry()));
        task.priority = lead.priority;
        task.inputs = self.inputs;
        task.scratch = self.scratch.iter().enumerate().map(|(s, &bytes)| (Self::scratch_name(s), bytes)).collect();
        let mut out_of = Vec::new();
        for v in self.values {
            if v.scratch.is_none() {
                task.outputs.push(OutPort { name: v.name, template: v.template, from_input: v.begins });
                out_of.push(v.leaving);
            }
        }
        if let Some(able) = self.p.able[members[0] as usize] {
            task.impls.push(Impl::Kernels(able.kind, launches));
        }
        Fused { task, into: self.into, out_of, members, inside, room }
    }

    /// Rule 4: the longest way from each entrance, a block in every task and in every place of every channel.
    fn room(&self, members: &[u32]) -> Vec<(u32, usize)> {
        let g = self.p.g;
        let mut behind: HashMap<usize, usize> = HashMap::new();
        for &m in members.iter().rev() {
            let m = m as usize;
            let longest = g.out_of[m].iter().flatten().filter_map(|&c| {
                let c = &g.channels[c as usize];
                let (_, (b, _)) = ends(c)?;
                Some(c.capacity + behind.get(&b).copied()? + 1)
            });
            behind.insert(m, longest.max().unwrap_or(0));
        }
        let entrances = self.input_at.iter().filter_map(|(&(m, i), _)| Some((g.into[m][i]?, behind[&m])));
        entrances.collect()
    }
}
