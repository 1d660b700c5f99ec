//! Credits: shares of a device that has no hardware control, among programs that ask before they work (PTask, section
//! 5.3: token buckets, here with the bucket's rate taken from what the device really delivers).
//!
//! Rules:
//! 1. A member may begin a piece of work while its balance is above zero. What the work took is known afterwards and
//!    taken off, so a balance can be negative: a member waits until it is paid back, at most [`MAX_DEBT_NS`] a unit.
//! 2. At every tick members are given what the device delivered since the last one: what they used, and what it could
//!    have done besides. So the rate follows the device, whatever else uses it.
//! 3. It is given by shares ([`crate::share::shares`]). A member that demands and uses less than its share counts with the
//!    greater of both and [`MARGIN`]; the rest flows to others, at last to `background` ones. How far demands are believed
//!    grows while more than one part in [`TOLERATED`] of the device is idle, and shrinks while less is: who competes for
//!    cores stalls itself, so that its demand looks smaller than it is.
//! 4. A member holds at most [`SLACK_NS`] a unit and its part of [`FLOAT_NS`]; beyond that, all together at most what the
//!    others owe ([`MAX_OWED_NS`]) and will pay (those without a share do not), whoever it is that they lack it of: where many
//!    begin at once they have some of its time before its turn, and it gets that back. What it cannot hold is lost, so that
//!    others do not overtake it only because the operating system lets them run more. If more than one part in
//!    [`TOLERATED`] of the device is idle because of that, those that have little left get that time on top; but not what
//!    somebody with credit falls short of its share by: that one is being held up, and would be more. (One that uses less
//!    than half of its share does so by choice, as far as it was not ready and without a core.)
//! 5. `interactive` members are filled first, up to [`RESERVE`] of what the device delivers; beyond that they are
//!    normal ones.
//! 6. A member that has credit and does nothing for [`IDLE_TICKS`] is idle: it counts for nothing, and begins again
//!    with at most [`SLACK_NS`] a unit, which it comes to have at the rate of the share that it had. Nothing is saved up by
//!    sleeping, a pause wins nothing, and nothing owed is forgotten by it. The same holds of `suspended` members.
//! 7. Under [`Order::Priority`] the lowest nice value's members get what they demand first, under [`Order::Fifo`] those
//!    that have waited longest; a member that has waited for [`STARVED_NS`] comes before both.
//! 8. All numbers are integers; time is what the caller says.

use std::collections::BTreeMap;

use crate::share::{Class, Member, Refusal, WHOLE, admit, shares};

/// How often the bank is asked to tick while a few are active; with many ticks may be up to [`MAX_TICK_NS`] apart.
pub const TICK_NS: u64 = 5_000_000;
/// What all members can hold together, beside slack and what others owe, a unit of the device, when ticks are [`TICK_NS`]
/// apart.
pub const FLOAT_NS: u64 = 8 * TICK_NS;
/// Ticks that are further apart than this count as if they were not: one that is late changes nothing.
pub const MAX_TICK_NS: u64 = 4 * TICK_NS;
/// Most of what all owe together that others may hold on top, a unit of the device.
pub const MAX_OWED_NS: u64 = 8 * FLOAT_NS;
/// What a member may hold beyond its part, a unit of the device.
pub const SLACK_NS: u64 = TICK_NS;
/// Most that a member can owe, a unit of the device.
pub const MAX_DEBT_NS: u64 = 2_000_000_000;
/// Part of the device that interactive members get before others, in millionths.
pub const RESERVE: u64 = 250_000;
/// Most that is saved up for interactive members, a unit of the device.
pub const MAX_RESERVE_NS: u64 = 50_000_000;
/// Ticks without work after which a member is idle.
pub const IDLE_TICKS: u32 = 10;
/// Longest time without credit before a member comes first.
pub const STARVED_NS: u64 = 500_000_000;
/// Use in a tick below which a member is taken to do nothing: what a program's other threads do.
const NOTHING_NS: u64 = TICK_NS / 50;
/// Added to a demand, in millionths: demands are known from samples.
pub const MARGIN: u64 = 20_000;
/// The part of a device (one in so many) that may be idle while somebody waits.
pub const TOLERATED: u64 = 24;
/// Ticks of nothing but idleness after which demands are believed.
const BELIEF_TICKS: i64 = 4;
/// Ticks over which use and demand are averaged.
const AVERAGE: u64 = 8;

/// Whose turn it is when there is not enough for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Everybody at the rate of its share.
    #[default]
    Share,
    /// The lowest nice value first.
    Priority,
    /// Who waits longest first.
    Fifo,
}

#[derive(Clone, Debug)]
struct Account {
    member: Member,
    /// Used so far, as last reported.
    spent: u64,
    balance: i64,
    /// Average use in a tick, ns times [`AVERAGE`].
    average: u64,
    /// Average demand, millionths times [`AVERAGE`].
    demand: u64,
    /// Average time in a tick in which it had credit and was ready, but not at work, ns times [`AVERAGE`].
    ready: u64,
    share: u64,
    /// Its share when it was last active.
    due: u64,
    quiet: u32,
    /// Time without credit.
    waited_ns: u64,
}

/// What is known of a member at a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Used since it began, ns.
    pub spent_ns: u64,
    /// How much of the device it could use at this moment, in millionths; [`WHOLE`] if it is not known.
    pub demand: u64,
    /// Time since the last tick in which a thread of it was ready and had no core, over all of them, ns; 0 if it is not known.
    pub ready_ns: u64,
}

/// A member, as others may see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The member; `active` is what the bank found.
    pub member: Member,
    /// What it would get of the device now, in millionths.
    pub share: u64,
    /// What it has had of the device lately, in millionths.
    pub used: u64,
    /// It has credit, and uses so little of its share that whether it was ready matters ([`Report::ready_ns`]).
    pub uses_little: bool,
    /// Used so far, ns.
    pub spent_ns: u64,
    /// Its credit, ns.
    pub balance_ns: i64,
}

/// The credits of one device.
#[derive(Clone, Debug)]
pub struct Bank {
    units: u64,
    order: Order,
    accounts: BTreeMap<u64, Account>,
    reserve_ns: u64,
    /// Averages over all, ns times [`AVERAGE`].
    spent: u64,
    spare: u64,
    /// What those that wait get on top at a tick, ns.
    bonus: i64,
    /// How far demands are believed, in millionths.
    belief: i64,
    /// What was to be given and was more than the device can do in a tick, ns.
    carry_ns: u64,
}

/// [`FLOAT_NS`], when ticks are so far apart.
fn float_ns(tick_ns: u64) -> u64 {
    FLOAT_NS / TICK_NS * tick_ns.clamp(TICK_NS, MAX_TICK_NS)
}

/// A share of what the device does, as an average.
fn part_of(all: u64, share: u64) -> u64 {
    (u128::from(all) * u128::from(share) / u128::from(WHOLE)) as u64
}

fn signed(v: u64) -> i64 {
    i64::try_from(v).unwrap_or(i64::MAX)
}

fn averaged(old: u64, new: u64) -> u64 {
    old - old / AVERAGE + new
}

impl Bank {
    /// A bank for a device that can do so many things at a time (cores).
    pub fn new(units: u32, order: Order) -> Self {
        let units = u64::from(units.clamp(1, 1 << 16));
        Bank {
            units,
            order,
            accounts: BTreeMap::new(),
            reserve_ns: 0,
            spent: 0,
            spare: 0,
            bonus: 0,
            belief: 0,
            carry_ns: 0,
        }
    }

    fn members(&self) -> Vec<Member> {
        self.accounts.values().map(|a| a.member).collect()
    }

    /// Adds a member that has used `spent_ns` so far, or changes one (then `spent_ns` is ignored).
    ///
    /// # Errors
    /// As [`admit`]; nothing is changed then.
    pub fn set(&mut self, member: Member, spent_ns: u64) -> Result<(), Refusal> {
        admit(&self.members(), &member)?;
        let fresh = Account {
            member: Member { active: false, ..member },
            spent: spent_ns,
            balance: signed(SLACK_NS * self.units),
            average: 0,
            demand: WHOLE * AVERAGE,
            ready: 0,
            share: 0,
            due: 0,
            quiet: 0,
            waited_ns: 0,
        };
        let a = self.accounts.entry(member.id).or_insert(fresh);
        a.member = Member { active: a.member.active, ..member };
        Ok(())
    }

    /// Forgets a member; what it held or owed is gone with it, and others get it at the next tick.
    pub fn remove(&mut self, id: u64) {
        self.accounts.remove(&id);
    }

    /// How far the member may get: its use may be up to this, ns. None for one that is not there.
    pub fn allowance(&self, id: u64) -> Option<u64> {
        self.allowance_from(id, self.accounts.get(&id)?.spent)
    }

    /// The same for who counts its use from elsewhere, and is at `counted_ns` with what the bank knows of.
    pub fn allowance_from(&self, id: u64, counted_ns: u64) -> Option<u64> {
        let a = self.accounts.get(&id)?;
        let suspended = a.member.class == Class::Suspended;
        Some(if suspended { 0 } else { counted_ns.saturating_add_signed(a.balance) })
    }

    /// Whether a member has credit.
    pub fn may(&self, id: u64) -> bool {
        self.accounts.get(&id).is_some_and(|a| a.member.class != Class::Suspended && a.balance > 0)
    }

    /// Members that are active.
    pub fn active(&self) -> usize {
        self.accounts.values().filter(|a| a.member.active).count()
    }

    /// The members.
    pub fn views(&self) -> impl Iterator<Item = View> {
        let all = (self.spent + self.spare).max(1);
        self.accounts.values().map(move |a| View {
            member: a.member,
            share: a.share,
            used: (a.average * WHOLE / all).min(WHOLE),
            uses_little: a.member.active && a.balance > 0 && a.average < part_of(all, a.share) / 2,
            spent_ns: a.spent,
            balance_ns: a.balance,
        })
    }

    /// `passed_ns` have passed since the last tick. `report` tells of a member (none: nothing is known, so nothing
    /// changes); `spare_ns` is the time in which the device had nothing to do, over all its units.
    pub fn tick(&mut self, passed_ns: u64, spare_ns: u64, mut report: impl FnMut(u64) -> Option<Report>) {
        let debt = signed(MAX_DEBT_NS * self.units);
        let mut total = 0u64;
        for a in self.accounts.values_mut() {
            let unknown = Report { spent_ns: a.spent, demand: a.demand / AVERAGE, ready_ns: 0 };
            let r = report(a.member.id).unwrap_or(unknown);
            let spent = r.spent_ns.saturating_sub(a.spent);
            let could = a.balance > 0;
            a.spent += spent;
            a.balance = a.balance.saturating_sub(signed(spent)).max(-debt);
            a.average = averaged(a.average, spent);
            // Who waits for credit would use it.
            a.demand = averaged(a.demand, if a.balance > 0 { r.demand.min(WHOLE) } else { WHOLE });
            // What it says is not more than the device can do.
            let ready = r.ready_ns.min(passed_ns.saturating_mul(self.units));
            a.ready = averaged(a.ready, if could { ready } else { 0 });
            total = total.saturating_add(spent);
            let works = spent > NOTHING_NS;
            a.quiet = if works || !could { 0 } else { a.quiet.saturating_add(1) };
            a.waited_ns = if a.balance > 0 { 0 } else { a.waited_ns.saturating_add(passed_ns) };
            // Who seems to do nothing and has used up what it may begin with is paid like everybody.
            if works || a.balance <= 0 && a.member.class != Class::Suspended {
                a.member.active = true;
            } else if a.quiet >= IDLE_TICKS || a.member.class == Class::Suspended {
                a.member.active = false;
            }
        }
        // A machine can have more to spare than this device is: a container with a limit sees all of its cores idle.
        let spare_ns = spare_ns.min(passed_ns.saturating_mul(self.units).saturating_sub(total));
        self.spent = averaged(self.spent, total);
        self.spare = averaged(self.spare, spare_ns);
        self.reshare();
        // Never more than the device can do; a sixteenth for clocks that are read one after the other.
        let most = passed_ns.saturating_mul(self.units).saturating_mul(17) / 16;
        self.hand_out(total, spare_ns, most, float_ns(passed_ns));
    }

    /// Shares by class, then by what members demand (rule 3).
    fn reshare(&mut self) {
        let as_normal =
            |m: Member| if m.class == Class::Interactive { Member { class: Class::Normal, ..m } } else { m };
        let members: Vec<Member> = self.members().into_iter().map(as_normal).collect();
        let all = (self.spent + self.spare).max(1);
        let excess = i128::from(self.spare) - i128::from(all / TOLERATED);
        // A jump at some limit would take shares from one side to the other and back all the time.
        let step = (excess * i128::from(WHOLE) / i128::from(all)) as i64 / BELIEF_TICKS;
        self.belief = (self.belief + step).clamp(0, WHOLE as i64);
        let believed = self.belief as u128;
        let want = |a: &Account| {
            let used = (u128::from(a.average) * u128::from(WHOLE) / u128::from(all)) as u64;
            let demand = (a.demand / AVERAGE).max(used);
            let more = u128::from(WHOLE.saturating_sub(demand + MARGIN));
            WHOLE - (more * believed / u128::from(WHOLE)) as u64
        };
        let wants: Vec<u64> = self.accounts.values().map(want).collect();
        let fair = match self.order {
            Order::Priority => self.in_line(&members, &wants),
            _ => shares(&members),
        };
        let mut rest = WHOLE;
        let kept = by_demand(fair, &wants, &mut rest);
        let only = |m: &Member| Member { active: m.active && m.class == Class::Background, ..*m };
        let background = shares(&members.iter().map(only).collect::<Vec<_>>());
        let left = by_demand(background, &wants, &mut rest);
        for ((a, kept), left) in self.accounts.values_mut().zip(kept).zip(left) {
            a.share = if kept > 0 { kept } else { left };
            if a.member.active {
                a.due = a.share;
            }
        }
    }

    /// Shares when the first in line get what they demand.
    fn in_line(&self, members: &[Member], wants: &[u64]) -> Vec<u64> {
        let key = |m: &Member| (m.class == Class::Background, m.nice);
        let mut line: Vec<usize> =
            (0..members.len()).filter(|&i| members[i].active && members[i].class != Class::Suspended).collect();
        line.sort_by_key(|&i| key(&members[i]));
        let (mut fair, mut rest) = (vec![0; members.len()], WHOLE);
        for same in line.chunk_by(|&a, &b| key(&members[a]) == key(&members[b])) {
            let want: u64 = same.iter().map(|&i| wants[i]).sum();
            for &i in same {
                fair[i] = (u128::from(want.min(rest)) * u128::from(wants[i])).checked_div(u128::from(want)).unwrap_or(0)
                    as u64;
            }
            rest -= want.min(rest);
        }
        fair
    }

    fn hand_out(&mut self, used_ns: u64, spare_ns: u64, most_ns: u64, float_ns: u64) {
        let slack = signed(SLACK_NS * self.units);
        // What was lost (rule 4) comes back before everybody waits. What somebody owes is not lost: counted here it would
        // be given again and again, and the debtor would have a part of it.
        let able = self.accounts.values().filter(|a| a.member.active && a.balance > 0);
        let held: i64 = able.fold(0, |s, a| s.saturating_add(a.balance));
        let lost = slack.saturating_mul(2).saturating_sub(held).max(0) as u64 / 2;
        // Use may be reported in lumps: what a tick may not give the next one does.
        let due = used_ns.saturating_add(spare_ns).saturating_add(self.carry_ns);
        let pot = due.saturating_add(lost).min(most_ns);
        self.carry_ns = due.saturating_sub(pot).min(FLOAT_NS * self.units);
        // Who has no share pays nothing back: what it owes would be had from those who owe nothing, whenever it is asked for.
        let paid = self.accounts.values().filter(|a| a.member.active && a.share > 0);
        let debts = paid.map(|a| a.balance.min(0).unsigned_abs());
        let owed = debts.fold(0u64, u64::saturating_add).min(MAX_OWED_NS * self.units);
        let float = i128::from(float_ns * self.units);
        let gained = (u128::from(pot) * u128::from(RESERVE) / u128::from(WHOLE)) as u64;
        self.reserve_ns = self.reserve_ns.saturating_add(gained).min(MAX_RESERVE_NS * self.units);
        let mut pot = signed(pot);
        // First in line: interactive ones while the reserve lasts, then those that have starved.
        for a in self.accounts.values_mut() {
            let room = slack.saturating_sub(a.balance).max(0);
            if a.member.class == Class::Interactive {
                let gets = room.min(signed(self.reserve_ns)).min(pot);
                self.reserve_ns -= gets as u64;
                a.balance += gets;
                pot -= gets;
            } else if !a.member.active {
                // No faster than if it were active: else a pause of a few ticks would pay, and so would it to suspend oneself.
                a.balance = a.balance.min(slack);
                a.balance += room.min((i128::from(most_ns) * i128::from(a.due) / i128::from(WHOLE)) as i64);
            } else if self.order != Order::Share && a.waited_ns >= STARVED_NS {
                let gets = room.min(pot);
                a.balance += gets;
                pot -= gets;
            }
        }
        if self.order == Order::Fifo {
            let mut line: Vec<(u64, u64)> =
                self.accounts.values().filter(|a| a.waited_ns > 0).map(|a| (a.waited_ns, a.member.id)).collect();
            line.sort_unstable_by_key(|(waited, id)| (std::cmp::Reverse(*waited), *id));
            for (_, id) in line {
                if let Some(a) = self.accounts.get_mut(&id) {
                    let gets = slack.saturating_sub(a.balance).clamp(0, pot);
                    a.balance += gets;
                    pot -= gets;
                }
            }
            return;
        }
        let part = |of: i64, share: u64, all: u64| {
            (i128::from(of) * i128::from(share)).checked_div(all.into()).unwrap_or(0) as i64
        };
        // Background members have no share while others seem to want everything; then they count as equals.
        let weight =
            |a: &Account, any: bool| if any { a.share } else { u64::from(a.member.class == Class::Background) };
        let waits = |a: &Account| a.balance < slack / 2 && a.member.active;
        let any = self.accounts.values().any(|a| waits(a) && a.share > 0);
        let waiting: u64 = self.accounts.values().filter(|a| waits(a)).map(|a| weight(a, any)).sum();
        // A little idleness is left alone, and so is what somebody with credit falls short of its share by: it is being
        // held up, and whoever fills its gaps holds it up more.
        let all = self.spent + self.spare;
        let due = |a: &Account| part_of(all, a.share);
        let able = self.accounts.values().filter(|a| a.member.active && a.balance > 0);
        // Who uses less than half of it does so by its own choice, whatever it says that it demands, unless it is known to
        // have been ready.
        let lacks = |a: &Account| {
            let lacks = due(a).saturating_sub(a.average);
            if a.average >= due(a) / 2 { lacks } else { lacks.min(a.ready) }
        };
        let short = able.map(lacks).fold(0, u64::saturating_add);
        let missing = signed(self.spare) - signed(all / TOLERATED) - signed(short);
        self.bonus = (self.bonus + missing / signed(AVERAGE * AVERAGE)).clamp(0, signed(all / AVERAGE));
        let extra = self.bonus;
        let gets =
            |a: &Account| part(pot, a.share, WHOLE) + if waits(a) { part(extra, weight(a, any), waiting) } else { 0 };
        // Debts are what others lack, to the nanosecond. One that is held up alone lacks all of it, however small its share.
        let beyond = |a: &Account, balance: i64| {
            let own = slack + (float * i128::from(a.share) / i128::from(WHOLE)) as i64;
            balance.saturating_sub(own).max(0)
        };
        let (mut held, mut wanted) = (0i64, 0i64);
        for a in self.accounts.values().filter(|a| a.member.active) {
            let before = beyond(a, a.balance);
            held = held.saturating_add(before);
            wanted = wanted.saturating_add(beyond(a, a.balance.saturating_add(gets(a))) - before);
        }
        let room = signed(owed).saturating_sub(held).clamp(0, wanted);
        for a in self.accounts.values_mut() {
            let gets = gets(a);
            let more = beyond(a, a.balance.saturating_add(gets)) - beyond(a, a.balance);
            let kept = (i128::from(more) * i128::from(room)).checked_div(wanted.into()).unwrap_or(0) as i64;
            a.balance = a.balance.saturating_add(gets - more + kept);
        }
    }
}

/// Divides what is there by these parts. Whoever demands less than its part keeps what it demands, and the others divide what that
/// leaves; each round finds at least one more of the former, or is the last. What nobody demands stays in `rest`.
fn by_demand(mut open: Vec<u64>, wants: &[u64], rest: &mut u64) -> Vec<u64> {
    let mut kept = vec![0; open.len()];
    loop {
        let all: u64 = open.iter().sum();
        let part =
            |i: usize| (u128::from(*rest) * u128::from(open[i])).checked_div(u128::from(all)).unwrap_or(0) as u64;
        let below: Vec<usize> = (0..open.len()).filter(|&i| open[i] > 0 && wants[i] < part(i)).collect();
        if below.is_empty() {
            (0..open.len()).filter(|&i| open[i] > 0).for_each(|i| kept[i] = part(i));
            if all > 0 {
                *rest = 0;
            }
            return kept;
        }
        for i in below {
            (kept[i], open[i]) = (wants[i], 0);
            *rest = rest.saturating_sub(wants[i]);
        }
    }
}

#[cfg(test)]
mod tests;
