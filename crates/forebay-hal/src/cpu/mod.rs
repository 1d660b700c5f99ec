//! The host's processors as a device: one work-stealing pool, kernels split over the iteration space.

mod device;
mod fair;
mod helpers;
mod late;
mod parfor;
mod pool;
mod sleep;
mod spare;
pub mod streaming;

pub use device::{CpuDevice, HostMemory, run_kernel};
pub(crate) use device::{check_range, compile, host_range};
pub use fair::Turn;
pub use helpers::Helpers;
pub use pool::{IdleHook, Job, Pool, UNKNOWN_NS, Worker, about_to_block, on_worker, worker_index};
pub use spare::{AllBlock, Blocked, blocks};
