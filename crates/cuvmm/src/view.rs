//! What a kernel is given: an address and a length, borrowed from the container, so that nothing can
//! move, shrink or free the elements before the borrow ends.
//!
//! The borrow ends when the launch has been queued, not when the kernel has run: what comes after
//! that is ordered by streams. Which ones the container waits for, the view says.

use std::marker::PhantomData;
use std::ops::Deref;

use cuvmm_driver::DeviceAddress;

use crate::own::Stream;
use crate::users::Users;

/// Elements for a kernel to read: the borrow keeps them in place.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    address: DeviceAddress,
    len: usize,
    users: &'a Users,
    elements: PhantomData<&'a [T]>,
}

/// Elements for a kernel to write: the borrow keeps them in place, and everybody else
/// away.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    view: View<'a, T>,
    alone: PhantomData<&'a mut [T]>,
}

impl<'a, T> View<'a, T> {
    pub(crate) const fn new(address: DeviceAddress, len: usize, users: &'a Users) -> Self {
        Self {
            address,
            len,
            users,
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

    /// The streams that the container waits for before it gives memory up: its home stream, then those
    /// that were recorded. What is launched on another is not waited for.
    pub fn streams(&self) -> impl Iterator<Item = &'a Stream> + use<'a, T> {
        self.users.iter()
    }
}

impl<'a, T> ViewMut<'a, T> {
    pub(crate) const fn new(address: DeviceAddress, len: usize, users: &'a Users) -> Self {
        Self {
            view: View::new(address, len, users),
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
