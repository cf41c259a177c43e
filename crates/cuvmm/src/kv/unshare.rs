//! Separate memory for sequences that were truncated within shared tokens.

use super::KvCache;
use super::sequences::SequenceId;
use crate::error::{BlockError, KvCacheError};
use crate::pool::{Block, Tenant};

/// A method of the tenant that unshares several blocks.
pub(super) type Unshare = fn(&Tenant, &[(&Block, u64)]) -> Result<(), BlockError>;

impl KvCache {
    /// Gives sequences that were truncated within shared tokens memory of their own after their
    /// last token, if they are to get more tokens.
    pub(super) fn unshare(&mut self, make: Unshare) -> Result<(), KvCacheError> {
        let (mut owners, mut blocks) = (Vec::new(), Vec::new());
        for sequence in self
            .sequences
            .iter()
            .filter(|it| it.cut && it.needs_growth())
        {
            // `room` ends where the sequence was truncated.
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
        for sequence in cut.filter(|it| it.cut && it.needs_growth()) {
            sequence.cut = false;
            sequence.spread_anew();
            let size = sequence.blocks.first().map_or(0, Block::size);
            sequence.room = geometry.tokens_in(size);
        }
        Ok(())
    }
}

impl KvCacheError {
    /// Names the sequence for which a batch failed. `owners` has the sequence of each block.
    pub(super) fn append(owners: &[SequenceId], refused: BlockError) -> Self {
        let index = match refused {
            BlockError::Refused { index, .. } | BlockError::WrongTenant { index } => index,
            BlockError::Memory(error) => return error.into(),
            BlockError::Argument(error) => return error.into(),
            // The error concerns the tenant, and so each of the sequences.
            _ => 0,
        };
        Self::Block {
            sequence: owners.get(index).map_or(0, |id| id.number()),
            cause: refused,
        }
    }
}
