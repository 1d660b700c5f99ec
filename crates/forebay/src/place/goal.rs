//! Goals: what a program wants to reach, and what is done about it.
//!
//! Every half second the tracker's figure is compared with the goal. While it is missed, in this order: another lane (so that
//! more devices or cores work), a larger share from the service, and last a call that asks the program to lower its fidelity.
//! While it is exceeded by a fifth, the same in reverse. After each step a period passes, to see what it did. A step that did
//! not help within two periods is not blamed: the next one is taken, until there is none. A step back after which the goal is
//! missed is not taken again for five seconds, then ten, and so on, unless the goal is exceeded by much more than it was then:
//! what one step changes may be more than a fifth. A share that the service refuses is asked for again half a minute later, if it is
//! wanted still. Everything is told. A service that
//! goes away is no refusal: shares are asked for again when it is back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_proto::client::{Connection, Error};
use forebay_proto::wire::{CPU, Class, Request};

use super::energy::Energy;
use super::stub::Accelerated;

/// Between two looks.
pub const PERIOD: Duration = Duration::from_millis(500);
/// How long a look waits for what the tracker says.
const PATIENCE: Duration = Duration::from_millis(100);
/// A goal is exceeded when it is by this part: less would go back and forth.
const ROOM: f64 = 0.2;
/// Points of a share that are asked for at a time.
const POINTS: u8 = 10;
/// The largest share that is asked for.
const MAX_SHARE: u8 = 90;
/// Less is better by this part at least.
const GAIN: f64 = 0.02;
/// Periods after which the least is looked for again.
const REST: u32 = 40;
/// Periods for which a step back is not taken again after it was one too many; twice as many each time, up to so many.
const RESTS: [u32; 2] = [10, 240];
/// Unless the goal is exceeded by so many times more than then.
const MORE: f64 = 1.3;
/// Periods after which a share that was refused may be asked for again: others may have less by then.
const REFUSED: u32 = 60;
/// Lines of the log that are kept.
const MAX_LOG: usize = 1000;

/// What a program wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least so much in a second, of whatever the tracker counts.
    Throughput(f64),
    /// At most so long for a call, in seconds, as the tracker measures it.
    Latency(f64),
    /// All of the work, of which the tracker says the part that is done (0 to 1), within this time from now.
    Deadline(Duration),
    /// As little as possible of what the tracker says, such as energy × time for a unit of work ([`Counter::energy_time`]):
    /// more and fewer lanes are tried, and the best is kept.
    Least,
}

impl Goal {
    /// The goal of this name: `throughput` (a second), `latency` or `deadline` (seconds), or `least`, of which there is no
    /// value.
    ///
    /// # Errors
    /// Which names there are, or that the value is none: it must be a number above zero.
    pub fn named(name: &str, value: f64) -> Result<Goal, String> {
        if name == "least" {
            return Ok(Goal::Least);
        }
        if !["throughput", "latency", "deadline"].contains(&name) {
            return Err(format!("there is no goal {name:?}; there are throughput, latency, deadline, least"));
        }
        let seconds = Duration::try_from_secs_f64(value).ok().filter(|d| !d.is_zero());
        match (name, seconds) {
            // More of them in a second than nanoseconds is no less of a goal.
            ("throughput", _) if value.is_finite() && value > 0.0 => Ok(Goal::Throughput(value)),
            ("latency", Some(_)) => Ok(Goal::Latency(value)),
            ("deadline", Some(within)) => Ok(Goal::Deadline(within)),
            _ => Err(format!("{value} is no {name}")),
        }
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Work on so many lanes.
    Spread(usize),
    /// Ask for this share, percent; 0 for none of its own.
    Share(u8),
    /// Ask the program for this fidelity: 0 is the best, each more is lower.
    Fidelity(u32),
}

/// A decision, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Since the beginning.
    pub at: Duration,
    /// What the tracker said.
    pub measured: Option<f64>,
    /// What is done; nothing, if there is nothing to do or that can be done.
    pub action: Option<Action>,
    /// In words.
    pub why: String,
}

/// Decides; knows no clock and does nothing.
#[derive(Clone, Debug)]
pub struct Optimizer {
    goal: Goal,
    lanes: usize,
    max_lanes: usize,
    share: u8,
    /// What it has without a share of its own, percent: to ask for less would be a step down.
    has: u8,
    /// Above this the service said no, so many periods ago.
    max_share: u8,
    refused: u32,
    fidelity: u32,
    max_fidelity: u32,
    acted: bool,
    back: Back,
    climb: Climb,
}

/// Steps back, to less than there was.
#[derive(Clone, Copy, Debug, Default)]
struct Back {
    /// How well the goal was met when the last one was taken; it has not been judged yet.
    from: Option<f64>,
    /// The same of one after which the goal was missed.
    wrong: Option<f64>,
    /// Periods until it may be tried again, and how many that were.
    rest: u32,
    wait: u32,
}

impl Back {
    /// The goal is met by this part now, and what was done last has had its time.
    fn judge(&mut self, met: f64) {
        if let Some(from) = self.from.take() {
            if met < 1.0 {
                self.wait = (self.wait * 2).clamp(RESTS[0], RESTS[1]);
                (self.wrong, self.rest) = (Some(from), self.wait);
            } else {
                (self.wrong, self.wait) = (None, 0);
            }
        }
        self.rest = self.rest.saturating_sub(1);
    }

    /// Whether one may be taken.
    fn may(&self, met: f64) -> bool {
        self.rest == 0 || self.wrong.is_none_or(|wrong| met > wrong * MORE)
    }
}

/// The search of [`Goal::Least`].
#[derive(Clone, Copy, Debug, Default)]
struct Climb {
    /// The best so far: lanes, and what the tracker said.
    best: Option<(usize, f64)>,
    down: bool,
    /// Directions that led to nothing better.
    tried: u8,
    /// Periods until it is looked for again.
    rest: u32,
}

impl Optimizer {
    /// For a goal; from one lane up to `max_lanes`, shares if `shares`, and fidelity down to `max_fidelity`.
    pub fn new(goal: Goal, max_lanes: usize, shares: bool, max_fidelity: u32) -> Self {
        let max_share = if shares { MAX_SHARE } else { 0 };
        let (climb, back) = (Climb::default(), Back::default());
        Optimizer {
            goal,
            lanes: 1,
            max_lanes,
            share: 0,
            has: 0,
            max_share,
            refused: 0,
            fidelity: 0,
            max_fidelity,
            acted: false,
            back,
            climb,
        }
    }

    /// How well the goal is met: 1 is exactly, more is better.
    fn met(&self, now: Duration, measured: f64) -> f64 {
        match self.goal {
            Goal::Throughput(want) => measured / want,
            Goal::Latency(want) => want / measured,
            Goal::Deadline(by) => measured * by.as_secs_f64() / now.as_secs_f64().max(1e-9),
            Goal::Least => 1.0 / measured,
        }
    }

    /// The next step of the search for the number of lanes at which the least is used.
    fn climb(&mut self, value: f64) -> (Option<Action>, String) {
        let c = &mut self.climb;
        if c.rest > 0 {
            c.rest -= 1;
            if c.rest == 0 {
                *c = Climb::default();
            }
            return (None, format!("{value:.3e}: the least that was found"));
        }
        let why = match c.best {
            Some((_, best)) if value < best * (1.0 - GAIN) => {
                c.tried = 0;
                c.best = Some((self.lanes, value));
                format!("{value:.3e} instead of {best:.3e}: further")
            }
            Some((lanes, best)) if lanes != self.lanes => {
                self.lanes = lanes;
                (c.down, c.tried) = (!c.down, c.tried + 1);
                return (Some(Action::Spread(lanes)), format!("{value:.3e} instead of {best:.3e}: back"));
            }
            _ => {
                c.best = Some((self.lanes, value));
                format!("{value:.3e} so far")
            }
        };
        // Where there is nothing further in one direction, the other is next.
        for _ in 0..2 {
            let next = if c.down { self.lanes.saturating_sub(1) } else { self.lanes + 1 };
            if c.tried >= 2 {
                break;
            }
            if (1..=self.max_lanes).contains(&next) {
                self.lanes = next;
                return (Some(Action::Spread(next)), why);
            }
            (c.down, c.tried) = (!c.down, c.tried + 1);
        }
        c.rest = REST;
        (None, format!("{value:.3e}: neither more nor fewer lanes are better"))
    }

    /// Without a share of its own the program has so much now, percent; said while it has none.
    pub fn has(&mut self, percent: u8) {
        if self.share == 0 {
            self.has = percent;
        }
    }

    /// The share to ask for next.
    fn larger(&self) -> u8 {
        self.share.max(self.has / POINTS * POINTS).saturating_add(POINTS)
    }

    /// The service refused a share.
    pub fn refused(&mut self, share: u8) {
        (self.max_share, self.refused) = (share.saturating_sub(1), 0);
        // Back to what it was: nothing of its own, if that was the first that was asked for.
        let before = share.saturating_sub(POINTS);
        self.share = if before <= self.has / POINTS * POINTS { 0 } else { self.share.min(before) };
    }

    /// The service is there, or has gone: then there are no shares.
    pub fn served(&mut self, there: bool) {
        self.max_share = if there { MAX_SHARE } else { 0 };
        self.share = self.share.min(self.max_share);
    }

    /// What to do, half a second after the last time.
    pub fn step(&mut self, now: Duration, measured: Option<f64>) -> Decision {
        let decide = |action, why: String| Decision { at: now, measured, action, why };
        self.refused += 1;
        if (1..MAX_SHARE).contains(&self.max_share) && self.refused > REFUSED {
            self.max_share = MAX_SHARE;
        }
        let Some(value) = measured else { return decide(None, "the tracker says nothing".into()) };
        let met = self.met(now, value);
        if !met.is_finite() || value < 0.0 {
            return decide(None, format!("the tracker says {value}, which is no figure"));
        }
        if matches!(self.goal, Goal::Deadline(_)) && value >= 1.0 {
            return decide(None, "all of it is done".into());
        }
        if std::mem::take(&mut self.acted) {
            return decide(None, format!("{:.0} % of the goal; waiting to see what the last step does", met * 100.0));
        }
        if self.goal == Goal::Least {
            let (action, why) = self.climb(value);
            self.acted = action.is_some();
            return decide(action, why);
        }
        let reached = format!("{:.0} % of the goal", met * 100.0);
        self.back.judge(met);
        let (action, why) = if met < 1.0 {
            if self.lanes < self.max_lanes {
                self.lanes += 1;
                (Some(Action::Spread(self.lanes)), format!("{reached}: more is done side by side"))
            } else if self.larger() <= self.max_share {
                self.share = self.larger();
                (Some(Action::Share(self.share)), format!("{reached} with every lane: a larger share"))
            } else if self.fidelity < self.max_fidelity {
                self.fidelity += 1;
                (
                    Some(Action::Fidelity(self.fidelity)),
                    format!("{reached}, and no larger share is to be had: lower fidelity"),
                )
            } else {
                (None, format!("{reached}, and nothing is left to do"))
            }
        } else if met > 1.0 + ROOM && !self.back.may(met) {
            (None, format!("{reached}; a step back was one too many not long ago"))
        } else if met > 1.0 + ROOM {
            let less = self.fidelity > 0 || self.share > 0 || self.lanes > 1;
            self.back.from = less.then_some(met);
            if self.fidelity > 0 {
                self.fidelity -= 1;
                (Some(Action::Fidelity(self.fidelity)), format!("{reached}: higher fidelity"))
            } else if self.share > 0 {
                // What it would have all the same it need not ask for.
                let less = self.share - POINTS;
                self.share = if less <= self.has / POINTS * POINTS { 0 } else { less };
                (Some(Action::Share(self.share)), format!("{reached}: a smaller share is enough"))
            } else if self.lanes > 1 {
                self.lanes -= 1;
                (Some(Action::Spread(self.lanes)), format!("{reached}: fewer lanes are enough"))
            } else {
                (None, format!("{reached}, with as little as there is"))
            }
        } else {
            (None, format!("{reached}: as it should be"))
        };
        self.acted = action.is_some();
        decide(action, why)
    }
}

/// Counts what a program does, for goals of throughput.
#[derive(Clone, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    /// So much more is done.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// A tracker of energy × time for each of what is added, J·s; nothing is said of a period in which nothing was added.
    pub fn energy_time(&self, mut energy: Energy) -> impl FnMut() -> f64 + Send + 'static {
        let count = self.0.clone();
        let mut last = (Instant::now(), count.load(Ordering::Relaxed), energy.joules());
        move || {
            let now = (Instant::now(), count.load(Ordering::Relaxed), energy.joules());
            let (time, n, joules) = ((now.0 - last.0).as_secs_f64(), (now.1 - last.1) as f64, now.2 - last.2);
            last = now;
            if n > 0.0 { joules / n * (time / n) } else { f64::NAN }
        }
    }

    /// A tracker of what is added in a second.
    pub fn per_second(&self) -> impl FnMut() -> f64 + Send + 'static {
        let count = self.0.clone();
        let mut last = (Instant::now(), count.load(Ordering::Relaxed));
        move || {
            let now = (Instant::now(), count.load(Ordering::Relaxed));
            let rate = (now.1 - last.1) as f64 / (now.0 - last.0).as_secs_f64();
            last = now;
            rate
        }
    }
}

/// A goal that is being pursued; dropping it ends that.
pub struct Pursuit {
    stop: Arc<AtomicBool>,
    log: Arc<Mutex<Vec<Decision>>>,
}

impl Pursuit {
    /// The decisions so far, the last thousand of them.
    pub fn log(&self) -> Vec<Decision> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Decision {
    /// What was measured and done, and why, as a line.
    pub fn line(&self) -> String {
        let measured = self.measured.map_or("nothing measured".into(), |m| format!("{m:.4}"));
        let done = match self.action {
            Some(Action::Spread(n)) => format!("{n} lanes"),
            Some(Action::Share(percent)) => format!("a share of {percent} %"),
            Some(Action::Fidelity(level)) => format!("fidelity {level}"),
            None => "nothing done".into(),
        };
        format!("{measured}: {done}: {}", self.why)
    }
}

impl Drop for Pursuit {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Asks the tracker on a thread of its own, for it may never answer.
///
/// 1. One question is open at most: while the tracker is at one, no other is put.
/// 2. An answer that does not come within [`PATIENCE`] counts at the look during or before which it comes.
/// 3. A panic is no answer.
struct Asked {
    questions: SyncSender<()>,
    answers: Receiver<Option<f64>>,
    open: bool,
}

impl Asked {
    fn new(mut tracker: impl FnMut() -> f64 + Send + 'static) -> std::io::Result<Asked> {
        let (questions, asked) = sync_channel(1);
        let (answer, answers) = sync_channel(1);
        let answers_them = move || {
            // Ends when nobody asks any more, or wants to hear the answer.
            while asked.recv().is_ok() {
                let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut tracker)).ok();
                if answer.send(said).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("forebay-tracker".into()).spawn(answers_them)?;
        Ok(Asked { questions, answers, open: false })
    }

    /// What it says now; nothing, while it is still at an earlier question or takes too long for this one.
    fn ask(&mut self) -> Option<f64> {
        if !self.open {
            self.open = self.questions.try_send(()).is_ok();
        }
        let said = self.answers.recv_timeout(PATIENCE).ok()?;
        self.open = false;
        said
    }
}

/// What the service is told of who asks.
const NAME: &str = "forebay goal";

/// Asks for a share of this process's own.
fn share(percent: u8) -> Request {
    let class = if percent == 0 { Class::Normal } else { Class::Custom(u32::from(percent) * 10_000) };
    Request::Set { pid: std::process::id(), class: Some(class), nice: None }
}

/// The part of the CPU that this process has, whatever its class, percent.
fn own_part(service: &Connection) -> Option<u8> {
    let all = service.processes().ok()?;
    let ours = all.iter().find(|p| p.pid == std::process::id() && p.device == CPU)?;
    u8::try_from(ours.share / 10_000).ok()
}

/// Asks for it, of a service that may have been restarted since it was spoken to last. None is kept that does not answer.
fn ask(service: &mut Option<Connection>, percent: u8) -> Result<(), Error> {
    if let Some(s) = service {
        match s.ask(&share(percent)) {
            Err(Error::Refused(r)) => return Err(Error::Refused(r)),
            Ok(_) => return Ok(()),
            Err(_) => *service = None,
        }
    }
    let again = Connection::open(NAME)?;
    let asked = again.ask(&share(percent)).map(drop);
    *service = matches!(asked, Ok(()) | Err(Error::Refused(_))).then_some(again);
    asked
}

impl Accelerated {
    /// Pursues a goal from now on: `tracker` is asked every half second (a panic, no answer and no number count as nothing
    /// said), `fidelity` is called with the level that the program should work at, from 0 (best) to `lowest`.
    ///
    /// When it is given up, the share is given back and there are as many lanes as before, if nobody else has set them meanwhile;
    /// at which fidelity it goes on is up to the program.
    ///
    /// # Errors
    /// [`std::io::Error`] when no thread can be started.
    pub fn pursue(
        &self,
        goal: Goal,
        tracker: impl FnMut() -> f64 + Send + 'static,
        lowest: u32,
        mut fidelity: impl FnMut(u32) + Send + 'static,
    ) -> std::io::Result<Pursuit> {
        let (stop, log) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let mut asked = Asked::new(tracker)?;
        let mut service = Connection::open(NAME).ok();
        let mut optimizer = Optimizer::new(goal, self.lanes().1, service.is_some(), lowest);
        let before = self.lanes().0;
        self.spread(1);
        let pursues = {
            let (task, stop, log) = (self.clone(), stop.clone(), log.clone());
            move || {
                let begun = Instant::now();
                let (mut has_share, mut lanes) = (false, 1);
                loop {
                    std::thread::sleep(PERIOD);
                    if stop.load(Ordering::Relaxed) {
                        // What was asked for is given back.
                        task.spread_back(lanes, before);
                        if has_share {
                            let _ = ask(&mut service, 0);
                        }
                        return;
                    }
                    if service.is_none() {
                        service = Connection::open(NAME).ok();
                        optimizer.served(service.is_some());
                    }
                    if let Some(s) = &service {
                        optimizer.has(own_part(s).unwrap_or(0));
                    }
                    let said = asked.ask();
                    if stop.load(Ordering::Relaxed) {
                        // Given up while the tracker was asked: nothing more is done, and the next round gives back.
                        continue;
                    }
                    let mut decision = optimizer.step(begun.elapsed(), said);
                    match decision.action {
                        Some(Action::Spread(n)) => {
                            task.spread(n);
                            lanes = n;
                        }
                        Some(Action::Share(percent)) => {
                            match ask(&mut service, percent) {
                                Ok(()) => has_share = true,
                                Err(e) => {
                                    if let Error::Refused(_) = e {
                                        optimizer.refused(percent);
                                    } else {
                                        // It may be back at the next look.
                                        optimizer.served(false);
                                    }
                                    decision.why.push_str(&format!("; it did not come: {e}"));
                                    decision.action = None;
                                }
                            }
                        }
                        Some(Action::Fidelity(level)) => {
                            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fidelity(level)));
                        }
                        None => {}
                    }
                    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                    if log.len() == MAX_LOG {
                        log.remove(0);
                    }
                    log.push(decision);
                }
            }
        };
        std::thread::Builder::new().name("forebay-goal".into()).spawn(pursues)?;
        Ok(Pursuit { stop, log })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(i: u64) -> Duration {
        PERIOD * (i as u32 + 1)
    }

    /// What is done while the tracker says what `measured` gives for the optimizer's state.
    fn run(o: &mut Optimizer, periods: u64, measured: impl Fn(usize, u8, u32) -> f64) -> Vec<Action> {
        (0..periods).filter_map(|i| o.step(at(i), Some(measured(o.lanes, o.share, o.fidelity))).action).collect()
    }

    #[test]
    fn goals_have_names_and_values_that_can_be() {
        assert_eq!(Goal::named("throughput", 1e12), Ok(Goal::Throughput(1e12)));
        assert_eq!(Goal::named("latency", 0.25), Ok(Goal::Latency(0.25)));
        assert_eq!(Goal::named("deadline", 1.5), Ok(Goal::Deadline(Duration::from_millis(1500))));
        assert_eq!(Goal::named("least", f64::NAN), Ok(Goal::Least));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(["throughput", "latency", "deadline"].iter().all(|g| Goal::named(g, bad).is_err()), "{bad}");
        }
        assert!(Goal::named("deadline", 1e300).unwrap_err().contains("is no deadline"));
        assert!(Goal::named("speed", 1.0).unwrap_err().contains("there are throughput"));
    }

    #[test]
    fn lanes_then_shares_then_fidelity_and_back_again() {
        let mut o = Optimizer::new(Goal::Throughput(100.0), 2, true, 2);
        // A lane gives 20, a tenth of the machine 5, a step of fidelity 10: it is never enough.
        let rate = |lanes: usize, share: u8, fidelity: u32| {
            20.0 * lanes as f64 + f64::from(share) / 2.0 + 10.0 * f64::from(fidelity)
        };
        let done = run(&mut o, 30, |l, s, f| rate(l, s, f).min(99.0));
        let mut wanted = vec![Action::Spread(2)];
        wanted.extend((1..=9).map(|n| Action::Share(n * 10)));
        wanted.extend([Action::Fidelity(1), Action::Fidelity(2)]);
        assert_eq!(done, wanted);
        assert!(o.step(at(40), Some(99.0)).why.contains("nothing is left"));
        let back = run(&mut o, 40, |_, _, _| 500.0);
        wanted.clear();
        wanted.extend([Action::Fidelity(1), Action::Fidelity(0)]);
        wanted.extend((0..9).rev().map(|n| Action::Share(n * 10)));
        wanted.push(Action::Spread(1));
        assert_eq!(back, wanted);
    }

    #[test]
    fn it_stops_where_the_goal_is_met_and_does_not_go_back_and_forth() {
        let mut o = Optimizer::new(Goal::Latency(0.010), 4, false, 3);
        // Two lanes are just enough.
        let done = run(&mut o, 50, |lanes, _, _| 0.019 / lanes as f64);
        assert_eq!(done, [Action::Spread(2)]);
    }

    #[test]
    fn a_step_back_that_was_one_too_many_is_tried_ever_less_often_and_at_once_when_there_is_room() {
        let mut o = Optimizer::new(Goal::Throughput(50.0), 1, false, 3);
        // Full fidelity is too slow, one less is far more than enough.
        let rate = |fidelity: u32| if fidelity == 0 { 40.0 } else { 75.0 };
        let missed = |o: &mut Optimizer, from: u64, to: u64| {
            (from..to).filter(|i| o.step(at(*i), Some(rate(o.fidelity))).measured < Some(50.0)).count()
        };
        let (first, second) = (missed(&mut o, 0, 60), missed(&mut o, 60, 600));
        // Each trial is missed for two periods. Without patience it was every other period.
        assert!(first <= 8 && second <= 20, "{first} of 60, {second} of 540");
        // The load has gone: fidelity is back at once.
        let back = run(&mut o, 3, |_, _, f| if f == 0 { 100.0 } else { 190.0 });
        assert_eq!(back, [Action::Fidelity(0)]);
    }

    #[test]
    fn the_least_is_found_and_found_again_when_it_has_moved() {
        for best in 1..=5usize {
            let mut o = Optimizer::new(Goal::Least, 5, true, 3);
            // A bowl around the best number of lanes, and a little noise.
            let bowl = |lanes: usize, best: usize, i: u64| {
                (1.0 + (lanes as f64 - best as f64).powi(2) / 10.0) * (1.0 + 0.002 * (i % 3) as f64)
            };
            let mut at_best = 0;
            for i in 0..200 {
                let d = o.step(at(i), Some(bowl(o.lanes, best, i)));
                assert!(matches!(d.action, None | Some(Action::Spread(_))), "{d:?}");
                at_best += usize::from(i >= 30 && o.lanes == best);
            }
            assert!(at_best > 130, "{at_best} of 170 with {best} lanes");
            let mut moved = 0;
            for i in 200..400 {
                o.step(at(i), Some(bowl(o.lanes, 6 - best, i)));
                moved += usize::from(i >= 300 && o.lanes == 6 - best);
            }
            assert!(moved > 70, "{moved} of 100 after it has moved to {}", 6 - best);
        }
        // Nothing to choose from, and figures that are none.
        let mut o = Optimizer::new(Goal::Least, 1, false, 0);
        assert!((0..100).all(|i| o.step(at(i), Some([1.0, f64::NAN, -1.0, 0.0][i as usize % 4])).action.is_none()));
    }

    #[test]
    fn no_share_is_asked_for_that_is_less_than_what_it_has() {
        let mut o = Optimizer::new(Goal::Throughput(100.0), 1, true, 0);
        o.has(43);
        let rate = |share: u8| if share == 0 { 43.0 } else { f64::from(share) };
        let up = run(&mut o, 8, |_, s, _| rate(s) * 1.5);
        // What it has changes with its class; what it had is what counts.
        o.has(90);
        assert_eq!(up, [Action::Share(50), Action::Share(60), Action::Share(70)]);
        let down = run(&mut o, 8, |_, s, _| rate(s) * 5.0);
        assert_eq!(down, [Action::Share(60), Action::Share(50), Action::Share(0)]);
        // The first that is asked for is refused: it is as it was.
        let mut o = Optimizer::new(Goal::Throughput(100.0), 1, true, 0);
        o.has(43);
        assert_eq!(o.step(at(0), Some(50.0)).action, Some(Action::Share(50)));
        o.refused(50);
        assert_eq!(o.share, 0);
        o.step(at(1), Some(50.0));
        assert_eq!(o.step(at(2), Some(50.0)).action, None);
    }

    #[test]
    fn a_share_that_is_refused_is_not_asked_for_again() {
        let mut o = Optimizer::new(Goal::Throughput(100.0), 1, true, 1);
        let mut asked = Vec::new();
        for i in 0..20 {
            match o.step(at(i), Some(50.0)).action {
                Some(Action::Share(30)) => {
                    asked.push(30);
                    o.refused(30);
                }
                Some(Action::Share(n)) => asked.push(n),
                Some(Action::Fidelity(1)) => asked.push(100),
                _ => {}
            }
        }
        assert_eq!(asked, [10, 20, 30, 100]);
        // By now others may have less. One that is had is not given up over it.
        let again = run(&mut o, 90, |_, s, _| if s < 50 { 50.0 } else { 110.0 });
        assert_eq!(again, [Action::Share(30), Action::Share(40), Action::Share(50)]);
        // Without a service there is nothing to ask.
        o.served(false);
        assert!(run(&mut o, 200, |_, _, _| 50.0).is_empty());
    }

    #[test]
    fn a_tracker_is_asked_once_at_a_time_and_heard_when_it_answers() {
        let (tells, told) = std::sync::mpsc::channel();
        let mut n = 0.0;
        let mut asked = Asked::new(move || {
            n += 1.0;
            assert!(n < 4.0);
            told.recv().map_or(f64::NAN, |()| n)
        })
        .unwrap();
        // However late this thread gets its turn.
        let heard = |asked: &mut Asked| (0..100).find_map(|_| asked.ask());
        tells.send(()).unwrap();
        assert_eq!(heard(&mut asked), Some(1.0));
        // It takes longer than a look waits, and is not asked again meanwhile.
        assert_eq!([asked.ask(), asked.ask()], [None, None]);
        tells.send(()).unwrap();
        assert_eq!(heard(&mut asked), Some(2.0));
        tells.send(()).unwrap();
        assert_eq!(heard(&mut asked), Some(3.0));
        // It panics: that is no answer, and it may be asked again.
        assert!((0..100).any(|_| asked.ask().is_none() && !asked.open));
    }

    #[test]
    fn deadlines_count_what_is_done() {
        let mut o = Optimizer::new(Goal::Deadline(Duration::from_secs(10)), 3, false, 0);
        // A fifth after a tenth of the time: enough, and too much.
        assert_eq!(o.step(Duration::from_secs(1), Some(0.2)).action, None);
        assert_eq!(o.step(Duration::from_secs(5), Some(0.4)).action, Some(Action::Spread(2)));
        // What is done is done, however long ago.
        for s in 8..60 {
            let d = o.step(Duration::from_secs(s), Some(1.0));
            assert!(d.action.is_none() && d.why.contains("done"), "{d:?}");
        }
    }

    #[test]
    fn what_is_no_figure_changes_nothing_and_is_told() {
        let mut o = Optimizer::new(Goal::Throughput(1.0), 3, true, 3);
        for said in [None, Some(f64::NAN), Some(f64::INFINITY), Some(-1.0)] {
            let d = o.step(at(0), said);
            assert!(d.action.is_none() && d.why.contains("the tracker says"), "{d:?}");
        }
        let mut l = Optimizer::new(Goal::Latency(1.0), 3, true, 3);
        assert!(l.step(at(0), Some(0.0)).why.contains("no figure"));
    }
}
