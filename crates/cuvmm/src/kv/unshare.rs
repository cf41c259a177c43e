//! Memory of their own for sequences that were cut into what they share.

use super::KvCache;
use super::sequences::SequenceId;
use crate::error::{BlockError, KvCacheError};
use crate::pool::{Block, Tenant};

/// Makes the memory of blocks their own.
pub(super) type Unshare = fn(&Tenant, &[(&Block, u64)]) -> Result<(), BlockError>;

impl KvCache {
    /// Gives sequences that were truncated into what they share memory of their own behind their
    /// last token, if they are to have more tokens.
    pub(super) fn unshare(&mut self, make: Unshare) -> Result<(), KvCacheError> {
        let (mut owners, mut blocks) = (Vec::new(), Vec::new());
        for sequence in self.sequences.iter().filter(|it| it.cut && it.lacks_room()) {
            // Its room ends where it was cut.
            let from = self.geometry.bytes_of(sequence.room);
            for block in &sequence.blocks {
                owners.push(sequence.id);
                blocks.push((block, from));
            }
        }
        if blocks.is_empty() {
            return Ok(());
        }
        make(&self.tenant, &blocks).map_err(|refused| KvCacheError::append(&owners, refused))?;
        let geometry = &self.geometry;
        let cut = self.sequences.iter_mut();
        for sequence in cut.filter(|it| it.cut && it.lacks_room()) {
            sequence.cut = false;
            sequence.spread_anew();
            let size = sequence.blocks.first().map_or(0, Block::size);
            sequence.room = geometry.tokens_in(size);
        }
        Ok(())
    }
}

impl KvCacheError {
    /// Why a batch could not be appended, of whose blocks these are the sequences.
    pub(super) fn append(owners: &[SequenceId], refused: BlockError) -> Self {
        let index = match refused {
            BlockError::Refused { index, .. } | BlockError::NotOurs { index } => index,
            BlockError::Memory(error) => return error.into(),
            BlockError::Argument(error) => return error.into(),
            // It is about the tenant, and so about each of them.
            _ => 0,
        };
        Self::Block {
            sequence: owners.get(index).map_or(0, |id| id.number()),
            cause: refused,
        }
    }
}
