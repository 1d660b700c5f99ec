//! Which devices there are, on all platforms; opened once for the process, and only when somebody wants them.
//!
//! Once, because drivers are not to be trusted with being opened from several threads at a time: PoCL 3.1 crashes now and then
//! when two threads ask for its platform first. Only when wanted, because what is opened has a context, which takes memory of a
//! GPU that another interface may be driving.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cl3::types::{cl_device_id, cl_platform_id};
use cl3::{device, error_codes, platform};

use super::ClDevice;
use crate::fork::{self, Home};
use crate::{Device, Error, Found, Kind, PciAddress, Result};

const LIBRARY: &str = "libOpenCL.so / libOpenCL.so.1";

/// `CL_DEVICE_PCI_DOMAIN_ID_NV`, which `cl3` has no name for (`cl_nv_device_attribute_query`).
const PCI_DOMAIN_NV: u32 = 0x400A;

/// A device of some platform.
struct Listed {
    id: cl_device_id,
    pci: Option<PciAddress>,
    opened: Option<Result<Arc<dyn Device>>>,
}

// SAFETY: a root device's id is a name that lives as long as the platform, and any thread may use it (OpenCL 1.2, appendix A.2);
// the rest is `Send` by itself.
unsafe impl Send for Listed {}

/// All OpenCL devices of all platforms, but for what is at these `places`, or has been found through an earlier platform.
///
/// # Errors
/// [`Error::NoLibrary`] without an OpenCL loader, [`Error::NoDevice`] without a platform or device.
pub(crate) fn look(places: &[PciAddress]) -> Result<Found> {
    if !super::is_home() {
        return Err(Error::NoDevice { kind: Kind::OpenCl, why: fork::UNUSABLE.into() });
    }
    static ALL: OnceLock<Result<Mutex<Vec<Listed>>>> = OnceLock::new();
    let all = ALL.get_or_init(|| list().map(Mutex::new)).as_ref().map_err(Clone::clone)?;
    // For as long as it takes: see above.
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    let mut taken = places.to_vec();
    Ok(crate::opened(all.iter_mut().map(|listed| {
        if let Some(place) = listed.pci.filter(|p| taken.contains(p)) {
            let through = if places.contains(&place) { "CUDA" } else { "another platform" };
            let device = text(listed.id, device::CL_DEVICE_NAME);
            return Err(Error::Twice { kind: Kind::OpenCl, device, place, through });
        }
        let open = || Ok(Arc::new(ClDevice::open(listed.id, None)?) as Arc<dyn Device>);
        let opened = listed.opened.get_or_insert_with(open).clone()?;
        taken.extend(listed.pci);
        Ok(opened)
    })))
}

fn list() -> Result<Vec<Listed>> {
    let none = |why: &str| Error::NoDevice { kind: Kind::OpenCl, why: why.into() };
    let platforms = platform::get_platform_ids().map_err(|code| match code {
        error_codes::DLOPEN_RUNTIME_LOAD_FAILED | error_codes::DLOPEN_FUNCTION_NOT_AVAILABLE => Error::NoLibrary {
            kind: Kind::OpenCl,
            library: LIBRARY.into(),
            why: "no OpenCL loader is installed (Debian: ocl-icd-libopencl1)".into(),
        },
        code => {
            none(&format!("no platform: {} (Debian: pocl-opencl-icd runs on any CPU)", error_codes::error_text(code)))
        }
    })?;
    super::HOME.get_or_init(Home::here);
    let ids = |p: &cl_platform_id| device::get_device_ids(*p, device::CL_DEVICE_TYPE_ALL).unwrap_or_default();
    let listed = |id| Listed { id, pci: place(id), opened: None };
    let all: Vec<_> = platforms.iter().flat_map(ids).map(listed).collect();
    if all.is_empty() { Err(none("no platform has a device")) } else { Ok(all) }
}

/// A device's property that is a text; empty where it has none.
pub(super) fn text(id: cl_device_id, what: device::cl_device_info) -> String {
    device::get_device_info(id, what).map(String::from).unwrap_or_default().trim().to_owned()
}

/// Where a device is on the bus (`cl_khr_pci_bus_info`, or what NVIDIA's drivers had before).
pub(super) fn place(id: cl_device_id) -> Option<PciAddress> {
    if let Ok(told) = device::get_device_info(id, device::CL_DEVICE_PCI_BUS_INFO_KHR).map(Vec::<u8>::from)
        && let Ok([domain, bus, device, _function]) = bytemuck::try_pod_read_unaligned::<[u32; 4]>(&told)
    {
        return PciAddress::new(domain, bus, device);
    }
    let number = |what| device::get_device_info(id, what).map(u32::from);
    let (bus, slot) = (number(device::CL_DEVICE_PCI_BUS_ID_NV).ok()?, number(device::CL_DEVICE_PCI_SLOT_ID_NV).ok()?);
    // Drivers that do not tell the domain are on machines that have one.
    let told = device::get_device_info(id, PCI_DOMAIN_NV).map(Vec::<u8>::from).unwrap_or_default();
    let domain = bytemuck::try_pod_read_unaligned::<u32>(&told).unwrap_or(0);
    // The slot's lowest three bits are the function.
    PciAddress::new(domain, bus, slot >> 3)
}
