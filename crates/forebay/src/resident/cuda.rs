//! A grid on a CUDA device: one kernel that stays, loaded with all that it needs before it is launched.
//!
//! Where things are: rings, heartbeats and the stop word in device memory that the processor reaches, if there is such
//! memory (blocks look at them all the time, the host writes a line now and then), else in page-locked memory of the host;
//! completions always there, since the host looks at those; everything else in device memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::streaming;
use forebay_hal::{Arg, Buffer, Device, Direction, Fence, Geometry, Kernel, Method, Occupied, Queue, Source};

use super::heap::{ALIGN, HeapUse};
use super::layout::{self, Beat, Control, Done, Slot};
use super::memory::Memory;
use super::site::{Blocks, HostSide, Site};
use super::together::{PIECES, TOGETHER};
use super::{Builder, Error, MAX_BLOCKS, Result, Sizes};

/// Shape of the kernels that set a heap up and look at it.
const HEAP_BLOCKS: usize = 64;
const HEAP_THREADS: usize = 256;
/// Blocks that look at the host's memory at a time, where rings are there.
const LOOKERS: u32 = 2;
/// How long a look at the heap may take. Where blocks leave no room for others on any multiprocessor it waits for their end.
const LOOK: Duration = Duration::from_secs(1);
/// Between looks for its end.
const NAP: Duration = Duration::from_micros(50);
/// Hints that each multiprocessor keeps for its warps, of a heap of at least [`LARGE`] bytes and of a smaller one.
const HINTS: [u32; 2] = [64, 4];
const LARGE: u64 = 256 << 20;

/// The functions as kernels.
struct Kernels {
    grid: Kernel,
    heap_setup: Kernel,
    heap_usage: Kernel,
}

impl Kernels {
    fn compile(device: &Arc<dyn Device>, with: &Builder) -> Result<Arc<Self>> {
        let source = Source::CudaCpp(with.text().into());
        let kernel = |entry: &str| device.compile(&source, entry);
        let (grid, heap_setup, heap_usage) = (kernel("fb_grid")?, kernel("fb_heap_setup")?, kernel("fb_heap_usage")?);
        Ok(Arc::new(Kernels { grid, heap_setup, heap_usage }))
    }
}

struct Queues {
    /// Has the grid in it, while that runs.
    grid: Box<dyn Queue>,
    side: Box<dyn Queue>,
    launched: Fence,
    /// A look at the heap that nobody has seen the end of.
    looking: Option<Fence>,
}

struct Heap {
    _memory: Buffer,
    /// Where it begins in that.
    at: u64,
    /// What was found of its use, there and on the host.
    found: [Buffer; 2],
}

struct Inner {
    device: Arc<dyn Device>,
    grid: Buffer,
    heap: Option<Heap>,
    /// Everything that the grid points to.
    _parts: Vec<Buffer>,
    host: HostSide,
    blocks: usize,
    shape: Geometry,
    kernels: Mutex<Arc<Kernels>>,
    queues: Mutex<Queues>,
}

// SAFETY: the addresses in `host` are of buffers in `_parts`; who writes what there is the protocol's (docs/resident.md).
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A CUDA device.
pub(super) struct CudaSite(Arc<Inner>);

fn address(b: &Buffer) -> Result<u64> {
    b.address().ok_or_else(|| Error::Start("device memory without an address".into()))
}

/// Copies plain values to the device, and waits.
fn upload<T>(q: &mut dyn Queue, to: &Buffer, offset: usize, from: &[T]) -> Result<()> {
    // By address: some types end in padding, which is no bytes to Rust, and copied like anything else by the driver.
    let source = from.as_ptr().cast::<u8>().cast_mut();
    // SAFETY: so many bytes are there; they are only read, and that is awaited here.
    unsafe { q.transfer(Method::Engine, Direction::ToDevice, to, offset, source, size_of_val(from))? };
    let fence = q.fence()?;
    Ok(q.wait(fence)?)
}

impl CudaSite {
    pub(super) fn new(with: &Builder, device: &Arc<dyn Device>) -> Result<Self> {
        // Asked for now: it compiles a kernel the first time.
        let _ = device.methods();
        let kernels = Kernels::compile(device, with)?;
        let sizes = &with.sizes;
        let blocks = sizes.blocks.unwrap_or(device.info().compute_units as usize).clamp(1, MAX_BLOCKS);
        let mut side = device.queue()?;
        let heap = sizes.heap.map(|bytes| heap(device, &mut *side, &kernels, bytes)).transpose()?;
        // What blocks put aside is not copied: nothing is in it yet.
        let image = Memory::new(&Sizes { aside: 0, ..sizes.clone() }, blocks, None);
        let mut parts = Vec::new();
        fn place<T>(d: &Arc<dyn Device>, q: &mut dyn Queue, parts: &mut Vec<Buffer>, from: &[T]) -> Result<u64> {
            let b = d.alloc(size_of_val(from))?;
            upload(q, &b, 0, from)?;
            let at = address(&b)?;
            parts.push(b);
            Ok(at)
        }
        let cells = [0, 1, 2].map(|i| place(device, &mut *side, &mut parts, &image.cells[i]));
        let [urgent, ordinary, free] = cells;
        let (nodes, roots) = (
            place(device, &mut *side, &mut parts, &image.nodes)?,
            place(device, &mut *side, &mut parts, &image.roots)?,
        );
        let (done, done_there) = device.alloc_shared(size_of::<Done>() * 2 * sizes.ring)?;
        // One piece: rings, the stop word, heartbeats, tasks that are submitted together.
        let ring = size_of::<Slot>() * sizes.ring;
        let (control, beats) = (2 * ring, 2 * ring + size_of::<Control>());
        let calls = beats + size_of::<Beat>() * blocks;
        let bytes = calls + size_of::<layout::Task>() * TOGETHER * PIECES;
        let (near, near_there, mapped) = near(device, &mut *side, bytes)?;
        let at = address(&near_there)?;
        // SAFETY: addresses within the piece; every part of it is a multiple of 64 bytes.
        let here = |offset: usize| unsafe { near.add(offset) };
        let host_of_done = done.host_ptr().ok_or_else(|| Error::Start("host memory without an address".into()))?;
        let host = HostSide {
            slots: [here(0).cast(), here(ring).cast()],
            done: host_of_done.as_ptr().cast(),
            calls: here(calls).cast(),
            beats: here(beats).cast(),
            control: here(control).cast(),
            mapped,
        };
        // SAFETY: a copy of plain values; the boxes that it points to are not this copy's.
        let mut g = unsafe { std::ptr::read(&raw const *image.grid) };
        (g.rings[0].slots, g.rings[1].slots) = (at as *mut Slot, (at + ring as u64) as *mut Slot);
        // SAFETY: as above.
        let mut state = unsafe { std::ptr::read(&raw const *image.state) };
        (state.queues[0].cells, state.queues[1].cells) = (urgent? as *mut _, ordinary? as *mut _);
        (state.free_nodes.cells, g.nodes, g.roots) = (free? as *mut _, nodes as *mut _, roots as *mut _);
        g.done = address(&done_there)? as *mut _;
        g.control = (at + control as u64) as *mut _;
        g.beats = (at + beats as u64) as *mut _;
        g.calls = (at + calls as u64) as *mut _;
        // On the bus there is room for the looks of a few, not of all.
        (g.limited, state.permits) = if mapped { (0, 0) } else { (1, LOOKERS) };
        // Memory of the host appears in the order in which the host writes it; the device's, as it comes over the bus.
        g.halves = u32::from(!mapped || streaming::lines_are_whole());
        g.state = place(device, &mut *side, &mut parts, std::slice::from_ref(&state))? as *mut _;
        let aside = device.alloc(size_of::<layout::Task>() * sizes.aside * blocks)?;
        g.aside_size = sizes.aside as u32;
        g.aside = address(&aside)? as *mut _;
        parts.push(aside);
        g.posts = place(device, &mut *side, &mut parts, &image.posts)? as *mut _;
        g.heap = heap.as_ref().map_or(0, |h| h.at) as *mut u8;
        warm(device, &mut *side)?;
        let grid = device.alloc(size_of::<layout::Grid>())?;
        upload(&mut *side, &grid, 0, std::slice::from_ref(&g))?;
        parts.extend([done, done_there, near_there]);
        let shape = Geometry::linear(blocks * sizes.threads).with_group(sizes.threads, 1, 1);
        let queues = Mutex::new(Queues { grid: device.queue()?, side, launched: Fence::default(), looking: None });
        let device = device.clone();
        let kernels = Mutex::new(kernels);
        Ok(CudaSite(Arc::new(Inner { device, grid, heap, _parts: parts, host, blocks, shape, kernels, queues })))
    }
}

/// Fills and copies on the device: the driver does some by kernels of its own, which it may load at their first use, and beside
/// the grid it would wait for that then.
fn warm(device: &Arc<dyn Device>, q: &mut dyn Queue) -> Result<()> {
    const BYTES: usize = 1 << 10;
    let (a, b) = (device.alloc(BYTES)?, device.alloc(BYTES)?);
    // In words, and in bytes.
    for bytes in [BYTES, 3] {
        q.fill(&a, 0, bytes, 0)?;
        q.copy(&a, 0, &b, 0, bytes)?;
    }
    let fence = q.fence()?;
    Ok(q.wait(fence)?)
}

/// A piece that both sides look at often: the host's address, the device's buffer, and whether it is device memory.
fn near(device: &Arc<dyn Device>, q: &mut dyn Queue, bytes: usize) -> Result<(*mut u8, Buffer, bool)> {
    let b = device.alloc_mapped(bytes)?;
    if let Some(p) = b.mapped_ptr() {
        q.fill(&b, 0, bytes, 0)?;
        let fence = q.fence()?;
        q.wait(fence)?;
        return Ok((p.as_ptr(), b, true));
    }
    // The handle of the device keeps the host's memory.
    let (here, there) = device.alloc_shared(bytes)?;
    let p = here.host_ptr().ok_or_else(|| Error::Start("host memory without an address".into()))?;
    Ok((p.as_ptr(), there, false))
}

fn heap(device: &Arc<dyn Device>, q: &mut dyn Queue, kernels: &Kernels, bytes: u64) -> Result<Heap> {
    let failed = |why: String| Error::Start(format!("a heap of {bytes} bytes: {why}"));
    let memory = device.alloc(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(|e| failed(e.to_string()))?;
    let begin = address(&memory)?;
    let found = [device.alloc(size_of::<HeapUse>())?, device.alloc_host(size_of::<HeapUse>())?];
    let processors = device.info().compute_units.max(1);
    let hints = HINTS[usize::from(bytes < LARGE)];
    let shape = Geometry::linear(4 * processors as usize * HEAP_THREADS).with_group(HEAP_THREADS, 1, 1);
    let args = [Arg::U64(begin), Arg::U64(bytes), Arg::U32(processors), Arg::U32(hints), Arg::Buffer(&found[0])];
    q.launch(&kernels.heap_setup, &shape, &args)?;
    let mut ok = [0u8; 4];
    download(q, &found[0], &mut ok)?;
    if ok == [0; 4] {
        return Err(failed("no room for a page of 65536 and what describes it".into()));
    }
    let at = begin.next_multiple_of(ALIGN as u64);
    Ok(Heap { _memory: memory, at, found })
}

fn download(q: &mut dyn Queue, from: &Buffer, to: &mut [u8]) -> Result<()> {
    // SAFETY: awaited here.
    unsafe { q.transfer(Method::Engine, Direction::ToHost, from, 0, to.as_mut_ptr(), to.len())? };
    let fence = q.fence()?;
    Ok(q.wait(fence)?)
}

impl Inner {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kernels(&self) -> Arc<Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks at the heap, and waits for that without keeping others from the queues: who waits for a task looks there, too.
    fn look_at(&self, h: &Heap) -> Result<HeapUse> {
        let (begun, [there, here]) = (Instant::now(), &h.found);
        loop {
            let mut q = self.queues();
            let looking = match q.looking {
                Some(begun_before) => begun_before,
                None => {
                    q.side.fill(there, 0, size_of::<HeapUse>(), 0)?;
                    let shape = Geometry::linear(HEAP_BLOCKS * HEAP_THREADS).with_group(HEAP_THREADS, 1, 1);
                    let args = [Arg::U64(h.at), Arg::Buffer(there)];
                    q.side.launch(&self.kernels().heap_usage, &shape, &args)?;
                    q.side.copy(there, 0, here, 0, size_of::<HeapUse>())?;
                    let behind = q.side.fence()?;
                    q.looking = Some(behind);
                    behind
                }
            };
            if q.side.done(looking)? {
                q.looking = None;
                let found = here.host_ptr().ok_or_else(|| Error::Start("host memory without an address".into()))?;
                // SAFETY: it has the bytes; the copy is done, and the next one comes by this lock.
                return Ok(HeapUse::from_bytes(&unsafe { found.cast().read() }));
            }
            drop(q);
            if begun.elapsed() > LOOK {
                return Err(Error::Start("the grid leaves no room for a look at its heap".into()));
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Site for CudaSite {
    fn host_side(&self) -> HostSide {
        self.0.host
    }

    fn blocks(&self) -> usize {
        self.0.blocks
    }

    fn memory_id(&self) -> Option<u64> {
        self.0.device.memory_id()
    }

    fn loads_beside(&self) -> bool {
        false
    }

    fn load(&self, with: &Builder) -> Result<()> {
        // Its blocks stay as they are.
        let with = with.clone().threads(self.0.shape.group[0]);
        let kernels = Kernels::compile(&self.0.device, &with)?;
        *self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner) = kernels;
        Ok(())
    }

    fn run(&self, keep: Arc<dyn Send + Sync>) -> Result<Box<dyn Blocks>> {
        let kernels = self.0.kernels();
        // Before it is there: what somebody freed in between would wait for it.
        let occupied = Some(self.0.device.occupy());
        let mut q = self.0.queues();
        q.grid.launch(&kernels.grid, &self.0.shape, &[Arg::Buffer(&self.0.grid)])?;
        q.launched = q.grid.fence()?;
        Ok(Box::new(Running { site: self.0.clone(), keep: Some(keep), occupied }))
    }

    fn fault(&self) -> Option<String> {
        let mut q = self.0.queues();
        let launched = q.launched;
        q.grid.done(launched).err().map(|e| e.to_string())
    }

    fn heap_use(&self) -> Option<Result<HeapUse>> {
        let h = self.0.heap.as_ref()?;
        Some(self.0.look_at(h))
    }
}

/// The kernel.
struct Running {
    site: Arc<Inner>,
    keep: Option<Arc<dyn Send + Sync>>,
    occupied: Option<Occupied>,
}

impl Blocks for Running {
    fn have_ended(&self) -> bool {
        let mut q = self.site.queues();
        let launched = q.launched;
        // What is lost has ended, too.
        q.grid.done(launched).unwrap_or(true)
    }

    fn join(self: Box<Self>) -> Result<()> {
        let completion = {
            let mut q = self.site.queues();
            let launched = q.launched;
            q.grid.completion(launched)?
        };
        Ok(completion.map_or(Ok(()), |c| c.wait())?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.have_ended() {
            // The device still uses all of it, and frees nothing while the kernel runs.
            std::mem::forget((self.keep.take(), self.occupied.take(), self.site.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in;
    use forebay_hal::{Kind, discover};

    #[test]
    fn a_look_at_the_heap_that_does_not_end_keeps_nobody() {
        if !stand_in::is_here() {
            return stand_in::again("resident::cuda::tests::a_look_at_the_heap_that_does_not_end_keeps_nobody");
        }
        let (devices, why) = discover(&[Kind::Cuda]);
        let d = devices.first().unwrap_or_else(|| panic!("{why:?}"));
        let with = Builder::new("TASK(none) {}").functions(["none"]).blocks(1).heap(1 << 20);
        let site = CudaSite::new(&with, d).unwrap();
        let usage = |site: &CudaSite| site.heap_use().unwrap();
        let empty = usage(&site).unwrap();
        // Something is before it, as where there is no room.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        site.0.queues().side.host_fn(Box::new(move || _ = wait.recv())).unwrap();
        std::thread::scope(|s| {
            let looked = s.spawn(|| usage(&site).map_err(|e| e.to_string()));
            // Nobody waits for it meanwhile who asks for the grid.
            std::thread::sleep(Duration::from_millis(50));
            let begun = Instant::now();
            assert_eq!(site.fault(), None);
            assert!(begun.elapsed() < LOOK / 2, "{:?}", begun.elapsed());
            let said = looked.join().unwrap().unwrap_err();
            assert!(said.contains("no room"), "{said}");
        });
        drop(go_on);
        assert_eq!(usage(&site).unwrap(), empty);
        assert_eq!(usage(&site).unwrap(), empty);
    }
}
