//! Extents that were taken out of a space, to be released or put back.
//!
//! Keeps I-34.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use cuvmm_driver::PhysicalHandle;

use super::completed::Completed;
use super::fence::{Fence, Unused};
use super::place::{LastWriter, PlaceError, Placed, Unmapped};
use super::space::Space;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::Access;

/// Extents taken out of a space, in the order of removal.
#[derive(Debug, Default)]
pub(crate) struct TakenOut(Vec<Taken>);

#[derive(Debug)]
struct Taken {
    offset: u64,
    unmapped: Unmapped,
    /// The cap on every device's access.
    most: Access,
}

/// An extent that can neither be used nor unmapped. It stays in its space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stuck {
    pub(crate) offset: u64,
    pub(crate) handle: PhysicalHandle,
    pub(crate) size: u64,
}

/// Extents that could not be put back.
#[derive(Debug)]
pub(crate) struct NotPutBack {
    pub(crate) error: MemoryError,
    /// The offset of the first extent.
    pub(crate) offset: u64,
    /// Extents that are still mapped and cannot be used.
    pub(crate) stuck: Vec<Stuck>,
    /// The memory of the other extents.
    pub(crate) rest: TakenOut,
}

impl TakenOut {
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|taken| taken.unmapped.size()).sum()
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = PhysicalHandle> + '_ {
        let physicals = self.0.iter().map(|taken| &taken.unmapped.physical);
        physicals.map(|physical| physical.as_raw())
    }

    pub(crate) fn into_parts(self) -> impl Iterator<Item = (u64, Unmapped)> {
        self.0
            .into_iter()
            .map(|taken| (taken.offset, taken.unmapped))
    }

    /// Marks the physicals as not created by the running operation.
    pub(crate) fn settle(&mut self) {
        self.0
            .iter_mut()
            .for_each(|taken| taken.unmapped.fresh = false);
    }

    /// Notes who may have written the physicals last.
    pub(crate) fn note_writer(&mut self, by: u64) {
        for taken in &mut self.0 {
            taken.unmapped.last_writer = Some(LastWriter { by, blank: false });
        }
    }

    /// Drops the physical from an offset, which has another holder.
    pub(crate) fn forget(&mut self, offset: u64) {
        self.0.retain(|taken| taken.offset != offset);
    }

    pub(crate) fn append(&mut self, mut last: Self) {
        self.0.append(&mut last.0);
    }

    /// Removes and returns the physicals that were wholly within one of the ranges, and so are not
    /// to be put back there.
    pub(super) fn split_off(&mut self, ranges: &[Range<u64>]) -> Vec<Unmapped> {
        let lies = |taken: &mut Taken| {
            let end = taken.offset + taken.unmapped.size();
            let mut ranges = ranges.iter();
            ranges.any(|range| range.start <= taken.offset && end <= range.end)
        };
        self.0
            .extract_if(.., lies)
            .map(|taken| taken.unmapped)
            .collect()
    }
}

impl NotPutBack {
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.rest.bytes() + self.stuck.iter().map(|stuck| stuck.size).sum::<u64>()
    }

    /// Adds all that the space still has. Only `running` may use it.
    pub(crate) fn with_all_of(mut self, space: &mut Space, running: &Fence) -> Self {
        let (taken, stuck) = space.empty_from(0, running);
        self.rest.0.extend(taken.0);
        self.stuck.extend(stuck);
        self
    }

    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let rest = self.rest.0.iter();
        let rest = rest.map(|taken| (taken.offset, taken.unmapped.size()));
        let stuck = self.stuck.iter().map(|stuck| (stuck.offset, stuck.size));
        let all = rest.chain(stuck);
        all.map(|(offset, size)| offset..offset + size).collect()
    }
}

impl Completed<'_> {
    /// [Takes extents out](Self::take_out), and catches a panic of the driver. `taken` then has the
    /// extent too at which the driver panicked, which is stuck in the space.
    pub(crate) fn try_take_out(
        &mut self,
        offsets: impl IntoIterator<Item = u64>,
        taken: &mut TakenOut,
    ) -> thread::Result<Result<(), CallError>> {
        for offset in offsets {
            let most = self.space.most_at(offset);
            let Some(physical) = self.space.physical_at(offset) else {
                continue;
            };
            let take_out = AssertUnwindSafe(|| self.take_out([offset], taken));
            match catch_unwind(take_out) {
                Ok(Ok(())) => {}
                Err(panic) => {
                    let unmapped = Unmapped {
                        fresh: false,
                        ..Unmapped::fresh(physical)
                    };
                    taken.0.push(Taken {
                        offset,
                        unmapped,
                        most,
                    });
                    return Err(panic);
                }
                refused => return refused,
            }
        }
        Ok(Ok(()))
    }

    /// Unmaps extents one by one (`cuMemUnmap`). If the driver refuses one, `taken` has the extents
    /// before it.
    pub(crate) fn take_out(
        &mut self,
        offsets: impl IntoIterator<Item = u64>,
        taken: &mut TakenOut,
    ) -> Result<(), CallError> {
        for offset in offsets {
            let most = self.space.most_at(offset);
            let unmapped = self.withdraw(offset)?;
            taken.0.extend(unmapped.map(|unmapped| Taken {
                offset,
                unmapped,
                most,
            }));
        }
        Ok(())
    }

    /// Takes out all extents, the last first, at the end of their owner. Tries each twice.
    pub(crate) fn take_all(&mut self, taken: &mut TakenOut) -> Result<(), CallError> {
        while let Some(offset) = self.space.last_offset() {
            self.take_insisting(offset, taken)?;
        }
        Ok(())
    }

    /// Takes out an extent in a roll-back. Tries twice.
    pub(super) fn take_insisting(
        &mut self,
        offset: u64,
        taken: &mut TakenOut,
    ) -> Result<(), CallError> {
        self.take_out([offset], taken).or_else(|error| {
            log!(warn, %error, offset, "a roll-back is tried again");
            self.take_out([offset], taken)
        })
    }
}

impl Space {
    /// Puts extents back, in reverse order of removal. Tries each twice. One failure does not stop
    /// the others.
    pub(crate) fn put_back(&mut self, taken: TakenOut) -> Result<(), NotPutBack> {
        let mut first = None;
        let (mut stuck, mut rest) = (vec![], TakenOut::default());
        for Taken {
            offset,
            unmapped,
            most,
        } in taken.0.into_iter().rev()
        {
            let (handle, size) = (unmapped.physical.as_raw(), unmapped.size());
            let placed = match self.is_stuck(offset, handle) {
                // Where other memory is stuck, this is refused, and the memory is not lost.
                false => self.place_back(offset, vec![unmapped], most),
                // The driver panicked when it was unmapped.
                true => Err(PlaceError {
                    error: MemoryError::Quarantined {
                        range: offset..offset + size,
                        bytes: size,
                    },
                    physicals: vec![],
                    stuck: size,
                }),
            };
            let Err(failed) = placed else {
                continue;
            };
            first = first.or(Some((failed.error, offset)));
            stuck.extend((failed.stuck > 0).then_some(Stuck {
                offset,
                handle,
                size,
            }));
            rest.0
                .extend(failed.physicals.into_iter().map(|unmapped| Taken {
                    offset,
                    unmapped,
                    most,
                }));
        }
        first.map_or(Ok(()), |(error, offset)| {
            Err(NotPutBack {
                error,
                offset,
                stuck,
                rest,
            })
        })
    }

    /// Takes out all extents from an offset on, the last first, in a roll-back or at the end of
    /// their owner. Only work covered by `running` may use them. Tries each twice. Extents that the
    /// driver refuses twice stay mapped for good, and so do all extents if `running` is incomplete.
    pub(crate) fn empty_from(&mut self, begun: u64, running: &Fence) -> (TakenOut, Vec<Stuck>) {
        let (mut taken, mut stuck) = (TakenOut::default(), vec![]);
        let parts = self.parts_in(begun, self.size());
        let mut extents: Vec<Stuck> = parts
            .map(|(extent, physical)| Stuck {
                offset: extent.offset,
                handle: physical.as_raw(),
                size: extent.size,
            })
            .collect();
        while let Some(extent) = extents.pop() {
            let offset = extent.offset;
            let completed = running.completed(self).ok_or(CallError::InUse);
            let done = completed.and_then(|mut space| space.take_insisting(offset, &mut taken));
            if let Err(error) = done {
                log!(error, %error, offset, "a roll-back could not unmap: quarantined");
                self.quarantine(offset);
                stuck.push(extent);
            }
        }
        (taken, stuck)
    }
}

/// Unmaps extents without an owner, behind all work of the devices that had access.
pub(crate) fn unmap_drained(
    users: &[Device],
    going: &mut BTreeMap<u64, Placed>,
) -> Result<(), CallError> {
    if going.is_empty() {
        return Ok(());
    }
    let proof = Unused::after_drain(users)?;
    while let Some((at, placed)) = going.pop_first() {
        let unmapped = placed.unmap(proof);
        let unmapped = unmapped.or_else(|(placed, _)| placed.unmap(proof));
        if let Err((placed, error)) = unmapped {
            going.insert(at, placed);
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::Call;

    use super::*;
    use crate::extents::rig::{G, rig};

    fn handles(space: &Space) -> Vec<PhysicalHandle> {
        let parts = space.parts_in(0, space.size());
        parts.map(|(_, physical)| physical.as_raw()).collect()
    }

    #[test]
    fn what_was_taken_out_is_put_back_where_it_was() {
        let rig = rig();
        let mut space = rig.space(4);
        let before = handles(&space);
        let mut taken = TakenOut::default();
        space
            .promised()
            .take_out([3 * G, 2 * G, G], &mut taken)
            .unwrap();
        assert_eq!((taken.bytes(), space.bytes()), (3 * G, G));
        space.put_back(taken).unwrap();
        assert_eq!(handles(&space), before);
    }

    // I-34
    #[test]
    fn what_was_taken_out_before_a_refusal_is_put_back() {
        let rig = rig();
        let mut space = rig.space(3);
        let before = handles(&space);
        rig.fail(Call::MemUnmap, 2);
        let mut taken = TakenOut::default();
        let outcome = space.promised().take_out([2 * G, G, 0], &mut taken);
        assert!(outcome.is_err());
        assert_eq!((taken.bytes(), space.bytes()), (G, 2 * G));
        // A single refusal in the roll-back is tried again.
        rig.fail(Call::MemMap, 1);
        space.put_back(taken).unwrap();
        assert_eq!(handles(&space), before);
    }

    #[test]
    fn what_cannot_be_put_back_keeps_the_others_from_nothing() {
        let rig = rig();
        let mut space = rig.space(3);
        let before = handles(&space);
        let mut taken = TakenOut::default();
        space.promised().take_all(&mut taken).unwrap();
        // Fails both attempts to put back the second extent.
        rig.fail(Call::MemMap, 2);
        rig.fail(Call::MemMap, 3);
        let lost = space.put_back(taken).unwrap_err();
        assert_eq!((lost.offset, lost.bytes()), (G, G));
        let [range] = &lost.ranges()[..] else {
            panic!("one range");
        };
        assert_eq!(*range, G..2 * G);
        assert!(lost.stuck.is_empty());
        assert_eq!(handles(&space), [before[0], before[2]]);
        let lost = lost.with_all_of(&mut space, &Fence::complete());
        assert_eq!((lost.bytes(), space.count()), (3 * G, 0));
    }

    #[test]
    fn what_is_mapped_and_cannot_be_opened_nor_unmapped_is_stuck() {
        let rig = rig();
        let mut space = rig.space(2);
        let mut taken = TakenOut::default();
        space.promised().take_out([G], &mut taken).unwrap();
        rig.fail(Call::MemSetAccess, 1);
        rig.fail_from(Call::MemUnmap, 1);
        let lost = space.put_back(taken).unwrap_err();
        assert_eq!((lost.offset, lost.bytes()), (G, G));
        assert_eq!((lost.stuck.len(), lost.rest.bytes()), (1, 0));
        assert_eq!((lost.stuck[0].offset, lost.stuck[0].size), (G, G));
        assert_eq!((space.bytes(), space.stuck_bytes()), (G, G));
    }

    #[test]
    fn memory_whose_place_other_memory_is_stuck_in_is_not_lost() {
        let rig = rig();
        let mut space = rig.space(2);
        let before = handles(&space);
        let mut taken = TakenOut::default();
        space.promised().take_out([G], &mut taken).unwrap();
        rig.fail(Call::MemSetAccess, 1);
        rig.fail_from(Call::MemUnmap, 1);
        assert_eq!(space.place(G, vec![rig.memory(1)]).unwrap_err().stuck, G);
        rig.heal();
        let lost = space.put_back(taken).unwrap_err();
        assert!(lost.stuck.is_empty());
        assert_eq!(lost.rest.handles().collect::<Vec<_>>(), before[1..]);
    }

    #[test]
    fn nothing_is_emptied_under_work_that_is_running() {
        let rig = rig();
        let (mut space, stream) = (rig.space(3), rig.busy_stream());
        let mut running = Fence::stream(stream.clone());
        let (taken, stuck) = space.empty_from(G, &running);
        assert_eq!((taken.bytes(), stuck.len()), (0, 2));
        assert_eq!((space.bytes(), space.stuck_bytes()), (G, 2 * G));
        rig.finish(&stream);
        running.poll().unwrap();
        let (taken, stuck) = space.empty_from(0, &running);
        assert_eq!((taken.bytes(), stuck.len(), space.count()), (G, 0, 0));
        assert_eq!(space.stuck_bytes(), 2 * G, "it stays for good");
    }

    #[test]
    fn emptying_tries_again_once() {
        let rig = rig();
        let mut space = rig.space(2);
        rig.fail(Call::MemUnmap, 1);
        let (taken, stuck) = space.empty_from(G, &Fence::complete());
        assert_eq!((taken.bytes(), stuck.len()), (G, 0));
        rig.fail_from(Call::MemUnmap, 1);
        let (taken, stuck) = space.empty_from(0, &Fence::complete());
        assert_eq!((taken.bytes(), stuck.len()), (0, 1));
        assert_eq!(space.stuck_bytes(), G);
    }

    #[test]
    fn what_another_has_the_place_of_is_split_off() {
        let rig = rig();
        let mut space = rig.space(4);
        let before = handles(&space);
        let mut taken = TakenOut::default();
        space.promised().take_all(&mut taken).unwrap();
        let kept = taken.split_off(&[G..3 * G, 3 * G..3 * G + 1]);
        let kept: Vec<_> = kept.iter().map(|it| it.physical.as_raw()).collect();
        assert_eq!(kept, [before[2], before[1]], "an extent that is cut stays");
        space.put_back(taken).unwrap();
        assert_eq!(handles(&space), [before[0], before[3]]);
    }

    #[test]
    fn parts_come_with_their_offsets_and_once_settled_no_running_operation_created_them() {
        let rig = rig();
        let mut space = rig.space(3);
        let before = handles(&space);
        let mut taken = TakenOut::default();
        space.promised().take_out([2 * G, 0], &mut taken).unwrap();
        assert!(taken.0.iter().all(|it| it.unmapped.fresh));
        taken.settle();
        let parts = taken
            .into_parts()
            .map(|(offset, unmapped)| (offset, unmapped.physical.as_raw(), unmapped.fresh));
        let parts: Vec<_> = parts.collect();
        assert_eq!(parts, [(2 * G, before[2], false), (0, before[0], false)]);
    }

    #[test]
    fn what_cannot_be_taken_out_of_the_rest_is_lost_with_it() {
        let rig = rig();
        let mut space = rig.space(2);
        let mut taken = TakenOut::default();
        space.promised().take_out([G], &mut taken).unwrap();
        rig.fail_from(Call::MemMap, 1);
        let lost = space.put_back(taken).unwrap_err();
        rig.fail_from(Call::MemUnmap, 1);
        let lost = lost.with_all_of(&mut space, &Fence::complete());
        assert_eq!((lost.bytes(), lost.rest.bytes()), (2 * G, G));
        assert_eq!((lost.stuck.len(), lost.stuck[0].offset), (1, 0));
        assert_eq!(lost.ranges(), [G..2 * G, 0..G]);
    }
}
