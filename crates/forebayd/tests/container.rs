//! Time division where the log of the GPU has other numbers for processes, on the fake of the driver.

use std::sync::Arc;

use forebay_policy::share::Class;
use forebay_rm::Client;
use forebay_rm::fake::{FakeRm, Load};
use forebayd::accounts::LogMeter;
use forebayd::agent::{Agent, Hardware, Meter, PERIOD_NS};
use forebayd::numbers::Numbers;

const APART: u32 = 30_000;

type Shared = std::rc::Rc<std::cell::RefCell<Numbers>>;

/// A meter that the test can look into.
struct Seen(Shared);

impl Meter for Seen {
    fn passed(&mut self, pid: u32, on: bool, ns: u64) {
        self.0.borrow_mut().passed(pid, on, ns);
    }
    fn refresh(&mut self, to_the_moment: bool) {
        self.0.borrow_mut().refresh(to_the_moment);
    }
    fn used_ns(&mut self, pid: u32) -> Option<u64> {
        self.0.borrow_mut().used_ns(pid)
    }
    fn switches(&self, pid: u32) -> Option<u64> {
        self.0.borrow().switches(pid)
    }
    fn longest_away_ns(&mut self, pid: u32) -> Option<u64> {
        self.0.borrow_mut().longest_away_ns(pid)
    }
    fn longest_stay_ns(&self, pid: u32) -> Option<u64> {
        self.0.borrow().longest_stay_ns(pid)
    }
    fn contexts(&self, pid: u32) -> usize {
        self.0.borrow().contexts(pid)
    }
    fn forget(&mut self, pid: u32) {
        self.0.borrow_mut().forget(pid);
    }
}

struct Container {
    rm: FakeRm,
    agent: Agent<Seen>,
    numbers: Shared,
}

impl Container {
    fn new() -> Self {
        let rm = FakeRm::default();
        rm.number_apart(APART);
        let own = Arc::new(Client::open(Arc::new(rm.clone()), 0).unwrap());
        let numbers = Shared::new(Numbers::new(LogMeter::open(own.clone()).unwrap()).into());
        let agent = Agent::by(Box::new(Hardware::new(own, None)), Seen(numbers.clone()), PERIOD_NS);
        Container { rm, agent, numbers }
    }

    fn start(&mut self, pid: u32, load: Load, class: Class) {
        self.rm.start(pid, 2, 3, load);
        self.agent.adopt(pid, class, 0).unwrap();
    }

    fn pass(&mut self, ms: u64) {
        let mut left = ms * 1000;
        while left > 0 {
            let length = (self.agent.begin().map_or(25_000_000, |w| w.length_ns) / 1000).min(left).max(1);
            self.rm.run(length);
            self.agent.end(length * 1000);
            left -= length;
        }
    }

    fn knows(&self, pid: u32) -> Option<u32> {
        let number = self.numbers.borrow().number_of(pid);
        assert!(number.is_none_or(|n| n == pid + APART), "{pid} is taken for {number:?}");
        number
    }

    /// Parts of the GPU that these have in so long, in percent.
    fn parts(&mut self, pids: &[u32], ms: u64) -> Vec<f64> {
        let had = |c: &Self| -> Vec<u64> { pids.iter().map(|p| c.rm.gpu_time(*p).unwrap()).collect() };
        let before = had(self);
        self.pass(ms);
        had(self).iter().zip(before).map(|(now, before)| (now - before) as f64 / ms as f64 / 10.0).collect()
    }
}

#[test]
fn busy_processes_are_told_apart_within_a_second_and_have_their_shares() {
    let mut c = Container::new();
    for (pid, us, share) in [(10, 100, 40), (20, 1000, 30), (30, 5000, 20), (40, 20_000, 10)] {
        c.start(pid, Load::saturating(us), Class::Custom(share * 10_000));
    }
    c.pass(1000);
    let pids = [10, 20, 30, 40];
    assert!(pids.iter().all(|pid| c.knows(*pid).is_some()), "{:?}", pids.map(|p| c.knows(p)));
    let parts = c.parts(&pids, 4000);
    for (part, due) in parts.iter().zip([40.0, 30.0, 20.0, 10.0]) {
        assert!((part - due).abs() < 2.0, "{parts:?}");
    }
    // What is charged is what each has had.
    for pid in pids {
        let (said, truth) = (c.numbers.borrow_mut().used_ns(pid).unwrap(), c.rm.gpu_time(pid).unwrap() * 1000);
        assert!(said.abs_diff(truth) < truth / 4, "{pid}: {said} of {truth}");
    }
}

#[test]
fn an_interactive_process_beside_one_that_takes_everything_is_known_and_then_comes_first_again() {
    let mut c = Container::new();
    c.start(10, Load { kernel_us: 100, depth: 1, think_us: 5000 }, Class::Interactive);
    c.start(20, Load::saturating(20_000), Class::Background);
    c.pass(2000);
    assert!(
        c.knows(10).is_some() && c.knows(20).is_some(),
        "{:?} {:?}: {:?}",
        c.knows(10),
        c.knows(20),
        c.numbers.borrow()
    );
    c.rm.latencies(10);
    let parts = c.parts(&[20], 4000);
    assert!(parts[0] > 90.0, "nobody is kept off any more: {parts:?}");
    let mut took = c.rm.latencies(10);
    took.sort_unstable();
    assert!(took[took.len() * 99 / 100] < 600, "{took:?}");
}

#[test]
fn one_that_is_busy_now_and_then_is_known_beside_one_that_always_is() {
    let mut c = Container::new();
    c.start(10, Load { kernel_us: 300, depth: 1, think_us: 9000 }, Class::Normal);
    c.start(20, Load::saturating(20_000), Class::Normal);
    c.pass(5000);
    assert!(c.knows(10).is_some() && c.knows(20).is_some(), "{:?}", c.numbers.borrow());
    let parts = c.parts(&[10, 20], 4000);
    assert!(parts[0] > 2.0 && parts[1] > 85.0, "{parts:?}");
}

#[test]
fn who_is_outside_the_container_is_taken_for_nobody() {
    let mut c = Container::new();
    // Not among those that can be seen here.
    c.rm.start(77, 1, 1, Load { kernel_us: 500, depth: 1, think_us: 3000 });
    c.start(10, Load::saturating(1000), Class::Normal);
    c.start(20, Load::saturating(1000), Class::Normal);
    c.pass(3000);
    assert!(c.knows(10).is_some() && c.knows(20).is_some());
    // One that does nothing is the only one that the one outside could be, and is told from it once it works.
    c.start(30, Load::IDLE, Class::Normal);
    c.pass(10_000);
    let wrong = c.numbers.borrow().number_of(30);
    c.rm.set_load(30, Load::saturating(3000));
    c.pass(5000);
    assert!(c.knows(30).is_some(), "{wrong:?} before");
    let parts = c.parts(&[10, 20, 30], 6000);
    assert!(parts.iter().all(|p| (p - parts[0]).abs() < 3.0), "{parts:?}");
}

#[test]
fn a_number_that_was_somebody_elses_is_given_up_and_those_that_go_are_forgotten() {
    let mut c = Container::new();
    // Alone, with nothing to do, beside somebody outside: it is taken for that one, and cannot be told from it.
    c.rm.start(77, 1, 1, Load { kernel_us: 500, depth: 1, think_us: 3000 });
    c.start(10, Load::IDLE, Class::Normal);
    c.pass(2000);
    c.rm.set_load(10, Load::saturating(1000));
    c.start(20, Load::saturating(1000), Class::Normal);
    c.pass(6000);
    assert!(c.knows(10).is_some() && c.knows(20).is_some());
    c.rm.kill(20);
    c.agent.forget(20);
    c.start(21, Load::saturating(1000), Class::Normal);
    c.pass(2000);
    assert!(c.knows(21).is_some() && c.knows(20).is_none());
}
