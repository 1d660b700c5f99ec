//! Lists of launches as CUDA graphs: built once, replayed, updated in place.
//!
//! Nodes depend on each other only through buffers (write after read, read after write, write after write), so parts of
//! a list that share nothing run side by side, which a stream would not do.

use std::any::Any;
use std::collections::HashMap;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use super::Context;
use super::queue::Call;
use super::sys::{CuGraph, CuGraphExec, CuGraphNode, CuStream, KernelNodeParams};
use crate::{Arg, Buffer, Issued, Kernel, Listed, Result};

/// Executable graphs kept for one list. Blocks come from pools, so the same few sets of buffers come again and again;
/// each has its own graph and needs no update.
const MAX_VARIANTS: usize = 8;

/// What is remembered of a list.
pub(super) struct Recording {
    context: Arc<Context>,
    /// The most recently used last.
    variants: Vec<Variant>,
}

/// An executable graph and what it was made from.
struct Variant {
    calls: Vec<Call>,
    nodes: Vec<CuGraphNode>,
    /// See [`aliases`].
    aliases: Vec<u32>,
    exec: Arc<Executable>,
    held: Arc<Held>,
}

// SAFETY: node handles are names, used with the context current and by one thread at a time.
unsafe impl Send for Variant {}

/// What must stay alive while the graph may run.
#[allow(dead_code, reason = "held for its drop")]
struct Held {
    buffers: Vec<Buffer>,
    kernels: Vec<Kernel>,
    exec: Arc<Executable>,
}

struct Executable {
    graph: CuGraph,
    exec: CuGraphExec,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread once the context is current there.
unsafe impl Send for Executable {}
// SAFETY: as above; the handle is only read here, and used under the queue's `&mut`.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        let (graph, exec) = (self.graph as usize, self.exec as usize);
        self.context.free(move |d| {
            // SAFETY: made in `build`, destroyed once, when no queue holds it for a launch that may still run.
            unsafe {
                if exec != 0 {
                    (d.cuGraphExecDestroy)(exec as CuGraphExec);
                }
                (d.cuGraphDestroy)(graph as CuGraph);
            }
        });
    }
}

impl Recording {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Recording { context, variants: Vec::new() }
    }

    pub(super) fn belongs_to(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Launches the list; the caller keeps what comes back until the launch has ended.
    pub(super) fn launch(
        &mut self,
        stream: CuStream,
        list: &[Listed<'_>],
        calls: &[Call],
    ) -> Result<(Issued, Arc<dyn Any + Send + Sync>)> {
        let d = self.context.enter()?;
        let same = self.variants.iter().position(|v| v.calls == calls);
        let issued = match same {
            Some(i) => {
                self.variants[i..].rotate_left(1);
                Issued::Replayed
            }
            None => {
                let aliases = aliases(list, calls);
                let alike = |v: &Variant| v.aliases == aliases && same_functions(&v.calls, calls);
                // The least recently used one is updated, but only when there are enough of them.
                let old = self.variants.iter().position(alike).filter(|_| self.variants.len() >= MAX_VARIANTS);
                let (variant, issued) = match old {
                    Some(i) => {
                        let mut v = self.variants.remove(i);
                        self.update(&mut v, list, calls)?;
                        (v, Issued::Updated)
                    }
                    None => (self.build(list, calls, aliases)?, Issued::Built),
                };
                if self.variants.len() >= MAX_VARIANTS {
                    self.variants.remove(0);
                }
                self.variants.push(variant);
                issued
            }
        };
        let Some(v) = self.variants.last() else { return Err(self.context.invalid("an empty recording".into())) };
        // SAFETY: the executable is alive and of this context, the stream is the caller's.
        self.context.check("cuGraphLaunch", unsafe { (d.cuGraphLaunch)(v.exec.exec, stream) })?;
        Ok((issued, v.held.clone()))
    }

    fn build(&self, list: &[Listed<'_>], calls: &[Call], aliases: Vec<u32>) -> Result<Variant> {
        let d = self.context.enter()?;
        let mut graph = null_mut();
        // SAFETY: `graph` is valid.
        self.context.check("cuGraphCreate", unsafe { (d.cuGraphCreate)(&mut graph, 0) })?;
        let mut made = Executable { graph, exec: null_mut(), context: self.context.clone() };
        let mut nodes: Vec<CuGraphNode> = Vec::with_capacity(list.len());
        for (mut call, before) in calls.iter().cloned().zip(dependencies(list, calls)) {
            let before: Vec<CuGraphNode> = before.into_iter().map(|i| nodes[i]).collect();
            let first = if before.is_empty() { null() } else { before.as_ptr() };
            let mut pointers = call.params();
            let params = node_params(&call, &mut pointers);
            let mut node = null_mut();
            // SAFETY: `before` holds that many nodes of this graph; the driver copies the arguments.
            let code = unsafe { (d.cuGraphAddKernelNode)(&mut node, graph, first, before.len(), &params) };
            self.context.check("cuGraphAddKernelNode", code)?;
            nodes.push(node);
        }
        // SAFETY: `exec` is valid, the graph complete.
        let code = unsafe { (d.cuGraphInstantiateWithFlags)(&mut made.exec, graph, 0) };
        self.context.check("cuGraphInstantiate", code)?;
        let exec = Arc::new(made);
        let held = Held::new(list, &exec);
        Ok(Variant { calls: calls.to_vec(), nodes, aliases, exec, held })
    }

    /// Changes the nodes that differ. Launches that are running are not affected.
    fn update(&self, v: &mut Variant, list: &[Listed<'_>], calls: &[Call]) -> Result<()> {
        let d = self.context.enter()?;
        for ((old, new), &node) in v.calls.iter_mut().zip(calls).zip(&v.nodes) {
            if old == new {
                continue;
            }
            old.clone_from(new);
            let mut pointers = old.params();
            let params = node_params(old, &mut pointers);
            // SAFETY: the node belongs to the graph that the executable was made from; the driver copies the arguments.
            let code = unsafe { (d.cuGraphExecKernelNodeSetParams)(v.exec.exec, node, &params) };
            self.context.check("cuGraphExecKernelNodeSetParams", code)?;
        }
        v.held = Held::new(list, &v.exec);
        Ok(())
    }
}

impl Held {
    fn new(list: &[Listed<'_>], exec: &Arc<Executable>) -> Arc<Held> {
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for a in list.iter().flat_map(|l| l.args) {
            if let Arg::Buffer(b) = a
                && seen.insert(Arc::as_ptr(b).cast::<u8>())
            {
                buffers.push((*b).clone());
            }
        }
        let kernels = list.iter().map(|l| l.kernel.clone()).collect();
        Arc::new(Held { buffers, kernels, exec: exec.clone() })
    }
}

fn node_params(call: &Call, pointers: &mut [*mut std::ffi::c_void]) -> KernelNodeParams {
    KernelNodeParams {
        func: call.function,
        grid: call.grid,
        block: call.block,
        shared_bytes: call.shared_bytes,
        params: pointers.as_mut_ptr(),
        extra: null_mut(),
        kernel: null_mut(),
        context: null_mut(),
    }
}

fn same_functions(a: &[Call], b: &[Call]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.function == b.function)
}

/// Buffer arguments by order of first use: two lists with equal numbers have the same dependencies.
fn aliases(list: &[Listed<'_>], calls: &[Call]) -> Vec<u32> {
    let mut first: HashMap<u64, u32> = HashMap::new();
    let mut out = Vec::new();
    for (l, c) in list.iter().zip(calls) {
        for (a, &v) in l.args.iter().zip(c.values()) {
            if matches!(a, Arg::Buffer(_)) {
                let next = first.len() as u32;
                out.push(*first.entry(v).or_insert(next));
            }
        }
    }
    out
}

/// For each launch the earlier ones that it must come after.
fn dependencies(list: &[Listed<'_>], calls: &[Call]) -> Vec<Vec<usize>> {
    #[derive(Default)]
    struct Use {
        writer: Option<usize>,
        readers: Vec<usize>,
    }
    let mut uses: HashMap<u64, Use> = HashMap::new();
    let mut out = Vec::with_capacity(list.len());
    for (at, (l, c)) in list.iter().zip(calls).enumerate() {
        let mut before = Vec::new();
        for (i, (a, &buffer)) in l.args.iter().zip(c.values()).enumerate() {
            if !matches!(a, Arg::Buffer(_)) {
                continue;
            }
            let u = uses.entry(buffer).or_default();
            before.extend(u.writer);
            if l.writes & 1 << i != 0 {
                before.append(&mut u.readers);
                u.writer = Some(at);
            } else {
                u.readers.push(at);
            }
        }
        before.sort_unstable();
        before.dedup();
        before.retain(|&b| b != at);
        out.push(before);
    }
    out
}
