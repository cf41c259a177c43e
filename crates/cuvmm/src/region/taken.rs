//! Extents that were taken out of a space, to be given up or put back where they were.

use std::ops::Range;

use cuvmm_driver::PhysicalHandle;

use super::fence::Unused;
use super::place::Unmapped;
use super::space::Space;
use crate::error::{CallError, CommitError};
use crate::own::Access;

/// Extents that were taken out of a space, in the order in which that was done.
#[derive(Debug, Default)]
pub(crate) struct TakenOut(Vec<Taken>);

#[derive(Debug)]
struct Taken {
    offset: u64,
    unmapped: Unmapped,
    /// The most access that any device had to it.
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
    /// Why the first of them could not be.
    pub(crate) error: CommitError,
    /// Where that was.
    pub(crate) offset: u64,
    /// Those that are mapped there still, and cannot be used.
    pub(crate) stuck: Vec<Stuck>,
    /// The memory of the others.
    pub(crate) rest: TakenOut,
}

impl TakenOut {
    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|taken| taken.unmapped.size()).sum()
    }

    /// Each with the offset where it was.
    pub(crate) fn into_parts(self) -> impl Iterator<Item = (u64, Unmapped)> {
        self.0
            .into_iter()
            .map(|taken| (taken.offset, taken.unmapped))
    }

    /// Counts as what no running operation created.
    pub(crate) fn settle(&mut self) {
        self.0
            .iter_mut()
            .for_each(|taken| taken.unmapped.fresh = false);
    }

    /// The memory of those that lay wholly in one of some ranges, which is not to be put back there.
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
    /// Bytes that are lost.
    pub(crate) fn bytes(&self) -> u64 {
        self.rest.bytes() + self.stuck.iter().map(|stuck| stuck.size).sum::<u64>()
    }

    /// The same with all that the space still has, which is taken out too.
    pub(crate) fn with_all_of(mut self, space: &mut Space, proof: Option<Unused>) -> Self {
        let (taken, stuck) = space.empty_from(0, proof);
        self.rest.0.extend(taken.0);
        self.stuck.extend(stuck);
        self
    }

    /// Where nothing is mapped any more that could be used.
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        let rest = self.rest.0.iter();
        let rest = rest.map(|taken| (taken.offset, taken.unmapped.size()));
        let stuck = self.stuck.iter().map(|stuck| (stuck.offset, stuck.size));
        let all = rest.chain(stuck);
        all.map(|(offset, size)| offset..offset + size).collect()
    }
}

impl Space {
    /// Unmaps extents one after the other (`cuMemUnmap`). What was taken out when the driver refuses
    /// one is in `taken`.
    pub(crate) fn take_out(
        &mut self,
        offsets: impl IntoIterator<Item = u64>,
        proof: Unused,
        taken: &mut TakenOut,
    ) -> Result<(), CallError> {
        for offset in offsets {
            let most = self.most_at(offset);
            let unmapped = self.withdraw(offset, proof)?;
            taken.0.extend(unmapped.map(|unmapped| Taken {
                offset,
                unmapped,
                most,
            }));
        }
        Ok(())
    }

    /// Puts extents back where they were, the one that was taken out last first. What the driver
    /// refuses is tried once more; if it is refused again, the others are put back all the same.
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
            let Err(failed) = self.place_back(offset, vec![unmapped], most) else {
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

    /// Takes out all from an offset on, the last first, in a roll-back or at the end of its owner.
    /// What the driver refuses is tried once more. What it refuses then, and everything if there is
    /// no proof, stays where it is for good.
    pub(crate) fn empty_from(
        &mut self,
        begun: u64,
        proof: Option<Unused>,
    ) -> (TakenOut, Vec<Stuck>) {
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
            let (offset, proof) = (extent.offset, proof.ok_or(CallError::InUse));
            let done = proof.and_then(|proof| self.take_insisting(offset, proof, &mut taken));
            if let Err(error) = done {
                tracing::error!(%error, offset, "a roll-back could not unmap: quarantined");
                self.quarantine(offset);
                stuck.push(extent);
            }
        }
        (taken, stuck)
    }

    /// Takes out all, the last first, at the end of its owner. What the driver refuses is tried once
    /// more.
    pub(crate) fn take_all(
        &mut self,
        proof: Unused,
        taken: &mut TakenOut,
    ) -> Result<(), CallError> {
        while let Some(offset) = self.last_offset() {
            self.take_insisting(offset, proof, taken)?;
        }
        Ok(())
    }

    fn take_insisting(
        &mut self,
        offset: u64,
        proof: Unused,
        taken: &mut TakenOut,
    ) -> Result<(), CallError> {
        self.take_out([offset], proof, taken).or_else(|error| {
            tracing::warn!(%error, offset, "a roll-back is tried again");
            self.take_out([offset], proof, taken)
        })
    }
}
