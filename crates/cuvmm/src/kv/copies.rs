//! Copies of rows by the host, for example to restore a prefix or to inspect what a kernel wrote.

use super::KvCache;
use super::sequences::{Sequence, SequenceId};
use super::shape::Part;
use crate::error::{ArgumentError, KvCacheError};
use crate::pool::Block;

/// Rows in one layer.
struct Rows<'a> {
    block: &'a Block,
    offset: u64,
    /// The contiguous bytes: all of them, or those of a row.
    piece: usize,
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
        let mut offset = rows.offset;
        for piece in bytes.chunks_exact(rows.piece) {
            rows.block.write(offset, piece)?;
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
        let mut offset = rows.offset;
        for piece in bytes.chunks_exact_mut(rows.piece) {
            rows.block.read(offset, piece)?;
            offset += self.geometry.stride;
        }
        Ok(())
    }

    fn rows<'a>(
        &self,
        sequence: &'a Sequence,
        layer: u32,
        part: Part,
        first: u64,
        bytes: usize,
    ) -> Result<Rows<'a>, KvCacheError> {
        let geometry = &self.geometry;
        let place = geometry.place(layer, part);
        let place = place.and_then(|(range, offset)| Some((sequence.blocks.get(range)?, offset)));
        let (block, offset) = place.ok_or_else(|| ArgumentError::TooLarge {
            what: "layer",
            value: layer.into(),
            most: u64::from(geometry.shape.layers) - 1,
        })?;
        ArgumentError::whole("bytes of rows", bytes as u64, geometry.row)?;
        let tokens = first.saturating_add(bytes as u64 / geometry.row);
        if tokens > sequence.tokens {
            return Err(sequence.beyond_end(tokens));
        }
        Ok(Rows {
            block,
            offset: offset + first * geometry.stride,
            piece: match geometry.stride == geometry.row {
                true => bytes,
                false => usize::try_from(geometry.row).unwrap_or(bytes),
            },
        })
    }
}
