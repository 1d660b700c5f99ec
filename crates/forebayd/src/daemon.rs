//! The service as a program: arguments, signals, systemd.

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_hal::cuda::checkpoint::Checkpoints;
use forebay_policy::credit::Order;
use forebay_rm::fake::remote::RemoteRm;
use forebay_rm::{Client, Host, Rm};

use crate::guardian::{GiveBack, Guardian};
use crate::server::{Error, Options, Server};
use crate::steer::Way;

/// Runs the accelerator service in the foreground
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  sudo forebay service                 for everybody on this machine
  forebay service --user               for your own programs, without privileges
  forebay service --order priority     who has the lowest nice value comes first, instead of shares
  forebay service --device 'Arc=2'     a device that does two things at a time

Programs find it by themselves, or where FOREBAY_SOCKET says. Under systemd it says when it is ready, takes its
socket and answers the watchdog; see docs/scheduling.md.")]
pub struct Arguments {
    /// Serve this user's programs only, on a socket in the user's run-time folder
    #[arg(long)]
    user: bool,
    /// The socket's path [default: FOREBAY_SOCKET, or /run/forebay/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Who comes first when there is not enough for all
    #[arg(long, value_enum, default_value_t = OrderName::Share)]
    order: OrderName,
    /// A device that programs share by telling what they use of it: its name, and how many things it does at a time. Those
    /// that do one thing at a time need not be named: programs bring them, if no GPU is divided
    #[arg(long = "device", value_name = "NAME=UNITS", value_parser = device)]
    devices: Vec<(String, u32)>,
    /// Serve figures for Prometheus over HTTP on a local socket: curl --unix-socket PATH http://localhost/metrics
    #[arg(long, value_name = "PATH")]
    metrics: Option<PathBuf>,
    /// An NVIDIA GPU (N of /dev/nvidiaN, or all; may be said several times) to divide among whoever uses it, by taking processes off it in turn; takes root, else
    /// it is your own programs. So far this has been tried on a model of the driver and on stand-ins only
    #[arg(long = "gpu", value_name = "N", value_parser = gpu)]
    gpus: Vec<GpuName>,
    /// How GPUs are divided
    #[arg(long, value_enum, default_value_t = LevelName::Auto)]
    level: LevelName,
    /// Look for GPU programs that began long before the service among so many of the driver's clients, once for each such
    /// program; every one that has gone meanwhile leaves a line in the kernel's log
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    search: u32,
    /// NVIDIA's control daemon for MPS, under which `forebay run --co-run` puts programs
    #[arg(long, value_name = "PROGRAM", default_value = crate::mps::PROGRAM)]
    mps: PathBuf,
    /// Where the fake answers
    #[arg(long, hide = true)]
    fake_rm: Option<PathBuf>,
    /// The fake's log has other numbers for processes
    #[arg(long, hide = true)]
    apart: bool,
    /// Ask NVML beside the fake
    #[arg(long, hide = true)]
    nvml: bool,
    /// End, in order, with whoever started this
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// GPUs as they are said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GpuName {
    Number(u32),
    All,
}

fn gpu(text: &str) -> Result<GpuName, String> {
    if text == "all" {
        return Ok(GpuName::All);
    }
    let number = text.parse().map(GpuName::Number);
    number.map_err(|_| format!("{text:?} is neither a number, as in /dev/nvidia0, nor \"all\""))
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum OrderName {
    /// Everybody at the rate of its share
    Share,
    /// The lowest nice value first
    Priority,
    /// Who waits longest first
    Fifo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LevelName {
    /// By the driver's channels where it is one that is known, else by its lock
    Auto,
    /// By the driver's channels: exact shares, and interactive programs at once
    Hardware,
    /// By the CUDA driver's process lock: coarser
    Lock,
}

fn device(text: &str) -> Result<(String, u32), String> {
    let (name, units) = text.split_once('=').ok_or("say NAME=UNITS, as in opencl=1")?;
    let units = units.parse().map_err(|_| format!("{units:?} is no number of units"))?;
    if name.is_empty() || units == 0 {
        return Err("the name is empty or the units are 0".into());
    }
    Ok((name.to_owned(), units))
}

/// Numbers of the GPUs that have a device file in this folder.
fn nodes(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.strip_prefix("nvidia")?.parse().ok()).collect()
}

impl Arguments {
    /// The GPUs that are meant, each once.
    fn numbers(&self, driver: &dyn Fn() -> Result<Arc<dyn Rm>, String>) -> Result<BTreeSet<u32>, String> {
        let mut numbers = BTreeSet::new();
        for gpu in &self.gpus {
            match gpu {
                GpuName::Number(n) => drop(numbers.insert(*n)),
                // Asked of nobody: it may be a driver that is not known.
                GpuName::All if self.fake_rm.is_none() => numbers.extend(nodes(Path::new("/dev"))),
                GpuName::All => {
                    let cards = driver()?.cards().map_err(|e| e.to_string())?;
                    numbers.extend(cards.iter().map(|c| c.minor));
                }
            }
        }
        if numbers.is_empty() && !self.gpus.is_empty() {
            return Err("there is no NVIDIA GPU: no /dev/nvidiaN".into());
        }
        Ok(numbers)
    }

    fn options(&self) -> Result<Options, String> {
        let named = std::env::var_os(forebay_proto::SOCKET_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
        let socket = match (&self.socket, self.user) {
            (Some(path), _) => path.clone(),
            (None, true) => {
                let path = forebay_proto::user_socket();
                path.parent().map_or(Ok(()), own_folder)?;
                path
            }
            (None, false) => named.unwrap_or_else(|| forebay_proto::SYSTEM_SOCKET.into()),
        };
        let order = match self.order {
            OrderName::Share => Order::Share,
            OrderName::Priority => Order::Priority,
            OrderName::Fifo => Order::Fifo,
        };
        let state = Some(socket.with_extension("state"));
        Ok(Options {
            socket,
            state,
            order,
            metrics: self.metrics.clone(),
            mps: self.mps.clone(),
            devices: self.devices.clone(),
        })
    }
}

/// Makes a folder for this user alone, or sees that it is one: among temporary files somebody else may have been there first.
fn own_folder(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    let said = |e: std::io::Error| format!("the folder {}: {e}", path.display());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(said)?;
    let is = std::fs::symlink_metadata(path).map_err(said)?;
    let user = rustix::process::geteuid().as_raw();
    if !is.is_dir() || is.uid() != user {
        let what = format!("{} is no folder of user {user}, but of {} or a link", path.display(), is.uid());
        return Err(format!("{what}: say --socket PATH"));
    }
    // Nobody but its user could have put something else in its place since.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(said)
}

/// The socket that systemd made for us, if it did.
fn activated() -> Result<Option<OwnedFd>, String> {
    let Some(fd) = sd_notify::listen_fds().ok().and_then(|mut fds| fds.next()) else { return Ok(None) };
    let (mut listens, mut size) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: a number, which may be nobody's file (the kernel says so then); both places are ours, and as large as said.
    let asked = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, (&raw mut listens).cast(), &raw mut size)
    };
    match if asked == 0 { Ok(listens != 0) } else { Err(std::io::Error::last_os_error()) } {
        // SAFETY: systemd passes descriptors from this number on to this process, which has no socket of its own yet at which it
        // listens: so this one is nobody else's.
        Ok(true) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Ok(false) => Err(format!("LISTEN_FDS says that file {fd} is a socket to serve, but nobody listens at it")),
        Err(e) => Err(format!("LISTEN_FDS says that file {fd} is a socket to serve, but it is none: {e}")),
    }
}

/// Why there is no lock in a container.
const CONTAINER: &str = "this is a container with process numbers of its own, and NVIDIA's driver names processes by the \
                         machine's; whom its lock would stop would be somebody else here\n  Run the service outside, or with \
                         the machine's numbers (docker run --pid=host)";

/// A guardian for a GPU, and whether it is to be divided by the lock.
///
/// # Safety
/// The process has one thread.
unsafe fn guard(
    gpu: u32,
    level: LevelName,
    apart: bool,
    driver: &dyn Fn() -> Result<Arc<dyn Rm>, String>,
) -> Result<(bool, Guardian), String> {
    let client = || driver().and_then(|rm| Client::open(rm, gpu).map_err(|e| e.to_string()));
    let refused = match level {
        LevelName::Auto => client().err(),
        LevelName::Hardware | LevelName::Lock => None,
    };
    let lock = refused.is_some() || level == LevelName::Lock;
    if lock && apart {
        let why = refused.map(|why| format!("its channels cannot be steered: {why}\n  and ")).unwrap_or_default();
        return Err(format!("{why}{CONTAINER}"));
    }
    let way = || -> Result<Box<dyn GiveBack>, String> {
        match lock {
            false => Ok(Box::new(client()?)),
            true => Ok(Box::new(Checkpoints::open().map_err(|e| e.to_string())?)),
        }
    };
    // SAFETY: the caller's.
    let guardian = unsafe { Guardian::fork(way) }.map_err(|e| match &refused {
        Some(why) => {
            format!("its channels cannot be steered: {why}\n  nor the CUDA driver's process lock be used: {e}")
        }
        None => e,
    })?;
    if let Some(why) = refused {
        crate::server::tell(&format!("GPU {gpu} is divided by the CUDA driver's process lock only: {why}"));
    }
    Ok((lock, guardian))
}

/// What the driver says if a GPU is not there any more.
fn fallen_off(gpu: u32, driver: &dyn Fn() -> Result<Arc<dyn Rm>, String>) -> Option<String> {
    let why = driver().ok().and_then(|rm| Client::open(rm, gpu).err())?;
    why.is_lost().then(|| why.to_string())
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// Why it could not.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    if arguments.with_parent {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::TERM)).map_err(|e| format!("to end with its parent: {e}"))?;
    }
    let options = arguments.options()?;
    let numbered = arguments.fake_rm.is_none() || arguments.nvml;
    let apart = arguments.apart || numbered && !crate::system::has_the_machines_numbers();
    let driver = || -> Result<Arc<dyn Rm>, String> {
        match arguments.fake_rm.as_deref() {
            Some(path) => Ok(Arc::new(RemoteRm::connect(path).map_err(|e| format!("{}: {e}", path.display()))?)),
            None => Ok(Arc::new(Host)),
        }
    };
    // Before anything else: they must have nothing of ours.
    let (mut guardians, mut left_out) = (Vec::new(), Vec::new());
    let all = arguments.gpus.contains(&GpuName::All);
    for gpu in arguments.numbers(&driver)? {
        // The others are served all the same.
        if let Some(why) = fallen_off(gpu, &driver) {
            left_out.push(format!("GPU {gpu}: {why}"));
            continue;
        }
        // SAFETY: nothing here has started a thread, and this is called by `main`.
        match unsafe { guard(gpu, arguments.level, apart, &driver) } {
            Ok((lock, guardian)) => guardians.push((gpu, lock, guardian)),
            Err(e) if all => left_out.push(format!("GPU {gpu}: {e}")),
            Err(e) => return Err(format!("GPU {gpu}: {e}")),
        }
    }
    match left_out.first() {
        Some(why) if guardians.is_empty() => return Err(why.clone()),
        _ => left_out.iter().for_each(|why| {
            crate::server::tell(&format!(
                "{why}\n  It is left out, and the others are divided; start the service anew when it can be used"
            ))
        }),
    }
    let alone = !arguments.user && arguments.socket.is_none() && !rustix::process::geteuid().is_root();
    let text = move |e: Error| match &e {
        Error::Io { why, .. } if alone && why.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("{e}\n  For everybody it takes root; for your own programs only: forebay service --user")
        }
        _ => e.to_string(),
    };
    let (stop, signalled) = std::os::unix::net::UnixStream::pair().map_err(|e| format!("a pair of sockets: {e}"))?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let end = signalled.try_clone().map_err(|e| format!("a socket: {e}"))?;
        signal_hook::low_level::pipe::register(signal, end).map_err(|e| format!("signal {signal}: {e}"))?;
    }
    let path = options.socket.clone();
    let mut server = match activated()? {
        Some(listener) => Server::activated(options, listener).map_err(text)?,
        None => Server::new(options).map_err(text)?,
    };
    for (gpu, lock, guardian) in guardians {
        let way = if lock {
            Way::Lock
        } else {
            Way::Hardware {
                rm: driver()?,
                nvml: arguments.nvml || arguments.fake_rm.is_none(),
                apart,
                search: arguments.search,
            }
        };
        server.steer(gpu, way, guardian).map_err(text)?;
    }
    let stop = OwnedFd::from(stop);
    let alive = |first: bool| {
        // Without systemd nobody hears it.
        let _ = if first {
            crate::server::tell(&format!("serving on {}", path.display()));
            sd_notify::notify(false, &[sd_notify::NotifyState::Ready])
        } else {
            sd_notify::notify(false, &[sd_notify::NotifyState::Watchdog])
        };
    };
    let result = server.run(&stop, alive).map_err(text);
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
    result
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn all_gpus_are_those_with_a_device_file_and_each_is_meant_once() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            arguments: Arguments,
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let mut found = nodes(dir.path());
        found.sort_unstable();
        assert_eq!(found, [0, 12]);
        assert!(nodes(&dir.path().join("nowhere")).is_empty());
        let numbers = |said: &[&str]| {
            let line = <Line as clap::Parser>::try_parse_from([&["x"], said].concat()).map_err(|e| e.to_string())?;
            line.arguments.numbers(&|| Err("nobody is asked".into()))
        };
        assert_eq!(numbers(&["--gpu", "1", "--gpu", "0", "--gpu", "1"]).unwrap(), BTreeSet::from([0, 1]));
        assert_eq!(numbers(&[]).unwrap(), BTreeSet::new());
        assert!(numbers(&["--gpu", "first"]).unwrap_err().contains("neither a number"));
        let here = nodes(Path::new("/dev"));
        match numbers(&["--gpu", "all"]) {
            Ok(all) => assert_eq!(all, here.into_iter().collect()),
            Err(why) => assert!(here.is_empty() && why.contains("no NVIDIA GPU"), "{why}"),
        }
    }

    #[test]
    fn a_folder_for_the_socket_is_the_users_own_or_refused() {
        let dir = std::env::temp_dir().join(format!("forebayd-folder-{}", std::process::id()));
        let own = dir.join("forebay");
        own_folder(&own).unwrap();
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777)).unwrap();
        own_folder(&own).unwrap();
        assert_eq!(std::fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        let link = dir.join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(own_folder(&link).unwrap_err().contains("say --socket"));
        if rustix::process::geteuid().is_root() {
            rustix::fs::chown(&own, Some(rustix::fs::Uid::from_raw(12_345)), None).unwrap();
            assert!(own_folder(&own).unwrap_err().contains("12345"));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
