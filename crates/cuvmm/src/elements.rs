//! The common base of containers: a region that holds elements of one type, their number, and the
//! streams that use them.
//!
//! This module has the checks of arguments, the conversion of elements to bytes, copies in and out,
//! and views. Each container decides by itself which elements have memory, and when.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::{ArgumentError, CallError, ContainerError};
use crate::extents::Fence;
use crate::own::Stream;
use crate::region::Region;
use crate::users::Users;
use crate::view::{View, ViewMut, bytes_of};

/// The region, the users and the number of a container's elements. Dropping it withdraws the memory
/// behind the work of its users.
pub(crate) struct Elements<T: Pod> {
    pub(crate) region: Region,
    users: Users,
    pub(crate) len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Elements<T> {
    /// Checks the arguments of a container of `elements` elements, and returns their bytes.
    pub(crate) fn check(
        device: &Device,
        home: &Stream,
        elements: usize,
    ) -> Result<u64, ArgumentError> {
        home.check_on(device)?;
        let bytes = bytes_of::<T>(elements).filter(|&bytes| bytes > 0);
        bytes.ok_or(Self::wrong_size(elements))
    }

    /// Refuses a region that has memory already.
    pub(crate) fn check_empty(region: &Region) -> Result<(), ContainerError> {
        match region.mappings() {
            0 => Ok(()),
            _ => Err(ContainerError::RegionInUse {
                held: region.held(),
            }),
        }
    }

    /// Wraps `len` elements of a region that [`check`](Self::check) has accepted.
    pub(crate) fn new(region: Region, home: &Stream, len: usize) -> Self {
        Self {
            region,
            users: Users::at(home),
            len,
            of: PhantomData,
        }
    }

    /// The error for a number of elements that has no bytes, or too many.
    pub(crate) const fn wrong_size(elements: usize) -> ArgumentError {
        if elements == 0 || size_of::<T>() == 0 {
            let what = "bytes of the elements";
            return ArgumentError::Zero(what);
        }
        ArgumentError::Overflow {
            what: "elements",
            value: elements as u64,
        }
    }

    pub(crate) const fn home(&self) -> &Stream {
        self.users.home()
    }

    pub(crate) fn count(bytes: u64) -> usize {
        usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<T>().max(1)
    }

    /// The offset of an element, in bytes from the first address.
    pub(crate) fn offset(first: usize) -> Result<u64, ArgumentError> {
        bytes_of::<T>(first).ok_or(Self::wrong_size(first))
    }

    /// The address of an element within the region's addresses.
    pub(crate) fn address_of(&self, index: usize) -> DeviceAddress {
        let base = self.region.address();
        let address = bytes_of::<T>(index).and_then(|offset| base.checked_add(offset));
        address.unwrap_or(base)
    }

    /// The bytes of a range of elements, which may be empty.
    pub(crate) fn bytes(&self, range: &Range<usize>) -> Result<Range<u64>, ArgumentError> {
        let bytes = bytes_of::<T>(range.start).zip(bytes_of::<T>(range.end));
        match bytes {
            Some((start, end)) if range.start <= range.end && range.end <= self.len => {
                Ok(start..end)
            }
            _ => Err(self.outside(range)),
        }
    }

    /// The error for a range of elements that leaves the container.
    pub(crate) const fn outside(&self, range: &Range<usize>) -> ArgumentError {
        ArgumentError::outside("elements", range, self.len)
    }

    pub(crate) fn view(&self, first: usize, len: usize) -> View<'_, T> {
        View::new(self.address_of(first), len, &self.users)
    }

    pub(crate) fn view_mut(&mut self, first: usize, len: usize) -> ViewMut<'_, T> {
        ViewMut::new(self.address_of(first), len, &self.users)
    }

    /// Reads elements of the container from `first` on, and waits for them.
    pub(crate) fn read(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        self.bytes(&run(first, into.len()))?;
        self.read_at(first, into)
    }

    pub(crate) fn get(&self, index: usize) -> Result<T, ContainerError> {
        let mut element = [T::zeroed()];
        self.read(index, &mut element)?;
        let [element] = element;
        Ok(element)
    }

    /// Reads committed elements, including those behind the container's last.
    pub(crate) fn read_at(&self, first: usize, into: &mut [T]) -> Result<(), ContainerError> {
        if into.is_empty() {
            return Ok(());
        }
        let bytes = bytemuck::cast_slice_mut(into);
        Ok(self.region.read(self.home(), Self::offset(first)?, bytes)?)
    }

    /// Writes committed elements, including those behind the container's last.
    pub(crate) fn write_at(&self, first: usize, elements: &[T]) -> Result<(), ContainerError> {
        if elements.is_empty() {
            return Ok(());
        }
        let bytes = bytemuck::cast_slice(elements);
        Ok(self
            .region
            .write(self.home(), Self::offset(first)?, bytes)?)
    }

    /// Records that work of a stream uses the elements.
    pub(crate) fn record_use(&mut self, stream: &Stream) -> Result<(), ArgumentError> {
        let mut users = self.region.users();
        if !users.any(|device| device.is_same(stream.device())) {
            return Err(ArgumentError::STREAM);
        }
        self.users.record(stream);
        Ok(())
    }

    /// The streams whose work may use the elements, the home stream first. `None` if that is all
    /// work of the devices that have access: some work was not recorded, or no stream of one of
    /// these devices was.
    pub(crate) fn streams(&self) -> Option<Vec<Stream>> {
        let mut streams = self.named()?;
        for recorded in self.region.recorded()? {
            if !streams.contains(&recorded) {
                streams.push(recorded);
            }
        }
        Some(streams)
    }

    /// Records that work on streams that are not known uses the elements.
    pub(crate) fn record_use_anywhere(&self) {
        self.users.record_anywhere();
    }

    /// Refuses an operation that waits for the recorded streams while one of them captures.
    pub(crate) fn check_none_captured(&self) -> Result<(), CallError> {
        Stream::check_none_captured([], self.users.iter())
    }

    /// The streams whose work may use the elements, without those that registrations have recorded,
    /// which the region waits for by itself. `None` as [`streams`](Self::streams) returns it.
    fn named(&self) -> Option<Vec<Stream>> {
        let named = !self.users.are_anywhere() && self.unnamed().next().is_none();
        named.then(|| self.users.all())
    }

    /// The devices that have access and of which no stream was recorded.
    fn unnamed(&self) -> impl Iterator<Item = &Device> {
        let named = |device: &Device| self.users.iter().any(|it| it.device().is_same(device));
        self.region.users().filter(move |device| !named(device))
    }

    /// A fence over all work that may use the elements, besides that which the region has noted.
    /// All that gives memory up, shares it or replaces it waits for this fence.
    pub(crate) fn fence(&self) -> Fence {
        if self.users.are_anywhere() {
            return Fence::devices(self.region.users().cloned().collect());
        }
        let mut fence = Fence::streams(self.users.all());
        fence.merge(Fence::devices(self.unnamed().cloned().collect()));
        fence
    }

    /// Waits for all work that may use the elements.
    pub(crate) fn wait(&self) -> Result<(), CallError> {
        self.fence().wait().map(drop)
    }

    /// Withdraws committed bytes, whole granules, behind all work that may use them.
    pub(crate) fn withdraw(&mut self, bytes: Range<u64>) -> Result<(), ContainerError> {
        let fence = self.fence();
        Ok(self.region.decommit_behind(&[bytes], fence)?)
    }
}

impl<T: Pod> Drop for Elements<T> {
    /// Withdraws all memory behind the work that may use it. Where its streams are not known, the
    /// region waits for all work of the devices that have access.
    fn drop(&mut self) {
        if let Some(streams) = self.named() {
            self.region.end_after(&streams);
        }
    }
}

/// The range of `len` elements from `first` on; it saturates at the largest index.
pub(crate) const fn run(first: usize, len: usize) -> Range<usize> {
    first..first.saturating_add(len)
}

/// Gives a container the methods common to all: `DeviceVec [T: Pod] [T] elements`.
macro_rules! is_container {
    ($name:ident [$($generics:tt)+] [$($given:tt)+] $($elements:ident).+) => {
        impl<$($generics)+> $name<$($given)+> {
            /// Returns the address of the container's memory, which is fixed for the container's
            /// life. The first element is there, except in a ring buffer.
            #[must_use]
            pub fn address(&self) -> cuvmm_driver::DeviceAddress {
                self.$($elements).+.region.address()
            }

            /// Returns the device that the container was created on.
            #[must_use]
            pub fn device(&self) -> &crate::device::Device {
                self.$($elements).+.region.device()
            }

            /// Returns the stream that the container's own copies run on.
            #[must_use]
            pub const fn home_stream(&self) -> &crate::own::Stream {
                self.$($elements).+.home()
            }

            /// Returns the number of elements; in a sparse array or grid including those without
            /// memory.
            #[must_use]
            pub const fn len(&self) -> usize {
                self.$($elements).+.len
            }

            /// Returns `true` if there are no elements.
            #[must_use]
            pub const fn is_empty(&self) -> bool {
                self.$($elements).+.len == 0
            }

            /// Returns the bytes of physical memory of the container: committed, pending free, and
            /// behind zeros.
            #[must_use]
            pub fn held(&self) -> u64 {
                self.$($elements).+.region.held()
            }

            /// Notes that work on another stream uses the elements. The stream may be one of any
            /// device that has access. Memory that the container gives up waits for the work of all
            /// recorded streams, and for all work of a device that has access and of which no stream
            /// was recorded.
            ///
            /// # Errors
            /// [`WrongDevice`](crate::error::ArgumentError::WrongDevice) when the stream belongs to
            /// a device without access.
            pub fn record_use(
                &mut self,
                stream: &crate::own::Stream,
            ) -> Result<(), crate::error::ContainerError> {
                Ok(self.$($elements).+.record_use(stream)?)
            }
        }

        impl<$($generics)+> std::fmt::Debug for $name<$($given)+> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("address", &self.address())
                    .field("len", &self.len())
                    .field("held", &self.held())
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use is_container;
