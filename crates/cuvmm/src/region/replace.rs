//! Other memory with the same bytes under the same addresses.
//!
//! Whoever calls has seen to it that no work uses the extents, and lets none begin.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Region;
use super::completed::Completed;
use super::copies::wait_for;
use super::fence::{Fence, Unused};
use super::place::Unmapped;
use super::space::Space;
use super::taken::{NotPutBack, TakenOut};
use crate::error::{CommitError, ReplaceError};
use crate::own::{Access, Stream};

/// Memory, and the offset where it is to be placed.
type New = Vec<(u64, Unmapped)>;

/// Memory was not replaced.
#[derive(Debug)]
pub(crate) struct NotReplaced {
    pub(crate) error: ReplaceError,
    /// What is mapped nowhere and of no use: new memory, or old memory whose place new memory keeps.
    pub(crate) physicals: Vec<Unmapped>,
    /// What was there and could not be put back.
    pub(crate) lost: Option<NotPutBack>,
    /// Whether the stream may be copying still. It reads what is there, and what it writes to is kept.
    pub(crate) running: bool,
}

impl NotReplaced {
    /// Nothing was done with the new memory.
    pub(crate) fn unchanged(error: impl Into<ReplaceError>, new: New) -> Box<Self> {
        Box::new(Self {
            error: error.into(),
            physicals: new.into_iter().map(|(_, unmapped)| unmapped).collect(),
            lost: None,
            running: false,
        })
    }
}

impl Completed<'_> {
    /// Copies the bytes of extents to other memory and puts that in their places, where no device has
    /// more access than `most`. It begins and ends where extents do. Returns the old memory. All or
    /// nothing.
    pub(crate) fn replace(
        &mut self,
        new: New,
        most: Access,
        stream: &Stream,
    ) -> Result<TakenOut, Box<NotReplaced>> {
        let new = self.space.copy_to(new, stream)?;
        let covered = new.iter().flat_map(|(offset, unmapped)| {
            let extents = self.space.extents_in(*offset, offset + unmapped.size());
            extents.map(|extent| extent.offset)
        });
        let covered: BTreeSet<u64> = covered.collect();
        let mut old = TakenOut::default();
        if let Err(error) = self.take_out(covered.into_iter().rev(), &mut old) {
            return Err(Box::new(NotReplaced {
                error: error.into(),
                physicals: new.into_iter().map(|(_, unmapped)| unmapped).collect(),
                lost: self.space.put_back(old).err(),
                running: false,
            }));
        }
        let mut placed: Vec<Range<u64>> = vec![];
        let mut new = new.into_iter();
        while let Some((offset, unmapped)) = new.next() {
            let size = unmapped.size();
            match self.space.place_for(offset, vec![unmapped], most) {
                Ok(()) => placed.push(offset..offset + size),
                Err(failed) => {
                    let mut physicals = failed.physicals;
                    physicals.extend(new.map(|(_, unmapped)| unmapped));
                    // It has the same bytes: where it cannot be taken out it stays.
                    placed.retain(|range| {
                        let mut new = self.space.never_used(range.start);
                        match new.withdraw_back(range.start) {
                            Ok(here) => physicals.extend(here),
                            Err(_) => return true,
                        }
                        false
                    });
                    physicals.extend(old.split_off(&placed));
                    return Err(Box::new(NotReplaced {
                        error: ReplaceError::Place(failed.error),
                        physicals,
                        lost: self.space.put_back(old).err(),
                        running: false,
                    }));
                }
            }
        }
        Ok(old)
    }
}

impl Space {
    /// Writes the bytes of extents to other memory, at addresses that are had for that alone.
    fn copy_to(&mut self, new: New, stream: &Stream) -> Result<New, Box<NotReplaced>> {
        let (offsets, memory): (Vec<u64>, Vec<Unmapped>) = new.into_iter().unzip();
        let sizes: Vec<u64> = memory.iter().map(Unmapped::size).collect();
        let not = |error, physicals, running| {
            Box::new(NotReplaced {
                error,
                physicals,
                lost: None,
                running,
            })
        };
        let mut beside = match Self::reserve(self.device(), sizes.iter().sum()) {
            Ok(beside) => beside,
            Err(error) => return Err(not(error.into(), memory, false)),
        };
        if let Err(failed) = beside.place(0, memory) {
            if failed.stuck > 0 {
                self.beside.push(beside);
            }
            return Err(not(failed.error.into(), failed.physicals, false));
        }
        let mut at = 0;
        let mut queued = Ok(());
        for (&offset, &size) in offsets.iter().zip(&sizes) {
            queued = queued.and_then(|()| beside.copy_within(stream, at, self, offset, size));
            at += size;
        }
        let waited = match wait_for(stream) {
            Err(failed) if !failed.ended => {
                // The copy may be running: its memory stays where it is.
                self.beside.push(beside);
                return Err(not(failed.error.into(), vec![], true));
            }
            waited => waited.map_err(|failed| failed.error),
        };
        let mut copied = Ok(());
        let mut memory = vec![];
        let extents: Vec<u64> = beside.extents().map(|extent| extent.offset).collect();
        for offset in extents {
            match beside.never_used(0).withdraw_back(offset) {
                Ok(here) => memory.extend(here),
                Err(error) => copied = Err(error.into()),
            }
        }
        if beside.count() > 0 {
            self.beside.push(beside);
        }
        let copied = copied.and_then(|()| Ok(queued?)).and_then(|()| Ok(waited?));
        match copied {
            Ok(()) => Ok(offsets.into_iter().zip(memory).collect()),
            Err(error) => Err(not(error, memory, false)),
        }
    }
}

impl Region {
    /// Puts physicals in the places of extents, to be read and written, and lets the old memory go.
    /// What is lost where even undoing it failed is committed no more.
    pub(super) fn replace(
        &mut self,
        new: New,
        stream: &Stream,
        proof: Unused,
    ) -> Result<(), ReplaceError> {
        let offsets: Vec<u64> = new.iter().map(|&(offset, _)| offset).collect();
        let mut space = self.space.proved(proof);
        let Err(failed) = space.replace(new, Access::ReadWrite, stream) else {
            return Ok(());
        };
        if failed.running {
            for offset in offsets {
                let withdrawn = self.withdrawn.entry(offset);
                let fence = withdrawn.or_insert_with(Fence::complete);
                fence.merge(Fence::stream(stream.clone()));
            }
        }
        let Some(lost) = failed.lost else {
            return Err(failed.error);
        };
        tracing::error!(error = %lost.error, offset = lost.offset, "extents are lost");
        let ranges = lost.ranges();
        for range in &ranges {
            self.committed.remove(range.clone());
        }
        Err(ReplaceError::Lost {
            ranges,
            cause: Box::new(failed.error),
        })
    }
}

impl From<CommitError> for ReplaceError {
    fn from(error: CommitError) -> Self {
        Self::Place(error)
    }
}
