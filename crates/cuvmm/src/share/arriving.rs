//! The taker's side of an exchange: what becomes of the handles that come.

use cuvmm_driver::Exported;

use crate::error::ShareError;

/// Memory whose description was accepted and whose handles are being received.
pub(super) trait Arriving {
    /// The memory with all its handles.
    type Whole;

    /// Takes the next handles.
    fn add(&mut self, handles: Vec<Exported>) -> Result<(), ShareError>;

    /// Returns `true` once all handles have been taken.
    fn is_complete(&self) -> bool;

    /// Returns the whole memory, or releases all of it.
    fn finish(self) -> Result<Self::Whole, ShareError>;

    /// Releases whole memory, because the peer or the caller refused it.
    fn discard(whole: Self::Whole);
}
