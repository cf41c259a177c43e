//! A heap falls asleep: it is marked, all mappings of its extents are unmapped, aliases too, and
//! the extents are given up. The addresses stay.
//!
//! The heap keeps its physicals until it sleeps, so that a failure can map them again at each of
//! their addresses. Memory is unmapped when all contents have been copied: a heap that cannot be
//! put back sleeps whole, with its contents.
//!
//! Work of a graph that is launched is known to no stream of the heap. So a heap [for
//! graphs](super::HeapBuilder::for_graphs) waits for all work of each device with access.
//!
//! No byte is copied here.
//!
//! `unsafe` here: naming the memory of a moving heap as ranges to copy from.
//!
//! Keeps I-95 and I-125.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cuvmm_driver::DeviceAddress;

use super::allocation::Shared;
use super::core::{Core, Locked, PINNED, REPORTS, STILL, State, unmap};
use super::extents::{Extent, ExtentId};
use super::rest::{Contents, Rest};
use crate::error::{MemoryError, SleepError};
use crate::extents::{Fence, LastWriter, Poll, Unmapped};
use crate::own::{Span, Stream};
use crate::pool::{Attempts, Given, GivenUp, HolderToSleep, Marked, MovingHolder, Tenant};
use crate::store::Saved;

/// A heap that falls asleep, which is marked as moving and kept alive.
struct MovingHeap {
    shared: Arc<Shared>,
    until: Option<Instant>,
    /// The extents with contents, and the addresses of one mapping of each.
    parts: Vec<(ExtentId, Range<u64>)>,
}

pub(super) fn busy(state: &State) -> SleepError {
    SleepError::HeapBusy {
        bytes: state.large.held(),
    }
}

/// Makes one attempt to mark a heap as moving.
pub(super) fn mark(shared: &Arc<Shared>, attempts: &Attempts) -> Result<Marked, SleepError> {
    let core = &shared.core;
    core.device.usable()?;
    // The pool's lock is never taken under the heap's.
    let polling = shared.tenant.polling().ok_or(MemoryError::Capturing)?;
    let mut state = core.lock();
    match state.rest {
        Rest::Asleep(_) => return Ok(Marked::Asleep),
        Rest::Moving { .. } => return Err(busy(&state)),
        Rest::Awake => {}
    }
    // No stream cache gets an allocation from here on. Changed under the lock alone, so that no other
    // attempt ends that.
    core.set(STILL, true);
    core.drain_all(&mut state);
    let marked = shared.mark(&mut state, attempts);
    if state.rest.is_awake() {
        core.set(STILL, false);
    }
    drop(state);
    // The driver may panic in work of the pool that was put off. The heap then stays awake.
    drop(polling);
    marked
}

impl Shared {
    fn mark(
        self: &Arc<Self>,
        state: &mut Locked<'_>,
        attempts: &Attempts,
    ) -> Result<Marked, SleepError> {
        let core = &self.core;
        let (extents, bytes) = state.exported();
        if extents > 0 {
            return Err(SleepError::Exported {
                blocks: extents,
                bytes,
            });
        }
        let moves = |extent: &Extent| !extent.settled || extent.is_leaving();
        let any_moves = state.large.extents().any(|(_, extent)| moves(extent));
        if state.counts.making > 0 || state.offers_begun > 0 || any_moves {
            return Err(busy(state));
        }
        match core.poll(state, attempts)? {
            (Poll::Complete, _) => {}
            (Poll::Pending, _) => return Err(busy(state)),
            (Poll::NeedsSynchronise, work) => return Ok(Marked::Waits(work, busy(state))),
        }
        let keeps = |extent: &Extent| core.has(PINNED) || !extent.is_free();
        let extents = state.large.extents();
        let parts = extents.filter(|(_, extent)| keeps(extent));
        let parts = parts.filter_map(|(id, extent)| {
            let at = extent.mappings.first()?.at;
            Some((id, at..at + extent.size))
        });
        let parts = parts.collect();
        state.large.settle_all(false);
        state.rest = Rest::Moving { charged: true };
        Ok(Marked::Moving(HolderToSleep::new(MovingHeap {
            shared: Arc::clone(self),
            until: attempts.until,
            parts,
        })))
    }
}

impl Core {
    /// [Polls](Attempts::poll) the work that must be complete before the heap sleeps, which for a heap for
    /// graphs is all work.
    fn poll(&self, state: &State, attempts: &Attempts) -> Result<(Poll, Fence), SleepError> {
        let users = self.has(PINNED).then(|| state.spaces.users());
        attempts.poll(0, state.streams.all_work(), users)
    }

    /// Returns a range of the memory of a moving heap.
    pub(super) fn span(&self, range: &Range<u64>) -> Span<'_> {
        // SAFETY: memory of a moving heap is unmapped only by the operation that moves it. That
        // operation has waited for the copies before, or keeps memory that they may use mapped.
        // Where nothing is mapped the driver refuses a copy, which harms nothing.
        unsafe {
            let address = DeviceAddress(range.start);
            Span::new(&self.device, address, range.end - range.start)
        }
    }

    /// Unmaps all mappings, up to the first that the driver refuses twice to unmap.
    fn unmap_all(&self) -> Result<(), SleepError> {
        let mappings = self.lock().large.all_mappings();
        for (_, at) in mappings {
            let Some(placed) = self.lock().spaces.remove(at) else {
                continue;
            };
            if let Err((placed, error)) = unmap(placed, &Fence::complete()) {
                self.lock().spaces.adopt(placed);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Maps the physicals again at all their addresses. Asks the driver twice.
    fn map_again(&self) -> Result<(), MemoryError> {
        let mappings = self.lock().large.all_mappings();
        for (id, at) in mappings {
            let (part, physical) = {
                let state = self.lock();
                if state.spaces.has(at) {
                    continue;
                }
                let physical = state.physicals.get(id).cloned().flatten();
                (state.spaces.part(at), physical)
            };
            let Some((part, physical)) = part.zip(physical) else {
                continue;
            };
            let place = || {
                part.place(
                    at,
                    Unmapped {
                        physical: physical.clone(),
                        last_writer: None,
                        fresh: false,
                    },
                )
            };
            let placed = place().or_else(|failed| match failed.stuck {
                0 => {
                    log!(warn, error = %failed.error, "a roll-back is tried again");
                    drop(failed);
                    place()
                }
                _ => Err(failed),
            });
            let placed = placed.map_err(|failed| failed.error)?;
            self.lock().spaces.adopt(placed);
        }
        Ok(())
    }

    /// Unmaps all mappings of a moving heap, which only the work of these streams may use. Asks the
    /// driver twice. Leaves those that cannot be unmapped mapped for good, all of them while the work
    /// is not complete.
    pub(super) fn unmap_or_keep(&self, running: Vec<Stream>) {
        let mut work = Fence::streams(running);
        if let Err(error) = work.poll() {
            log!(warn, %error, "copies of a heap's memory may still be running");
        }
        let mappings = self.lock().large.all_mappings();
        for (_, at) in mappings {
            let Some(placed) = self.lock().spaces.remove(at) else {
                continue;
            };
            // What is dropped is stuck.
            if let Err((_, error)) = unmap(placed, &work) {
                log!(error, %error, "a roll-back could not unmap: quarantined");
            }
        }
    }
}

impl State {
    /// Leaves all that is mapped mapped for good, after a panic of the driver.
    pub(super) fn keep_mapped(&mut self) {
        for (_, at) in self.large.all_mappings() {
            // What is dropped is stuck.
            drop(self.spaces.remove(at));
        }
    }

    /// Takes all physicals out, of which nothing is mapped but stuck mappings. Extents that are
    /// free and that no graph needs leave the heap.
    fn take_physicals(&mut self, pinned: bool, writer: u64) -> Given {
        let mut given = Given::default();
        for (id, at) in self.large.all_mappings() {
            let extent = self.large.extent(id);
            let (size, is_free) = extent.map_or((0, false), |it| (it.size, it.is_free()));
            let is_stuck = self.spaces.stuck_at(at, size) > 0;
            given.mappings += u64::from(!is_stuck);
            let physical = self.physicals.get_mut(id).and_then(Option::take);
            given.extents.extend(physical.map(|physical| Unmapped {
                physical,
                last_writer: Some(LastWriter {
                    by: writer,
                    blank: false,
                }),
                fresh: false,
            }));
            if is_free && !pinned {
                self.large.remove_mapping(id, at);
                if !is_stuck {
                    self.gaps.give(at, size);
                }
                if self
                    .large
                    .extent(id)
                    .is_some_and(|it| it.mappings.is_empty())
                {
                    self.large.remove_extent(id);
                }
            }
        }
        given
    }

    /// Notes copies of the memory that may still be running.
    fn are_read_on(&mut self, streams: &[Stream]) {
        for stream in streams {
            let id = self.streams.id(stream);
            let work = self.streams.now(id);
            self.large.add_work(&work);
        }
    }
}

impl MovingHolder for MovingHeap {
    fn tenant(&self) -> &Tenant {
        &self.shared.tenant
    }

    fn withdraws_last(&self) -> bool {
        self.core().has(PINNED)
    }

    fn until(&self) -> Option<Instant> {
        self.until
    }

    fn try_withdraw(&self, attempts: &Attempts) -> Result<(), SleepError> {
        let core = self.core();
        let polling = self.shared.tenant.polling().ok_or(MemoryError::Capturing)?;
        let state = core.lock();
        let polled = core.poll(&state, attempts);
        let busy = busy(&state);
        drop(state);
        drop(polling);
        match polled? {
            (Poll::Complete, _) => {}
            (Poll::Pending, _) => return Err(busy),
            (Poll::NeedsSynchronise, mut work) => drop(work.wait()?),
        }
        core.unmap_all()
    }

    fn spans(&self) -> Vec<Span<'_>> {
        let ranges = self.parts.iter().map(|(_, range)| range);
        ranges.map(|range| self.core().span(range)).collect()
    }

    fn fall_asleep(self: Box<Self>, saved: Vec<Saved>, release: bool) -> GivenUp {
        self.settle_asleep(saved, release)
    }

    fn put_back(self: Box<Self>, saved: Vec<Saved>, copying: Vec<Stream>) -> bool {
        let core = self.core();
        // The heap's lock may be held by a thread that a forked child lacks.
        if core.device.is_forked() {
            return true;
        }
        let mut asleep = FallsAsleep {
            heap: &self,
            saved: Some(saved),
        };
        let Err(error) = core.map_again() else {
            asleep.saved = None;
            let mut state = core.lock();
            state.are_read_on(&copying);
            state.set_awake(core);
            drop(state);
            self.shared.tenant.note_freed(core.has(REPORTS));
            return true;
        };
        log!(error, %error, "a heap that should have stayed awake sleeps");
        // Memory is missing, so `withdraw` has unmapped some: it had found all other work complete.
        core.unmap_or_keep(copying);
        false
    }
}

impl MovingHeap {
    fn core(&self) -> &Core {
        &self.shared.core
    }

    /// Gives the memory up: the heap sleeps with these contents.
    fn settle_asleep(&self, saved: Vec<Saved>, release: bool) -> GivenUp {
        let Shared {
            core,
            tenant,
            holder,
        } = &*self.shared;
        let mut state = core.lock();
        let given = state.take_physicals(core.has(PINNED), core.writer);
        let saved = self.parts.iter().map(|&(id, _)| id).zip(saved);
        let (kept, lost): (Contents, Contents) =
            saved.partition(|&(id, _)| state.large.extent(id).is_some());
        state.rest = Rest::Asleep(kept);
        drop(state);
        drop(lost);
        let (given, _) = tenant.give_up_by(*holder, release, |all| *all = given);
        tenant.return_addresses(*holder);
        given
    }
}

/// A heap that lacks memory and sleeps with these contents. The drop gives its memory up, also after a
/// panic of the driver in a call that maps or unmaps memory: what is mapped then is quarantined.
struct FallsAsleep<'a> {
    heap: &'a MovingHeap,
    /// `None` if the heap stays awake.
    saved: Option<Vec<Saved>>,
}

impl Drop for FallsAsleep<'_> {
    fn drop(&mut self) {
        if let Some(saved) = self.saved.take() {
            self.heap.core().lock().keep_mapped();
            self.heap.settle_asleep(saved, false);
        }
    }
}

impl State {
    /// Ends a move of a heap that has its memory.
    pub(super) fn set_awake(&mut self, core: &Core) {
        self.large.settle_all(true);
        self.rest = Rest::Awake;
        core.set(STILL, false);
    }
}
