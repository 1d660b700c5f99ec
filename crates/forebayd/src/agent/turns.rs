//! Long turns in windows' place, for programs that fill them.
//!
//! A window costs the driver's calls, the hardware's own turns cost none. Where everybody with work fills its turns, slices in
//! proportion to the shares divide the GPU as windows do, and it only has to be looked at now and then.
//!
//! Rules:
//! 1. Turns are tried when there has been nothing but windows of busy owners for a while: nobody came, went, changed its class,
//!    had a little work or none, and nobody wants to be let through at once. Whoever has a share was seen to fill the driver's
//!    turns ([`fills`]), and the policy has lengths for all ([`forebay_policy::share::Divider::turns`]).
//! 2. In turns everybody with a share is on the GPU, with slices of those lengths, and so is who has no work. Who is suspended
//!    or has no share is off.
//! 3. At each look everybody is charged as in windows, and slices are changed where what went otherwise is to be made up for.
//! 4. When anything is not as rule 1 has it, or somebody is behind, windows come again, with everybody's slices as they were;
//!    they make up for it, too. Who comes or gets another class does not wait for the next look ([`Agent::is_to_be_ended`]).
//! 5. Who was behind, used little, or came more often than there are rounds (since it gives its turns up) has to be seen anew to
//!    fill the driver's turns. After that the while is twice as long, up to a minute; after turns that lasted as long as the
//!    while it is as at first.

use std::collections::BTreeMap;

use forebay_policy::share::{Class, Window};

use super::hardware::slice_of_turn;
use super::{Agent, Meter};

/// So long nothing else happens before turns are tried, at first and at most.
const WHILE_NS: [u64; 2] = [2_000_000_000, 64_000_000_000];
/// Until so many looks, rounds are halved so often, and are looked at after so long or after two of them: at first everybody is to
/// be brought to the middle of its swing, and who fills no turns is not to lose much by that.
const FIRST: [(u32, u32, u64); 2] = [(4, 2, 50_000_000), (8, 1, LOOK_NS)];
/// Then they are whole, and looked at so often.
const LOOK_NS: u64 = 100_000_000;
/// Who stays on the GPU for so long beside others fills the driver's turns of 2 ms.
const FULL_NS: u64 = 1_500_000;
/// Who has used less than this part (one in so many) of its share at a look has no work, or fills no turn at all.
const LITTLE: u64 = 10;

/// Whose the time is in which there are turns.
const EVERYBODY: u64 = u64::MAX;

/// Whether that is turns' time.
pub(super) fn is_of_all(window: Option<Window>) -> bool {
    window.is_some_and(|w| w.owner == EVERYBODY)
}

/// Whether somebody with such a stay beside others fills the driver's turns.
pub(super) fn fills(longest_stay_ns: Option<u64>) -> bool {
    longest_stay_ns.is_some_and(|ns| ns >= FULL_NS)
}

/// Whether there are turns.
pub(super) struct Turns {
    are: bool,
    /// How long nothing has happened, and how long that has to be before turns are tried.
    calm_ns: u64,
    while_ns: u64,
    /// How long they have lasted, and how many looks.
    lasted_ns: u64,
    looks: u32,
    /// Length of a round of them.
    round_ns: u64,
}

impl Default for Turns {
    fn default() -> Self {
        Turns { are: false, calm_ns: 0, while_ns: WHILE_NS[0], lasted_ns: 0, looks: 0, round_ns: 0 }
    }
}

impl Turns {
    /// Whether there are turns now.
    pub(super) fn are(&self) -> bool {
        self.are
    }

    /// Something has happened (rule 4).
    pub(super) fn disturb(&mut self) {
        if self.are && self.lasted_ns >= self.while_ns {
            self.while_ns = WHILE_NS[0];
        }
        (self.are, self.calm_ns, self.lasted_ns, self.looks) = (false, 0, 0, 0);
    }

    /// Somebody was behind, or slices were refused (rule 5).
    fn fail(&mut self) {
        self.disturb();
        self.while_ns = (2 * self.while_ns).min(WHILE_NS[1]);
    }

    /// How often rounds are halved now, and after how long they are looked at.
    fn look(&self) -> (u32, u64) {
        let now = FIRST.iter().find(|(until, ..)| self.looks < *until);
        now.map_or((0, LOOK_NS), |(_, halved, ns)| (*halved, *ns))
    }

    /// A window has passed in which nothing happened.
    pub(super) fn calm(&mut self, ns: u64) {
        self.calm_ns = self.calm_ns.saturating_add(ns);
    }
}

impl<M: Meter> Agent<M> {
    /// Begins or goes on with turns, if it is time for them; the time until they are looked at.
    pub(super) fn take_turns(&mut self) -> Option<Window> {
        if !self.turns.are && self.turns.calm_ns < self.turns.while_ns {
            return None;
        }
        let (halved, look_ns) = self.turns.look();
        let all_fill = || {
            let share = |pid: &u32| self.divider.share(u64::from(*pid)) > 0;
            self.processes.iter().all(|(pid, p)| p.class != Class::Interactive && (p.fills || !share(pid)))
        };
        let Some(round) = self.divider.round_of_turns_ns(halved).filter(|_| all_fill()) else {
            if self.turns.are {
                self.turns.disturb();
            }
            return None;
        };
        let look_ns = look_ns.max(2 * round);
        let turns = self.divider.turns(round, look_ns);
        let lengths: BTreeMap<u32, u64> = turns.map(|w| (w.owner as u32, slice_of_turn(w.length_ns))).collect();
        let idle: Vec<u32> = self.divider.members().filter(|(m, _)| !m.active).map(|(m, _)| m.id as u32).collect();
        let (mut gone, mut set) = (Vec::new(), true);
        for (&pid, p) in self.processes.iter_mut() {
            let length = lengths.get(&pid).copied();
            let on = p.class != Class::Suspended && (length.is_some() || idle.contains(&pid));
            if on {
                set &= p.grip.slice(length);
            }
            if p.let_on(on).is_err() {
                gone.push(pid);
            }
        }
        if !set || !gone.is_empty() {
            gone.into_iter().for_each(|pid| self.lose(pid));
            if !set {
                self.turns.fail();
            }
            return None;
        }
        (self.turns.are, self.turns.round_ns) = (true, round);
        Some(Window { owner: EVERYBODY, length_ns: look_ns })
    }

    /// A look at the turns of so much time (rules 3 and 4).
    pub(super) fn look_at_turns(&mut self, passed_ns: u64) {
        let (mut gone, mut calm) = (Vec::new(), true);
        for (&pid, p) in self.processes.iter_mut() {
            let Some(now) = self.meter.used_ns(pid) else {
                gone.push(pid);
                continue;
            };
            let share = self.divider.share(pid.into());
            let (used, came) = (p.use_until(now, passed_ns), p.came_since(&self.meter, pid));
            // A log that is not there is as if nobody had done anything.
            calm &= self.meter.longest_stay_ns(pid).is_some() && self.meter.contexts(pid) <= p.contexts;
            if share == 0 {
                calm &= used == 0;
                continue;
            }
            self.divider.charge(pid.into(), used);
            // Who gives its turns up comes back in each of others' short ones, and changes cost.
            let rounds = passed_ns / self.turns.round_ns.max(1);
            p.fills &= came.is_none_or(|n| n <= 2 * rounds + 2);
            let due = u128::from(passed_ns) * u128::from(share) / u128::from(forebay_policy::share::WHOLE);
            // Within two rounds everybody has had a whole turn.
            if passed_ns >= 2 * self.turns.round_ns && u128::from(used * LITTLE) < due {
                calm = false;
                p.fills &= used == 0;
            }
        }
        for id in self.divider.behind(self.turns.round_ns) {
            self.processes.entry(id as u32).and_modify(|p| p.fills = false);
        }
        let fill = self.processes.iter().all(|(pid, p)| p.fills || self.divider.share(u64::from(*pid)) == 0);
        calm &= gone.is_empty();
        gone.into_iter().for_each(|pid| self.lose(pid));
        self.turns.looks = self.turns.looks.saturating_add(1);
        self.turns.lasted_ns = self.turns.lasted_ns.saturating_add(passed_ns);
        if !self.turns.are {
            // Something has ended them meanwhile.
        } else if !fill {
            self.turns.fail();
        } else if !calm {
            self.turns.disturb();
        }
    }
}
