//! The fake's log of context switches: event buffers in memory that the client maps, as the driver keeps them.
//!
//! Records are made visible when somebody flushes, or [`DRAIN_US`] after the last time; what does not fit is dropped and
//! counted; the numbers in the records go on for all buffers alike.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::sys::{EventBufferAlloc, Header, RawHandle, Record, TAG_END, TAG_START};

/// Between two times that records become visible by themselves, µs.
pub const DRAIN_US: u64 = 33_000;

/// A change on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub at_us: u64,
    pub pid: u32,
    /// Number of the group.
    pub context: u32,
    pub begins: bool,
}

/// An event buffer.
pub struct EventBuffer {
    header: Arc<OwnedFd>,
    records: Arc<OwnedFd>,
    count: u32,
    pub enabled: bool,
    /// The GPU whose log it is.
    pub bound: Option<usize>,
    head: Header,
}

fn write(file: &OwnedFd, bytes: &[u8], at: u64) {
    // Memory that does not take its bytes is a test's own mistake and shows as such.
    let _ = rustix::io::pwrite(file, bytes, at);
}

impl EventBuffer {
    /// A buffer over these two pieces of memory; none if they are too small for what is said of them.
    pub fn new(p: &EventBufferAlloc, header: Arc<OwnedFd>, records: Arc<OwnedFd>) -> Option<Self> {
        let size = |f: &OwnedFd| rustix::fs::fstat(f).map_or(0, |s| s.st_size as u64);
        let fits = p.record_size as usize == size_of::<Record>()
            && p.record_count > 0
            && size(&header) >= size_of::<Header>() as u64
            && size(&records) >= u64::from(p.record_count) * u64::from(p.record_size);
        let head = Header::default();
        fits.then_some(EventBuffer { header, records, count: p.record_count, enabled: false, bound: None, head })
    }

    fn put(&mut self, r: &Record) {
        if !(self.enabled && self.bound.is_some()) {
            return;
        }
        let next = (self.head.put + 1) % self.count;
        if next == self.head.get {
            self.head.dropped += 1;
        } else {
            write(&self.records, bytemuck::bytes_of(r), u64::from(self.head.put) * size_of::<Record>() as u64);
            self.head.put = next;
            self.head.count += 1;
        }
    }

    /// What was said to have been read.
    pub fn read_up_to(&mut self, get: u32) -> bool {
        let good = get < self.count;
        if good {
            self.head.get = get;
            self.head.dropped = 0;
            self.publish();
        }
        good
    }

    fn publish(&self) {
        write(&self.header, bytemuck::bytes_of(&self.head), 0);
    }
}

/// What the GPU has recorded and nobody sees yet.
#[derive(Default)]
pub struct Pending {
    records: VecDeque<Record>,
    sequence: u16,
    drained_us: u64,
}

impl Pending {
    pub fn note(&mut self, c: Change) {
        self.sequence = self.sequence.wrapping_add(1);
        let tag = if c.begins { TAG_START } else { TAG_END };
        let (pid, context, sequence, at_ns) = (c.pid, c.context, self.sequence, c.at_us * 1000);
        self.records.push_back(Record { kind: 2, tag, sequence, context, pid, at_ns, ..Record::default() });
    }

    /// A record goes missing between GPU and driver.
    pub fn lose(&mut self) {
        self.records.pop_back();
    }

    /// Makes them visible, if it is time or asked for.
    pub fn drain<'a>(&mut self, now_us: u64, asked: bool, to: impl Iterator<Item = &'a mut EventBuffer>) {
        if !asked && now_us < self.drained_us + DRAIN_US {
            return;
        }
        self.drained_us = now_us;
        let all: Vec<Record> = self.records.drain(..).collect();
        for b in to {
            all.iter().for_each(|r| b.put(r));
            b.publish();
        }
    }
}

/// Memory of the system, `size` bytes.
pub fn system_memory(size: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("fake-memory", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(file.as_fd(), size)?;
    Ok(file)
}

/// Where another process finds a file of this one.
pub fn path_of(file: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Event buffers by client and handle.
pub type Buffers = std::collections::BTreeMap<(RawHandle, RawHandle), EventBuffer>;
