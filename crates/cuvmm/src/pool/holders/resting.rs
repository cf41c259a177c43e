//! Holders that sleep whole: their memory is taken out and given up, and comes back at the same
//! addresses.
//!
//! Either move has two steps, of which the second cannot fail. A value of a move that is dropped
//! before its second step leaves the holder as it was.
//!
//! Keeps I-126.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Instant;

use super::lend::Lending;
use crate::error::{BlockError, SleepError};
use crate::extents::{Fence, Poll, Unmapped};
use crate::own::Span;
use crate::pool::blocks::sleep::GivenUp;
use crate::pool::tenant::Tenant;
use crate::store::{HostStore, Saved};

/// The owner of a holder that can sleep: a heap or a paged cache.
pub(crate) trait CanSleep: Send + Sync {
    fn tenant(&self) -> &Tenant;

    fn is_heap(&self) -> bool;

    /// Marks the holder as moving, if it is awake and all work that may use its memory is complete.
    fn mark(self: Arc<Self>, attempts: &Attempts) -> Result<Marked, SleepError>;

    /// Marks the holder as moving, if it sleeps.
    fn begin_wake(self: Arc<Self>) -> Result<Option<Box<dyn HolderToWake>>, SleepError>;
}

impl dyn CanSleep {
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }

    /// Marks the holder as moving, once all work that may use its memory is complete. Waits for that
    /// until `until`, and while `wanted` returns `true`. Returns `None` if it sleeps.
    pub(crate) fn begin_sleep(
        self: &Arc<Self>,
        until: Option<Instant>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Box<dyn HolderToSleep>>, SleepError> {
        self.tenant().device().own_process()?;
        let attempts = Attempts::new(until);
        let mark = || Arc::clone(self).mark(&attempts);
        let attempt = || {
            let mut marked = mark()?;
            if let Marked::Waits(work, _) = &mut marked
                && until.is_some()
            {
                work.wait()?;
                marked = mark()?;
            }
            match marked {
                Marked::Asleep => Ok(None),
                Marked::Moving(holder) => Ok(Some(holder)),
                Marked::Waits(_, busy) => Err(busy),
            }
        };
        attempts.repeat(self.tenant(), wanted, attempt)
    }
}

/// State that all attempts of one move share.
pub(crate) struct Attempts {
    /// The time until which attempts are made.
    pub(crate) until: Option<Instant>,
    /// Work that an attempt found incomplete, and the number of the holder's uses by then.
    awaited: RefCell<Option<(u64, Fence)>>,
    /// `true` if another attempt would fail as well.
    ended: Cell<bool>,
}

impl Attempts {
    const fn new(until: Option<Instant>) -> Self {
        Self {
            until,
            awaited: RefCell::new(None),
            ended: Cell::new(false),
        }
    }

    /// Makes attempts until one succeeds or fails for another reason than work, until the time is up,
    /// and while `wanted` returns `true`.
    fn repeat<T>(
        &self,
        tenant: &Tenant,
        wanted: &dyn Fn() -> bool,
        attempt: impl Fn() -> Result<T, SleepError>,
    ) -> Result<T, SleepError> {
        let again = |error: &SleepError| {
            let is_busy = matches!(
                error,
                SleepError::HeapBusy { .. } | SleepError::CacheBusy { .. }
            );
            is_busy && !self.ended.get() && wanted()
        };
        tenant.repeat(self.until, attempt, again)
    }

    /// Takes the work that an earlier attempt found incomplete, unless the holder was used since.
    pub(crate) fn awaited(&self, uses: u64) -> Option<Fence> {
        let found = self.awaited.take();
        found.and_then(|(before, work)| (before == uses).then_some(work))
    }

    /// Polls the work that the holder waits for. Keeps it for the next attempt if it is incomplete, with
    /// the number of the holder's uses.
    pub(crate) fn poll(&self, uses: u64, work: &mut Fence) -> Result<Poll, SleepError> {
        let polled = work.poll()?;
        if matches!(polled, Poll::Pending) {
            *self.awaited.borrow_mut() = Some((uses, work.clone()));
        }
        Ok(polled)
    }

    /// Makes no further attempt.
    pub(crate) fn end(&self) {
        self.ended.set(true);
    }
}

/// The outcome of an attempt to mark a holder as moving.
pub(crate) enum Marked {
    Asleep,
    Moving(Box<dyn HolderToSleep>),
    /// Work is not complete. Only a wait for it tells when it is. The error is that of a holder in use.
    Waits(Fence, SleepError),
}

/// A holder whose contents are being copied out.
pub(crate) trait MovingHolder: Sync {
    fn tenant(&self) -> &Tenant;

    /// Returns `true` if the holder sleeps only after all work of each device with access. Copies of
    /// other memory are such work.
    fn withdraws_last(&self) -> bool;

    /// Returns the time until which attempts to mark the holder were made.
    fn until(&self) -> Option<Instant>;

    /// Makes one attempt to unmap all memory, which fails if work was queued since the holder was marked
    /// that is not complete.
    fn try_withdraw(&self, attempts: &Attempts) -> Result<(), SleepError>;
}

impl dyn MovingHolder + '_ {
    /// Unmaps all memory. A holder that sleeps after all work waits for what other users of the device
    /// have queued since it was marked, as long as it waited before, while `wanted` returns `true`.
    pub(crate) fn withdraw(&self, wanted: &dyn Fn() -> bool) -> Result<(), SleepError> {
        let attempts = Attempts::new(self.until().filter(|_| self.withdraws_last()));
        attempts.repeat(self.tenant(), wanted, || self.try_withdraw(&attempts))
    }
}

/// The ranges of a holder with contents, each with the memory that they are saved in.
pub(crate) type Parts<'a> = Vec<(Span<'a>, &'a mut Saved)>;

/// A holder that falls asleep.
pub(crate) trait HolderToSleep: Send + Sync {
    /// Returns the sizes of the ranges with contents, in bytes.
    fn sizes(&self) -> Vec<u64>;

    /// Takes the memory that the contents are to be saved in, one item for each range.
    fn keep_in(&mut self, saved: &mut dyn Iterator<Item = Saved>);

    fn contents(&mut self) -> Option<(&dyn MovingHolder, Parts<'_>)>;

    /// Returns the holder, without its contents.
    fn moving(&self) -> Option<&dyn MovingHolder>;

    fn sleep(self: Box<Self>, release: bool) -> GivenUp;

    /// Puts the memory back in its place. Returns `false` if that failed: the holder then sleeps.
    fn stay(self: Box<Self>) -> bool;
}

/// A holder whose contents are being copied in.
pub(crate) trait WakingHolder: Sync {
    /// Maps the memory of the range at an index.
    fn place(&self, index: usize) -> Result<(), BlockError>;
}

/// The ranges of a waking holder with contents, each with its index and the memory that they are
/// saved in.
pub(crate) type WakingParts<'a> = Vec<(usize, Span<'a>, &'a mut Saved)>;

/// A holder that wakes.
pub(crate) trait HolderToWake: Send + Sync {
    /// Describes the memory that the holder needs.
    fn lending(&self) -> Option<Lending<'_>>;

    /// Takes the memory that was lent.
    fn take(&mut self, lent: Vec<Unmapped>);

    /// Returns the sizes of all memory, in bytes, and its contents where they were kept.
    fn parts(&self) -> (&[u64], &[Option<Saved>]);

    /// Returns the bytes of all memory.
    fn used(&self) -> u64 {
        self.parts().0.iter().sum()
    }

    /// Returns the bytes of contents.
    fn kept(&self) -> u64 {
        self.parts().1.iter().flatten().map(Saved::bytes).sum()
    }

    fn kept_in(&self) -> Option<HostStore> {
        self.parts().1.iter().flatten().next().map(Saved::store)
    }

    fn contents(&mut self) -> Option<(&dyn WakingHolder, WakingParts<'_>)>;

    /// Maps all memory without contents, and zeroes what another tenant wrote.
    fn place_memory(&mut self) -> Result<(), BlockError>;

    /// Ends the move: the holder has its memory and contents again.
    fn wake(self: Box<Self>);
}
