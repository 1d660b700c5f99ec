//! Tasks that are submitted many at a time: a table that the device reads, of which a slot of the ring is a range.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use forebay_hal::cpu::streaming;

use super::call::Call;
use super::host::{Grid, Ticket};
use super::layout::Task;
use super::{Error, Result};

/// Tasks that are submitted together, at most.
pub const TOGETHER: usize = 1024;
const _: () = assert!(TOGETHER == 1024, "an error names it");
/// How often so many can be on their way.
pub(super) const PIECES: usize = 4;

/// Who has a piece of the table.
#[derive(Clone, Copy, Default)]
enum Piece {
    #[default]
    Nobody,
    /// Somebody writes tasks there.
    Writer,
    /// The device, until this ticket (ring, root and number) is done.
    Device(usize, usize, u32),
}

/// The table of tasks that are submitted together, piece by piece.
#[derive(Default)]
pub(super) struct Together {
    next: usize,
    pieces: [Piece; PIECES],
}

thread_local! {
    /// This thread has a piece, and asks a program's code what is to be written there.
    static WRITES: Cell<bool> = const { Cell::new(false) };
}

/// A piece that is being written; nobody's again when it is dropped without having been given to the device.
struct Written<'a> {
    grid: &'a Grid,
    piece: usize,
    given: Piece,
    /// The thread had one already, and is asked for what goes there.
    inside: bool,
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        WRITES.set(self.inside);
        self.grid.together().pieces[self.piece] = self.given;
    }
}

impl Grid {
    /// Submits many tasks, [`TOGETHER`] at a time, which costs a fraction of submitting each; a ticket for each so many, whose
    /// completion is that of all of them: they share a result and a status, and have their limits of units together, if all
    /// have some. Those of one ticket are urgent if the first one is. Functions for a lane each (`TASK_PER_THREAD`) run where
    /// they are read; others take a place in the queue each ([`Error::NoRoom`]).
    ///
    /// Tasks are written where the device reads them as `calls` gives them. What gives them may call this itself: then tasks go
    /// one by one, with a ticket each, since whoever holds a part of the table must not wait for another one.
    ///
    /// # Errors
    /// As [`Grid::submit`]. None of a ticket's tasks is submitted when something is wrong with one of them; those of the tickets
    /// before it are.
    pub fn submit_all(&self, calls: impl IntoIterator<Item = Call>) -> Result<Vec<Ticket>> {
        let (mut calls, mut tickets, mut image) = (calls.into_iter(), Vec::new(), Vec::new());
        if WRITES.get() {
            for c in calls {
                tickets.push(self.submit(c)?);
            }
            return Ok(tickets);
        }
        while let Some(first) = calls.next() {
            tickets.push(self.submit_some(first, calls.by_ref().take(TOGETHER - 1), &mut image, true)?);
        }
        Ok(tickets)
    }

    /// Submits 1 to [`TOGETHER`] tasks together, as [`Grid::submit_all`] does, if there is room.
    ///
    /// # Errors
    /// As there; [`Error::Full`]; [`Error::Setting`] for another number of them. None is submitted then.
    pub fn try_submit_together(&self, calls: &[Call]) -> Result<Ticket> {
        let (n, mut all) = (calls.len(), calls.iter().copied());
        match all.next() {
            Some(first) if n <= TOGETHER => self.submit_some(first, all, &mut Vec::new(), false),
            _ => {
                let what = "the number of tasks that are submitted together";
                Err(Error::Setting { what, is: n as u64, allowed: "1 to 1024" })
            }
        }
    }

    fn together(&self) -> MutexGuard<'_, Together> {
        self.shared.together.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece that is nobody's, if there is one.
    fn free_piece(&self) -> Option<Written<'_>> {
        let (s, mut t) = (&self.shared, self.together());
        // The oldest that the device has is looked at, and not the others: who waits looks all the time.
        let piece = (0..PIECES).map(|i| (t.next + i) % PIECES).find(|&i| !matches!(t.pieces[i], Piece::Writer))?;
        if let Piece::Device(ring, root, number) = t.pieces[piece] {
            let p = s.producer(ring);
            if p.roots[root].number == Some(number) && s.fetch(ring, root, number).is_none() {
                return None;
            }
        }
        t.next = (piece + 1) % PIECES;
        t.pieces[piece] = Piece::Writer;
        let inside = WRITES.replace(true);
        Some(Written { grid: self, piece, given: Piece::Nobody, inside })
    }

    /// `first` and what comes of `others`, [`TOGETHER`] at most; `waits` for room, or not. `image` is room for them.
    fn submit_some(
        &self,
        first: Call,
        others: impl Iterator<Item = Call>,
        image: &mut Vec<Task>,
        waits: bool,
    ) -> Result<Ticket> {
        let s = &self.shared;
        let begun = Instant::now();
        let mut written = loop {
            if s.stopped.load(Ordering::Acquire) != 0 {
                return Err(Error::Stopped);
            }
            match self.free_piece() {
                Some(piece) => break piece,
                None if waits => self.rest(begun)?,
                None => return Err(Error::Full(PIECES * TOGETHER)),
            }
        };
        let at = written.piece * TOGETHER;
        // SAFETY: within the table, of which this piece is the writer's.
        let place = unsafe { s.host.calls.add(at) };
        image.clear();
        let (mut n, mut fuel, urgent) = (0, Some(0u32), first.urgent);
        let mut put = |c: Call| -> Result<()> {
            self.check(&c)?;
            fuel = fuel.filter(|_| c.fuel > 0).map(|sum| sum.saturating_add(c.fuel));
            let Call { function, first, count, args, .. } = c;
            let task = Task { function, root: 0, first, count, priority: 0, counted: 0, args };
            // Across a bus as they come, while the bus carries those before; to other cores all at once, which is the least
            // that caches have to say to each other.
            match s.host.mapped {
                // SAFETY: the piece has room for `TOGETHER` tasks, and nobody reads it.
                true => unsafe { place.add(n).write(task) },
                false => image.push(task),
            }
            n += 1;
            Ok(())
        };
        // The first one by itself: a chain of the two costs as much as the rest of this.
        put(first)?;
        others.take(TOGETHER - 1).try_for_each(put)?;
        if s.host.mapped {
            streaming::fence_stores();
        }
        // SAFETY: as above; none, where the tasks are in their places.
        unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), place, image.len()) };
        let mut each = Call::new(s.known.load(Ordering::Relaxed)).range(at as u64, n as u64).fuel(fuel.unwrap_or(0));
        each.urgent = urgent;
        let ticket = if waits { self.enter_when_free(&each) } else { self.enter(&each) }?;
        written.given = Piece::Device(ticket.ring, ticket.root(), ticket.number);
        Ok(ticket)
    }
}
