//! One suite for all devices: what [`Device`] and [`Queue`](crate::Queue) promise, checked on a real one.
//!
//! [`run`] returns a line per check, so that a host without a toolchain can run it from a binary
//! (`forebay bench conformance`), and a test can assert on it.

mod beside;
mod mixed;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cpu::HostMemory;
use crate::{
    Arg, ArgSpan, Buffer, Device, Direction, Error, Fence, Geometry, Issued, Kind, Listed, Method, Recorded, Result,
    Source,
};

/// Outcome of one check.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Name of the check.
    pub check: &'static str,
    /// Why it failed, if it did.
    pub failure: Option<String>,
}

type Check = fn(&dyn Device) -> std::result::Result<(), String>;

const CHECKS: &[(&str, Check)] = &[
    ("info is filled in", info),
    ("copies bring every byte back, at odd sizes and offsets", copies),
    ("every method of transfer brings every byte there and back, and no other", transfers),
    ("posted bytes arrive, and kernels reach shared host memory, where there is such", posted_and_shared),
    ("device to device copies", device_copies),
    ("fill", fill),
    ("a kernel runs over exactly its space in 1, 2 and 3 dimensions", spaces),
    ("scalar arguments of every type arrive", scalars),
    ("commands are in order", order),
    ("fences grow and are reached in order", fences),
    ("a fence can be waited for while others use its queue", completions),
    ("host functions run after what is before them", host_functions),
    ("a buffer dropped after the enqueue stays alive", keeps_alive),
    ("ranges outside a buffer are refused", bounds),
    ("buffers of another device are refused", foreign),
    ("out of memory names requested and limit", out_of_memory),
    ("a missing entry and a broken source are typed errors", bad_sources),
    ("memory is given back", accounting),
    ("queues of one device work from several threads", threads),
    ("empty buffers and copies", empty),
    ("large copies run beside a kernel that does not use their memory", beside::copies),
    ("no fence behind a kernel is reached while it runs, whatever else has ended", beside::fences),
    ("what shares memory with a kernel waits for it, however many commands come in between", beside::many),
    ("what the processor copies itself waits for a kernel that uses that memory", beside::by_the_processor),
    ("what overwrites memory waits for all kernels that read it", beside::readers),
    ("large copies, kernels and functions of the host, mixed, leave the bytes of their order", mixed::mixed),
    ("a list of launches runs in its order of data, again, with other buffers and another shape", lists),
];

/// Runs every check on `device`.
pub fn run(device: &dyn Device) -> Vec<Outcome> {
    CHECKS
        .iter()
        .map(|(check, f)| {
            let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(device)));
            let failure = match r {
                Ok(Ok(())) => None,
                Ok(Err(why)) => Some(why),
                Err(_) => Some("panicked".into()),
            };
            Outcome { check, failure }
        })
        .collect()
}

/// The kernels that the suite uses, for devices that compile.
const KERNELS: &str = "
KERNEL void mark(GLOBAL uint *out, uint w, uint h, uint d) {
  uint x = gid_x(), y = gid_y(), z = gid_z();
  if (x < w && y < h && z < d) out[(z * h + y) * w + x] += x + 1000u * y + 1000000u * z + 1u;
}
KERNEL void scalars(GLOBAL float *out, uint a, int b, float c, ulong d) {
  if (gid_x() == 0) { out[0] = (float)a; out[1] = (float)b; out[2] = c; out[3] = (float)(d >> 32); }
}
KERNEL void twice(GLOBAL const uint *in, GLOBAL uint *out, uint n) {
  uint i = gid_x();
  if (i < n) out[i] = 2u * in[i] + 1u;
}
KERNEL void linger(GLOBAL volatile uint *flag, GLOBAL uint *out, uint limit) {
  uint i = 0;
  if (gid_x() == 0) while (flag[0] == 0u && i < limit) i++;
  if (gid_x() == 0) out[0] = flag[0] != 0u;
}
";

fn source(kind: Kind, entry: &str) -> Source {
    if !matches!(kind, Kind::Cpu | Kind::Sim) {
        return Source::Portable(KERNELS.into());
    }
    Source::Cpu(match entry {
        "mark" => Arc::new(|s: &ArgSpan<'_>| {
            let (w, h) = (s.scalar(1) as usize, s.scalar(2) as usize);
            // SAFETY: each call touches only the elements of its own part.
            let out = unsafe { s.slice_mut::<u32>(0) };
            s.for_each(|x, y, z| out[(z * h + y) * w + x] += (x + 1000 * y + 1_000_000 * z + 1) as u32);
        }),
        "scalars" => Arc::new(|s: &ArgSpan<'_>| {
            if s.start == 0 {
                // SAFETY: only the first part writes.
                let out = unsafe { s.slice_mut::<f32>(0) };
                out[0] = s.scalar(1) as f32;
                out[1] = s.scalar(2) as i64 as f32;
                out[2] = s.float(3);
                out[3] = (s.scalar(4) >> 32) as f32;
            }
        }),
        _ => Arc::new(|s: &ArgSpan<'_>| {
            // SAFETY: each call touches only the elements of its own part.
            let (input, out) = (s.slice::<u32>(0), unsafe { s.slice_mut::<u32>(1) });
            s.for_each(|i, _, _| out[i] = input[i].wrapping_mul(2).wrapping_add(1));
        }),
    })
}

fn host(words: &[u32]) -> Result<Buffer> {
    let b = HostMemory::buffer(size_of_val(words))?;
    write(&b, words);
    Ok(b)
}

fn write(b: &Buffer, words: &[u32]) {
    if let Some(p) = b.host_ptr() {
        // SAFETY: the buffer has that many bytes and no command uses it.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast(), p.as_ptr(), size_of_val(words).min(b.len())) };
    }
}

fn words(b: &Buffer) -> Vec<u32> {
    let Some(p) = b.host_ptr() else { return Vec::new() };
    // SAFETY: host memory is 64-byte aligned, and the caller has waited for the commands.
    unsafe { std::slice::from_raw_parts(p.as_ptr().cast(), b.len() / 4) }.to_vec()
}

fn text(e: Error) -> String {
    e.to_string()
}

fn ensure(ok: bool, why: impl FnOnce() -> String) -> std::result::Result<(), String> {
    if ok { Ok(()) } else { Err(why()) }
}

/// Copies `b` to the host and waits.
fn read(d: &dyn Device, q: &mut dyn crate::Queue, b: &Buffer) -> Result<Vec<u32>> {
    let h = d.alloc_host(b.len())?;
    q.copy(b, 0, &h, 0, b.len())?;
    let f = q.fence()?;
    q.wait(f)?;
    Ok(words(&h))
}

fn info(d: &dyn Device) -> std::result::Result<(), String> {
    let i = d.info();
    ensure(!i.name.is_empty() && i.compute_units > 0 && i.memory_bytes > 0 && i.strength > 0, || format!("{i:?}"))
}

fn copies(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    for (n, at) in [(1usize, 0usize), (3, 1), (1000, 17), (1 << 18, 0)] {
        let data: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let from = host(&data).map_err(text)?;
        let b = d.alloc(4 * (n + at)).map_err(text)?;
        q.copy(&from, 0, &b, 4 * at, 4 * n).map_err(text)?;
        let back = read(d, &mut *q, &b).map_err(text)?;
        ensure(back[at..] == data[..], || format!("{n} words at {at} came back changed"))?;
    }
    Ok(())
}

fn transfers(d: &dyn Device) -> std::result::Result<(), String> {
    const SIZE: usize = 300 << 10;
    let mut q = d.queue().map_err(text)?;
    ensure(d.methods().first() == Some(&Method::Engine), || format!("{:?}", d.methods()))?;
    let (from, back) = (d.alloc_host(SIZE).map_err(text)?, d.alloc_host(SIZE).map_err(text)?);
    let pattern: Vec<u32> = (0..SIZE as u32 / 4).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    write(&from, &pattern);
    let address = |b: &Buffer| b.host_ptr().map(|p| p.as_ptr()).ok_or("host memory without an address");
    let (p, r) = (address(&from)?, address(&back)?);
    let b = d.alloc_mapped(SIZE).map_err(text)?;
    for &method in d.methods() {
        for (n, at, host) in [(1, 0, 0), (7, 3, 1), (64, 64, 0), (4096, 1, 17), (70_001, 12, 12), (SIZE - 64, 64, 0)] {
            q.fill(&b, 0, SIZE, 0xEE).map_err(text)?;
            // SAFETY: `host + n` bytes of both host buffers exist, and they are awaited before anything else uses them.
            unsafe {
                // Behind the fill, and before what reads it, without a wait between.
                q.transfer(method, Direction::ToDevice, &b, at, p.add(host), n).map_err(text)?;
                std::ptr::write_bytes(r, 0x11, SIZE);
                q.transfer(method, Direction::ToHost, &b, at, r.add(host), n).map_err(text)?;
            }
            let f = q.fence().map_err(text)?;
            q.wait(f).map_err(text)?;
            let bytes = |b: &Buffer| -> Vec<u8> { words(b).iter().flat_map(|w| w.to_ne_bytes()).collect() };
            let (want, got) = (bytes(&from), bytes(&back));
            let name = method.name();
            ensure(got[host..host + n] == want[host..host + n], || format!("{name}: {n} B at {at} came back changed"))?;
            let outside = got[..host].iter().chain(&got[host + n..]);
            ensure(outside.into_iter().all(|b| *b == 0x11), || format!("{name}: {n} B at {at}: more was written"))?;
            let there: Vec<u8> = read(d, &mut *q, &b).map_err(text)?.iter().flat_map(|w| w.to_ne_bytes()).collect();
            let outside = there[..at].iter().chain(&there[at + n..]);
            ensure(outside.into_iter().all(|b| *b == 0xEE), || format!("{name}: {n} B at {at}: more arrived"))?;
        }
        // SAFETY: refused, or nothing at all.
        unsafe {
            let outside = q.transfer(method, Direction::ToDevice, &b, SIZE - 3, p, 4);
            ensure(outside.is_err(), || format!("{}: a range outside the buffer", method.name()))?;
            q.transfer(method, Direction::ToHost, &b, SIZE, r, 0).map_err(text)?;
        }
    }
    Ok(())
}

fn posted_and_shared(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc_mapped(4096).map_err(text)?;
    q.fill(&b, 0, 4096, 0).map_err(text)?;
    let f = q.fence().map_err(text)?;
    q.wait(f).map_err(text)?;
    let data: Vec<u32> = (1..=100).collect();
    // SAFETY: the words are there, and nothing uses the buffer any more.
    unsafe { q.post(&b, 64, data.as_ptr().cast(), 400).map_err(text)? };
    let back = read(d, &mut *q, &b).map_err(text)?;
    ensure(back[16..116] == data[..] && back[..16].iter().chain(&back[116..]).all(|w| *w == 0), || {
        format!("{back:?}")
    })?;
    // SAFETY: refused.
    ensure(unsafe { q.post(&b, 4000, data.as_ptr().cast(), 400) }.is_err(), || "beyond the buffer".into())?;

    let n = 1000usize;
    let (host, device) = match d.alloc_shared(4 * n) {
        Err(Error::Unsupported { .. }) => return Ok(()),
        other => other.map_err(text)?,
    };
    let out = d.alloc(4 * n).map_err(text)?;
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    for round in 0..3u32 {
        let data: Vec<u32> = (0..n as u32).map(|i| i + round).collect();
        write(&host, &data);
        // From shared memory to the device's and back again, in place.
        q.launch(&k, &Geometry::linear(n), &[Arg::Buffer(&device), Arg::Buffer(&out), Arg::U32(n as u32)])
            .map_err(text)?;
        q.launch(&k, &Geometry::linear(n), &[Arg::Buffer(&out), Arg::Buffer(&device), Arg::U32(n as u32)])
            .map_err(text)?;
        let f = q.fence().map_err(text)?;
        q.wait(f).map_err(text)?;
        let want: Vec<u32> = data.iter().map(|v| 4 * v + 3).collect();
        ensure(words(&host)[..n] == want[..], || format!("round {round}: {:?}", &words(&host)[..4]))?;
    }
    let before = d.allocated();
    drop((host, device));
    ensure(d.allocated() <= before, || "shared memory was given back twice".into())
}

fn device_copies(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let data: Vec<u32> = (0..4096).collect();
    let (a, b) = (d.alloc(16384).map_err(text)?, d.alloc(16384).map_err(text)?);
    q.copy(&host(&data).map_err(text)?, 0, &a, 0, 16384).map_err(text)?;
    q.fill(&b, 0, 16384, 0).map_err(text)?;
    q.copy(&a, 400, &b, 800, 4000).map_err(text)?;
    let back = read(d, &mut *q, &b).map_err(text)?;
    ensure(back[200..1200] == data[100..1100] && back[..200].iter().all(|&v| v == 0), || "wrong words".into())
}

fn fill(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(64).map_err(text)?;
    q.fill(&b, 0, 64, 0xAB).map_err(text)?;
    q.fill(&b, 8, 4, 0).map_err(text)?;
    let back = read(d, &mut *q, &b).map_err(text)?;
    ensure(back[2] == 0 && back[1] == 0xABAB_ABAB && back[3] == 0xABAB_ABAB && back[15] == 0xABAB_ABAB, || {
        format!("{back:x?}")
    })
}

fn spaces(d: &dyn Device) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "mark"), "mark").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    for [w, h, z] in [[1usize, 1usize, 1usize], [1000, 1, 1], [65_537, 1, 1], [37, 11, 1], [5, 6, 7], [300, 200, 2]] {
        let n = w * h * z;
        let b = d.alloc(4 * n).map_err(text)?;
        q.fill(&b, 0, 4 * n, 0).map_err(text)?;
        let args = [Arg::Buffer(&b), Arg::U32(w as u32), Arg::U32(h as u32), Arg::U32(z as u32)];
        q.launch(&k, &Geometry::new(w, h, z), &args).map_err(text)?;
        let back = read(d, &mut *q, &b).map_err(text)?;
        for (i, &v) in back.iter().enumerate() {
            let (x, y, p) = (i % w, i / w % h, i / w / h);
            let want = (x + 1000 * y + 1_000_000 * p + 1) as u32;
            ensure(v == want, || format!("{w}×{h}×{z}: item ({x},{y},{p}) is {v}, not {want}"))?;
        }
    }
    Ok(())
}

fn scalars(d: &dyn Device) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "scalars"), "scalars").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(16).map_err(text)?;
    let args = [Arg::Buffer(&b), Arg::U32(7), Arg::I32(-3), Arg::F32(0.25), Arg::U64(9 << 32)];
    q.launch(&k, &Geometry::linear(1), &args).map_err(text)?;
    let back = read(d, &mut *q, &b).map_err(text)?;
    let floats: Vec<f32> = back.into_iter().map(f32::from_bits).collect();
    ensure(floats == [7.0, -3.0, 0.25, 9.0], || format!("{floats:?}"))
}

fn order(d: &dyn Device) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    let n = 5000usize;
    let (a, b) = (d.alloc(4 * n).map_err(text)?, d.alloc(4 * n).map_err(text)?);
    q.fill(&a, 0, 4 * n, 0).map_err(text)?;
    // x → 2x+1, ten times: 2^10 - 1.
    for i in 0..10 {
        let (from, to) = if i % 2 == 0 { (&a, &b) } else { (&b, &a) };
        q.launch(&k, &Geometry::linear(n), &[Arg::Buffer(from), Arg::Buffer(to), Arg::U32(n as u32)]).map_err(text)?;
    }
    let back = read(d, &mut *q, &a).map_err(text)?;
    ensure(back.iter().all(|&v| v == 1023), || format!("{:?}", &back[..4]))
}

fn fences(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(1 << 20).map_err(text)?;
    let mut last = Fence::default();
    for i in 0..20 {
        q.fill(&b, 0, 1 << 20, i).map_err(text)?;
        let f = q.fence().map_err(text)?;
        ensure(f.0 == last.0 + 1, || format!("fence {f:?} after {last:?}"))?;
        last = f;
    }
    // What is before a fence goes on by itself: nobody need wait for it. A sim device's clock is that of whoever waits.
    let begun = std::time::Instant::now();
    while d.info().kind != Kind::Sim && !q.done(last).map_err(text)? {
        ensure(begun.elapsed().as_secs() < 5, || "a fence was not reached that nobody waited for".into())?;
        std::thread::yield_now();
    }
    // Who has enqueued something knows the number of the fence behind it, whatever else is moved meanwhile.
    let m = d.alloc_mapped(64).map_err(text)?;
    let mut word = [0u8; 64];
    for &method in d.methods().iter().filter(|m| **m != Method::Kernel) {
        for direction in Direction::ALL {
            q.fill(&b, 0, 1 << 20, 1).map_err(text)?;
            // SAFETY: both sides have so many bytes, which are awaited before anything else uses them.
            unsafe { q.transfer(method, direction, &m, 0, word.as_mut_ptr(), 64) }.map_err(text)?;
            q.fill(&b, 0, 1 << 20, 2).map_err(text)?;
            let f = q.fence().map_err(text)?;
            q.wait(f).map_err(text)?;
            ensure(f.0 == last.0 + 1, || format!("{}: fence {f:?} after {last:?}", method.name()))?;
            last = f;
        }
    }
    q.wait(last).map_err(text)?;
    ensure(q.done(last).map_err(text)?, || "a waited-for fence is not done".into())?;
    ensure(q.done(Fence(1)).map_err(text)?, || "an earlier fence is not done".into())?;
    ensure(q.wait(Fence(last.0 + 1000)).is_err(), || "waiting for a fence never issued must be an error".into())
}

fn completions(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let n = 1usize << 16;
    let (a, b) = (d.alloc(4 * n).map_err(text)?, d.alloc(4 * n).map_err(text)?);
    let (first, second) = (d.alloc_host(4 * n).map_err(text)?, d.alloc_host(4 * n).map_err(text)?);
    q.fill(&a, 0, 4 * n, 0).map_err(text)?;
    q.launch(&k, &Geometry::linear(n), &[Arg::Buffer(&a), Arg::Buffer(&b), Arg::U32(n as u32)]).map_err(text)?;
    q.copy(&b, 0, &first, 0, 4 * n).map_err(text)?;
    let early = q.fence().map_err(text)?;
    let completion = q.completion(early).map_err(text)?;
    std::thread::scope(|s| {
        let waiter = s.spawn(|| -> std::result::Result<(), String> {
            if let Some(c) = &completion {
                c.wait().map_err(text)?;
            }
            ensure(words(&first).iter().all(|&v| v == 1), || "the wait ended before the copy".into())
        });
        for _ in 0..10 {
            q.launch(&k, &Geometry::linear(n), &[Arg::Buffer(&b), Arg::Buffer(&a), Arg::U32(n as u32)])
                .map_err(text)?;
            q.fence().map_err(text)?;
        }
        q.copy(&a, 0, &second, 0, 4 * n).map_err(text)?;
        waiter.join().unwrap_or_else(|_| Err("the waiter panicked".into()))
    })?;
    let late = q.fence().map_err(text)?;
    q.wait(late).map_err(text)?;
    ensure(words(&second).iter().all(|&v| v == 3), || "wrong words behind the completion".into())?;
    ensure(q.completion(early).map_err(text)?.is_none(), || "a reached fence still has a completion".into())
}

fn host_functions(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(1 << 16).map_err(text)?;
    let hits = Arc::new(AtomicU32::new(0));
    q.fill(&b, 0, 1 << 16, 1).map_err(text)?;
    for _ in 0..3 {
        let h = hits.clone();
        q.host_fn(Box::new(move || {
            h.fetch_add(1, Ordering::SeqCst);
        }))
        .map_err(text)?;
    }
    let f = q.fence().map_err(text)?;
    q.wait(f).map_err(text)?;
    // A callback may trail the event that triggers it.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while hits.load(Ordering::SeqCst) < 3 && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    let n = hits.load(Ordering::SeqCst);
    ensure(n == 3, || format!("{n} of 3 ran"))?;
    if matches!(d.info().kind, Kind::Cpu | Kind::Sim) {
        return Ok(());
    }
    // With nothing before it, too, it is not the issuer's thread that it runs on: that would wait for itself here.
    for _ in 0..50 {
        let (go_on, gate) = std::sync::mpsc::channel();
        q.host_fn(Box::new(move || {
            let _ = gate.recv_timeout(std::time::Duration::from_secs(5));
        }))
        .map_err(text)?;
        let sent = go_on.send(());
        ensure(sent.is_ok(), || "it had to be waited for".into())?;
        let f = q.fence().map_err(text)?;
        q.wait(f).map_err(text)?;
    }
    Ok(())
}

fn keeps_alive(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(1 << 20).map_err(text)?;
    for i in 0..8u32 {
        let h = host(&vec![i; 1 << 18]).map_err(text)?;
        q.copy(&h, 0, &b, 0, 1 << 20).map_err(text)?;
        drop(h);
    }
    let back = read(d, &mut *q, &b).map_err(text)?;
    ensure(back.iter().all(|&v| v == 7), || "a freed source was read".into())
}

fn bounds(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(100).map_err(text)?;
    let h = host(&[0; 25]).map_err(text)?;
    let bad =
        [q.copy(&h, 0, &b, 4, 100), q.copy(&h, 1, &b, 0, 100), q.copy(&b, usize::MAX, &h, 0, 2), q.fill(&b, 99, 2, 0)];
    ensure(bad.iter().all(|r| matches!(r, Err(Error::Invalid { .. }))), || format!("{bad:?}"))
}

fn foreign(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let other = crate::sim::SimDevice::new(crate::sim::Model::default());
    let b = other.alloc(64).map_err(text)?;
    let r = q.fill(&b, 0, 64, 0);
    ensure(matches!(r, Err(Error::Invalid { .. })), || format!("{r:?}"))
}

fn out_of_memory(d: &dyn Device) -> std::result::Result<(), String> {
    let limit = d.info().memory_bytes;
    match d.alloc(limit.saturating_mul(4).min(1 << 62) as usize) {
        Err(Error::OutOfMemory { requested, limit: l, .. }) if requested > l && l > 0 => Ok(()),
        Err(e) => Err(format!("another error: {e}")),
        Ok(_) => Err("four times the memory was granted".into()),
    }
}

fn bad_sources(d: &dyn Device) -> std::result::Result<(), String> {
    if matches!(d.info().kind, Kind::Cpu | Kind::Sim) {
        let r = d.compile(&Source::OpenClC("".into()), "f");
        return ensure(matches!(r, Err(Error::Unsupported { .. })), || format!("{r:?}"));
    }
    let r = d.compile(&Source::Portable(KERNELS.into()), "absent");
    ensure(matches!(r, Err(Error::NoEntry { .. })), || format!("{r:?}"))?;
    match d.compile(&Source::Portable("KERNEL void f(GLOBAL float *a) {\n\n  a[0] = undefined_name;\n}".into()), "f") {
        Err(Error::Compile { log, .. }) => {
            ensure(log.contains("undefined_name") && log.contains("source line 3"), || {
                format!("no source line in: {log}")
            })
        }
        r => Err(format!("{r:?}")),
    }
}

fn accounting(d: &dyn Device) -> std::result::Result<(), String> {
    let before = d.allocated();
    let b = d.alloc(12_345).map_err(text)?;
    ensure(d.allocated() >= before + 12_345, || "an allocation is not counted".into())?;
    drop(b);
    ensure(d.allocated() <= before, || format!("{} B before, {} B after", before, d.allocated()))
}

fn threads(d: &dyn Device) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    std::thread::scope(|s| {
        let handles: Vec<_> = (0..4u32)
            .map(|t| {
                let k = k.clone();
                s.spawn(move || -> std::result::Result<(), String> {
                    let mut q = d.queue().map_err(text)?;
                    let n = 2000usize;
                    for round in 0..20u32 {
                        let a = d.alloc(4 * n).map_err(text)?;
                        let b = d.alloc(4 * n).map_err(text)?;
                        let seed = t * 100 + round;
                        q.copy(&host(&vec![seed; n]).map_err(text)?, 0, &a, 0, 4 * n).map_err(text)?;
                        let args = [Arg::Buffer(&a), Arg::Buffer(&b), Arg::U32(n as u32)];
                        q.launch(&k, &Geometry::linear(n), &args).map_err(text)?;
                        let back = read(d, &mut *q, &b).map_err(text)?;
                        ensure(back.iter().all(|&v| v == 2 * seed + 1), || {
                            format!("thread {t} round {round}: {:?}", &back[..2])
                        })?;
                    }
                    Ok(())
                })
            })
            .collect();
        handles.into_iter().try_for_each(|h| h.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    })
}

fn empty(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(0).map_err(text)?;
    let h = host(&[]).map_err(text)?;
    q.copy(&h, 0, &b, 0, 0).map_err(text)?;
    let f = q.fence().map_err(text)?;
    q.wait(f).map_err(text)?;
    ensure(b.is_empty(), || "not empty".into())
}

/// `x → 2x+1` along two chains of four that share their input; the chains' order among each other is free.
fn lists(d: &dyn Device) -> std::result::Result<(), String> {
    let mut q = d.queue().map_err(text)?;
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let mut recorded = Recorded::default();
    let mut kept: Vec<[Buffer; 4]> = Vec::new();
    // Ten sets of buffers, then the last one again, then a smaller space.
    for round in 0..12u32 {
        let n = if round == 11 { 500usize } else { 1000 };
        if round < 10 {
            let mut four = Vec::new();
            for _ in 0..4 {
                four.push(d.alloc(4000).map_err(text)?);
            }
            kept.push(four.try_into().map_err(|_| "four buffers")?);
        }
        let [x, a, b, c] = &kept[kept.len() - 1];
        q.copy(&host(&vec![round; 1000]).map_err(text)?, 0, x, 0, 4000).map_err(text)?;
        for to in [a, b, c] {
            q.fill(to, 0, 4000, 0).map_err(text)?;
        }
        // b = f(f(x)) by way of a; c = f(x), and a is overwritten behind its reader.
        let steps = [(x, a), (a, b), (x, c), (c, a)];
        let args = steps.map(|(from, to)| [Arg::Buffer(from), Arg::Buffer(to), Arg::U32(n as u32)]);
        let list: Vec<Listed<'_>> =
            args.iter().map(|args| Listed { kernel: &k, geometry: Geometry::linear(n), args, writes: 0b10 }).collect();
        let issued = q.launch_list(&list, &mut recorded).map_err(text)?;
        if d.replays() {
            let want = match round {
                0..8 => Issued::Built,
                10 => Issued::Replayed,
                _ => Issued::Updated,
            };
            ensure(issued == want, || format!("round {round}: {issued:?}, not {want:?}"))?;
        } else {
            ensure(issued == Issued::Singly, || format!("{issued:?} on a device without graphs"))?;
        }
        for (name, buffer, times) in [("a", a, 2), ("b", b, 2), ("c", c, 1)] {
            let want = (0..times).fold(round, |v, _| 2 * v + 1);
            let back = read(d, &mut *q, buffer).map_err(text)?;
            ensure(back[..n].iter().all(|&v| v == want), || format!("round {round}: {name} is {:?}", &back[..2]))?;
            ensure(back[n..].iter().all(|&v| v == 0), || format!("round {round}: {name} was written past {n}"))?;
        }
    }
    Ok(())
}
