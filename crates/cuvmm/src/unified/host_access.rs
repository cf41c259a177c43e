//! The host's access to the elements: views, made once the devices' accesses that conflict have
//! passed.
//!
//! A view is a plain reference inside, so what makes it sound has to hold when it is made, and the
//! borrow keeps it so: no device access that conflicts goes on or can begin while a view lives, and
//! every earlier one has been waited for, whether its guard was dropped or leaked.
//!
//! `unsafe` here: references into managed memory, and doors for those who order accesses themselves.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use bytemuck::Pod;

use super::UnifiedBuffer;
use super::uses::Kind;
use crate::error::ContainerError;

/// Elements for the host to read. While it lives devices may read them too.
#[derive(Debug)]
pub struct HostView<'a, T> {
    elements: &'a [T],
}

/// Elements for the host to write. While it lives nobody else uses them.
#[derive(Debug)]
pub struct HostViewMut<'a, T> {
    elements: &'a mut [T],
}

impl<T> Deref for HostView<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> Deref for HostViewMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> DerefMut for HostViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.elements
    }
}

impl<T: Pod> UnifiedBuffer<T> {
    /// The elements, once what writes them has passed (`cuEventSynchronize`). Pages that lie on a
    /// device move to the host when they are touched, unless advice says otherwise.
    ///
    /// # Errors
    /// [`ContainerError::NoConcurrentAccess`] where a device cannot work while the host touches
    /// managed memory; others when a driver call fails, or the stream of a leaked access captures.
    pub fn host(&self) -> Result<HostView<'_, T>, ContainerError> {
        self.shared()?;
        // SAFETY: every device of the driver works beside a host that touches managed memory.
        unsafe { self.host_unchecked() }
    }

    /// The elements to write, once all that uses them has passed. For the rest as
    /// [`host`](Self::host).
    ///
    /// # Errors
    /// As [`Self::host`].
    pub fn host_mut(&mut self) -> Result<HostViewMut<'_, T>, ContainerError> {
        self.shared()?;
        // SAFETY: as above.
        unsafe { self.host_mut_unchecked() }
    }

    /// As [`host`](Self::host), also where a device cannot work while the host touches managed
    /// memory.
    ///
    /// # Safety
    /// While the view lives, no kernel at all runs on a device without concurrent managed access
    /// (attribute 89), whoever launched it and whatever memory it uses.
    ///
    /// # Errors
    /// As [`Self::host`], but for [`ContainerError::NoConcurrentAccess`].
    pub unsafe fn host_unchecked(&self) -> Result<HostView<'_, T>, ContainerError> {
        self.uses.wait(&self.device, Kind::Read)?;
        let (pointer, len) = (self.first(), self.len());
        // SAFETY: so many elements lie there, every one of them plain data that was initialised
        // when the buffer was made. Nothing writes them while `self` is borrowed: device accesses
        // to write have been waited for, and a new one takes the buffer alone, as a view to write
        // does.
        let elements = unsafe { slice::from_raw_parts(pointer, len) };
        Ok(HostView { elements })
    }

    /// As [`host_mut`](Self::host_mut), also where a device cannot work while the host touches
    /// managed memory.
    ///
    /// # Safety
    /// As for [`Self::host_unchecked`].
    ///
    /// # Errors
    /// As [`Self::host_unchecked`].
    pub unsafe fn host_mut_unchecked(&mut self) -> Result<HostViewMut<'_, T>, ContainerError> {
        self.uses.wait(&self.device, Kind::Write)?;
        let (pointer, len) = (self.first(), self.len());
        // SAFETY: as above; and nothing reads them either, since `self` is borrowed alone and all
        // device accesses have been waited for.
        let elements = unsafe { slice::from_raw_parts_mut(pointer, len) };
        Ok(HostViewMut { elements })
    }

    /// The first element, for the host; dangling if there is none. Waits for nothing.
    ///
    /// # Safety
    /// Whoever uses it orders that by hand: nothing is read that a device may still be writing, as
    /// [`device_mut`](Self::device_mut) lets it, and it is not used once the buffer has gone. Where
    /// a device has no concurrent managed access, no kernel at all runs there meanwhile.
    #[must_use]
    pub unsafe fn as_ptr(&self) -> *const T {
        self.first()
    }

    /// The same, to write.
    ///
    /// # Safety
    /// As for [`Self::as_ptr`], and nothing is written that a device may still be using.
    #[must_use]
    pub unsafe fn as_mut_ptr(&mut self) -> *mut T {
        self.first()
    }

    fn first(&self) -> *mut T {
        match &self.memory {
            Some(memory) => ptr::with_exposed_provenance_mut(memory.address().0 as usize),
            None => NonNull::dangling().as_ptr(),
        }
    }
}
