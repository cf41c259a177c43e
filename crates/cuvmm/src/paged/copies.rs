//! Copies of blocks by the host, to move them to host memory and back or to inspect what a kernel
//! wrote.

use super::PagedKv;
use super::numbers::no_such;
use super::state::{State, Use};
use crate::deferred::Locked;
use crate::error::{ArgumentError, PagedKvError};

impl PagedKv {
    /// Writes one layer's part of a block in use, as contiguous `[token, head, element]`, behind the
    /// home stream's work, and waits for the copy (`cuMemcpyHtoDAsync`; in
    /// [token-major](super::Layout::TokenMajor) layout one call for each token).
    ///
    /// # Errors
    /// [`PagedKvError`] if the block is not in use, the cache sleeps, there is no such layer or part, the bytes are not
    /// those of the part, or a copy fails. Tokens written before a failed copy stay written.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn write(
        &self,
        number: u32,
        (group, layer, part): (usize, u32, usize),
        bytes: &[u8],
    ) -> Result<(), PagedKvError> {
        let (state, piece, offsets) = self.pieces(number, (group, layer, part), bytes.len())?;
        for (bytes, offset) in bytes.chunks_exact(piece).zip(offsets) {
            state.region.write(&self.core.home, offset, bytes)?;
        }
        Ok(())
    }

    /// Reads one layer's part of a block in use, in the format of [`write`](Self::write)
    /// (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`PagedKvError`] in the cases of [`write`](Self::write).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn read(
        &self,
        number: u32,
        (group, layer, part): (usize, u32, usize),
        bytes: &mut [u8],
    ) -> Result<(), PagedKvError> {
        let (state, piece, offsets) = self.pieces(number, (group, layer, part), bytes.len())?;
        for (bytes, offset) in bytes.chunks_exact_mut(piece).zip(offsets) {
            state.region.read(&self.core.home, offset, bytes)?;
        }
        Ok(())
    }

    /// Locks the cache, and returns the contiguous pieces of a layer's part of a block in use: the
    /// bytes of each, which are all, or those of a token's row, and the offsets.
    fn pieces(
        &self,
        number: u32,
        (group, layer, part): (usize, u32, usize),
        bytes: usize,
    ) -> Result<(Locked<'_, State>, usize, impl Iterator<Item = u64> + use<>), PagedKvError> {
        let place = self.geometry.place(group, layer, part);
        let no_place = || no_such("such part of a layer in this group, layer", layer);
        let place = place.ok_or_else(no_place)?;
        let state = self.lock()?;
        state.check_awake()?;
        if !matches!(state.use_of(number)?, Use::Backed | Use::Pinned) {
            return Err(PagedKvError::NotInUse(number));
        }
        let ([_, tokens, ..], [block, token, ..]) = (place.shape, place.strides);
        let (all, given) = (tokens * place.row(), bytes as u64);
        let what = "bytes of a block's part";
        ArgumentError::at_least(what, given, all)?;
        ArgumentError::at_most(what, given, all)?;
        let piece = match token == place.row() {
            true => bytes,
            false => usize::try_from(place.row()).unwrap_or(bytes),
        };
        let first = place.offset + u64::from(number) * block;
        let offsets = (0..tokens).map(move |at| first + at * token);
        Ok((state, piece, offsets))
    }
}
