//! Ranges of a slice's elements.
//!
//! `unsafe` in this file: pushing the arguments of a launch, which are those that cudarc pushes for
//! its own views.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use ::cudarc::driver::sys::CUdeviceptr;
use ::cudarc::driver::{
    CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs,
    PushKernelArg, SyncOnDrop,
};

use super::known::Known;

/// A range of the elements of a [`Slice`](super::Slice), used by the same rules.
pub struct Part<'a, T> {
    view: CudaView<'a, T>,
    known: &'a Known,
}

/// A mutable range of the elements of a [`Slice`](super::Slice).
pub struct PartMut<'a, T> {
    view: CudaViewMut<'a, T>,
    known: &'a Known,
}

impl<'a, T> Part<'a, T> {
    pub(super) const fn new(view: CudaView<'a, T>, known: &'a Known) -> Self {
        Self { view, known }
    }
}

impl<'a, T> PartMut<'a, T> {
    pub(super) const fn new(view: CudaViewMut<'a, T>, known: &'a Known) -> Self {
        Self { view, known }
    }
}

impl<T> DevicePtrMut<T> for PartMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.known.grant_to(stream);
        let (address, use_) = self.view.device_ptr_mut(stream);
        (address, self.known.finish_use(stream, use_))
    }
}

// SAFETY: the argument that is pushed is the one that cudarc pushes for its own view, which stays
// in place during the borrow.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b Part<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, part: &'b Part<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b CudaView<'c, T>>>::arg(self, &part.view)
    }
}

// SAFETY: the argument that is pushed is the one that cudarc pushes for its own view, which stays
// in place during the borrow.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b mut PartMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, part: &'b mut PartMut<'c, T>) -> &mut Self {
        <Self as PushKernelArg<&'b mut CudaViewMut<'c, T>>>::arg(self, &mut part.view)
    }
}

macro_rules! readable {
    ($($part:ident),+) => {$(
        impl<T> DeviceSlice<T> for $part<'_, T> {
            fn len(&self) -> usize {
                self.view.len()
            }

            fn stream(&self) -> &Arc<CudaStream> {
                self.known.home()
            }
        }

        impl<T> DevicePtr<T> for $part<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.known.grant_to(stream);
                let (address, use_) = self.view.device_ptr(stream);
                (address, self.known.finish_use(stream, use_))
            }
        }

        impl<T> fmt::Debug for $part<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($part))
                    .field("len", &self.view.len())
                    .finish_non_exhaustive()
            }
        }
    )+};
}

readable!(Part, PartMut);
