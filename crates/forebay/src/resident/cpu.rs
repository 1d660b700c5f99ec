//! A grid on the CPU: a thread a block. Task functions are built by the machine's C++ compiler, and kept in the cache like any
//! compiled kernel.

use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use forebay_hal::cache::Cache;

use super::heap::{Heap, HeapUse};
use super::layout;
use super::memory::Memory;
use super::site::{Blocks, HostSide, Site};
use super::{Builder, Error, MAX_THREADS, Result, Sizes};

/// What the compiler is told.
/// Tasks are written as words and read as what they are (look.h, post.h), which C++ lets compilers take for different memory.
const OPTIONS: [&str; 8] =
    ["-std=c++17", "-O3", "-fno-strict-aliasing", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c++"];

/// A loaded grid: the function that is a block, and those of its heap.
pub(super) struct Code {
    block: unsafe extern "C" fn(*mut layout::Grid, u32),
    heap_setup: unsafe extern "C" fn(*mut u8, u64, u32, u32) -> u32,
    heap_usage: unsafe extern "C" fn(*mut u8, *mut HeapUse),
    /// The function's code.
    _library: libloading::Library,
    /// Where it was loaded from; closed after that. The loader knows libraries by path: were its number used again before,
    /// another library would be this one.
    _file: std::fs::File,
}

impl Code {
    /// Is block `block` of the grid until that is stopped.
    ///
    /// # Safety
    /// `grid` is valid, and so is all that it points to, until this returns.
    pub(super) unsafe fn run(&self, grid: *mut layout::Grid, block: u32) {
        // SAFETY: the library lives as long as `self`; by the contract.
        unsafe { (self.block)(grid, block) }
    }

    /// Makes memory a heap for so many blocks; false when there is no room for a page.
    pub(super) fn heap_setup(&self, memory: &mut [MaybeUninit<u8>], blocks: u32) -> bool {
        // SAFETY: writes within the memory; the signature is that of device/heap/host.h.
        unsafe { (self.heap_setup)(memory.as_mut_ptr().cast(), memory.len() as u64, blocks, 1) != 0 }
    }

    /// What is taken of a heap, and what is left.
    ///
    /// # Safety
    /// `heap` was set up, and its memory is there.
    pub(super) unsafe fn heap_usage(&self, heap: *mut u8) -> HeapUse {
        let mut to = HeapUse::default();
        // SAFETY: by the contract; the layout of `HeapUse` is that of device/heap/host.h.
        unsafe { (self.heap_usage)(heap, &raw mut to) };
        to
    }
}

/// Threads of this process.
pub(super) struct CpuSite {
    /// Only to be freed: everything goes through addresses.
    memory: *mut Memory,
    grid: *mut layout::Grid,
    blocks: usize,
    /// What blocks run at present.
    code: Mutex<Arc<Code>>,
}

// SAFETY: the memory is freed when the last handle drops, after all blocks have ended; see `Memory` for what is in it.
unsafe impl Send for CpuSite {}
// SAFETY: as above.
unsafe impl Sync for CpuSite {}

impl Drop for CpuSite {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`; no block has it any more: each holds a handle while it runs.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}

/// Where the grid is for its blocks.
#[derive(Clone, Copy)]
struct Address(*mut layout::Grid);
// SAFETY: the grid is shared by protocol.
unsafe impl Send for Address {}

impl CpuSite {
    pub(super) fn new(builder: &Builder) -> Result<Self> {
        let blocks = builder.sizes.blocks();
        if blocks > MAX_THREADS {
            return Err(Error::Setting { what: "blocks", is: blocks as u64, allowed: "1 to 1024, on the CPU," });
        }
        let code = build(&builder.text())?;
        let Sizes { heap, .. } = builder.sizes;
        let heap = heap.map(|bytes| Heap::new(&code, bytes, blocks)).transpose()?;
        let memory = Box::into_raw(Memory::new(&builder.sizes, blocks, heap));
        // SAFETY: just made, and nobody else's yet.
        let grid = unsafe { &raw mut *(*memory).grid };
        Ok(CpuSite { memory, grid, blocks, code: Mutex::new(Arc::new(code)) })
    }

    fn code(&self) -> Arc<Code> {
        self.code.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Site for CpuSite {
    fn host_side(&self) -> HostSide {
        // SAFETY: the memory lives as long as `self`; these fields never change.
        unsafe {
            let (g, ring) = (self.grid, &raw const (*self.grid).rings);
            let slots = [(*ring)[0].slots, (*ring)[1].slots];
            let (done, calls, beats, control) = ((*g).done, (*g).calls, (*g).beats, (*g).control);
            HostSide { slots, done, calls, beats, control, mapped: false }
        }
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn memory_id(&self) -> Option<u64> {
        None
    }

    fn loads_beside(&self) -> bool {
        true
    }

    fn load(&self, with: &Builder) -> Result<()> {
        let code = Arc::new(build(&with.text())?);
        *self.code.lock().unwrap_or_else(PoisonError::into_inner) = code;
        Ok(())
    }

    fn run(&self, keep: Arc<dyn Send + Sync>) -> Result<Box<dyn Blocks>> {
        let mut threads = Threads(Vec::new());
        for i in 0..self.blocks {
            let (address, keep, code) = (Address(self.grid), keep.clone(), self.code());
            let run = move || {
                let Address(grid) = { address };
                // SAFETY: `keep` keeps the memory.
                unsafe { code.run(grid, i as u32) };
                drop(keep);
            };
            match std::thread::Builder::new().name(format!("block{i}")).spawn(run) {
                Ok(t) => threads.0.push(t),
                Err(e) => {
                    // Those that were started end.
                    // SAFETY: the memory lives as long as `self`; the word is atomic.
                    let stop = unsafe { AtomicU32::from_ptr(&raw mut (*(*self.grid).control).stop) };
                    stop.store(layout::STOP_NOW, Ordering::Release);
                    return Err(Error::Start(format!("block {i}: {e}")));
                }
            }
        }
        Ok(Box::new(threads))
    }

    fn heap_use(&self) -> Option<Result<HeapUse>> {
        // SAFETY: set up when the grid was started; the memory lives as long as `self`.
        let heap = unsafe { (*self.grid).heap };
        // SAFETY: as above.
        (!heap.is_null()).then(|| Ok(unsafe { self.code().heap_usage(heap) }))
    }
}

struct Threads(Vec<JoinHandle<()>>);

impl Blocks for Threads {
    fn have_ended(&self) -> bool {
        self.0.iter().all(JoinHandle::is_finished)
    }

    fn join(self: Box<Self>) -> Result<()> {
        for t in self.0 {
            let _ = t.join();
        }
        Ok(())
    }
}

fn version(compiler: &str) -> Option<String> {
    let out = Command::new(compiler).arg("--version").stderr(Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// What this processor has that the compiler does not count on: the heap counts bits all the time.
fn own_options() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("popcnt") {
        return &["-mpopcnt"];
    }
    &[]
}

pub(super) fn build(text: &str) -> Result<Code> {
    let chosen = std::env::var("CXX").ok().filter(|c| !c.is_empty());
    let names = chosen.map_or_else(|| vec!["g++".to_owned(), "clang++".into(), "c++".into()], |c| vec![c]);
    let found = names.iter().find_map(|n| version(n).map(|v| (n.clone(), v)));
    let (compiler, version) = found.ok_or_else(|| Error::NoCompiler(format!("tried {}", names.join(", "))))?;
    let cache = Cache::user();
    let options = || [&OPTIONS[..], own_options()].concat().join(" ");
    let key = Cache::key(&[b"resident", text.as_bytes(), version.as_bytes(), options().as_bytes()]);
    if let Some(code) = cache.get(&key).and_then(|binary| load(&binary).ok()) {
        return Ok(code);
    }
    // A folder of our own, made anew: what others can write is not loaded, and nothing of theirs written to.
    let dir = tempfile::Builder::new().prefix("forebay-resident-").tempdir();
    let dir = dir.map_err(|e| Error::Start(format!("a folder to compile in: {e}; TMPDIR says where")))?;
    let binary = compile(&compiler, &dir.path().join("tasks.so"), text)?;
    let code = load(&binary)?;
    cache.put(&key, &binary);
    Ok(code)
}

/// The binary of `text`.
fn compile(compiler: &str, out: &Path, text: &str) -> Result<Vec<u8>> {
    let start = |e: std::io::Error| Error::Start(format!("{compiler}: {e}"));
    let mut command = Command::new(compiler);
    command.args(OPTIONS).args(own_options()).arg("-").arg("-o").arg(out);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = piped.spawn().map_err(start)?;
    let written = child.stdin.take().map_or(Ok(()), |mut to| to.write_all(text.as_bytes()));
    let done = child.wait_with_output().map_err(start)?;
    if !done.status.success() {
        return Err(Error::Compile(String::from_utf8_lossy(&done.stderr).into_owned()));
    }
    written.map_err(start)?;
    std::fs::read(out).map_err(start)
}

fn load(binary: &[u8]) -> Result<Code> {
    let start = |e: &dyn std::fmt::Display| Error::Start(e.to_string());
    let file = rustix::fs::memfd_create("resident", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| start(&e))?;
    let mut file = std::fs::File::from(file);
    file.write_all(binary).map_err(|e| start(&e))?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: made by our own build of the program's own functions; it has no initialisers.
    let library = unsafe { libloading::Library::new(&path) }.map_err(|e| start(&e))?;
    // SAFETY: the signatures are those of device/resident/grid.h and device/heap/host.h.
    unsafe {
        let block = *library.get(b"fb_block\0").map_err(|e| start(&e))?;
        let heap_setup = *library.get(b"fb_heap_setup\0").map_err(|e| start(&e))?;
        let heap_usage = *library.get(b"fb_heap_usage\0").map_err(|e| start(&e))?;
        Ok(Code { block, heap_setup, heap_usage, _library: library, _file: file })
    }
}
