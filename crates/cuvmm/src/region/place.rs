//! Placing one physical at one offset: mapped and opened, or not there at all.

use super::fence::Unused;
use super::mapped::Mapped;
use crate::error::{AccessError, CallError, CommitError};
use crate::own::{Access, Physical, Reservation, Right};
use cuvmm_driver::LocationKind;

/// What a physical holds that is not as the driver zeroed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stain {
    /// Whoever used it last; a number of the pool's choosing.
    pub(crate) by: u64,
    /// Whether all of it was overwritten afterwards, so that nobody's data is left.
    pub(crate) blank: bool,
}

/// A physical that is not mapped, and who wrote to it last.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) physical: Physical,
    /// Whoever used it since the driver zeroed it.
    pub(crate) stain: Option<Stain>,
    /// Whether it was created for the operation that is running, which undoes that if it fails.
    pub(crate) fresh: bool,
}

impl Piece {
    /// One that was just created.
    pub(crate) const fn fresh(physical: Physical) -> Self {
        Self {
            physical,
            stain: None,
            fresh: true,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.physical.size()
    }
}

/// An extent.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(super) mapping: Mapped,
    pub(super) stain: Option<Stain>,
    /// As in [`Piece`], until the operation that placed it has
    /// [settled](super::space::Space::settle).
    pub(super) fresh: bool,
    /// The most that anybody may do with it.
    pub(super) most: Right,
}

impl Placed {
    /// Unmaps it, or hands it back.
    pub(super) fn unmap(self, proof: Unused) -> Result<Piece, (Self, CallError)> {
        let Self {
            mapping,
            stain,
            fresh,
            most,
        } = self;
        match mapping.unmap(proof) {
            Ok(physical) => Ok(Piece {
                physical,
                stain,
                fresh,
            }),
            Err((mapping, error)) => {
                let placed = Self {
                    mapping,
                    stain,
                    fresh,
                    most,
                };
                Err((placed, error))
            }
        }
    }
}

/// A placing that failed: nothing of it is mapped, except what is stuck.
#[derive(Debug)]
pub(crate) struct PlaceError {
    pub(crate) error: CommitError,
    /// The pieces, back in the caller's hands.
    pub(crate) pieces: Vec<Piece>,
    /// Bytes of pieces that could not be unmapped again. They stay in the space.
    pub(crate) stuck: u64,
}

/// The same before a space has kept what is stuck.
pub(crate) struct PlaceFailure {
    pub(crate) error: CommitError,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) stuck: Vec<Mapped>,
}

impl PlaceFailure {
    /// Unmaps what a roll-back takes out again.
    pub(super) fn take_out(&mut self, placed: Placed) {
        match placed.unmap(Unused::never_used()) {
            Ok(piece) => self.pieces.push(piece),
            Err((placed, error)) => {
                tracing::error!(%error, "a roll-back could not unmap: quarantined");
                self.stuck.push(placed.mapping);
            }
        }
    }
}

/// A space's addresses and who has access there, to place extents without the space.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(super) reservation: Reservation,
    pub(super) access: Vec<Access>,
}

impl Ground {
    /// Places a piece at an offset that nobody else places at.
    pub(crate) fn place(&self, offset: u64, piece: Piece) -> Result<Placed, PlaceFailure> {
        place_one(
            &self.reservation,
            &self.access,
            offset,
            piece,
            Right::ReadWrite,
        )
    }
}

/// Who has which access to a physical: those of the space, nobody more than `most`, and the host's
/// processors to host memory.
pub(super) fn opened_to(access: &[Access], physical: &Physical, most: Right) -> Vec<Access> {
    let location = physical.location();
    let host = (location.kind == LocationKind::HOST_NUMA)
        .then(|| Access::host_numa(location.id, Right::ReadWrite));
    access
        .iter()
        .chain(&host)
        .map(|access| access.at_most(most))
        .collect()
}

/// Maps a piece at an offset and opens it.
pub(super) fn place_one(
    reservation: &Reservation,
    access: &[Access],
    offset: u64,
    piece: Piece,
    most: Right,
) -> Result<Placed, PlaceFailure> {
    let size = piece.size();
    let mapping = match reservation.map(offset, &piece.physical) {
        Ok(mapping) => Mapped::new(mapping),
        Err(error) => {
            return Err(PlaceFailure {
                error: CommitError::Map(error),
                pieces: vec![piece],
                stuck: vec![],
            });
        }
    };
    let opened = mapping.set_access(&opened_to(access, &piece.physical, most));
    let placed = Placed {
        mapping,
        stain: piece.stain,
        fresh: piece.fresh,
        most,
    };
    // The mapping holds the physical: this is no longer a holder, or it could not be taken back.
    drop(piece);
    match opened {
        Ok(()) => Ok(placed),
        Err(error) => {
            let mut failed = PlaceFailure {
                error: access_failed(offset, size, error),
                pieces: vec![],
                stuck: vec![],
            };
            failed.take_out(placed);
            Err(failed)
        }
    }
}

fn access_failed(offset: u64, size: u64, error: AccessError) -> CommitError {
    match error {
        AccessError::Call { cause, .. } => CommitError::Call {
            offset,
            size,
            cause,
        },
        other => CommitError::Access(other),
    }
}
