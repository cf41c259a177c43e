//! Memory that is offered to other processes: its extents, the access, and the type of the handles.
//!
//! An offer holds the memory, so it can be given repeatedly, and after the owner is dropped. Given
//! memory counts as [exported](Physical::is_exported) for good.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use cuvmm_driver::{Exported, HandleTypes, LocationKind};

use super::parcel::Parcel;
use super::places::Places;
use super::wire::{Description, Elements, Origin, SharedExtent};
use crate::error::{MemoryError, ShareError};
use crate::extents::Extent;
use crate::heap::Allocation;
use crate::ledger::OpenOffer;
use crate::own::{Access, Physical, Place};
use crate::pool::{Block, Lease, Promised};
use crate::region::Region;
use crate::vec::DeviceVec;

/// The most handles that an offer keeps once they are made. Making a handle can take the driver
/// half a millisecond (`docs/measurements.md`), and a publication is given often. More descriptors
/// would be too many to keep open.
const MOST_KEPT: usize = 64;

/// Memory to be given to other processes: a physical, a range of a region, a vector, a block of a
/// pool, or [several](Self::several) blocks and allocations of heaps.
///
/// An offer grants read access unless [`read_write`](Self::read_write) is called. The driver does
/// not enforce this: every process that holds a handle can write, so give memory only to processes
/// that you trust.
///
/// The memory must have been created as shareable
/// ([`PhysicalBuilder::shareable`](crate::own::PhysicalBuilder::shareable),
/// [`RegionBuilder::shareable`](crate::region::RegionBuilder::shareable),
/// [`PoolBuilder::shareable`](crate::pool::PoolBuilder::shareable)). It counts as exported from the
/// offer on. The offer keeps its memory when the owner decommits extents later, and does not
/// include memory that the owner commits later.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// use cuvmm::driver::HandleTypes;
/// use cuvmm::{Access, Offer, Region};
///
/// let mut region = Region::builder(&device, 4 << 20).shareable(HandleTypes::POSIX_FD).reserve()?;
/// region.commit(0..region.size())?;
/// let offer = Offer::region(&region, 0..region.size())?.read_write();
/// assert_eq!(offer.description().access(), Access::ReadWrite);
///
/// // Give it over a `Channel`, or send its parts over another transport.
/// let (description, handles) = offer.parcel()?.into_parts();
/// assert_eq!(description.extents().len(), handles.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "IPC")]
pub struct Offer {
    pub(super) description: Description,
    /// The physical of each extent, in order; none of memory that was received.
    physicals: Vec<Physical>,
    /// The handles of all extents, if there are at most [`MOST_KEPT`].
    kept: OnceLock<Vec<Exported>>,
    /// The handles of all extents, if another process has given them.
    received: Option<Vec<Exported>>,
    /// Where the memory of blocks and allocations is mapped in this process.
    pub(super) places: Places,
    /// Keeps the memory mapped, and is dropped after the physicals.
    pub(super) keeps: Keeps,
}

/// Keeps the memory of an offer in place.
#[derive(Debug, Default)]
pub(super) struct Keeps {
    /// Of blocks.
    pub(super) leases: Vec<Lease>,
    pub(super) allocations: Vec<Arc<Allocation>>,
    /// The entry in a ledger.
    pub(super) counted: Option<OpenOffer>,
}

impl Offer {
    /// Offers one physical.
    ///
    /// # Errors
    /// [`ShareError`] if a description cannot express the place of the memory.
    pub fn physical(physical: &Physical) -> Result<Self, ShareError> {
        physical.mark_exported();
        Self::of_parts(physical.size(), None, vec![(0, physical.clone())])
    }

    /// Offers the committed memory in a range of a region. Offsets of the offer start at the start
    /// of the range.
    ///
    /// # Errors
    /// [`ShareError`] if the range is not within the region, nothing is committed in it, it cuts an
    /// extent, or it must be [unshared](Region::unshare) first.
    pub fn region(region: &Region, range: Range<u64>) -> Result<Self, ShareError> {
        region.check(&range)?;
        let (start, end) = (range.start, range.end);
        region.check_whole(&range)?;
        let read_only = MemoryError::ReadOnly(range.clone());
        let parts = region.promise(range).ok_or(read_only)?;
        let size = end.saturating_sub(start);
        let placed = parts
            .into_iter()
            .map(|(extent, physical)| (extent.offset - start, physical));
        Self::of_parts(size, None, placed.collect())
    }

    /// Offers a vector: its elements, and the memory behind them up to the end of the extent.
    /// Memory that the vector adds later is not part of the offer.
    ///
    /// # Errors
    /// [`ShareError`] if the vector is empty.
    pub fn vec<T: Pod>(vec: &DeviceVec<T>) -> Result<Self, ShareError> {
        let elements = Elements {
            count: vec.len() as u64,
            size: u32::try_from(size_of::<T>()).unwrap_or(0),
        };
        let parts = vec.promise();
        let size = end_of(&parts);
        Self::of_parts(size, Some(elements), offsets(parts))
    }

    /// Offers a block of a pool, in whole extents: the last one may reach beyond the end of the
    /// block. While the offer lives, the block's memory stays in place, even if the block is
    /// dropped.
    ///
    /// # Errors
    /// [`ShareError`] if the block has zero bytes or is asleep, shares memory with [forks](Block::fork), the pool's
    /// ledger counts no more exported blocks, or a description cannot express the place of its
    /// memory.
    pub fn block(block: &Block) -> Result<Self, ShareError> {
        let Promised {
            list,
            lease,
            counted,
        } = block.parts()?.promise()?;
        let size = end_of(&list);
        let mut offer = Self::of_parts(size, None, offsets(list))?;
        offer.keeps.leases.push(lease);
        offer.description.counted = counted;
        Ok(offer)
    }

    pub(super) fn of_parts(
        size: u64,
        elements: Option<Elements>,
        parts: Vec<(u64, Physical)>,
    ) -> Result<Self, ShareError> {
        let Some(granularity) = parts.first().map(|(_, first)| first.device().granularity()) else {
            return Err(MemoryError::NotCommitted(0..size).into());
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
            received: None,
            places: Places::default(),
            keeps: Keeps::default(),
        })
    }

    /// Offers memory of another process, by the descriptors that came from there, one for each extent.
    /// They alone keep the memory.
    pub(super) fn received(description: Description, handles: Vec<Exported>) -> Self {
        Self {
            description,
            physicals: Vec::new(),
            kept: OnceLock::new(),
            received: Some(handles),
            places: Places::default(),
            keeps: Keeps::default(),
        }
    }

    /// Grants other processes write access as well.
    #[must_use]
    pub fn read_write(mut self) -> Self {
        self.description.access = Access::ReadWrite;
        self
    }

    /// Gives fabric handles, which name memory across nodes, instead of descriptors. The memory
    /// must have been created for fabric handles, which few machines support
    /// ([`Physical::probe_export`] reports it).
    #[must_use]
    pub fn as_fabric(mut self) -> Self {
        self.description.handle_type = HandleTypes::FABRIC;
        // Earlier handles are of another type.
        self.kept = OnceLock::new();
        self
    }

    /// Returns the description of the offered memory.
    #[must_use]
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Makes all handles, for a transport of the caller (`cuMemExportToShareableHandle` for each
    /// extent).
    ///
    /// # Errors
    /// [`ShareError`] if the driver makes no handle.
    pub fn parcel(&self) -> Result<Parcel, ShareError> {
        let handles = self.handles(0..self.physicals.len())?;
        Ok(Parcel {
            description: self.description.clone(),
            handles,
        })
    }

    /// Returns the handles of some extents, new or kept from an earlier call.
    pub(super) fn batch(&self, range: Range<usize>) -> Result<Batch<'_>, ShareError> {
        if let Some(received) = &self.received {
            return Ok(Batch::Kept(received.get(range).unwrap_or_default()));
        }
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

fn end_of(parts: &[(Extent, Physical)]) -> u64 {
    parts.last().map_or(0, |(extent, _)| extent.end())
}

fn offsets(parts: Vec<(Extent, Physical)>) -> Vec<(u64, Physical)> {
    let parts = parts.into_iter();
    parts
        .map(|(extent, physical)| (extent.offset, physical))
        .collect()
}

/// Returns the place of a physical in a form that other processes understand.
fn origin_of(physical: &Physical) -> Result<Origin, ShareError> {
    match physical.place() {
        Place::Device(device) => Ok(Origin::Device(device.uuid())),
        Place::HostNuma(node) if physical.location().kind == LocationKind::HOST_NUMA => {
            Ok(Origin::HostNuma(node))
        }
        _ => Err(ShareError::Unnameable(physical.location())),
    }
}
