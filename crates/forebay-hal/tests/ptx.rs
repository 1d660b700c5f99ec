//! Whether the stand-in that runs PTX is as strict as it says: what else is tested on it is worth as much as that.

mod stand_in;

use std::sync::Arc;

use forebay_hal::{Arg, Device, Error, Geometry, Kind, Result, Source, discover};

/// Words of the buffer that the kernels get.
const WORDS: usize = 1024;

/// Runs a kernel `f` of a buffer, which is zero before, and a number; the buffer after it.
fn run(d: &dyn Device, text: &str, blocks: usize, threads: usize, number: u32) -> Result<Vec<u32>> {
    let text = format!("extern \"C\" __global__ void f(unsigned *p, unsigned n) {{ {text} }}");
    let kernel = d.compile(&Source::CudaCpp(text.into()), "f")?;
    let (mut q, there, here) = (d.queue()?, d.alloc(4 * WORDS)?, d.alloc_host(4 * WORDS)?);
    q.fill(&there, 0, 4 * WORDS, 0)?;
    let shape = Geometry::linear(blocks * threads).with_group(threads, 1, 1);
    q.launch(&kernel, &shape, &[Arg::Buffer(&there), Arg::U32(number)])?;
    q.copy(&there, 0, &here, 0, 4 * WORDS)?;
    let fence = q.fence()?;
    q.wait(fence)?;
    let from = here.host_ptr().unwrap().cast::<u32>();
    // SAFETY: that many words, which nobody writes any more.
    Ok((0..WORDS).map(|i| unsafe { from.add(i).read() }).collect())
}

/// The device of a test that runs itself once more with the stand-in; none before.
fn device(name: &str) -> Option<Arc<dyn Device>> {
    if !stand_in::is_here() {
        stand_in::again_as_ptx(&[name], &[]);
        return None;
    }
    Some(discover(&[Kind::Cuda]).0.remove(0))
}

#[test]
fn warps_barriers_and_shared_memory_are_there() {
    let Some(d) = device("warps_barriers_and_shared_memory_are_there") else { return };
    // The sum of all, by warps first; and lanes that have ended are waited for by nobody.
    let text = "
        __shared__ unsigned sums[8];
        unsigned v = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x >= 8) return;
        v = sums[threadIdx.x];
        for (int i = 4; i; i /= 2) v += __shfl_xor_sync(0xFF, v, i);
        __syncthreads();
        if (threadIdx.x == n) atomicAdd(p, v);
        p[1 + threadIdx.x] = __ballot_sync(0xFF, threadIdx.x & 1);";
    let got = run(&*d, text, 3, 256, 5).unwrap();
    assert_eq!((got[0], got[1], got[8]), ((0..768).sum(), 0xAA, 0xAA));
}

/// What a GPU does not do, or leaves undefined, and an x86 does.
#[test]
fn what_a_gpu_would_not_do_is_an_error() {
    let Some(mut d) = device("what_a_gpu_would_not_do_is_an_error") else { return };
    let mut fails = |text: &str| {
        let why = run(&*d, text, 1, 32, 1).unwrap_err();
        assert!(matches!(why, Error::Lost { .. }), "{why:?}");
        // SAFETY: nobody else uses the device, and nothing of it is left.
        d = unsafe { d.renew() }.unwrap();
        why.to_string()
    };
    assert!(fails("*(unsigned *)((char *)p + 2 * n) = 1;").contains("MISALIGNED"));
    assert!(fails("p[1u << 28] = 1;").contains("ILLEGAL_ADDRESS"));
    assert!(fails("__shared__ unsigned s[4]; s[threadIdx.x * n] = n; p[0] = s[0];").contains("ILLEGAL_ADDRESS"));
    // Half of the lanes wait for all, the others somewhere else.
    let apart = "if (threadIdx.x < 16) p[0] = __shfl_sync(~0u, n, 3); else __syncthreads();";
    assert!(fails(apart).contains("LAUNCH_FAILED"));
    assert!(fails("p[0] = __shfl_sync(n, n, 0);").contains("LAUNCH_FAILED"), "lanes that name others only");
}

/// One block says that something is there which the other one does not see yet, unless both order it; and what a block has seen
/// it need not see change.
#[test]
fn memory_is_as_weak_as_a_gpus() {
    let Some(d) = device("memory_is_as_weak_as_a_gpus") else { return };
    // Words of lines of their own: the flag, the answer, what was missed. `n`: who orders, a bit for each.
    let text = "
        volatile unsigned *flag = p, *answer = p + 64;
        unsigned *data = p + 128, missed = 0;
        for (unsigned i = 1; i <= 60; i++) {
            if (blockIdx.x == 0) {
                *data = i;
                if (n & 1) __threadfence();
                *flag = i;
                while (*answer != i) {}
            } else {
                while (*flag != i) {}
                if (n & 2) __threadfence();
                missed += *data != i;
                *answer = i;
            }
        }
        if (blockIdx.x == 1) p[256] = missed;";
    let missed = |n| (0..6).map(|_| run(&*d, text, 2, 1, n).unwrap()[256]).sum::<u32>();
    assert_eq!(missed(3), 0);
    assert!(missed(2) > 0, "stores are seen in order");
    assert!(missed(1) > 0, "loads see what is new");
}
