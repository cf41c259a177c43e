//! Memory that no slot uses any more: it goes to the free list or is released.
//!
//! Keeps I-32, I-33, I-37, I-60, I-110 and I-124.

use std::vec;

use crate::error::CallError;
use crate::extents::{Space, Unmapped};
use crate::own::{CloseError, CloseRefusal, Physical};
use crate::pool::accounts::Amount;
use crate::pool::core::Locked;
use crate::pool::memory::Memory;

/// Physicals that an operation has obtained. The drop of this value puts them back, also after a panic
/// of the driver.
pub(in crate::pool) struct Obtained<'b, 'a>(
    pub(in crate::pool) &'b mut Locked<'a>,
    pub(in crate::pool) Vec<Unmapped>,
);

impl Obtained<'_, '_> {
    #[inline]
    pub(in crate::pool) fn take(mut self) -> Vec<Unmapped> {
        std::mem::take(&mut self.1)
    }
}

impl Drop for Obtained<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        if !self.1.is_empty() {
            self.0.put_back(std::mem::take(&mut self.1));
        }
    }
}

/// Physicals to be given up. Those that are left after a panic of the driver are released later.
struct Left<'b, 'a>(&'b mut Locked<'a>, vec::IntoIter<Unmapped>);

impl Drop for Left<'_, '_> {
    fn drop(&mut self) {
        let Self(state, left) = self;
        state.memory.has_deferred |= !left.as_slice().is_empty();
        state.memory.supply.marked.extend(left);
    }
}

/// Bytes that the driver is asked to create or to release. After a panic of the driver, which may have
/// them, they count as quarantined for good.
pub(in crate::pool) struct AtDriver<'b, 'a>(pub(in crate::pool) &'b mut Locked<'a>, u64);

impl<'b, 'a> AtDriver<'b, 'a> {
    pub(in crate::pool) const fn begin(state: &'b mut Locked<'a>, bytes: u64) -> Self {
        Self(state, bytes)
    }

    /// Ends the request, which the driver has answered.
    pub(in crate::pool) fn end(mut self) {
        self.1 = 0;
    }
}

impl Drop for AtDriver<'_, '_> {
    fn drop(&mut self) {
        self.0.memory.budget.quarantine(self.1, 0);
    }
}

impl Locked<'_> {
    /// Frees the addresses of a space that its tenant has disowned. A space with stuck mappings is
    /// quarantined.
    pub(in crate::pool) fn give_space_back(&mut self, space: Space) {
        if space.stuck_count() > 0 {
            self.memory.supply.stuck.push(space);
            return;
        }
        let freed = self.unlocked(|| space.give_back());
        let freed = Amount::of(0, 0, freed);
        self.memory.budget.give_up(None, freed);
    }

    /// Gives up memory that an operation does not need after all: memory that it created goes to
    /// the driver, other memory to the free list. While the thread panics, all memory goes to the free
    /// list: the driver could panic again.
    pub(crate) fn put_back(&mut self, physicals: Vec<Unmapped>) {
        let releases = !std::thread::panicking();
        let mut left = Left(self, physicals.into_iter());
        for unmapped in left.1.by_ref() {
            if unmapped.fresh && releases {
                left.0.release(unmapped);
            } else {
                left.0.memory.keep(unmapped);
            }
        }
    }

    /// Releases physicals, and later those that are left after a panic of the driver.
    pub(super) fn release_all(&mut self, physicals: Vec<Unmapped>) {
        let mut left = Left(self, physicals.into_iter());
        for unmapped in left.1.by_ref() {
            left.0.release(unmapped);
        }
    }

    /// Releases memory that other processes or mappings may still have. While the thread panics, only
    /// quarantines what is mapped elsewhere, and leaves the rest to the next operation.
    pub(in crate::pool) fn release_marked(&mut self) {
        if std::thread::panicking() {
            let is_shared = |it: &mut Unmapped| it.physical.is_shared();
            let shared = self.memory.supply.marked.extract_if(.., is_shared);
            let shared = shared.collect();
            return self.release_all(shared);
        }
        while let Some(unmapped) = self.memory.supply.marked.pop() {
            self.release(unmapped);
        }
    }

    /// Releases a physical to the driver (`cuMemRelease`), or quarantines it if the driver refuses.
    /// Returns the bytes released.
    pub(super) fn release(&mut self, unmapped: Unmapped) -> u64 {
        let size = unmapped.size();
        let at_driver = AtDriver::begin(self, size);
        let closed = at_driver.0.close_physical(unmapped.physical);
        at_driver.end();
        match closed {
            Ok(()) => size,
            Err(failed) => {
                let reason = match failed.reason {
                    CloseRefusal::Call(error) => error.to_string(),
                    _ => "it is mapped elsewhere".to_owned(),
                };
                log!(error, %reason, size, "a physical could not be released: quarantined");
                self.memory.budget.quarantine(size, 0);
                self.refused += size;
                self.memory.supply.quarantined.push_back(failed.owner);
                0
            }
        }
    }

    fn close_physical(&mut self, physical: Physical) -> Result<(), CloseError<Physical>> {
        let (size, names) = (physical.size(), physical.export_mark().names());
        self.unlocked(|| physical.close())?;
        self.note_released(size, &names);
        Ok(())
    }

    /// Tries again to release quarantined physicals, until the driver has refused `refusals` of
    /// them. Returns the bytes released, and the last refusal. A refused release has changed
    /// nothing, so it may be asked for again. A physical that is mapped elsewhere is left alone.
    ///
    /// The next call begins with the physicals that this call did not reach.
    pub(crate) fn retry_releases(&mut self, refusals: usize) -> (u64, Option<CallError>) {
        let (mut released, mut refused, mut refusal) = (0, 0, None);
        for _ in 0..self.memory.supply.quarantined.len() {
            let Some(physical) = self.memory.supply.quarantined.pop_front() else {
                break;
            };
            let size = physical.size();
            let Err(failed) = self.close_physical(physical) else {
                self.memory.budget.end_quarantine(size);
                released += size;
                continue;
            };
            self.memory.supply.quarantined.push_back(failed.owner);
            if let CloseRefusal::Call(error) = failed.reason {
                refusal = Some(error);
                refused += 1;
            }
            if refused == refusals {
                break;
            }
        }
        (released, refusal)
    }

    /// Releases memory of the free list until at most `keep` bytes are left. Returns the bytes.
    pub(in crate::pool) fn release_free(&mut self, keep: u64) -> u64 {
        let mut released = 0;
        while self.memory.supply.free_list.bytes() > keep {
            let Some(unmapped) = self.memory.supply.free_list.take_largest() else {
                break;
            };
            released += self.release(unmapped);
        }
        released
    }

    /// Releases the bytes by which the free list has grown since it had `before`: its earlier
    /// memory stays.
    pub(in crate::pool) fn release_growth(&mut self, before: u64) {
        let mut left = self.memory.supply.free_list.bytes().saturating_sub(before);
        while let Some(unmapped) = self.memory.supply.free_list.take_within(left, None, true) {
            left -= unmapped.size();
            self.release(unmapped);
        }
    }

    /// Releases free physicals that are smaller than the largest extent; returns their bytes.
    pub(in crate::pool) fn release_small_free(&mut self) -> u64 {
        let mut released = 0;
        let largest = self.memory.policy.largest_extent;
        while let Some(unmapped) = self.memory.supply.free_list.take_below(largest) {
            released += self.release(unmapped);
        }
        released
    }

    /// Tries once more to free quarantined spaces. Work may still use them, so they are unmapped
    /// behind all work of the device.
    pub(in crate::pool) fn empty_quarantined_spaces(&mut self) -> Result<(), CallError> {
        let mut outcome = Ok(());
        for mut space in std::mem::take(&mut self.memory.supply.stuck) {
            let failed = self.unlocked(|| {
                let drained = space.drained();
                let error = drained.and_then(|mut space| space.retry_all()).err()?;
                // The addresses of an empty space are freed too.
                Some((space, error))
            });
            if let Some((space, error)) = failed {
                self.memory.supply.stuck.push(space);
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }

    /// Releases the free list's largest physical; returns `false` if the list is empty.
    pub(in crate::pool) fn release_largest_free(&mut self) -> bool {
        let largest = self.memory.supply.free_list.take_largest();
        largest.map(|unmapped| self.release(unmapped)).is_some()
    }
}

impl Memory {
    /// Keeps a physical that no slot uses any more for reuse. Released instead, at the latest when
    /// the operation ends, are: memory that another process may have; memory still mapped elsewhere
    /// because a roll-back could not unmap it, since that mapping would expose the next tenant's
    /// data (the release then quarantines it); memory beyond a lowered limit of the pool; and
    /// extents that no block can have.
    pub(crate) fn keep(&mut self, unmapped: Unmapped) {
        let excess = self.budget.totals().excess;
        let exceeds = excess > 0 && excess > self.supply.marked();
        // Blocks have only extents of such sizes; heaps have extents of any size.
        let fits_blocks = unmapped.size().is_power_of_two();
        let shared = unmapped.physical.is_exported() || unmapped.physical.is_shared();
        if shared || exceeds || !fits_blocks {
            self.supply.marked.push(unmapped);
            self.has_deferred = true;
        } else {
            self.supply.free_list.add(unmapped);
        }
    }
}
