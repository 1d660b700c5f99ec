//! Which of a client's objects are of one GPU: a process has those of all GPUs that it uses in the same client.
//!
//! Rules:
//! 1. A channel hangs from a group or from a device, and a group from a device.
//! 2. Which GPU a device is of, its subdevice says.
//! 3. What nobody answers for is of no GPU, so that nothing is done to it: a call that names channels of two GPUs fails.
//! 4. On a machine with one GPU nothing of this is asked.

use std::collections::HashSet;

use crate::client::parent_of;
use crate::error::{Error, Result};
use crate::rm::{ControlFile, control};
use crate::sys::{CLASS_GROUP, CLASS_SUBDEVICE, CMD_GPU_ID, GpuId, RawHandle, is_channel};

/// The GPU that a subdevice is of; none if the driver does not say.
pub(crate) fn gpu_of(file: &dyn ControlFile, client: RawHandle, subdevice: RawHandle) -> Result<Option<u32>> {
    let mut id = GpuId::default();
    match control(file, "get gpu id", client, subdevice, CMD_GPU_ID, &mut id) {
        Ok(()) => Ok(Some(id.gpu)),
        Err(Error::Status { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The groups and channels of GPU `gpu` among a client's objects (handle and class), and the calls that it took.
///
/// # Errors
/// The kernel's.
pub(crate) fn on_gpu(
    file: &dyn ControlFile,
    client: RawHandle,
    objects: &[(RawHandle, u32)],
    gpu: u32,
) -> Result<(HashSet<RawHandle>, usize)> {
    let mut calls = 0;
    let mut parent = |object| {
        calls += 1;
        parent_of(file, client, object)
    };
    let of = |is: fn(u32) -> bool| objects.iter().filter(move |(_, class)| is(*class)).map(|(handle, _)| *handle);
    let mut asked = 0;
    // Devices of this GPU, and then what hangs from them.
    let mut here = HashSet::new();
    for subdevice in of(|class| class == CLASS_SUBDEVICE) {
        asked += 1;
        if gpu_of(file, client, subdevice)? == Some(gpu) {
            here.extend(parent(subdevice)?);
        }
    }
    for is in [|class| class == CLASS_GROUP, is_channel as fn(u32) -> bool] {
        for object in of(is) {
            if parent(object)?.is_some_and(|p| here.contains(&p)) {
                here.insert(object);
            }
        }
    }
    Ok((here, calls + asked))
}
