//! Memory as its owner offers it: which extents, with what right, as what handles.
//!
//! An offer holds the memory, so it can be given again and again, and after its owner has gone. What
//! was given once is [exported](Physical::is_exported) for good.

use std::collections::BTreeMap;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::{Exported, HandleTypes, LocationKind};

use super::parcel::Parcel;
use super::wire::{Description, Elements, Origin, SharedExtent};
use crate::device::Device;
use crate::error::OfferError;
use crate::own::{Physical, Place, Right};
use crate::region::{Extent, Region};
use crate::vec::DeviceVec;

/// Memory to be given to other processes: a physical, a region, a vector.
///
/// It lets them read, unless told [otherwise](Self::read_write). The driver enforces that on nobody:
/// what has the handle can write, so give it to processes that you trust.
///
/// The memory that is offered must have been made shareable
/// ([`PhysicalBuilder::shareable`](crate::own::PhysicalBuilder::shareable),
/// [`RegionBuilder::shareable`](crate::region::RegionBuilder::shareable)). The offer keeps it: what
/// the owner decommits meanwhile stays with whoever holds the offer, and what it commits anew is not
/// part of it.
#[derive(Debug)]
pub struct Offer {
    description: Description,
    /// One for each extent, in their order.
    physicals: Vec<Physical>,
}

impl Offer {
    /// Offers one physical.
    ///
    /// # Errors
    /// [`OfferError`] when it lies where a description cannot say.
    pub fn physical(physical: &Physical) -> Result<Self, OfferError> {
        Self::of_parts(
            physical.device(),
            physical.size(),
            None,
            vec![(0, physical.clone())],
        )
    }

    /// Offers what is committed of a range of a region. Offsets begin with the range.
    ///
    /// # Errors
    /// [`OfferError`] when nothing is committed there, or the range cuts an extent.
    pub fn region(region: &Region, range: Range<u64>) -> Result<Self, OfferError> {
        let (start, end) = (range.start, range.end);
        let size = end.saturating_sub(start);
        let mut parts = vec![];
        for (extent, physical) in region.parts(range) {
            if extent.offset < start || extent.end() > end {
                return Err(cuts(&extent));
            }
            parts.push((extent.offset - start, physical));
        }
        if parts.is_empty() {
            return Err(OfferError::Empty { start, end });
        }
        Self::of_parts(region.device(), size, None, parts)
    }

    /// Offers a vector: its elements, and the memory behind the last as far as the extent goes that
    /// it lies in. What is added later is not part of it.
    ///
    /// # Errors
    /// [`OfferError`] when it is empty.
    pub fn vec<T: Pod>(vec: &DeviceVec<T>) -> Result<Self, OfferError> {
        let elements = Elements {
            count: vec.len() as u64,
            size: u32::try_from(size_of::<T>()).unwrap_or(0),
        };
        let used = elements.count.saturating_mul(elements.size.into());
        let parts: Vec<(u64, Physical)> = vec
            .parts(used)
            .map(|(extent, physical)| (extent.offset, physical))
            .collect();
        let size = parts
            .iter()
            .map(|(offset, part)| offset + part.size())
            .max();
        match size {
            None => Err(OfferError::Empty {
                start: 0,
                end: used,
            }),
            Some(size) => Self::of_parts(vec.device(), size, Some(elements), parts),
        }
    }

    fn of_parts(
        device: &Device,
        size: u64,
        elements: Option<Elements>,
        parts: Vec<(u64, Physical)>,
    ) -> Result<Self, OfferError> {
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
            Right::Read,
            HandleTypes::POSIX_FD,
            device.granularity(),
            size,
            elements,
            extents,
        )?;
        Ok(Self {
            description,
            physicals,
        })
    }

    /// Lets the others write as well.
    #[must_use]
    pub fn read_write(mut self) -> Self {
        self.description = self.description.with_right(Right::ReadWrite);
        self
    }

    /// Gives fabric handles, which name memory across nodes, instead of descriptors. The memory must
    /// have been made for it, which few machines can
    /// ([`Physical::probe_export`] tells).
    #[must_use]
    pub fn as_fabric(mut self) -> Self {
        self.description = self.description.with_handle_type(HandleTypes::FABRIC);
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
    /// [`OfferError`] when the driver gives no handle.
    pub fn parcel(&self) -> Result<Parcel, OfferError> {
        let handles = self.handles(0..self.physicals.len())?;
        Ok(Parcel {
            description: self.description.clone(),
            handles,
        })
    }

    /// Makes the handles of some extents.
    pub(super) fn handles(&self, range: Range<usize>) -> Result<Vec<Exported>, OfferError> {
        let some = self.physicals.get(range).unwrap_or_default();
        some.iter()
            .map(|physical| Ok(physical.export(self.description.handle_type())?))
            .collect()
    }
}

fn cuts(extent: &Extent) -> OfferError {
    OfferError::CutsExtent {
        offset: extent.offset,
        size: extent.size,
    }
}

/// Where a physical lies, so that another process understands it.
fn origin_of(physical: &Physical) -> Result<Origin, OfferError> {
    match physical.place() {
        Place::Device(device) => Ok(Origin::Device(device.uuid())),
        Place::HostNuma(node) if physical.location().kind == LocationKind::HOST_NUMA => {
            Ok(Origin::HostNuma(node))
        }
        _ => Err(OfferError::Unnameable {
            location: physical.location(),
        }),
    }
}
