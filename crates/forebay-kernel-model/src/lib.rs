//! NVIDIA's kernel driver as a model, at the level of its files and ioctls: programs that run in it open
//! `/dev/nvidiactl` and call it as they would on a machine with a GPU, and are answered from [`FakeRm`].
//!
//! So [`forebay_rm::Host`], which everything above the seam can do without, runs as it is, and so do programs that know
//! nothing of Forebay: what holds for the model can be tried with those that are known to work on the hardware.
//!
//! **Rules**
//! 1. A program is put in before it starts ([`Kernel::put_in`]). It gets a mount namespace whose `/dev` has the driver's
//!    files, ordinary and empty ones, and a filter of system calls that its children inherit.
//! 2. Calls with the driver's numbers on these files come here, whichever process makes them, through whichever
//!    duplicate; all other calls go on to the kernel. Nothing is written into a program but the results of its calls.
//! 3. Who may ask about a client is decided by the open file description, as in the driver (`files.rs` tells how it is
//!    told from others). What was made on it goes when its last duplicate is closed.
//! 4. A mapping is made as on the hardware, by a call that names a file and an mmap of that file: the call puts the
//!    memory in the place of the file.
//! 5. It takes root ([`Kernel::new`] says so); it leaves nothing behind, and changes nothing for other programs.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod call;
mod files;
mod inside;
mod memory;
mod program;
mod serve;

use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_rm::Rm;
use forebay_rm::fake::FakeRm;

pub use program::objects_of_cuda;

use files::Files;

/// A machine with the model of the driver.
pub struct Kernel {
    rm: FakeRm,
    root: tempfile::TempDir,
    files: Arc<Mutex<Files>>,
}

impl Kernel {
    /// The model of a machine whose driver and GPUs are those of `rm`.
    ///
    /// # Errors
    /// The kernel's, where the files cannot be made or no program put in; [`io::ErrorKind::PermissionDenied`] without root.
    pub fn new(rm: FakeRm) -> io::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let root = tempfile::Builder::new().prefix("forebay-kernel-").tempdir()?;
        let path = |of: &str| root.path().join(of);
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755))?;
        for dir in ["dev", "old", "module/nvidia"] {
            fs::create_dir_all(path(dir))?;
        }
        let other = io::Error::other;
        fs::write(path("module/nvidia/version"), rm.driver_version().map_err(other)? + "\n")?;
        let mut nodes = vec!["nvidiactl".to_owned()];
        nodes.extend(rm.cards().map_err(other)?.iter().map(|c| format!("nvidia{}", c.minor)));
        for node in &nodes {
            fs::write(path("dev").join(node), "")?;
            fs::set_permissions(path("dev").join(node), fs::Permissions::from_mode(0o666))?;
        }
        // All else is the machine's own.
        for entry in fs::read_dir("/dev")? {
            let name = entry?.file_name();
            if !name.as_bytes().starts_with(b"nvidia") {
                symlink(path("old").join(&name), path("dev").join(&name))?;
            }
        }
        let files = Files::new(rm.clone(), &path("dev"), &nodes)?;
        let files = Arc::new(Mutex::new(files));
        serve::look_after(Arc::downgrade(&files))?;
        let kernel = Kernel { rm, root, files };
        // Root of a container may have neither mounts nor filters that are listened to.
        let mut nothing = Command::new("/bin/true");
        kernel.put_in(&mut nothing)?;
        nothing.status()?;
        Ok(kernel)
    }

    /// The fake that answers.
    pub fn rm(&self) -> &FakeRm {
        &self.rm
    }

    /// From now on the GPUs' time is that of the clock. Otherwise it passes when [`FakeRm::run`] lets it.
    pub fn keep_time(&self) {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).keep_time();
    }

    /// From now on each call that a program makes is a line there: who, what, the parameters as words, the status.
    pub fn tell(&self, to: Box<dyn Write + Send>) {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).tell(to);
    }

    /// The program that `command` starts, once, is put into the model, before anything else that is done before it starts.
    ///
    /// # Errors
    /// The kernel's.
    pub fn put_in(&self, command: &mut Command) -> io::Result<()> {
        let listener = inside::enter(command, self.root.path())?;
        serve::spawn(listener, self.files.clone())
    }
}
