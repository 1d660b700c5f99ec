//! Declaring tasks: ports, implementations, and what an implementation sees when it runs.

use std::sync::Arc;

use forebay_hal::{Geometry, Kind, Source};

use super::{MAX_PORTS, check_name};
use crate::block::{Datablock, Signals};
use crate::error::{Error, Result, TaskError};
use crate::resident::Resident;
use crate::run::node::Node;
use crate::template::{Elem, Element, Layout, Template};

/// What an input port does with its datablocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// One datablock per invocation.
    Input,
    /// Keeps its datablock until another arrives.
    Sticky,
    /// A number for the run-time, not for the kernel (a scalar argument, a size, a geometry, an iteration count).
    Meta,
    /// Stands in for another input port at the start: in the first invocation, or the first of each iteration group.
    Initializer,
}

impl PortKind {
    /// Its name in messages and graph files.
    pub fn name(self) -> &'static str {
        match self {
            PortKind::Input => "input",
            PortKind::Sticky => "sticky",
            PortKind::Meta => "meta",
            PortKind::Initializer => "initializer",
        }
    }
}

/// What a Meta port's number decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetaUse {
    /// Nothing; kernels may take it as a scalar argument.
    Scalar,
    /// Element count of that output.
    SizeOf(usize),
    /// Iteration space: up to three numbers.
    Geometry,
    /// Invocations per iteration group.
    Iterations,
}

#[derive(Clone)]
pub(crate) struct InPort {
    pub(crate) name: String,
    pub(crate) kind: PortKind,
    pub(crate) template: Template,
    /// For initializers: the input that it stands in for.
    pub(crate) target: Option<usize>,
    pub(crate) meta: MetaUse,
}

pub(crate) struct OutPort {
    pub(crate) name: String,
    pub(crate) template: Template,
    /// In-place: the input whose datablock goes out here.
    pub(crate) from_input: Option<usize>,
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// The buffer of a port's datablock, or a scratch buffer.
    Port(String),
    /// The first number in a Meta port's datablock, as it is.
    Meta(String),
    /// Number of elements in a port's datablock, as u32.
    Records(String),
    /// Size of the iteration space in that dimension, as u32.
    Items(usize),
    /// A constant.
    U32(u32),
    /// A constant.
    I32(i32),
    /// A constant.
    F32(f32),
}

impl Arg {
    /// [`Arg::Port`].
    pub fn port(name: &str) -> Arg {
        Arg::Port(name.into())
    }
    /// [`Arg::Meta`].
    pub fn meta(name: &str) -> Arg {
        Arg::Meta(name.into())
    }
    /// [`Arg::Records`].
    pub fn records(name: &str) -> Arg {
        Arg::Records(name.into())
    }
}

/// One kernel of an implementation.
#[derive(Clone, Debug)]
pub struct Launch {
    pub(crate) source: Source,
    pub(crate) entry: String,
    pub(crate) args: Vec<Arg>,
    pub(crate) geometry: Option<Geometry>,
    /// In a fused task: the task whose iteration space it runs over.
    pub(crate) member: Option<u32>,
    /// In a fused task, bit `i`: argument `i` is only read.
    pub(crate) read_only: u64,
}

impl Launch {
    /// `entry` of `source` with these arguments, over the task's iteration space.
    pub fn new(source: Source, entry: &str, args: impl IntoIterator<Item = Arg>) -> Self {
        Launch {
            source,
            entry: entry.into(),
            args: args.into_iter().collect(),
            geometry: None,
            member: None,
            read_only: 0,
        }
    }

    /// Over a space of its own.
    pub fn over(mut self, geometry: Geometry) -> Self {
        self.geometry = Some(geometry);
        self
    }

    /// The text, or binary, that the kernel is in.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The kernel's name.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// What it is called with, in its own order.
    pub fn args(&self) -> &[Arg] {
        &self.args
    }

    /// The space of its own, if it has one.
    pub fn geometry(&self) -> Option<Geometry> {
        self.geometry
    }
}

/// A task's function on the host.
pub type Work = Box<dyn FnMut(&mut Invocation<'_>) -> Result<(), TaskError> + Send>;

/// One way to carry out a task.
pub enum Impl {
    /// A function of this program, run on a worker.
    Host(Work),
    /// Kernels, run one after the other on a device of this kind.
    Kernels(Kind, Vec<Launch>),
    /// A function of a resident grid on a device.
    Resident(Resident),
}

impl Impl {
    pub(crate) fn describe(&self) -> String {
        match self {
            Impl::Host(_) => "host".into(),
            Impl::Kernels(k, _) => k.to_string(),
            Impl::Resident(_) => "resident".into(),
        }
    }
}

/// A task: named ports, one or more implementations, and how it is scheduled.
///
/// ```
/// use forebay::{Task, Template};
/// let t = Template::array::<f32>([1024]);
/// let double = Task::new("double").input("x", t).output("y", t).host(|inv| {
///     let (x, y) = (inv.input::<f32>("x")?, inv.output::<f32>("y")?);
///     for (y, x) in y.iter_mut().zip(x) {
///         *y = 2.0 * x;
///     }
///     Ok(())
/// });
/// # let _ = double;
/// ```
pub struct Task {
    pub(crate) name: String,
    pub(crate) inputs: Vec<InPort>,
    pub(crate) outputs: Vec<OutPort>,
    pub(crate) scratch: Vec<(String, usize)>,
    pub(crate) impls: Vec<Impl>,
    pub(crate) geometry: Option<Geometry>,
    pub(crate) priority: i32,
    pub(crate) iterations: Option<u64>,
    /// The Meta port whose number says, beside the size, how long it will take.
    pub(crate) hint: Option<String>,
    /// First mistake in the declaration; reported by `Graph::add`.
    mistake: Option<Error>,
}

impl Task {
    /// A task without ports.
    pub fn new(name: impl Into<String>) -> Self {
        Task {
            name: name.into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            scratch: Vec::new(),
            impls: Vec::new(),
            geometry: None,
            priority: 0,
            iterations: None,
            hint: None,
            mistake: None,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn port_name(&self, port: &str) -> String {
        format!("{}.{port}", self.name)
    }

    pub(crate) fn no_port(&self, port: &str) -> Error {
        let mut names: Vec<&str> = self.inputs.iter().map(|p| p.name.as_str()).collect();
        // What is changed in place is both.
        let others = self.outputs.iter().map(|p| p.name.as_str()).filter(|n| !self.inputs.iter().any(|i| i.name == *n));
        names.extend(others);
        Error::NoPort { task: self.name.clone(), port: port.into(), known: names.join(", ") }
    }

    pub(crate) fn wrong(&mut self, why: String) {
        let task = self.name.clone();
        self.mistake.get_or_insert(Error::Task { task, why });
    }

    fn add_input(
        mut self,
        name: &str,
        kind: PortKind,
        template: Template,
        target: Option<usize>,
        meta: MetaUse,
    ) -> Self {
        self.inputs.push(InPort { name: name.into(), kind, template, target, meta });
        self
    }

    /// An input port.
    pub fn input(self, name: &str, template: Template) -> Self {
        self.add_input(name, PortKind::Input, template, None, MetaUse::Scalar)
    }

    /// An input port that keeps its datablock until it is replaced.
    pub fn sticky(self, name: &str, template: Template) -> Self {
        self.add_input(name, PortKind::Sticky, template, None, MetaUse::Scalar)
    }

    /// A Meta port with one number, which kernels may take ([`Arg::Meta`]) and functions read.
    pub fn meta<T: Element>(self, name: &str) -> Self {
        self.add_input(name, PortKind::Meta, Template::scalar::<T>(), None, MetaUse::Scalar)
    }

    /// A Meta port (one u64) with the element count of output port `of`, which must be declared before.
    pub fn meta_size(mut self, name: &str, of: &str) -> Self {
        match self.outputs.iter().position(|p| p.name == of) {
            Some(i) if self.outputs[i].template.layout != Layout::Array => {
                self.add_input(name, PortKind::Meta, Template::scalar::<u64>(), None, MetaUse::SizeOf(i))
            }
            Some(_) => {
                self.wrong(format!("meta port {name:?} sizes {of:?}, whose template is an array of fixed size"));
                self
            }
            None => {
                self.wrong(format!("meta port {name:?} sizes {of:?}, which is no output declared before it"));
                self
            }
        }
    }

    /// A Meta port (three u64) with the iteration space of the invocation.
    pub fn meta_geometry(self, name: &str) -> Self {
        self.add_input(name, PortKind::Meta, Template::array::<u64>([3]), None, MetaUse::Geometry)
    }

    /// A Meta port (one u64) with the number of invocations of the next iteration group; it is read at its start.
    pub fn meta_iterations(self, name: &str) -> Self {
        self.add_input(name, PortKind::Meta, Template::scalar::<u64>(), None, MetaUse::Iterations)
    }

    /// A port whose datablock stands in for input port `of` at the start. It makes cycles possible.
    pub fn initializer(mut self, name: &str, of: &str) -> Self {
        match self.inputs.iter().position(|p| p.name == of && p.kind == PortKind::Input) {
            Some(i) => {
                let t = self.inputs[i].template;
                self.add_input(name, PortKind::Initializer, t, Some(i), MetaUse::Scalar)
            }
            None => {
                self.wrong(format!("initializer {name:?} is for {of:?}, which is no input port declared before it"));
                self
            }
        }
    }

    /// An output port.
    pub fn output(mut self, name: &str, template: Template) -> Self {
        self.outputs.push(OutPort { name: name.into(), template, from_input: None });
        self
    }

    /// An in-place port: input `name` and output `name` are one datablock, read and then overwritten.
    pub fn inout(mut self, name: &str, template: Template) -> Self {
        let i = self.inputs.len();
        self.outputs.push(OutPort { name: name.into(), template, from_input: Some(i) });
        self.input(name, template)
    }

    /// An in-place pair under two names: output `out` is the datablock that came in at `input`, overwritten.
    pub fn in_place(mut self, input: &str, out: &str) -> Self {
        match self.inputs.iter().position(|p| p.name == input && p.kind == PortKind::Input) {
            Some(i) => {
                let template = self.inputs[i].template;
                self.outputs.push(OutPort { name: out.into(), template, from_input: Some(i) });
            }
            None => self
                .wrong(format!("in-place output {out:?} is for {input:?}, which is no input port declared before it")),
        }
        self
    }

    /// Kinds of ports, as [`Task::add_port`] calls them.
    pub const PORTS: [&str; 10] =
        ["input", "sticky", "output", "inout", "in-place", "meta", "geometry", "iterations", "size", "initializer"];

    /// Adds a port by words, as graph files and programs in other languages have them. `of` is the template of an input, sticky,
    /// output, inout or meta port (one number), the output that a size port sizes, the input that an initializer stands in for
    /// or an in-place output overwrites, and nothing for geometry and iterations.
    ///
    /// # Errors
    /// What is wrong with the words; what the port cannot be is told when the graph is checked, as of ports that are added
    /// otherwise.
    pub fn add_port(&mut self, kind: &str, name: &str, of: &str) -> Result<(), String> {
        let template = || of.parse::<Template>();
        type Add<'a> = Box<dyn FnOnce(Task) -> Task + 'a>;
        let add: Add<'_> = match kind {
            "input" => template().map(|t| Box::new(move |k: Task| k.input(name, t)) as Add<'_>)?,
            "sticky" => template().map(|t| Box::new(move |k: Task| k.sticky(name, t)))?,
            "output" => template().map(|t| Box::new(move |k: Task| k.output(name, t)))?,
            "inout" => template().map(|t| Box::new(move |k: Task| k.inout(name, t)))?,
            "meta" => match template()?.elem {
                Elem::U32 => Box::new(|k: Task| k.meta::<u32>(name)),
                Elem::I32 => Box::new(|k: Task| k.meta::<i32>(name)),
                Elem::F32 => Box::new(|k: Task| k.meta::<f32>(name)),
                Elem::U64 => Box::new(|k: Task| k.meta::<u64>(name)),
                e => return Err(format!("a meta port cannot hold {}", e.name())),
            },
            "in-place" => Box::new(|k: Task| k.in_place(of, name)),
            "size" => Box::new(|k: Task| k.meta_size(name, of)),
            "initializer" => Box::new(|k: Task| k.initializer(name, of)),
            "geometry" => Box::new(|k: Task| k.meta_geometry(name)),
            "iterations" => Box::new(|k: Task| k.meta_iterations(name)),
            _ => return Err(format!("unknown kind of port {kind:?}; known: {}", Self::PORTS.join(", "))),
        };
        let old = std::mem::replace(self, Task::new(""));
        *self = add(old);
        Ok(())
    }

    /// Its output ports in order.
    pub fn output_templates(&self) -> Vec<(String, Template)> {
        self.outputs.iter().map(|o| (o.name.clone(), o.template)).collect()
    }

    /// Memory for the kernels of one invocation, named like a port in their arguments; its contents do not survive.
    pub fn scratch(mut self, name: &str, bytes: usize) -> Self {
        self.scratch.push((name.into(), bytes));
        self
    }

    /// Implementation: a function on a worker thread.
    pub fn host(mut self, f: impl FnMut(&mut Invocation<'_>) -> Result<(), TaskError> + Send + 'static) -> Self {
        self.impls.push(Impl::Host(Box::new(f)));
        self
    }

    /// Implementation: kernels on a device of this kind, one after the other.
    pub fn kernels(mut self, kind: Kind, launches: impl IntoIterator<Item = Launch>) -> Self {
        self.impls.push(Impl::Kernels(kind, launches.into_iter().collect()));
        self
    }

    /// Implementation: one portable kernel for OpenCL and CUDA devices, with the ports in order of declaration as
    /// arguments (inputs, then outputs; Meta and Initializer ports are left out).
    pub fn portable(self, source: &str, entry: &str) -> Self {
        let launch = Launch::new(Source::Portable(source.into()), entry, self.port_args());
        self.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch])
    }

    /// Adds an implementation: a kernel as text, for devices of one kind (OpenCL C, CUDA C++) or, without one, the portable
    /// subset for both; with these arguments, or with the ports as [`Task::port_args`] has them.
    ///
    /// # Errors
    /// [`Error::Task`] for a kind of device that takes no text; the task is as it was then.
    pub fn add_kernel(&mut self, kind: Option<Kind>, text: &str, entry: &str, args: Option<Vec<Arg>>) -> Result<()> {
        let (source, kinds) = match kind {
            None => (Source::Portable(text.into()), &[Kind::OpenCl, Kind::Cuda][..]),
            Some(Kind::OpenCl) => (Source::OpenClC(text.into()), &[Kind::OpenCl][..]),
            Some(Kind::Cuda) => (Source::CudaCpp(text.into()), &[Kind::Cuda][..]),
            Some(other) => {
                let why = format!("a {other} device takes no kernel as text; opencl and cuda do");
                return Err(Error::Task { task: self.name.clone(), why });
            }
        };
        let launch = Launch::new(source, entry, args.unwrap_or_else(|| self.port_args()));
        self.impls.extend(kinds.iter().map(|kind| Impl::Kernels(*kind, vec![launch.clone()])));
        Ok(())
    }

    /// The templates of its input ports, in order of declaration; meta and initializer ports are left out.
    pub fn input_templates(&self) -> Vec<Template> {
        let takes = |p: &&InPort| matches!(p.kind, PortKind::Input | PortKind::Sticky);
        self.inputs.iter().filter(takes).map(|p| p.template).collect()
    }

    /// The ports that were declared so far, as [`Task::portable`] passes them to a kernel.
    pub fn port_args(&self) -> Vec<Arg> {
        let inputs = self.inputs.iter().filter(|p| matches!(p.kind, PortKind::Input | PortKind::Sticky));
        let in_place: Vec<&str> =
            self.outputs.iter().filter(|p| p.from_input.is_some()).map(|p| p.name.as_str()).collect();
        inputs
            .map(|p| p.name.as_str())
            .filter(|n| !in_place.contains(n))
            .chain(self.outputs.iter().map(|p| p.name.as_str()))
            .map(Arg::port)
            .collect()
    }

    /// Leaves out the kernels for other kinds of devices; functions on the host stay.
    pub fn only(mut self, kind: Kind) -> Self {
        self.impls.retain(|i| !matches!(i, Impl::Kernels(k, _) if *k != kind));
        self
    }

    /// Leaves out the implementations for which `keep` is false.
    pub fn keep(mut self, keep: impl Fn(&Impl) -> bool) -> Self {
        self.impls.retain(keep);
        self
    }

    /// Iteration space, instead of the one inferred from the first output (or else input) port's template.
    pub fn geometry(mut self, g: Geometry) -> Self {
        self.geometry = Some(g);
        self
    }

    /// Static priority; higher is more urgent, 0 is the default.
    pub fn priority(mut self, p: i32) -> Self {
        self.priority = p;
        self
    }

    /// Invocations come in groups of `n`: the outputs of the first carry [`Signals::BEGIN_ITERATION`], those of the
    /// last [`Signals::END_ITERATION`], and initializers stand in at the start of each group.
    pub fn iterations(mut self, n: u64) -> Self {
        if n == 0 {
            self.wrong("iterations of 0".into());
        }
        self.iterations = Some(n);
        self
    }

    /// The number at Meta port `port` says, beside the size of the inputs, how long an invocation will take: a length, a
    /// count of iterations, a density. [`crate::Mode::Adaptive`] learns how.
    pub fn hint(mut self, port: &str) -> Self {
        if !self.inputs.iter().any(|p| p.name == port && p.kind == PortKind::Meta && p.meta == MetaUse::Scalar) {
            self.wrong(format!("hint {port:?} is no Meta port with a number, declared before it"));
        }
        self.hint = Some(port.to_owned());
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_name("task", &self.name)?;
        if let Some(m) = &self.mistake {
            return Err(m.clone());
        }
        let wrong = |why: String| Err(Error::Task { task: self.name.clone(), why });
        if self.inputs.len() + self.outputs.len() > MAX_PORTS {
            return wrong(format!("more than {MAX_PORTS} ports"));
        }
        let mut seen = std::collections::HashSet::new();
        for p in &self.inputs {
            check_name("port", &p.name)?;
            p.template.validate(&self.port_name(&p.name))?;
            if !seen.insert(p.name.as_str()) {
                return Err(Error::Name { what: "port", name: self.port_name(&p.name), why: "another port has it" });
            }
        }
        for p in &self.outputs {
            check_name("port", &p.name)?;
            p.template.validate(&self.port_name(&p.name))?;
            let own_input = p.from_input.is_some_and(|i| self.inputs[i].name == p.name);
            if !own_input && !seen.insert(p.name.as_str()) {
                return Err(Error::Name { what: "port", name: self.port_name(&p.name), why: "another port has it" });
            }
        }
        for i in &self.impls {
            let Impl::Kernels(kind, launches) = i else { continue };
            for l in launches {
                if !l.source.runs_on(*kind) {
                    return wrong(format!("kernel {:?} is {:?}, which a {kind} device cannot run", l.entry, l.source));
                }
                for a in &l.args {
                    self.check_arg(&l.entry, a)?;
                }
            }
        }
        Ok(())
    }

    fn check_arg(&self, entry: &str, a: &Arg) -> Result<()> {
        let is_port = |n: &str| self.inputs.iter().any(|p| p.name == n) || self.outputs.iter().any(|p| p.name == n);
        let ok = match a {
            Arg::Port(n) => is_port(n) || self.scratch.iter().any(|(s, _)| s == n),
            Arg::Records(n) => is_port(n),
            Arg::Meta(n) => self.inputs.iter().any(|p| p.name == *n && p.kind == PortKind::Meta),
            Arg::Items(d) => *d < 3,
            Arg::U32(_) | Arg::I32(_) | Arg::F32(_) => true,
        };
        if ok {
            return Ok(());
        }
        let why = format!("argument {a:?} of kernel {entry:?} names no port or scratch of the task");
        Err(Error::Task { task: self.name.clone(), why })
    }

    /// The iteration space that the templates imply: the first output's, or else the first input's dimensions.
    pub(crate) fn inferred_geometry(&self) -> Geometry {
        let template = self
            .outputs
            .first()
            .map(|p| p.template)
            .or_else(|| self.inputs.iter().find(|p| p.kind == PortKind::Input).map(|p| p.template));
        let dims = template.map_or([1, 1, 1], |t| t.dims);
        Geometry::new(dims[0], dims[1], dims[2])
    }
}

/// As in a graph file: `x` (a port or scratch), `records.x`, `meta.n`, `items.x` to `.z`, `u32:5`, `i32:-5`, `f32:0.5`.
impl std::str::FromStr for Arg {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let bad = |what: &str| format!("{s:?} is no {what}");
        if let Some((kind, value)) = s.split_once(':') {
            return match kind {
                "u32" => value.parse().map(Arg::U32).map_err(|_| bad("u32")),
                "i32" => value.parse().map(Arg::I32).map_err(|_| bad("i32")),
                "f32" => value.parse().map(Arg::F32).map_err(|_| bad("f32")),
                _ => Err(bad("argument: constants are u32:N, i32:N or f32:X")),
            };
        }
        Ok(match s.split_once('.') {
            Some(("items", d)) => Arg::Items(
                ["x", "y", "z"].iter().position(|n| *n == d).ok_or_else(|| bad("dimension (items.x, .y, .z)"))?,
            ),
            Some(("records", p)) => Arg::records(p),
            Some(("meta", p)) => Arg::meta(p),
            Some(_) => return Err(bad("argument: known prefixes are items, records, meta")),
            None => Arg::port(s),
        })
    }
}

/// How a function names a port: by position in order of declaration, or by name.
pub trait PortKey: Copy {
    /// The position among `names`.
    fn find(self, names: &[Arc<str>]) -> Option<usize>;
    /// For messages.
    fn text(self) -> String;
}

impl PortKey for usize {
    #[inline]
    fn find(self, names: &[Arc<str>]) -> Option<usize> {
        (self < names.len()).then_some(self)
    }
    fn text(self) -> String {
        format!("number {self}")
    }
}

impl PortKey for &str {
    fn find(self, names: &[Arc<str>]) -> Option<usize> {
        names.iter().position(|n| **n == *self)
    }
    fn text(self) -> String {
        format!("{self:?}")
    }
}

/// A datablock on its way out. It does not give access to the bytes: [`Invocation::output`] hands those out once.
#[derive(Clone, Copy)]
pub struct Outgoing<'a>(&'a Datablock);

impl Outgoing<'_> {
    /// What it holds.
    pub fn template(&self) -> Template {
        self.0.template()
    }

    /// Number of its elements.
    pub fn records(&self) -> usize {
        self.0.records()
    }

    /// As [`Datablock::set_records`].
    ///
    /// # Errors
    /// The same.
    pub fn set_records(&self, n: usize) -> Result<()> {
        self.0.set_records(n)
    }

    /// Its marks.
    pub fn signals(&self) -> Signals {
        self.0.signals()
    }

    /// Replaces its marks.
    pub fn set_signals(&self, s: Signals) {
        self.0.set_signals(s);
    }

    /// As [`Datablock::set_meta`].
    ///
    /// # Errors
    /// The same.
    pub fn set_meta(&self, bytes: &[u8]) -> Result<()> {
        self.0.set_meta(bytes)
    }
}

/// What a task's function sees: this invocation's datablocks.
pub struct Invocation<'a> {
    pub(crate) node: &'a Node,
    pub(crate) inputs: &'a [Option<Datablock>],
    pub(crate) outputs: &'a [Option<Datablock>],
    /// Outputs whose bytes were handed out for writing.
    pub(crate) taken: u64,
    /// Of this invocation, if it differs from the task's.
    pub(crate) geometry: Option<Geometry>,
    pub(crate) iteration: u64,
    pub(crate) finish: bool,
    pub(crate) pool: &'a forebay_hal::cpu::Pool,
}

impl<'a> Invocation<'a> {
    #[cold]
    fn missing(&self, what: &str, port: String) -> TaskError {
        format!("task {:?} has no {what} {port} in this invocation", self.node.name).into()
    }

    /// The datablock at an input port. For initializers and their targets: whichever stands there this time is at the
    /// target. An in-place port's datablock is at the output.
    #[inline]
    pub fn block(&self, port: impl PortKey) -> Result<&'a Datablock, TaskError> {
        let i = port.find(&self.node.input_names).ok_or_else(|| self.missing("input", port.text()))?;
        let inputs: &'a [Option<Datablock>] = self.inputs;
        inputs[i].as_ref().ok_or_else(|| self.missing("input", port.text()))
    }

    /// The elements at an input port.
    #[inline]
    pub fn input<T: bytemuck::Pod>(&self, port: impl PortKey) -> Result<&'a [T], TaskError> {
        Ok(self.block(port)?.as_slice()?)
    }

    /// The first element at an input port: a scalar's value.
    pub fn value<T: bytemuck::Pod>(&self, port: impl PortKey) -> Result<T, TaskError> {
        self.input::<T>(port)?.first().copied().ok_or_else(|| self.missing("element at", port.text()))
    }

    /// The elements at an output port for writing: all that fit, with unspecified contents, or those that came in at an
    /// in-place port. Can be taken once per invocation.
    #[inline]
    pub fn output<T: bytemuck::Pod>(&mut self, port: impl PortKey) -> Result<&'a mut [T], TaskError> {
        let i = port.find(&self.node.output_names).ok_or_else(|| self.missing("output", port.text()))?;
        if self.taken & 1 << i != 0 {
            return Err(format!("output {} of task {:?} was taken before", port.text(), self.node.name).into());
        }
        let outputs: &'a [Option<Datablock>] = self.outputs;
        let b = outputs[i].as_ref().ok_or_else(|| self.missing("output", port.text()))?;
        if !b.template().elem.holds::<T>() {
            let want = std::any::type_name::<T>();
            return Err(format!("output {} holds {}, not {want}", port.text(), b.template()).into());
        }
        let bytes = self.take_output(i)?;
        // SAFETY: aligned to 64 bytes, and of whole elements.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), bytes.len() / size_of::<T>()) })
    }

    /// The bytes at an output port for writing, whatever its elements are; as [`Invocation::output`].
    pub fn output_bytes(&mut self, port: impl PortKey) -> Result<&'a mut [u8], TaskError> {
        let i = port.find(&self.node.output_names).ok_or_else(|| self.missing("output", port.text()))?;
        if self.taken & 1 << i != 0 {
            return Err(format!("output {} of task {:?} was taken before", port.text(), self.node.name).into());
        }
        if self.outputs[i].is_none() {
            return Err(self.missing("output", port.text()));
        }
        self.take_output(i)
    }

    /// The bytes of output number `i`, which was not taken before.
    #[inline(always)]
    fn take_output(&mut self, i: usize) -> Result<&'a mut [u8], TaskError> {
        let outputs: &'a [Option<Datablock>] = self.outputs;
        let Some(b) = &outputs[i] else { return Err(self.missing("output", i.text())) };
        self.taken |= 1 << i;
        let p = b.write_host(true)?;
        // SAFETY: the block is this invocation's alone (the engine made it so), has the template's size, is aligned to
        // 64 bytes, and `taken` hands out its bytes once.
        Ok(unsafe { std::slice::from_raw_parts_mut(p, b.template().bytes()) })
    }

    /// What goes out beside the bytes at an output port: record count, marks, metadata.
    pub fn out(&self, port: impl PortKey) -> Result<Outgoing<'a>, TaskError> {
        let i = port.find(&self.node.output_names).ok_or_else(|| self.missing("output", port.text()))?;
        let outputs: &'a [Option<Datablock>] = self.outputs;
        outputs[i].as_ref().map(Outgoing).ok_or_else(|| self.missing("output", port.text()))
    }

    /// The iteration space.
    pub fn geometry(&self) -> Geometry {
        self.geometry.unwrap_or_else(|| self.node.geometry_now())
    }

    /// Number of this invocation in its iteration group, from 0.
    pub fn iteration(&self) -> u64 {
        self.iteration
    }

    /// Marks all outputs as the end of the stream; a task without inputs is not called again.
    pub fn finish(&mut self) {
        self.finish = true;
        for b in self.outputs.iter().flatten() {
            b.set_signals(b.signals() | Signals::END_STREAM);
        }
    }

    /// Calls `f(first, last)` over ranges that cover `0..n`, each at most `grain` long, on this and on idle workers.
    pub fn parallel_for(&self, n: usize, grain: usize, f: impl Fn(usize, usize) + Sync) {
        self.pool.parallel_for(n, grain, &f);
    }
}
