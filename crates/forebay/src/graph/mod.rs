//! Building graphs: tasks, ports, channels, and the checks that need no running.

mod check;
mod draw;
mod file;

pub(crate) mod task;

pub use draw::Drawing;
pub use file::{Library, load, parse};
pub use task::{Arg, Impl, Invocation, Launch, Outgoing, PortKind, Task, Work};

use crate::block::Signals;
use crate::error::{Error, Result};
use crate::template::Template;

/// Most tasks of a graph.
pub const MAX_TASKS: usize = 1 << 20;
/// Most ports of a task.
pub const MAX_PORTS: usize = 64;
/// Largest capacity of a channel.
pub const MAX_CAPACITY: usize = 1 << 16;
/// Longest name, bytes.
pub const MAX_NAME: usize = 128;
/// Capacity of a channel that does not say.
pub const DEFAULT_CAPACITY: usize = 4;

/// A task of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TaskId(pub(crate) u32);

/// A channel into which the program pushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Feed(pub(crate) u32);

/// A channel from which the program pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Drain(pub(crate) u32);

/// Which datablocks a channel lets pass, by their [`Signals`]; others are dropped at its entrance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Predicate {
    /// All.
    #[default]
    Always,
    /// Only those that carry one of these marks (the exit of a loop: [`Signals::END_ITERATION`]).
    Only(Signals),
    /// Only those that carry none of these marks (the way back of a loop).
    Unless(Signals),
    /// Closed at first; from the first block with one of these marks on, all.
    OpenFrom(Signals),
    /// Open at first; behind the first block with one of these marks, none.
    CloseAfter(Signals),
}

impl Predicate {
    /// Whether a block with `signals` passes; `latched` remembers that the mark was seen.
    pub(crate) fn passes(self, signals: Signals, latched: &mut bool) -> bool {
        match self {
            Predicate::Always => true,
            Predicate::Only(s) => signals.any(s),
            Predicate::Unless(s) => !signals.any(s),
            Predicate::OpenFrom(s) => {
                *latched |= signals.any(s);
                *latched
            }
            Predicate::CloseAfter(s) => !std::mem::replace(latched, *latched || signals.any(s)),
        }
    }
}

/// As in graph files: `always`, or `only|unless|open-from|close-after MARK`, with the mark `begin-stream`, `end-stream`,
/// `begin-iteration` or `end-iteration`.
impl std::str::FromStr for Predicate {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "always" {
            return Ok(Predicate::Always);
        }
        let wrong = || {
            "a predicate is \"only|unless|open-from|close-after MARK\" with MARK one of begin-stream, end-stream, \
             begin-iteration, end-iteration"
                .to_owned()
        };
        let (how, mark) = s.split_once(' ').ok_or_else(wrong)?;
        let mark = mark.parse().map_err(|_| wrong())?;
        Ok(match how {
            "only" => Predicate::Only(mark),
            "unless" => Predicate::Unless(mark),
            "open-from" => Predicate::OpenFrom(mark),
            "close-after" => Predicate::CloseAfter(mark),
            _ => return Err(wrong()),
        })
    }
}

/// One end of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Port `port` (index among the task's inputs or outputs) of a task.
    Task { task: u32, port: u32 },
    /// The program.
    Host,
}

#[derive(Clone, Debug)]
pub(crate) struct Channel {
    pub(crate) from: End,
    pub(crate) to: End,
    pub(crate) capacity: usize,
    pub(crate) predicate: Predicate,
    pub(crate) template: Template,
}

/// A graph under construction.
///
/// Every method that connects something checks it at once and names both ends when it refuses.
pub struct Graph {
    pub(crate) name: String,
    pub(crate) tasks: Vec<Task>,
    pub(crate) channels: Vec<Channel>,
    /// Channel of each input port, by task and input index.
    pub(crate) into: Vec<Vec<Option<u32>>>,
    /// Channels of each output port, by task and output index.
    pub(crate) out_of: Vec<Vec<Vec<u32>>>,
    names: std::collections::HashMap<String, u32>,
}

pub(crate) fn check_name(what: &'static str, name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME {
        "it is longer than 128 bytes"
    } else if name.contains(['.', '\n', '"']) {
        "it contains a dot, a quote or a line break"
    } else {
        return Ok(());
    };
    Err(Error::Name { what, name: name.chars().take(MAX_NAME).collect(), why })
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Graph {
            name: name.into(),
            tasks: Vec::new(),
            channels: Vec::new(),
            into: Vec::new(),
            out_of: Vec::new(),
            names: std::collections::HashMap::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of tasks and of channels.
    pub fn size(&self) -> (usize, usize) {
        (self.tasks.len(), self.channels.len())
    }

    /// Adds a task.
    ///
    /// # Errors
    /// A bad or repeated name, an invalid template, a declaration that contradicts itself.
    pub fn add(&mut self, task: Task) -> Result<TaskId> {
        task.validate()?;
        if self.names.contains_key(&task.name) {
            return Err(Error::Name { what: "task", name: task.name, why: "another task has it" });
        }
        if self.tasks.len() >= MAX_TASKS {
            return Err(Error::Name { what: "task", name: task.name, why: "the graph has 1048576 tasks already" });
        }
        let id = self.tasks.len() as u32;
        self.names.insert(task.name.clone(), id);
        self.into.push(vec![None; task.inputs.len()]);
        self.out_of.push(vec![Vec::new(); task.outputs.len()]);
        self.tasks.push(task);
        Ok(TaskId(id))
    }

    /// The task of that name.
    pub fn find(&self, name: &str) -> Option<TaskId> {
        self.names.get(name).map(|&i| TaskId(i))
    }

    /// The task, and the name of its port, that `TASK.PORT` names; whether there is such a port the next call says.
    ///
    /// # Errors
    /// [`Error::Name`] for a name without a dot, or of no task.
    pub fn end<'a>(&self, name: &'a str) -> Result<(TaskId, &'a str)> {
        let wrong = |why| Error::Name { what: "end of a channel", name: name.into(), why };
        let (task, port) = name.split_once('.').ok_or_else(|| wrong("it is not TASK.PORT"))?;
        Ok((self.find(task).ok_or_else(|| wrong("the graph has no such task"))?, port))
    }

    fn task(&self, id: TaskId) -> Result<&Task> {
        self.tasks.get(id.0 as usize).ok_or_else(|| Error::NoSuch { what: "task", graph: self.name.clone() })
    }

    fn output(&self, (id, port): (TaskId, &str)) -> Result<(usize, Template)> {
        let t = self.task(id)?;
        if let Some(i) = t.outputs.iter().position(|p| p.name == port) {
            return Ok((i, t.outputs[i].template));
        }
        Err(match t.inputs.iter().find(|p| p.name == port) {
            Some(p) => Error::Direction { port: t.port_name(port), is: p.kind.name(), end: "cannot begin" },
            None => t.no_port(port),
        })
    }

    fn input(&self, (id, port): (TaskId, &str)) -> Result<(usize, Template)> {
        let t = self.task(id)?;
        if let Some(i) = t.inputs.iter().position(|p| p.name == port) {
            return Ok((i, t.inputs[i].template));
        }
        Err(match t.outputs.iter().any(|p| p.name == port) {
            true => Error::Direction { port: t.port_name(port), is: "output", end: "cannot end" },
            false => t.no_port(port),
        })
    }

    /// Name of an end, for messages.
    pub(crate) fn end_name(&self, end: End, source: bool) -> String {
        match end {
            End::Host if source => "the program (feed)".into(),
            End::Host => "the program (drain)".into(),
            End::Task { task, port } => {
                let t = &self.tasks[task as usize];
                let p = if source { &t.outputs[port as usize].name } else { &t.inputs[port as usize].name };
                t.port_name(p)
            }
        }
    }

    fn add_channel(&mut self, c: Channel, from_template: Template, to_template: Template) -> Result<u32> {
        let (from, to) = (self.end_name(c.from, true), self.end_name(c.to, false));
        if c.capacity == 0 || c.capacity > MAX_CAPACITY {
            return Err(Error::Capacity { from, to, capacity: c.capacity, max: MAX_CAPACITY });
        }
        if let Some(why) = from_template.differs(&to_template) {
            let (from_template, to_template) = (Box::new(from_template), Box::new(to_template));
            return Err(Error::Mismatch { from, to, from_template, to_template, why });
        }
        if let End::Task { task, port } = c.to
            && let Some(existing) = self.into[task as usize][port as usize]
        {
            let first = self.end_name(self.channels[existing as usize].from, true);
            return Err(Error::Occupied { port: to, from: first, second: from });
        }
        let id = self.channels.len() as u32;
        if let End::Task { task, port } = c.to {
            self.into[task as usize][port as usize] = Some(id);
        }
        if let End::Task { task, port } = c.from {
            self.out_of[task as usize][port as usize].push(id);
        }
        self.channels.push(c);
        Ok(id)
    }

    /// Connects an output port to an input port, with the default capacity and no predicate.
    ///
    /// # Errors
    /// As [`Graph::connect_with`].
    pub fn connect(&mut self, from: (TaskId, &str), to: (TaskId, &str)) -> Result<()> {
        self.connect_with(from, to, DEFAULT_CAPACITY, Predicate::Always)
    }

    /// Connects an output port to an input port.
    ///
    /// # Errors
    /// Unknown ports, wrong directions, a second channel into the input, templates that differ, a capacity of 0.
    pub fn connect_with(
        &mut self,
        from: (TaskId, &str),
        to: (TaskId, &str),
        capacity: usize,
        predicate: Predicate,
    ) -> Result<()> {
        let (from_port, from_template) = self.output(from)?;
        let (to_port, to_template) = self.input(to)?;
        let channel = Channel {
            from: End::Task { task: from.0.0, port: from_port as u32 },
            to: End::Task { task: to.0.0, port: to_port as u32 },
            capacity,
            predicate,
            template: from_template,
        };
        self.add_channel(channel, from_template, to_template).map(|_| ())
    }

    /// A channel from the program into an input port, of room for `capacity` datablocks. About so many may also be under way on
    /// an accelerator behind it before whoever fills the next block of [`crate::Running::acquire`] waits: with 1 what comes out
    /// is freshest, with more both sides are busy.
    ///
    /// # Errors
    /// As [`Graph::connect_with`].
    pub fn feed(&mut self, to: (TaskId, &str), capacity: usize) -> Result<Feed> {
        let (port, template) = self.input(to)?;
        let to = End::Task { task: to.0.0, port: port as u32 };
        let channel = Channel { from: End::Host, to, capacity, predicate: Predicate::Always, template };
        self.add_channel(channel, template, template).map(Feed)
    }

    /// A channel from an output port to the program.
    ///
    /// # Errors
    /// As [`Graph::connect_with`].
    pub fn drain(&mut self, from: (TaskId, &str), capacity: usize) -> Result<Drain> {
        self.drain_with(from, capacity, Predicate::Always)
    }

    /// As [`Graph::drain`], with a predicate.
    ///
    /// # Errors
    /// As [`Graph::connect_with`].
    pub fn drain_with(&mut self, from: (TaskId, &str), capacity: usize, predicate: Predicate) -> Result<Drain> {
        let (port, template) = self.output(from)?;
        let from = End::Task { task: from.0.0, port: port as u32 };
        let channel = Channel { from, to: End::Host, capacity, predicate, template };
        self.add_channel(channel, template, template).map(Drain)
    }

    /// The feed of an input port, if the program feeds it.
    pub fn feed_of(&self, to: (TaskId, &str)) -> Option<Feed> {
        let (port, _) = self.input(to).ok()?;
        let c = self.into[to.0.0 as usize][port]?;
        (self.channels[c as usize].from == End::Host).then_some(Feed(c))
    }

    /// The drain of an output port, if the program drains it.
    pub fn drain_of(&self, from: (TaskId, &str)) -> Option<Drain> {
        let (port, _) = self.output(from).ok()?;
        let all = &self.out_of[from.0.0 as usize][port];
        all.iter().copied().find(|&c| self.channels[c as usize].to == End::Host).map(Drain)
    }

    /// The template of what a feed takes.
    pub fn feed_template(&self, feed: Feed) -> Option<Template> {
        self.channels.get(feed.0 as usize).map(|c| c.template)
    }

    /// All feeds with the port they feed, as `task.port`.
    pub fn feeds(&self) -> Vec<(String, Feed)> {
        let all = self.channels.iter().enumerate().filter(|(_, c)| c.from == End::Host);
        all.map(|(i, c)| (self.end_name(c.to, false), Feed(i as u32))).collect()
    }

    /// All drains with the port they drain, as `task.port`.
    pub fn drains(&self) -> Vec<(String, Drain)> {
        let all = self.channels.iter().enumerate().filter(|(_, c)| c.to == End::Host);
        all.map(|(i, c)| (self.end_name(c.from, true), Drain(i as u32))).collect()
    }
}
