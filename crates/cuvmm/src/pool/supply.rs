//! Where memory comes from: the stock, else the driver; and where it goes back to.

use super::budget::TenantId;
use super::state::{Policy, Scrub, State};
use crate::device::Device;
use crate::error::{AllocateError, CreateError};
use crate::own::{CloseRefusal, Physical};
use crate::region::Piece;

/// How many small pieces are mapped sooner than released and created anew as one: each costs the
/// driver about 25 us to open and 11 us to release, and a creation at least 20 us
/// (`docs/measurements.md`).
const WORTH_MAPPING: u64 = 4;

impl State {
    /// Pieces of at most `largest` that make up `bytes` (whole granules), which the tenant has been charged; taken from
    /// others if it `claims` them and the driver has no more. On failure nothing has changed,
    /// except that the driver may have got stock back.
    pub(crate) fn gather(
        &mut self,
        id: TenantId,
        bytes: u64,
        largest: u64,
        claims: bool,
    ) -> Result<Vec<Piece>, AllocateError> {
        let mut pieces = vec![];
        let mut left = bytes;
        while left > 0 {
            match self.one_piece(id, left, largest, claims) {
                Ok(piece) => {
                    left -= piece.size();
                    pieces.push(piece);
                }
                Err(error) => {
                    self.put_back(pieces);
                    return Err(error);
                }
            }
        }
        Ok(pieces)
    }

    /// One piece of at most `left` bytes, as large as can be.
    fn one_piece(
        &mut self,
        id: TenantId,
        left: u64,
        largest: u64,
        claims: bool,
    ) -> Result<Piece, AllocateError> {
        let want = self.device.granule().extent_within(left, largest);
        // During a capture nothing can be scrubbed: then only what may be had as it is.
        let foreign = self.capturing == 0 || self.policy.scrub == Scrub::Never;
        loop {
            if let Some(piece) = self.stock.take(want, Some(id.0), foreign) {
                return Ok(piece);
            }
            let mut refused = None;
            if self.budget.creatable() < want {
                self.merge_stock(want);
            }
            if self.budget.creatable() >= want {
                match self.create(want) {
                    Ok(piece) => return Ok(piece),
                    Err(CreateError::Call { cause, .. }) if cause.is_out_of_memory() => {
                        refused = Some(cause);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(piece) = self.stock.take_within(want, Some(id.0), foreign) {
                return Ok(piece);
            }
            // What is left in stock is too large, or may not be had: the driver gets it back.
            if let Some(piece) = self.stock.take_largest() {
                self.release(piece);
                continue;
            }
            let Some(cause) = refused else {
                return Err(AllocateError::OutOfMemory(self.shortage(id, left, 0)));
            };
            // Below our own limit, and yet the driver has no more: others have it. What lies
            // idle with us is worth more in use.
            if !claims || self.take_back_any(id, want)? == 0 {
                let shortage = self.shortage(id, left, 0);
                return Err(AllocateError::DriverOutOfMemory { cause, shortage });
            }
        }
    }

    /// Releases many small pieces of stock, so that one of `want` bytes can be created instead,
    /// where that costs less than mapping them all; or one that is larger.
    fn merge_stock(&mut self, want: u64) {
        let missing = want - self.budget.creatable();
        if self.stock.pieces_for(want) <= WORTH_MAPPING {
            return;
        }
        if let Some(piece) = self.stock.take_smallest_above(want) {
            self.release(piece);
            return;
        }
        if self.stock.bytes() < missing {
            return;
        }
        while self.budget.creatable() < want {
            let Some(piece) = self.stock.take_smallest() else {
                return;
            };
            self.release(piece);
        }
    }

    fn create(&mut self, size: u64) -> Result<Piece, CreateError> {
        let physical = self.policy.create(&self.device, size)?;
        self.budget.created(size);
        Ok(Piece::fresh(physical))
    }

    /// Undoes [`Self::gather`]: what it created goes back to the driver, the rest to the stock.
    pub(crate) fn put_back(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            if piece.fresh {
                self.release(piece);
            } else {
                self.keep(piece);
            }
        }
    }

    /// Keeps a piece that no slot uses any more for the next tenant that wants memory. What another
    /// process may have goes to the driver. What is still mapped elsewhere, since a roll-back could
    /// not unmap it, is quarantined: it would show the next tenant's data there.
    pub(crate) fn keep(&mut self, piece: Piece) {
        if piece.physical.is_exported() || piece.physical.is_shared() {
            self.release(piece);
        } else {
            self.stock.add(piece);
        }
    }

    /// Gives a piece to the driver, or to the quarantine if it will not have it.
    pub(crate) fn release(&mut self, piece: Piece) -> u64 {
        let size = piece.size();
        match piece.physical.close() {
            Ok(()) => {
                self.budget.released(size);
                size
            }
            Err(failed) => {
                let reason = match failed.reason {
                    CloseRefusal::Call(error) => error.to_string(),
                    _ => "it is mapped elsewhere".to_owned(),
                };
                tracing::error!(%reason, size, "a physical could not be released: quarantined");
                self.budget.quarantine(size, 0);
                self.quarantine.0.push(failed.owner);
                0
            }
        }
    }

    /// Gives stock to the driver until at most `keep` bytes of it are left.
    pub(crate) fn release_stock(&mut self, keep: u64) -> u64 {
        let mut released = 0;
        while self.stock.bytes() > keep {
            let Some(piece) = self.stock.take_largest() else {
                break;
            };
            released += self.release(piece);
        }
        released
    }

    /// Gives to the driver what the stock has grown by since it was `before` bytes, in pieces that
    /// make up so much: what lay there before stays.
    pub(crate) fn release_growth(&mut self, before: u64) {
        let mut left = self.stock.bytes().saturating_sub(before);
        while let Some(piece) = self.stock.take_within(left, None, true) {
            left -= piece.size();
            self.release(piece);
        }
    }
}

impl Policy {
    /// Creates memory of the pool's kind, unless that would leave less free than it promised.
    pub(crate) fn create(&self, device: &Device, size: u64) -> Result<Physical, CreateError> {
        let refuse = |cause| CreateError::Call {
            size,
            location: self.props.location,
            cause,
        };
        if self.leave_free > 0 {
            let info = device.memory_info().map_err(refuse)?;
            if info.free < size.saturating_add(self.leave_free) {
                return Err(refuse(out_of_memory()));
            }
        }
        Physical::builder(device, size)
            .with_props(self.props)
            .create()
    }
}

/// The answer for a creation that would leave less free than the pool promised to leave.
fn out_of_memory() -> crate::error::CallError {
    use cuvmm_driver::{CUresult, Call, DriverError};
    DriverError::new(Call::MemGetInfo, CUresult::CUDA_ERROR_OUT_OF_MEMORY).into()
}
