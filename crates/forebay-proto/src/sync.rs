//! Atomics: the standard library's, or loom's when it explores all interleavings.

#[cfg(all(loom, test))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
