//! What the stand-in has given out, for tests that want all of it back. Shared by path, as `mod.rs`, by crates with `libloading`.

/// Bytes that are allocated, on the device and for it on the host.
pub fn bytes() -> u64 {
    // SAFETY: it is loaded anyway.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("the stand-in is loaded");
    // SAFETY: the function has that type.
    unsafe { driver.get::<unsafe extern "C" fn() -> u64>(b"stand_in_bytes").expect("it tells")() }
}
