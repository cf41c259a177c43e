//! A pool's state while a thread has its lock, and what happens when the lock is let go.
//!
//! Two rules are kept here for every locked section. What belongs to users is dropped and called
//! behind the section's end (see [`crate::deferred`]). And a forked child never waits for the lock:
//! a thread that the child does not have may have held it at the fork. The child finds the state of
//! a pool without tenants instead.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use super::core::Core;
use super::state::State;
use crate::deferred::{self, Section};
use crate::sync::{Condvar, MutexGuard};

/// The lock on a pool's state. The fields are dropped in this order: the lock is let go, the section
/// ends, and then what was put off is run.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    section: Section,
    core: &'a Core,
}

impl Core {
    /// Locks the state. A panic elsewhere leaves counters that are right for what was done until
    /// then.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        let state = match self.device.is_forked() {
            false => &self.state,
            true => &self.childs,
        };
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        Locked {
            state,
            section: Section::enter(),
            core: self,
        }
    }
}

impl Locked<'_> {
    /// Lets the lock go until `told` is notified, at most for `longest`. May end sooner.
    pub(super) fn wait(self, told: &Condvar, longest: Option<Duration>) -> Self {
        if deferred::is_stocked() {
            // Those who wait for memory may wait for just that.
            let core = self.core;
            drop(self);
            return core.lock();
        }
        let Self {
            state,
            section,
            core,
        } = self;
        let state = match longest {
            Some(longest) => {
                let waited = told.wait_timeout(state, longest);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => told.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
        Self {
            state,
            section,
            core,
        }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    #[inline]
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}
