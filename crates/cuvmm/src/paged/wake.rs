//! A cache wakes: it is lent as many bytes as it gave up, in extents of the same sizes, which are
//! mapped at the same addresses.
//!
//! Extents whose contents were lost are zeroed if they were used before, by whichever tenant. A
//! failure unmaps everything, and the cache sleeps on with its contents.
//!
//! No byte is copied here.

use std::sync::Arc;

use cuvmm_driver::DeviceAddress;

use super::core::Core;
use super::rest::{Rest, Sleeping};
use super::sleep::{self, running_on};
use crate::error::{BlockError, SleepError};
use crate::extents::Unmapped;
use crate::own::{Span, Stream};
use crate::pool::{Attempts, CanSleep, HolderId, HolderToWake, Marked, Tenant, WakingHolder};
use crate::store::Saved;

/// The memory of a cache that wakes.
struct WakingCache {
    core: Arc<Core>,
    base: DeviceAddress,
    holder: HolderId,
    extents: Vec<Waking>,
    /// Set while fills may run.
    filling: bool,
}

struct Waking {
    offset: u64,
    size: u64,
    lent: Option<Unmapped>,
}

impl CanSleep for Core {
    fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    fn is_heap(&self) -> bool {
        false
    }

    fn mark(self: Arc<Self>, attempts: &Attempts) -> Result<Marked, SleepError> {
        sleep::mark(&self, attempts)
    }

    fn begin_wake(self: Arc<Self>) -> Result<Option<HolderToWake>, SleepError> {
        let mut state = self.lock()?;
        let Some(holder) = state.region.holder() else {
            return Ok(None);
        };
        if let Rest::Asleep(extents) = &state.rest {
            let mut ranges = extents.iter().map(|it| it.offset..it.offset + it.size);
            let free = ranges.try_for_each(|range| state.region.check_not_stuck(&range));
            free.map_err(|cause| SleepError::Block {
                bytes: state.planes.in_use(),
                cause: cause.into(),
            })?;
        }
        let busy = state.busy();
        let Some(asleep) = state.rest.begin_wake(busy)? else {
            return Ok(None);
        };
        let extents = asleep.into_iter().map(|one| {
            let extent = Waking {
                offset: one.offset,
                size: one.size,
                lent: None,
            };
            (extent, one.saved)
        });
        let (extents, saved) = extents.unzip();
        let base = state.region.address();
        drop(state);
        let waking = WakingCache {
            core: self,
            base,
            holder,
            extents,
            filling: false,
        };
        Ok(Some(HolderToWake::new(waking, saved)))
    }
}

impl WakingCache {
    /// Maps an extent. Returns its offset if it was used before.
    fn map(&self, index: usize) -> Result<Option<u64>, BlockError> {
        let Some((extent, lent)) = self
            .extents
            .get(index)
            .and_then(|extent| Some((extent, extent.lent.as_ref()?)))
        else {
            return Ok(None);
        };
        let mut state = self.core.lock()?;
        let was_used = state.region.place_woken(extent.offset, lent)?;
        Ok(was_used.then_some(extent.offset))
    }
}

impl WakingHolder for WakingCache {
    fn holder(&self) -> (HolderId, u64) {
        (self.holder, 0)
    }

    fn spans(&self) -> Vec<Span<'_>> {
        let extents = self.extents.iter();
        let spans = extents.map(|it| self.core.span(self.base + it.offset, it.size));
        spans.collect()
    }

    fn take(&mut self, lent: Vec<Unmapped>) {
        if let Ok(state) = self.core.lock() {
            state.region.add_lent(&lent);
        }
        for (extent, unmapped) in self.extents.iter_mut().zip(lent) {
            extent.lent = Some(unmapped);
        }
    }

    fn place(&self, index: usize) -> Result<(), BlockError> {
        self.map(index).map(drop)
    }

    fn place_blank(&mut self, indices: &[usize]) -> Result<(), BlockError> {
        let mut used = Vec::new();
        for &index in indices {
            used.extend(self.map(index)?);
        }
        self.filling = true;
        let state = self.core.lock()?;
        state.region.clear_woken(&used)?;
        drop(state);
        self.filling = false;
        Ok(())
    }

    fn wake(self: Box<Self>) {
        // The pool releases no memory that has another holder: from here on it may take this.
        drop(self.extents);
        if let Ok(mut state) = self.core.lock() {
            state.set_awake();
        }
    }

    fn sleep_on(self: Box<Self>, saved: Vec<Option<Saved>>, copying: Vec<Stream>) {
        // In a forked child nothing is unmapped: another thread may have held the lock.
        let Ok(mut state) = self.core.lock() else {
            return;
        };
        let (mut lent, mut asleep) = (Vec::new(), Vec::new());
        for (extent, saved) in self.extents.into_iter().zip(saved) {
            let Waking {
                offset,
                size,
                lent: memory,
            } = extent;
            lent.extend(memory.map(|memory| (offset, memory)));
            asleep.push(Sleeping {
                offset,
                size,
                saved,
            });
        }
        // First: the driver may panic in the calls that follow.
        state.rest = Rest::Asleep(asleep);
        let filling = self.filling;
        state.region.give_back_lent(lent, |region| {
            running_on(copying, filling.then(|| region.fills()))
        });
    }
}
