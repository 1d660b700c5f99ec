//! An open control file, through which everything is asked.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::driver::{read, status};
use super::{FakeRm, FileId, Load, Object, log};
use crate::error;
use crate::rm::{ControlFile, Window};
use crate::sys::{
    Alloc, CLASS_CLIENT, CLASS_DEVICE, CLASS_EVENT_BUFFER, CLASS_GROUP, CLASS_SUBDEVICE, CLASS_SYSTEM_MEMORY, Card,
    Control, DeviceAlloc, EventBufferAlloc, Free, MAP_READ_ONLY, MapMemory, MemoryAlloc, UnmapMemory, is_channel,
};

pub(super) struct FakeFile {
    pub(super) rm: FakeRm,
    pub(super) id: Arc<FileId>,
    /// Whose the groups are that are made on it.
    pub(super) pid: u32,
}

impl ControlFile for FakeFile {
    fn control(&self, call: &mut Control, params: &mut [u8]) -> io::Result<()> {
        // The kernel copies parameters in and out; unaligned ones are as good as any.
        let mut words = vec![0u64; params.len().div_ceil(8)];
        let copy = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..params.len()];
        copy.copy_from_slice(params);
        call.status = status(self.rm.lock().timed_control(&self.id, call, copy));
        params.copy_from_slice(copy);
        Ok(())
    }

    fn alloc(&self, call: &mut Alloc, params: &mut [u8]) -> io::Result<()> {
        let mut s = self.rm.lock();
        if call.class == CLASS_CLIENT {
            call.new = s.new_client(&self.id);
            call.status = error::OK;
            return Ok(());
        }
        let (class, parent, new, root) = (call.class, call.parent, call.new, call.root);
        let (mut buffer, mut group, mut made_on) = (None, None, 0);
        let refuses: Vec<Option<u32>> = s.gpus.iter().map(|g| g.refuses).collect();
        call.status = status(s.client(&self.id, root).and_then(|c| {
            let mut memory = None;
            let of_device = c.objects.get(&parent).is_some_and(|o| o.class == CLASS_DEVICE);
            let mut gpu = c.objects.get(&parent).map_or(0, |o| o.gpu);
            let fits = match class {
                CLASS_DEVICE => {
                    gpu = read::<DeviceAlloc>(params)?.device as usize;
                    parent == root && gpu < refuses.len()
                }
                CLASS_SUBDEVICE | CLASS_GROUP => of_device,
                _ if is_channel(class) => {
                    group = c.objects.get(&parent).filter(|o| o.class == CLASS_GROUP).and_then(|o| o.group);
                    group.is_some()
                }
                CLASS_SYSTEM_MEMORY => {
                    let p: MemoryAlloc = read(params)?;
                    memory = log::system_memory(p.size).ok().map(Arc::new);
                    of_device && p.size > 0 && memory.is_some()
                }
                CLASS_EVENT_BUFFER => {
                    let p: EventBufferAlloc = read(params)?;
                    let memory = |h| c.objects.get(&h).and_then(|o: &Object| o.memory.clone());
                    let on = c.objects.get(&p.subdevice).is_some_and(|o| o.class == CLASS_SUBDEVICE);
                    let both = memory(p.header_memory).zip(memory(p.record_memory));
                    // A number that is no event of this client the driver would take for an address in the kernel.
                    let harmless = p.notification == 0;
                    buffer = both.and_then(|(h, r)| log::EventBuffer::new(&p, h, r));
                    harmless && parent == root && on && buffer.is_some()
                }
                _ => false,
            };
            if !fits || c.objects.contains_key(&new) {
                return Err(error::INVALID_ARGUMENT);
            }
            if let Some(refused) = refuses[gpu].filter(|_| class != CLASS_EVENT_BUFFER) {
                return Err(refused);
            }
            c.objects.insert(new, Object { class, parent, gpu, group, memory });
            made_on = gpu;
            Ok(())
        }));
        if call.status == error::OK && class == CLASS_GROUP {
            let number = s.gpus[made_on].add(self.pid, Load::IDLE);
            let made = s.clients.get_mut(&root).and_then(|c| c.objects.get_mut(&new));
            made.into_iter().for_each(|o| o.group = Some(number));
        }
        if let Some(g) = group.filter(|_| call.status == error::OK) {
            s.gpus[made_on].add_channel(g);
        }
        if let Some(b) = buffer.filter(|_| call.status == error::OK) {
            s.buffers.insert((root, new), b);
        }
        Ok(())
    }

    fn free(&self, call: &mut Free) -> io::Result<()> {
        let mut s = self.rm.lock();
        let (root, old) = (call.root, call.old);
        let mut gone = Vec::new();
        call.status = status(s.client(&self.id, root).map(|c| {
            // With an object what hangs from it goes, as in a channel group that of its channels.
            let mut next = vec![old];
            while let Some(handle) = next.pop() {
                next.extend(c.objects.iter().filter(|(_, o)| o.parent == handle).map(|(h, _)| *h));
                gone.extend(c.objects.remove(&handle).filter(|o| o.class == CLASS_GROUP));
            }
        }));
        gone.iter().for_each(|o| o.group.into_iter().for_each(|g| s.gpus[o.gpu].remove(g)));
        let orphans = s.mappings.values().filter(|m| m.client == root && (m.memory == old || root == old)).count();
        s.wrong_order += orphans;
        if call.status == error::OK {
            s.buffers.retain(|(client, buffer), _| *client != root || (*buffer != old && old != root));
        }
        if call.status == error::OK && root == old {
            s.clients.remove(&root);
        }
        Ok(())
    }

    fn map_system(&self, call: &mut MapMemory) -> io::Result<Option<Window>> {
        if call.flags & MAP_READ_ONLY == 0 {
            call.status = error::INVALID_ARGUMENT;
            return Ok(None);
        }
        let Some((file, with)) = self.rm.lock().mapping(&self.id, call) else { return Ok(None) };
        Window::map_read_only(file.as_fd(), call.length as usize, Some(with)).map(Some)
    }

    fn map(&self, gpu: u32, call: &mut MapMemory) -> io::Result<Option<Window>> {
        let mut s = self.rm.lock();
        if let Some(refused) = s.refuse_mapping.filter(|_| gpu == 0) {
            call.status = refused;
            return Ok(None);
        }
        if let Some(refused) = s.gpus.get(gpu as usize).and_then(|g| g.refuses) {
            call.status = refused;
            return Ok(None);
        }
        let Some((file, with)) = s.mapping(&self.id, call) else { return Ok(None) };
        Window::map(file.as_fd(), call.offset, call.length as usize, Some(with)).map(Some)
    }

    fn unmap(&self, call: &mut UnmapMemory) -> io::Result<()> {
        let mut s = self.rm.lock();
        let ours = s.client(&self.id, call.client).map(drop);
        let there = s.mappings.get(&call.linear).is_some_and(|m| (m.client, m.memory) == (call.client, call.memory));
        call.status = status(ours.and(if there { Ok(()) } else { Err(error::INVALID_ARGUMENT) }));
        if call.status == error::OK
            && let Some(m) = s.mappings.remove(&call.linear)
        {
            s.wrong_order += usize::from(m.window.strong_count() > 0);
        }
        Ok(())
    }

    fn cards(&self) -> io::Result<Vec<Card>> {
        Ok(self.rm.lock().cards())
    }
}
