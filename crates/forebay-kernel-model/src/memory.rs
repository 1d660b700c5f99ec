//! Memory of the program that has called.

use std::io;

use bytemuck::Pod;
use rustix::process::Pid;

/// A process's memory.
#[derive(Clone, Copy)]
pub struct Memory(pub Pid);

impl Memory {
    fn move_bytes(self, address: u64, bytes: &mut [u8], write: bool) -> io::Result<()> {
        let here = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
        let pid = self.0.as_raw_nonzero().get();
        // SAFETY: `here` is all of `bytes`, alive and ours alone; the other address is another process's, which the kernel
        // checks.
        let moved = unsafe {
            if write {
                libc::process_vm_writev(pid, &raw const here, 1, &raw const there, 1, 0)
            } else {
                libc::process_vm_readv(pid, &raw const here, 1, &raw const there, 1, 0)
            }
        };
        match moved {
            n if n == bytes.len() as isize => Ok(()),
            n if n < 0 => Err(io::Error::last_os_error()),
            _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        }
    }

    /// Reads what lies there.
    pub fn read(self, address: u64, to: &mut [u8]) -> io::Result<()> {
        self.move_bytes(address, to, false)
    }

    /// Writes it.
    pub fn write(self, address: u64, from: &[u8]) -> io::Result<()> {
        self.move_bytes(address, &mut from.to_vec(), true)
    }

    /// Reads a structure.
    pub fn get<T: Pod>(self, address: u64) -> io::Result<T> {
        let mut t = T::zeroed();
        self.read(address, bytemuck::bytes_of_mut(&mut t))?;
        Ok(t)
    }

    /// Writes it.
    pub fn put<T: Pod>(self, address: u64, t: &T) -> io::Result<()> {
        self.write(address, bytemuck::bytes_of(t))
    }
}
