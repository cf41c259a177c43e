//! Memory as its owner offers it: which extents, with what right, as what handles.
//!
//! An offer holds the memory, so it can be given again and again, and after its owner has gone. What
//! was given once is [exported](Physical::is_exported) for good.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::Pod;
use cuvmm_driver::{Exported, HandleTypes, LocationKind};

use super::parcel::Parcel;
use super::wire::{Description, Elements, Origin, SharedExtent};
use crate::error::{MemoryError, ShareError};
use crate::own::{Access, Physical, Place};
use crate::pool::{Block, Lease};
use crate::region::{Extent, Region};
use crate::vec::DeviceVec;

/// How many handles an offer keeps once they are made: making one can take the driver half a
/// millisecond (`docs/measurements.md`), and what is published is given often. Where extents are many,
/// so would be the descriptors.
const MOST_KEPT: usize = 64;

/// Memory to be given to other processes: a physical, a region, a vector, a pool's block.
///
/// It lets them read, unless told [otherwise](Self::read_write). The driver enforces that on nobody:
/// what has the handle can write, so give it to processes that you trust.
///
/// The memory that is offered must have been made shareable
/// ([`PhysicalBuilder::shareable`](crate::own::PhysicalBuilder::shareable),
/// [`RegionBuilder::shareable`](crate::region::RegionBuilder::shareable),
/// [`PoolBuilder::shareable`](crate::pool::PoolBuilder::shareable)). From the offer on it counts as
/// exported. The offer keeps it: what the owner decommits meanwhile stays with whoever holds the
/// offer, and what it commits anew is not part of it.
#[derive(Debug)]
pub struct Offer {
    description: Description,
    /// One for each extent, in their order.
    physicals: Vec<Physical>,
    /// Handles of all of them, where they are few.
    kept: OnceLock<Vec<Exported>>,
    /// What keeps a block's memory in place, and goes after it.
    _lease: Option<Lease>,
}

impl Offer {
    /// Offers one physical.
    ///
    /// # Errors
    /// [`ShareError`] when it lies where a description cannot say.
    pub fn physical(physical: &Physical) -> Result<Self, ShareError> {
        physical.mark_exported();
        Self::of_parts(physical.size(), None, vec![(0, physical.clone())])
    }

    /// Offers what is committed of a range of a region. Offsets begin with the range.
    ///
    /// # Errors
    /// [`ShareError`] when the range leaves the region, nothing is committed there, or it cuts an
    /// extent or has to be [unshared](Region::unshare) first.
    pub fn region(region: &Region, range: Range<u64>) -> Result<Self, ShareError> {
        region.check(&range)?;
        let (start, end) = (range.start, range.end);
        region.check_whole(&range)?;
        let read_only = MemoryError::read_only(&range);
        let parts = region.promise(range).ok_or(read_only)?;
        let size = end.saturating_sub(start);
        let placed = parts
            .into_iter()
            .map(|(extent, physical)| (extent.offset - start, physical));
        Self::of_parts(size, None, placed.collect())
    }

    /// Offers a vector: its elements, and the memory behind the last as far as the extent goes that
    /// it lies in. What is added later is not part of it.
    ///
    /// # Errors
    /// [`ShareError`] when it is empty.
    pub fn vec<T: Pod>(vec: &DeviceVec<T>) -> Result<Self, ShareError> {
        let elements = Elements {
            count: vec.len() as u64,
            size: u32::try_from(size_of::<T>()).unwrap_or(0),
        };
        let parts = vec.promise();
        let size = end_of(&parts);
        Self::of_parts(size, Some(elements), offsets(parts))
    }

    /// Offers a block of a pool, whole extents: the last may reach beyond the block's end. While the
    /// offer lives the block's memory stays in place, even if the block is dropped.
    ///
    /// # Errors
    /// [`ShareError`] when the block sleeps or shares memory with [forks](Block::fork), or a
    /// description cannot say where it lies.
    pub fn block(block: &Block) -> Result<Self, ShareError> {
        let (parts, lease) = block.parts()?.promise();
        let size = end_of(&parts);
        let mut offer = Self::of_parts(size, None, offsets(parts))?;
        offer._lease = Some(lease);
        Ok(offer)
    }

    fn of_parts(
        size: u64,
        elements: Option<Elements>,
        parts: Vec<(u64, Physical)>,
    ) -> Result<Self, ShareError> {
        let Some(granularity) = parts.first().map(|(_, first)| first.device().granularity()) else {
            return Err(MemoryError::not_committed(&(0..size)).into());
        };
        let mut known = BTreeMap::new();
        let mut extents = Vec::with_capacity(parts.len());
        let mut physicals = Vec::with_capacity(parts.len());
        for (offset, physical) in parts {
            let origin = match known.get(&physical.location()) {
                Some(&origin) => origin,
                None => {
                    let origin = origin_of(&physical)?;
                    known.insert(physical.location(), origin);
                    origin
                }
            };
            extents.push(SharedExtent::new(offset, physical.size(), origin));
            physicals.push(physical);
        }
        let description = Description::new(
            Access::Read,
            HandleTypes::POSIX_FD,
            granularity,
            size,
            elements,
            extents,
        )?;
        Ok(Self {
            description,
            physicals,
            kept: OnceLock::new(),
            _lease: None,
        })
    }

    /// Lets the others write as well.
    #[must_use]
    pub fn read_write(mut self) -> Self {
        self.description = self.description.with_access(Access::ReadWrite);
        self
    }

    /// Gives fabric handles, which name memory across nodes, instead of descriptors. The memory must
    /// have been made for it, which few machines can
    /// ([`Physical::probe_export`] tells).
    #[must_use]
    pub fn as_fabric(mut self) -> Self {
        self.description = self.description.with_handle_type(HandleTypes::FABRIC);
        // Those that were made are of another type.
        self.kept = OnceLock::new();
        self
    }

    /// What is offered.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Makes all handles at once, for a transport of the caller's own
    /// (`cuMemExportToShareableHandle` for each extent).
    ///
    /// # Errors
    /// [`ShareError`] when the driver gives no handle.
    pub fn parcel(&self) -> Result<Parcel, ShareError> {
        let handles = self.handles(0..self.physicals.len())?;
        Ok(Parcel {
            description: self.description.clone(),
            handles,
        })
    }

    /// The handles of some extents: made now, or once for all.
    pub(super) fn batch(&self, range: Range<usize>) -> Result<Batch<'_>, ShareError> {
        if self.physicals.len() > MOST_KEPT {
            return Ok(Batch::Made(self.handles(range)?));
        }
        let kept = match self.kept.get() {
            Some(kept) => kept,
            None => {
                let made = self.handles(0..self.physicals.len())?;
                self.kept.get_or_init(|| made)
            }
        };
        Ok(Batch::Kept(kept.get(range).unwrap_or_default()))
    }

    fn handles(&self, range: Range<usize>) -> Result<Vec<Exported>, ShareError> {
        let some = self.physicals.get(range).unwrap_or_default();
        some.iter()
            .map(|physical| Ok(physical.export(self.description.handle_type())?))
            .collect()
    }
}

/// Handles to be sent.
#[derive(Debug)]
pub(super) enum Batch<'a> {
    Made(Vec<Exported>),
    Kept(&'a [Exported]),
}

impl Batch<'_> {
    pub(super) fn handles(&self) -> &[Exported] {
        match self {
            Self::Made(made) => made,
            Self::Kept(kept) => kept,
        }
    }
}

/// One past the last byte of the last extent.
fn end_of(parts: &[(Extent, Physical)]) -> u64 {
    parts.last().map_or(0, |(extent, _)| extent.end())
}

fn offsets(parts: Vec<(Extent, Physical)>) -> Vec<(u64, Physical)> {
    let parts = parts.into_iter();
    parts
        .map(|(extent, physical)| (extent.offset, physical))
        .collect()
}

/// Where a physical lies, so that another process understands it.
fn origin_of(physical: &Physical) -> Result<Origin, ShareError> {
    match physical.place() {
        Place::Device(device) => Ok(Origin::Device(device.uuid())),
        Place::HostNuma(node) if physical.location().kind == LocationKind::HOST_NUMA => {
            Ok(Origin::HostNuma(node))
        }
        _ => Err(ShareError::Unnameable {
            location: physical.location(),
        }),
    }
}
