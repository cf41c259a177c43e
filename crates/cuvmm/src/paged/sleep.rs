//! A cache falls asleep: it is marked, its extents are unmapped, and they are given up. The addresses
//! stay, and so do the uses of blocks.
//!
//! The operation keeps a copy of each physical until the cache sleeps, so that a failure can map them
//! again. A cache that cannot be put back sleeps whole, with its contents.
//!
//! `unsafe` here: naming the memory of a moving cache as ranges to copy from and to.
//!
//! Keeps I-107, I-111 and I-125.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use cuvmm_driver::DeviceAddress;

use super::core::Core;
use super::rest::{Rest, Sleeping};
use super::state::State;
use crate::error::{MemoryError, SleepError};
use crate::extents::{Fence, Poll};
use crate::own::{Span, Stream};
use crate::pool::{Attempts, GivenUp, HolderToSleep, Marked, MovingHolder, Tenant};
use crate::region::{MemoryInUse, Region};
use crate::store::Saved;

/// A cache that falls asleep, which is marked as moving and kept alive.
struct MovingCache {
    core: Arc<Core>,
    base: DeviceAddress,
    until: Option<Instant>,
    /// The number of steps that had begun when the cache was marked.
    begun: u64,
    /// The extents with contents, by their offsets.
    memory: MemoryInUse,
}

impl Core {
    /// [Polls](Attempts::poll) the work that must be complete before the cache sleeps. Steps use it.
    fn poll(&self, state: &State, attempts: &Attempts) -> Result<(Poll, Fence), SleepError> {
        let users = || state.region.users().cloned().collect();
        let users = self.sleeps_after_all_work.then(users);
        let own = state.region.work_after(&self.home);
        attempts.poll(state.begun(), own, users)
    }

    /// Returns a range of the memory of a moving cache.
    pub(super) fn span(&self, address: DeviceAddress, size: u64) -> Span<'_> {
        // SAFETY: memory of a moving cache is unmapped only by the operation that moves it. That
        // operation has waited for the copies before, or keeps memory that they may use mapped.
        // Where nothing is mapped the driver refuses a copy, which harms nothing.
        unsafe { Span::new(self.tenant.device(), address, size) }
    }
}

/// Makes one attempt to mark a cache as moving. A capture guard waits for polls and not for the lock,
/// which a thread may hold that waits for work: so the lock is taken first.
pub(super) fn mark(core: &Arc<Core>, attempts: &Attempts) -> Result<Marked, SleepError> {
    core.tenant.device().usable()?;
    let mut state = core.lock()?;
    let polling = core.tenant.polling().ok_or(MemoryError::Capturing)?;
    let marked = state.mark(core, attempts);
    drop(state);
    // The driver may panic in work of the pool that was put off. The cache then stays awake.
    drop(polling);
    marked
}

impl State {
    fn mark(&mut self, core: &Arc<Core>, attempts: &Attempts) -> Result<Marked, SleepError> {
        match self.rest {
            Rest::Asleep(_) => return Ok(Marked::Asleep),
            Rest::Moving { .. } => return Err(self.busy()),
            Rest::Awake => self.check_no_step()?,
        }
        match core.poll(self, attempts)? {
            (Poll::Complete, _) => {}
            (Poll::Pending, _) => return Err(self.busy()),
            (Poll::NeedsSynchronise, work) => return Ok(Marked::Waits(work, self.busy())),
        }
        self.rest = Rest::Moving { charged: true };
        Ok(Marked::Moving(HolderToSleep::new(MovingCache {
            core: Arc::clone(core),
            base: self.region.address(),
            until: attempts.until,
            begun: self.begun(),
            memory: self.region.memory_in_use(),
        })))
    }
}

impl MovingCache {
    /// Gives the memory up: the cache sleeps with these contents.
    fn settle_asleep(&mut self, saved: Vec<Saved>, running: Vec<Stream>, release: bool) -> GivenUp {
        let memory = std::mem::take(&mut self.memory);
        let Ok(mut state) = self.core.lock() else {
            return GivenUp::default();
        };
        let mut saved = saved.into_iter();
        let extents = memory.iter().map(|(offset, physical)| Sleeping {
            offset: *offset,
            size: physical.size(),
            saved: saved.next(),
        });
        // First: the driver may panic in the calls that follow.
        state.rest = Rest::Asleep(extents.collect());
        let running = |_: &Region| running_on(running, None);
        state.region.give_up_asleep(memory, running, release)
    }
}

impl MovingHolder for MovingCache {
    fn tenant(&self) -> &Tenant {
        &self.core.tenant
    }

    fn withdraws_last(&self) -> bool {
        self.core.sleeps_after_all_work
    }

    fn until(&self) -> Option<Instant> {
        self.until
    }

    fn try_withdraw(&self, attempts: &Attempts) -> Result<(), SleepError> {
        let core = &self.core;
        let mut state = core.lock()?;
        let _polling = core.tenant.polling().ok_or(MemoryError::Capturing)?;
        // Also if the step has ended: its work may have written what had been copied.
        if state.begun() != self.begun {
            attempts.end();
            return Err(state.busy());
        }
        let (polled, mut work) = core.poll(&state, attempts)?;
        match polled {
            Poll::Complete => {}
            Poll::Pending => return Err(state.busy()),
            Poll::NeedsSynchronise => drop(work.wait()?),
        }
        Ok(state.region.unmap_in_use(&work)?)
    }

    fn spans(&self) -> Vec<Span<'_>> {
        let memory = self.memory.iter();
        let spans = memory.map(|(at, it)| self.core.span(self.base + *at, it.size()));
        spans.collect()
    }

    fn fall_asleep(mut self: Box<Self>, saved: Vec<Saved>, release: bool) -> GivenUp {
        self.settle_asleep(saved, Vec::new(), release)
    }

    fn put_back(self: Box<Self>, saved: Vec<Saved>, copying: Vec<Stream>) -> bool {
        let core = Arc::clone(&self.core);
        // Dropped after the lock.
        let mut asleep = FallsAsleep {
            cache: self,
            saved,
            copying,
            stays_awake: false,
        };
        // In a forked child nothing is put back: another thread may have held the lock.
        let Ok(mut state) = core.lock() else {
            return true;
        };
        if let Err(error) = state.region.map_again(&asleep.cache.memory) {
            log!(error, %error, "a paged cache that should have stayed awake sleeps");
            return false;
        }
        asleep.stays_awake = true;
        // The pool releases no memory that has another holder: from here on it may take this.
        asleep.cache.memory.clear();
        state
            .region
            .note_queued(std::mem::take(&mut asleep.copying));
        state.set_awake();
        true
    }
}

/// A cache that lacks memory and sleeps with its contents, which may still be copied on some streams.
/// The drop gives its memory up, also after a panic of the driver in a call that maps it. Memory is
/// missing because it was unmapped, so all other work had been found complete.
struct FallsAsleep {
    cache: Box<MovingCache>,
    saved: Vec<Saved>,
    copying: Vec<Stream>,
    stays_awake: bool,
}

impl Drop for FallsAsleep {
    fn drop(&mut self) {
        if !self.stays_awake {
            let saved = std::mem::take(&mut self.saved);
            let copying = std::mem::take(&mut self.copying);
            self.cache.settle_asleep(saved, copying, false);
        }
    }
}

/// Returns a fence over copies on some streams, and over fills, that may still be running.
pub(super) fn running_on(copying: Vec<Stream>, fills: Option<Fence>) -> Fence {
    let mut running = Fence::streams(copying);
    let mut ended = running.poll().map(drop);
    if let Some(mut fills) = fills {
        ended = ended.and(fills.wait().map(drop));
        running.merge(fills);
    }
    if let Err(error) = ended {
        log!(warn, %error, "copies of a cache's memory may still be running");
    }
    running
}
