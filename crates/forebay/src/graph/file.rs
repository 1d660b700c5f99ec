//! Graphs in TOML.
//!
//! ```toml
//! name = "example"
//!
//! [[task]]
//! name = "blur"
//! inputs = [{ name = "x", type = "f32[64]" }, { name = "k", type = "f32[3]", kind = "sticky" }]
//! outputs = [{ name = "y", type = "f32[64]" }]
//! host = "copy"                                                  # a function of the program's library
//! kernel = { file = "blur.cl", entry = "blur", args = ["x", "k", "y", "items.x"] }  # portable source
//!
//! [[channel]]
//! from = "blur.y"
//! to = "next.x"
//! capacity = 4
//! when = "unless end-iteration"
//!
//! [[feed]]
//! to = "blur.x"
//!
//! [[drain]]
//! from = "next.y"
//! ```
//!
//! Types: `f32[640x480]` (array, up to three dimensions), `f32` (one), `f32<=1000` (at most so many), `bytes<=4096`. Kernel arguments:
//! a port or scratch name, `items.x|y|z`, `records.PORT`, `meta.PORT`, or a number with its type (`u32:7`, `f32:0.5`).
//! Every mistake is reported with line and column.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use toml::Spanned;

use super::task::{Launch, Task, Work};
use super::{DEFAULT_CAPACITY, Graph, Predicate, TaskId};
use crate::error::{Error, Result};
use forebay_hal::{Geometry, Kind, Source};

/// Longest graph file, bytes.
const MAX_FILE: usize = 16 << 20;

/// Functions that graph files may name, each made anew for every task that names it.
#[derive(Clone, Default)]
pub struct Library(HashMap<String, Arc<dyn Fn() -> Work + Send + Sync>>);

impl Library {
    /// No functions.
    pub fn new() -> Self {
        Self::default()
    }

    /// The functions that every program has: `copy` (first input to all outputs, as bytes), `add` and `multiply` (all
    /// f32 inputs, element by element, into the first output).
    pub fn standard() -> Self {
        let fold = |f: fn(f32, f32) -> f32| {
            move || -> Work {
                Box::new(move |inv| {
                    let first = inv.input::<f32>(0)?;
                    let others = (1..inv.inputs.len()).map(|i| inv.input::<f32>(i)).collect::<Result<Vec<_>, _>>()?;
                    for (i, o) in inv.output::<f32>(0)?.iter_mut().enumerate() {
                        let start = first.get(i).copied().unwrap_or(0.0);
                        *o = others.iter().fold(start, |v, x| f(v, x.get(i).copied().unwrap_or(0.0)));
                    }
                    Ok(())
                })
            }
        };
        let copy = || -> Work {
            Box::new(|inv| {
                let from = inv.block(0)?;
                for o in inv.outputs.iter().flatten() {
                    if o.template() == from.template() {
                        from.copy_to(o)?;
                    } else {
                        o.set_bytes(from.as_bytes()?)?;
                    }
                }
                Ok(())
            })
        };
        Library::new().with("copy", copy).with("add", fold(|a, b| a + b)).with("multiply", fold(|a, b| a * b))
    }

    /// With one more function.
    pub fn with(mut self, name: &str, make: impl Fn() -> Work + Send + Sync + 'static) -> Self {
        self.0.insert(name.into(), Arc::new(make));
        self
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    #[serde(default)]
    task: Vec<Spanned<TaskDecl>>,
    #[serde(default)]
    channel: Vec<Spanned<ChannelDecl>>,
    #[serde(default)]
    feed: Vec<Spanned<FeedDecl>>,
    #[serde(default)]
    drain: Vec<Spanned<DrainDecl>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskDecl {
    name: String,
    #[serde(default)]
    inputs: Vec<Spanned<PortDecl>>,
    #[serde(default)]
    outputs: Vec<Spanned<PortDecl>>,
    #[serde(default)]
    scratch: Vec<ScratchDecl>,
    host: Option<Spanned<String>>,
    kernel: Option<Spanned<KernelDecl>>,
    geometry: Option<Vec<usize>>,
    priority: Option<i32>,
    iterations: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PortDecl {
    name: String,
    #[serde(rename = "type")]
    template: Option<Spanned<String>>,
    kind: Option<Spanned<String>>,
    /// Initializers: the input they stand in for; size ports: the output they size; in-place outputs: their input.
    of: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScratchDecl {
    name: String,
    bytes: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KernelDecl {
    file: Option<String>,
    source: Option<String>,
    entry: String,
    args: Spanned<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChannelDecl {
    from: Spanned<String>,
    to: Spanned<String>,
    capacity: Option<usize>,
    when: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FeedDecl {
    to: Spanned<String>,
    capacity: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainDecl {
    from: Spanned<String>,
    capacity: Option<usize>,
    when: Option<Spanned<String>>,
}

/// Reads a graph file; kernel files are looked for beside it.
///
/// # Errors
/// [`Error::File`] with path, line and column.
pub fn load(path: &Path, library: &Library) -> Result<Graph> {
    let name = path.display().to_string();
    let unreadable = |e: std::io::Error| Error::File { file: name.clone(), line: 0, column: 0, why: e.to_string() };
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    Reader { file: &name, text: &text, folder: path.parent(), library }.graph()
}

/// Reads a graph from text; its kernels must be given as `source`.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, library: &Library) -> Result<Graph> {
    Reader { file: "<text>", text, folder: None, library }.graph()
}

struct Reader<'a> {
    file: &'a str,
    text: &'a str,
    folder: Option<&'a Path>,
    library: &'a Library,
}

impl Reader<'_> {
    fn error(&self, at: Range<usize>, why: impl std::fmt::Display) -> Error {
        let mut start = at.start.min(self.text.len());
        while !self.text.is_char_boundary(start) {
            start -= 1;
        }
        let before = &self.text[..start];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
        Error::File { file: self.file.into(), line, column, why: why.to_string() }
    }

    fn graph(&self) -> Result<Graph> {
        if self.text.len() > MAX_FILE {
            return Err(self.error(0..0, format!("longer than {MAX_FILE} bytes")));
        }
        let file: File = toml::from_str(self.text)
            .map_err(|e| self.error(e.span().unwrap_or(0..0), e.message().replace('\n', " ")))?;
        let mut g = Graph::new(file.name.unwrap_or_else(|| "graph".into()));
        for t in file.task {
            let span = t.span();
            let task = self.task(t.into_inner(), span.clone())?;
            g.add(task).map_err(|e| self.error(span, e))?;
        }
        for c in file.channel {
            let span = c.span();
            let c = c.into_inner();
            let (from, to) = (self.port(&g, &c.from)?, self.port(&g, &c.to)?);
            let (f, t) = ((from.0, from.1.as_str()), (to.0, to.1.as_str()));
            let when = self.predicate(c.when.as_ref())?;
            g.connect_with(f, t, c.capacity.unwrap_or(DEFAULT_CAPACITY), when).map_err(|e| self.error(span, e))?;
        }
        for f in file.feed {
            let span = f.span();
            let f = f.into_inner();
            let to = self.port(&g, &f.to)?;
            let made = g.feed((to.0, &to.1), f.capacity.unwrap_or(DEFAULT_CAPACITY));
            made.map_err(|e| self.error(span, e))?;
        }
        for d in file.drain {
            let span = d.span();
            let d = d.into_inner();
            let from = self.port(&g, &d.from)?;
            let when = self.predicate(d.when.as_ref())?;
            let made = g.drain_with((from.0, &from.1), d.capacity.unwrap_or(DEFAULT_CAPACITY), when);
            made.map_err(|e| self.error(span, e))?;
        }
        Ok(g)
    }

    /// `task.port`
    fn port(&self, g: &Graph, s: &Spanned<String>) -> Result<(TaskId, String)> {
        let Some((task, port)) = s.get_ref().split_once('.') else {
            return Err(self.error(s.span(), format!("{:?} is not of the form task.port", s.get_ref())));
        };
        match g.find(task) {
            Some(id) => Ok((id, port.to_owned())),
            None => Err(self.error(s.span(), format!("there is no task {task:?}"))),
        }
    }

    fn predicate(&self, s: Option<&Spanned<String>>) -> Result<Predicate> {
        let Some(s) = s else { return Ok(Predicate::Always) };
        s.get_ref().parse().map_err(|why: String| self.error(s.span(), why))
    }

    fn task(&self, d: TaskDecl, span: Range<usize>) -> Result<Task> {
        let mut t = Task::new(d.name);
        // Inputs that stand for others or size outputs come after what they name.
        let is_late =
            |p: &PortDecl| matches!(p.kind.as_ref().map(|k| k.get_ref().as_str()), Some("initializer" | "size"));
        let late = d.inputs.iter().filter(|p| is_late(p.get_ref()));
        let inputs = d.inputs.iter().filter(|p| !is_late(p.get_ref())).map(|p| (p, "input"));
        let outputs = d.outputs.iter().map(|p| (p, if p.get_ref().of.is_some() { "in-place" } else { "output" }));
        for (p, default) in inputs.chain(outputs).chain(late.map(|p| (p, "size"))) {
            let (span, p) = (p.span(), p.get_ref());
            // An output has no kind of its own.
            let kind = p.kind.as_ref().filter(|_| default != "output" && default != "in-place");
            let word = kind.map_or(default, |k| k.get_ref());
            let (what, at) = match word {
                "geometry" | "iterations" => ("", span),
                "initializer" | "size" | "in-place" => match &p.of {
                    Some(of) => (of.as_str(), span),
                    None => return Err(self.error(span, format!("{word} port {:?} needs `of`", p.name))),
                },
                _ if !Task::PORTS.contains(&word) => ("", kind.map_or(span, Spanned::span)),
                _ => match &p.template {
                    Some(t) => (t.get_ref().as_str(), t.span()),
                    None => {
                        let why = format!("port {:?} needs a type, such as \"f32[640x480]\"", p.name);
                        return Err(self.error(span, why));
                    }
                },
            };
            t.add_port(word, &p.name, what).map_err(|why| self.error(at, why))?;
        }
        for s in d.scratch {
            t = t.scratch(&s.name, s.bytes);
        }
        if let Some(h) = d.host {
            let Some(make) = self.library.0.get(h.get_ref()) else {
                let mut known: Vec<&str> = self.library.0.keys().map(String::as_str).collect();
                known.sort_unstable();
                let why = format!("no function {:?} here; known: {}", h.get_ref(), known.join(", "));
                return Err(self.error(h.span(), why));
            };
            t = t.host(make());
        }
        if let Some(k) = d.kernel {
            t = self.kernel(t, &k)?;
        }
        if let Some(g) = d.geometry {
            if g.is_empty() || g.len() > 3 || g.contains(&0) {
                return Err(self.error(span, "a geometry is one to three numbers above 0"));
            }
            let at = |i: usize| g.get(i).copied().unwrap_or(1);
            t = t.geometry(Geometry::new(at(0), at(1), at(2)));
        }
        if let Some(p) = d.priority {
            t = t.priority(p);
        }
        if let Some(n) = d.iterations {
            t = t.iterations(n);
        }
        Ok(t)
    }

    fn kernel(&self, t: Task, k: &Spanned<KernelDecl>) -> Result<Task> {
        let d = k.get_ref();
        let source = match (&d.source, &d.file, self.folder) {
            (Some(s), None, _) => s.clone(),
            (None, Some(f), Some(folder)) => {
                let path = folder.join(f);
                std::fs::read_to_string(&path).map_err(|e| self.error(k.span(), format!("{}: {e}", path.display())))?
            }
            (None, Some(_), None) => {
                return Err(self.error(k.span(), "a graph without a file cannot name kernel files"));
            }
            _ => return Err(self.error(k.span(), "a kernel has either a `file` or a `source`")),
        };
        let args = d.args.get_ref().iter().map(|a| a.parse()).collect::<Result<Vec<_>, _>>();
        let args = args.map_err(|why| self.error(d.args.span(), why))?;
        let launch = Launch::new(Source::Portable(source.into()), &d.entry, args);
        Ok(t.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Elem, Template};
    use proptest::prelude::*;

    const GOOD: &str = r#"
name = "two"
[[task]]
name = "a"
inputs = [{ name = "x", type = "f32[8]" }]
outputs = [{ name = "y", type = "f32[8]" }]
host = "copy"
[[task]]
name = "b"
inputs = [{ name = "x", type = "f32[8]" }]
outputs = [{ name = "y", type = "f32[8]" }]
host = "add"
[[channel]]
from = "a.y"
to = "b.x"
capacity = 2
[[feed]]
to = "a.x"
[[drain]]
from = "b.y"
"#;

    fn place(text: &str) -> (usize, usize, String) {
        match parse(text, &Library::standard()).and_then(|g| g.check().map(|()| g)) {
            Err(Error::File { line, column, why, .. }) => (line, column, why),
            Err(e) => panic!("no place in: {e}"),
            Ok(_) => panic!("accepted"),
        }
    }

    #[test]
    fn a_good_file_is_a_good_graph() {
        let g = parse(GOOD, &Library::standard()).unwrap();
        g.check().unwrap();
        assert_eq!(g.size(), (2, 3));
    }

    #[test]
    fn mistakes_have_a_line_and_a_column() {
        let cases = [
            (GOOD.replace("from = \"a.y\"", "from = \"a.z\""), 13, "no port \"z\""),
            (GOOD.replace("to = \"b.x\"", "to = \"c.x\""), 15, "no task \"c\""),
            (GOOD.replace("capacity = 2", "capacity = 0"), 13, "capacity 0"),
            (GOOD.replace("capacity", "capacty"), 16, "capacty"),
            (GOOD.replace("host = \"add\"", "host = \"ad\""), 12, "known: add, copy, multiply"),
            (GOOD.replacen("f32[8]", "f33[8]", 1), 5, "unknown element \"f33\""),
            (GOOD.replacen("f32[8]", "f32[8", 1), 5, "is no type"),
            (GOOD.replacen("f32[8]", "f32[9]", 2), 13, "dimensions differ"),
            (GOOD.replace("[[feed]]", "[[feed]"), 17, ""),
        ];
        for (text, line, why) in cases {
            let (l, column, w) = place(&text);
            assert!(w.contains(why), "{w}");
            assert_eq!(l, line, "{w}");
            assert!(column >= 1);
        }
    }

    proptest! {
        /// No text makes the parser panic, and what it refuses it refuses with a place in the text.
        #[test]
        fn any_text_is_refused_politely(cut in 0usize..400, insert in ".{0,12}", keep in 0usize..400) {
            let mut text: String = GOOD.chars().take(cut).collect();
            text.push_str(&insert);
            text.extend(GOOD.chars().skip(keep));
            match parse(&text, &Library::standard()) {
                Ok(g) => { let _ = g.check(); }
                Err(Error::File { line, column, .. }) => {
                    prop_assert!(line >= 1 && line <= text.matches('\n').count() + 1 && column >= 1);
                }
                Err(e) => prop_assert!(false, "no place in: {}", e),
            }
        }

        #[test]
        fn types_come_back(e in 0..Elem::NUMBERS.len(), dims in proptest::collection::vec(1usize..5000, 1..4)) {
            let text = format!("{}[{}]", Elem::NUMBERS[e].name(), dims.iter().map(usize::to_string).collect::<Vec<_>>().join("x"));
            prop_assert_eq!(text.parse(), Ok(Template::array_of(Elem::NUMBERS[e], dims)));
        }
    }
}
