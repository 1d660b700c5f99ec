//! The fake in another process: a test holds the machine, and a service and its guardian talk to it over a socket, so that
//! they can be killed like real ones. What a connection has opened closes when it ends, as the kernel closes files.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::FakeRm;
use crate::error::{Error, Result};
use crate::finder::Finder;
use crate::rm::{ControlFile, Rm, Window};
use crate::sys::{Alloc, Card, Control, Free, MapMemory, UnmapMemory};

/// Longest frame, bytes.
const MAX_FRAME: usize = 1 << 20;

fn write_frame(to: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let n: usize = parts.iter().map(|p| p.len()).sum();
    let mut all = Vec::with_capacity(n + 4);
    all.extend((n as u32).to_le_bytes());
    parts.iter().for_each(|p| all.extend(*p));
    to.write_all(&all)
}

fn read_frame(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut n = [0; 4];
    from.read_exact(&mut n)?;
    let n = u32::from_le_bytes(n) as usize;
    if n > MAX_FRAME {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut all = vec![0; n];
    from.read_exact(&mut all)?;
    Ok(all)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at * 4..at * 4 + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

const VERSION: u32 = 0;
const OPEN: u32 = 1;
const FILES_OF: u32 = 2;
const PROCESSES: u32 = 3;
const CONTROL: u32 = 4;
const ALLOC: u32 = 5;
const FREE: u32 = 6;
const CARDS: u32 = 7;
const CLOSE: u32 = 8;
const GPU_TIME: u32 = 9;
const MAP_SYSTEM: u32 = 10;
const UNMAP: u32 = 11;
const COUNT_FILES: u32 = 12;

/// Answers connections at `path` from `rm` until the process ends.
///
/// # Errors
/// The kernel's, when the socket cannot be made.
pub fn serve(rm: FakeRm, path: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(io::Result::ok) {
            let rm = rm.clone();
            std::thread::spawn(move || {
                // Its end is the end of the process at the other side.
                let _ = answer(&rm, stream);
            });
        }
    });
    Ok(())
}

fn answer(rm: &FakeRm, mut stream: UnixStream) -> io::Result<()> {
    let mut files: HashMap<u32, Box<dyn ControlFile>> = HashMap::new();
    let mut next = 0u32;
    let mut keep = |files: &mut HashMap<u32, Box<dyn ControlFile>>, f| {
        next += 1;
        files.insert(next, f);
        next
    };
    loop {
        let q = read_frame(&mut stream)?;
        let (op, argument, rest) = (word(&q, 0), word(&q, 1), q.get(8..).unwrap_or_default());
        // The first byte says whether it went well.
        let good = [0u8];
        let bad = [1u8];
        match op {
            VERSION => write_frame(&mut stream, &[&good, rm.driver_version().unwrap_or_default().as_bytes()])?,
            OPEN => match rm.open(argument) {
                Ok(f) => write_frame(&mut stream, &[&good, &keep(&mut files, f).to_le_bytes()])?,
                Err(_) => write_frame(&mut stream, &[&bad])?,
            },
            FILES_OF | PROCESSES => {
                let words = if op == PROCESSES {
                    rm.processes(&mut Finder::new("")).ok()
                } else {
                    rm.files_of(argument).ok().map(|all| all.into_iter().map(|f| keep(&mut files, f)).collect())
                };
                match words {
                    Some(w) => write_frame(&mut stream, &[&good, bytemuck::cast_slice(&w)])?,
                    None => write_frame(&mut stream, &[&bad])?,
                }
            }
            CLOSE => {
                files.remove(&argument);
                write_frame(&mut stream, &[&good])?;
            }
            GPU_TIME => {
                let t = rm.gpu_time(argument);
                write_frame(&mut stream, &[if t.is_some() { &good } else { &bad }, &t.unwrap_or(0).to_le_bytes()])?;
            }
            COUNT_FILES => write_frame(&mut stream, &[&good, &(rm.count_files(argument) as u32).to_le_bytes()])?,
            CONTROL | ALLOC | FREE | CARDS | MAP_SYSTEM | UNMAP => {
                let Some(f) = files.get(&argument) else {
                    write_frame(&mut stream, &[&bad])?;
                    continue;
                };
                match op {
                    CONTROL => {
                        let (mut call, mut params) = split::<Control>(rest);
                        f.control(&mut call, &mut params)?;
                        write_frame(&mut stream, &[&good, bytemuck::bytes_of(&call), &params])?;
                    }
                    ALLOC => {
                        let (mut call, mut params) = split::<Alloc>(rest);
                        f.alloc(&mut call, &mut params)?;
                        write_frame(&mut stream, &[&good, bytemuck::bytes_of(&call), &params])?;
                    }
                    MAP_SYSTEM => {
                        let (mut call, _) = split::<MapMemory>(rest);
                        // Mapped here for a moment, there by the path of its file.
                        let mapped = f.map_system(&mut call)?.is_some();
                        let path = rm.path_of(call.linear).filter(|_| mapped).unwrap_or_default();
                        write_frame(&mut stream, &[&good, bytemuck::bytes_of(&call), path.as_bytes()])?;
                    }
                    UNMAP => {
                        let (mut call, _) = split::<UnmapMemory>(rest);
                        f.unmap(&mut call)?;
                        write_frame(&mut stream, &[&good, bytemuck::bytes_of(&call)])?;
                    }
                    FREE => {
                        let (mut call, _) = split::<Free>(rest);
                        f.free(&mut call)?;
                        write_frame(&mut stream, &[&good, bytemuck::bytes_of(&call)])?;
                    }
                    _ => write_frame(&mut stream, &[&good, bytemuck::cast_slice(&f.cards()?)])?,
                }
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// A call's structure and what follows it.
fn split<T: bytemuck::Pod>(bytes: &[u8]) -> (T, Vec<u8>) {
    let n = size_of::<T>().min(bytes.len());
    let mut call = T::zeroed();
    bytemuck::bytes_of_mut(&mut call)[..n].copy_from_slice(&bytes[..n]);
    (call, bytes[n..].to_vec())
}

/// The fake, from another process.
pub struct RemoteRm(Arc<Mutex<UnixStream>>);

struct RemoteFile {
    stream: Arc<Mutex<UnixStream>>,
    file: u32,
}

fn ask(stream: &Mutex<UnixStream>, op: u32, argument: u32, rest: &[&[u8]]) -> io::Result<Vec<u8>> {
    let mut s = stream.lock().unwrap_or_else(PoisonError::into_inner);
    let head = [op.to_le_bytes(), argument.to_le_bytes()].concat();
    write_frame(&mut *s, &[&[&head[..]], rest].concat())?;
    let mut reply = read_frame(&mut *s)?;
    if reply.is_empty() || reply.remove(0) != 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(reply)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    (0..bytes.len() / 4).map(|i| word(bytes, i)).collect()
}

impl RemoteRm {
    /// Connects to a fake that [`serve`] answers for.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(RemoteRm(Arc::new(Mutex::new(UnixStream::connect(path)?))))
    }

    /// Time that a process has held the GPU, µs.
    pub fn gpu_time(&self, pid: u32) -> Option<u64> {
        let t = ask(&self.0, GPU_TIME, pid, &[]).ok()?;
        t.try_into().ok().map(u64::from_le_bytes)
    }

    fn file(&self, file: u32) -> Box<dyn ControlFile> {
        Box::new(RemoteFile { stream: self.0.clone(), file })
    }
}

impl Rm for RemoteRm {
    fn driver_version(&self) -> Result<String> {
        let failed = |why| Error::NoDriver { path: "the fake".into(), why };
        ask(&self.0, VERSION, 0, &[]).map(|v| String::from_utf8_lossy(&v).into_owned()).map_err(failed)
    }

    fn open(&self, gpu: u32) -> Result<Box<dyn ControlFile>> {
        let failed = |why| Error::NoDriver { path: format!("/dev/nvidia{gpu}"), why };
        ask(&self.0, OPEN, gpu, &[]).map(|f| self.file(word(&f, 0))).map_err(failed)
    }

    fn files_and_count(&self, pid: u32) -> Result<(Vec<Box<dyn ControlFile>>, usize)> {
        let all = ask(&self.0, FILES_OF, pid, &[]).map_err(|why| Error::Process { pid, why })?;
        Ok((words(&all).into_iter().map(|f| self.file(f)).collect(), self.count_files(pid)))
    }

    fn count_files(&self, pid: u32) -> usize {
        ask(&self.0, COUNT_FILES, pid, &[]).map_or(0, |n| word(&n, 0) as usize)
    }

    fn cards(&self) -> Result<Vec<Card>> {
        let file = self.open(0)?;
        file.cards().map_err(|why| Error::NoDriver { path: "the fake".into(), why })
    }

    fn processes(&self, _: &mut Finder) -> Result<Vec<u32>> {
        let failed = |why| Error::NoDriver { path: "the fake".into(), why };
        ask(&self.0, PROCESSES, 0, &[]).map(|all| words(&all)).map_err(failed)
    }
}

impl RemoteFile {
    fn call<T: bytemuck::Pod>(&self, op: u32, call: &mut T, params: &mut [u8]) -> io::Result<()> {
        let reply = ask(&self.stream, op, self.file, &[bytemuck::bytes_of(call), params])?;
        let (answer, rest) = split::<T>(&reply);
        *call = answer;
        let n = rest.len().min(params.len());
        params[..n].copy_from_slice(&rest[..n]);
        Ok(())
    }
}

impl ControlFile for RemoteFile {
    fn control(&self, call: &mut Control, params: &mut [u8]) -> io::Result<()> {
        self.call(CONTROL, call, params)
    }

    fn alloc(&self, call: &mut Alloc, params: &mut [u8]) -> io::Result<()> {
        self.call(ALLOC, call, params)
    }

    fn free(&self, call: &mut Free) -> io::Result<()> {
        self.call(FREE, call, &mut [])
    }

    fn map_system(&self, call: &mut MapMemory) -> io::Result<Option<Window>> {
        let reply = ask(&self.stream, MAP_SYSTEM, self.file, &[bytemuck::bytes_of(call)])?;
        let (answer, path) = split::<MapMemory>(&reply);
        *call = answer;
        if path.is_empty() {
            return Ok(None);
        }
        let file = std::fs::File::open(std::str::from_utf8(&path).map_err(|_| io::ErrorKind::InvalidData)?)?;
        Window::map_read_only(file.as_fd(), call.length as usize, None).map(Some)
    }

    fn unmap(&self, call: &mut UnmapMemory) -> io::Result<()> {
        self.call(UNMAP, call, &mut [])
    }

    fn cards(&self) -> io::Result<Vec<Card>> {
        let all = ask(&self.stream, CARDS, self.file, &[])?;
        Ok(all.chunks_exact(size_of::<Card>()).map(|c| split::<Card>(c).0).collect())
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        let _ = ask(&self.stream, CLOSE, self.file, &[]);
    }
}
