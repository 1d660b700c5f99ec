//! Forebay for C (docs/c.md).
//!
//! Rules:
//! 1. Every function that can fail returns a status, 0 for success, and leaves the reason with the calling thread
//!    ([`forebay_error`]). No panic passes into C.
//! 2. What is made with `…_new` (or comes out of a function) is given back with `…_free`, which takes NULL as well. What a
//!    function is said to take is gone, even if it fails.
//! 3. Pointers must be what the function says, or NULL, which is an error and no crash. Text is UTF-8 that ends with 0.
//! 4. Pointers to a block's bytes hold until the block is freed or pushed; those that a task's function gets hold until it
//!    returns.
//! 5. Graphs and tasks are built by one thread at a time. Running graphs and blocks may be used by several, each block by
//!    one at a time.

// A panic here would be the end of somebody else's process.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)]
#![allow(non_camel_case_types, reason = "the names are C's")]

mod block;
mod call;
mod goal;
mod graph;
mod grid;
mod run;
mod stats;
mod task;
mod transfer;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Success.
pub const FOREBAY_OK: i32 = 0;
/// An argument that cannot be: NULL, text that is no UTF-8, a number that means nothing.
pub const FOREBAY_INVALID: i32 = 1;
/// Forebay's own error; the text says which.
pub const FOREBAY_FAILED: i32 = 2;
/// Not now: the channel is full or empty, or the time is over.
pub const FOREBAY_AGAIN: i32 = 3;
/// There is nothing any more: the graph was stopped or has ended.
pub const FOREBAY_CLOSED: i32 = 4;
/// A mistake inside Forebay.
pub const FOREBAY_INTERNAL: i32 = 5;

thread_local! {
    static REASON: RefCell<CString> = RefCell::default();
}

/// Why a call did not do what it was asked for.
pub(crate) struct Failure(pub i32, pub String);

impl From<forebay::Error> for Failure {
    fn from(e: forebay::Error) -> Self {
        let code = match e {
            forebay::Error::WouldBlock { .. } | forebay::Error::StillRunning { .. } => FOREBAY_AGAIN,
            forebay::Error::NotRunning { .. } => FOREBAY_CLOSED,
            _ => FOREBAY_FAILED,
        };
        Failure(code, e.to_string())
    }
}

pub(crate) fn invalid(what: &str) -> Failure {
    Failure(FOREBAY_INVALID, what.into())
}

/// Runs a call's body; its status, and the reason for whoever asks.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body));
    let Failure(code, why) = match result {
        Ok(Ok(())) => return FOREBAY_OK,
        Ok(Err(f)) => f,
        Err(_) => Failure(FOREBAY_INTERNAL, "a mistake inside Forebay".into()),
    };
    let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no reasons any more.
    let _ = REASON.try_with(|r| *r.borrow_mut() = why);
    code
}

/// The text that C means.
///
/// # Safety
/// NULL, or text that ends with 0 and lives as long as the result is used.
pub(crate) unsafe fn text<'a>(p: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if p.is_null() {
        return Err(invalid(&format!("{what} is NULL")));
    }
    // SAFETY: not NULL; the caller's promise.
    unsafe { CStr::from_ptr(p) }.to_str().map_err(|_| invalid(&format!("{what} is no UTF-8")))
}

/// What C's pointer means.
///
/// # Safety
/// NULL, or a live value of this type that nobody else uses as long as the result is.
pub(crate) unsafe fn known<'a, T>(p: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { p.as_mut() }.ok_or_else(|| invalid(&format!("{what} is NULL")))
}

/// The same of what several threads may use.
///
/// # Safety
/// NULL, or a live value of this type.
pub(crate) unsafe fn shared<'a, T>(p: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { p.as_ref() }.ok_or_else(|| invalid(&format!("{what} is NULL")))
}

/// Takes back what was given to C.
///
/// # Safety
/// NULL, or what [`give`] wrote, once.
pub(crate) unsafe fn take<T>(p: *mut T, what: &str) -> Result<T, Failure> {
    if p.is_null() {
        return Err(invalid(&format!("{what} is NULL")));
    }
    // SAFETY: made by `give`, and the caller's promise.
    Ok(*unsafe { Box::from_raw(p) })
}

/// Takes something back for good; NULL is nothing to free.
///
/// # Safety
/// As [`take`].
pub(crate) unsafe fn free<T>(p: *mut T) {
    // What ends with it may run code of others.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { take(p, "") });
    }));
}

/// Gives something to C.
///
/// # Safety
/// `to` is NULL or may be written.
pub(crate) unsafe fn give<T>(to: *mut *mut T, what: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(invalid("the place for the result is NULL"));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(Box::into_raw(Box::new(what))) };
    Ok(())
}

/// Writes a result.
///
/// # Safety
/// `to` is NULL or may be written.
pub(crate) unsafe fn put<T>(to: *mut T, what: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(invalid("the place for the result is NULL"));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(what) };
    Ok(())
}

/// Why this thread's last call that failed did so; valid until it calls something else. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn forebay_error() -> *const c_char {
    REASON.try_with(|r| r.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Forebay's version, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn forebay_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
