//! The operations as somebody writes them who knows the device and not Forebay, in four ways.

use std::sync::Arc;
use std::time::Instant;

use forebay::Result;
use forebay::hal::{Arg as HalArg, Buffer, Device, Fence, Kernel, Kind, Listed, Queue, Recorded, cpu::HostMemory};

use super::dags::Dag;
use super::kernels::source;

pub fn host_error(e: forebay::hal::Error) -> forebay::Error {
    forebay::Error::Device(e)
}

/// What the hand-written variants share: kernels, and one device.
pub struct Bench<'a> {
    pub device: &'a Arc<dyn Device>,
    pub dag: &'a Dag,
    kernels: Vec<Kernel>,
    /// What the program writes into every item.
    pub inputs: Vec<Buffer>,
}

impl<'a> Bench<'a> {
    pub fn new(device: &'a Arc<dyn Device>, dag: &'a Dag) -> Result<Self> {
        let kind = device.info().kind;
        let kernels = dag.ops.iter().map(|o| device.compile(&source(kind, o.entry), o.entry)).collect::<Result<_, _>>();
        let inputs = (0..dag.sources).map(|i| {
            let b = device.alloc_host(4 * dag.size(i))?;
            fill(&b, i);
            Ok(b)
        });
        Ok(Bench {
            device,
            dag,
            kernels: kernels.map_err(host_error)?,
            inputs: inputs.collect::<Result<_, _>>().map_err(host_error)?,
        })
    }

    /// Bytes of a value.
    fn bytes(&self, value: usize) -> usize {
        4 * self.dag.size(value)
    }

    /// Bytes of the result.
    fn result_bytes(&self) -> usize {
        self.bytes(self.dag.sources + self.dag.ops.len() - 1)
    }

    fn args<'b>(&self, op: usize, values: &[&'b Buffer]) -> Vec<HalArg<'b>> {
        let mut args: Vec<HalArg<'b>> = values.iter().map(|b| HalArg::Buffer(b)).collect();
        args.extend(self.dag.ops[op].numbers.iter().map(|n| HalArg::U32(*n)));
        args
    }

    fn launch(&self, q: &mut dyn Queue, op: usize, values: &[&Buffer]) -> Result<()> {
        q.launch(&self.kernels[op], &self.dag.ops[op].space, &self.args(op, values)).map_err(host_error)
    }

    /// One operation with its copies: what a component that knows nothing of its neighbours must do.
    fn modular_op(&self, q: &mut dyn Queue, op: usize, host: &[Buffer], device: &[Buffer]) -> Result<()> {
        let (o, made) = (&self.dag.ops[op], self.dag.sources + op);
        for (i, &v) in o.inputs.iter().enumerate() {
            q.copy(&host[v], 0, &device[i], 0, self.bytes(v)).map_err(host_error)?;
        }
        let out = if o.in_place { &device[0] } else { &device[o.inputs.len()] };
        let mut values: Vec<&Buffer> = device[..o.inputs.len()].iter().collect();
        if !o.in_place {
            values.push(out);
        }
        self.launch(q, op, &values)?;
        q.copy(out, 0, &host[made], 0, self.bytes(made)).map_err(host_error)?;
        let f = q.fence().map_err(host_error)?;
        q.wait(f).map_err(host_error)
    }

    fn host_values(&self) -> Result<Vec<Buffer>> {
        let made = (0..self.dag.ops.len()).map(|op| self.device.alloc_host(self.bytes(self.dag.sources + op)));
        let made = made.collect::<Result<Vec<_>, _>>();
        Ok(self.staging()?.into_iter().chain(made.map_err(host_error)?).collect())
    }

    /// Host buffers for an item's inputs.
    fn staging(&self) -> Result<Vec<Buffer>> {
        (0..self.dag.sources)
            .map(|v| self.device.alloc_host(self.bytes(v)))
            .collect::<Result<_, _>>()
            .map_err(host_error)
    }

    /// What the program does before an item: writes its inputs.
    fn produce(&self, staging: &[Buffer]) {
        for (from, to) in self.inputs.iter().zip(staging) {
            if let (Some(f), Some(t)) = (from.host_ptr(), to.host_ptr()) {
                // SAFETY: both are host memory of `bytes`, different allocations, and no command uses them now: each
                // variant has waited for the item that used `to` last.
                unsafe { std::ptr::copy_nonoverlapping(f.as_ptr(), t.as_ptr(), self.bytes(0)) };
            }
        }
    }

    /// Memory on the device for every value, as somebody who knows the whole graph lays it out.
    fn device_values(&self) -> Result<Vec<Buffer>> {
        let all = 0..self.dag.sources + self.dag.ops.len();
        all.map(|v| self.device.alloc(self.bytes(v))).collect::<Result<_, _>>().map_err(host_error)
    }

    /// Memory on the device for the operands of any one operation.
    fn operands(&self) -> Result<Vec<Buffer>> {
        let most = self.dag.ops.iter().map(|o| o.inputs.len() + 1).max().unwrap_or(1);
        (0..most).map(|_| self.device.alloc(self.dag.largest())).collect::<Result<_, _>>().map_err(host_error)
    }

    pub fn single_threaded_modular(&self, items: usize) -> Result<(f64, Buffer)> {
        let mut q = self.device.queue().map_err(host_error)?;
        let (host, device) = (self.host_values()?, self.operands()?);
        let t = Instant::now();
        for _ in 0..items {
            self.produce(&host);
            for op in 0..self.dag.ops.len() {
                self.modular_op(&mut *q, op, &host, &device)?;
            }
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, host[host.len() - 1].clone()))
    }

    pub fn modular(&self, items: usize) -> Result<(f64, Buffer)> {
        const THREADS: usize = 4;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let t = Instant::now();
        let results: Vec<Result<Option<Buffer>>> = std::thread::scope(|s| {
            let work = || -> Result<Option<Buffer>> {
                let mut q = self.device.queue().map_err(host_error)?;
                let (host, device) = (self.host_values()?, self.operands()?);
                let mut any = None;
                while next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < items {
                    self.produce(&host);
                    for op in 0..self.dag.ops.len() {
                        self.modular_op(&mut *q, op, &host, &device)?;
                    }
                    any = host.last().cloned();
                }
                Ok(any)
            };
            let handles: Vec<_> = (0..THREADS).map(|_| s.spawn(work)).collect();
            handles.into_iter().map(|h| h.join().unwrap_or(Ok(None))).collect()
        });
        let seconds = t.elapsed().as_secs_f64() / items as f64;
        let all = results.into_iter().collect::<Result<Vec<_>>>()?;
        let last = all.into_iter().flatten().next();
        Ok((seconds, last.unwrap_or(HostMemory::buffer(self.result_bytes()).map_err(host_error)?)))
    }

    /// All operations of one item on a queue, between a copy in and a copy out.
    fn item(
        &self,
        q: &mut dyn Queue,
        staging: &[Buffer],
        values: &[Buffer],
        out: &Buffer,
        graph: Option<&mut Recorded>,
    ) -> Result<()> {
        self.produce(staging);
        for (i, b) in staging.iter().enumerate() {
            q.copy(b, 0, &values[i], 0, self.bytes(i)).map_err(host_error)?;
        }
        let mut at: Vec<usize> = (0..self.dag.sources).collect();
        let mut listed = Vec::new();
        for (op, o) in self.dag.ops.iter().enumerate() {
            let to = if o.in_place { at[o.inputs[0]] } else { self.dag.sources + op };
            let mut v: Vec<&Buffer> = o.inputs.iter().map(|&i| &values[at[i]]).collect();
            if !o.in_place {
                v.push(&values[to]);
            }
            match graph {
                None => self.launch(q, op, &v)?,
                Some(_) => listed.push((op, self.args(op, &v), if o.in_place { 1 } else { 1 << o.inputs.len() })),
            }
            at.push(to);
        }
        if let Some(recorded) = graph {
            let list: Vec<Listed<'_>> = listed
                .iter()
                .map(|(op, args, writes)| Listed {
                    kernel: &self.kernels[*op],
                    geometry: self.dag.ops[*op].space,
                    args,
                    writes: *writes,
                })
                .collect();
            q.launch_list(&list, recorded).map_err(host_error)?;
        }
        q.copy(&values[at[at.len() - 1]], 0, out, 0, self.result_bytes()).map_err(host_error)
    }

    pub fn hand_coded(&self, items: usize) -> Result<(f64, Buffer)> {
        let mut q = self.device.queue().map_err(host_error)?;
        let values = self.device_values()?;
        let out = self.device.alloc_host(self.result_bytes()).map_err(host_error)?;
        let staging = self.staging()?;
        let t = Instant::now();
        for _ in 0..items {
            self.item(&mut *q, &staging, &values, &out, None)?;
            let f = q.fence().map_err(host_error)?;
            q.wait(f).map_err(host_error)?;
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, out))
    }

    pub fn asynchronous(&self, items: usize) -> Result<(f64, Buffer)> {
        struct Set {
            q: Box<dyn Queue>,
            staging: Vec<Buffer>,
            values: Vec<Buffer>,
            out: Buffer,
            graph: Recorded,
            last: Option<Fence>,
        }
        let captures = self.device.info().kind == Kind::Cuda;
        let mut sets = (0..2)
            .map(|_| {
                Ok(Set {
                    q: self.device.queue().map_err(host_error)?,
                    staging: self.staging()?,
                    values: self.device_values()?,
                    out: self.device.alloc_host(self.result_bytes()).map_err(host_error)?,
                    graph: Recorded::default(),
                    last: None,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let t = Instant::now();
        for i in 0..items {
            let s = &mut sets[i % 2];
            if let Some(f) = s.last.take() {
                s.q.wait(f).map_err(host_error)?;
            }
            let graph = captures.then_some(&mut s.graph);
            self.item(&mut *s.q, &s.staging, &s.values, &s.out, graph)?;
            s.last = Some(s.q.fence().map_err(host_error)?);
        }
        for s in &mut sets {
            if let Some(f) = s.last.take() {
                s.q.wait(f).map_err(host_error)?;
            }
        }
        Ok((t.elapsed().as_secs_f64() / items as f64, sets[0].out.clone()))
    }
}

fn fill(b: &Buffer, seed: usize) {
    if let Some(p) = b.host_ptr() {
        // SAFETY: host memory of that size, used by nobody else yet.
        let v = unsafe { std::slice::from_raw_parts_mut(p.as_ptr().cast::<f32>(), b.len() / 4) };
        for (i, v) in v.iter_mut().enumerate() {
            *v = ((i.wrapping_mul(2_654_435_761) ^ seed) % 1000) as f32 / 1000.0;
        }
    }
}

pub fn as_floats(b: &Buffer) -> &[f32] {
    match b.host_ptr() {
        // SAFETY: host memory of that size; commands that write it have been waited for.
        Some(p) => unsafe { std::slice::from_raw_parts(p.as_ptr().cast(), b.len() / 4) },
        None => &[],
    }
}
