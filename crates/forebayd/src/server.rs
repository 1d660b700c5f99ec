//! The daemon: one loop over the socket, the connections, the ends of processes and time.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_policy::credit::Order;
use forebay_proto::socket;
use forebay_proto::wire::{self, MAX_REQUEST, Refusal, Reply};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use crate::agent::Agent;
use crate::guardian::Guardian;
use crate::idle::Idle;
use crate::mps::Mps;
use crate::service::{Answer, Peer, Service, SessionId};
use crate::steer::{Memory, Processes, Way};
use crate::system::{System, is_privileged, now_ns};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Messages of one connection that are answered before others have their turn.
const BURST: usize = 16;
/// Messages that a connection may send in a second; one that sends more is closed.
const MAX_RATE: u64 = 2000;
/// Rings of a connection's doorbell in a second that are heard; one that rings more is closed.
const MAX_RINGS: u64 = 10_000;
/// A connection that has not said hello for so long is closed.
const HELLO_NS: u64 = 2_000_000_000;
/// Requests for figures at a time.
const MAX_SCRAPES: usize = 8;
/// Lines that may be written in a second: what others send must not fill the log.
const MAX_LINES: u32 = 20;
/// Between two looks for processes that have begun to use a GPU.
const LOOK_NS: u64 = 150_000_000;
/// Least time between two writings of the state, when somebody was told that a class is set, and otherwise.
const SAVE_NS: [u64; 2] = [5_000_000, 200_000_000];

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The socket's path; its folder is made.
    pub socket: PathBuf,
    /// Where classes are kept for the next start.
    pub state: Option<PathBuf>,
    /// Whose turn it is on a device when there is not enough for all.
    pub order: Order,
    /// A socket on which figures for Prometheus are served over HTTP.
    pub metrics: Option<PathBuf>,
    /// The control daemon of MPS, for programs that share a GPU in space.
    pub mps: PathBuf,
    /// Further devices whose use programs report: name and how much each does at a time.
    pub devices: Vec<(String, u32)>,
}

/// Why the service does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one is there.
    #[error("a service is running already on {}", .0.display())]
    Running(PathBuf),
    /// The system's reason.
    #[error("{what}: {why}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        why: std::io::Error,
    },
}

fn io<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    move |why| Error::Io { what: what.into(), why: why.into() }
}

enum Waits {
    Listener,
    Stop,
    Session(SessionId),
    Doorbell(SessionId),
    Process(u32),
    Guardian,
    Metrics,
    Scrape(u64),
}

/// A GPU that is steered.
struct Steered {
    number: u32,
    /// Who is on it.
    processes: Processes,
    /// Who has how much of its memory.
    memory: Option<Memory>,
    /// What was wrong with these last, so that it is said once.
    trouble: [Option<String>; 2],
    guardian: Guardian,
    /// Under which it is waited for.
    token: u64,
}

struct Line {
    socket: OwnedFd,
    doorbell: OwnedFd,
    tokens: [u64; 2],
    /// Second in which messages and rings are counted, and how many there were of each.
    rate: (u64, [u64; 2]),
    /// Who it is, for the log.
    who: String,
}

impl Line {
    /// How many messages (0) or rings (1) there have been in this second, with this one.
    fn count(&mut self, what: usize) -> u64 {
        let second = now_ns() / 1_000_000_000;
        if self.rate.0 != second {
            self.rate = (second, [0, 0]);
        }
        self.rate.1[what] += 1;
        self.rate.1[what]
    }
}

/// A line on standard error, if anybody reads it: a service neither ends because nobody does, nor does it wait until somebody does,
/// and what it holds with it. Of a long line its beginning.
pub(crate) fn tell(line: &str) {
    use std::io::Write as _;
    /// A pipe that can be written to takes so much at once.
    const MOST: usize = 4000;
    let cut = (0..=MOST.min(line.len())).rev().find(|n| line.is_char_boundary(*n)).unwrap_or(0);
    let err = std::io::stderr();
    let mut fds = [PollFd::new(&err, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1) {
        let _ = (&err).write_all(format!("forebayd: {}\n", line.get(..cut).unwrap_or_default()).as_bytes());
    }
}

/// The daemon.
pub struct Server {
    options: Options,
    service: Service<System>,
    epoll: OwnedFd,
    waits: HashMap<u64, Waits>,
    next: u64,
    listener: OwnedFd,
    lines: BTreeMap<SessionId, Line>,
    processes: HashMap<u32, (u64, OwnedFd)>,
    /// None in the place of one that has fallen off.
    gpus: Vec<Option<Steered>>,
    /// Guardians of those, which are ending.
    dismissed: Vec<u32>,
    /// When processes on GPUs are looked for next.
    look_ns: u64,
    metrics: Option<UnixListener>,
    /// Who asked for figures, and when.
    scrapes: BTreeMap<u64, (UnixStream, u64)>,
    /// A descriptor to give up when there are no more, so that whoever connects can be sent away.
    spare: Option<OwnedFd>,
    idle: Idle,
    ticks: u64,
    saved_ns: u64,
    log: (u64, u32),
    /// Held while the socket is ours.
    lock: Option<OwnedFd>,
}

fn spare_file() -> Option<OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open("/dev/null", flags, Mode::empty()).ok()
}

/// Whether a child has ended; from now on it is none.
fn has_ended(pid: u32) -> bool {
    use rustix::process::{Pid, WaitOptions, waitpid};
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    !matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
}

/// As many descriptors as this process may have: every connection takes four.
fn allow_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // With fewer, fewer can connect.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Takes away a socket that somebody has left; what is none stays, and is an error.
fn make_way(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::FileTypeExt as _;
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(is) if !is.file_type().is_socket() => {
            let why = std::io::Error::new(std::io::ErrorKind::AlreadyExists, "it is there, and no socket");
            Err(io(format!("serve at {}", path.display()))(why))
        }
        _ => std::fs::remove_file(path).map_err(io(format!("take away {}", path.display()))),
    }
}

/// A listening socket at `path`, which everybody may connect to.
fn listen_at(path: &Path) -> Result<(OwnedFd, OwnedFd), Error> {
    let show = path.display();
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(io(format!("make {}", dir.display())))?;
    }
    // The lock, not the socket, says whether somebody is there: it goes with its holder, however that ends.
    let lock = path.with_extension("lock");
    let open = || {
        rustix::fs::open(
            &lock,
            rustix::fs::OFlags::CREATE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )
    };
    let lock = open().map_err(io(format!("open {}", lock.display())))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(Error::Running(path.to_owned())),
        other => other.map_err(io(format!("lock {show}")))?,
    }
    make_way(path)?;
    let s = socket::new(SocketFlags::NONBLOCK).map_err(io("make a socket"))?;
    let address = SocketAddrUnix::new(path).map_err(io(format!("the path {show}")))?;
    bind(&s, &address).map_err(io(format!("bind {show}")))?;
    rustix::fs::chmod(path, Mode::from_raw_mode(0o666)).map_err(io(format!("open {show} to everybody")))?;
    listen(&s, BACKLOG).map_err(io(format!("listen on {show}")))?;
    Ok((s, lock))
}

impl Server {
    /// Opens the socket and takes over what an earlier service saved.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(options: Options) -> Result<Self, Error> {
        let (listener, lock) = listen_at(&options.socket)?;
        Self::with_listener(options, listener, Some(lock))
    }

    /// Serves on a socket that somebody else made and listens on.
    ///
    /// # Errors
    /// [`Error`].
    pub fn activated(options: Options, listener: OwnedFd) -> Result<Self, Error> {
        rustix::io::ioctl_fionbio(&listener, true).map_err(io("the socket that was handed over"))?;
        Self::with_listener(options, listener, None)
    }

    fn with_listener(options: Options, listener: OwnedFd, lock: Option<OwnedFd>) -> Result<Self, Error> {
        allow_files();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let mut service =
            Service::new(System::default(), cores, options.order, now_ns()).map_err(io("make the global page"))?;
        for (name, units) in &options.devices {
            if service.add_device(name, *units, options.order).is_none() {
                let why = std::io::Error::other("there are too many, or one of that name");
                return Err(Error::Io { what: format!("add the device {name}"), why });
            }
        }
        let place = options.socket.with_extension("co-run");
        service.world().mps = Some(Mps::new(options.mps.clone(), place));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io("epoll"))?;
        let mut server = Server {
            service,
            epoll,
            waits: HashMap::new(),
            next: 0,
            listener,
            lines: BTreeMap::new(),
            processes: HashMap::new(),
            gpus: Vec::new(),
            dismissed: Vec::new(),
            look_ns: 0,
            metrics: None,
            scrapes: BTreeMap::new(),
            spare: spare_file(),
            idle: Idle::open(),
            ticks: 0,
            saved_ns: 0,
            log: (0, 0),
            options,
            lock,
        };
        let token = server.token(Waits::Listener);
        server.add_listener(token)?;
        if let Some(path) = server.options.metrics.clone() {
            let failed = || format!("serve figures at {}", path.display());
            make_way(&path)?;
            let listener = UnixListener::bind(&path).map_err(io(failed()))?;
            listener.set_nonblocking(true).map_err(io(failed()))?;
            let token = server.token(Waits::Metrics);
            server.add(&listener, token).map_err(io(failed()))?;
            server.metrics = Some(listener);
        }
        if let Some(path) = server.options.state.clone() {
            match std::fs::read(&path).map(|b| serde_json::from_slice(&b)) {
                Ok(Ok(saved)) => server.service.restore(saved),
                Ok(Err(e)) => server.say(format!("{} is damaged and not used: {e}", path.display())),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => server.say(format!("{} cannot be read: {e}", path.display())),
            }
            server.service.dirty = false;
            server.watch_new();
        }
        Ok(server)
    }

    /// Steers GPU number `gpu` from now on, while its guardian lives.
    ///
    /// # Errors
    /// What the driver refused, and that nobody says who uses the GPU; too many devices.
    pub fn steer(&mut self, gpu: u32, way: Way, guardian: Guardian) -> Result<(), Error> {
        let failed = |why: String| io(format!("GPU {gpu}"))(std::io::Error::other(why));
        let means = way.open(gpu, guardian.ledger.clone()).map_err(failed)?;
        means.without.iter().for_each(|why| self.say(format!("GPU {gpu}: {why}")));
        let agent = Agent::by(means.reach, means.meter, means.period_ns);
        let has_memory = means.memory.is_some();
        if self.service.add_gpu(&format!("gpu{gpu}"), agent, (means.level, means.source), has_memory).is_none() {
            return Err(failed("there are too many devices".into()));
        }
        let (processes, memory) = (means.processes, means.memory);
        let token = self.token(Waits::Guardian);
        self.add(guardian.alive(), token).map_err(io("watch the guardian"))?;
        self.gpus.push(Some(Steered { number: gpu, processes, memory, trouble: [None, None], guardian, token }));
        Ok(())
    }

    /// Closes what was opened for a GPU that has fallen off, so that it can be reset or taken out. Its guardian ends by itself.
    fn dismiss(&mut self, gpu: usize) {
        let Some(g) = self.gpus.get_mut(gpu).and_then(Option::take) else { return };
        self.waits.remove(&g.token);
        self.dismissed.push(g.guardian.pid);
    }

    fn look_for_processes(&mut self) {
        // They have the driver open all the time, and never a channel.
        let guardians: Vec<u32> = self.gpus.iter().flatten().map(|g| g.guardian.pid).collect();
        for gpu in 0..self.gpus.len() {
            let Some(Steered { processes, number, trouble: [trouble, _], .. }) = &mut self.gpus[gpu] else { continue };
            let wrong = match processes() {
                Ok(mut pids) => {
                    *trouble = None;
                    pids.retain(|pid| !guardians.contains(pid));
                    self.service.gpu_processes(gpu, &pids)
                }
                Err(e) if trouble.as_ref() == Some(&e) => continue,
                Err(e) => {
                    let line = format!("the processes on GPU {number} cannot be listed: {e}");
                    *trouble = Some(e);
                    vec![line]
                }
            };
            wrong.into_iter().for_each(|line| self.say(line));
            if self.service.is_lost(gpu) {
                self.dismiss(gpu);
            }
        }
        // One that has ended is nobody's child any more.
        self.dismissed.retain(|pid| !has_ended(*pid));
        if self.service.has_limits() {
            self.look_at_memory();
        }
        self.service.trouble().into_iter().for_each(|line| self.say(line));
    }

    fn look_at_memory(&mut self) {
        for gpu in 0..self.gpus.len() {
            let Some(Steered { memory: Some(memory), number, trouble: [_, trouble], .. }) = &mut self.gpus[gpu] else {
                continue;
            };
            let lines = match memory() {
                Ok(has) => {
                    *trouble = None;
                    self.service.memory(gpu, &has)
                }
                Err(e) if trouble.as_ref() == Some(&e) => continue,
                Err(e) => {
                    let line = format!("nobody is held to a limit of memory on GPU {number}: {e}");
                    *trouble = Some(e);
                    vec![line]
                }
            };
            lines.into_iter().for_each(|line| self.say(line));
        }
    }

    fn token(&mut self, w: Waits) -> u64 {
        self.next += 1;
        self.waits.insert(self.next, w);
        self.next
    }

    fn add_listener(&self, token: u64) -> Result<(), Error> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN).map_err(io("watch the socket"))
    }

    fn add(&self, fd: impl AsFd, token: u64) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
    }

    /// A line for whoever looks after the machine.
    fn say(&mut self, line: String) {
        let second = now_ns() / 1_000_000_000;
        if self.log.0 != second {
            if self.log.1 > MAX_LINES {
                tell(&format!("and {} more lines", self.log.1 - MAX_LINES));
            }
            self.log = (second, 0);
        }
        self.log.1 += 1;
        if self.log.1 <= MAX_LINES {
            tell(&line);
        }
    }

    /// Serves until `stop` can be read. `ready` is called when programs can connect, and then once in a while.
    ///
    /// # Errors
    /// The system's, when it refuses to wait.
    pub fn run(&mut self, stop: &OwnedFd, mut alive: impl FnMut(bool)) -> Result<(), Error> {
        let token = self.token(Waits::Stop);
        self.add(stop, token).map_err(io("watch for the end"))?;
        alive(true);
        let mut said = Instant::now();
        let mut due = now_ns();
        let mut next_turn = due;
        loop {
            let mut space = [MaybeUninit::uninit(); 64];
            let left = due.min(next_turn).saturating_sub(now_ns());
            let timeout = Timespec { tv_sec: 0, tv_nsec: (left.min(999_999_999)) as i64 };
            let events: Vec<(u64, epoll::EventFlags)> = match epoll::wait(&self.epoll, &mut space, Some(&timeout)) {
                Ok((events, _)) => events.iter().map(|e| (e.data.u64(), e.flags)).collect(),
                Err(Errno::INTR) => Vec::new(),
                Err(e) => return Err(io("wait")(e)),
            };
            for (token, flags) in events {
                match self.waits.get(&token) {
                    Some(Waits::Stop) => {
                        self.service.end();
                        self.save();
                        return Ok(());
                    }
                    Some(Waits::Listener) => self.accept(),
                    Some(&Waits::Session(id)) => self.hear(id, flags),
                    Some(&Waits::Doorbell(id)) => {
                        let mut count = [0; 8];
                        let Some(l) = self.lines.get_mut(&id) else { continue };
                        let _ = rustix::io::read(&l.doorbell, &mut count);
                        if l.count(1) > MAX_RINGS {
                            self.close(id, "it rings more than a program needs");
                        } else {
                            self.service.doorbell(id);
                        }
                    }
                    Some(&Waits::Process(pid)) => self.exited(pid),
                    Some(Waits::Guardian) => {
                        // Everything is given back when this ends, and without a guardian nothing may be taken.
                        self.save();
                        return Err(io("a guardian")(std::io::Error::other("it has ended; so does the service")));
                    }
                    Some(Waits::Metrics) => self.accept_scrapes(),
                    Some(&Waits::Scrape(token)) => self.answer_scrape(token),
                    // Closed by an earlier event of this round.
                    None => {}
                }
            }
            self.watch_new();
            let now = now_ns();
            let turn = self.service.turn(now).unwrap_or(u64::MAX);
            self.gpus.iter().flatten().for_each(|g| g.guardian.ledger.beat(now));
            if !self.gpus.is_empty() && now >= self.look_ns {
                self.look_ns = now + LOOK_NS;
                self.look_for_processes();
                self.watch_new();
            }
            next_turn = turn;
            if now >= due {
                self.tick(now);
                let step = self.service.tick_ns();
                due = (due + step).max(now + step / 2);
                if said.elapsed().as_secs() >= 1 {
                    said = Instant::now();
                    alive(false);
                }
            }
        }
    }

    fn tick(&mut self, now: u64) {
        self.ticks += 1;
        let spare = self.idle.spare_ns(now);
        self.service.tick(now, spare);
        if self.ticks.is_multiple_of(64) {
            let waits = &mut self.waits;
            self.scrapes.retain(|token, (_, since)| {
                let young = now.saturating_sub(*since) < HELLO_NS;
                if !young {
                    waits.remove(token);
                }
                young
            });
            for id in self.service.silent(HELLO_NS) {
                self.close(id, "said nothing");
            }
        }
        self.save_if_due(now);
    }

    fn save_if_due(&mut self, now: u64) {
        let after = SAVE_NS[usize::from(!self.service.promised)];
        if self.service.dirty && now.saturating_sub(self.saved_ns) > after {
            self.saved_ns = now;
            self.save();
        }
    }

    fn save(&mut self) {
        (self.service.dirty, self.service.promised) = (false, false);
        let Some(path) = self.options.state.clone() else { return };
        let write = || -> std::io::Result<()> {
            let next = path.with_extension("next");
            std::fs::write(&next, serde_json::to_vec(&self.service.save())?)?;
            std::fs::rename(&next, &path)
        };
        if let Err(e) = write() {
            self.say(format!("{} cannot be written: {e}", path.display()));
        }
    }

    fn accept(&mut self) {
        for _ in 0..BURST {
            let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(s) => s,
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE) => {
                    // Otherwise they would be announced again and again.
                    self.spare = None;
                    let _ = accept_with(&self.listener, SocketFlags::CLOEXEC);
                    self.spare = spare_file();
                    self.say("a connection was refused: there are no more file descriptors".into());
                    return;
                }
                Err(e) => {
                    self.say(format!("a connection could not be accepted: {e}"));
                    return;
                }
            };
            if let Err(why) = self.begin(socket) {
                self.say(format!("a connection was refused: {why}"));
            }
        }
    }

    fn begin(&mut self, socket: OwnedFd) -> Result<(), String> {
        let text = |e: Errno| e.to_string();
        let (pid, uid) = socket::peer(&socket).map_err(text)?;
        let peer = Peer { pid, uid, privileged: is_privileged(pid, uid) };
        let id = self.next + 1;
        if let Err(why) = self.service.connect(id, peer) {
            let refusal = Reply::Refused(Refusal::Limit { what: why.clone(), limit: 0 });
            let _ = socket::send(socket.as_fd(), &wire::encode(&refusal), &[], false);
            return Err(why);
        }
        let made = (|| {
            let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(text)?;
            let tokens = [self.token(Waits::Session(id)), self.token(Waits::Doorbell(id))];
            self.add(&socket, tokens[0]).and_then(|()| self.add(&doorbell, tokens[1])).map_err(|e| {
                for t in &tokens {
                    self.waits.remove(t);
                }
                e.to_string()
            })?;
            let who = format!("process {pid} of user {uid}");
            self.lines.insert(id, Line { socket, doorbell, tokens, rate: (0, [0, 0]), who });
            Ok(())
        })();
        if made.is_err() {
            self.service.disconnect(id);
        }
        made
    }

    fn accept_scrapes(&mut self) {
        for _ in 0..MAX_SCRAPES {
            let Some(accepted) = self.metrics.as_ref().map(UnixListener::accept) else { return };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(e) => {
                    if matches!(Errno::from_io_error(&e), Some(Errno::MFILE | Errno::NFILE)) {
                        // As for whoever connects: it would be announced again and again.
                        self.spare = None;
                        drop(self.metrics.as_ref().map(UnixListener::accept));
                        self.spare = spare_file();
                    }
                    return;
                }
            };
            // One too many, or one that cannot be watched, is closed.
            if self.scrapes.len() < MAX_SCRAPES && stream.set_nonblocking(true).is_ok() {
                self.next += 1;
                let token = self.next;
                if self.add(&stream, token).is_ok() {
                    self.waits.insert(token, Waits::Scrape(token));
                    self.scrapes.insert(token, (stream, now_ns()));
                }
            }
        }
    }

    fn answer_scrape(&mut self, token: u64) {
        self.waits.remove(&token);
        let Some((mut stream, _)) = self.scrapes.remove(&token) else { return };
        // Whatever was asked, there is one answer; it fits the socket, or is cut off.
        let mut request = [0; 4096];
        if stream.read(&mut request).is_ok_and(|n| n > 0) {
            let body = self.service.metrics();
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\nContent-Length:";
            let _ = stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes());
        }
    }

    fn close(&mut self, id: SessionId, why: &str) {
        self.service.disconnect(id);
        if let Some(l) = self.lines.remove(&id) {
            for t in &l.tokens {
                self.waits.remove(t);
            }
            if !why.is_empty() {
                self.say(format!("{} was disconnected: {why}", l.who));
            }
        }
    }

    fn hear(&mut self, id: SessionId, flags: epoll::EventFlags) {
        let mut buffer = [0; MAX_REQUEST + 1];
        for _ in 0..BURST {
            let Some(l) = self.lines.get_mut(&id) else { return };
            // Files that come along are closed at once: nobody was asked for any.
            let n = match socket::receive(l.socket.as_fd(), &mut buffer, false) {
                Ok((0, _)) => return self.close(id, ""),
                Ok((n, _files)) => n,
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return self.close(id, ""),
            };
            if l.count(0) > MAX_RATE {
                return self.close(id, "more messages than a program needs");
            }
            // What is longer than the buffer is longer than a message.
            let answer = self.service.message(id, &buffer[..n.min(buffer.len())]);
            self.service.said().into_iter().for_each(|line| self.say(line));
            if self.service.promised {
                self.save_if_due(now_ns());
            }
            let Some(l) = self.lines.get(&id) else { return };
            let sent = match &answer {
                Answer::Close(why) => return self.close(id, why),
                Answer::Reply(r) => socket::send(l.socket.as_fd(), &wire::encode(r), &[], false),
                Answer::Welcome(r) => match self.service.files(id) {
                    Some([a, b, c]) => {
                        socket::send(l.socket.as_fd(), &wire::encode(r), &[a, b, c, l.doorbell.as_fd()], false)
                    }
                    None => Err(Errno::INVAL),
                },
            };
            match sent {
                Ok(()) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return self.close(id, ""),
                Err(_) => return self.close(id, "it does not take its answers"),
            }
        }
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.close(id, "");
        }
    }

    /// Watches the processes that have become known.
    fn watch_new(&mut self) {
        for (pid, fd) in std::mem::take(&mut self.service.world().watched) {
            // One that cannot be watched has gone.
            let Some(fd) = fd else {
                self.exited(pid);
                continue;
            };
            let token = self.token(Waits::Process(pid));
            if self.add(&fd, token).is_err() {
                self.waits.remove(&token);
                self.exited(pid);
            } else if let Some((old, _)) = self.processes.insert(pid, (token, fd)) {
                self.waits.remove(&old);
            }
        }
    }

    fn exited(&mut self, pid: u32) {
        if let Some((token, _)) = self.processes.remove(&pid) {
            self.waits.remove(&token);
        }
        self.service.exited(pid);
        self.service.world().mps.iter_mut().for_each(Mps::reap);
        self.service.said().into_iter().for_each(|line| self.say(line));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let (Some(_ours), Some(path)) = (&self.metrics, &self.options.metrics) {
            let _ = std::fs::remove_file(path);
        }
        // A socket that was handed over is not ours to remove.
        if self.lock.is_some() {
            let _ = std::fs::remove_file(&self.options.socket);
        }
    }
}
