//! The memory of a heap that the pool may take.
//!
//! The pool asks for figures under its own lock, so these functions take the heap's lock under it.
//! Memory is unmapped without either lock.
//!
//! Keeps I-75.

use std::sync::atomic::Ordering;

use super::core::{Core, PINNED, REPORTS, unmap};
use super::extents::ExtentId;
use super::tag::{Tag, Tagged};
use crate::error::CallError;
use crate::extents::{Fence, LastWriter, Space, Unmapped};
use crate::pool::{Given, Holder, HolderFigures, HolderId, Tenant};

impl Holder for Core {
    fn figures(&self) -> HolderFigures {
        let state = self.lock_drained();
        let (large, small) = (&state.large, &state.small);
        let free = large.free() + small.free_bytes();
        let used = large.held() - free;
        let (_, exported) = state.exported();
        if !state.rest.is_charged() {
            return HolderFigures {
                asleep: large.held(),
                ..HolderFigures::default()
            };
        }
        if self.has(PINNED) || !state.rest.is_awake() {
            return HolderFigures {
                held: large.held(),
                in_use: large.held(),
                kept: free,
                exported,
                ..HolderFigures::default()
            };
        }
        // An allocation that is being made is counted already.
        let in_use = (state.counts.live + state.counts.making).min(used);
        HolderFigures {
            held: large.held(),
            in_use,
            padding: used - in_use,
            pending_free: free - large.ready() - small.ready(),
            idle: large.idle(),
            exported,
            ..HolderFigures::default()
        }
    }

    fn reclaimable(&self, polls: bool) -> Vec<u64> {
        let mut state = self.lock_drained();
        state.refresh(polls);
        if self.has(PINNED) {
            return Vec::new();
        }
        state.idle().into_iter().map(|(_, size)| size).collect()
    }

    fn give(&self, wanted: u64, given: &mut Given) {
        if self.has(PINNED) {
            return;
        }
        let chosen: Vec<ExtentId> = {
            let mut state = self.lock();
            state.refresh(false);
            let mut bytes = 0;
            let mut chosen = Vec::new();
            for (id, size) in state.idle() {
                if bytes >= wanted {
                    break;
                }
                bytes += size;
                chosen.push(id);
                state.large.settle(id, false);
            }
            chosen
        };
        self.take_extents(chosen, given);
    }

    fn tidy(&self) -> Given {
        let many = {
            let state = self.lock();
            let kept = state.most_retired(self.addresses) / 2;
            state.retired.len().saturating_sub(kept)
        };
        Given {
            mappings: self.unmap_retired(many),
            ..Given::default()
        }
    }

    fn settle(&self) -> Result<(), CallError> {
        let mut fence = {
            let state = self.lock_drained();
            let mut all = Tag::Ready;
            let mut points = Vec::new();
            let parts: [&dyn Tagged; 2] = [&state.large, &state.small];
            let mut see = |point| points.push(point);
            parts.iter().for_each(|part| part.for_each_point(&mut see));
            all.merge(&Tag::of(points));
            state.streams.fence(&all)
        };
        fence.wait()?;
        self.lock().refresh(false);
        Ok(())
    }

    fn report_freed(&self, yes: bool) {
        self.set(REPORTS, yes);
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    fn take_free_spaces(&self) -> Vec<Space> {
        self.lock().take_free_spaces()
    }

    fn take_spaces(&self) -> Vec<Space> {
        self.lock().spaces.take_all()
    }
}

/// Extents that are not settled, and are when this is dropped, also because the driver panics.
struct Unsettled<'a>(&'a Core, std::vec::IntoIter<ExtentId>);

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        for id in self.1.by_ref() {
            self.0.lock().large.settle(id, true);
        }
    }
}

impl Core {
    /// Unmaps extents that are not settled, until the driver refuses. The others stay, settled.
    fn take_extents(&self, extents: Vec<ExtentId>, given: &mut Given) {
        let extents = extents.into_iter();
        let mut left = Unsettled(self, extents);
        while given.error.is_none()
            && let Some(id) = left.1.next()
        {
            given.error = self.take_extent(id, given).err();
        }
    }

    /// Gives extents that are not settled to the driver (`cuMemUnmap`, `cuMemRelease`). What the
    /// driver refuses to unmap stays free in the heap.
    pub(super) fn release_extents(
        &self,
        (tenant, holder): (&Tenant, HolderId),
        extents: Vec<ExtentId>,
    ) {
        tenant.give_up_by(holder, true, |given| self.take_extents(extents, given));
    }

    /// Unmaps an extent that is not settled. On failure its other mappings stay.
    fn take_extent(&self, id: ExtentId, given: &mut Given) -> Result<(), CallError> {
        let mappings: Vec<u64> = {
            let state = self.lock();
            let extent = state.large.extent(id);
            let mappings = extent.iter().flat_map(|extent| &extent.mappings);
            mappings.map(|mapping| mapping.at).collect()
        };
        for at in mappings {
            let Some(placed) = self.lock().spaces.remove(at) else {
                continue;
            };
            let size = placed.size();
            let outcome = unmap(placed, &Fence::complete());
            let mut state = self.lock();
            match outcome {
                Ok(_) => {
                    given.mappings += 1;
                    state.large.remove_mapping(id, at);
                    state.gaps.give(at, size);
                }
                Err((placed, error)) => {
                    state.spaces.adopt(placed);
                    state.large.settle(id, true);
                    return Err(error);
                }
            }
        }
        let mut state = self.lock();
        state.large.remove_extent(id);
        let physical = state.physicals.get_mut(id).and_then(Option::take);
        let writer = LastWriter {
            by: self.writer,
            blank: false,
        };
        given.extents.extend(physical.map(|physical| Unmapped {
            physical,
            last_writer: Some(writer),
            fresh: false,
        }));
        Ok(())
    }
}
