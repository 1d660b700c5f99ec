//! The weight that a process's control groups give it, as a nice value: what an administrator said of a container or a
//! service holds for accelerators, too.
//!
//! Rules:
//! 1. A group's weight counts in steps of a factor of 1.25, as nice values do, from the default weight on; the groups on the
//!    way from the root to the process are added up, as their weights multiply. The whole is between -20 and 19.
//! 2. A group that was made idle counts as nice 19.
//! 3. What lowers counts, whoever said it. What raises counts only where root owns the file: users may own groups below
//!    theirs, whose weights compare to nobody else's.
//! 4. Both hierarchies are read: `cpu.weight` (100 is the default) and, where the controller is mounted by itself,
//!    `cpu.shares` (1024). What cannot be read is the default.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// Groups within groups that are looked at.
const MAX_DEPTH: usize = 16;

/// Where hierarchies are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// The part of a process's nice value that comes from its groups.
pub fn nice(pid: u32) -> i32 {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).map_or(0, |groups| of(Path::new(ROOT), &groups))
}

/// Whether a group of a process limits how much of the CPU it may have, whatever others do.
pub fn is_limited(pid: u32) -> bool {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    hierarchies(&groups).any(|h| h.mounts.iter().any(|m| along(&Path::new(ROOT).join(m), h.path).any(|g| limits(&g))))
}

/// A hierarchy that shares out the CPU, and where a process is in it.
struct Hierarchy<'a> {
    mounts: &'static [&'static str],
    is_unified: bool,
    path: &'a str,
}

/// Of what `/proc/PID/cgroup` says.
fn hierarchies(groups: &str) -> impl Iterator<Item = Hierarchy<'_>> {
    groups.lines().filter_map(|l| {
        let mut parts = l.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_unified = controllers.is_empty();
        let mounts: &[&str] = if is_unified { &["", "unified"] } else { &["cpu", "cpu,cpuacct"] };
        (is_unified || controllers.split(',').any(|c| c == "cpu")).then_some(Hierarchy { mounts, is_unified, path })
    })
}

/// [`nice`], of what `/proc/PID/cgroup` says, with the hierarchies below `root`.
fn of(root: &Path, groups: &str) -> i32 {
    let each = hierarchies(groups).map(|h| {
        let (file, default) = if h.is_unified { ("cpu.weight", 100.0) } else { ("cpu.shares", 1024.0) };
        let sum = |m: &&str| along(&root.join(m), h.path).map(|g| of_group(&g, file, default)).sum();
        h.mounts.iter().map(sum).find(|n: &i32| *n != 0).unwrap_or(0)
    });
    each.sum::<i32>().clamp(-20, 19)
}

/// The groups on the way to this one.
fn along(mount: &Path, path: &str) -> impl Iterator<Item = PathBuf> {
    let names = Path::new(path).components().filter_map(|c| match c {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let mut at = PathBuf::from(mount);
    names.take(MAX_DEPTH).map(move |name| {
        at.push(name);
        at.clone()
    })
}

/// Of both hierarchies: a quota of time and a period, and a quota alone that is negative where there is none.
fn limits(dir: &Path) -> bool {
    let quota = |file: &str| {
        let said = fs::read_to_string(dir.join(file)).ok()?;
        said.split_whitespace().next()?.parse::<i64>().ok()
    };
    quota("cpu.max").or_else(|| quota("cpu.cfs_quota_us")).is_some_and(|q| q > 0)
}

fn of_group(dir: &Path, file: &str, default: f64) -> i32 {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    if read("cpu.idle").is_some_and(|v| v.trim() == "1") {
        return 19;
    }
    let Some(weight) = read(file).and_then(|v| v.trim().parse::<u32>().ok()).filter(|w| *w > 0) else { return 0 };
    let steps = ((default / f64::from(weight)).ln() / 1.25f64.ln()).round() as i32;
    let raises = steps < 0;
    let roots = || fs::metadata(dir.join(file)).is_ok_and(|m| m.uid() == 0);
    if raises && !roots() { 0 } else { steps.clamp(-20, 19) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hierarchy with these files; the files' owner is this user.
    fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("forebay-cgroup-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn weights_along_the_way_add_up_in_steps_of_nice() {
        let root = tree(
            "steps",
            &[
                ("a/cpu.weight", "50\n"),
                ("a/b/cpu.weight", "50\n"),
                ("a/b/c/cpu.weight", "100\n"),
                ("idle/cpu.idle", "1\n"),
                ("idle/cpu.weight", "100\n"),
                ("odd/cpu.weight", "many\n"),
                ("least/cpu.weight", "1\n"),
                ("cpu/old/cpu.shares", "512\n"),
            ],
        );
        let of = |text: &str| of(&root, text);
        assert_eq!([of("0::/a"), of("0::/a/b"), of("0::/a/b/c")], [3, 6, 6]);
        assert_eq!([of("0::/idle"), of("0::/odd"), of("0::/nowhere"), of("0::/"), of("")], [19, 0, 0, 0, 0]);
        assert_eq!([of("0::/least"), of("0::/least/../../a")], [19, 19]);
        // Both hierarchies at once, and lines of other controllers.
        assert_eq!([of("4:cpu,cpuacct:/old\n0::/"), of("4:memory:/old"), of("nonsense\n::\n0::/a")], [3, 0, 3]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_quota_on_the_way_is_a_limit() {
        let files = [
            ("free/cpu.max", "max 100000\n"),
            ("free/in/cpu.max", "50000 100000\n"),
            ("cpu/old/cpu.cfs_quota_us", "-1\n"),
            ("cpu/old/in/cpu.cfs_quota_us", "25000\n"),
        ];
        let root = tree("limit", &files);
        let limited = |at: &str| along(&root, at).any(|g| limits(&g));
        assert_eq!(
            ["/free", "/free/in", "/free/in/below", "/cpu/old", "/cpu/old/in", "/"].map(limited),
            [false, true, true, false, true, false]
        );
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn only_what_root_owns_raises() {
        let root = tree("raise", &[("up/cpu.weight", "1000\n"), ("down/cpu.weight", "10\n")]);
        if !rustix::process::geteuid().is_root() {
            assert_eq!([of(&root, "0::/up"), of(&root, "0::/down")], [0, 10]);
            return;
        }
        assert_eq!([of(&root, "0::/up"), of(&root, "0::/down")], [-10, 10]);
        for group in ["up", "down"] {
            std::os::unix::fs::chown(root.join(group).join("cpu.weight"), Some(65534), None).unwrap();
        }
        assert_eq!([of(&root, "0::/up"), of(&root, "0::/down")], [0, 10]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_process_in_a_real_group_has_its_weight() {
        let group = PathBuf::from(format!("/sys/fs/cgroup/cpu/forebay-{}", std::process::id()));
        if fs::create_dir(&group).is_err() {
            eprintln!("skipped: groups cannot be made here");
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let before = nice(child.id());
        fs::write(group.join("cpu.shares"), "256").unwrap();
        fs::write(group.join("cgroup.procs"), child.id().to_string()).unwrap();
        let after = nice(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_dir(&group).unwrap();
        assert_eq!(after - before, 6, "a quarter is six steps of 1.25");
    }
}
