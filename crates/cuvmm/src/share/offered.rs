//! Offers of several blocks and allocations of heaps.
//!
//! Keeps I-114.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuvmm_driver::{DeviceAddress, HandleTypes, PhysicalHandle};

use super::offer::{Keeps, Offer};
use super::places::Places;
use crate::error::{ArgumentError, ShareError};
use crate::heap::{Allocation, AllocationParts};
use crate::own::Physical;
use crate::pool::{Block, BlockParts, OfferingPool};

/// Memory that an [`Offer`] can have together with other memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Offered<'a> {
    /// A block of a pool.
    Block(&'a Block),
    /// An allocation of a heap, which the offer keeps alive.
    Allocation(&'a Arc<Allocation>),
}

/// The memory under one block or allocation.
enum Found {
    Block(BlockParts),
    Allocation(AllocationParts),
}

impl Found {
    fn of(one: Offered<'_>) -> Result<Self, ShareError> {
        Ok(match one {
            Offered::Block(block) => Self::Block(block.parts()?),
            Offered::Allocation(allocation) => Self::Allocation(allocation.parts()?),
        })
    }

    fn physicals(&self) -> Vec<(u64, Physical)> {
        let own = |(at, physical): (DeviceAddress, &Physical)| (at.0, physical.clone());
        match self {
            Self::Block(parts) => parts.physicals().map(own).collect(),
            Self::Allocation(parts) => parts.physicals().map(own).collect(),
        }
    }

    /// Marks the memory as exported, and keeps it in place.
    fn keep(self, keeps: &mut Keeps) {
        match self {
            Self::Block(parts) => keeps.leases.push(parts.offered()),
            Self::Allocation(parts) => keeps.allocations.push(parts.offered()),
        }
    }
}

impl Offered<'_> {
    fn pool(&self) -> OfferingPool {
        match self {
            Self::Block(block) => block.offering_pool(),
            Self::Allocation(allocation) => allocation.offering_pool(),
        }
    }
}

impl Offer {
    /// Offers several blocks and allocations, in whole extents: beside a block or an allocation the
    /// other process gets what else lies in its extents. An extent that several of them have is
    /// offered once, also if a heap has it mapped at several addresses, unless each time it is beside
    /// other extents. Extents that are adjacent here are adjacent in the offer;
    /// [`offset_of`](Self::offset_of) says where in the offer memory of this process is.
    ///
    /// While the offer lives, all its memory stays in place: the memory of a block that is dropped is
    /// kept, and an allocation lives as long as the offer. A [ledger](crate::ledger) counts the whole
    /// offer as one exported block. Makes no driver call.
    ///
    /// A heap uses the memory of an allocation again when it was dropped and the offer has ended,
    /// whether or not another process still has it.
    ///
    /// # Errors
    /// [`ShareError`] if nothing is named, a block has zero bytes, is asleep, or shares memory with
    /// [forks](Block::fork), a heap is asleep, a pool's memory is not shareable as a descriptor, the
    /// pools have different ledgers, or their ledger counts no more exported blocks. Nothing counts
    /// as exported then.
    pub fn several(all: &[Offered<'_>]) -> Result<Self, ShareError> {
        let Some(first) = all.first().map(Offered::pool) else {
            return Err(ArgumentError::Zero("blocks and allocations of an offer").into());
        };
        for one in all {
            let pool = one.pool();
            pool.check_shareable(HandleTypes::POSIX_FD)?;
            if !pool.has_account_of(&first) {
                return Err(ShareError::SeveralLedgers);
            }
        }
        let found = all.iter().map(|&one| Found::of(one));
        let found: Vec<Found> = found.collect::<Result<_, _>>()?;
        let mapped: BTreeMap<u64, Physical> = found.iter().flat_map(Found::physicals).collect();
        let once = mapped
            .values()
            .map(|physical| (physical.as_raw(), physical));
        let once: BTreeMap<PhysicalHandle, &Physical> = once.collect();
        let (places, parts) = Places::of(&mapped);
        let size = parts.iter().map(|(_, physical)| physical.size()).sum();
        let mut offer = Self::of_parts(size, None, parts)?;
        let counted = first.count(once.values().copied())?;
        offer.description.counted = counted.as_ref().map(|counted| counted.name());
        offer.keeps.counted = counted;
        offer.places = places;
        drop(mapped);
        for one in found {
            one.keep(&mut offer.keeps);
        }
        Ok(offer)
    }

    /// Returns the offset in the offer of `size` bytes at an address of this process, of an offer of
    /// [`several`](Self::several) blocks and allocations. Returns `None` if they are not all in it.
    #[must_use]
    pub fn offset_of(&self, address: DeviceAddress, size: u64) -> Option<u64> {
        self.places.offset_of(address.0, size)
    }
}
