//! What a kernel is given: an address and a length, borrowed from the container, so that nothing can
//! move, shrink or free the elements before the borrow ends.
//!
//! The borrow ends when the launch has been queued, not when the kernel has run: what comes after
//! that is ordered by streams.

use std::marker::PhantomData;
use std::ops::Deref;

use cuvmm_driver::DeviceAddress;

/// Elements for a kernel to read: the borrow keeps them in place.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    address: DeviceAddress,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

/// Elements for a kernel to write: the borrow keeps them in place, and everybody else
/// away.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    view: View<'a, T>,
    alone: PhantomData<&'a mut [T]>,
}

impl<T> View<'_, T> {
    pub(crate) const fn new(address: DeviceAddress, len: usize) -> Self {
        Self {
            address,
            len,
            elements: PhantomData,
        }
    }

    /// The first element's address.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// How many elements there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> ViewMut<'_, T> {
    pub(crate) const fn new(address: DeviceAddress, len: usize) -> Self {
        Self {
            view: View::new(address, len),
            alone: PhantomData,
        }
    }
}

impl<'a, T> Deref for ViewMut<'a, T> {
    type Target = View<'a, T>;

    fn deref(&self) -> &View<'a, T> {
        &self.view
    }
}

/// The bytes of so many elements; nothing if they cannot be counted.
pub(crate) fn bytes_of<T>(elements: usize) -> Option<u64> {
    u64::try_from(elements.checked_mul(size_of::<T>())?).ok()
}
