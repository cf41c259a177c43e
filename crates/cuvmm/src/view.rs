//! Views of a container's elements for a kernel: an address and a length, borrowed from the
//! container, so that the elements are neither moved nor freed before the borrow ends.
//!
//! The borrow ends when the launch has been queued, not when the kernel has run; afterwards streams
//! provide the order. The view names the streams that the container waits for.

use std::marker::PhantomData;
use std::ops::Deref;

use cuvmm_driver::DeviceAddress;

use crate::own::Stream;
use crate::users::Users;

/// Elements for a kernel to read. The borrow keeps them in place.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    address: DeviceAddress,
    len: usize,
    users: &'a Users,
    elements: PhantomData<&'a [T]>,
}

/// Elements for a kernel to write. The borrow keeps them in place and excludes other accesses
/// through the container.
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

    /// Returns the address of the first element.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the streams that the container waits for before it gives memory up: its home stream,
    /// then the recorded ones. Work launched on other streams is not waited for.
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

/// The bytes of a number of elements; `None` on overflow.
pub(crate) fn bytes_of<T>(elements: usize) -> Option<u64> {
    u64::try_from(elements.checked_mul(size_of::<T>())?).ok()
}
