//! The operating system, as the service asks it: processes, CPU time, users.

use std::fs;
use std::os::fd::OwnedFd;

use forebay_proto::page::AccountWords;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::futex;
use rustix::time::{ClockId, clock_gettime};

use crate::mps::Mps;
use crate::service::{Described, Ready, World};

/// Group whose members may set anything.
pub const GROUP: &str = "forebay";

/// Threads of a process that are asked about: with as many the loop is held up for one or two milliseconds.
const MAX_THREADS: usize = 256;

/// The machine.
#[derive(Default)]
pub struct System {
    /// Processes to be watched, with the files that say when they end; the loop takes them.
    pub watched: Vec<(u32, Option<OwnedFd>)>,
    /// Control daemons of MPS, where the service has a place for them.
    pub mps: Option<Mps>,
}

/// Fields of `/proc/PID/stat` behind the name, which may contain anything.
fn stat_fields(pid: u32) -> Option<(String, Vec<u64>)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (open, close) = (stat.find('(')?, stat.rfind(')')?);
    let name = stat.get(open + 1..close)?.to_owned();
    // The state is a letter and the nice value may be negative; as numbers of 64 bits both keep their place.
    let fields = stat.get(close + 1..)?.split_whitespace().map(|f| {
        let signed = || f.parse::<i64>().map(|v| v as u64);
        f.parse().or_else(|_| signed()).unwrap_or(0)
    });
    Some((name, fields.collect()))
}

/// Whether a process may only run on some of the cores that this one may run on.
fn may_not_have_all(pid: u32) -> bool {
    let cores = |of: Option<Pid>| rustix::thread::sched_getaffinity(of).map_or(0, |set| set.count());
    i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|of| cores(Some(of)) < cores(None))
}

/// A line of `/proc/PID/status`.
fn status_numbers(pid: u32, key: &str) -> Option<Vec<u32>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.split_whitespace().filter_map(|n| n.parse().ok()).collect())
}

/// Whether a user may set anything: root, the service's own user, and members of the group [`GROUP`].
pub fn is_privileged(pid: u32, uid: u32) -> bool {
    if uid == 0 || uid == rustix::process::geteuid().as_raw() {
        return true;
    }
    let group = fs::read_to_string("/etc/group").ok().and_then(|all| group_number(&all));
    group.is_some_and(|g| is_member(pid, g))
}

/// The number of [`GROUP`] in a file like `/etc/group`.
fn group_number(all: &str) -> Option<u32> {
    let mut of = all.lines().filter_map(|l| l.strip_prefix(GROUP)?.strip_prefix(':'));
    of.next()?.split(':').nth(1)?.parse().ok()
}

/// Whether a process has a group, as its own or beside it.
fn is_member(pid: u32, group: u32) -> bool {
    let own = status_numbers(pid, "Gid").is_some_and(|n| n.get(1) == Some(&group));
    own || status_numbers(pid, "Groups").is_some_and(|n| n.contains(&group))
}

/// Whether processes have the numbers here by which drivers know them: not in a container with numbers of its own.
pub fn has_the_machines_numbers() -> bool {
    // The first namespace's own number (PROC_PID_INIT_INO, include/linux/proc_ns.h).
    fs::read_link("/proc/self/ns/pid").is_ok_and(|ns| ns.as_os_str() == "pid:[4026531836]")
}

/// The monotonic clock, ns.
pub(crate) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

impl World for System {
    fn describe(&mut self, pid: u32) -> Option<Described> {
        let (name, f) = stat_fields(pid)?;
        // A zombie is over. Its state letter reads as 0, like every other; the resident set says whether it lives.
        let uid = *status_numbers(pid, "Uid")?.first()?;
        let parent = u32::try_from(*f.get(1)?).ok()?;
        let nice = (*f.get(16)? as i64 as i32).saturating_add(crate::cgroup::nice(pid)).clamp(-20, 19);
        Some(Described { uid, name, began: *f.get(19)?, parent, nice })
    }

    fn cpu_time_ns(&mut self, pid: u32) -> Option<u64> {
        let pid = libc::clockid_t::try_from(pid).ok()?;
        // The clock of a process: its number, inverted, over the kind (include/linux/posix-timers.h; 2 is CPUCLOCK_SCHED).
        let clock = (!pid << 3) | 2;
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `t` is a timespec that lives through the call.
        let failed = unsafe { libc::clock_gettime(clock, &mut t) } != 0;
        (!failed).then(|| t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
    }

    fn ready(&mut self, pid: u32) -> Option<Ready> {
        if may_not_have_all(pid) || crate::cgroup::is_limited(pid) {
            return None;
        }
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let mut all = Ready::default();
        for task in tasks.flatten().take(MAX_THREADS) {
            // Its time on cores, that of waiting for one, and how often (Documentation/scheduler/sched-stats.rst); none where
            // the kernel was built without, and for a thread that has just ended.
            let said = fs::read_to_string(task.path().join("schedstat")).ok();
            let waited = said.as_deref().and_then(|s| s.split_whitespace().nth(1)?.parse::<u64>().ok());
            all.ns = all.ns.saturating_add(waited.unwrap_or(0));
            all.threads += 1;
        }
        Some(all)
    }

    fn wake(&mut self, page: &AccountWords) {
        // Nobody there to wake is no failure.
        let _ = futex::wake(&page.bell, futex::Flags::empty(), i32::MAX as u32);
    }

    fn watch(&mut self, pid: u32) {
        let fd = i32::try_from(pid).ok().and_then(Pid::from_raw).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
        self.watched.push((pid, fd));
    }

    fn end(&mut self, pid: u32, began: u64) -> Result<(), String> {
        let gone = || "it has ended".to_owned();
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let process = pidfd_open(number, PidfdFlags::empty()).map_err(|e| e.to_string())?;
        // What the descriptor names stays the same process, whoever has its number later.
        if stat_fields(pid).and_then(|(_, f)| f.get(19).copied()) != Some(began) {
            return Err(gone());
        }
        pidfd_send_signal(process, Signal::KILL).map_err(|e| e.to_string())
    }

    fn start_mps(&mut self, by: u32, uid: u32, group: &str) -> Result<(u32, String), String> {
        let gid = status_numbers(by, "Gid").and_then(|n| n.get(1).copied()).ok_or("the program has ended")?;
        self.mps.as_mut().ok_or("this service has no place for MPS")?.start(uid, gid, group)
    }

    fn mps_folders(&self, folder: &str) -> (String, String) {
        let text = |p: &std::path::PathBuf| p.to_string_lossy().into_owned();
        self.mps.as_ref().map(|m| m.folders(folder)).map_or_else(Default::default, |[p, l]| (text(&p), text(&l)))
    }

    fn quit_mps(&mut self, folder: &str) {
        self.mps.iter_mut().for_each(|m| m.quit(folder));
    }

    fn forget_mps(&mut self, folder: &str) {
        self.mps.iter_mut().for_each(|m| m.remove(folder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describes_this_process_and_measures_it() {
        let (mut s, pid) = (System::default(), std::process::id());
        let d = s.describe(pid).unwrap();
        assert_eq!(d.uid, rustix::process::getuid().as_raw());
        assert_eq!(d.parent, rustix::process::getppid().unwrap().as_raw_nonzero().get() as u32);
        assert_eq!(d.nice, rustix::process::getpriority_process(None).unwrap() + crate::cgroup::nice(pid));
        assert_eq!(s.describe(pid).unwrap().began, d.began);
        let (a, mine) = (s.cpu_time_ns(pid).unwrap(), forebay_proto::client::cpu_time_ns());
        let b = s.cpu_time_ns(pid).unwrap();
        assert!(a <= mine && mine <= b, "{a} {mine} {b}");
        assert_eq!(s.describe(u32::MAX), None);
        assert_eq!(s.cpu_time_ns(u32::MAX), None);
    }

    #[test]
    fn who_is_ready_and_has_no_core_is_seen_to_wait() {
        // Twice as many threads as cores, for long enough that the system has to take turns.
        let (threads, begun) = (2 * std::thread::available_parallelism().unwrap().get(), std::time::Instant::now());
        let (mut s, pid) = (System::default(), std::process::id());
        let before = s.ready(pid).unwrap();
        let mut most = 0;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| while begun.elapsed().as_millis() < 300 {});
            }
            while begun.elapsed().as_millis() < 280 {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let now = s.ready(pid).unwrap();
                most = most.max(now.ns.saturating_sub(before.ns));
                assert!(now.threads > 1);
            }
        });
        // All of them together lack half of what they ask for; a tenth is plenty where others run, too.
        assert!(most > threads as u64 * 30_000_000, "{most} ns of {threads} threads");
        assert_eq!(s.ready(u32::MAX), None);
        // What keeps this one from running is no other program.
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        let mut one = rustix::thread::CpuSet::new();
        one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|core| all.is_set(*core)).unwrap());
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let of = Pid::from_raw(child.id() as i32);
        assert!(s.ready(child.id()).is_some());
        rustix::thread::sched_setaffinity(of, &one).unwrap();
        let said = s.ready(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(said.is_none() || all.count() == 1);
    }

    #[test]
    fn members_of_the_group_are_known_by_what_their_process_has() {
        assert_eq!(group_number("root:x:0:\nforebayer:x:7:\nforebay:x:4711:ann,bob\n"), Some(4711));
        for bad in ["", "forebay", "forebay:x", "forebay:x:many:", "xforebay:x:1:"] {
            assert_eq!(group_number(bad), None, "{bad}");
        }
        assert!(is_member(std::process::id(), rustix::process::getegid().as_raw()));
        assert!(!is_member(std::process::id(), 4_000_000_000) && !is_member(u32::MAX, 0));
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can start a process with other groups");
            return;
        }
        let start = |groups: &'static str| {
            let mut c = std::process::Command::new("setpriv");
            let c = c.args(["--reuid", "65534", "--regid", "65534", "--groups", groups, "sleep", "10"]);
            c.spawn().expect("setpriv is part of every Linux")
        };
        let mut both = [start("65534,4711"), start("65534")];
        // Until they have given up what they were.
        let begun = std::time::Instant::now();
        while both.iter().any(|c| stat_fields(c.id()).is_none_or(|(name, _)| name != "sleep")) {
            assert!(begun.elapsed().as_secs() < 10);
        }
        let are = both.each_ref().map(|c| is_member(c.id(), 4711));
        both.iter_mut().for_each(|c| {
            c.kill().unwrap();
            c.wait().unwrap();
        });
        assert_eq!(are, [true, false]);
    }

    #[test]
    fn strange_names_do_not_shift_the_fields() {
        let mut c = std::process::Command::new("/bin/sh");
        std::os::unix::process::CommandExt::arg0(&mut c, "a) R 1 (b");
        // The name is the file's; a link gives it another one.
        let dir = std::env::temp_dir().join(format!("forebay-name-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let odd = dir.join("a) R 1 (b");
        let _ = fs::remove_file(&odd);
        fs::copy("/bin/sleep", &odd).unwrap();
        let mut child = std::process::Command::new(&odd).arg("10").spawn().unwrap();
        let d = System::default().describe(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!((d.name.as_str(), d.parent), ("a) R 1 (b", std::process::id()));
    }
}
