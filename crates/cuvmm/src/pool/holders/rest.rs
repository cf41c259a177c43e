//! The states of the owner of a holder that can sleep: awake, moving, asleep.

use crate::error::SleepError;

/// A state; `C` is what the owner keeps while it sleeps.
#[derive(Debug)]
pub(crate) enum Rest<C> {
    Awake,
    /// An operation puts the owner to sleep or wakes it.
    Moving {
        /// The memory is charged.
        charged: bool,
    },
    /// Nothing is mapped or charged.
    Asleep(C),
}

impl<C> Rest<C> {
    pub(crate) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    pub(crate) const fn is_charged(&self) -> bool {
        matches!(self, Self::Awake | Self::Moving { charged: true })
    }

    /// Marks a sleeping owner as moving, unless it is `busy` with another move. Returns what it kept,
    /// or `None` if it is awake.
    pub(crate) fn begin_wake(&mut self, busy: SleepError) -> Result<Option<C>, SleepError> {
        match std::mem::replace(self, Self::Moving { charged: false }) {
            Self::Asleep(kept) => Ok(Some(kept)),
            other => {
                let is_awake = other.is_awake();
                *self = other;
                is_awake.then_some(None).ok_or(busy)
            }
        }
    }
}
