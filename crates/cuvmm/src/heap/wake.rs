//! A heap wakes: it is lent as many bytes as it gave up, in extents of the same sizes, which are
//! mapped at all addresses of the extents before them.
//!
//! Extents whose contents were lost and that another tenant wrote to are zeroed. A failure unmaps
//! everything, and the heap sleeps on with its contents.
//!
//! No byte is copied here.
//!
//! Keeps I-119.

use std::ops::Range;
use std::sync::Arc;

use super::allocation::Shared;
use super::core::State;
use super::extents::ExtentId;
use super::rest::{Contents, Rest};
use super::sleep::{self, busy};
use crate::error::{BlockError, MemoryError, SleepError};
use crate::extents::{LastWriter, Unmapped, wait_for};
use crate::own::{Span, Stream};
use crate::pool::{
    Attempts, CanSleep, Given, HolderId, HolderToWake, Marked, Tenant, WakingHolder,
};
use crate::store::Saved;

/// The memory of a heap that wakes.
struct WakingHeap {
    shared: Arc<Shared>,
    extents: Vec<Waking>,
    /// The number of all mappings.
    mappings: u64,
    /// The stream of fills that may still run.
    filling: Option<Stream>,
}

struct Waking {
    id: ExtentId,
    /// The addresses, the first of which names the contents.
    at: Vec<u64>,
    size: u64,
    lent: Option<Unmapped>,
}

impl CanSleep for Shared {
    fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    fn is_heap(&self) -> bool {
        true
    }

    fn mark(self: Arc<Self>, attempts: &Attempts) -> Result<Marked, SleepError> {
        sleep::mark(&self, attempts)
    }

    fn begin_wake(self: Arc<Self>) -> Result<Option<HolderToWake>, SleepError> {
        let core = &self.core;
        core.device.own_process()?;
        let mut state = core.lock();
        if matches!(state.rest, Rest::Asleep(_)) {
            state.check_no_mapping_is_stuck()?;
        }
        let busy = busy(&state);
        let Some(mut contents) = state.rest.begin_wake(busy)? else {
            return Ok(None);
        };
        let extents = state.large.extents().map(|(id, extent)| Waking {
            id,
            at: extent.mappings.iter().map(|mapping| mapping.at).collect(),
            size: extent.size,
            lent: None,
        });
        let extents: Vec<Waking> = extents.collect();
        let mut take = |id| {
            let index = contents.iter().position(|&(of, _)| of == id)?;
            Some(contents.swap_remove(index).1)
        };
        let saved = extents.iter().map(|extent| take(extent.id)).collect();
        let mappings = state.large.mappings();
        drop(state);
        let waking = WakingHeap {
            shared: self,
            mappings,
            extents,
            filling: None,
        };
        Ok(Some(HolderToWake::new(waking, saved)))
    }
}

impl State {
    /// Refuses to wake a heap at addresses that a stuck mapping has.
    fn check_no_mapping_is_stuck(&self) -> Result<(), SleepError> {
        for (_, extent) in self.large.extents() {
            for at in extent.mappings.iter().map(|mapping| mapping.at) {
                let stuck = self.spaces.stuck_at(at, extent.size);
                if stuck > 0 {
                    let cause = MemoryError::Quarantined {
                        range: at..at + extent.size,
                        bytes: stuck,
                    };
                    return Err(SleepError::Block {
                        bytes: self.large.held(),
                        cause: cause.into(),
                    });
                }
            }
        }
        Ok(())
    }
}

impl Waking {
    fn range(&self) -> Range<u64> {
        let at = self.at.first().copied().unwrap_or(0);
        at..at + self.size
    }
}

impl WakingHeap {
    /// Returns the range of an extent that another tenant wrote to, if the pool scrubs.
    fn stale(&self, index: usize) -> Option<Range<u64>> {
        let extent = self.extents.get(index)?;
        let writer = extent.lent.as_ref()?.last_writer?;
        let is_stale =
            writer.by != self.shared.core.writer && self.shared.tenant.lending_terms().scrubs;
        is_stale.then(|| extent.range())
    }
}

impl WakingHolder for WakingHeap {
    fn holder(&self) -> (HolderId, u64) {
        let beside = self.mappings - self.extents.len() as u64;
        (self.shared.holder, beside)
    }

    fn spans(&self) -> Vec<Span<'_>> {
        let extents = self.extents.iter();
        let spans = extents.map(|extent| self.shared.core.span(&extent.range()));
        spans.collect()
    }

    fn take(&mut self, lent: Vec<Unmapped>) {
        for (extent, unmapped) in self.extents.iter_mut().zip(lent) {
            extent.lent = Some(unmapped);
        }
        self.shared.core.lock().rest = Rest::Moving { charged: true };
    }

    /// Maps an extent at all its addresses.
    fn place(&self, index: usize) -> Result<(), BlockError> {
        let Some(extent) = self.extents.get(index) else {
            return Ok(());
        };
        let core = &self.shared.core;
        for &at in &extent.at {
            let part = core.lock().spaces.part(at);
            let Some((part, lent)) = part.zip(extent.lent.as_ref()) else {
                continue;
            };
            let unmapped = Unmapped {
                physical: lent.physical.clone(),
                last_writer: lent.last_writer,
                fresh: false,
            };
            let placed = part.place(at, unmapped);
            let placed = placed.map_err(|failed| self.shared.tenant.not_placed(failed.error))?;
            core.lock().spaces.adopt(placed);
        }
        Ok(())
    }

    fn place_blank(&mut self, indices: &[usize]) -> Result<(), BlockError> {
        for &index in indices {
            self.place(index)?;
            let core = &self.shared.core;
            if let Some(range) = self.stale(index) {
                let stream = match &self.filling {
                    Some(stream) => stream,
                    None => self.filling.insert(Stream::new(&core.device)?),
                };
                let size = range.end - range.start;
                core.lock().spaces.zero(stream, range.start, size)?;
            }
        }
        if let Some(stream) = &self.filling {
            wait_for(stream).map_err(|failed| failed.error)?;
            self.filling = None;
        }
        Ok(())
    }

    fn wake(self: Box<Self>) {
        let core = &self.shared.core;
        let mut state = core.lock();
        for extent in self.extents {
            let physical = extent.lent.map(|lent| lent.physical);
            if let Some(place) = state.physicals.get_mut(extent.id) {
                *place = physical;
            }
        }
        state.counts.mapped += self.mappings;
        state.set_awake(core);
    }

    fn sleep_on(mut self: Box<Self>, saved: Vec<Option<Saved>>, copying: Vec<Stream>) {
        // As for a heap that falls asleep.
        if self.shared.core.device.is_forked() {
            return;
        }
        // Memory is not unmapped under a fill or a copy.
        let filling = self.filling.take();
        let staying = StaysAsleep {
            waking: *self,
            saved,
        };
        let filling = filling.filter(|it| wait_for(it).is_err_and(|failed| !failed.ended));
        let running = filling.into_iter().chain(copying).collect();
        staying.waking.shared.core.unmap_or_keep(running);
    }
}

/// A heap that sleeps on with its contents. The drop gives its memory back, also after a panic of the
/// driver in a call that unmaps memory: what is mapped then is quarantined.
struct StaysAsleep {
    waking: WakingHeap,
    saved: Vec<Option<Saved>>,
}

impl Drop for StaysAsleep {
    fn drop(&mut self) {
        let extents = std::mem::take(&mut self.waking.extents);
        let Shared {
            core,
            tenant,
            holder,
        } = &*self.waking.shared;
        let mut state = core.lock();
        state.keep_mapped();
        let (mut given, mut kept) = (Given::default(), Contents::new());
        for (extent, saved) in extents.into_iter().zip(std::mem::take(&mut self.saved)) {
            kept.extend(saved.map(|saved| (extent.id, saved)));
            let Some(mut lent) = extent.lent else {
                continue;
            };
            // Contents of the heap may lie over those of another tenant.
            lent.last_writer = Some(LastWriter {
                by: LastWriter::SEVERAL,
                blank: false,
            });
            let stuck = |&&at: &&u64| state.spaces.stuck_at(at, extent.size) > 0;
            let stuck = extent.at.iter().filter(stuck).count();
            given.mappings += (extent.at.len() - stuck) as u64;
            given.extents.push(lent);
        }
        state.rest = Rest::Asleep(kept);
        drop(state);
        tenant.give_up(*holder, given);
    }
}
