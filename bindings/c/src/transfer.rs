//! Moving data by hand: engines, memory and streams (docs/transfer.md).

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use forebay::hal::Buffer;
use forebay::transfer::{Bound, Budget, Direction, Engine, Host, InFlight, Pinned, Range, Scheduling};

use crate::run::wanted;
use crate::{FOREBAY_FAILED, Failure, free, give, invalid, known, put, shared, status, take};

/// What knows how data gets to one device fastest. Any thread's.
pub struct forebay_engine(Arc<Engine>);

/// Memory of a device. Any thread's.
pub struct forebay_memory(Buffer);

/// Host memory from which a device copies fastest, zeroed at first. One thread's at a time.
pub struct forebay_pinned(Pinned);

/// Transfers in order, of one thread at a time; a real-time one is only for the thread that made it.
pub struct forebay_stream(Bound);

/// A transfer under way.
pub struct forebay_in_flight(InFlight);

/// One of several transfers: places on both sides.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct forebay_range {
    /// Offset in the host's memory.
    pub host: u64,
    /// Offset in the device's.
    pub device: u64,
    /// Length.
    pub bytes: u64,
}

/// What a real-time stream may take from others, in microseconds.
#[repr(C)]
pub struct forebay_budget {
    /// Time in transfers, with real-time priority, within a period.
    pub run: u64,
    /// The period.
    pub period: u64,
    /// Longest time that one wait spins.
    pub spin: u64,
}

/// What a real-time stream got of what it asked for.
#[repr(C)]
pub struct forebay_protection {
    /// Its thread's priority under SCHED_FIFO (or SCHED_RR, if it had that and no less; 100 with SCHED_DEADLINE); 0 when the system
    /// refused, and it is an ordinary thread.
    pub fifo: i32,
    /// The nice value of an ordinary thread.
    pub nice: i32,
    /// Not 0: what it stages data in is locked into memory.
    pub locked: i32,
    /// Periods in which it used up its budget, and went on with ordinary priority.
    pub overruns: u64,
}

/// Opens the engine of a device: the first one of a kind ("cuda", "opencl", "cpu"), one of several ("cuda:1"), or with NULL the
/// first one that there is, in this order. The first time on a machine it measures all ways of moving data, for two seconds at most.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_engine_new(device: *const c_char, engine: *mut *mut forebay_engine) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if engine.is_null() {
            return Err(invalid("the place for the engine is NULL"));
        }
        give(engine, forebay_engine(Engine::of(wanted(device)?)?))
    })
}

/// Lets go of an engine; its memory and its streams stay good.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_engine_free(engine: *mut forebay_engine) {
    // SAFETY: C's promise.
    unsafe { free(engine) }
}

/// What a transfer is expected to take when nothing else is in flight, in nanoseconds: as a rule, and when it is as slow as
/// the slowest that was measured. `to_host`: not 0 for from the device; `pinned`: not 0 for memory of `forebay_pinned_new`. Either place may
/// be NULL.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_engine_cost(
    engine: *const forebay_engine,
    to_host: i32,
    bytes: u64,
    pinned: i32,
    usual: *mut u64,
    slow: *mut u64,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let direction = if to_host != 0 { Direction::ToHost } else { Direction::ToDevice };
        let cost = shared(engine, "the engine")?.0.cost(direction, bytes, host(pinned != 0));
        if !usual.is_null() {
            put(usual, cost.median)?;
        }
        if !slow.is_null() {
            put(slow, cost.tail)?;
        }
        Ok(())
    })
}

fn host(pinned: bool) -> Host {
    if pinned { Host::Pinned } else { Host::Pageable }
}

/// Allocates memory of the device, which every way serves: the processor's own stores included, where the device has that.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_memory_new(
    engine: *const forebay_engine,
    bytes: usize,
    memory: *mut *mut forebay_memory,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if memory.is_null() {
            return Err(invalid("the place for the memory is NULL"));
        }
        give(memory, forebay_memory(shared(engine, "the engine")?.0.memory(bytes)?))
    })
}

/// Frees memory, once no transfer uses it any more.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_memory_free(memory: *mut forebay_memory) {
    // SAFETY: C's promise.
    unsafe { free(memory) }
}

/// Its address on the device, for kernels of your own: with CUDA a CUdeviceptr of the device's primary context, which the
/// runtime API uses as well. 0 where memory has none (OpenCL).
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_memory_address(memory: *const forebay_memory) -> u64 {
    // SAFETY: C's promise.
    unsafe { memory.as_ref() }.and_then(|m| m.0.address()).unwrap_or(0)
}

/// Allocates host memory from which the device copies fastest.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pinned_new(
    engine: *const forebay_engine,
    bytes: usize,
    pinned: *mut *mut forebay_pinned,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if pinned.is_null() {
            return Err(invalid("the place for the memory is NULL"));
        }
        give(pinned, forebay_pinned(shared(engine, "the engine")?.0.pinned(bytes)?))
    })
}

/// Where it is; NULL of NULL.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pinned_bytes(pinned: *const forebay_pinned) -> *mut c_void {
    // SAFETY: C's promise.
    unsafe { pinned.as_ref() }.map_or(std::ptr::null_mut(), |p| p.0.address().cast())
}

/// Touches every page and asks the system to keep it in memory, for as long as it lives; FOREBAY_FAILED where it refuses.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pinned_lock(pinned: *mut forebay_pinned) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        match known(pinned, "the memory")?.0.lock() {
            true => Ok(()),
            false => Err(Failure(FOREBAY_FAILED, "the system does not keep so much in memory (ulimit -l)".into())),
        }
    })
}

/// Frees it.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pinned_free(pinned: *mut forebay_pinned) {
    // SAFETY: C's promise.
    unsafe { free(pinned) }
}

/// Makes a stream.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stream_new(engine: *const forebay_engine, stream: *mut *mut forebay_stream) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if stream.is_null() {
            return Err(invalid("the place for the stream is NULL"));
        }
        give(stream, forebay_stream(Bound::ordinary(&shared(engine, "the engine")?.0)?))
    })
}

/// Makes a real-time stream of the calling thread, which gets real-time priority or the best that the system allows
/// (`forebay_stream_protection`) until the stream is freed. `budget` NULL: half of one processor, 50 ms of 100, spinning a
/// millisecond at a time.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stream_new_real_time(
    engine: *const forebay_engine,
    budget: *const forebay_budget,
    stream: *mut *mut forebay_stream,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if stream.is_null() {
            return Err(invalid("the place for the stream is NULL"));
        }
        let budget = budget.as_ref().map_or_else(Budget::default, |b| Budget {
            run: Duration::from_micros(b.run),
            period: Duration::from_micros(b.period),
            spin: Duration::from_micros(b.spin),
        });
        give(stream, forebay_stream(Bound::real_time(&shared(engine, "the engine")?.0, budget)?))
    })
}

/// What a real-time stream got of what it asked for.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stream_protection(
    stream: *const forebay_stream,
    protection: *mut forebay_protection,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let got = shared(stream, "the stream")?.0.protection();
        let (got, overruns) = got.ok_or_else(|| invalid("this is no real-time stream"))?;
        let (fifo, nice) = match got.scheduling {
            Scheduling::Fifo(p) | Scheduling::RoundRobin(p) => (p, 0),
            // Before all priorities, of which 99 is the highest.
            Scheduling::Deadline => (100, 0),
            Scheduling::Nice(n) => (0, n),
        };
        put(protection, forebay_protection { fifo, nice, locked: got.locked.into(), overruns })
    })
}

/// From now on transfers of the stream are to arrive within so many nanoseconds: they go by the way whose slow copies are
/// fastest. 0 goes back to the way that is fastest as a rule.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stream_set_deadline(stream: *mut forebay_stream, deadline: u64) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let within = (deadline > 0).then(|| Duration::from_nanos(deadline));
        known(stream, "the stream")?.0.stream()?.set_deadline(within);
        Ok(())
    })
}

/// Ends a stream after what it began. A real-time one gives its thread's priority back, whoever frees it; where a thread has
/// several, the last one does.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stream_free(stream: *mut forebay_stream) {
    // SAFETY: C's promise.
    unsafe { free(stream) }
}

/// # Safety
/// As the rules say; `at` has so many bytes, of memory from `forebay_pinned_new` if `pinned`.
unsafe fn transfer(
    stream: *mut forebay_stream,
    direction: Direction,
    memory: *const forebay_memory,
    offset: usize,
    at: *mut u8,
    bytes: usize,
    pinned: bool,
) -> Result<(), Failure> {
    // SAFETY: C's promises.
    unsafe {
        let (stream, memory) = (known(stream, "the stream")?, shared(memory, "the memory")?);
        if at.is_null() && bytes > 0 {
            return Err(invalid("the host's bytes are NULL"));
        }
        Ok(stream.0.transfer(direction, &memory.0, offset, at, bytes, host(pinned))?)
    }
}

/// Sends bytes to a device's memory at `offset`, by the way that is fastest for so many; they have arrived when this returns.
///
/// # Safety
/// As the rules say; `from` has so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_write(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    from: *const c_void,
    bytes: usize,
) -> i32 {
    let from = from.cast_mut().cast();
    // SAFETY: C's promises.
    status(|| unsafe { transfer(stream, Direction::ToDevice, memory, offset, from, bytes, false) })
}

/// Brings bytes from a device's memory at `offset`.
///
/// # Safety
/// As the rules say; `to` has room for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_read(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { transfer(stream, Direction::ToHost, memory, offset, to.cast(), bytes, false) })
}

/// A part of page-locked memory.
///
/// # Safety
/// As the rules say.
unsafe fn part(pinned: *const forebay_pinned, at: usize, bytes: usize) -> Result<*mut u8, Failure> {
    // SAFETY: C's promise.
    let p = &unsafe { shared(pinned, "the memory of the host")? }.0;
    if at.checked_add(bytes).is_none_or(|end| end > p.len()) {
        return Err(invalid(&format!("{bytes} B at {at} of {} B of the host's", p.len())));
    }
    // SAFETY: within it.
    Ok(unsafe { p.address().add(at) })
}

/// As `forebay_write`, from page-locked memory at `at`.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_write_pinned(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    from: *const forebay_pinned,
    at: usize,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let from = part(from, at, bytes)?;
        transfer(stream, Direction::ToDevice, memory, offset, from, bytes, true)
    })
}

/// As `forebay_read`, to page-locked memory at `at`.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_read_pinned(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    to: *mut forebay_pinned,
    at: usize,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let to = part(to, at, bytes)?;
        transfer(stream, Direction::ToHost, memory, offset, to, bytes, true)
    })
}

/// Sends several parts of the `len` bytes at `from` at once, for one wait. What overlaps ends up as if they were sent one after
/// the other. A real-time stream's budget does not count it.
///
/// # Safety
/// As the rules say; `from` has so many bytes, and there are `count` ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_write_batch(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    from: *const c_void,
    len: usize,
    ranges: *const forebay_range,
    count: usize,
) -> i32 {
    let from = from.cast_mut().cast();
    // SAFETY: C's promises.
    status(|| unsafe { batch(stream, Direction::ToDevice, memory, from, len, ranges, count) })
}

/// Brings several parts at once, for one wait, to their places in the `len` bytes at `to`.
///
/// # Safety
/// As the rules say; `to` has room for so many bytes, and there are `count` ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_read_batch(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    to: *mut c_void,
    len: usize,
    ranges: *const forebay_range,
    count: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { batch(stream, Direction::ToHost, memory, to.cast(), len, ranges, count) })
}

/// # Safety
/// As the rules say; `at` has `len` bytes, and there are `count` ranges.
unsafe fn batch(
    stream: *mut forebay_stream,
    direction: Direction,
    memory: *const forebay_memory,
    at: *mut u8,
    len: usize,
    ranges: *const forebay_range,
    count: usize,
) -> Result<(), Failure> {
    // SAFETY: C's promises.
    unsafe {
        let (stream, memory) = (known(stream, "the stream")?, shared(memory, "the memory")?);
        if at.is_null() && len > 0 {
            return Err(invalid("the host's bytes are NULL"));
        }
        if ranges.is_null() && count > 0 {
            return Err(invalid("the ranges are NULL"));
        }
        let one = |r: forebay_range| Range { host: r.host, device: r.device, bytes: r.bytes };
        let all: Vec<Range> = (0..count).map(|i| one(ranges.add(i).read())).collect();
        Ok(stream.0.stream()?.transfer_batch(direction, &memory.0, at, len, Host::Pageable, &all)?)
    }
}

/// Copies within the device. A real-time stream's budget does not count it.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_copy(
    stream: *mut forebay_stream,
    from: *const forebay_memory,
    from_at: usize,
    to: *const forebay_memory,
    to_at: usize,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let stream = known(stream, "the stream")?;
        let (from, to) = (shared(from, "the memory")?, shared(to, "the memory")?);
        Ok(stream.0.stream()?.copy(&from.0, from_at, &to.0, to_at, bytes)?)
    })
}

/// Copies to another device, whose stream `other` is: directly, if that one reaches this one's memory, else by way of the host, piece by
/// piece. Real-time streams' budgets do not count it.
///
/// # Safety
/// As the rules say, for both streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_relay(
    stream: *mut forebay_stream,
    from: *const forebay_memory,
    from_at: usize,
    other: *mut forebay_stream,
    to: *const forebay_memory,
    to_at: usize,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises; two streams.
    status(|| unsafe {
        if std::ptr::eq(stream, other) {
            return Err(invalid("both streams are the same; forebay_copy copies within a device"));
        }
        let (stream, other) = (known(stream, "the stream")?, known(other, "the other stream")?);
        let (from, to) = (shared(from, "the memory")?, shared(to, "the other memory")?);
        Ok(stream.0.stream()?.relay(&from.0, from_at, other.0.stream()?, &to.0, to_at, bytes)?)
    })
}

/// Sends bytes without proof of arrival, where the processor stores them itself: they arrive soon, and before whatever this
/// stream posts to that memory afterwards. A doorbell for a kernel of your own, that is. Nothing that was started may use that
/// part of the memory any more.
///
/// # Safety
/// As the rules say; `from` has so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_post(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    from: *const c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (stream, memory) = (known(stream, "the stream")?, shared(memory, "the memory")?);
        Ok(stream.0.stream()?.post(&memory.0, offset, crate::block::bytes(from, bytes)?)?)
    })
}

/// Begins to send all of page-locked memory, which is taken until `forebay_finish` gives it back. Later transfers of the stream
/// come behind it.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_start_write(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    from: *mut forebay_pinned,
    started: *mut *mut forebay_in_flight,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { start(stream, Direction::ToDevice, memory, offset, from, started) })
}

/// Begins to fill page-locked memory, which is taken until `forebay_finish` gives it back.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_start_read(
    stream: *mut forebay_stream,
    memory: *const forebay_memory,
    offset: usize,
    to: *mut forebay_pinned,
    started: *mut *mut forebay_in_flight,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { start(stream, Direction::ToHost, memory, offset, to, started) })
}

/// # Safety
/// As the rules say.
unsafe fn start(
    stream: *mut forebay_stream,
    direction: Direction,
    memory: *const forebay_memory,
    offset: usize,
    pinned: *mut forebay_pinned,
    started: *mut *mut forebay_in_flight,
) -> Result<(), Failure> {
    // SAFETY: C's promises.
    unsafe {
        let pinned = take(pinned, "the memory of the host")?.0;
        let (stream, memory) = (known(stream, "the stream")?, shared(memory, "the memory")?);
        if started.is_null() {
            return Err(invalid("the place for the transfer is NULL"));
        }
        let stream = stream.0.stream()?;
        give(
            started,
            forebay_in_flight(match direction {
                Direction::ToDevice => stream.start_write(&memory.0, offset, pinned)?,
                Direction::ToHost => stream.start_read(&memory.0, offset, pinned)?,
            }),
        )
    }
}

/// Waits for a transfer that this stream began, which is taken, and gives its memory back.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_finish(
    stream: *mut forebay_stream,
    started: *mut forebay_in_flight,
    pinned: *mut *mut forebay_pinned,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let started = take(started, "the transfer")?.0;
        let stream = known(stream, "the stream")?;
        if pinned.is_null() {
            return Err(invalid("the place for the memory is NULL"));
        }
        give(pinned, forebay_pinned(stream.0.stream()?.finish(started)?))
    })
}

/// Forgets a transfer under way: it is made all the same, and its memory freed after it.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_in_flight_free(started: *mut forebay_in_flight) {
    // SAFETY: C's promise.
    unsafe { free(started) }
}
