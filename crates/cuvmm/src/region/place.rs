//! Placing one physical at one offset: mapped and opened, or not there at all.

use super::fence::Unused;
use super::mapped::Mapped;
use crate::error::{CallError, MemoryError};
use crate::own::{Access, AccessGrant, Physical, Reservation};
use cuvmm_driver::LocationKind;

/// What a physical holds that is not as the driver zeroed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastWriter {
    /// Whoever used it last; a number of the pool's choosing.
    pub(crate) by: u64,
    /// Whether all of it was overwritten afterwards, so that nobody's data is left.
    pub(crate) blank: bool,
}

impl LastWriter {
    /// A number that no user has, for memory that several may have written to: it is scrubbed for each.
    pub(crate) const SEVERAL: u64 = u64::MAX;
}

/// A physical that is not mapped, and who wrote to it last.
#[derive(Debug)]
pub(crate) struct Unmapped {
    pub(crate) physical: Physical,
    /// Whoever used it since the driver zeroed it.
    pub(crate) last_writer: Option<LastWriter>,
    /// Whether it was created for the operation that is running, which undoes that if it fails.
    pub(crate) fresh: bool,
}

impl Unmapped {
    /// One that was just created.
    pub(crate) const fn fresh(physical: Physical) -> Self {
        Self {
            physical,
            last_writer: None,
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
    pub(super) last_writer: Option<LastWriter>,
    /// As in [`Unmapped`], until the operation that placed it has
    /// [settled](super::space::Space::settle).
    pub(super) fresh: bool,
    /// The most that anybody may do with it.
    pub(super) most: Access,
    /// Whether the host's processors were let in.
    pub(super) host: bool,
}

impl Placed {
    /// The access of the host's processors, if it is host memory.
    pub(super) fn host_grant(&self) -> Option<AccessGrant> {
        let location = self.mapping.physical().location();
        (location.kind == LocationKind::HOST_NUMA)
            .then(|| AccessGrant::host_numa(location.id, Access::ReadWrite))
    }

    /// Unmaps it, or hands it back.
    pub(super) fn unmap(self, proof: Unused) -> Result<Unmapped, (Self, CallError)> {
        let Self {
            mapping,
            last_writer,
            fresh,
            most,
            host,
        } = self;
        match mapping.unmap(proof) {
            Ok(physical) => Ok(Unmapped {
                physical,
                last_writer,
                fresh,
            }),
            Err((mapping, error)) => {
                let placed = Self {
                    mapping,
                    last_writer,
                    fresh,
                    most,
                    host,
                };
                Err((placed, error))
            }
        }
    }
}

/// A placing that failed: nothing of it is mapped, except what is stuck.
#[derive(Debug)]
pub(crate) struct PlaceError {
    pub(crate) error: MemoryError,
    /// The physicals, back in the caller's hands.
    pub(crate) physicals: Vec<Unmapped>,
    /// Bytes of physicals that could not be unmapped again. They stay in the space.
    pub(crate) stuck: u64,
}

/// The same before a space has kept what is stuck.
pub(crate) struct PlaceFailure {
    pub(crate) error: MemoryError,
    pub(crate) physicals: Vec<Unmapped>,
    pub(crate) stuck: Vec<Mapped>,
}

impl PlaceFailure {
    /// Unmaps what a roll-back takes out again.
    pub(super) fn take_out(&mut self, placed: Placed) {
        match placed.unmap(Unused::never_used()) {
            Ok(unmapped) => self.physicals.push(unmapped),
            Err((placed, error)) => {
                tracing::error!(%error, "a roll-back could not unmap: quarantined");
                self.stuck.push(placed.mapping);
            }
        }
    }
}

/// A space's addresses and who has access there, to place extents without the space.
#[derive(Debug)]
pub(crate) struct Target {
    pub(super) reservation: Reservation,
    pub(super) access: Vec<AccessGrant>,
}

impl Target {
    /// Places a physical at an offset that nobody else places at.
    pub(crate) fn place(&self, offset: u64, unmapped: Unmapped) -> Result<Placed, PlaceFailure> {
        place_one(
            &self.reservation,
            &self.access,
            offset,
            unmapped,
            Access::ReadWrite,
        )
    }
}

/// Maps a physical at an offset and opens it.
pub(super) fn place_one(
    reservation: &Reservation,
    access: &[AccessGrant],
    offset: u64,
    unmapped: Unmapped,
    most: Access,
) -> Result<Placed, PlaceFailure> {
    let size = unmapped.size();
    let mapping = match reservation.map(offset, &unmapped.physical) {
        Ok(mapping) => Mapped::new(mapping),
        Err(error) => {
            return Err(PlaceFailure {
                error,
                physicals: vec![unmapped],
                stuck: vec![],
            });
        }
    };
    let access: Vec<AccessGrant> = access.iter().map(|it| it.at_most(most)).collect();
    let opened = mapping.set_access(&access);
    let placed = Placed {
        mapping,
        last_writer: unmapped.last_writer,
        fresh: unmapped.fresh,
        most,
        host: false,
    };
    // The mapping holds the physical: this is no longer a holder, or it could not be taken back.
    drop(unmapped);
    match opened {
        Ok(()) => Ok(placed),
        Err(error) => {
            let mut failed = PlaceFailure {
                error: access_failed(offset, size, error),
                physicals: vec![],
                stuck: vec![],
            };
            failed.take_out(placed);
            Err(failed)
        }
    }
}

fn access_failed(offset: u64, size: u64, error: MemoryError) -> MemoryError {
    match error {
        MemoryError::Range { cause, .. } => MemoryError::range(offset, size, cause),
        other => other,
    }
}
