//! What the driver does by itself: its commands, with their checks.

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{ClientState, FileId, GPU_ID, GPU_ID_STEP, Mapping, Object, State, cost, log};
use crate::error;
use crate::sys::{
    BindLog, CLASS_CLIENT, CLASS_DEVICE, CLASS_EVENT_BUFFER, CLASS_GROUP, CLASS_MEMORY, CLASS_SUBDEVICE, CMD_BIND_LOG,
    CMD_DISABLE_CHANNELS, CMD_ENABLE_EVENTS, CMD_FLUSH, CMD_GET_TIMESLICE, CMD_GPU_ID, CMD_GPU_TIME, CMD_HANDLE_INFO,
    CMD_ID_INFO, CMD_IMPORT_OBJECT, CMD_SET_TIMESLICE, CMD_UPDATE_GET, Card, Control, DisableChannels, EnableEvents,
    GpuId, GpuTime, HandleInfo, IMPORT_RM_OBJECT, INFO_CLASS, INFO_PARENT, IdInfo, ImportObject, MAX_CHANNELS,
    MapMemory, RawHandle, Timeslice, UpdateGet, is_channel,
};

pub(super) fn id_of(gpu: usize) -> u32 {
    GPU_ID + gpu as u32 * GPU_ID_STEP
}

impl State {
    pub(super) fn cards(&self) -> Vec<Card> {
        let card = |g| Card { valid: 1, gpu: id_of(g), minor: g as u32, ..Card::default() };
        (0..self.gpus.len()).map(card).collect()
    }

    pub(super) fn new_client(&mut self, file: &Arc<FileId>) -> RawHandle {
        let handle = self.next_client;
        self.next_client += 1;
        self.clients.insert(handle, ClientState { file: Arc::downgrade(file), objects: BTreeMap::new() });
        handle
    }

    /// The client, if it was made on this file.
    pub(super) fn client(&mut self, file: &Arc<FileId>, handle: RawHandle) -> Result<&mut ClientState, u32> {
        match self.clients.get_mut(&handle) {
            Some(c) if std::ptr::eq(c.file.as_ptr(), Arc::as_ptr(file)) => Ok(c),
            Some(_) => Err(error::INVALID_CLIENT),
            None => {
                self.log_lines += 1;
                Err(error::INVALID_CLIENT)
            }
        }
    }

    /// Lets the GPUs run.
    pub(super) fn run(&mut self, us: u64) {
        self.gpus.iter_mut().for_each(|g| g.run(us));
        (0..self.gpus.len()).for_each(|gpu| self.drain(gpu, false));
    }

    /// A command, with the time that it takes.
    pub(super) fn timed_control(&mut self, file: &Arc<FileId>, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        let (before, after) = if self.calls_take_time { cost::of(call.cmd, params) } else { (0, 0) };
        self.run(before);
        let done = self.control(file, call, params);
        self.run(after);
        done
    }

    pub(super) fn control(&mut self, file: &Arc<FileId>, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        *self.calls.entry(call.cmd).or_default() += 1;
        let silent = self.silent_of_gpus;
        let client = self.client(file, call.client)?;
        let (class, gpu, group) = match client.objects.get(&call.object) {
            Some(o) => (o.class, o.gpu, o.group),
            None if call.object == call.client => (CLASS_CLIENT, 0, None),
            None => return Err(error::INVALID_OBJECT_HANDLE),
        };
        let of_gpu = class != CLASS_CLIENT && class != CLASS_EVENT_BUFFER;
        if of_gpu && let Some(refused) = self.gpus[gpu].refuses {
            return Err(refused);
        }
        let Some(client) = self.clients.get_mut(&call.client) else { return Err(error::INVALID_CLIENT) };
        match (call.cmd, class) {
            (CMD_HANDLE_INFO, CLASS_CLIENT) => {
                let p: &mut HandleInfo = typed(params)?;
                let (class, parent) = match client.objects.get(&p.object) {
                    Some(o) => (o.class, o.parent),
                    None if p.object == call.client => (CLASS_CLIENT, 0),
                    None => return Err(error::OBJECT_NOT_FOUND),
                };
                p.answer = match p.index {
                    INFO_CLASS => u64::from(class),
                    INFO_PARENT => u64::from(parent),
                    _ => return Err(error::INVALID_ARGUMENT),
                };
                Ok(())
            }
            (CMD_ID_INFO, CLASS_CLIENT) => {
                let p: &mut IdInfo = typed(params)?;
                let gpu = (0..self.gpus.len()).find(|g| id_of(*g) == p.gpu).ok_or(error::INVALID_ARGUMENT)?;
                p.device = gpu as u32;
                Ok(())
            }
            (CMD_GPU_ID, CLASS_SUBDEVICE) if !silent => {
                typed::<GpuId>(params)?.gpu = id_of(gpu);
                Ok(())
            }
            (CMD_IMPORT_OBJECT, CLASS_CLIENT) => {
                let p: &ImportObject = typed(params)?;
                let parent = client.objects.get(&p.parent).filter(|o| o.class == CLASS_DEVICE).map(|o| o.gpu);
                let gpu = parent.ok_or(error::INVALID_ARGUMENT)?;
                if p.kind != IMPORT_RM_OBJECT || p.fd < 0 || client.objects.contains_key(&p.object) {
                    return Err(error::INVALID_ARGUMENT);
                }
                // SAFETY: borrowed for this call; a number that is no open file is an error of the duplication.
                let file = unsafe { BorrowedFd::borrow_raw(p.fd) };
                let file = rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(|_| error::INVALID_ARGUMENT)?;
                let object =
                    Object { class: CLASS_MEMORY, parent: p.parent, gpu, group: None, memory: Some(Arc::new(file)) };
                client.objects.insert(p.object, object);
                Ok(())
            }
            (CMD_GET_TIMESLICE, CLASS_GROUP) => {
                typed::<Timeslice>(params)?.us = group.map_or(0, |g| self.gpus[gpu].slice(g));
                Ok(())
            }
            (CMD_SET_TIMESLICE, CLASS_GROUP) => {
                let us = typed::<Timeslice>(params)?.us;
                if us == 0 {
                    return Err(error::INVALID_ARGUMENT);
                }
                group.into_iter().for_each(|g| self.gpus[gpu].set_slice(g, us));
                Ok(())
            }
            (CMD_DISABLE_CHANNELS, CLASS_SUBDEVICE) => self.disable(gpu, typed(params)?),
            (CMD_GPU_TIME, CLASS_SUBDEVICE) => {
                typed::<GpuTime>(params)?.ns = self.gpus[gpu].now_us() * 1000;
                Ok(())
            }
            (CMD_BIND_LOG, CLASS_SUBDEVICE) => {
                let p: &BindLog = typed(params)?;
                self.refuse_log.map_or(Ok(()), Err)?;
                let buffer = self.buffers.get_mut(&(call.client, p.buffer)).ok_or(error::INVALID_OBJECT_HANDLE)?;
                if p.record_size != 24 || p.all_users != 1 {
                    return Err(error::INVALID_ARGUMENT);
                }
                buffer.bound = Some(gpu);
                Ok(())
            }
            (CMD_ENABLE_EVENTS | CMD_UPDATE_GET | CMD_FLUSH, CLASS_EVENT_BUFFER) => self.event_buffer(call, params),
            _ => Err(error::INVALID_COMMAND),
        }
    }

    /// What a GPU has recorded goes to its logs.
    pub(super) fn drain(&mut self, gpu: usize, asked: bool) {
        for c in self.gpus[gpu].changes() {
            self.pending[gpu].note(log::Change { pid: c.pid + self.apart, ..c });
            if self.lose > 0 {
                self.lose -= 1;
                self.pending[gpu].lose();
            }
        }
        let its = self.buffers.values_mut().filter(|b| b.bound.is_none_or(|on| on == gpu));
        self.pending[gpu].drain(self.gpus[gpu].now_us(), asked, its);
    }

    /// RM's part of a mapping: the file, and what lives as long as the processor's part. The status is in `call`.
    pub(super) fn mapping(
        &mut self,
        id: &Arc<FileId>,
        call: &mut MapMemory,
    ) -> Option<(Arc<OwnedFd>, Box<dyn Any + Send + Sync>)> {
        let file = self.client(id, call.client).and_then(|c| {
            c.objects.get(&call.memory).and_then(|o| o.memory.clone()).ok_or(error::INVALID_OBJECT_HANDLE)
        });
        let fits = |f: &Arc<OwnedFd>| {
            let size = rustix::fs::fstat(f).map_or(0, |s| s.st_size as u64);
            call.length > 0 && call.offset.checked_add(call.length).is_some_and(|end| end <= size)
        };
        let file = file.and_then(|f| if fits(&f) { Ok(f) } else { Err(error::INVALID_ARGUMENT) });
        call.status = status(file.as_ref().map(drop).map_err(|e| *e));
        let file = file.ok()?;
        let alive = Arc::new(());
        call.linear = self.next_mapping;
        self.next_mapping += 1 << 21;
        let mapping =
            Mapping { client: call.client, memory: call.memory, window: Arc::downgrade(&alive), file: file.clone() };
        self.mappings.insert(call.linear, mapping);
        Some((file, Box::new(alive)))
    }

    /// Commands of an event buffer.
    pub(super) fn event_buffer(&mut self, call: &Control, params: &mut [u8]) -> Result<(), u32> {
        let name = (call.client, call.object);
        if call.cmd == CMD_FLUSH
            && let Some(bound) = self.buffers.get(&name).map(|b| b.bound)
        {
            if let Some(refused) = bound.and_then(|gpu| self.gpus[gpu].refuses) {
                return Err(refused);
            }
            bound.into_iter().for_each(|gpu| self.drain(gpu, true));
            return Ok(());
        }
        let buffer = self.buffers.get_mut(&name).ok_or(error::INVALID_OBJECT_HANDLE)?;
        if call.cmd == CMD_ENABLE_EVENTS {
            buffer.enabled = typed::<EnableEvents>(params)?.enable != 0;
            return Ok(());
        }
        if buffer.read_up_to(typed::<UpdateGet>(params)?.records) { Ok(()) } else { Err(error::INVALID_ARGUMENT) }
    }

    /// Not bound to a file: the lists may name anybody's channels, but only of the subdevice's GPU.
    pub(super) fn disable(&mut self, gpu: usize, p: &DisableChannels) -> Result<(), u32> {
        let n = p.count as usize;
        if n > MAX_CHANNELS {
            return Err(error::INVALID_ARGUMENT);
        }
        let mut groups = Vec::new();
        for (client, channel) in p.clients.iter().zip(&p.channels).take(n) {
            let object = self.clients.get(client).and_then(|c| c.objects.get(channel));
            let object = object.filter(|o| is_channel(o.class) && o.gpu == gpu).ok_or(error::INVALID_OBJECT_HANDLE)?;
            groups.push((*client, *channel, object.group));
        }
        for (client, channel, group) in groups {
            if let Some(g) = group {
                self.gpus[gpu].enable(g, (client, channel), p.disable == 0);
            }
        }
        Ok(())
    }
}

/// Parameters of the right size, or the driver's complaint.
pub(super) fn typed<P: bytemuck::Pod>(params: &mut [u8]) -> Result<&mut P, u32> {
    bytemuck::try_from_bytes_mut(params).map_err(|_| error::INVALID_ARGUMENT)
}

/// As [`typed`], of bytes that lie anywhere.
pub(super) fn read<P: bytemuck::Pod>(params: &[u8]) -> Result<P, u32> {
    bytemuck::try_pod_read_unaligned(params).map_err(|_| error::INVALID_ARGUMENT)
}

/// As RM says it.
pub(super) fn status(r: Result<(), u32>) -> u32 {
    r.err().unwrap_or(error::OK)
}
