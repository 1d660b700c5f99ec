//! A program that has on the GPUs what one of CUDA's has, made by calls of its own.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use bytemuck::Pod;
use forebay_rm::fake::CLASS_CHANNEL;
use forebay_rm::sys::{
    Alloc, CLASS_CLIENT, CLASS_DEVICE, CLASS_GROUP, CLASS_SUBDEVICE, Card, DeviceAlloc, ESC_ALLOC, ESC_CARD_INFO,
    FIRST_OBJECT, MAGIC, MAX_CARDS, RawHandle, SubdeviceAlloc,
};
use rustix::fs::{Mode, OFlags, open};
use rustix::ioctl::opcode;

/// The program of `command`, which must have been put into a model, has a client with `groups` channel groups of
/// `channels` channels each on every GPU, as one of CUDA's. They are made before it starts, on a control file that stays
/// open, so any program will do.
pub fn objects_of_cuda(command: &mut Command, groups: u32, channels: u32) {
    // SAFETY: only system calls are made, nothing is allocated.
    unsafe { command.pre_exec(move || make(groups, channels)) };
}

fn call<T: Pod>(control: &OwnedFd, number: u8, t: &mut T) -> io::Result<()> {
    let request = opcode::read_write::<T>(MAGIC, number);
    // SAFETY: the structure is what the number says.
    let done = unsafe { libc::ioctl(control.as_raw_fd(), libc::c_ulong::from(request) as _, std::ptr::from_mut(t)) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn alloc<P: Pod>(
    control: &OwnedFd,
    [root, parent, new]: [RawHandle; 3],
    class: u32,
    params: &mut P,
) -> io::Result<u32> {
    let size = size_of::<P>() as u32;
    let address = if size == 0 { 0 } else { std::ptr::from_mut(params) as u64 };
    let mut a = Alloc { root, parent, new, class, params: address, params_size: size, status: 0 };
    call(control, ESC_ALLOC, &mut a)?;
    if a.status == 0 { Ok(a.new) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn make(groups: u32, channels: u32) -> io::Result<()> {
    // It stays open in the program.
    let control = ManuallyDrop::new(open(c"/dev/nvidiactl", OFlags::RDWR, Mode::empty())?);
    let mut cards = [Card::default(); MAX_CARDS];
    call(&control, ESC_CARD_INFO, &mut cards)?;
    let client = alloc(&control, [0; 3], CLASS_CLIENT, &mut [0u8; 0])?;
    let mut next = FIRST_OBJECT;
    let mut name = || {
        next += 1;
        next
    };
    for gpu in 0..cards.iter().filter(|c| c.valid != 0).count() as u32 {
        let mut params = DeviceAlloc { device: gpu, client_share: client, ..DeviceAlloc::default() };
        let device = alloc(&control, [client, client, name()], CLASS_DEVICE, &mut params)?;
        alloc(&control, [client, device, name()], CLASS_SUBDEVICE, &mut SubdeviceAlloc::default())?;
        for _ in 0..groups {
            let group = alloc(&control, [client, device, name()], CLASS_GROUP, &mut [0u8; 0])?;
            for _ in 0..channels {
                alloc(&control, [client, group, name()], CLASS_CHANNEL, &mut [0u8; 0])?;
            }
        }
    }
    Ok(())
}
