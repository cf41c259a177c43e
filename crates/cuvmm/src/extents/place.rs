//! Placing a physical at an offset: mapped and made accessible, or not mapped at all.

use super::fence::Unused;
use super::mapped::{Mapped, StuckMappings};
use crate::error::{CallError, MemoryError};
use crate::own::{Access, AccessGrant, Physical, Place, Reservation};
use cuvmm_driver::{DeviceAddress, LocationKind, PhysicalHandle};

/// The last writer of a physical since the driver zeroed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastWriter {
    /// The tenant that used the physical last, as a number that the pool chooses.
    pub(crate) by: u64,
    /// Set if all of the physical was overwritten since: it holds no tenant's data.
    pub(crate) blank: bool,
}

impl LastWriter {
    /// A number that no tenant has, for memory that several tenants may have written to: it is
    /// scrubbed for each user.
    pub(crate) const SEVERAL: u64 = u64::MAX;
}

#[derive(Debug)]
pub(crate) struct Unmapped {
    pub(crate) physical: Physical,
    pub(crate) last_writer: Option<LastWriter>,
    /// Set if the physical was created for the running operation, which releases it on failure.
    pub(crate) fresh: bool,
}

impl Unmapped {
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
    /// Set as in [`Unmapped`], until the operation that placed the extent has
    /// [settled](super::space::Space::settle).
    pub(super) fresh: bool,
    /// The cap on every device's access.
    pub(super) most: Access,
    pub(super) host: bool,
}

impl Placed {
    pub(crate) fn size(&self) -> u64 {
        self.mapping.size()
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.mapping.address()
    }

    pub(crate) fn handle(&self) -> PhysicalHandle {
        self.mapping.physical().as_raw()
    }

    /// Returns the extent's memory, for the case that the driver panics while it is unmapped.
    pub(crate) fn memory(&self) -> Unmapped {
        Unmapped {
            physical: self.mapping.physical().clone(),
            last_writer: self.last_writer,
            fresh: false,
        }
    }

    /// Returns `true` if the extent may be written and its physical has no other holder in this
    /// process.
    pub(crate) fn is_own(&self) -> bool {
        self.most == Access::ReadWrite && !self.mapping.physical().is_shared()
    }

    /// Notes that a tenant has used the extent.
    pub(crate) const fn used_by(&mut self, by: u64) {
        self.last_writer = Some(LastWriter { by, blank: false });
        self.fresh = false;
    }

    pub(super) fn host_grant(&self) -> Option<AccessGrant> {
        let location = self.mapping.physical().location();
        (location.kind == LocationKind::HOST_NUMA)
            .then(|| AccessGrant::new(Place::HostNuma(location.id), Access::ReadWrite))
    }

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

/// A failed placement: nothing of it is mapped, except stuck mappings.
#[derive(Debug)]
pub(crate) struct PlaceError {
    pub(crate) error: MemoryError,
    pub(crate) physicals: Vec<Unmapped>,
    /// Bytes of physicals that could not be unmapped again. They stay in the space.
    pub(crate) stuck: u64,
}

impl PlaceError {
    /// Unmaps an extent that was just placed. Tries twice.
    #[cold]
    #[inline(never)]
    pub(super) fn take_out(&mut self, placed: Placed) {
        let unmapped = placed.unmap(Unused::never_used());
        let unmapped = unmapped.or_else(|(placed, error)| {
            log!(warn, %error, "a roll-back is tried again");
            placed.unmap(Unused::never_used())
        });
        match unmapped {
            Ok(unmapped) => self.physicals.push(unmapped),
            Err((placed, error)) => {
                log!(error, %error, "a roll-back could not unmap: quarantined");
                self.stuck += placed.size();
            }
        }
    }
}

/// The reservation of a space and its grants, to place extents without the space.
#[derive(Debug)]
pub(crate) struct Target {
    pub(super) reservation: Reservation,
    pub(super) access: Vec<AccessGrant>,
    pub(super) stuck: StuckMappings,
}

impl Target {
    /// Returns another target in the same space.
    pub(super) fn another(&self) -> Self {
        Self {
            reservation: self.reservation.another(),
            access: self.access.clone(),
            stuck: self.stuck.clone(),
        }
    }

    /// Maps a physical at an offset that no other operation uses. What a failure or a panic of the
    /// driver leaves mapped is stuck in the space.
    pub(crate) fn place(&self, offset: u64, unmapped: Unmapped) -> Result<Placed, PlaceError> {
        self.place_for(offset, unmapped, Access::ReadWrite)
    }

    /// [Maps](Self::place) a physical, where no device has more access than `most`.
    pub(super) fn place_for(
        &self,
        offset: u64,
        unmapped: Unmapped,
        most: Access,
    ) -> Result<Placed, PlaceError> {
        let size = unmapped.size();
        let mapping = match Mapped::map(&self.reservation, &self.stuck, offset, &unmapped.physical)
        {
            Ok(mapping) => mapping,
            Err(error) => {
                return Err(PlaceError {
                    error,
                    physicals: vec![unmapped],
                    stuck: 0,
                });
            }
        };
        let opened = mapping.open(&self.access, most);
        let placed = Placed {
            mapping,
            last_writer: unmapped.last_writer,
            fresh: unmapped.fresh,
            most,
            host: false,
        };
        // The mapping holds the physical. A second holder would prevent taking it out again.
        drop(unmapped);
        match opened {
            Ok(()) => Ok(placed),
            Err(error) => {
                let mut failed = PlaceError {
                    error: access_failed(offset, size, error),
                    physicals: vec![],
                    stuck: 0,
                };
                failed.take_out(placed);
                Err(failed)
            }
        }
    }
}

fn access_failed(offset: u64, size: u64, error: MemoryError) -> MemoryError {
    match error {
        MemoryError::Range { cause, .. } => MemoryError::range(offset, size, cause),
        other => other,
    }
}
