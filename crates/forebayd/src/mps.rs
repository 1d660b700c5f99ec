//! Control daemons of NVIDIA MPS, as child processes: one for each co-run group, in a folder of its own.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The driver's control daemon, where it is in the path.
pub const PROGRAM: &str = "nvidia-cuda-mps-control";

/// Where daemons live, and which have not been heard the end of.
pub struct Mps {
    program: PathBuf,
    root: PathBuf,
    children: Vec<Child>,
}

impl Mps {
    /// Daemons are started as `program`, in folders below `root`.
    pub fn new(program: PathBuf, root: PathBuf) -> Self {
        Mps { program, root, children: Vec::new() }
    }

    /// The folders of the pipe and of the log.
    pub fn folders(&self, folder: &str) -> [PathBuf; 2] {
        ["pipe", "log"].map(|part| self.root.join(folder).join(part))
    }

    /// Starts a daemon as this user; its number.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn start(&mut self, uid: u32, gid: u32, folder: &str) -> Result<u32, String> {
        self.reap();
        fs::create_dir_all(&self.root).map_err(|e| failed(&self.root, &e))?;
        let own = self.root.join(folder);
        make_for(&own, uid, gid).map_err(|e| failed(&own, &e))?;
        for part in self.folders(folder) {
            make_for(&part, uid, gid).map_err(|e| failed(&part, &e))?;
        }
        // What an earlier daemon left would look like a new one's readiness.
        let _ = fs::remove_file(self.folders(folder)[0].join("control"));
        let child = self.command(uid, gid, folder).arg("-f").stdin(Stdio::null()).spawn().map_err(|e| {
            if e.kind() == std::io::ErrorKind::NotFound {
                format!(
                    "{} is not installed: co-running needs MPS, which comes with NVIDIA's driver",
                    self.program.display()
                )
            } else {
                failed(&self.program, &e)
            }
        })?;
        let pid = child.id();
        self.children.push(child);
        Ok(pid)
    }

    /// Tells a daemon to end when its programs have ended. One that does not hear it has ended already.
    pub fn quit(&mut self, folder: &str) {
        self.reap();
        let Ok(of) = fs::metadata(self.root.join(folder)) else { return };
        let child = self.command(of.uid(), of.gid(), folder).stdin(Stdio::piped()).spawn();
        if let Ok(mut child) = child {
            // A few bytes, which fit into any pipe.
            let _ = child.stdin.take().map(|mut to| to.write_all(b"quit\n"));
            self.children.push(child);
        }
    }

    /// As the group's user, with nothing of this process's but the path.
    fn command(&self, uid: u32, gid: u32, folder: &str) -> Command {
        let [pipe, log] = self.folders(folder);
        let mut c = Command::new(&self.program);
        c.env_clear().envs(std::env::var_os("PATH").map(|p| ("PATH", p)));
        c.env("CUDA_MPS_PIPE_DIRECTORY", pipe).env("CUDA_MPS_LOG_DIRECTORY", log);
        // What is meant for this process (an interrupt of its terminal, say) is not meant for the group's programs.
        c.current_dir("/").process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        if rustix::process::geteuid().is_root() && uid != 0 {
            // The standard library also gives up this process's further groups then.
            c.gid(gid).uid(uid);
        }
        c
    }

    /// Takes note of children that have ended.
    pub fn reap(&mut self) {
        self.children.retain_mut(|c| matches!(c.try_wait(), Ok(None)));
    }
}

fn failed(what: &Path, why: &std::io::Error) -> String {
    format!("{}: {why}", what.display())
}

/// A folder that only this user can open.
fn make_for(path: &Path, uid: u32, gid: u32) -> std::io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    // Not through a link, which somebody else could have put there.
    let m = fs::symlink_metadata(path)?;
    if !m.is_dir() {
        return Err(std::io::Error::other("is not a folder"));
    }
    if m.uid() != uid { chown(path, Some(uid), Some(gid)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_the_users_and_links_are_not_followed() {
        let root = std::env::temp_dir().join(format!("forebay-mps-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut m = Mps::new("no-such-program-anywhere".into(), root.clone());
        let why = m.start(uid, gid, "7-a").unwrap_err();
        assert!(why.contains("not installed") && why.contains("MPS"), "{why}");
        assert_eq!(fs::metadata(root.join("7-a")).unwrap().mode() & 0o777, 0o700);
        std::os::unix::fs::symlink("/tmp", root.join("7-b")).unwrap();
        assert!(m.start(uid, gid, "7-b").unwrap_err().contains("not a folder"));
        fs::remove_dir_all(root).unwrap();
    }
}
