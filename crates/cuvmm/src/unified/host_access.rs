//! Access of the host to the elements: views, created once conflicting device accesses are
//! complete.
//!
//! A view contains a plain reference, so its soundness conditions must hold when it is created, and
//! the borrow preserves them: no conflicting device access is running or can begin while a view
//! lives, and every earlier one has been waited for, whether its guard was dropped or leaked.
//!
//! `unsafe` is used for references into managed memory, and for functions whose callers order
//! accesses themselves.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use bytemuck::Pod;

use super::UnifiedBuffer;
use super::uses::Kind;
use crate::error::ContainerError;

/// Elements for the host to read. While the view lives devices may read them too.
#[derive(Debug)]
pub struct HostView<'a, T> {
    elements: &'a [T],
}

/// Elements for the host to write. While the view lives nothing else uses them.
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
    /// Returns the elements to read, once writes to them are complete (`cuEventSynchronize`). Pages
    /// on a device move to the host when they are accessed, unless advice prevents it.
    ///
    /// # Errors
    /// [`ContainerError::NoConcurrentAccess`] if a device cannot work while the host accesses
    /// managed memory; others when a driver call fails, or the stream of a leaked access captures.
    #[doc(alias = "as_slice")]
    pub fn host(&self) -> Result<HostView<'_, T>, ContainerError> {
        self.shared()?;
        // SAFETY: every device of the driver can work while the host accesses managed memory.
        unsafe { self.host_unchecked() }
    }

    /// Returns the elements to write, once all uses of them are complete. Otherwise like
    /// [`host`](Self::host).
    ///
    /// # Errors
    /// Those of [`Self::host`].
    #[doc(alias = "as_mut_slice")]
    pub fn host_mut(&mut self) -> Result<HostViewMut<'_, T>, ContainerError> {
        self.shared()?;
        // SAFETY: every device of the driver can work while the host accesses managed memory.
        unsafe { self.host_mut_unchecked() }
    }

    /// Returns the elements to read, even if a device cannot work while the host accesses managed
    /// memory. Otherwise like [`host`](Self::host).
    ///
    /// # Safety
    /// While the view lives, no kernel may run on a device without concurrent managed access
    /// (attribute 89), whichever program launched it and whatever memory it uses.
    ///
    /// # Errors
    /// Those of [`Self::host`], except [`ContainerError::NoConcurrentAccess`].
    pub unsafe fn host_unchecked(&self) -> Result<HostView<'_, T>, ContainerError> {
        self.uses.wait(&self.device, Kind::Read)?;
        let (pointer, len) = (self.first(), self.len());
        // SAFETY: `len` elements are at the pointer, all plain data, initialized when the buffer
        // was created. Nothing writes them while `self` is borrowed: device accesses to write have
        // been waited for, and a new one needs an exclusive borrow of the buffer, as a view to
        // write does.
        let elements = unsafe { slice::from_raw_parts(pointer, len) };
        Ok(HostView { elements })
    }

    /// Returns the elements to write, even if a device cannot work while the host accesses managed
    /// memory. Otherwise like [`host_mut`](Self::host_mut).
    ///
    /// # Safety
    /// The conditions of [`Self::host_unchecked`].
    ///
    /// # Errors
    /// Those of [`Self::host_unchecked`].
    pub unsafe fn host_mut_unchecked(&mut self) -> Result<HostViewMut<'_, T>, ContainerError> {
        self.uses.wait(&self.device, Kind::Write)?;
        let (pointer, len) = (self.first(), self.len());
        // SAFETY: as in `host_unchecked`, and nothing reads them either: `self` is borrowed
        // exclusively, and all device accesses have been waited for.
        let elements = unsafe { slice::from_raw_parts_mut(pointer, len) };
        Ok(HostViewMut { elements })
    }

    /// Returns a pointer to the first element for the host; dangling if there are none. Does not
    /// wait.
    ///
    /// # Safety
    /// The caller must order all accesses: nothing may be read that a device may still be writing,
    /// as [`device_mut`](Self::device_mut) allows, and the pointer must not be used once the buffer
    /// is dropped. No kernel may run meanwhile on a device without concurrent managed access.
    #[must_use]
    pub unsafe fn as_ptr(&self) -> *const T {
        self.first()
    }

    /// Returns a pointer to the first element for the host to write; dangling if there are none.
    /// Does not wait.
    ///
    /// # Safety
    /// The conditions of [`Self::as_ptr`], and nothing may be written that a device may still be
    /// using.
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
