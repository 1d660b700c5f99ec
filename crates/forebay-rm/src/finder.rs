//! Which processes have a file of the driver's open, without asking every process every time.
//!
//! Rules:
//! 1. Whether a process has the file open is a look at all its descriptors, so it is asked seldom: while the process is
//!    young ([`YOUNG`]), when somebody has opened the file since the last look, and otherwise every [`SLOW`].
//! 2. That somebody has opened it the kernel says (inotify), for the file itself and for the one of its name in each
//!    mount namespace that a process was seen in: containers may have nodes of their own.
//! 3. Where the kernel says nothing (no such file yet, no more watches) rule 1's other two hold.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};

/// For so long a process that was not there before is asked at every look: most programs open the driver early.
pub const YOUNG: Duration = Duration::from_secs(5);
/// Between two questions to an older one.
pub const SLOW: Duration = Duration::from_secs(10);
/// Most mount namespaces whose files are watched.
const MAX_NAMESPACES: usize = 256;

struct Process {
    since: Instant,
    asked: Option<Instant>,
    has: bool,
}

/// Remembers the processes that were asked.
pub struct Finder {
    path: PathBuf,
    young: Duration,
    slow: Duration,
    events: Option<OwnedFd>,
    namespaces: HashSet<PathBuf>,
    processes: HashMap<u32, Process>,
    /// Processes that were asked so far.
    pub asked: u64,
}

impl Finder {
    /// Finds who has `path` open.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::with(path, YOUNG, SLOW)
    }

    /// The same with other times, for tests.
    pub fn with(path: impl Into<PathBuf>, young: Duration, slow: Duration) -> Self {
        let path = path.into();
        let events = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        let mut f =
            Finder { path, young, slow, events, namespaces: HashSet::new(), processes: HashMap::new(), asked: 0 };
        f.watch(&f.path.clone());
        f
    }

    fn watch(&mut self, path: &Path) {
        if let Some(e) = &self.events {
            // Rule 3.
            let _ = add_watch(e, path, WatchFlags::OPEN);
        }
    }

    /// Whether somebody has opened the file since this was asked last.
    fn was_opened(&self) -> bool {
        let mut space = [MaybeUninit::uninit(); 4096];
        let Some(e) = &self.events else { return false };
        let mut reader = Reader::new(e, &mut space);
        let mut opened = false;
        while reader.next().is_ok() {
            opened = true;
        }
        opened
    }

    /// The processes that have the file open, but for this one.
    ///
    /// # Errors
    /// The kernel's, when processes cannot be listed.
    pub fn look(&mut self) -> io::Result<Vec<u32>> {
        let all: HashSet<u32> =
            std::fs::read_dir("/proc")?.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect();
        self.processes.retain(|pid, _| all.contains(pid));
        // Before anybody is asked: who opens it meanwhile is found at the next look.
        let opened = self.was_opened();
        let now = Instant::now();
        for &pid in all.iter().filter(|p| **p != std::process::id()) {
            if !self.processes.contains_key(&pid) {
                self.watch_namespace(pid);
                self.processes.insert(pid, Process { since: now, asked: None, has: false });
            }
            let Some(p) = self.processes.get_mut(&pid) else { continue };
            let young = now.duration_since(p.since) <= self.young;
            if opened || young || p.asked.is_none_or(|at| now.duration_since(at) >= self.slow) {
                p.asked = Some(now);
                p.has = has_open(pid, self.path.as_os_str());
                self.asked += 1;
            }
        }
        Ok(self.processes.iter().filter(|(_, p)| p.has).map(|(pid, _)| *pid).collect())
    }

    fn watch_namespace(&mut self, pid: u32) {
        let Ok(name) = std::fs::read_link(format!("/proc/{pid}/ns/mnt")) else { return };
        if self.namespaces.len() < MAX_NAMESPACES && self.namespaces.insert(name) {
            let inside = self.path.strip_prefix("/").unwrap_or(&self.path);
            self.watch(&Path::new(&format!("/proc/{pid}/root")).join(inside));
        }
    }
}

/// Whether a process has a file of this name open. Files of processes that are not ours to look into count as none.
fn has_open(pid: u32, path: &OsStr) -> bool {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let is = |e: std::fs::DirEntry| std::fs::read_link(e.path()).is_ok_and(|to| to.as_os_str() == path);
    fds.filter_map(|e| e.ok()).any(is)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Scratch(PathBuf);

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn scratch(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("forebay-finder-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("node"), "").unwrap();
        std::fs::write(dir.join("go"), "").unwrap();
        Scratch(dir.canonicalize().unwrap())
    }

    /// A process that opens the file once `go` has gone.
    fn late(s: &Scratch, prefix: &str) -> Child {
        let script = format!("{prefix} while [ -e go ]; do sleep 0.02; done; exec 3<node; : > opened; exec sleep 60");
        Command::new("/bin/sh").args(["-c", &script]).current_dir(&s.0).spawn().unwrap()
    }

    fn wait_for(path: PathBuf) {
        let begun = Instant::now();
        while !path.exists() {
            assert!(begun.elapsed().as_secs() < 20, "{}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn an_old_process_that_opens_the_file_is_found_at_the_next_look_and_nobody_is_asked_in_vain() {
        let s = scratch("late");
        let mut f = Finder::with(s.0.join("node"), Duration::ZERO, Duration::from_secs(3600));
        let mut c = late(&s, "");
        assert_eq!(f.look().unwrap(), []);
        let asked = f.asked;
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(f.look().unwrap(), []);
        // Only those that have begun since.
        assert!(f.asked - asked < asked.max(20), "{} of {asked} were asked again", f.asked - asked);
        std::fs::remove_file(s.0.join("go")).unwrap();
        wait_for(s.0.join("opened"));
        assert_eq!(f.look().unwrap(), [c.id()]);
        c.kill().unwrap();
        c.wait().unwrap();
        assert_eq!(f.look().unwrap(), []);
    }

    #[test]
    fn one_that_was_there_before_is_found_and_one_in_a_container_with_a_node_of_its_own_too() {
        let s = scratch("container");
        std::fs::remove_file(s.0.join("go")).unwrap();
        let mut early = late(&s, "");
        wait_for(s.0.join("opened"));
        let mut f = Finder::with(s.0.join("node"), Duration::ZERO, Duration::from_secs(3600));
        assert_eq!(f.look().unwrap(), [early.id()]);
        early.kill().unwrap();
        early.wait().unwrap();
        // Its own file of the same name, in a mount namespace of its own.
        let prefix = "mount -t tmpfs none inside && : > inside/node && : > ready; cd inside;";
        std::fs::create_dir(s.0.join("inside")).unwrap();
        let path = s.0.join("inside").join("node");
        std::fs::write(&path, "").unwrap();
        let script =
            format!("{prefix} while [ -e ../go ]; do sleep 0.02; done; exec 3<node; : > ../opened; exec sleep 60");
        std::fs::write(s.0.join("go"), "").unwrap();
        std::fs::remove_file(s.0.join("opened")).unwrap();
        let mut c = Command::new("unshare");
        let Ok(mut c) = c.args(["-m", "/bin/sh", "-c", &script]).current_dir(&s.0).spawn() else {
            eprintln!("skipped: no unshare");
            return;
        };
        std::thread::sleep(Duration::from_millis(300));
        if !s.0.join("ready").exists() {
            eprintln!("skipped: no right to make a mount namespace");
            let _ = c.kill();
            let _ = c.wait();
            return;
        }
        let mut f = Finder::with(path, Duration::ZERO, Duration::from_secs(3600));
        assert_eq!(f.look().unwrap(), []);
        std::fs::remove_file(s.0.join("go")).unwrap();
        wait_for(s.0.join("opened"));
        let found = f.look().unwrap();
        c.kill().unwrap();
        c.wait().unwrap();
        assert_eq!(found, [c.id()]);
    }

    #[test]
    fn without_word_from_the_kernel_young_processes_are_asked_every_time() {
        let s = scratch("young");
        let mut f = Finder::with(s.0.join("node"), Duration::from_secs(60), Duration::from_secs(3600));
        f.events = None;
        let mut c = late(&s, "");
        assert_eq!(f.look().unwrap(), []);
        std::fs::remove_file(s.0.join("go")).unwrap();
        wait_for(s.0.join("opened"));
        assert_eq!(f.look().unwrap(), [c.id()]);
        c.kill().unwrap();
        c.wait().unwrap();
    }
}
