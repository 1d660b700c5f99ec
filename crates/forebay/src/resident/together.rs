//! Tasks that are submitted many at a time: a table that the device reads, of which a slot of the ring is a range.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_hal::cpu::streaming;

use super::call::Call;
use super::host::{Grid, Ticket};
use super::layout::Task;
use super::{Error, Result};

/// Tasks that are submitted together, at most.
pub const TOGETHER: usize = 1024;
/// How often so many can be on their way.
pub(super) const PIECES: usize = 4;

/// The table of tasks that are submitted together, piece by piece.
#[derive(Default)]
pub(super) struct Together {
    next: usize,
    /// Ring, root and number of the ticket that each was used for last.
    used: [Option<(usize, usize, u32)>; PIECES],
}

impl Grid {
    /// Submits many tasks, [`TOGETHER`] at a time, which costs a fraction of submitting each; a ticket for each so many, whose
    /// completion is that of all of them: they share a result and a status, and have their limits of units together, if all
    /// have some. Those of one ticket are urgent if the first one is. Functions for a lane each (`TASK_PER_THREAD`) run where
    /// they are read; others take a place in the queue each ([`Error::NoRoom`]).
    ///
    /// # Errors
    /// As [`Grid::submit`]. None of a ticket's tasks is submitted when something is wrong with one of them; those of the tickets
    /// before it are.
    pub fn submit_all(&self, calls: impl IntoIterator<Item = Call>) -> Result<Vec<Ticket>> {
        let (mut calls, mut tickets, mut image) = (calls.into_iter(), Vec::new(), Vec::new());
        loop {
            image.clear();
            let (mut fuel, mut urgent) = (Some(0u32), false);
            for c in calls.by_ref().take(TOGETHER) {
                self.check(&c)?;
                urgent |= image.is_empty() && c.urgent;
                fuel = fuel.filter(|_| c.fuel > 0).map(|sum| sum.saturating_add(c.fuel));
                let (function, first, count, args) = (c.function, c.first, c.count, c.args);
                image.push(Task { function, root: 0, first, count, priority: 0, counted: 0, args });
            }
            if image.is_empty() {
                return Ok(tickets);
            }
            tickets.push(self.submit_piece(&image, fuel.unwrap_or(0), urgent)?);
        }
    }

    /// `image` is as it is to be in the table, [`TOGETHER`] tasks at most.
    fn submit_piece(&self, image: &[Task], fuel: u32, urgent: bool) -> Result<Ticket> {
        let s = &self.shared;
        let mut together = s.together.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = together.next;
        if let Some((ring, root, number)) = together.used[piece] {
            let over = || {
                let p = s.producer(ring);
                p.roots[root].number != Some(number) || s.fetch(ring, root, number).is_some()
            };
            let begun = Instant::now();
            while !over() {
                if s.stopped.load(Ordering::Acquire) != 0 {
                    return Err(Error::Stopped);
                }
                self.rest(begun)?;
            }
        }
        let n = image.len().min(TOGETHER);
        // SAFETY: the piece has room for `TOGETHER` tasks; nobody reads it: the range that it was used for is done.
        unsafe {
            let (from, to) = (image.as_ptr(), s.host.calls.add(piece * TOGETHER));
            if s.host.mapped {
                streaming::store(streaming::Width::widest(), from.cast(), to.cast(), n * size_of::<Task>());
            } else {
                std::ptr::copy_nonoverlapping(from, to, n);
            }
        }
        let each = Call::new(s.known.load(Ordering::Relaxed));
        let mut each = each.range((piece * TOGETHER) as u64, n as u64).fuel(fuel);
        each.urgent = urgent;
        let ticket = self.enter_when_free(&each)?;
        together.used[piece] = Some((ticket.ring, ticket.root, ticket.number));
        together.next = (piece + 1) % PIECES;
        Ok(ticket)
    }
}
