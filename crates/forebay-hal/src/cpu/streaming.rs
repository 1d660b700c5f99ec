//! Copies by the processor that bypass its caches: for memory that it maps and does not cache (a device's, through the
//! aperture), and for copies too large to be of use in a cache.
//!
//! The widest instructions that this processor has are chosen at run time. Loads are the streaming kind, too: from
//! write-combined memory an ordinary load fetches a few bytes per bus transaction, a streaming one a whole line.

use std::sync::OnceLock;

/// Bytes that one instruction moves; 0 without streaming instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Width {
    /// Ordinary copies.
    None = 0,
    /// SSE2 (loads: SSE4.1).
    W16 = 16,
    /// AVX2.
    W32 = 32,
    /// AVX-512: a cache line at a time, which a write-combining buffer sends as one transaction.
    W64 = 64,
}

impl Width {
    /// The widest of this processor.
    pub fn widest() -> Width {
        static WIDEST: OnceLock<Width> = OnceLock::new();
        *WIDEST.get_or_init(|| Width::available().last().copied().unwrap_or(Width::None))
    }

    /// All of this processor, the narrowest first.
    pub fn available() -> Vec<Width> {
        let mut all = vec![Width::None];
        #[cfg(target_arch = "x86_64")]
        {
            let has = [
                (is_x86_feature_detected!("sse4.1"), Width::W16),
                (is_x86_feature_detected!("avx2"), Width::W32),
                (is_x86_feature_detected!("avx512f"), Width::W64),
            ];
            all.extend(has.into_iter().filter(|h| h.0).map(|h| h.1));
        }
        all
    }
}

/// Copies with streaming stores to `dst`, and a fence behind them: later stores come after these, in the order in which
/// any observer sees them.
///
/// # Safety
/// `src` is valid for reading and `dst` for writing `bytes` bytes; they do not overlap.
pub unsafe fn store(width: Width, src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: by the contract; the width is one of this processor's, since there is no other way to get one than
    // `Width::available` and constants, which `clamp` lowers.
    unsafe { copy(width.min(Width::widest()), src, dst, bytes) }
}

/// Bytes of a line, which is what one trip to memory that is not cached brings.
const LINE: usize = 64;

/// Copies with streaming loads from `src`, after a fence: what is loaded is not older than the call. Lines are loaded whole,
/// and what lies beside the range dropped: ordinary loads would bring the ends a few bytes at a time, one trip after another.
///
/// # Safety
/// All lines (aligned 64 bytes) in which `src` and the `bytes` bytes from there on lie are valid for reading, and `dst` is for
/// writing `bytes` bytes; they do not overlap.
pub unsafe fn load(width: Width, src: *const u8, dst: *mut u8, bytes: usize) {
    #[repr(align(64))]
    struct Line([u8; LINE]);
    let width = width.min(Width::widest());
    let step = width as usize;
    if step == 0 || bytes == 0 {
        // SAFETY: by the contract.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
        return;
    }
    let skip = src as usize % LINE;
    let head = if skip == 0 { 0 } else { (LINE - skip).min(bytes) };
    let (body, tail) = ((bytes - head) / LINE, (bytes - head) % LINE);
    let (mut first, mut last) = (Line([0; LINE]), Line([0; LINE]));
    // SAFETY: each line that is loaded has a byte of the range in it; head, body and tail are the range. Both ends are
    // stored after all loads have begun, so that these are under way together.
    unsafe {
        fence(width);
        if head > 0 {
            lines(width, src.sub(skip), first.0.as_mut_ptr(), LINE / step, false);
        }
        lines(width, src.add(head), dst.add(head), body * (LINE / step), false);
        let at = head + body * LINE;
        if tail > 0 {
            lines(width, src.add(at), last.0.as_mut_ptr(), LINE / step, false);
        }
        std::ptr::copy_nonoverlapping(first.0.as_ptr().add(skip), dst, head);
        std::ptr::copy_nonoverlapping(last.0.as_ptr(), dst.add(at), tail);
    }
}

/// Whether [`store_line`] stores a line in one transaction.
pub fn lines_are_whole() -> bool {
    cfg!(target_arch = "x86_64") && Width::widest() == Width::W64
}

/// Stores one line of 64 bytes so that whoever sees its last eight bytes sees all of it: in one transaction where the
/// processor can, else the last eight bytes behind the others. A fence is behind it.
///
/// # Safety
/// `dst` is valid for writing 64 bytes, and aligned to 64.
pub unsafe fn store_line(line: &[u64; 8], dst: *mut u64) {
    let width = Width::widest();
    #[cfg(target_arch = "x86_64")]
    if width == Width::W64 {
        // SAFETY: the processor has the width; by the contract.
        unsafe {
            whole_line(line, dst);
            std::arch::x86_64::_mm_sfence();
        }
        return;
    }
    // SAFETY: by the contract.
    unsafe {
        (0..7).for_each(|i| dst.add(i).write_volatile(line[i]));
        fence(width.max(Width::W16));
        dst.add(7).write_volatile(line[7]);
        fence(width.max(Width::W16));
    }
}

/// # Safety
/// As [`store_line`], on a processor with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn whole_line(line: &[u64; 8], dst: *mut u64) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    // SAFETY: by the contract.
    unsafe { _mm512_stream_si512(dst.cast(), _mm512_loadu_si512(line.as_ptr().cast())) };
}

/// Ordinary instructions up to where `dst` is aligned to the width and from the last whole line on.
///
/// # Safety
/// As [`store`], and this processor has the width.
unsafe fn copy(width: Width, src: *const u8, dst: *mut u8, bytes: usize) {
    let step = width as usize;
    if step == 0 || bytes < step {
        // SAFETY: by the contract.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
        fence(width);
        return;
    }
    let head = (dst as usize).wrapping_neg() % step;
    let body = (bytes - head) / step * step;
    // SAFETY: head + body ≤ bytes; the middle call starts at an aligned address.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        lines(width, src.add(head), dst.add(head), body / step, true);
        let at = head + body;
        std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), bytes - at);
        fence(width);
    }
}

#[cfg(target_arch = "x86_64")]
fn fence(width: Width) {
    if width != Width::None {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { std::arch::x86_64::_mm_mfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fence(_: Width) {}

/// What was stored before to memory that collects stores into lines is there before what is stored after.
pub fn fence_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Loads and stores `n` times, in groups. A load whose address is that of a store just before it but for a multiple of 4 KiB
/// waits for that store, as if they were of the same memory (with the ends 48 or 80 bytes apart in their pages a copy took
/// up to 2.6 times as long); the loads of a group are all before its stores.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn groups<T: Copy>(n: usize, load: impl Fn(usize) -> T, store: impl Fn(usize, T)) {
    const GROUP: usize = 4;
    let whole = n - n % GROUP;
    for i in (0..whole).step_by(GROUP) {
        let all: [T; GROUP] = std::array::from_fn(|k| load(i + k));
        all.into_iter().enumerate().for_each(|(k, v)| store(i + k, v));
    }
    (whole..n).for_each(|i| store(i, load(i)));
}

/// # Safety
/// `n` lines of the width are valid on both sides; the side that streams is aligned to it; the processor has it.
#[cfg(target_arch = "x86_64")]
unsafe fn lines(width: Width, src: *const u8, dst: *mut u8, n: usize, storing: bool) {
    use std::arch::x86_64::*;
    macro_rules! way {
        ($name:ident, $feature:literal, $ty:ty, $loadu:ident, $stream_load:ident, $storeu:ident, $stream:ident) => {{
            #[target_feature(enable = $feature)]
            unsafe fn $name(src: *const u8, dst: *mut u8, n: usize, storing: bool) {
                let (s, d) = (src.cast::<$ty>(), dst.cast::<$ty>());
                // SAFETY: by the contract of `lines`.
                unsafe {
                    if storing {
                        groups(n, |i| $loadu(s.add(i).cast()), |i, v| $stream(d.add(i).cast(), v));
                    } else {
                        groups(n, |i| $stream_load(s.add(i).cast_mut().cast()), |i, v| $storeu(d.add(i).cast(), v));
                    }
                }
            }
            // SAFETY: by the contract of `lines`.
            unsafe { $name(src, dst, n, storing) }
        }};
    }
    match width {
        Width::None => {}
        Width::W16 => {
            way!(sse, "sse4.1", __m128i, _mm_loadu_si128, _mm_stream_load_si128, _mm_storeu_si128, _mm_stream_si128)
        }
        Width::W32 => {
            way!(
                avx,
                "avx2",
                __m256i,
                _mm256_loadu_si256,
                _mm256_stream_load_si256,
                _mm256_storeu_si256,
                _mm256_stream_si256
            )
        }
        Width::W64 => {
            way!(
                avx512,
                "avx512f",
                __m512i,
                _mm512_loadu_si512,
                _mm512_stream_load_si512,
                _mm512_storeu_si512,
                _mm512_stream_si512
            )
        }
    }
}

/// # Safety
/// Never called: no width but `None` exists.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn lines(_: Width, src: *const u8, dst: *mut u8, n: usize, _: bool) {
    // SAFETY: by the contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, n) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_stored_whole() {
        #[repr(align(64))]
        struct Line([u64; 8]);
        let (mut to, from) = (Line([0; 8]), [1, 2, 3, 4, 5, 6, 7, 8]);
        // SAFETY: a line of its own.
        unsafe { store_line(&from, to.0.as_mut_ptr()) };
        assert_eq!(to.0, from);
    }

    #[test]
    fn every_width_copies_exactly_its_range_at_any_offset() {
        #[repr(align(64))]
        struct Lines([u8; 5056]);
        let mut all = Lines([0; 5056]);
        let from = &mut all.0;
        (0u32..).zip(from.iter_mut()).for_each(|(i, b)| *b = (i.wrapping_mul(2_654_435_761) >> 24) as u8);
        let mut seed = 1u64;
        let mut random = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        for width in Width::available() {
            for round in 0..2000 {
                let (s, d) = (random(130), random(130));
                let n = if round % 2 == 0 { random(200) } else { random(4600) };
                for copy in [store, load] {
                    let mut to = vec![0xEEu8; 5000];
                    // SAFETY: both ranges lie within their arrays, and so do the lines of the first.
                    unsafe { copy(width, from.as_ptr().add(s), to.as_mut_ptr().add(d), n) };
                    assert!(to[d..d + n] == from[s..s + n], "{width:?}: {n} B from {s} to {d}");
                    let outside = to[..d].iter().chain(&to[d + n..]);
                    assert!(outside.into_iter().all(|b| *b == 0xEE), "{width:?}: {n} B from {s} to {d}: more written");
                }
            }
        }
    }
}
