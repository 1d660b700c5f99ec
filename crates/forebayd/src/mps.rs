//! Control daemons of NVIDIA MPS, as child processes: one for each co-run group, in a folder of its own that is made for it
//! and removed when it has ended.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, lchown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The driver's control daemon, where it is in the path.
pub const PROGRAM: &str = "nvidia-cuda-mps-control";
/// Folders of one group that may be left over from daemons before.
const MAX_FOLDERS: usize = 100;

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

    /// Starts a daemon as this user, in a folder that was not there before; its number, and the folder's name.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn start(&mut self, uid: u32, gid: u32, group: &str) -> Result<(u32, String), String> {
        self.reap();
        fs::create_dir_all(&self.root).map_err(|e| failed(&self.root, &e))?;
        let folder = self.make(uid, gid, group)?;
        let child = self.command(uid, gid, &folder).arg("-f").stdin(Stdio::null()).spawn().map_err(|e| {
            self.remove(&folder);
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
        Ok((pid, folder))
    }

    /// A folder of this user's, with folders for the pipe and the log. Everything in it is made before it is the user's:
    /// what is in a folder of theirs users can replace by links, through which nothing may be done for them.
    fn make(&self, uid: u32, gid: u32, group: &str) -> Result<String, String> {
        for n in 0..MAX_FOLDERS {
            let folder = format!("{group}.{n}");
            let own = self.root.join(&folder);
            match fs::DirBuilder::new().mode(0o700).create(&own) {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(|e| failed(&own, &e))?,
            }
            for path in self.folders(&folder).iter().chain([&own]) {
                let made = if *path == own { Ok(()) } else { fs::DirBuilder::new().mode(0o700).create(path) };
                made.and_then(|()| lchown(path, Some(uid), Some(gid))).map_err(|e| failed(path, &e))?;
            }
            return Ok(folder);
        }
        Err(format!("{}: {MAX_FOLDERS} folders of {group} are there already", self.root.display()))
    }

    /// Removes the folder of a daemon that has ended, soon: it is a user's, who may have put any number of files there, and the
    /// service has others to look after.
    pub fn remove(&mut self, folder: &str) {
        let path = self.root.join(folder);
        // It goes through no links; what cannot be removed does no harm.
        let removes = move || drop(fs::remove_dir_all(path));
        let _ = std::thread::Builder::new().name("forebayd-remove".into()).spawn(removes);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_made_anew_and_nothing_is_done_through_links() {
        let root = std::env::temp_dir().join(format!("forebay-mps-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut m = Mps::new("no-such-program-anywhere".into(), root.clone());
        let why = m.start(uid, gid, "7-a").unwrap_err();
        assert!(why.contains("not installed") && why.contains("MPS"), "{why}");
        let until = |what: &str, is: &dyn Fn() -> bool| {
            let begun = std::time::Instant::now();
            while !is() {
                assert!(begun.elapsed().as_secs() < 20, "{what}");
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        };
        until("what was made for it is there still", &|| fs::read_dir(&root).unwrap().count() == 0);
        // What a user has put where a folder will be is not touched, and neither is what it leads to.
        let theirs = root.join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("precious"), "").unwrap();
        std::os::unix::fs::symlink(&theirs, root.join("7-a.0")).unwrap();
        let folder = m.make(uid, gid, "7-a").unwrap();
        assert_eq!(folder, "7-a.1");
        let made = fs::metadata(root.join(&folder)).unwrap();
        assert_eq!((made.uid(), made.mode() & 0o777), (uid, 0o700));
        let [pipe, log] = m.folders(&folder);
        assert!(pipe.is_dir() && log.is_dir());
        fs::remove_dir(&pipe).unwrap();
        std::os::unix::fs::symlink(&theirs, &pipe).unwrap();
        m.remove(&folder);
        until("it is there still", &|| !root.join(&folder).exists());
        assert!(theirs.join("precious").exists());
        if uid == 0 {
            let folder = m.make(65534, 65534, "7-b").unwrap();
            let owners = m.folders(&folder).map(|p| fs::metadata(p).unwrap().uid());
            assert_eq!((owners, fs::metadata(root.join(folder)).unwrap().uid()), ([65534; 2], 65534));
        }
        fs::remove_dir_all(root).unwrap();
    }
}
