//! Kernels: where they come from, what they are called with, and over which iteration space they run.

use std::any::Any;
use std::sync::Arc;

use crate::{Buffer, Kind};

/// An iteration space of up to three dimensions and how it is cut into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Work-items in x, y, z; each at least 1.
    pub items: [usize; 3],
    /// Work-items per group (OpenCL work-group, CUDA block); 0 in x lets the device choose. The space is rounded up to
    /// whole groups, so kernels compare their position with the true size.
    pub group: [usize; 3],
    /// Bytes of dynamic shared (CUDA) memory per group.
    pub shared_bytes: u32,
}

/// Items of a group where nobody asks for a size: what GPUs do well with, and every one of NVIDIA's takes.
const GROUP: usize = 256;
/// Of these in x where the space has more than one dimension: a warp, which reads a row.
const GROUP_ROW: usize = 32;

impl Geometry {
    /// A space of `x` × `y` × `z` items in groups of the device's choice.
    pub const fn new(x: usize, y: usize, z: usize) -> Self {
        Geometry { items: [x, y, z], group: [0, 0, 0], shared_bytes: 0 }
    }

    /// A one-dimensional space.
    pub const fn linear(n: usize) -> Self {
        Self::new(n, 1, 1)
    }

    /// The same space in groups of the given shape.
    pub const fn with_group(mut self, x: usize, y: usize, z: usize) -> Self {
        self.group = [x, y, z];
        self
    }

    /// Total number of work-items, saturating.
    pub fn count(&self) -> usize {
        self.items.iter().fold(1usize, |a, &b| a.saturating_mul(b))
    }

    /// The groups to use: the caller's, or 256 items as 256 (1-D) or 32×8 (2-D and 3-D).
    pub fn group_or_default(&self) -> [usize; 3] {
        self.group_within(GROUP)
    }

    /// The same where a group has `most` items at most, rounded down to a power of two; the caller's are left as they are.
    pub fn group_within(&self, most: usize) -> [usize; 3] {
        let n = 1 << most.clamp(1, GROUP).ilog2();
        if self.group[0] != 0 {
            [self.group[0], self.group[1].max(1), self.group[2].max(1)]
        } else if self.items[1] <= 1 && self.items[2] <= 1 {
            [n, 1, 1]
        } else {
            [n.min(GROUP_ROW), (n / GROUP_ROW).max(1), 1]
        }
    }
}

/// One argument of a kernel, in the kernel's own order.
#[derive(Clone, Copy)]
pub enum Arg<'a> {
    /// A whole buffer.
    Buffer(&'a Buffer),
    /// A 32-bit unsigned scalar.
    U32(u32),
    /// A 32-bit signed scalar.
    I32(i32),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit unsigned scalar.
    U64(u64),
}

impl Arg<'_> {
    /// The scalar's bytes, native-endian, and their number; none for a buffer.
    pub fn scalar_bytes(&self) -> Option<([u8; 8], usize)> {
        let mut out = [0u8; 8];
        let n = match self {
            Arg::Buffer(_) => return None,
            Arg::U32(v) => put(&mut out, &v.to_ne_bytes()),
            Arg::I32(v) => put(&mut out, &v.to_ne_bytes()),
            Arg::F32(v) => put(&mut out, &v.to_ne_bytes()),
            Arg::U64(v) => put(&mut out, &v.to_ne_bytes()),
        };
        Some((out, n))
    }
}

fn put(out: &mut [u8; 8], bytes: &[u8]) -> usize {
    out[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

/// A CPU kernel: called for disjoint parts of the iteration space, from several threads at once. As on a device, it waits for nobody.
pub type CpuFn = Arc<dyn Fn(&ArgSpan<'_>) + Send + Sync>;

/// Where a kernel's code comes from.
#[derive(Clone)]
pub enum Source {
    /// OpenCL C.
    OpenClC(Arc<str>),
    /// CUDA C++ for NVRTC.
    CudaCpp(Arc<str>),
    /// The common subset of both, written with the macros of [`crate::portable`].
    Portable(Arc<str>),
    /// PTX, cubin or fatbin; the CUDA driver tells them apart.
    CudaBinary(Arc<[u8]>),
    /// A function of this process, run on the CPU's (or the simulator's) iteration space.
    Cpu(CpuFn),
}

impl Source {
    /// True when it has to be compiled by the device's compiler.
    pub fn is_text(&self) -> bool {
        matches!(self, Source::OpenClC(_) | Source::CudaCpp(_) | Source::Portable(_))
    }

    /// True when a device of this kind can use the source.
    pub fn runs_on(&self, kind: Kind) -> bool {
        matches!(
            (self, kind),
            (Source::OpenClC(_) | Source::Portable(_), Kind::OpenCl)
                | (Source::CudaCpp(_) | Source::Portable(_) | Source::CudaBinary(_), Kind::Cuda)
                | (Source::Cpu(_), Kind::Cpu | Kind::Sim)
        )
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::OpenClC(s) => write!(f, "OpenClC({} B)", s.len()),
            Source::CudaCpp(s) => write!(f, "CudaCpp({} B)", s.len()),
            Source::Portable(s) => write!(f, "Portable({} B)", s.len()),
            Source::CudaBinary(s) => write!(f, "CudaBinary({} B)", s.len()),
            Source::Cpu(_) => write!(f, "Cpu(..)"),
        }
    }
}

/// A compiled kernel; cheap to clone.
#[derive(Clone)]
pub struct Kernel {
    /// Entry point.
    pub name: Arc<str>,
    /// The backend's own handle.
    pub imp: Arc<dyn KernelImpl>,
}

/// A backend's kernel handle.
pub trait KernelImpl: Send + Sync + Any {
    /// For downcasts inside the backend.
    fn as_any(&self) -> &dyn Any;
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({})", self.name)
    }
}

/// What one call of a CPU kernel sees: its part of the iteration space, and the arguments.
///
/// The part is rows `y0..y1` of every plane for two- and three-dimensional spaces (all of x), or items `x0..x1` for
/// one-dimensional ones; no two calls of a launch share an item.
pub struct ArgSpan<'a> {
    /// The whole space.
    pub items: [usize; 3],
    /// First linear slice of this call: an item in 1-D, a row (z × height + y) otherwise.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    pub(crate) args: &'a [Arg<'a>],
}

impl<'a> ArgSpan<'a> {
    /// Builds a span; used by devices that run CPU kernels.
    pub fn new(items: [usize; 3], start: usize, end: usize, args: &'a [Arg<'a>]) -> Self {
        ArgSpan { items, start, end, args }
    }

    /// Number of slices that a space is cut into: items in 1-D, rows otherwise.
    pub fn slices(items: [usize; 3]) -> usize {
        if items[1] <= 1 && items[2] <= 1 { items[0] } else { items[1].saturating_mul(items[2]) }
    }

    /// Calls `f(x, y, z)` for each item of this part.
    pub fn for_each(&self, mut f: impl FnMut(usize, usize, usize)) {
        if ArgSpan::slices(self.items) == self.items[0] && self.items[1] <= 1 {
            (self.start..self.end).for_each(|x| f(x, 0, 0));
        } else {
            for row in self.start..self.end {
                let (y, z) = (row % self.items[1], row / self.items[1]);
                (0..self.items[0]).for_each(|x| f(x, y, z));
            }
        }
    }

    #[expect(clippy::panic, reason = "a CPU kernel's own mistake; `run_kernel` catches it and reports Error::Panic")]
    fn raw(&self, i: usize) -> (*mut u8, usize) {
        match self.args.get(i) {
            Some(Arg::Buffer(b)) => match b.host_ptr() {
                Some(p) => (p.as_ptr(), b.len()),
                None => panic!("argument {i} is not in host memory"),
            },
            _ => panic!("argument {i} is not a buffer"),
        }
    }

    /// Argument `i` as read-only elements of `T`.
    ///
    /// # Panics
    /// When argument `i` is no host buffer or is not aligned for `T`: the device reports it as [`crate::Error::Panic`].
    pub fn slice<T: bytemuck::Pod>(&self, i: usize) -> &'a [T] {
        let (p, len) = self.raw(i);
        assert!(p.align_offset(align_of::<T>()) == 0, "argument {i} is not aligned");
        // SAFETY: the buffer is alive for 'a (args borrow it), aligned (checked), `T: Pod` accepts any bytes, and the
        // queue's caller orders writers before readers (module contract).
        unsafe { std::slice::from_raw_parts(p.cast::<T>(), len / size_of::<T>()) }
    }

    /// Argument `i` as elements of `T` that this call may write.
    ///
    /// # Safety
    /// Calls of one launch run at the same time: each must write only elements that belong to its own part, and no
    /// other slice of the same buffer may be alive over the elements that it writes.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's contract, as in any data-parallel kernel")]
    pub unsafe fn slice_mut<T: bytemuck::Pod>(&self, i: usize) -> &'a mut [T] {
        let (p, len) = self.raw(i);
        assert!(p.align_offset(align_of::<T>()) == 0, "argument {i} is not aligned");
        // SAFETY: as in `slice`; exclusivity is the caller's contract above.
        unsafe { std::slice::from_raw_parts_mut(p.cast::<T>(), len / size_of::<T>()) }
    }

    /// Argument `i` as an unsigned scalar (any integer kind).
    ///
    /// # Panics
    /// When argument `i` is a buffer or a float.
    #[expect(clippy::panic, reason = "a CPU kernel's own mistake; `run_kernel` catches it and reports Error::Panic")]
    pub fn scalar(&self, i: usize) -> u64 {
        match self.args.get(i) {
            Some(Arg::U32(v)) => u64::from(*v),
            Some(Arg::I32(v)) => *v as u64,
            Some(Arg::U64(v)) => *v,
            _ => panic!("argument {i} is not an integer"),
        }
    }

    /// Argument `i` as a float.
    ///
    /// # Panics
    /// When argument `i` is anything else.
    #[expect(clippy::panic, reason = "a CPU kernel's own mistake; `run_kernel` catches it and reports Error::Panic")]
    pub fn float(&self, i: usize) -> f32 {
        match self.args.get(i) {
            Some(Arg::F32(v)) => *v,
            _ => panic!("argument {i} is not a float"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_the_callers_or_as_large_as_may_be() {
        let groups =
            |g: Geometry| [usize::MAX, 256, 255, 100, 32, 5, 1, 0].map(|most| g.group_within(most)[..2].to_vec());
        let of_line = [256, 256, 128, 64, 32, 4, 1, 1].map(|n| vec![n, 1]);
        assert_eq!(groups(Geometry::linear(10)), of_line);
        let of_plane = [[32, 8], [32, 8], [32, 4], [32, 2], [32, 1], [4, 1], [1, 1], [1, 1]].map(|g| g.to_vec());
        assert_eq!(groups(Geometry::new(10, 10, 1)), of_plane);
        assert_eq!(Geometry::linear(10).with_group(512, 0, 0).group_within(4), [512, 1, 1]);
    }
}
