//! Where pages should lie, and moving them there ahead of use.
//!
//! Ranges are elements. The driver takes any range of bytes and means the pages of the host that it
//! touches: what is said for one element is said for its neighbours on the page. Advice is for speed
//! alone, and never changes what anybody reads.

use std::ops::{Range, RangeBounds};

use bytemuck::Pod;
use cuvmm_driver as driver;
use cuvmm_driver::Location;

use super::policy::Given;
use super::uses::Kind;
use super::{UnifiedBuffer, bytes_at, failed};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, ContainerError};
use crate::own::{Managed, Stream};

/// A place for pages.
#[doc(alias = "Residence")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PageLocation<'a> {
    /// The memory of a device.
    Device(&'a Device),
    /// The host's memory, wherever.
    Host,
    /// The memory of one NUMA node of the host. CUDA 12.2.
    HostNuma(i32),
}

/// What the driver is told about the use of a range. The three kinds stand side by side; they are
/// undone one by one, or all by a [`Policy`](super::Policy).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Advice<'a> {
    /// Mostly read: whoever reads gets a copy of the page, until somebody writes it. Goes before the
    /// other two.
    ReadMostly,
    /// Pages should lie there. They are not moved by this; and who can reach them there does not
    /// move them any more.
    PreferredLocation(PageLocation<'a>),
    /// A device keeps the pages mapped, wherever they lie, as far as it can reach them: it does not
    /// fault on them, and does not move them.
    AccessedBy(&'a Device),
    /// The host keeps the pages mapped, as far as it can reach them.
    AccessedByHost,
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Queues moving a range of elements (`cuMemPrefetchAsync`). On the stream it comes behind what
    /// writes them, and it counts as reading them: whoever writes next waits for it.
    ///
    /// # Errors
    /// [`ContainerError`] when elements are not there, the stream or the place is of another driver,
    /// the stream captures, a device moves no pages while the host touches them, there is no such
    /// node, or the driver refuses.
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

    /// Gives advice for a range of elements, in force when this returns (`cuMemAdvise`).
    ///
    /// # Errors
    /// [`ContainerError`] when elements are not there, a device is of another driver or moves no pages
    /// while the host touches them, there is no such node, or the driver refuses.
    #[doc(alias = "cuMemAdvise")]
    pub fn advise(
        &self,
        range: impl RangeBounds<usize>,
        advice: Advice<'_>,
    ) -> Result<(), ContainerError> {
        match advice {
            Advice::ReadMostly => {
                let set = driver::Advice::SET_READ_MOSTLY;
                self.tell(range, set, Location::HOST, |given, _| {
                    given.read_mostly = true
                })
            }
            Advice::PreferredLocation(place) => {
                let place = self.place(place)?;
                let set = driver::Advice::SET_PREFERRED_LOCATION;
                self.tell(range, set, place, |given, place| {
                    given.preferred = Some(place)
                })
            }
            Advice::AccessedBy(_) | Advice::AccessedByHost => {
                let user = self.user(advice)?;
                let set = driver::Advice::SET_ACCESSED_BY;
                self.tell(range, set, user, |given, user| {
                    given.accessed_by.insert(user);
                })
            }
        }
    }

    /// Undoes advice for a range of elements (`cuMemAdvise`); what was not given is undone without
    /// an error. A range prefers one place only, so the place that is named does not matter.
    ///
    /// # Errors
    /// As [`Self::advise`].
    pub fn unadvise(
        &self,
        range: impl RangeBounds<usize>,
        advice: Advice<'_>,
    ) -> Result<(), ContainerError> {
        match advice {
            Advice::ReadMostly => {
                let unset = driver::Advice::UNSET_READ_MOSTLY;
                self.tell(range, unset, Location::HOST, |given, _| {
                    given.read_mostly = false
                })
            }
            Advice::PreferredLocation(_) => {
                let unset = driver::Advice::UNSET_PREFERRED_LOCATION;
                self.tell(range, unset, Location::HOST, |given, _| {
                    given.preferred = None
                })
            }
            Advice::AccessedBy(_) | Advice::AccessedByHost => {
                let user = self.user(advice)?;
                let unset = driver::Advice::UNSET_ACCESSED_BY;
                self.tell(range, unset, user, |given, user| {
                    given.accessed_by.remove(&user);
                })
            }
        }
    }

    /// Whether all of a range is mostly read, by the driver's answer (`cuMemRangeGetAttribute`). No
    /// elements are not.
    ///
    /// # Errors
    /// [`ContainerError`] when elements are not there or the driver does not answer.
    #[doc(alias = "cuMemRangeGetAttribute")]
    pub fn is_read_mostly(&self, range: impl RangeBounds<usize>) -> Result<bool, ContainerError> {
        self.ask(range, Managed::is_read_mostly)
    }

    /// The place that all of a range prefers, by the driver's answer; none where there is none, or
    /// not the same for all. Drivers before CUDA 12.2 do not tell nodes from the host.
    ///
    /// # Errors
    /// As [`Self::is_read_mostly`].
    pub fn preferred_location(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Option<Location>, ContainerError> {
        self.ask(range, Managed::preferred)
    }

    /// Who all of a range is kept mapped for, by the driver's answer: devices and the host, in no
    /// particular order.
    ///
    /// # Errors
    /// As [`Self::is_read_mostly`].
    pub fn accessed_by(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Vec<Location>, ContainerError> {
        self.ask(range, Managed::accessed_by)
    }

    /// Where all of a range was last asked to be moved, whether or not it has arrived or moved on
    /// since; none where part of it never was, or elsewhere.
    ///
    /// # Errors
    /// As [`Self::is_read_mostly`].
    pub fn last_prefetch(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<Option<Location>, ContainerError> {
        self.ask(range, Managed::last_prefetch)
    }

    /// Tells the driver, and takes note of it.
    fn tell(
        &self,
        range: impl RangeBounds<usize>,
        advice: driver::Advice,
        location: Location,
        note: impl Fn(&mut Given, Location),
    ) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        let Some(memory) = self.memory_of(&range) else {
            return Ok(());
        };
        let bytes = bytes_at::<T>(&range);
        let mut told = self.told();
        memory
            .advise(&bytes, advice, location)
            .map_err(|cause| failed::<T>(&range, cause))?;
        told.note(&bytes, |given| note(given, location));
        Ok(())
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
