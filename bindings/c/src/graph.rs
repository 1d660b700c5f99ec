//! Graphs: tasks and the channels between them.

use std::ffi::c_char;
use std::path::Path;

use forebay::{Drain, Feed, Graph};

use crate::task::forebay_task;
use crate::{Failure, free, give, invalid, known, put, status, take, text};

/// A graph under construction.
pub struct forebay_graph {
    pub(crate) graph: Graph,
    /// What C names by number.
    pub(crate) feeds: Vec<Feed>,
    pub(crate) drains: Vec<Drain>,
}

fn fresh(graph: Graph) -> forebay_graph {
    forebay_graph { graph, feeds: Vec::new(), drains: Vec::new() }
}

/// Makes an empty graph.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_new(name: *const c_char, graph: *mut *mut forebay_graph) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { give(graph, fresh(Graph::new(text(name, "the name")?))) })
}

/// Reads a graph file, with the functions of the standard library and the kernels that it names.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_load(path: *const c_char, graph: *mut *mut forebay_graph) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let library = forebay::graph::Library::standard();
        let g = forebay::graph::load(Path::new(text(path, "the path")?), &library)?;
        let (feeds, drains) = (g.feeds(), g.drains());
        let mut made = fresh(g);
        made.feeds = feeds.into_iter().map(|(_, f)| f).collect();
        made.drains = drains.into_iter().map(|(_, d)| d).collect();
        give(graph, made)
    })
}

/// Gives a graph back that was not started.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_free(graph: *mut forebay_graph) {
    // SAFETY: C's promise.
    unsafe { free(graph) };
}

/// Adds a task, and takes it.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_add(graph: *mut forebay_graph, task: *mut forebay_task) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let task = take(task, "the task")?;
        known(graph, "the graph")?.graph.add(task.0)?;
        Ok(())
    })
}

/// Connects an output port with an input port, "blur.y" with "edges.x", by a channel of this capacity.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_connect(
    graph: *mut forebay_graph,
    from: *const c_char,
    to: *const c_char,
    capacity: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = known(graph, "the graph")?;
        let (from, to) = (text(from, "the beginning")?, text(to, "the end")?);
        let (from, to) = (g.graph.end(from)?, g.graph.end(to)?);
        Ok(g.graph.connect_with(from, to, capacity, forebay::Predicate::Always)?)
    })
}

/// As forebay_graph_connect, with a predicate: "only MARK", "unless MARK", "open-from MARK" or "close-after MARK", the mark being
/// "begin-stream", "end-stream", "begin-iteration" or "end-iteration". Blocks that do not pass are dropped.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_connect_when(
    graph: *mut forebay_graph,
    from: *const c_char,
    to: *const c_char,
    capacity: usize,
    when: *const c_char,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = known(graph, "the graph")?;
        let (from, to) = (text(from, "the beginning")?, text(to, "the end")?);
        let (from, to) = (g.graph.end(from)?, g.graph.end(to)?);
        Ok(g.graph.connect_with(from, to, capacity, predicate(when)?)?)
    })
}

/// # Safety
/// As the rules say.
unsafe fn predicate(when: *const c_char) -> Result<forebay::Predicate, Failure> {
    // SAFETY: C's promise.
    unsafe { text(when, "the predicate")? }.parse().map_err(|why: String| invalid(&why))
}

/// Makes a channel into which the program pushes. Feeds are numbered from 0, in the order in which they are made; those of a
/// graph file as they stand there.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_feed(
    graph: *mut forebay_graph,
    to: *const c_char,
    capacity: usize,
    feed: *mut u32,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = known(graph, "the graph")?;
        let to = g.graph.end(text(to, "the end")?)?;
        g.feeds.push(g.graph.feed(to, capacity)?);
        put(feed, g.feeds.len() as u32 - 1)
    })
}

/// Makes a channel from which the program pulls; numbered as feeds are.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_drain(
    graph: *mut forebay_graph,
    from: *const c_char,
    capacity: usize,
    drain: *mut u32,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = known(graph, "the graph")?;
        let from = g.graph.end(text(from, "the beginning")?)?;
        g.drains.push(g.graph.drain(from, capacity)?);
        put(drain, g.drains.len() as u32 - 1)
    })
}

/// As forebay_graph_drain, with a predicate as forebay_graph_connect_when has them.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_drain_when(
    graph: *mut forebay_graph,
    from: *const c_char,
    capacity: usize,
    when: *const c_char,
    drain: *mut u32,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = known(graph, "the graph")?;
        let from = g.graph.end(text(from, "the beginning")?)?;
        g.drains.push(g.graph.drain_with(from, capacity, predicate(when)?)?);
        put(drain, g.drains.len() as u32 - 1)
    })
}

/// Checks a graph as its start would, without running anything.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_graph_check(graph: *mut forebay_graph) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(known(graph, "the graph")?.graph.check()?) })
}
