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
use crate::own::Stream;
use crate::pool::{
    Attempts, CanSleep, HolderId, HolderToWake, Lending, Marked, Tenant, WakingHolder, WakingParts,
};
use crate::store::Saved;

/// A cache that wakes. If this value is dropped before that, the cache sleeps on, with the contents
/// that were kept.
struct CacheToWake {
    /// `None` once the move has ended.
    waking: Option<WakingCache>,
    sizes: Vec<u64>,
    /// The contents of the extents, in their order.
    saved: Vec<Option<Saved>>,
    /// Set while fills may run.
    filling: bool,
}

/// The memory of a cache that wakes.
struct WakingCache {
    core: Arc<Core>,
    base: DeviceAddress,
    holder: HolderId,
    extents: Vec<Waking>,
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

    fn begin_wake(self: Arc<Self>) -> Result<Option<Box<dyn HolderToWake>>, SleepError> {
        let begun = begin(&self)?;
        Ok(begun.map(|one| Box::new(one) as Box<dyn HolderToWake>))
    }
}

fn begin(core: &Arc<Core>) -> Result<Option<CacheToWake>, SleepError> {
    let mut state = core.lock()?;
    let extents = match &state.rest {
        Rest::Awake => return Ok(None),
        Rest::Moving => return Err(state.busy()),
        Rest::Asleep(extents) => extents,
    };
    let ranges = extents.iter().map(|it| it.offset..it.offset + it.size);
    let holder = state.region.holder_for(ranges);
    let holder = holder.map_err(|cause| SleepError::Block {
        bytes: state.planes.in_use(),
        cause: cause.into(),
    })?;
    let Some(holder) = holder else {
        return Ok(None);
    };
    let Rest::Asleep(asleep) = std::mem::replace(&mut state.rest, Rest::Moving) else {
        return Ok(None);
    };
    let (mut extents, mut saved) = (Vec::new(), Vec::new());
    for one in asleep {
        saved.push(one.saved);
        extents.push(Waking {
            offset: one.offset,
            size: one.size,
            lent: None,
        });
    }
    Ok(Some(CacheToWake {
        sizes: extents.iter().map(|extent| extent.size).collect(),
        waking: Some(WakingCache {
            core: Arc::clone(core),
            base: state.region.address(),
            holder,
            extents,
        }),
        saved,
        filling: false,
    }))
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
    fn place(&self, index: usize) -> Result<(), BlockError> {
        self.map(index).map(drop)
    }
}

impl HolderToWake for CacheToWake {
    fn lending(&self) -> Option<Lending<'_>> {
        let waking = self.waking.as_ref()?;
        Some(Lending {
            holder: waking.holder,
            sizes: &self.sizes,
            mappings: 0,
            zeroes: false,
            whole: true,
            claims: true,
            place: None,
        })
    }

    fn take(&mut self, lent: Vec<Unmapped>) {
        let Some(waking) = &mut self.waking else {
            return;
        };
        if let Ok(state) = waking.core.lock() {
            state.region.add_lent(&lent);
        }
        for (extent, unmapped) in waking.extents.iter_mut().zip(lent) {
            extent.lent = Some(unmapped);
        }
    }

    fn parts(&self) -> (&[u64], &[Option<Saved>]) {
        (&self.sizes, &self.saved)
    }

    fn contents(&mut self) -> Option<(&dyn WakingHolder, WakingParts<'_>)> {
        let waking = self.waking.as_ref()?;
        let saved = waking.extents.iter().zip(&mut self.saved).enumerate();
        let parts = saved.filter_map(|(index, (extent, saved))| {
            let span = (waking.core).span(waking.base + extent.offset, extent.size);
            Some((index, span, saved.as_mut()?))
        });
        Some((waking, parts.collect()))
    }

    fn place_memory(&mut self) -> Result<(), BlockError> {
        let Some(waking) = &self.waking else {
            return Ok(());
        };
        let mut used = Vec::new();
        for (index, saved) in self.saved.iter().enumerate() {
            if saved.is_none() {
                used.extend(waking.map(index)?);
            }
        }
        self.filling = true;
        let state = waking.core.lock()?;
        state.region.clear_woken(&used)?;
        self.filling = false;
        Ok(())
    }

    fn wake(mut self: Box<Self>) {
        let Some(WakingCache { core, extents, .. }) = self.waking.take() else {
            return;
        };
        // The pool releases no memory that has another holder: from here on it may take this.
        drop(extents);
        if let Ok(mut state) = core.lock() {
            state.set_awake();
        }
    }
}

impl Drop for CacheToWake {
    fn drop(&mut self) {
        let Some(WakingCache { core, extents, .. }) = self.waking.take() else {
            return;
        };
        // In a forked child nothing is unmapped: another thread may have held the lock.
        let Ok(mut state) = core.lock() else {
            return;
        };
        let saved = self.saved.iter_mut().flatten();
        let copying = saved.flat_map(|saved| saved.unfinished().to_vec());
        let copying: Vec<Stream> = copying.collect();
        let (mut lent, mut asleep) = (Vec::new(), Vec::new());
        for (extent, saved) in extents.into_iter().zip(std::mem::take(&mut self.saved)) {
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
