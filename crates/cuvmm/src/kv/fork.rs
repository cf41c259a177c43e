//! Sequences that start with the tokens of another sequence, with one copy of the common prefix in
//! memory.
//!
//! Rows of tokens before a fork are no longer written, in either sequence. A sequence that is
//! truncated before the fork and grows again gets memory of its own there, which can be written.

use super::KvCache;
use super::sequences::SequenceId;
use crate::error::{BlockError, KvCacheError};
use crate::pool::{Block, Prefix, Tenant};

/// A method of the tenant that forks several blocks together.
type Fork = fn(&Tenant, &[&Block], Prefix) -> Result<Vec<Block>, BlockError>;

impl KvCache {
    /// Creates a sequence that starts with the first `tokens` tokens of another, at least one: for
    /// beams, several answers to one prompt, or prompts with a common start. Requires
    /// [`may_fork`](super::KvCacheBuilder::may_fork). Calls pressure hooks, and waits for memory up
    /// to the builder's [timeout](super::KvCacheBuilder::timeout), but not for work on the GPU.
    ///
    /// Whole extents of the prefix, of at most 8 MiB or an eighth of the sequence when it was
    /// created, are mapped a second time as read-only: `cuMemMap` and `cuMemSetAccess` for each,
    /// about 25 us, and no memory. The rest of the prefix, less than an extent, is copied behind the
    /// home stream's work (`cuMemcpyDtoDAsync`). Both sequences can grow, be
    /// truncated, forked again and freed in any order; an extent's memory is released with the last
    /// sequence that shares it. A sequence that shares memory is not cached when it is freed or
    /// truncated within the shared part, but unmapped once its work is complete, by that call, by
    /// later ones, or by the mapper's thread if any.
    ///
    /// Rows of the common tokens must not be written any more: a kernel that writes them in the new
    /// sequence loses the context, and one that writes them in the old sequence changes what the
    /// new one reads.
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or has fewer tokens, the cache was built
    /// without [`may_fork`](super::KvCacheBuilder::may_fork), there are too many sequences, or
    /// memory is short, with the figures. Every sequence is as before.
    #[doc(alias = "cuMemMap")]
    pub fn fork(&mut self, id: SequenceId, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.fork_by(id, tokens, Tenant::fork_blocks)
    }

    /// Forks a sequence like [`fork`](Self::fork), without waiting or calling hooks.
    ///
    /// # Errors
    /// [`KvCacheError`] in the cases of [`fork`](Self::fork), and if waiting or hooks would be
    /// needed.
    pub fn try_fork(&mut self, id: SequenceId, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.fork_by(id, tokens, Tenant::try_fork_blocks)
    }

    /// Rebuilds the first tokens of a sequence from few large extents, before many sequences
    /// [fork](Self::fork) it: each fork then maps those. Returns the bytes copied.
    /// Call it once, before the first fork, when the rows of these tokens have been written.
    ///
    /// Waits up to the builder's [timeout](super::KvCacheBuilder::timeout) for the work queued on
    /// the sequence; launch no work that uses it meanwhile. Needs free memory for a copy of the
    /// prefix, at most 1 GiB at a time, and reclaims none from other tenants. On an H200, a fork of
    /// 512 MiB takes 0.3 to 0.4 ms before, and 0.08 to 0.17 ms after.
    ///
    /// A fork truncated to fewer tokens that grows again copies the part of its extent before that
    /// token, as does a fork of fewer tokens than were prepared. The sequence's memory is unmapped
    /// when it is freed. See [`Tenant::compact_prefix`].
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or has fewer tokens, work is not complete,
    /// or memory is short, with the figures. Every sequence keeps its rows.
    #[doc(alias = "cuMemMap")]
    pub fn compact_prefix(&mut self, id: SequenceId, tokens: u64) -> Result<u64, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        sequence.check_tokens(tokens)?;
        let bytes = self.geometry.bytes_of(tokens);
        let blocks: Vec<&Block> = sequence.blocks.iter().collect();
        let compacted = self.tenant.compact_prefix(&blocks, bytes);
        compacted.map_err(|cause| id.failed(cause))
    }

    fn fork_by(
        &mut self,
        id: SequenceId,
        tokens: u64,
        fork: Fork,
    ) -> Result<SequenceId, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        if !self.options.may_fork {
            return Err(KvCacheError::MayNotFork);
        }
        sequence.check_tokens(tokens)?;
        self.room_for_one()?;
        let Some(size) = self.geometry.size_for(tokens) else {
            return Err(sequence.beyond_end(tokens));
        };
        let bytes = self.geometry.bytes_of(tokens);
        let blocks: Vec<&Block> = sequence.blocks.iter().collect();
        let blocks = fork(&self.tenant, &blocks, Prefix { bytes, size });
        let blocks = blocks.map_err(|cause| id.failed(cause))?;
        let sequence = self.sequences.get_mut(id)?;
        sequence.fixed = sequence.fixed.max(tokens);
        let room = self.geometry.tokens_in(size);
        let number = self.tenant.number();
        let new = self.sequences.insert(number, tokens, room, blocks)?;
        self.sequences.get_mut(new)?.fixed = tokens;
        self.notify_growth(|sequence| sequence.id == new);
        Ok(new)
    }
}
