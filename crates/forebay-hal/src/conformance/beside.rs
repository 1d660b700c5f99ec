//! What runs beside a kernel that waits for the host, and what must not.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::{ensure, read, source, text};
use crate::{Arg, Buffer, Device, Direction, Geometry, Kernel, Kind, Method, Queue};

/// More commands than any queue remembers one by one.
const MANY: usize = 150;
/// Looks at memory, one after the other: half a millisecond on a processor, a tenth of a second on a GPU.
const LONG: u32 = 1 << 18;

/// A word that a kernel and the host share.
struct Flag(NonNull<u32>);

// SAFETY: it is only written, as a whole, by whoever has it.
unsafe impl Sync for Flag {}

impl Flag {
    fn set(&self, to: u32) {
        // SAFETY: the word lives as long as what has the flag; kernel and host share it by this means.
        unsafe { self.0.write_volatile(to) };
    }
}

/// A kernel that waits, some seconds at most, for the host to let it go.
struct Waiting {
    k: Kernel,
    flag: Flag,
    _flag: Buffer,
    flag_there: Buffer,
    /// One word: 1 if it was let go.
    out: Buffer,
}

impl Waiting {
    fn new(d: &dyn Device) -> std::result::Result<Self, String> {
        let k = d.compile(&source(d.info().kind, "linger"), "linger").map_err(text)?;
        let (flag, flag_there) = d.alloc_shared(64).map_err(text)?;
        let p = flag.host_ptr().ok_or("host memory without an address")?.cast::<u32>();
        let flag_here = Flag(p);
        flag_here.set(0);
        Ok(Waiting { k, flag: flag_here, _flag: flag, flag_there, out: d.alloc_mapped(64).map_err(text)? })
    }

    fn launch(&self, q: &mut dyn Queue) -> std::result::Result<(), String> {
        let args = [Arg::Buffer(&self.flag_there), Arg::Buffer(&self.out), Arg::U32(1 << 30)];
        q.launch(&self.k, &Geometry::linear(1), &args).map_err(text)
    }

    fn let_go(&self) {
        self.flag.set(1);
    }
}

/// Whether commands of this device run side by side at all.
fn has_any(d: &dyn Device) -> bool {
    d.copies_beside() != usize::MAX
}

/// A kernel waits for the host, which lets it go when copies to the device and back have come through.
pub(super) fn copies(d: &dyn Device) -> std::result::Result<(), String> {
    if !has_any(d) {
        return Ok(());
    }
    let n = d.copies_beside().max(4096);
    let waiting = Waiting::new(d)?;
    let mut q = d.queue().map_err(text)?;
    let (from, to) = (d.alloc_host(n).map_err(text)?, d.alloc_host(n).map_err(text)?);
    let b = d.alloc(n).map_err(text)?;
    let address = |b: &Buffer| b.host_ptr().ok_or("host memory without an address");
    let (first, last) = (address(&from)?, address(&to)?);
    // SAFETY: the buffer has these bytes, and no command uses them yet.
    unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), n).fill(7) };
    // The first large copy comes behind everything.
    q.copy(&from, 0, &b, 0, n).map_err(text)?;
    // The next one waits for this kernel, which used its memory, and not for the one behind it.
    let twice = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let words = n / 4;
    let other = d.alloc(n).map_err(text)?;
    q.launch(&twice, &Geometry::linear(words), &[Arg::Buffer(&b), Arg::Buffer(&other), Arg::U32(words as u32)])
        .map_err(text)?;
    waiting.launch(&mut *q)?;
    let copied = q.copy(&from, 0, &b, 0, n).and_then(|()| q.copy(&b, 0, &to, 0, n)).and_then(|()| q.fence());
    let begun = Instant::now();
    // SAFETY: the last byte of `to`, which only the copy writes.
    let arrived = || unsafe { last.add(n - 1).read_volatile() } == 7;
    while copied.is_ok() && !arrived() && begun.elapsed() < Duration::from_secs(5) {
        std::hint::spin_loop();
    }
    let came = arrived();
    waiting.let_go();
    let released = read(d, &mut *q, &waiting.out).map_err(text)?;
    copied.map_err(text)?;
    ensure(came, || "copies did not come through while a kernel ran".into())?;
    ensure(released[0] == 1, || "the kernel ended before it was told to".into())
}

/// Whatever has ended behind it, no fence behind a kernel is reached while the kernel runs.
pub(super) fn fences(d: &dyn Device) -> std::result::Result<(), String> {
    if !has_any(d) {
        return Ok(());
    }
    let waiting = Waiting::new(d)?;
    let mut q = d.queue().map_err(text)?;
    let b = d.alloc(64).map_err(text)?;
    waiting.launch(&mut *q)?;
    let made = (0..3).map(|i| q.fill(&b, 0, 64, i).and_then(|()| q.fence())).collect::<crate::Result<Vec<_>>>();
    std::thread::sleep(Duration::from_millis(30));
    let looked = made.and_then(|fences| {
        let done = fences.iter().map(|&f| q.done(f)).collect::<crate::Result<Vec<_>>>()?;
        let waits = fences.iter().map(|&f| q.completion(f)).collect::<crate::Result<Vec<_>>>()?;
        Ok((done, waits))
    });
    let waited = std::thread::scope(|s| {
        let wait = s.spawn(|| {
            let (done, waits) = looked?;
            // The last one, which stands behind the kernel by the fences before it.
            waits.last().and_then(|w| w.as_ref()).map_or(Ok(()), |w| w.wait())?;
            Ok((done, Instant::now()))
        });
        std::thread::sleep(Duration::from_millis(30));
        let told = Instant::now();
        waiting.let_go();
        wait.join().map(|w: crate::Result<_>| (w, told))
    });
    let (waited, told) = waited.map_err(|_| "panic")?;
    let (done, ended) = waited.map_err(text)?;
    ensure(!done.contains(&true), || format!("reached while the kernel runs: {done:?}"))?;
    ensure(ended > told, || "waiting ended while the kernel ran".into())
}

/// However many commands come in between, what shares memory with a kernel waits for it.
pub(super) fn many(d: &dyn Device) -> std::result::Result<(), String> {
    if !has_any(d) {
        return Ok(());
    }
    let waiting = Waiting::new(d)?;
    let mut q = d.queue().map_err(text)?;
    let others = (0..MANY).map(|_| d.alloc(64)).collect::<crate::Result<Vec<_>>>().map_err(text)?;
    let back = d.alloc_host(64).map_err(text)?;
    q.fill(&waiting.out, 0, 64, 9).map_err(text)?;
    waiting.launch(&mut *q)?;
    let issued = others.iter().try_for_each(|b| q.fill(b, 0, 64, 5));
    let issued = issued.and_then(|()| q.copy(&waiting.out, 0, &back, 0, 64)).and_then(|()| q.fence());
    std::thread::sleep(Duration::from_millis(30));
    waiting.let_go();
    issued.and_then(|f| q.wait(f)).map_err(text)?;
    let got = super::words(&back)[0];
    ensure(got == 1, || format!("{got:#x} was copied before the kernel wrote"))
}

/// What the processor copies itself comes behind a kernel that uses the same memory, both ways. Where it is but a copy within the
/// host's memory, and commands run side by side, a kernel that does not is not waited for.
pub(super) fn by_the_processor(d: &dyn Device) -> std::result::Result<(), String> {
    if d.info().host_memory || d.info().kind == Kind::Sim || !d.methods().contains(&Method::Mapped) {
        return Ok(());
    }
    let mut q = d.queue().map_err(text)?;
    let copy = |q: &mut dyn Queue, direction, b: &Buffer, words: &mut [u32; 4]| {
        // SAFETY: both have the bytes, and it has ended when it returns.
        unsafe { q.transfer(Method::Mapped, direction, b, 0, words.as_mut_ptr().cast(), 16) }.map_err(text)
    };
    if !has_any(d) {
        return behind_a_long_kernel(d, &mut *q, copy);
    }
    let waiting = Waiting::new(d)?;
    let alone = d.alloc_mapped(64).map_err(text)?;
    for (direction, words, want) in after_it_wrote(1) {
        waiting.flag.set(0);
        q.fill(&waiting.out, 0, 64, 9).map_err(text)?;
        waiting.launch(&mut *q)?;
        let mut words = words;
        let moved = std::thread::scope(|s| {
            let waiting = &waiting;
            s.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                waiting.let_go();
            });
            copy(&mut *q, direction, &waiting.out, &mut words)
        });
        moved?;
        arrived(direction, words[0], read(d, &mut *q, &waiting.out).map_err(text)?[0], want)?;
    }
    if d.plain_copy() == Some(Method::Mapped) {
        waiting.flag.set(0);
        waiting.launch(&mut *q)?;
        let begun = Instant::now();
        let moved = std::thread::scope(|s| {
            let (waiting, (done, ended)) = (&waiting, std::sync::mpsc::channel());
            s.spawn(move || {
                let _ = ended.recv_timeout(Duration::from_secs(2));
                waiting.let_go();
            });
            let moved = copy(&mut *q, Direction::ToDevice, &alone, &mut [6; 4]);
            (moved, done.send(()), begun.elapsed())
        });
        moved.0?;
        let there = read(d, &mut *q, &alone).map_err(text)?;
        ensure(there[..4] == [6; 4], || format!("{there:?}"))?;
        ensure(moved.2 < Duration::from_secs(1), || "a copy waited for a kernel that uses other memory".into())?;
    }
    Ok(())
}

/// What is copied in which direction beside a kernel that writes `wrote`, and what is on both sides in the end: to the host comes
/// what the kernel wrote, and to the device it is written over that.
fn after_it_wrote(wrote: u32) -> [(Direction, [u32; 4], u32); 2] {
    [(Direction::ToHost, [7; 4], wrote), (Direction::ToDevice, [5; 4], 5)]
}

fn arrived(direction: Direction, here: u32, there: u32, want: u32) -> std::result::Result<(), String> {
    ensure(here == want && there == want, || format!("{}: {here} and {there}, not {want}", direction.name()))
}

/// Where a kernel cannot be told to end: it takes its time instead.
fn behind_a_long_kernel(
    d: &dyn Device,
    q: &mut dyn Queue,
    copy: impl Fn(&mut dyn Queue, Direction, &Buffer, &mut [u32; 4]) -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "linger"), "linger").map_err(text)?;
    let (flag, out) = (d.alloc_mapped(64).map_err(text)?, d.alloc_mapped(64).map_err(text)?);
    q.fill(&flag, 0, 64, 0).map_err(text)?;
    for (direction, mut words, want) in after_it_wrote(0) {
        q.fill(&out, 0, 64, 9).map_err(text)?;
        let args = [Arg::Buffer(&flag), Arg::Buffer(&out), Arg::U32(LONG)];
        q.launch(&k, &Geometry::linear(1), &args).map_err(text)?;
        copy(q, direction, &out, &mut words)?;
        arrived(direction, words[0], read(d, q, &out).map_err(text)?[0], want)?;
    }
    Ok(())
}

/// Many kernels read the same memory; what overwrites it waits for all of them.
pub(super) fn readers(d: &dyn Device) -> std::result::Result<(), String> {
    const WORDS: usize = 20_000;
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    let from = d.alloc(4 * WORDS).map_err(text)?;
    let outs = (0..MANY).map(|_| d.alloc(4 * WORDS)).collect::<crate::Result<Vec<_>>>().map_err(text)?;
    q.fill(&from, 0, 4 * WORDS, 0).map_err(text)?;
    for out in &outs {
        let args = [Arg::Buffer(&from), Arg::Buffer(out), Arg::U32(WORDS as u32)];
        q.launch(&k, &Geometry::linear(WORDS), &args).map_err(text)?;
    }
    q.fill(&from, 0, 4 * WORDS, 9).map_err(text)?;
    for (i, out) in outs.iter().enumerate() {
        let got = read(d, &mut *q, out).map_err(text)?;
        ensure(got.iter().all(|&v| v == 1), || format!("kernel {i} read what was written after it"))?;
    }
    Ok(())
}
