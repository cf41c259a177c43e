//! Advice on the location of pages, and prefetching.
//!
//! Ranges are in elements. The driver accepts any range of bytes and applies it to the host's pages
//! that it touches: advice for one element also applies to its neighbors on the page. Advice
//! affects only speed, never the contents.

use std::ops::{Range, RangeBounds};

use bytemuck::Pod;
use cuvmm_driver::Location;

use super::policy::Item;
use super::uses::Kind;
use super::{UnifiedBuffer, bytes_at, failed};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, ContainerError};
use crate::own::{Managed, Stream};

/// A location for pages.
#[doc(alias = "Residence")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PageLocation<'a> {
    /// The memory of a device.
    Device(&'a Device),
    /// Host memory on any node.
    Host,
    /// The memory of one NUMA node of the host. Requires CUDA 12.2.
    HostNuma(i32),
}

/// Advice to the driver about the use of a range. The three kinds are independent; each can be
/// unset by itself, or all by a [`Policy`](super::Policy).
#[doc(alias = "ManagedMemoryHints")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Advice<'a> {
    /// Mostly read: each device or host that reads a page gets a copy of it, until the page is
    /// written. Takes precedence over the other two.
    ReadMostly,
    /// The preferred location of the pages. This does not move them. Devices that can access them
    /// there no longer move them.
    PreferredLocation(PageLocation<'a>),
    /// A device keeps the pages mapped, wherever they are, as far as it can access them: it neither
    /// faults on them nor moves them.
    AccessedBy(&'a Device),
    /// The host keeps the pages mapped, as far as it can access them.
    AccessedByHost,
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Queues moving a range of elements (`cuMemPrefetchAsync`). It is ordered on the stream behind
    /// writes of the elements, and counts as a read: later writes wait for it.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, the stream or the location belongs to
    /// another driver, the stream captures, a device cannot move pages while the host accesses
    /// them, the node does not exist, or the driver refuses.
    #[doc(alias("prefetch_to", "prefetch_range", "PrefetchPlan"))]
    #[doc(alias = "cuMemPrefetchAsync")]
    pub fn prefetch(
        &self,
        range: impl RangeBounds<usize>,
        to: PageLocation<'_>,
        stream: &Stream,
    ) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        self.moves_on(stream.device())?;
        let to = self.place(to)?;
        let Some(memory) = self.memory_of(&range) else {
            return Ok(());
        };
        let using = self.uses.begin(stream, Kind::Read)?;
        memory
            .prefetch(using.stream(), &bytes_at::<T>(&range), to)
            .map_err(|cause| failed::<T>(&range, cause).into())
    }

    /// Gives advice for a range of elements, which is in force when this returns (`cuMemAdvise`).
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer, a device belongs to another driver or
    /// cannot move pages while the host accesses them, the node does not exist, or the driver
    /// refuses.
    #[doc(alias(
        "set_read_mostly",
        "set_preferred_location",
        "set_accessed_by",
        "from_unified",
        "for_buffer"
    ))]
    #[doc(alias = "cuMemAdvise")]
    pub fn advise(
        &self,
        range: impl RangeBounds<usize>,
        advice: Advice<'_>,
    ) -> Result<(), ContainerError> {
        let item = match advice {
            Advice::ReadMostly => Item::ReadMostly(true),
            Advice::PreferredLocation(place) => Item::Preferred(Some(self.place(place)?)),
            Advice::AccessedBy(_) | Advice::AccessedByHost => {
                Item::AccessedBy(self.user(advice)?, true)
            }
        };
        self.tell(range, item)
    }

    /// Unsets advice for a range of elements (`cuMemAdvise`), given or not. A range has one
    /// preferred location, so the location in `advice` is ignored.
    ///
    /// # Errors
    /// Those of [`Self::advise`].
    #[doc(alias("unset_read_mostly", "unset_preferred_location", "unset_accessed_by"))]
    pub fn unadvise(
        &self,
        range: impl RangeBounds<usize>,
        advice: Advice<'_>,
    ) -> Result<(), ContainerError> {
        let item = match advice {
            Advice::ReadMostly => Item::ReadMostly(false),
            Advice::PreferredLocation(_) => Item::Preferred(None),
            Advice::AccessedBy(_) | Advice::AccessedByHost => {
                Item::AccessedBy(self.user(advice)?, false)
            }
        };
        self.tell(range, item)
    }

    /// Returns `true` if all of a range is mostly read, by the driver's answer
    /// (`cuMemRangeGetAttribute`); `false` for an empty range.
    ///
    /// # Errors
    /// [`ContainerError`] when the range leaves the buffer or the driver refuses.
    #[doc(alias = "cuMemRangeGetAttribute")]
    pub fn is_read_mostly(&self, range: impl RangeBounds<usize>) -> Result<bool, ContainerError> {
        self.ask(range, Managed::is_read_mostly)
    }

    /// Returns the preferred location of all of a range, by the driver's answer; `None` if there is
    /// none, or not one for all. Drivers before CUDA 12.2 do not distinguish nodes from the host.
    ///
    /// # Errors
    /// Those of [`Self::is_read_mostly`].
    pub fn preferred_location(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Option<Location>, ContainerError> {
        self.ask(range, Managed::preferred)
    }

    /// Returns the devices and the host that all of a range is kept mapped for, by the driver's
    /// answer, in no particular order.
    ///
    /// # Errors
    /// Those of [`Self::is_read_mostly`].
    pub fn accessed_by(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Vec<Location>, ContainerError> {
        self.ask(range, Managed::accessed_by)
    }

    /// Returns the location that all of a range was last prefetched to, whether or not it arrived
    /// or moved since; `None` if part of it never was, or to another location.
    ///
    /// # Errors
    /// Those of [`Self::is_read_mostly`].
    pub fn last_prefetch(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Option<Location>, ContainerError> {
        self.ask(range, Managed::last_prefetch)
    }

    fn tell(&self, range: impl RangeBounds<usize>, item: Item) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        let Some(memory) = self.memory_of(&range) else {
            return Ok(());
        };
        let told = self.told().tell(memory, &bytes_at::<T>(&range), item);
        Ok(told.map_err(|cause| failed::<T>(&range, cause))?)
    }

    fn ask<A: Default>(
        &self,
        range: impl RangeBounds<usize>,
        question: impl Fn(&Managed, &Range<u64>) -> Result<A, CallError>,
    ) -> Result<A, ContainerError> {
        let range = self.elements(range)?;
        match self.memory_of(&range) {
            Some(memory) => question(memory, &bytes_at::<T>(&range))
                .map_err(|cause| failed::<T>(&range, cause).into()),
            None => Ok(A::default()),
        }
    }

    fn place(&self, place: PageLocation<'_>) -> Result<Location, ContainerError> {
        match place {
            PageLocation::Device(device) => {
                self.moves_on(device)?;
                Ok(device.location())
            }
            PageLocation::Host => Ok(Location::HOST),
            PageLocation::HostNuma(node) if node < 0 => {
                let (what, number) = ("NUMA node", node.into());
                Err(ArgumentError::NoSuch { what, number }.into())
            }
            PageLocation::HostNuma(node) => Ok(Location::host_numa(node)),
        }
    }

    fn user(&self, advice: Advice<'_>) -> Result<Location, ContainerError> {
        match advice {
            Advice::AccessedBy(device) => {
                self.moves_on(device)?;
                Ok(device.location())
            }
            _ => Ok(Location::HOST),
        }
    }
}
