//! Memory for what stays inside a region: values share a piece where that costs nothing.
//!
//! Rules:
//! 1. A value may have the piece of an earlier one if whoever makes it depends, by data, on everybody who used that one. The
//!    order that sharing demands is there anyway then, and branches of a region still run side by side.
//! 2. Beyond [`MAX_APART`] bytes it may have any piece whose last user comes before it in the list: branches then wait for
//!    each other, since memory is scarcer than time.

use std::collections::HashMap;

/// Bytes of a region that may be spent on keeping branches apart, and one invocation from the next: an item of megabytes in
/// dozens of branches, and little beside an accelerator's memory.
pub(crate) const MAX_APART: usize = 256 << 20;
/// Free pieces of a size that are looked at, the latest first.
const LOOKS: usize = 64;

/// A value that needs memory.
pub(crate) struct Need {
    pub(crate) bytes: usize,
    /// Positions of those who use it, in order; the first one makes it.
    pub(crate) users: Vec<usize>,
}

/// Pieces of memory.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Placed {
    /// Each need's piece.
    pub(crate) piece: Vec<usize>,
    /// Each piece's bytes.
    pub(crate) bytes: Vec<usize>,
}

/// Places what is needed; `before[at]` are the positions whose data the one at `at` uses, all smaller than `at`.
pub(crate) fn place(before: &[Vec<usize>], needs: &[Need]) -> Placed {
    place_within(MAX_APART, before, needs)
}

fn place_within(apart: usize, before: &[Vec<usize>], needs: &[Need]) -> Placed {
    let ancestors = Ancestors::new(before);
    let mut made_at: Vec<Vec<usize>> = vec![Vec::new(); before.len()];
    let mut done_at: Vec<Vec<usize>> = vec![Vec::new(); before.len()];
    for (n, need) in needs.iter().enumerate() {
        if let (Some(&first), Some(&last)) = (need.users.first(), need.users.last()) {
            made_at[first].push(n);
            done_at[last].push(n);
        }
    }
    let mut placed = Placed { piece: vec![0; needs.len()], bytes: Vec::new() };
    // Needs whose pieces nobody uses any more, by bytes.
    let mut free: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut total = 0usize;
    for at in 0..before.len() {
        for &n in &made_at[at] {
            let bytes = needs[n].bytes;
            let free = free.entry(bytes).or_default();
            let depends = |&&f: &&usize| needs[f].users.iter().all(|&u| ancestors.has(at, u));
            let mut found = free.iter().rev().take(LOOKS).position(|f| depends(&f)).map(|back| free.len() - 1 - back);
            if found.is_none() && total.saturating_add(bytes) > apart {
                found = free.len().checked_sub(1);
            }
            placed.piece[n] = match found {
                Some(i) => placed.piece[free.remove(i)],
                None => {
                    total = total.saturating_add(bytes);
                    placed.bytes.push(bytes);
                    placed.bytes.len() - 1
                }
            };
        }
        for &n in &done_at[at] {
            free.entry(needs[n].bytes).or_default().push(n);
        }
    }
    placed
}

/// Whose data each position uses, directly or not: a bit each.
struct Ancestors {
    bits: Vec<u64>,
    words: usize,
}

impl Ancestors {
    fn new(before: &[Vec<usize>]) -> Self {
        let words = before.len().div_ceil(64);
        let mut bits = vec![0; words * before.len()];
        for (at, direct) in before.iter().enumerate() {
            let (earlier, mine) = bits.split_at_mut(at * words);
            for &b in direct {
                mine[b / 64] |= 1 << (b % 64);
                for (m, e) in mine.iter_mut().zip(&earlier[b * words..(b + 1) * words]) {
                    *m |= e;
                }
            }
        }
        Ancestors { bits, words }
    }

    fn has(&self, at: usize, ancestor: usize) -> bool {
        self.bits[at * self.words + ancestor / 64] >> (ancestor % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Each member makes one value, which whoever comes behind it uses.
    fn needs(before: &[Vec<usize>], bytes: usize) -> Vec<Need> {
        let used = |n: usize| (0..before.len()).filter(move |&at| before[at].contains(&n));
        (0..before.len()).map(|n| Need { bytes, users: [n].into_iter().chain(used(n)).collect() }).collect()
    }

    #[test]
    fn a_chain_needs_two_pieces_and_branches_do_not_share() {
        let chain: Vec<Vec<usize>> = (0..10usize).map(|i| i.checked_sub(1).into_iter().collect()).collect();
        assert_eq!(place(&chain, &needs(&chain, 8)).bytes, [8, 8]);
        // Two chains, one behind the other in the list.
        let two: Vec<Vec<usize>> =
            (0..10usize).map(|i| i.checked_sub(1).filter(|_| i != 5).into_iter().collect()).collect();
        let placed = place(&two, &needs(&two, 8));
        assert_eq!(placed.bytes, [8; 4]);
        assert!(placed.piece[..5].iter().all(|p| !placed.piece[5..].contains(p)), "{placed:?}");
        // Not at any price.
        assert_eq!(place_within(24, &two, &needs(&two, 8)).bytes, [8; 3]);
        assert_eq!(place_within(0, &two, &needs(&two, 8)).bytes, [8; 2]);
    }

    #[test]
    fn a_value_that_nobody_uses_and_sizes_that_differ() {
        let before = [vec![], vec![0], vec![1]];
        let need = |bytes, users: &[usize]| Need { bytes, users: users.to_vec() };
        let placed = place(&before, &[need(8, &[0, 1]), need(4, &[1]), need(8, &[2]), need(4, &[2])]);
        assert_eq!(placed, Placed { piece: vec![0, 1, 0, 1], bytes: vec![8, 4] });
    }

    proptest! {
        /// Who has an earlier value's piece depends on all of its users, or comes behind them where memory is short.
        #[test]
        fn nobody_writes_what_is_still_used(
            graph in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..3), 1..40),
            apart in prop_oneof![Just(0usize), Just(64), Just(usize::MAX)],
        ) {
            let before: Vec<Vec<usize>> = graph.iter().enumerate()
                .map(|(at, b)| b.iter().filter(|_| at > 0).map(|i| i.index(at)).collect())
                .collect();
            let needs = needs(&before, 8);
            let placed = place_within(apart, &before, &needs);
            let ancestors = Ancestors::new(&before);
            for (b, later) in needs.iter().enumerate() {
                for (a, earlier) in needs.iter().enumerate().take(b).filter(|(a, _)| placed.piece[*a] == placed.piece[b]) {
                    let makes = later.users[0];
                    for &u in &earlier.users {
                        prop_assert!(u < makes, "{a} and {b} at the same time");
                        prop_assert!(apart != usize::MAX || ancestors.has(makes, u), "{b} waits for {a}");
                    }
                }
            }
        }
    }
}
