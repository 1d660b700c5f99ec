//! Tasks of a dataflow graph that a grid carries out.

use std::sync::Arc;

use super::{Call, Grid};
use crate::graph::Task;

/// Where a port's bytes are: `Span` of device/resident/grid.h.
#[repr(C)]
struct Span {
    data: u64,
    bytes: u64,
}

impl Span {
    const NONE: Span = Span { data: 0, bytes: 0 };
}

impl Task {
    /// Implementation: a function of a resident grid, which gets each invocation instead of a launch. It is called for the
    /// items of the iteration space, a range at a time (`t->first`, `t->count`; x fastest), and finds what is at port `i`, in
    /// order of declaration (inputs, then outputs), by `fb_span(t, i)`. What is in no datablock is null.
    ///
    /// The invocation is done when all tasks are that the function made. The grid is one on the CPU.
    pub fn resident(mut self, grid: &Arc<Grid>, function: &str) -> Self {
        let number = match grid.function(function) {
            Ok(n) => n,
            Err(e) => {
                self.wrong(e.to_string());
                return self;
            }
        };
        if !grid.reaches_host() {
            self.wrong(
                "a resident task needs a grid on the CPU: on other devices its blocks' bytes would be elsewhere".into(),
            );
            return self;
        }
        let grid = grid.clone();
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
