//! Copies of blocks by the host, to move them to host memory and back or to inspect what a kernel
//! wrote.

use super::PagedKv;
use super::numbers::no_such;
use super::shape::Place;
use super::state::{State, Use};
use crate::error::{ArgumentError, PagedKvError};

/// A layer's part of a block: contiguous pieces at one stride.
struct Pieces {
    offset: u64,
    /// The bytes of a piece: all, or those of a token's row.
    piece: usize,
    stride: u64,
}

impl PagedKv {
    /// Writes one layer's part of a block in use, as contiguous `[token, head, element]`, behind the
    /// home stream's work, and waits for the copy (`cuMemcpyHtoDAsync`; in
    /// [token-major](super::Layout::TokenMajor) layout one call for each token).
    ///
    /// # Errors
    /// [`PagedKvError`] if the block is not in use, there is no such layer or part, the bytes are not
    /// those of the part, or a copy fails. Tokens written before a failed copy stay written.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn write(
        &self,
        number: u32,
        (group, layer, part): (usize, u32, usize),
        bytes: &[u8],
    ) -> Result<(), PagedKvError> {
        let place = self.place(group, layer, part)?;
        let state = self.lock()?;
        let Pieces {
            mut offset,
            piece,
            stride,
        } = pieces(&state, number, &place, bytes.len())?;
        for bytes in bytes.chunks_exact(piece) {
            state.region.write(&self.home, offset, bytes)?;
            offset += stride;
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
        let place = self.place(group, layer, part)?;
        let state = self.lock()?;
        let Pieces {
            mut offset,
            piece,
            stride,
        } = pieces(&state, number, &place, bytes.len())?;
        for bytes in bytes.chunks_exact_mut(piece) {
            state.region.read(&self.home, offset, bytes)?;
            offset += stride;
        }
        Ok(())
    }

    fn place(&self, group: usize, layer: u32, part: usize) -> Result<Place, ArgumentError> {
        let place = self.geometry.place(group, layer, part);
        place.ok_or_else(|| no_such("such part of a layer in this group, layer", layer))
    }
}

fn pieces(state: &State, number: u32, place: &Place, bytes: usize) -> Result<Pieces, PagedKvError> {
    if !matches!(state.use_of(number)?, Use::Backed | Use::Pinned) {
        return Err(PagedKvError::NotInUse(number));
    }
    let [_, tokens, ..] = place.shape;
    let [block, token, ..] = place.strides;
    let (all, given) = (tokens * place.row(), bytes as u64);
    let what = "bytes of a block's part";
    ArgumentError::at_least(what, given, all)?;
    ArgumentError::at_most(what, given, all)?;
    Ok(Pieces {
        offset: place.offset + u64::from(number) * block,
        piece: match token == place.row() {
            true => bytes,
            false => usize::try_from(place.row()).unwrap_or(bytes),
        },
        stride: token,
    })
}
