//! Templates and datablocks.

use std::ffi::{c_char, c_void};

use forebay::{Datablock, Template};

use crate::{Failure, free, give, invalid, known, put, shared, status, text};

/// A unit of data.
pub struct forebay_block(pub(crate) Datablock);

/// The template that C means: text as in a graph file.
///
/// # Safety
/// NULL, or text.
pub(crate) unsafe fn template(p: *const c_char) -> Result<Template, Failure> {
    // SAFETY: the caller's promise.
    let t: Template = unsafe { text(p, "the template")? }.parse().map_err(|why: String| invalid(&why))?;
    t.validate("the template")?;
    Ok(t)
}

/// The bytes behind a pointer.
///
/// # Safety
/// NULL, or `len` bytes that live as long as the result.
pub(crate) unsafe fn bytes<'a>(p: *const c_void, len: usize) -> Result<&'a [u8], Failure> {
    match (p.is_null(), len) {
        (true, 0) => Ok(&[]),
        (true, _) => Err(invalid("the data is NULL")),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(p.cast(), len) }),
    }
}

/// Makes a block of a template, "f32[640x480]" (an array), "u32<=1000" (at most so many elements) or "bytes<=4096", with these
/// bytes: as many as the template has, or fewer for records and bytes. With `data` NULL and `len` 0
/// a block of zeros.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_new(
    of: *const c_char,
    data: *const c_void,
    len: usize,
    block: *mut *mut forebay_block,
) -> i32 {
    status(|| {
        // SAFETY: C's promises, to the end of the call.
        let (t, data) = unsafe { (template(of)?, bytes(data, len)?) };
        let b = if data.is_empty() { Datablock::zeroed(t)? } else { Datablock::from_bytes(t, data)? };
        // SAFETY: as above.
        unsafe { give(block, forebay_block(b)) }
    })
}

/// Its bytes, copied to the host first if they are only on a device.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_data(
    block: *const forebay_block,
    data: *mut *const c_void,
    len: *mut usize,
) -> i32 {
    status(|| {
        // SAFETY: C's promises.
        let b = unsafe { shared(block, "the block")? }.0.as_bytes()?;
        // SAFETY: as above.
        unsafe {
            put(data, b.as_ptr().cast())?;
            put(len, b.len())
        }
    })
}

/// Its bytes for writing, which needs the only handle: all that fit, not only those of its elements.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_data_mut(
    block: *mut forebay_block,
    data: *mut *mut c_void,
    len: *mut usize,
) -> i32 {
    status(|| {
        // SAFETY: C's promises.
        let b = unsafe { known(block, "the block")? }.0.as_mut_bytes()?;
        // SAFETY: as above.
        unsafe {
            put(data, b.as_mut_ptr().cast())?;
            put(len, b.len())
        }
    })
}

/// How many elements it has, of records and bytes.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_records(block: *const forebay_block, n: *mut usize) -> i32 {
    status(|| {
        // SAFETY: C's promises.
        unsafe { put(n, shared(block, "the block")?.0.records()) }
    })
}

/// Sets how many elements it has, of records and bytes.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_set_records(block: *mut forebay_block, n: usize) -> i32 {
    // SAFETY: C's promises.
    status(|| Ok(unsafe { known(block, "the block")? }.0.set_records(n)?))
}

/// Mark of the first block of a stream.
pub const FOREBAY_BEGIN_STREAM: u32 = 1;
/// Mark of the last block of a stream.
pub const FOREBAY_END_STREAM: u32 = 2;
/// Mark of what the first invocation of a group made.
pub const FOREBAY_BEGIN_ITERATION: u32 = 4;
/// Mark of what the last invocation of a group made.
pub const FOREBAY_END_ITERATION: u32 = 8;

/// Its marks, which predicates go by.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_signals(block: *const forebay_block, signals: *mut u32) -> i32 {
    status(|| {
        // SAFETY: C's promises.
        unsafe { put(signals, shared(block, "the block")?.0.signals().0) }
    })
}

/// Sets its marks; tasks pass those of streams from their inputs to their outputs.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_set_signals(block: *mut forebay_block, signals: u32) -> i32 {
    status(|| {
        let all = FOREBAY_BEGIN_STREAM | FOREBAY_END_STREAM | FOREBAY_BEGIN_ITERATION | FOREBAY_END_ITERATION;
        if signals & !all != 0 {
            return Err(invalid(&format!("there are no marks {:#x}", signals & !all)));
        }
        // SAFETY: C's promises.
        unsafe { known(block, "the block")? }.0.set_signals(forebay::Signals(signals));
        Ok(())
    })
}

/// Waits until its bytes are made, wherever that is; whoever reads them waits of himself.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_wait(block: *const forebay_block) -> i32 {
    // SAFETY: C's promises.
    status(|| Ok(unsafe { shared(block, "the block")? }.0.wait()?))
}

/// Another handle to the same block, for pushing it to several places. Neither can be written then.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_share(block: *const forebay_block, other: *mut *mut forebay_block) -> i32 {
    status(|| {
        // SAFETY: C's promises.
        unsafe { give(other, forebay_block(shared(block, "the block")?.0.clone())) }
    })
}

/// Gives a block back.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_block_free(block: *mut forebay_block) {
    // SAFETY: C's promise.
    unsafe { free(block) };
}
