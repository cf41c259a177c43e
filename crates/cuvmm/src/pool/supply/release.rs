//! Memory that no slot uses any more: it goes to the free list or is released.
//!
//! Keeps I-32, I-33, I-37, I-60 and I-110.

use std::vec;

use crate::error::CallError;
use crate::extents::{Space, Unmapped};
use crate::own::{CloseError, CloseRefusal, Physical};
use crate::pool::core::Locked;
use crate::pool::memory::Memory;

/// Physicals to be given up. Those that are left after a panic of the driver are released later.
struct Left<'b, 'a>(&'b mut Locked<'a>, vec::IntoIter<Unmapped>);

impl Drop for Left<'_, '_> {
    fn drop(&mut self) {
        let Self(state, left) = self;
        state.memory.has_deferred |= !left.as_slice().is_empty();
        state.memory.supply.marked.extend(left);
    }
}

/// Bytes of a physical that is being released. After a panic of the driver, which may have it still,
/// they count as quarantined for good.
struct Releasing<'b, 'a>(&'b mut Locked<'a>, u64);

impl Drop for Releasing<'_, '_> {
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
        self.memory.budget.refund_disowned(freed);
    }

    /// Gives up memory that an operation does not need after all: memory that it created goes to
    /// the driver, other memory to the free list.
    pub(crate) fn put_back(&mut self, physicals: Vec<Unmapped>) {
        let mut left = Left(self, physicals.into_iter());
        for unmapped in left.1.by_ref() {
            if unmapped.fresh {
                left.0.release(unmapped);
            } else {
                left.0.memory.keep(unmapped);
            }
        }
    }

    /// Releases memory that other processes or mappings may still have.
    pub(in crate::pool) fn release_marked(&mut self) {
        while let Some(unmapped) = self.memory.supply.marked.pop() {
            self.release(unmapped);
        }
    }

    /// Releases a physical to the driver (`cuMemRelease`), or quarantines it if the driver refuses.
    /// Returns the bytes released.
    pub(super) fn release(&mut self, unmapped: Unmapped) -> u64 {
        let size = unmapped.size();
        let mut releasing = Releasing(self, size);
        let closed = releasing.0.close_physical(unmapped.physical);
        releasing.1 = 0;
        drop(releasing);
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
        let excess = self.budget.excess();
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
