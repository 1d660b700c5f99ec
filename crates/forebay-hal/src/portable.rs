//! The common subset of OpenCL C and CUDA C++ in which one kernel text serves both.
//!
//! A portable kernel is plain C with these names: `KERNEL void f(GLOBAL const float *a, uint n)`, `gid_x()`, `gid_y()`,
//! `gid_z()` (position in the iteration space), `lid_x()` and `lsize_x()` (position in and size of the group), `LOCAL`
//! (group-shared arrays), `BARRIER()`, `DEVICE` (helper functions), and the types `uint`, `uchar`, `ushort`, `ulong`.
//! Neither side contracts `a*b+c` into a fused operation, so integer results are equal on all devices and float results
//! differ only in library functions and division.

/// Compiler options for OpenCL programs; part of the cache key.
pub const OPENCL_OPTIONS: &str = "-cl-std=CL1.2 -cl-kernel-arg-info";

/// Compiler options for NVRTC, beside the architecture; part of the cache key. CUDA C++ that a program brings itself is
/// compiled with these, as NVIDIA's compilers do it by themselves.
pub const NVRTC_OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];
/// The same for portable kernels.
pub const NVRTC_OPTIONS_HERE: [&str; 3] = ["--std=c++17", "-default-device", "--fmad=false"];

/// What a portable kernel begins with under OpenCL.
pub const OPENCL_PRELUDE: &str = "\
#pragma OPENCL FP_CONTRACT OFF
#define KERNEL __kernel
#define GLOBAL __global
#define LOCAL __local
#define DEVICE
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define gid_x() ((uint)get_global_id(0))
#define gid_y() ((uint)get_global_id(1))
#define gid_z() ((uint)get_global_id(2))
#define lid_x() ((uint)get_local_id(0))
#define lsize_x() ((uint)get_local_size(0))
#define ATOMIC_INC(p) atomic_inc(p)
#line 1
";

/// What a portable kernel begins with under CUDA.
pub const CUDA_PRELUDE: &str = "\
#define KERNEL extern \"C\" __global__
#define GLOBAL
#define LOCAL __shared__
#define DEVICE static __device__
#define BARRIER() __syncthreads()
typedef unsigned int uint; typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned long long ulong;
#define gid_x() (blockIdx.x * blockDim.x + threadIdx.x)
#define gid_y() (blockIdx.y * blockDim.y + threadIdx.y)
#define gid_z() (blockIdx.z * blockDim.z + threadIdx.z)
#define lid_x() (threadIdx.x)
#define lsize_x() (blockDim.x)
#define ATOMIC_INC(p) atomicAdd((p), 1u)
#line 1
";
