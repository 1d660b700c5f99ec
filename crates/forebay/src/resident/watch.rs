//! Calls of the program's functions when tasks are done. A thread looks at what is awaited; it exists only while something is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::call::Completion;
use super::host::Ticket;
use super::{Error, Result};

/// Between looks.
const NAP: Duration = Duration::from_micros(50);

/// What is called.
pub(super) type Then = Box<dyn FnOnce(Result<Completion>) + Send>;

#[derive(Default)]
struct State {
    awaited: Vec<(Ticket, Then)>,
    running: bool,
}

/// The tasks that somebody wants to be told of.
#[derive(Default)]
pub(super) struct Watch(Arc<Mutex<State>>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    pub(super) fn add(&self, ticket: Ticket, then: Then) -> Result<()> {
        let mut state = lock(&self.0);
        state.awaited.push((ticket, then));
        if !state.running {
            let shared = self.0.clone();
            let thread = std::thread::Builder::new().name("completions".into()).spawn(move || look(&shared));
            if let Err(e) = thread {
                state.awaited.pop();
                return Err(Error::Start(format!("completions: {e}")));
            }
            state.running = true;
        }
        Ok(())
    }
}

fn look(shared: &Mutex<State>) {
    // All tickets are of one grid.
    let mut lost: Option<Error> = None;
    loop {
        let mut done = Vec::new();
        {
            let mut state = lock(shared);
            if state.awaited.is_empty() {
                state.running = false;
                return;
            }
            let mut i = 0;
            while i < state.awaited.len() {
                match state.awaited[i].0.poll().or_else(|| lost.clone().map(Err)) {
                    Some(what) => done.push((state.awaited.remove(i), what)),
                    None => i += 1,
                }
            }
            if done.is_empty() {
                // What was done before the grid was lost is found by another look.
                lost = state.awaited.first().and_then(|(ticket, _)| ticket.lost());
            }
        }
        if done.is_empty() {
            std::thread::sleep(NAP);
        }
        for ((ticket, then), what) in done {
            drop(ticket);
            // Others wait for theirs.
            let _ = catch_unwind(AssertUnwindSafe(|| then(what)));
        }
    }
}
