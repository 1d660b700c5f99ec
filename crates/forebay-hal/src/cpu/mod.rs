//! The host's processors as a device: one work-stealing pool, kernels split over the iteration space.

mod device;
mod parfor;
mod pool;

pub use device::{CpuDevice, HostMemory};
pub(crate) use device::{check_range, compile, host_range, run_kernel};
pub use pool::{Job, Pool, Worker};
