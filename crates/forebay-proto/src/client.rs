//! The program's side of the service.
//!
//! A [`Connection`] asks one question at a time. A [`Session`] is a program's presence at the service: it keeps a
//! connection, notices when the service goes and when it comes back, and has [`Account`]s that are asked before work is
//! begun. Without a service they say yes.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::thread::futex;
use rustix::time::{ClockId, clock_gettime};

use crate::bell::Sleeper;
use crate::memory::Mapped;
use crate::page::{ClientPage, DeviceLoad, GlobalPage, ProgramPage, ProgramWords, Standing};
use crate::socket;
use crate::wire::{self, CPU, MAX_REPLY, Malformed, Refusal, Reply, Request};

/// Longest wait for an answer.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Longest sleep before a waiting program looks whether the service is still there.
const LOOK: Duration = Duration::from_millis(20);
/// A service whose pages are older than this hangs or is stopped: nobody waits for it.
pub const SILENCE: Duration = Duration::from_secs(2);
/// Between two attempts to find a service that has gone.
const RETRY: Duration = Duration::from_millis(200);

/// Why the service could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none.
    #[error("no service is running (tried {})", .0.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    Absent(Vec<PathBuf>),
    /// The kernel's reason.
    #[error("{what}: {why}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        why: rustix::io::Errno,
    },
    /// The service said something else than what was asked for.
    #[error("the service's answer: {0}")]
    Malformed(#[from] Malformed),
    /// It answered something that does not belong to the question.
    #[error("the service answered something else than what was asked")]
    Confused,
    /// Somebody else runs it.
    #[error("the service at {} is run by user {user}, who is neither root nor this program's user", .path.display())]
    Stranger {
        /// Where it listens.
        path: PathBuf,
        /// Whose it is.
        user: u32,
    },
    /// It refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Results here.
pub type Result<T> = std::result::Result<T, Error>;

fn io(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |why| Error::Io { what, why }
}

/// A connection to the service.
pub struct Connection {
    socket: OwnedFd,
    /// The global page, the private one, the program's own, and the doorbell.
    files: [OwnedFd; 4],
    /// The service's version.
    pub service: String,
    /// Since when it has been running, as it said at the beginning.
    pub up: Duration,
}

impl Connection {
    /// Connects to the service of this machine or user.
    ///
    /// # Errors
    /// [`Error`].
    pub fn open(name: &str) -> Result<Self> {
        Self::first_of(&crate::socket_paths(), name)
    }

    fn first_of(paths: &[PathBuf], name: &str) -> Result<Self> {
        for p in paths {
            match Self::open_at(p, name) {
                Err(Error::Io { why: rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED, .. }) => {}
                other => return other,
            }
        }
        Err(Error::Absent(paths.to_vec()))
    }

    /// Connects to the service at this path.
    ///
    /// # Errors
    /// [`Error`].
    pub fn open_at(path: &Path, name: &str) -> Result<Self> {
        let socket = socket::connect_to(path, PATIENCE).map_err(io("connect to the service"))?;
        // A service could hold its clients up: only root's and one's own may. The user of a socket says who made it.
        let user = rustix::fs::stat(path).map_err(io("look at the service's socket"))?.st_uid;
        if user != 0 && user != rustix::process::geteuid().as_raw() {
            return Err(Error::Stranger { path: path.to_owned(), user });
        }
        let hello = Request::Hello { version: wire::VERSION, name: wire::short_name(name) };
        let (reply, files) = ask(&socket, &hello)?;
        let Reply::Welcome { service, up_ms } = reply else { return Err(Error::Confused) };
        let files = files.try_into().map_err(|_| Error::Confused)?;
        Ok(Connection { socket, files, service, up: Duration::from_millis(up_ms) })
    }

    /// Asks something; a refusal is an error.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ask(&self, request: &Request) -> Result<Reply> {
        ask(&self.socket, request).map(|(reply, _)| reply)
    }

    /// All processes that the service knows.
    ///
    /// # Errors
    /// [`Error`].
    pub fn processes(&self) -> Result<Vec<wire::Process>> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let Reply::Processes { processes, more } = self.ask(&Request::List { after })? else {
                return Err(Error::Confused);
            };
            let last = processes.last().map(|p| p.pid);
            all.extend(processes);
            match last {
                Some(pid) if more && pid > after => after = pid,
                _ => return Ok(all),
            }
        }
    }

    /// The service's devices.
    ///
    /// # Errors
    /// [`Error`].
    pub fn devices(&self) -> Result<Vec<wire::Device>> {
        match self.ask(&Request::Devices)? {
            Reply::Devices(d) => Ok(d),
            _ => Err(Error::Confused),
        }
    }

    /// The load of all devices.
    ///
    /// # Errors
    /// [`Error`].
    pub fn global(&self) -> Result<Mapped<GlobalPage>> {
        Mapped::open(self.files[0].as_fd(), false).map_err(io("map the global page"))
    }

    fn is_over(&self, patience: Option<Duration>, also: &OwnedFd) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP), PollFd::new(also, PollFlags::IN)];
        let timeout = patience.map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => !fds[0].revents().is_empty(),
            Err(rustix::io::Errno::INTR) => false,
            Err(_) => true,
        }
    }
}

fn ask(socket: &OwnedFd, request: &Request) -> Result<(Reply, Vec<OwnedFd>)> {
    socket::send(socket.as_fd(), &wire::encode(request), &[], true).map_err(io("ask the service"))?;
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let until = Instant::now() + PATIENCE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err(Error::Io { what: "wait for the service", why: rustix::io::Errno::TIMEDOUT }),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(why) => return Err(Error::Io { what: "wait for the service", why }),
        }
    }
    let mut buffer = vec![0; MAX_REPLY];
    let (n, files) = socket::receive(socket.as_fd(), &mut buffer, false).map_err(io("hear the service"))?;
    if n == 0 {
        return Err(Error::Io { what: "the service closed the connection", why: rustix::io::Errno::CONNRESET });
    }
    match wire::decode(buffer.get(..n).unwrap_or(&buffer), MAX_REPLY)? {
        Reply::Refused(why) => Err(Error::Refused(why)),
        reply => Ok((reply, files)),
    }
}

/// A program's presence at the service.
pub struct Session {
    name: String,
    /// Where the service's socket may be.
    paths: Vec<PathBuf>,
    state: Mutex<State>,
    /// Held by who asks: of one connection one question is asked at a time. Lock rank: before `state`, which is not held meanwhile.
    asking: Mutex<()>,
    pages: Pages,
    /// There is no service: everything is allowed.
    free: AtomicBool,
    /// Accounts, a bit each, on devices that the service that was found again does not share: everything is allowed there.
    away: AtomicU32,
    /// What is said of these.
    unheard: ProgramWords,
    /// Times that a service was found.
    found: AtomicU64,
    wake: OwnedFd,
    stop: AtomicBool,
    /// Whose presence it is.
    process: u32,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct State {
    connection: Option<Arc<Connection>>,
    /// Devices joined, by account.
    joined: Vec<Joined>,
}

#[derive(Clone)]
struct Joined {
    device: String,
    /// The service need not know it.
    brought: bool,
}

struct Pages {
    global: Mapped<GlobalPage>,
    client: Mapped<ClientPage>,
    program: Mapped<ProgramPage>,
}

/// `away` has a bit for each account.
const _: () = assert!(crate::page::MAX_DEVICES <= u32::BITS as usize);

impl Session {
    /// Registers with the service of this machine or user.
    ///
    /// # Errors
    /// [`Error::Absent`] when there is none; [`Error`].
    pub fn open(name: &str) -> Result<Arc<Self>> {
        Self::open_at(crate::socket_paths(), name)
    }

    /// Registers with the first service that is found at one of these paths.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn open_at(paths: Vec<PathBuf>, name: &str) -> Result<Arc<Self>> {
        let connection = Connection::first_of(&paths, name)?;
        let [global, client, program, _] = &connection.files;
        let pages = Pages {
            global: Mapped::open(global.as_fd(), false).map_err(io("map the global page"))?,
            client: Mapped::open(client.as_fd(), false).map_err(io("map the private page"))?,
            program: Mapped::open(program.as_fd(), true).map_err(io("map the program's page"))?,
        };
        let session = Arc::new(Session {
            name: name.to_owned(),
            paths,
            state: Mutex::new(State { connection: Some(Arc::new(connection)), joined: Vec::new() }),
            asking: Mutex::default(),
            pages,
            free: AtomicBool::new(false),
            away: AtomicU32::new(0),
            unheard: ProgramWords::default(),
            found: AtomicU64::new(1),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io("eventfd"))?,
            stop: AtomicBool::new(false),
            process: std::process::id(),
            thread: Mutex::new(None),
        });
        let watched = Arc::downgrade(&session);
        let thread = std::thread::Builder::new().name("forebay-service".into()).spawn(move || watch(&watched));
        let thread = thread.map_err(|_| Error::Io { what: "start a thread", why: rustix::io::Errno::AGAIN })?;
        *session.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(session)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the service is there.
    pub fn is_served(&self) -> bool {
        !self.free.load(Ordering::Acquire)
    }

    /// Whether the service is connected and does nothing any more.
    fn is_silent(&self) -> bool {
        self.load(0).is_some_and(|l| now_ns().saturating_sub(l.at_ns) > SILENCE.as_nanos() as u64)
    }

    /// How often a service was found; more than 1 when it was restarted.
    pub fn found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// Load of the device with this number.
    pub fn load(&self, device: usize) -> Option<DeviceLoad> {
        self.pages.global.device(device)
    }

    /// An account on a device of the service's.
    ///
    /// # Errors
    /// [`Error`].
    pub fn join(self: &Arc<Self>, device: &str) -> Result<Account> {
        self.get(Joined { device: wire::short_name(device), brought: false })
    }

    /// An account on a device that the service need not have been told of: all programs that bring it share it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn bring(self: &Arc<Self>, device: &str) -> Result<Account> {
        self.get(Joined { device: wire::short_name(device), brought: true })
    }

    fn get(self: &Arc<Self>, wanted: Joined) -> Result<Account> {
        let _asking = self.asking();
        let connection = self.state().connection.clone().ok_or_else(|| Error::Absent(self.paths.clone()))?;
        let answer = join(&connection, &wanted);
        if let Err(e) = &answer
            && !matches!(e, Error::Refused(_))
        {
            // What it says later would be taken for the next answer.
            self.lose(&connection);
        }
        let (number, metered) = answer?;
        let mut state = self.state();
        // The service may have gone since it answered; then there is nobody to join.
        if !state.connection.as_ref().is_some_and(|c| Arc::ptr_eq(c, &connection)) {
            return Err(Error::Absent(self.paths.clone()));
        }
        if number != state.joined.len() || number >= crate::page::MAX_DEVICES {
            drop(state);
            self.lose(&connection);
            return Err(Error::Confused);
        }
        state.joined.push(wanted);
        Ok(Account { session: self.clone(), number, metered, spent: AtomicU64::new(cpu_time_ns()) })
    }

    fn asking(&self) -> MutexGuard<'_, ()> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That connection is over: another one is looked for.
    fn lose(&self, connection: &Arc<Connection>) {
        let mut state = self.state();
        if state.connection.as_ref().is_some_and(|c| Arc::ptr_eq(c, connection)) {
            state.connection = None;
            self.free.store(true, Ordering::Release);
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn reconnect(&self) -> Result<()> {
        let _asking = self.asking();
        let connection = Connection::first_of(&self.paths, &self.name)?;
        // Nobody joins meanwhile.
        let joined = self.state().joined.clone();
        let mut away = 0;
        for (at, wanted) in joined.iter().enumerate() {
            let number = match join(&connection, wanted) {
                // It was started otherwise than the one before. Something has to have the account's number.
                Err(Error::Refused(_)) if wanted.device != CPU => {
                    away |= 1u32 << at;
                    join(&connection, &Joined { device: CPU.into(), brought: false })?.0
                }
                answer => answer?.0,
            };
            if number != at {
                return Err(Error::Confused);
            }
        }
        let mut state = self.state();
        // Others see the new pages in the place of the old ones. What the program says of itself goes along, but for what it
        // has used: this service counts from none, and would count no faster than the device works.
        let [global, client, program, _] = &connection.files;
        let next = Mapped::<ProgramPage>::open(program.as_fd(), true).map_err(io("map the program's page"))?;
        for (at, (old, new)) in self.pages.program.accounts.iter().zip(&next.accounts).enumerate() {
            if away & 1 << at != 0 {
                continue;
            }
            new.tasks.store(old.tasks.load(Ordering::Relaxed), Ordering::Relaxed);
            new.demand.store(old.demand.load(Ordering::Relaxed), Ordering::Relaxed);
            new.busy.store(old.busy.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.pages.global.replace(global.as_fd(), false).map_err(io("map the global page"))?;
        self.pages.client.replace(client.as_fd(), false).map_err(io("map the private page"))?;
        self.pages.program.replace(program.as_fd(), true).map_err(io("map the program's page"))?;
        state.connection = Some(Arc::new(connection));
        self.away.store(away, Ordering::Relaxed);
        self.found.fetch_add(1, Ordering::Relaxed);
        self.free.store(false, Ordering::Release);
        Ok(())
    }
}

/// The account's number, and whether the kernel measures what is used.
fn join(connection: &Connection, wanted: &Joined) -> Result<(usize, bool)> {
    let device = wanted.device.clone();
    match connection.ask(&if wanted.brought { Request::Bring { device } } else { Request::Join { device } })? {
        Reply::Joined { account, metered } => Ok((account.into(), metered)),
        _ => Err(Error::Confused),
    }
}

/// Notices the service's end, and its return.
fn watch(session: &Weak<Session>) {
    let end = |s: &Session| s.stop.load(Ordering::Acquire);
    while let Some(s) = session.upgrade().filter(|s| !end(s)) {
        let connection = s.state().connection.clone();
        match connection {
            Some(c) => {
                // The session may go meanwhile; it is not kept by this thread, only looked at once in a while.
                let Ok(wake) = rustix::io::fcntl_dupfd_cloexec(&s.wake, 0) else { return };
                drop(s);
                let over = c.is_over(None, &wake);
                // Woken for what is seen now, or at the end.
                let _ = rustix::io::read(&wake, &mut [0u8; 8]);
                if let Some(s) = session.upgrade().filter(|_| over) {
                    s.lose(&c);
                }
            }
            None if s.reconnect().is_err() => {
                let Ok(wake) = rustix::io::fcntl_dupfd_cloexec(&s.wake, 0) else { return };
                drop(s);
                let timeout = Timespec { tv_sec: 0, tv_nsec: RETRY.subsec_nanos().into() };
                let _ = poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&timeout));
                let _ = rustix::io::read(&wake, &mut [0u8; 8]);
            }
            None => {}
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In one that was forked the thread is not there: neither to be woken (the other one's would be) nor joined.
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(t) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = t.join();
        }
    }
}

/// Time that this process has had of the CPU, ns.
pub fn cpu_time_ns() -> u64 {
    read_ns(ClockId::ProcessCPUTime)
}

/// The monotonic clock, ns.
pub fn now_ns() -> u64 {
    read_ns(ClockId::Monotonic)
}

fn read_ns(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Credit on one device.
///
/// Asking ([`Account::may`]) is a few loads and saying what was used one addition; a system call is made only to wait.
pub struct Account {
    session: Arc<Session>,
    number: usize,
    /// The kernel measures what is used; `spent` is what it said last. Otherwise the program's page has it.
    metered: bool,
    spent: AtomicU64,
}

impl Account {
    fn mine(&self) -> &ProgramWords {
        if self.is_away() { &self.session.unheard } else { &self.session.pages.program.accounts[self.number] }
    }

    /// Whether the service does not share the device any more.
    fn is_away(&self) -> bool {
        self.session.away.load(Ordering::Relaxed) & 1 << self.number != 0
    }

    /// Whether work may be begun now.
    #[inline]
    pub fn may(&self) -> bool {
        self.may_beside(0)
    }

    /// Whether work may be begun while what has been begun will use so much more, ns: who begins whatever there is as long as
    /// it owes nothing owes all of it at once, and others have none of the device meanwhile.
    #[inline]
    pub fn may_beside(&self, ahead_ns: u64) -> bool {
        let a = &self.session.pages.client.accounts[self.number];
        let spent = if self.metered { self.spent.load(Ordering::Relaxed) } else { self.mine().used_ns(now_ns) };
        (a.allowance.load(Ordering::Relaxed) > spent.saturating_add(ahead_ns) && a.hold.load(Ordering::Relaxed) == 0)
            || self.session.free.load(Ordering::Relaxed)
            || self.is_away()
    }

    /// Whether the kernel measures what is used, and not the program.
    pub fn is_metered(&self) -> bool {
        self.metered
    }

    /// What the kernel said last that was used, ns, where it is the one who measures ([`Account::look`]).
    pub fn metered_ns(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// So much of the device was used, in one piece of work.
    #[inline]
    pub fn took(&self, ns: u64) {
        // Behind what `works_since` says.
        self.mine().spent.fetch_add(ns, Ordering::Release);
    }

    /// Work is in the device from this moment on ([`now_ns`]), which `took` will tell of: the service counts it meanwhile.
    /// False where that is the kernel's business, or another queue has said so: then it is counted at its end.
    pub fn begins(&self, at_ns: u64) -> bool {
        let since = &self.mine().since;
        !self.metered && since.compare_exchange(0, at_ns.max(1), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Whoever [`Account::begins`] was true for is about to tell of what ended now; what is in the device after that is there
    /// from this moment on, or nothing is.
    pub fn works_since(&self, at_ns: Option<u64>) {
        self.mine().since.store(at_ns.map_or(0, |ns| ns.max(1)), Ordering::Relaxed);
    }

    /// Asks the kernel what was used, if it is the one who measures. A system call of about half a microsecond: for every
    /// hundred microseconds of work or so.
    pub fn look(&self) {
        if self.metered {
            self.spent.fetch_max(cpu_time_ns(), Ordering::Relaxed);
        }
    }

    /// Sleeps until there may be credit, and no longer than a moment; whether work may be begun now beside what `ahead` says
    /// then ([`Account::may_beside`]).
    pub fn wait(&self, ahead: impl Fn() -> u64) -> bool {
        let a = &self.session.pages.client.accounts[self.number];
        let sleeper = Sleeper::lie_down(&a.bell, &self.mine().sleepers);
        if self.may_beside(ahead()) || self.session.is_silent() {
            return true;
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        // Interrupted, timed out, rung: all the same.
        let _ = futex::wait(&a.bell, futex::Flags::empty(), sleeper.bell, Some(&timeout));
        drop(sleeper);
        self.look();
        self.may_beside(ahead())
    }

    /// Less is ahead than those thought who sleep: they look again. A system call if there are any.
    pub fn less_is_ahead(&self) {
        if self.mine().sleepers.load(Ordering::Relaxed) != 0 {
            let a = &self.session.pages.client.accounts[self.number];
            // Nobody there to wake is no failure. Whoever is about to sleep at this moment does so until the next tick.
            let _ = futex::wake(&a.bell, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// How much of the device the program could use now, in millionths.
    pub fn demands(&self, millionths: u32) {
        let d = &self.mine().demand;
        if d.load(Ordering::Relaxed) != millionths {
            d.store(millionths, Ordering::Relaxed);
        }
    }

    /// Whether others wait while this program works, so that the service wants to know when it does.
    #[inline]
    pub fn has_precedence(&self) -> bool {
        self.session.pages.client.accounts[self.number].precedence.load(Ordering::Relaxed) != 0 && !self.is_away()
    }

    /// The program begins to work, or has nothing left to do. The service is told if it wants to know.
    #[inline]
    pub fn works(&self, busy: bool) {
        let b = &self.mine().busy;
        if (b.load(Ordering::Relaxed) != 0) != busy {
            self.changes(busy);
        }
    }

    #[cold]
    fn changes(&self, busy: bool) {
        self.mine().busy.store(busy.into(), Ordering::SeqCst);
        if self.has_precedence() {
            let connection = self.session.state().connection.clone();
            if let Some(c) = connection {
                let _ = rustix::io::write(&c.files[3], &1u64.to_ne_bytes());
            }
        }
    }

    /// How the program stands on the device.
    pub fn standing(&self) -> Option<Standing> {
        (!self.is_away()).then_some(())?;
        self.session.pages.client.accounts[self.number].standing()
    }

    /// The session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The account of the CPU: what every process has.
    ///
    /// # Errors
    /// As [`Session::join`].
    pub fn cpu(session: &Arc<Session>) -> Result<Account> {
        session.join(CPU)
    }
}
