//! Tasks of a dataflow graph that a grid carries out.

use std::sync::Arc;

use super::{Call, Grid};
use crate::TaskError;
use crate::graph::Task;
use crate::graph::task::Impl;

/// Where a port's bytes are: `Span` of device/resident/grid.h.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Span {
    pub(crate) data: u64,
    pub(crate) bytes: u64,
}

impl Span {
    pub(crate) const NONE: Span = Span { data: 0, bytes: 0 };
}

/// A function of a grid on a device, as a task's implementation there ([`Task::resident`]).
pub struct Resident {
    // The grid does not end before what was submitted is done, or its owner ends it.
    grid: Arc<Grid>,
    function: u32,
    name: String,
}

impl Resident {
    /// Whether the grid reaches the memory with this number.
    pub(crate) fn reaches(&self, memory: Option<u64>) -> bool {
        memory.is_some() && self.grid.memory_id() == memory
    }

    /// What it is, for models of what it takes.
    pub(crate) fn content(&self) -> Vec<u8> {
        format!("resident {}", self.name).into_bytes()
    }

    /// Carries out one invocation; `spans` is where the ports' spans are, on the device. Everything that it reads is there.
    pub(crate) fn run(&self, spans: u64, items: usize) -> Result<(), TaskError> {
        let call = Call::new(self.function).args(&spans.to_ne_bytes()).range(0, items as u64);
        self.grid.wait(self.grid.submit(call)?)?;
        Ok(())
    }
}

impl Task {
    /// Implementation: a function of a resident grid, which gets each invocation instead of a launch. It is called for the
    /// items of the iteration space, a range at a time (`t->first`, `t->count`; x fastest), and finds what is at port `i`, in
    /// order of declaration (inputs, then outputs), by `fb_span(t, i)`. What is in no datablock is null.
    ///
    /// The invocation is done when all tasks are that the function made. With a grid on the CPU the ports are in the host's
    /// memory; with one on a CUDA device they are on that device, which (or another part of which) the runtime must have.
    /// Kernels of the same graph are compiled when it starts, so they must have been compiled before the grid was started
    /// ([`forebay_hal::Device::compile`], kept until then).
    pub fn resident(mut self, grid: &Arc<Grid>, function: &str) -> Self {
        let number = match grid.function(function) {
            Ok(n) => n,
            Err(e) => {
                self.wrong(e.to_string());
                return self;
            }
        };
        let grid = grid.clone();
        if grid.memory_id().is_some() {
            self.impls.push(Impl::Resident(Resident { grid, function: number, name: function.into() }));
            return self;
        }
        self.host(move |inv| {
            let mut spans = Vec::with_capacity(inv.inputs.len() + inv.outputs.len());
            for b in inv.inputs {
                spans.push(match b {
                    Some(b) => {
                        let bytes = b.host_bytes()?;
                        Span { data: bytes.as_ptr() as u64, bytes: bytes.len() as u64 }
                    }
                    None => Span::NONE,
                });
            }
            for b in inv.outputs {
                spans.push(match b {
                    Some(b) => Span { data: b.write_host(true)? as u64, bytes: b.template().bytes() as u64 },
                    None => Span::NONE,
                });
            }
            let items: usize = inv.geometry().items.iter().product();
            let args = (spans.as_ptr() as u64).to_ne_bytes();
            let call = Call::new(number).args(&args).range(0, items as u64);
            // The grid is this closure's: it does not end before the task is done, and `spans` is used no more.
            grid.wait(grid.submit(call)?)?;
            Ok(())
        })
    }
}
