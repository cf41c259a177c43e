//! Other memory with the same bytes under the same addresses.
//!
//! Whoever calls has seen to it that no work uses the extents, and lets none begin.

use std::ops::Range;

use super::Region;
use super::copies::wait_for;
use super::fence::{Fence, Unused};
use super::place::Unmapped;
use super::space::Space;
use crate::error::{CommitError, ReplaceError};
use crate::own::{Access, Stream};

/// An extent's memory that was taken out, and what could be done with it.
struct Taken {
    offset: u64,
    old: Unmapped,
    most: Access,
}

impl Space {
    /// Copies the bytes of extents to physicals of the same sizes and puts those in their places,
    /// where nobody may do more than `most` with them. Returns the old memory. All or nothing.
    pub(crate) fn replace(
        &mut self,
        new: Vec<(u64, Unmapped)>,
        most: Access,
        stream: &Stream,
        proof: Unused,
    ) -> Result<Vec<Unmapped>, ReplaceError> {
        self.copy_to(&new, stream)?;
        let mut taken: Vec<Taken> = vec![];
        for (offset, unmapped) in new {
            if let Err(error) = self.exchange(offset, unmapped, (most, proof), &mut taken) {
                let lost = self.exchange_back(taken);
                return Err(match lost.is_empty() {
                    true => error,
                    false => ReplaceError::Lost {
                        ranges: lost,
                        cause: Box::new(error),
                    },
                });
            }
        }
        Ok(taken.into_iter().map(|taken| taken.old).collect())
    }

    /// Writes the bytes of extents to physicals, at addresses that are had for that alone.
    fn copy_to(&mut self, new: &[(u64, Unmapped)], stream: &Stream) -> Result<(), ReplaceError> {
        let bytes = new.iter().map(|(_, unmapped)| unmapped.size()).sum();
        let mut beside = Self::reserve(self.device(), bytes)?;
        let copies = new.iter().map(|(_, unmapped)| Unmapped {
            physical: unmapped.physical.clone(),
            last_writer: unmapped.last_writer,
            fresh: false,
        });
        if let Err(failed) = beside.place(0, copies.collect()) {
            if failed.stuck > 0 {
                self.beside.push(beside);
            }
            return Err(ReplaceError::Place(failed.error));
        }
        let mut at = 0;
        let mut queued = Ok(());
        for (offset, unmapped) in new {
            let size = unmapped.size();
            queued = queued.and_then(|()| beside.copy_within(stream, at, self, *offset, size));
            at += size;
        }
        let waited = match wait_for(stream) {
            Err(failed) if !failed.ended => {
                // The copy may be running: its memory stays where it is.
                self.beside.push(beside);
                return Err(failed.error.into());
            }
            waited => waited.map_err(|failed| failed.error),
        };
        let offsets: Vec<u64> = beside.extents().map(|extent| extent.offset).collect();
        for offset in offsets {
            if let Err(error) = beside.withdraw_back(offset, Unused::never_used()) {
                self.beside.push(beside);
                return Err(error.into());
            }
        }
        queued?;
        Ok(waited?)
    }

    /// Puts a physical where an extent was.
    fn exchange(
        &mut self,
        offset: u64,
        unmapped: Unmapped,
        (most, proof): (Access, Unused),
        taken: &mut Vec<Taken>,
    ) -> Result<(), ReplaceError> {
        let before = self.most_at(offset);
        if let Some(old) = self.withdraw(offset, proof)? {
            taken.push(Taken {
                offset,
                old,
                most: before,
            });
        }
        self.place_for(offset, vec![unmapped], most)
            .map_err(|failed| ReplaceError::Place(failed.error))
    }

    /// Puts the old memory back where it was; returns where that failed, and nothing is mapped now.
    fn exchange_back(&mut self, taken: Vec<Taken>) -> Vec<Range<u64>> {
        let mut lost = vec![];
        for Taken { offset, old, most } in taken.into_iter().rev() {
            let size = old.size();
            // The new memory has the same bytes: where it cannot be taken out, it stays, and the old
            // memory goes.
            if self.withdraw_back(offset, Unused::never_used()).is_err() {
                continue;
            }
            if let Err(failed) = self.place_back(offset, vec![old], most) {
                tracing::error!(error = %failed.error, offset, "an extent is lost");
                lost.push(offset..offset + size);
            }
        }
        lost
    }
}

impl Region {
    /// Puts physicals in the places of extents, to be read and written, and lets the old memory go.
    /// What is lost where even undoing it failed is committed no more.
    pub(super) fn replace(
        &mut self,
        new: Vec<(u64, Unmapped)>,
        stream: &Stream,
        proof: Unused,
    ) -> Result<(), ReplaceError> {
        let offsets: Vec<u64> = new.iter().map(|&(offset, _)| offset).collect();
        let beside = self.space.beside.len();
        let replaced = self.space.replace(new, Access::ReadWrite, stream, proof);
        if self.space.beside.len() > beside {
            // The copy may be running, and reads what is there.
            for offset in offsets {
                let withdrawn = self.withdrawn.entry(offset);
                let fence = withdrawn.or_insert_with(Fence::complete);
                fence.merge(Fence::stream(stream.clone()));
            }
        }
        if let Err(ReplaceError::Lost { ranges, .. }) = &replaced {
            for range in ranges {
                self.committed.remove(range.clone());
            }
        }
        replaced.map(drop)
    }
}

impl From<CommitError> for ReplaceError {
    fn from(error: CommitError) -> Self {
        Self::Place(error)
    }
}
