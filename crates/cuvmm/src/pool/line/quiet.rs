//! Attempts of a request that waits, which announce nothing: each gives back what it took, and would
//! wake its own request, and others that wait, at once.

use std::cell::Cell;
use std::ptr;

use crate::pool::core::Core;
use crate::sync::thread_local;

/// The pool of the thread's attempt, and the flights that the attempt has ended.
struct Here {
    core: Cell<*const Core>,
    ended: Cell<u64>,
}

thread_local! {
    static HERE: Here = const {
        Here {
            core: Cell::new(ptr::null()),
            ended: Cell::new(0),
        }
    };
}

/// An attempt on this thread. Until it is dropped, the thread announces nothing to those who wait
/// for memory of the pool. They look again by themselves within [milliseconds](super::Pause).
pub(in crate::pool) struct Quiet {
    before: (*const Core, u64),
}

impl Quiet {
    pub(in crate::pool) fn begin(core: &Core) -> Self {
        HERE.with(|here| Self {
            before: (here.core.replace(core), here.ended.replace(0)),
        })
    }

    /// Returns the number of flights that the attempt has ended.
    pub(in crate::pool) fn ended(&self) -> u64 {
        HERE.with(|here| here.ended.get())
    }

    /// Returns `true` if the thread makes an attempt of a request for a pool's memory.
    pub(in crate::pool) fn is_here(core: &Core) -> bool {
        HERE.with(|here| ptr::eq(here.core.get(), core))
    }

    /// Counts a flight that has ended, if the thread makes an attempt.
    pub(in crate::pool) fn note_ended(core: &Core) {
        HERE.with(|here| {
            if ptr::eq(here.core.get(), core) {
                here.ended.set(here.ended.get() + 1);
            }
        });
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        HERE.with(|here| {
            here.core.set(self.before.0);
            here.ended.set(self.before.1);
        });
    }
}
