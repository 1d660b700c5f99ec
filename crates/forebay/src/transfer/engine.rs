//! The engine of a device: its curves, kept true, and what streams share.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use arc_swap::ArcSwap;
use forebay_hal::cache::Cache;
use forebay_hal::{Buffer, Device, Direction, Kind, Method, Wanted, discover};

use super::curve::{Cost, Curve, Curves, Host, MAX_POINTS, Way};
use super::others::Moment;
use super::pinned::Pinned;
use super::plan::{self, Plan, Request, Table};
use super::realtime::{Budget, RealTime};
use super::stream::Stream;
use super::{calibrate, store};
use crate::error::Result;

/// How far a timed transfer may be from its curve before it counts as a miss: half as much again, or two thirds.
const MISS_PERCENT: (u64, u64) = (150, 67);
/// Below this difference, ns, nothing is a miss: that is what a clock and an interrupt cost.
const MISS_NS: u64 = 2_000;
/// Misses in a row, all to the same side, after which the curve is wrong and not the moment.
const MISSES: i32 = 10;
/// Where a copy can be one `memcpy`, those below this are, without asking how: nothing is faster for so few bytes, and the
/// question would take a good part as long.
const UNASKED: usize = 32 << 10;
/// Up to here they are as well where the curves say that nothing is faster. A copy of this size and the question together are more
/// than the first cache holds, so that the question finds nothing there: it took 0.1 µs (of 0.9 for 32 KiB). Larger ones are
/// watched instead.
const UNASKED_MOST: usize = 128 << 10;

/// Moves data between the host and one device by the fastest way for every size.
///
/// ```
/// use forebay::transfer::Engine;
///
/// let (devices, _) = forebay::hal::discover(&[forebay::Kind::Cpu]);
/// let engine = Engine::open(devices[0].clone())?; // measured once for a machine, for two seconds at most
/// let memory = engine.memory(1 << 20)?;
/// let mut stream = engine.stream()?;
/// stream.write(&memory, 0, &b"hello"[..])?; // has arrived when this returns
/// let mut back = [0u8; 5];
/// stream.read(&memory, 0, &mut back[..])?;
/// assert_eq!(&back, b"hello");
/// # Ok::<(), forebay::Error>(())
/// ```
pub struct Engine {
    device: Arc<dyn Device>,
    known: ArcSwap<Known>,
    /// Held by whoever replaces `known`.
    changing: Mutex<()>,
    /// Grows with every change of `known`, so that streams see at a glance whether theirs is the latest.
    generation: AtomicU64,
    /// Held by whoever uses the mapping, where sharing it makes it slower for both.
    mapping: Option<Mutex<()>>,
    departures: AtomicU64,
    cache: Cache,
    host_memory: bool,
    plain: Option<Method>,
}

/// Curves and what follows from them.
pub(super) struct Known {
    generation: u64,
    pub(super) curves: Curves,
    pub(super) table: Table,
    /// Transfers of fewer bytes need no plan; 0 where all do.
    pub(super) unasked: usize,
    /// For every point of every curve.
    watched: Vec<Watched>,
    /// Split transfers in a row, by direction, that took longer than one way alone is expected to.
    in_vain: [AtomicI32; 2],
}

/// What was seen at one point since its curve was made.
#[derive(Default)]
struct Watched {
    /// Misses in a row; negative when they were too fast.
    misses: AtomicI32,
    /// Their sum, ns.
    sum: AtomicU64,
    slowest: AtomicU64,
}

impl Known {
    /// `plain`: of the device, as in [`Engine`].
    fn new(curves: Curves, generation: u64, plain: Option<Method>, hosts: &[Host]) -> Arc<Self> {
        let watched = (0..curves.all.len() * MAX_POINTS).map(|_| Watched::default()).collect();
        let table = Table::new(&curves);
        let unasked = plain.map_or(0, |m| unasked(&table, Way::Direct(m), hosts));
        Arc::new(Known { generation, table, unasked, curves, watched, in_vain: Default::default() })
    }
}

/// Below how many bytes `plain` is the way, in both directions and of all memory.
fn unasked(table: &Table, plain: Way, hosts: &[Host]) -> usize {
    let everywhere = |bytes: &usize| {
        let mut each = Direction::ALL.into_iter().flat_map(|d| hosts.iter().map(move |h| (d, *h)));
        each.all(|(d, h)| table.way(d, *bytes as u64, h) == Some(plain))
    };
    let sizes = std::iter::successors(Some(UNASKED), |s| Some(2 * s)).take_while(|s| *s <= UNASKED_MOST);
    sizes.take_while(everywhere).last().map_or(UNASKED, |s| s + 1)
}

/// Kinds of the host's memory that differ, where that and the device's are one, or not.
fn hosts(one: bool) -> &'static [Host] {
    if one { &[Host::Pinned] } else { &Host::ALL }
}

impl Engine {
    /// The engine of `device` with the curves that this machine stored, or measured now (two seconds at most) and stored. Those that
    /// were measured while others kept the machine busy are measured anew after an hour.
    ///
    /// # Errors
    /// Those of the device, while it is measured.
    pub fn open(device: Arc<dyn Device>) -> Result<Arc<Self>> {
        Self::open_in(device, Cache::user())
    }

    /// As [`Engine::open`], of the device that is wanted, the first of several, or of the first of a GPU, another OpenCL device and
    /// the CPU that there is.
    ///
    /// # Errors
    /// As there; the reason why there is no such device.
    pub fn of(wanted: Option<Wanted>) -> Result<Arc<Self>> {
        let found = match wanted {
            Some(w) => w.find()?,
            None => discover(&[Kind::Cuda, Kind::OpenCl, Kind::Cpu]).0,
        };
        let none = || forebay_hal::Error::NoDevice { kind: Kind::Cpu, why: "none was found".into() };
        Self::open(found.into_iter().next().ok_or_else(none)?)
    }

    /// As [`Engine::open`], with curves stored elsewhere.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_in(device: Arc<dyn Device>, cache: Cache) -> Result<Arc<Self>> {
        let stored = store::load(&cache, &*device);
        let engine = Self::with(device, stored.clone().unwrap_or_default(), cache);
        if stored.is_none() || store::is_due(&engine.cache, &*engine.device) {
            engine.calibrate(calibrate::BUDGET)?;
        }
        Ok(engine)
    }

    /// The engine of `device` with stored curves, if there are any; never measures. Without curves everything goes by the
    /// device's own engine.
    pub fn as_stored(device: Arc<dyn Device>) -> Arc<Self> {
        let cache = Cache::user();
        let curves = store::load(&cache, &*device).unwrap_or_default();
        Self::with(device, curves, cache)
    }

    /// The engine of `device` with these curves; nothing is stored.
    pub fn with_curves(device: Arc<dyn Device>, curves: Curves) -> Arc<Self> {
        Self::with(device, curves, Cache::off())
    }

    fn with(device: Arc<dyn Device>, curves: Curves, cache: Cache) -> Arc<Self> {
        let curves = Curves { all_cores: Way::by_all_cores(&*device), ..curves };
        // The aperture: two writers interleave in the write-combining buffers, and both become slower.
        let mapping = (device.info().kind == Kind::Cuda).then(Mutex::default);
        let (host_memory, plain) = (device.info().host_memory, device.plain_copy());
        let known = ArcSwap::new(Known::new(curves, 0, plain, hosts(host_memory)));
        let (generation, departures, changing) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::default());
        Arc::new(Engine { device, known, changing, generation, mapping, departures, cache, host_memory, plain })
    }

    /// Measures all ways anew, within `budget`, and stores what was found.
    ///
    /// # Errors
    /// Those of the device.
    pub fn calibrate(self: &Arc<Self>, budget: Duration) -> Result<()> {
        let begun = Moment::now();
        let curves = calibrate::measure(self, budget)?;
        let busy = begun.zip(Moment::now()).is_some_and(|(begun, ended)| begun.was_busy_until(&ended));
        store::save(&self.cache, &*self.device, &curves, busy);
        self.replace(|now| Curves { all_cores: now.all_cores, ..curves });
        Ok(())
    }

    /// Its device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// What is known now.
    pub fn curves(&self) -> Curves {
        self.known().curves.clone()
    }

    /// How often a curve was corrected because transfers were not what it said.
    pub fn departures(&self) -> u64 {
        self.departures.load(Ordering::Relaxed)
    }

    /// What a transfer of `bytes` costs while nothing else is in flight.
    pub fn cost(&self, direction: Direction, bytes: u64, host: Host) -> Cost {
        self.plan(direction, bytes, host).cost
    }

    /// Device memory that every way serves, the processor's own included where the device has that.
    ///
    /// # Errors
    /// Out of memory.
    pub fn memory(&self, bytes: usize) -> Result<Buffer> {
        Ok(self.device.alloc_mapped(bytes)?)
    }

    /// How a transfer would go now, while nothing else is in flight.
    pub fn plan(&self, direction: Direction, bytes: u64, host: Host) -> Plan {
        plan::plan(&Request::new(direction, bytes, self.place(host)), &self.known().curves)
    }

    /// Where the host's bytes are for this device: of one whose memory is the host's, all memory is as good.
    pub(super) fn place(&self, host: Host) -> Host {
        if self.host_memory { Host::Pinned } else { host }
    }

    /// Whether its device's memory is the host's.
    pub(super) fn is_in_host_memory(&self) -> bool {
        self.host_memory
    }

    /// The method by which transfers go that need no plan.
    pub(super) fn plain(&self) -> Method {
        self.plain.unwrap_or(Method::Engine)
    }

    /// Host memory that the device's kernels read and write in place: the host's handle and the device's.
    ///
    /// # Errors
    /// [`forebay_hal::Error::Unsupported`] where the device cannot reach host memory; out of memory.
    pub fn shared(&self, bytes: usize) -> Result<(Buffer, Buffer)> {
        Ok(self.device.alloc_shared(bytes)?)
    }

    /// Host memory from which the device copies fastest, zeroed.
    ///
    /// # Errors
    /// Out of memory.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Pinned::new(&*self.device, bytes)
    }

    /// A new stream.
    ///
    /// # Errors
    /// Those of the device.
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        Stream::new(self.clone())
    }

    /// A stream of the calling thread with real-time priority, or the best that the system allows.
    ///
    /// # Errors
    /// Those of the device.
    pub fn real_time(self: &Arc<Self>, budget: Budget) -> Result<RealTime> {
        RealTime::new(self, budget)
    }

    /// The one way by which a transfer goes while nothing else is in flight; none if it has to be planned.
    pub(crate) fn way(&self, direction: Direction, bytes: u64, host: Host) -> Option<Way> {
        // The graphs ask for every block: of so few bytes the curves need not be had. Of more the table says the same as `unasked`.
        if let Some(plain) = self.plain.filter(|_| bytes < UNASKED as u64) {
            return Some(Way::Direct(plain));
        }
        self.known.load().table.way(direction, bytes, host)
    }

    /// What a transfer costs while nothing else is in flight, ns; for those who ask at every decision.
    pub(crate) fn cost_ns(&self, direction: Direction, bytes: u64, host: Host) -> u64 {
        let (known, host) = (self.known.load(), self.place(host));
        let way = known.table.way(direction, bytes, host);
        match way.and_then(|w| known.curves.get(w, direction, host)) {
            Some(curve) => curve.cost(bytes).median,
            None => plan::plan(&Request::new(direction, bytes, host), &known.curves).cost.median,
        }
    }

    /// The right to use the mapping, for somebody who is not a stream; none while somebody else has it.
    pub(crate) fn try_mapping(&self) -> Option<Option<MutexGuard<'_, ()>>> {
        match self.mapping.as_ref().map(Mutex::try_lock) {
            None => Some(None),
            Some(Ok(guard)) => Some(Some(guard)),
            Some(Err(TryLockError::Poisoned(p))) => Some(Some(p.into_inner())),
            Some(Err(TryLockError::WouldBlock)) => None,
        }
    }

    /// The mapping's lock, where it has one.
    pub(super) fn mapping(&self) -> Option<&Mutex<()>> {
        self.mapping.as_ref()
    }

    pub(super) fn known(&self) -> Arc<Known> {
        self.known.load_full()
    }

    /// Replaces `known` if it is not the latest; whether it was not.
    #[inline]
    pub(super) fn refresh(&self, known: &mut Arc<Known>) -> bool {
        let is_old = known.generation != self.generation.load(Ordering::Acquire);
        if is_old {
            *known = self.known();
        }
        is_old
    }

    fn replace(&self, change: impl FnOnce(&Curves) -> Curves) {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.known();
        let generation = known.generation + 1;
        self.known.store(Known::new(change(&known.curves), generation, self.plain, hosts(self.host_memory)));
        self.generation.store(generation, Ordering::Release);
    }

    /// Compares a split transfer with what one way alone would take; ten in a row that gained nothing end splitting.
    pub(super) fn observe_split(&self, known: &Known, direction: Direction, alone: u64, took: Duration) {
        let vain = took.as_nanos() > u128::from(alone);
        let count = &known.in_vain[direction as usize];
        let n = if vain { count.load(Ordering::Relaxed) + 1 } else { 0 };
        count.store(n, Ordering::Relaxed);
        if n >= MISSES {
            self.departures.fetch_add(1, Ordering::Relaxed);
            self.replace(|now| {
                let mut curves = now.clone();
                curves.together[direction as usize].clear();
                curves
            });
        }
    }

    /// Compares a transfer with its curve; ten in a row that took far longer, or far less, correct it.
    pub(super) fn observe(
        &self,
        known: &Known,
        way: Way,
        direction: Direction,
        host: Host,
        bytes: u64,
        took: Duration,
    ) {
        let Some(at) = known.curves.position(way, direction, host) else { return };
        let expected = known.curves.all[at].curve.cost(bytes).median.max(1);
        let took = took.as_nanos().min(u128::from(u64::MAX / 200)) as u64;
        let far = took.abs_diff(expected) > MISS_NS;
        let side = match took * 100 / expected {
            p if far && p > MISS_PERCENT.0 => 1,
            p if far && p < MISS_PERCENT.1 => -1,
            _ => 0,
        };
        let point = Curve::nearest(bytes);
        let Some(w) = known.watched.get(at * MAX_POINTS + point) else { return };
        let misses = w.misses.load(Ordering::Relaxed);
        if side == 0 || misses.signum() * side < 0 {
            // Most transfers: nothing to write.
            if misses != 0 {
                w.misses.store(0, Ordering::Relaxed);
                w.sum.store(0, Ordering::Relaxed);
                w.slowest.store(0, Ordering::Relaxed);
            }
            return;
        }
        // What the point itself would have been, were it as far off.
        let there = known.curves.all[at].curve.cost(Curve::size(point)).median;
        let scaled = (u128::from(took) * u128::from(there) / u128::from(expected)).min(u128::from(u64::MAX)) as u64;
        let sum = w.sum.fetch_add(scaled, Ordering::Relaxed) + scaled;
        let slowest = w.slowest.fetch_max(scaled, Ordering::Relaxed).max(scaled);
        w.misses.store(misses + side, Ordering::Relaxed);
        if (misses + side).abs() >= MISSES {
            self.departures.fetch_add(1, Ordering::Relaxed);
            let mean = sum / MISSES as u64;
            self.replace(|now| {
                let mut curves = now.clone();
                if let Some(m) = curves.all.get_mut(at) {
                    m.curve = m.curve.with(point, Cost { median: mean, tail: slowest });
                }
                curves
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::curve::Measured;
    use super::*;

    /// Where the curves say that something else is faster from a size on, in one direction of one kind of memory, less than that
    /// goes without a question.
    #[test]
    fn what_is_never_faster_is_not_asked_for() {
        let plain = Way::Direct(Method::Engine);
        let curve = |start: u64, kib: u64| {
            let points = (0..20).map(|i| start + Curve::size(i) * kib / 1024);
            Curve::new(points.map(|ns| Cost { median: ns, tail: ns }).collect())
        };
        let one = |way, direction, curve| Measured { way, direction, host: Host::Pinned, curve };
        let limit = |from: u64| {
            let mut all: Vec<_> = Direction::ALL.map(|d| one(plain, d, curve(0, 100))).into();
            // A start that is worth it from there on.
            all.push(one(Way::Direct(Method::Kernel), Direction::ToHost, curve(80 * from / 1024, 1)));
            unasked(&Table::new(&Curves { all, ..Curves::default() }), plain, hosts(true))
        };
        assert_eq!([16, 32, 64, 128, 256].map(|kib| limit(kib << 10) >> 10), [32, 32, 32, 64, 128]);
        // Of the other kind of memory nothing was measured, and then it is the engine's.
        let none = Table::new(&Curves::default());
        let of = |way, one| unasked(&none, way, hosts(one));
        assert_eq!((of(plain, false), of(Way::Direct(Method::Mapped), false)), (UNASKED_MOST + 1, UNASKED));
    }
}
