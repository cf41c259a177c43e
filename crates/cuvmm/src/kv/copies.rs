//! Copies of rows by the host, for example to restore a prefix or to inspect what a kernel wrote.

use super::KvCache;
use super::sequences::{Sequence, SequenceId};
use super::shape::Part;
use crate::error::{ArgumentError, KvCacheError};

struct Rows {
    range: usize,
    offset: u64,
}

impl KvCache {
    /// Writes one layer's keys or values of the tokens from `first` on, as contiguous `[token,
    /// head, element]`, behind the home stream's work, and waits for the copy (`cuMemcpyHtoDAsync`;
    /// in [token-major](super::Layout::TokenMajor) layout one call for each token).
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or lacks those tokens or that layer, the
    /// tokens are before a [fork](Self::fork) of or from the sequence, the bytes are not whole
    /// rows, or a copy fails. Rows written before a failed copy stay written.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn write_rows(
        &mut self,
        id: SequenceId,
        layer: u32,
        part: Part,
        first: u64,
        bytes: &[u8],
    ) -> Result<(), KvCacheError> {
        let sequence = self.sequences.get(id)?;
        let rows = self.rows(sequence, layer, part, first, bytes.len())?;
        if first < sequence.fixed {
            return Err(KvCacheError::Fixed {
                sequence: id.number(),
                first,
                fixed: sequence.fixed,
            });
        }
        let Some(block) = sequence.blocks.get(rows.range) else {
            return Ok(());
        };
        if self.geometry.stride == self.geometry.row {
            return Ok(block.write(rows.offset, bytes)?);
        }
        let mut offset = rows.offset;
        for row in bytes.chunks_exact(self.row_len()) {
            block.write(offset, row)?;
            offset += self.geometry.stride;
        }
        Ok(())
    }

    /// Reads one layer's keys or values of the tokens from `first` on, in the format of
    /// [`write_rows`](Self::write_rows) (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or lacks those tokens or that layer, the
    /// bytes are not whole rows, or a copy fails.
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn read_rows(
        &self,
        id: SequenceId,
        layer: u32,
        part: Part,
        first: u64,
        bytes: &mut [u8],
    ) -> Result<(), KvCacheError> {
        let sequence = self.sequences.get(id)?;
        let rows = self.rows(sequence, layer, part, first, bytes.len())?;
        let Some(block) = sequence.blocks.get(rows.range) else {
            return Ok(());
        };
        if self.geometry.stride == self.geometry.row {
            return Ok(block.read(rows.offset, bytes)?);
        }
        let mut offset = rows.offset;
        for row in bytes.chunks_exact_mut(self.row_len()) {
            block.read(offset, row)?;
            offset += self.geometry.stride;
        }
        Ok(())
    }

    fn row_len(&self) -> usize {
        usize::try_from(self.geometry.row).unwrap_or(usize::MAX)
    }

    fn rows(
        &self,
        sequence: &Sequence,
        layer: u32,
        part: Part,
        first: u64,
        bytes: usize,
    ) -> Result<Rows, KvCacheError> {
        let geometry = &self.geometry;
        let Some((range, offset)) = geometry.place(layer, part) else {
            let (what, most) = ("layer", u64::from(geometry.shape.layers) - 1);
            return Err(ArgumentError::TooLarge {
                what,
                value: layer.into(),
                most,
            }
            .into());
        };
        let row = self.row_len();
        ArgumentError::whole("bytes of rows", bytes as u64, geometry.row)?;
        let count = (bytes / row) as u64;
        let (tokens, most) = (first.saturating_add(count), sequence.tokens);
        if tokens > most {
            let sequence = sequence.id.number();
            return Err(KvCacheError::Tokens {
                sequence,
                tokens,
                most,
            });
        }
        Ok(Rows {
            range,
            offset: offset + first * geometry.stride,
        })
    }
}
