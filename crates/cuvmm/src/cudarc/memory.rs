//! Memory that slices are made of: lent by containers, or owned.
//!
//! This module does not use cudarc; it only states where memory is and which streams its owner
//! waits for.

use std::ops::Range;

use bytemuck::Pod;

use crate::error::{ArgumentError, CudarcError, HandedBack, MemoryError};
use crate::own::{Access, Stream};
use crate::pool::{Block, Lease, Use};
use crate::region::Region;
use crate::unified::{DeviceMut, DeviceRead};
use crate::vec::DeviceVec;
use crate::view::{View, ViewMut};

/// Memory of this library that a [`Slice`](super::Slice) of `T` can be made of: lent by a container
/// for a borrow ([`View`], [`ViewMut`], [`Committed`], an access to a [unified](crate::unified)
/// buffer), or owned ([`DeviceVec`], [`Leased`]).
pub trait Memory<T>: Sized + sealed::Place<T> {
    /// The error if it cannot be made a slice. An owner is handed back in it.
    type Refused: std::error::Error;

    #[doc(hidden)]
    fn refuse(self, reason: CudarcError) -> Self::Refused;
}

/// Memory that may be written through a slice.
pub trait MemoryMut<T>: Memory<T> {}

/// Memory that a slice owns, and whose owner can record further streams that use it. For lent
/// memory, streams are recorded with the container beforehand.
pub trait Owner<T>: Memory<T> + sealed::Notes {}

pub(super) mod sealed {
    use super::{CudarcError, Stream};

    /// The place of memory, and the streams that its owner waits for.
    #[derive(Debug)]
    pub struct Backing {
        pub(in crate::cudarc) address: u64,
        pub(in crate::cudarc) len: usize,
        /// The home stream is first.
        pub(in crate::cudarc) streams: Vec<Stream>,
    }

    pub trait Place<T> {
        fn backing(&self) -> Result<Backing, CudarcError>;
    }

    pub trait Notes {
        fn note(&mut self, stream: &Stream) -> Result<(), CudarcError>;
    }
}

use sealed::{Backing, Notes, Place};

fn elements<T>(address: u64, bytes: u64, streams: Vec<Stream>) -> Result<Backing, CudarcError> {
    let len = ArgumentError::elements_at::<T>(address, bytes)?;
    Ok(Backing {
        address,
        len,
        streams,
    })
}

impl<T> Place<T> for View<'_, T> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        Ok(Backing {
            address: self.address().0,
            len: self.len(),
            streams: self.streams().cloned().collect(),
        })
    }
}

impl<T> Place<T> for ViewMut<'_, T> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        View::backing(self)
    }
}

impl<T> Place<T> for DeviceRead<'_, T> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        Ok(Backing {
            address: self.address().0,
            len: self.len(),
            streams: vec![self.stream().clone()],
        })
    }
}

impl<T> Place<T> for DeviceMut<'_, T> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        DeviceRead::backing(self)
    }
}

impl<T: Pod> Place<T> for DeviceVec<T> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        self.view().backing()
    }
}

impl<T: Pod> Notes for DeviceVec<T> {
    fn note(&mut self, stream: &Stream) -> Result<(), CudarcError> {
        self.record_use(stream)
            .map_err(|_| ArgumentError::STREAM.into())
    }
}

/// A block's memory, leased while this value lives: it is not moved, unmapped or reused, even
/// if the block is dropped.
///
/// The block must be awake, have a home stream, and share no memory with [forks](Block::fork),
/// because cudarc has no read-only slices. Memory that the block grows by later is not included.
#[derive(Debug)]
pub struct Leased {
    // Dropped first, so that the block is freed as usual.
    lease: Lease,
    block: Option<Block>,
    home: Option<Stream>,
}

impl Leased {
    /// Leases the memory of a block that stays with its owner.
    #[must_use]
    pub fn of(block: &Block) -> Self {
        Self {
            lease: block.lease(),
            home: block.home_stream().cloned(),
            block: None,
        }
    }

    /// Returns the block, if this was made from an owned block.
    #[must_use]
    pub fn into_block(self) -> Option<Block> {
        self.block
    }
}

impl From<Block> for Leased {
    fn from(block: Block) -> Self {
        let mut leased = Self::of(&block);
        leased.block = Some(block);
        leased
    }
}

impl<T: Pod> Place<T> for Leased {
    fn backing(&self) -> Result<Backing, CudarcError> {
        // The check returns a lease of its own, which is dropped: `self.lease` keeps the checked
        // state.
        let size = self.lease.size();
        drop(self.lease.admit(Use::Lend(Access::ReadWrite), 0..size)?);
        let streams = self.home.iter().cloned().collect();
        elements::<T>(self.lease.address().0, size, streams)
    }
}

impl Notes for Leased {
    fn note(&mut self, stream: &Stream) -> Result<(), CudarcError> {
        Ok(self.lease.record_use(stream)?)
    }
}

/// A committed range of a region, used on a stream.
///
/// As for all work queued on a region's memory, a later decommit must name the streams that used
/// it, or all work.
#[derive(Debug)]
pub struct Committed<'a> {
    region: &'a Region,
    bytes: Range<u64>,
    home: Stream,
}

impl<'a> Committed<'a> {
    /// Selects a range of a region, to be used on a stream of its device.
    ///
    /// # Errors
    /// [`CudarcError`] if part of it is not committed or is shared with a [fork](Region::fork), or
    /// the stream belongs to another device.
    pub fn new(region: &'a Region, bytes: Range<u64>, home: &Stream) -> Result<Self, CudarcError> {
        let Range { start, end } = bytes;
        if start > end || end > region.size() || !region.is_committed(start..end) {
            return Err(MemoryError::NotCommitted(start..end).into());
        }
        region.check_writable(&(start..end))?;
        home.check_on(region.device())?;
        Ok(Self {
            region,
            bytes: start..end,
            home: home.clone(),
        })
    }
}

impl<T: Pod> Place<T> for Committed<'_> {
    fn backing(&self) -> Result<Backing, CudarcError> {
        let Range { start, end } = self.bytes;
        let base = self.region.address();
        let address = base.checked_add(start).unwrap_or(base);
        elements::<T>(address.0, end - start, vec![self.home.clone()])
    }
}

macro_rules! lent {
    ($($name:ident $(: $bound:ident)?),+) => {$(
        impl<T $(: $bound)?> Memory<T> for $name<'_, T> {
            type Refused = CudarcError;

            fn refuse(self, reason: CudarcError) -> CudarcError {
                reason
            }
        }
    )+};
}

lent!(View, ViewMut, DeviceRead, DeviceMut);

impl<T: Pod> Memory<T> for Committed<'_> {
    type Refused = CudarcError;

    fn refuse(self, reason: CudarcError) -> CudarcError {
        reason
    }
}

impl<T: Pod> Memory<T> for DeviceVec<T> {
    type Refused = HandedBack<Self, CudarcError>;

    fn refuse(self, reason: CudarcError) -> HandedBack<Self, CudarcError> {
        HandedBack::new(self, reason)
    }
}

impl<T: Pod> Memory<T> for Leased {
    type Refused = HandedBack<Self, CudarcError>;

    fn refuse(self, reason: CudarcError) -> HandedBack<Self, CudarcError> {
        HandedBack::new(self, reason)
    }
}

impl<T> MemoryMut<T> for ViewMut<'_, T> {}
impl<T> MemoryMut<T> for DeviceMut<'_, T> {}
impl<T: Pod> MemoryMut<T> for Committed<'_> {}
impl<T: Pod> MemoryMut<T> for DeviceVec<T> {}
impl<T: Pod> MemoryMut<T> for Leased {}

impl<T: Pod> Owner<T> for DeviceVec<T> {}
impl<T: Pod> Owner<T> for Leased {}
