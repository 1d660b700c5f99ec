//! Classes, the shares that follow from them, and time division among processes that would each fill a device.
//!
//! Rules:
//! 1. `Custom` is an absolute share; all of them together are at most the whole ([`admit`]). `Normal` members divide the
//!    rest by the weights that the operating system gives their nice values. `Background` gets what nobody else uses.
//!    `Interactive` members are not divided among: they come through between and inside windows.
//! 2. Shares are of what active members use. An idle member's share flows on: from custom to normal members, from both to
//!    custom ones when there is no normal one, and to background ones when nobody else is active.
//! 3. Time is given in windows. Each active member earns its share of every window's length; what a member is charged
//!    is taken off. In a round of usual windows (a member's is as long as its share of the round) what it has left swings by
//!    what others use in a round. It is to swing around nothing: the next window goes to whoever will soonest have half of
//!    that left, and lasts until it owes the other half, but from half to one and a half times the usual. So the order stays
//!    as it is, what came between is made up for in one window, and over any stretch of time nobody is ahead or behind by more
//!    than its swing, save for what comes between, and never by more than [`Divider::bound_ns`]. All of them together have
//!    nothing left and owe nothing.
//! 4. A member that becomes idle forgets what it has left or owes beyond the bound; nothing is saved up by sleeping.
//! 5. Where all members with a share fill the turns that the device gives them by itself, turns of lengths in proportion to
//!    the shares divide it as well ([`Divider::turns`]). A round of these is two thirds as long as one of windows, and shorter
//!    at first, as nobody is asked who is next: between the two orders somebody may come last and then first. What went
//!    otherwise is made up for by lengths. Who is further behind than any order explains ([`Divider::behind`]) fills none.
//! 6. All numbers are integers; shares are millionths.

use std::collections::BTreeMap;

/// The whole of a device.
pub const WHOLE: u64 = 1_000_000;
/// Shortest window: a change of owner costs about a millisecond of suspending and resuming.
pub const MIN_WINDOW_NS: u64 = 5_000_000;
/// Windows are at least so long on the average: with many members a round takes longer. With fifty a second
/// they cost a sixteenth of a core: a change of owner takes the driver's calls 1.2 ms.
pub const MEAN_WINDOW_NS: u64 = 20_000_000;
/// A window or turn is at least and at most so much of the usual one, in halves: what went otherwise is made up for within that.
const HALVES: [i128; 2] = [1, 3];
/// Shortest and longest turn: a change takes some 0.15 ms, and nobody should keep the others waiting for longer.
pub const TURN_NS: [u64; 2] = [1_000_000, 99_000_000];
/// So far beyond what the order of turns explains nobody is behind who fills them: a look that came late, what changes cost.
const BEHIND_NS: u64 = 5_000_000;
/// Most members of a device.
pub const MAX_MEMBERS: usize = 1024;

/// How a process is to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A little, at once.
    Interactive,
    /// This part of the device, in millionths, whatever others do.
    Custom(u32),
    /// An equal part of the rest, weighted by nice.
    Normal,
    /// What is left over.
    Background,
    /// Nothing.
    Suspended,
}

/// A process on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number.
    pub id: u64,
    /// Its class.
    pub class: Class,
    /// Its nice value, -20 to 19; others are clamped.
    pub nice: i32,
    /// Whether it has work.
    pub active: bool,
}

/// Weights of nice values from -20 to 19: a step is a factor of 1.25 around 1024 for 0 (Linux, kernel/sched/core.c).
const WEIGHTS: [u64; 40] = [
    88761, 71755, 56483, 46273, 36291, 29154, 23254, 18705, 14949, 11916, 9548, 7620, 6100, 4904, 3906, 3121, 2501,
    1991, 1586, 1277, 1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15,
];

fn weight(nice: i32) -> u64 {
    WEIGHTS[(nice.clamp(-20, 19) + 20) as usize]
}

/// Why a member is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The custom shares would be more than the whole: asked for, and still free, in millionths.
    Overbooked {
        /// What was asked for.
        wanted: u64,
        /// What is free.
        free: u64,
    },
    /// The device has [`MAX_MEMBERS`].
    TooMany,
}

/// Whether `new` may join (or change to its class, if its id is there already).
///
/// # Errors
/// [`Refusal`].
pub fn admit(members: &[Member], new: &Member) -> Result<(), Refusal> {
    let others = || members.iter().filter(|m| m.id != new.id);
    if others().count() >= MAX_MEMBERS {
        return Err(Refusal::TooMany);
    }
    if let Class::Custom(wanted) = new.class {
        let booked: u64 = others().map(|m| if let Class::Custom(s) = m.class { u64::from(s) } else { 0 }).sum();
        let free = WHOLE.saturating_sub(booked);
        if u64::from(wanted) > free {
            return Err(Refusal::Overbooked { wanted: wanted.into(), free });
        }
    }
    Ok(())
}

/// Splits `whole` by weights; the parts add up to it exactly. Nothing, without weight.
fn split(whole: u64, weights: &[u64]) -> Vec<u64> {
    let total: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    let (mut given, mut seen) = (0u64, 0u128);
    let part = |w: &u64| {
        seen += u128::from(*w);
        let until = (u128::from(whole) * seen).checked_div(total).unwrap_or(0) as u64;
        let part = until - given;
        given = until;
        part
    };
    weights.iter().map(part).collect()
}

/// The share of each member now, in millionths (rules 1 and 2), in their order. Interactive, suspended and idle members
/// have none.
pub fn shares(members: &[Member]) -> Vec<u64> {
    let of =
        |f: &dyn Fn(&Member) -> u64| -> Vec<u64> { members.iter().map(|m| if m.active { f(m) } else { 0 }).collect() };
    let custom = of(&|m| if let Class::Custom(s) = m.class { u64::from(s) } else { 0 });
    let normal = of(&|m| if m.class == Class::Normal { weight(m.nice) } else { 0 });
    let booked: u64 = custom.iter().sum();
    if normal.iter().any(|w| *w > 0) {
        let rest = split(WHOLE.saturating_sub(booked), &normal);
        return custom.iter().zip(rest).map(|(c, r)| c + r).collect();
    }
    if booked > 0 {
        return split(WHOLE, &custom);
    }
    split(WHOLE, &of(&|m| if m.class == Class::Background { weight(m.nice) } else { 0 }))
}

/// A member's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Whose.
    pub owner: u64,
    /// For how long at most, ns.
    pub length_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    member: Member,
    share: u64,
    /// What it has left, ns times [`WHOLE`]; negative when it has had too much.
    left: i128,
}

/// Millionths of a time.
fn part_of(ns: u64, share: u64) -> u64 {
    (u128::from(ns) * u128::from(share) / u128::from(WHOLE)) as u64
}

impl Entry {
    /// Its window in a round of this length, ns.
    fn usual_ns(&self, round_ns: u64) -> u64 {
        part_of(round_ns, self.share).max(MIN_WINDOW_NS)
    }

    /// What it has left more before a turn in such a round than after it.
    fn swing_of_turns(&self, round_ns: u64) -> i128 {
        i128::from(part_of(round_ns, self.share)) * i128::from(WHOLE - self.share)
    }

    /// Half of what it has left more before such a window than after it.
    fn half_swing(&self, round_ns: u64) -> i128 {
        i128::from(self.usual_ns(round_ns)) * i128::from(WHOLE - self.share) / 2
    }
}

/// Divides a device's time among members.
#[derive(Clone, Debug)]
pub struct Divider {
    period_ns: u64,
    entries: BTreeMap<u64, Entry>,
}

impl Divider {
    /// A divider that gives everybody about one window a period, or as long as a round takes with many members.
    pub fn new(period_ns: u64) -> Self {
        Divider { period_ns: period_ns.max(MIN_WINDOW_NS), entries: BTreeMap::new() }
    }

    /// A window of everybody with a share.
    fn round_ns(&self) -> u64 {
        let able = self.entries.values().filter(|e| e.share > 0).count();
        self.period_ns.max(MEAN_WINDOW_NS * able as u64)
    }

    /// How long a round of turns is, halved so many times where nobody's become too short by that, ns; none where they are too
    /// long for somebody, or there are fewer than two.
    pub fn round_of_turns_ns(&self, halved: u32) -> Option<u64> {
        let able = || self.entries.values().filter(|e| e.share > 0).map(|e| e.share);
        let (least, most) = (able().min()?, able().max()?);
        let [shortest, longest] = TURN_NS;
        let round = (self.round_ns() * 2 / 3).checked_shr(halved).unwrap_or(0);
        let round = round.max(shortest.saturating_mul(WHOLE).div_ceil(least));
        (able().nth(1).is_some() && part_of(round, most) <= longest).then_some(round)
    }

    /// How long the turns of everybody with a share are to be, in rounds of this length, so that all have theirs after
    /// `until_ns` if all fill them (rule 5); in the order of their ids.
    pub fn turns(&self, round_ns: u64, until_ns: u64) -> impl Iterator<Item = Window> {
        let [shortest, longest] = TURN_NS.map(i128::from);
        let turn = move |e: &Entry| {
            let usual = i128::from(part_of(round_ns, e.share));
            // Half of a turn's swing it may be on either side.
            let beyond = (e.left.abs() - e.swing_of_turns(round_ns) / 2).max(0) / i128::from(WHOLE);
            let more = e.left.signum() * beyond * i128::from(round_ns) / i128::from(until_ns.max(1));
            let [least, most] = HALVES.map(|halves| usual * halves / 2);
            let length = (usual + more).clamp(least, most).clamp(shortest, longest);
            Window { owner: e.member.id, length_ns: length as u64 }
        };
        self.entries.values().filter(|e| e.share > 0).map(turn)
    }

    /// Who has been given less than rounds of turns of this length explain, and so fills none (rule 5).
    pub fn behind(&self, round_ns: u64) -> impl Iterator<Item = u64> {
        let (windows, much) = (self.round_ns(), i128::from(BEHIND_NS) * i128::from(WHOLE));
        let is = move |e: &&Entry| e.left > e.half_swing(windows) + e.swing_of_turns(round_ns) + much;
        self.entries.values().filter(|e| e.share > 0).filter(is).map(|e| e.member.id)
    }

    /// Nobody with work all the time is ever further from its share than this, ns: a round of all members, and a shortest
    /// window for each (with many small ones a round takes longer).
    pub fn bound_ns(&self) -> u64 {
        let members = self.entries.len() as u64;
        self.period_ns.max(MEAN_WINDOW_NS * members) + MIN_WINDOW_NS * (1 + members)
    }

    fn reshare(&mut self) {
        let members: Vec<Member> = self.entries.values().map(|e| e.member).collect();
        for (e, share) in self.entries.values_mut().zip(shares(&members)) {
            e.share = share;
        }
        self.level();
    }

    /// What came and went had something left or owed something: all with a share have had or lacked their part of that. Else
    /// they would have shorter or longer windows than the usual ones from then on.
    fn level(&mut self) {
        let able = || self.entries.values().filter(|e| e.share > 0);
        let (all, shares) = able().fold((0, 0), |(all, shares), e| (all + e.left, shares + i128::from(e.share)));
        if shares > 0 {
            let able = self.entries.values_mut().filter(|e| e.share > 0);
            able.for_each(|e| e.left -= all * i128::from(e.share) / shares);
        }
    }

    /// Adds a member or changes it. Whether one that is there has work stays as it was found: a change of class is no work,
    /// and would be paid with a window that nobody uses.
    ///
    /// # Errors
    /// As [`admit`]; nothing is changed then.
    pub fn set(&mut self, member: Member) -> Result<(), Refusal> {
        let members: Vec<Member> = self.entries.values().map(|e| e.member).collect();
        admit(&members, &member)?;
        let fresh = Entry { member, share: 0, left: 0 };
        let kept = |e: &mut Entry| e.member = Member { active: e.member.active, ..member };
        self.entries.entry(member.id).and_modify(kept).or_insert(fresh);
        self.reshare();
        Ok(())
    }

    /// Forgets a member.
    pub fn remove(&mut self, id: u64) {
        self.entries.remove(&id);
        self.reshare();
    }

    /// Says whether a member has work (rules 2 and 4); whether that is new.
    pub fn set_active(&mut self, id: u64, active: bool) -> bool {
        let bound = i128::from(self.bound_ns()) * i128::from(WHOLE);
        if let Some(e) = self.entries.get_mut(&id)
            && e.member.active != active
        {
            e.member.active = active;
            e.left = e.left.clamp(-bound, 0);
            self.reshare();
            return true;
        }
        false
    }

    /// A member's share now; nothing of whoever is none.
    pub fn share(&self, id: u64) -> u64 {
        self.entries.get(&id).map_or(0, |e| e.share)
    }

    /// The members, with the share of each now.
    pub fn members(&self) -> impl Iterator<Item = (Member, u64)> {
        self.entries.values().map(|e| (e.member, e.share))
    }

    /// Who is next, and for how long at most; none when nobody who may run has work (rule 3).
    pub fn next(&self) -> Option<Window> {
        let (round, whole) = (self.round_ns(), i128::from(WHOLE));
        let able = self.entries.values().filter(|e| e.share > 0);
        let due = |e: &Entry| (e.half_swing(round) - e.left).div_euclid(i128::from(e.share));
        let e = able.min_by_key(|e| (due(e), e.member.id))?;
        let usual = i128::from(e.usual_ns(round));
        let others = whole - i128::from(e.share);
        let length = if others == 0 { usual } else { (e.left + e.half_swing(round)) / others };
        let [least, most] = HALVES.map(|halves| usual * halves / 2);
        let length = length.clamp(least, most) as u64;
        Some(Window { owner: e.member.id, length_ns: length.max(MIN_WINDOW_NS) })
    }

    /// `used_ns` of the device have passed, all of them used by `owner` (rule 3). What one without a share has used it owes,
    /// but it is due to nobody: by parts of it the others would come apart. What somebody uses in others' windows it owes as
    /// well, but no more than the bound.
    pub fn charge(&mut self, owner: u64, used_ns: u64) {
        let most = -i128::from(self.bound_ns()) * i128::from(WHOLE);
        if let Some(e) = self.entries.get_mut(&owner).filter(|e| e.share == 0) {
            e.left = e.left.saturating_sub(i128::from(used_ns) * i128::from(WHOLE)).max(most);
            return;
        }
        let mut beyond = false;
        for e in self.entries.values_mut() {
            e.left += i128::from(used_ns) * i128::from(e.share);
            if e.member.id == owner {
                e.left -= i128::from(used_ns) * i128::from(WHOLE);
                beyond = e.left < most;
                e.left = e.left.max(most);
            }
        }
        if beyond {
            self.level();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(id: u64, class: Class) -> Member {
        Member { id, class, nice: 0, active: true }
    }

    fn run(d: &mut Divider, total_ns: u64) -> BTreeMap<u64, u64> {
        let (mut got, mut t) = (BTreeMap::new(), 0);
        while t < total_ns {
            let Some(w) = d.next() else { break };
            d.charge(w.owner, w.length_ns);
            *got.entry(w.owner).or_default() += w.length_ns;
            t += w.length_ns;
        }
        got
    }

    #[test]
    fn shares_follow_classes_and_flow_on() {
        let m = |id, class, active| Member { active, ..member(id, class) };
        let (c, n, b) = (Class::Custom(400_000), Class::Normal, Class::Background);
        assert_eq!(
            shares(&[m(1, c, true), m(2, n, true), m(3, n, true), m(4, b, true)]),
            [400_000, 300_000, 300_000, 0]
        );
        // The custom member rests: the normal ones have it all.
        assert_eq!(shares(&[m(1, c, false), m(2, n, true), m(3, n, true)]), [0, 500_000, 500_000]);
        // No normal one: the custom ones have it in proportion.
        assert_eq!(shares(&[m(1, c, true), m(2, Class::Custom(100_000), true), m(3, b, true)]), [800_000, 200_000, 0]);
        assert_eq!(shares(&[m(1, c, false), m(2, n, false), m(3, b, true)]), [0, 0, WHOLE]);
        assert_eq!(shares(&[m(1, Class::Interactive, true), m(2, Class::Suspended, true)]), [0, 0]);
        // A nice level is a factor of 1.25, as for the processor.
        let s = shares(&[Member { nice: 1, ..member(1, n) }, member(2, n)]);
        assert!((s[1] * 100 / s[0]).abs_diff(125) <= 1, "{s:?}");
    }

    #[test]
    fn custom_shares_are_admitted_up_to_the_whole() {
        let mut d = Divider::new(100_000_000);
        d.set(member(1, Class::Custom(700_000))).unwrap();
        let refused = Refusal::Overbooked { wanted: 300_001, free: 300_000 };
        assert_eq!(d.set(member(2, Class::Custom(300_001))), Err(refused));
        d.set(member(2, Class::Custom(300_000))).unwrap();
        // A change is checked against the others only.
        d.set(member(1, Class::Custom(600_000))).unwrap();
        assert!(d.set(member(1, Class::Custom(700_001))).is_err());
        assert_eq!(d.members().next().unwrap().0.class, Class::Custom(600_000));
        (10..MAX_MEMBERS as u64 + 8).for_each(|id| d.set(member(id, Class::Normal)).unwrap());
        assert_eq!(d.set(member(5, Class::Normal)), Err(Refusal::TooMany));
    }

    #[test]
    fn who_has_nothing_to_do_gets_no_window_by_changing_its_class() {
        let mut d = Divider::new(100_000_000);
        d.set(member(1, Class::Normal)).unwrap();
        d.set(member(2, Class::Normal)).unwrap();
        d.set_active(1, false);
        for i in 0..100 {
            d.set(Member { nice: i % 2, ..member(1, Class::Normal) }).unwrap();
            let w = d.next().unwrap();
            assert_eq!(w.owner, 2, "at change {i}");
            d.charge(w.owner, w.length_ns);
        }
        // What has work keeps its windows.
        d.set_active(1, true);
        d.set(member(1, Class::Custom(500_000))).unwrap();
        assert!(run(&mut d, 1_000_000_000)[&1] >= 400_000_000);
    }

    #[test]
    fn what_one_without_a_share_uses_changes_nothing_between_others() {
        let mut d = Divider::new(100_000_000);
        d.set(member(1, Class::Custom(150_000))).unwrap();
        d.set(member(2, Class::Normal)).unwrap();
        d.set(Member { active: false, ..member(3, Class::Normal) }).unwrap();
        let mut got = BTreeMap::<u64, u64>::new();
        for _ in 0..2000 {
            let w = d.next().unwrap();
            let light = w.length_ns / 30;
            d.charge(w.owner, w.length_ns - light);
            d.charge(3, light);
            *got.entry(w.owner).or_default() += w.length_ns - light;
        }
        let part = got[&1] as f64 / (got[&1] + got[&2]) as f64;
        assert!((part - 0.15).abs() < 0.001, "{part}");
        // It owes no more than anybody may when it comes back.
        d.set_active(3, true);
        let got = run(&mut d, 4_000_000_000);
        assert!(got[&3] > 1_500_000_000, "{got:?}");
    }

    #[test]
    fn one_that_sleeps_saves_nothing_up_and_comes_back_within_its_share() {
        let mut d = Divider::new(100_000_000);
        (1..=2).for_each(|id| d.set(member(id, Class::Normal)).unwrap());
        d.set_active(1, false);
        assert_eq!(run(&mut d, 10_000_000_000).get(&1), None);
        d.set_active(1, true);
        let got = run(&mut d, 1_000_000_000);
        assert!(got[&1].abs_diff(500_000_000) <= d.bound_ns(), "{got:?}");
    }

    #[test]
    fn many_have_longer_rounds_not_shorter_windows() {
        for (members, window_ms) in [(1, 100), (2, 50), (4, 25), (5, 20), (10, 20), (40, 20)] {
            let mut d = Divider::new(100_000_000);
            (0..members).for_each(|id| d.set(member(id, Class::Normal)).unwrap());
            // Idle ones make it no longer.
            (100..120).for_each(|id| d.set(Member { active: false, ..member(id, Class::Normal) }).unwrap());
            // The first ones differ, which puts them apart.
            run(&mut d, 10_000_000_000);
            assert!(d.next().unwrap().length_ns.abs_diff(window_ms * 1_000_000) < 100, "{members}: {:?}", d.next());
        }
    }

    #[test]
    fn who_comes_and_goes_leaves_windows_as_long_as_they_were() {
        let mut d = Divider::new(100_000_000);
        (0..4).for_each(|id| d.set(member(id, Class::Normal)).unwrap());
        for i in 0..200 {
            let w = d.next().unwrap();
            d.charge(w.owner, w.length_ns);
            // At all moments of a round, with all that it has left or owes.
            d.set_active(i % 4, i % 3 == 0);
            if i % 7 == 0 {
                d.remove(9);
            } else {
                d.set(member(9, Class::Normal)).unwrap();
            }
        }
        d.remove(9);
        (0..4).for_each(|id| {
            d.set_active(id, true);
        });
        let all: i128 = d.entries.values().map(|e| e.left).sum();
        assert!(all.abs() < 10, "{all}");
        run(&mut d, 2_000_000_000);
        let w = d.next().unwrap();
        assert!(w.length_ns.abs_diff(25_000_000) < 1000, "{w:?}");
    }

    /// Turns of all members but `short`, which has little of each, in this order, from windows on; who is behind after so many
    /// looks, and how much farther than by its swings somebody is off then.
    fn take_turns(d: &mut Divider, order: &[u64], short: Option<u64>, looks: u32) -> (Vec<u64>, i128) {
        let (mut behind, mut at) = (Vec::new(), 0);
        for _ in 0..looks {
            let round = d.round_of_turns_ns(0).unwrap();
            let look_ns = 100_000_000.max(2 * round);
            let lengths: BTreeMap<u64, u64> = d.turns(round, look_ns).map(|w| (w.owner, w.length_ns)).collect();
            let mut passed = 0;
            while passed < look_ns {
                let id = order[at % order.len()];
                at += 1;
                let length = if Some(id) == short { 250_000 } else { lengths[&id] };
                d.charge(id, length);
                passed += length;
            }
            behind.extend(d.behind(round));
        }
        let (round, windows) = (d.round_of_turns_ns(0).unwrap(), d.round_ns());
        let off = |e: &Entry| e.left.abs() - e.swing_of_turns(round) - e.half_swing(windows);
        (behind, d.entries.values().map(off).max().unwrap() / i128::from(WHOLE))
    }

    /// What goes between them or wrong is made up for by the next windows' lengths; who comes after whom stays, and so nobody is
    /// ever further off than its own window makes it.
    #[test]
    fn everybody_swings_around_its_share_and_returns_to_that_after_what_comes_between() {
        let parts = [400_000u32, 300_000, 200_000, 100_000];
        let mut d = Divider::new(100_000_000);
        (0..).zip(parts).for_each(|(id, p)| d.set(member(id, Class::Custom(p))).unwrap());
        run(&mut d, 1_000_000_000);
        let mut order = Vec::new();
        for i in 0..400 {
            let w = d.next().unwrap();
            // Now and then two have had something of a window, and neither what it was due.
            if i % 50 == 17 {
                d.charge(w.owner, 10_000_000);
                d.charge((w.owner + 1) % 4, 10_000_000);
            } else {
                d.charge(w.owner, w.length_ns);
                order.push(w.owner);
            }
            // (The one of them had the half of a window too soon.)
            for e in d.entries.values() {
                let most = e.half_swing(100_000_000) + 10_000_000 * i128::from(WHOLE);
                assert!(e.left.abs() <= most, "at {i}: {e:?}");
            }
        }
        let changes = order.windows(5).filter(|o| o[0] != o[4]).count();
        assert!(changes < 60, "{changes} of {}", order.len());
    }

    fn class() -> impl Strategy<Value = Class> {
        prop_oneof![
            (1u32..200_000).prop_map(Class::Custom),
            Just(Class::Normal),
            Just(Class::Background),
            Just(Class::Suspended),
            Just(Class::Interactive)
        ]
    }

    proptest! {
        #[test]
        fn turns_are_shares_in_whatever_order_and_who_fills_none_is_behind(
            parts in proptest::collection::vec(1u32..100, 2..8),
            began in 0u64..500,
            turn in 0usize..8,
            backwards: bool,
        ) {
            let total: u32 = parts.iter().sum();
            let mut d = Divider::new(100_000_000);
            for (id, p) in (0..).zip(&parts) {
                d.set(member(id, Class::Custom(p * 1_000_000 / total))).unwrap();
            }
            prop_assume!(d.round_of_turns_ns(0).is_some());
            run(&mut d, 1_000_000_000 + began * 1_000_000);
            let mut order: Vec<u64> = (0..parts.len() as u64).collect();
            order.rotate_left(turn % parts.len());
            if backwards {
                order.reverse();
            }
            let (behind, off) = take_turns(&mut d.clone(), &order, None, 20);
            prop_assert!(behind.is_empty(), "{behind:?}");
            prop_assert!(off < BEHIND_NS.into(), "{off} ns");
            let largest = (0..parts.len() as u64).max_by_key(|id| d.share(*id)).unwrap();
            let (behind, _) = take_turns(&mut d, &order, Some(largest), 20);
            prop_assert_eq!(behind.first(), Some(&largest));
        }

        /// Everybody with work all the time has its share, up to the bound, over any stretch from the beginning on.
        #[test]
        fn nobody_is_far_from_its_share(
            members in proptest::collection::vec((class(), -20i32..20, any::<bool>()), 1..12),
            period in 1u64..400,
            stretches in proptest::collection::vec(1u64..3000, 1..5),
        ) {
            let mut d = Divider::new(period * 1_000_000);
            for (id, (class, nice, active)) in members.into_iter().enumerate() {
                // Overbooked ones stay out.
                let _ = d.set(Member { id: id as u64, class, nice, active });
            }
            let all: Vec<(Member, u64)> = d.members().collect();
            let total: u64 = all.iter().map(|(_, s)| s).sum();
            prop_assert!(total == WHOLE || total == 0);
            let (mut got, mut passed) = (BTreeMap::<u64, u64>::new(), 0u64);
            for ms in stretches {
                for (id, ns) in run(&mut d, ms * 1_000_000) {
                    *got.entry(id).or_default() += ns;
                    passed += ns;
                }
                for (m, share) in &all {
                    let due = (u128::from(passed) * u128::from(*share) / u128::from(WHOLE)) as u64;
                    let had = got.get(&m.id).copied().unwrap_or(0);
                    prop_assert!(had.abs_diff(due) <= d.bound_ns(), "{m:?}: {had} of {due}");
                    prop_assert!(*share > 0 || had == 0);
                }
            }
        }
    }
}
