//! A client of our own: through it other processes' channels are suspended and resumed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, GPU_IS_LOST, Result};
use crate::rm::{ControlFile, Rm, alloc, control};
use crate::several;
use crate::sys::{
    CLASS_CLIENT, CLASS_DEVICE, CLASS_SUBDEVICE, CMD_DISABLE_CHANNELS, CMD_GPU_TIME, CMD_HANDLE_INFO, CMD_ID_INFO,
    Card, DeviceAlloc, DisableChannels, FIRST_OBJECT, Free, GpuTime, HandleInfo, INFO_CLASS, INFO_PARENT, IdInfo,
    MAX_CHANNELS, RawHandle, SERIES, SubdeviceAlloc,
};
use crate::target::Handle;

/// A client with a device and a subdevice of one GPU. Dropping it frees them.
pub struct Client {
    rm: Arc<dyn Rm>,
    file: Box<dyn ControlFile>,
    handle: RawHandle,
    device: RawHandle,
    subdevice: RawHandle,
    card: Card,
    /// Whether the machine has more GPUs than this one.
    several: bool,
    /// Objects named so far, beyond those above.
    named: AtomicU32,
    /// What the driver said when the GPU was not there any more.
    lost: OnceLock<String>,
    /// Who made it.
    process: u32,
}

impl Client {
    /// Opens GPU number `gpu` (of `/dev/nvidiaN`) after a self-test that only reads.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::UnknownDriver`], or what the driver refused.
    pub fn open(rm: Arc<dyn Rm>, gpu: u32) -> Result<Client> {
        let found = rm.driver_version()?;
        let series = found.split('.').next().and_then(|s| s.parse::<u32>().ok());
        if !series.is_some_and(|s| SERIES.contains(&s)) {
            return Err(Error::UnknownDriver { found, known: SERIES });
        }
        let file = rm.open(gpu)?;
        let cards = file.cards().map_err(|why| Error::Call { call: "card info", why })?;
        let none = || Error::NoDriver {
            path: format!("/dev/nvidia{gpu}"),
            why: std::io::Error::new(std::io::ErrorKind::NotFound, "the driver lists no such card"),
        };
        let several = cards.len() > 1;
        let card = cards.into_iter().find(|c| c.minor == gpu).ok_or_else(none)?;
        let mut nothing = [0u8; 0];
        let handle = alloc(&*file, "allocate client", [0; 3], CLASS_CLIENT, &mut nothing)?;
        // From here on dropping the client frees what it has.
        let (named, lost) = (AtomicU32::new(0), OnceLock::new());
        let process = std::process::id();
        let mut client = Client { rm, file, handle, device: 0, subdevice: 0, card, several, named, lost, process };
        let mut id = IdInfo { gpu: client.card.gpu, ..IdInfo::default() };
        control(&*client.file, "get id info", handle, handle, CMD_ID_INFO, &mut id)?;
        let mut params = DeviceAlloc { device: id.device, client_share: handle, ..DeviceAlloc::default() };
        let wanted = [handle, handle, FIRST_OBJECT + 1];
        let device = alloc(&*client.file, "allocate device", wanted, CLASS_DEVICE, &mut params)?;
        client.device = device;
        let wanted = [handle, device, FIRST_OBJECT + 2];
        let mut params = SubdeviceAlloc::default();
        client.subdevice = alloc(&*client.file, "allocate subdevice", wanted, CLASS_SUBDEVICE, &mut params)?;
        // The query that discovery stands on must say of our own objects what we know of them.
        for (object, class) in [(device, CLASS_DEVICE), (client.subdevice, CLASS_SUBDEVICE)] {
            if class_of(&*client.file, handle, object)? != Some(class) {
                return Err(Error::UnknownDriver { found, known: SERIES });
            }
        }
        Ok(client)
    }

    /// The GPU's entry in the driver's list.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// A command to an object of this client. That the GPU is not there any more is remembered.
    ///
    /// # Errors
    /// What the driver refused.
    pub(crate) fn control<P: bytemuck::Pod>(
        &self,
        name: &'static str,
        object: RawHandle,
        cmd: u32,
        params: &mut P,
    ) -> Result<()> {
        let done = control(&*self.file, name, self.handle, object, cmd, params);
        if let Err(e) = &done
            && e.is_lost()
        {
            // The first is as good as any.
            let _ = self.lost.set(e.to_string());
        }
        done
    }

    /// What the driver says if the GPU is not there any more ([`Error::is_lost`]): it said so before, or says so of its clock now.
    pub fn lost(&self) -> Option<String> {
        if self.lost.get().is_none() {
            // Whatever else goes wrong with that is no answer to this.
            let _ = self.now_ns();
        }
        self.lost.get().cloned()
    }

    /// The GPU's clock, ns.
    ///
    /// # Errors
    /// What the driver refused.
    pub fn now_ns(&self) -> Result<u64> {
        let mut t = GpuTime::default();
        self.control("get time", self.subdevice, CMD_GPU_TIME, &mut t)?;
        Ok(t.ns)
    }

    /// The GPU, where the machine has others: then not everything that a process has is this one's. What tells whose it is
    /// is first asked of an object of our own, of which the answer is known.
    ///
    /// # Errors
    /// [`Error::WhichGpu`] where it says something else.
    pub(crate) fn among_several(&self) -> Result<Option<u32>> {
        if !self.several {
            return Ok(None);
        }
        match several::gpu_of(&*self.file, self.handle, self.subdevice)? {
            Some(gpu) if gpu == self.card.gpu => Ok(Some(gpu)),
            None if self.lost().is_some() => Err(Error::Status { call: "get gpu id", status: GPU_IS_LOST }),
            _ => Err(Error::WhichGpu { found: self.rm.driver_version()? }),
        }
    }

    /// The kernel beneath.
    pub fn rm(&self) -> &Arc<dyn Rm> {
        &self.rm
    }

    /// RM's name of this client: others that exist have lower numbers or slightly higher ones.
    pub fn handle(&self) -> RawHandle {
        self.handle
    }

    /// What RM calls a client that is made now: one is, and freed again.
    ///
    /// # Errors
    /// The driver's.
    pub fn newest(&self) -> Result<RawHandle> {
        let handle = alloc(&*self.file, "allocate client", [0; 3], CLASS_CLIENT, &mut [0u8; 0])?;
        let mut call = Free { root: handle, parent: 0, old: handle, status: 0 };
        // One that stays is freed with the file.
        let _ = self.file.free(&mut call);
        Ok(handle)
    }

    /// The file on which it was made.
    pub(crate) fn file(&self) -> &dyn ControlFile {
        &*self.file
    }

    /// Its device object.
    pub(crate) fn device(&self) -> RawHandle {
        self.device
    }

    /// Its subdevice object.
    pub(crate) fn subdevice(&self) -> RawHandle {
        self.subdevice
    }

    /// A handle that no other object of this client has (the driver refuses one that does, after 16 million).
    pub(crate) fn next_object(&self) -> RawHandle {
        FIRST_OBJECT + 0x10 + self.named.fetch_add(1, Ordering::Relaxed) % 0x00FF_FF00
    }

    /// Takes channels off the GPU (`on` false) or lets them back on; in calls of 64, all of them even if one fails.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn schedule(&self, channels: &[Handle], on: bool) -> Result<()> {
        let mut result = Ok(());
        for some in channels.chunks(MAX_CHANNELS) {
            let mut p: DisableChannels = bytemuck::Zeroable::zeroed();
            p.disable = u8::from(!on);
            p.count = some.len() as u32;
            for ((to_client, to_channel), h) in p.clients.iter_mut().zip(&mut p.channels).zip(some) {
                (*to_client, *to_channel) = (h.client, h.object);
            }
            let name = if on { "enable channels" } else { "disable channels" };
            let one = self.control(name, self.subdevice, CMD_DISABLE_CHANNELS, &mut p);
            result = result.and(one);
        }
        result
    }
}

impl Client {
    /// Lets channels on the GPU, whoever took them off: each that is still there, whatever has become of others.
    pub fn release(&self, channels: &[Handle]) {
        for some in channels.chunks(MAX_CHANNELS) {
            // One that has gone with its process spoils the call for all others in it.
            if self.schedule(some, true).is_err() {
                some.iter().for_each(|h| drop(self.schedule(std::slice::from_ref(h), true)));
            }
        }
    }
}

impl Client {
    /// Whether it is this process's. One that was forked has the file, too, and must free nothing of what the other one made.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // Freeing a client frees its objects; nothing can be done about a failure, and closing the file does the same.
        let mut call = Free { root: self.handle, parent: 0, old: self.handle, status: 0 };
        let _ = self.file.free(&mut call);
    }
}

/// The class of an object of a client on this file; none if there is no such object.
pub(crate) fn class_of(file: &dyn ControlFile, client: RawHandle, object: RawHandle) -> Result<Option<u32>> {
    info_of(file, client, object, INFO_CLASS)
}

/// What an object of a client on this file hangs from; none if there is no such object.
pub(crate) fn parent_of(file: &dyn ControlFile, client: RawHandle, object: RawHandle) -> Result<Option<RawHandle>> {
    info_of(file, client, object, INFO_PARENT)
}

fn info_of(file: &dyn ControlFile, client: RawHandle, object: RawHandle, index: u32) -> Result<Option<u32>> {
    let mut info = HandleInfo { object, index, answer: 0 };
    match control(file, "get handle info", client, client, CMD_HANDLE_INFO, &mut info) {
        Ok(()) => Ok(Some(info.answer as u32)),
        Err(Error::Status { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
