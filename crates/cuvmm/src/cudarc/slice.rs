//! Memory of this library as a slice of cudarc's, which cudarc never frees.
//!
//! `unsafe` here: making a `CudaSlice` over memory that cudarc did not allocate, and seeing to it that
//! it is taken apart and never dropped; and the doors through which it can be had, whose rules are
//! written at each.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;

use ::cudarc::driver::sys::CUdeviceptr;
use ::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg,
    SyncOnDrop,
};
use bytemuck::Pod;

use super::code;
use super::known::Known;
use super::memory::sealed::Backing;
use super::memory::{Memory, MemoryMut, Owner};
use super::part::{Part, PartMut};
use crate::device::Device;
use crate::error::{ArgumentError, CudarcError};
use crate::own::Stream;

/// Elements in memory of this library, for all of cudarc's functions that take a `DevicePtr` or a
/// `DevicePtrMut`, and as an argument of a launch. See the [module](super) for the streams that may use
/// it.
///
/// It has the length that the memory has when it is made. To let a container grow,
/// [take it out](Self::into_memory) and make another slice of it: two events are made for each while
/// cudarc tracks them.
///
/// When it goes, the home stream waits for the uses that cudarc tracked on other streams
/// (`cuStreamWaitEvent`), and then the memory goes the way of its owner.
///
/// # For functions that want a `CudaSlice`
/// There are three doors, all `unsafe`, because through them uses are not seen and what comes out could
/// be dropped: [`as_cuda_slice`](Self::as_cuda_slice), [`as_cuda_slice_mut`](Self::as_cuda_slice_mut) and
/// [`into_parts`](Self::into_parts).
pub struct Slice<T, M> {
    // Goes before the memory.
    loan: Loan<T>,
    known: Known,
    memory: M,
}

/// A `CudaSlice` that owns nothing of what it points to.
struct Loan<T> {
    /// Dropped as it is, it would have cudarc free the memory.
    slice: ManuallyDrop<CudaSlice<T>>,
    device: Device,
}

impl<T> Loan<T> {
    /// # Safety
    /// The elements stay where they are until this is dropped, and every bit pattern is a `T`.
    unsafe fn new(
        backing: &Backing,
        home: &Arc<CudaStream>,
        device: &Device,
    ) -> Result<Self, CudarcError> {
        let refused = |error| CudarcError::Cudarc(code(error));
        let context = home.context();
        context.bind_to_thread().map_err(refused)?;
        if context.is_event_tracking() {
            // Where it cannot make the events of a slice cudarc panics, so it is asked for one before.
            drop(context.new_event(None).map_err(refused)?);
        }
        // SAFETY: the caller's promise; and the slice is taken apart before the memory goes.
        let slice = unsafe { home.upgrade_device_ptr(backing.address, backing.len) };
        Ok(Self {
            slice: ManuallyDrop::new(slice),
            device: device.clone(),
        })
    }

    /// The slice, which whoever has it now must not drop.
    fn into_inner(self) -> CudaSlice<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: nothing of `this` is used or dropped after.
        unsafe {
            std::ptr::drop_in_place(&mut this.device);
            ManuallyDrop::take(&mut this.slice)
        }
    }
}

impl<T> Drop for Loan<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken here and nowhere else, and not used after.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        if self.device.forked().is_some() {
            // The child has no events and streams to give back.
            std::mem::forget(slice);
        } else {
            slice.leak();
        }
    }
}

impl<T: Pod, M: Memory<T>> Slice<T, M> {
    /// Makes a slice of memory whose home stream was taken up from cudarc
    /// ([`Context::stream`](super::Context::stream)).
    ///
    /// While cudarc tracks events, two are made (`cuEventCreate`), and where there are several streams,
    /// one is recorded, so that other streams come behind what the home stream has queued.
    ///
    /// # Errors
    /// [`CudarcError`], with what owns the memory [handed back](crate::error::HandedBack), when the home
    /// stream is none of cudarc's, the memory is not so many whole elements, or the context is lost.
    pub fn new(memory: M) -> Result<Self, M::Refused> {
        match Self::borrow(&memory) {
            Ok((loan, known)) => Ok(Self {
                loan,
                known,
                memory,
            }),
            Err(reason) => Err(memory.refuse(reason)),
        }
    }

    fn borrow(memory: &M) -> Result<(Loan<T>, Known), CudarcError> {
        let mut backing = memory.backing()?;
        let streams = std::mem::take(&mut backing.streams);
        let device = streams.first().map(|home| home.device().clone());
        let device = device.ok_or(CudarcError::NotOfCudarc)?;
        let known = Known::new(streams)?;
        device.usable()?;
        // SAFETY: the memory stays where it is for as long as `memory` does, which goes after the loan;
        // and any bits are an element.
        let mut loan = unsafe { Loan::new(&backing, known.home(), &device) }?;
        // What cudarc has not seen of the home stream's work comes before the first use too.
        drop(loan.slice.device_ptr_mut(known.home()));
        Ok((loan, known))
    }

    /// How many elements there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.loan.slice.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it was made of.
    #[must_use]
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// What it was made of. The home stream waits for the uses that cudarc tracked on other streams.
    #[must_use]
    pub fn into_memory(self) -> M {
        let Self { loan, memory, .. } = self;
        drop(loan);
        memory
    }

    /// Notes that another stream of the context uses the memory: from now on its uses are not waited
    /// for, and the memory is handed on only behind its work too. What is lent by a container is
    /// recorded with the container, before.
    ///
    /// # Errors
    /// [`CudarcError`] when the stream is another device's.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), CudarcError>
    where
        M: Owner<T>,
    {
        if !stream.device().is_same(&self.loan.device) {
            return Err(ArgumentError::STREAM.into());
        }
        self.memory.note(stream)?;
        self.known.add(stream);
        Ok(())
    }

    /// Some of the elements; nothing if they are not all there.
    #[must_use]
    pub fn try_slice(&self, range: Range<usize>) -> Option<Part<'_, T>> {
        let view = self.loan.slice.try_slice(range)?;
        Some(Part::new(view, &self.known))
    }

    /// Some of the elements, to be written; nothing if they are not all there.
    #[must_use]
    pub fn try_slice_mut(&mut self, range: Range<usize>) -> Option<PartMut<'_, T>>
    where
        M: MemoryMut<T>,
    {
        let view = self.loan.slice.try_slice_mut(range)?;
        Some(PartMut::new(view, &self.known))
    }

    /// The first `middle` elements and the others, to be written; nothing if there are fewer.
    #[must_use]
    pub fn try_split_at_mut(&mut self, middle: usize) -> Option<(PartMut<'_, T>, PartMut<'_, T>)>
    where
        M: MemoryMut<T>,
    {
        let (first, rest) = self.loan.slice.try_split_at_mut(middle)?;
        let part = |view| PartMut::new(view, &self.known);
        Some((part(first), part(rest)))
    }

    /// The slice as cudarc has it, for functions that take nothing else. A clone of it is a copy, in
    /// memory that cudarc allocates.
    ///
    /// # Safety
    /// It is used on streams that the owner of the memory knows, and nothing is written through it.
    #[must_use]
    pub unsafe fn as_cuda_slice(&self) -> &CudaSlice<T> {
        &self.loan.slice
    }

    /// The slice as cudarc has it, to be written.
    ///
    /// # Safety
    /// It is used on streams that the owner of the memory knows; and it stays where it is: nothing is
    /// put in its place (`std::mem::swap`, `std::mem::replace`, an assignment), since cudarc would free
    /// what was moved out, and this library what was moved in would not be its own.
    #[must_use]
    pub unsafe fn as_cuda_slice_mut(&mut self) -> &mut CudaSlice<T>
    where
        M: MemoryMut<T>,
    {
        &mut self.loan.slice
    }

    /// The slice and the memory apart, for a framework that wants to own the slice (candle's
    /// `CudaStorage::wrap_cuda_slice`, say).
    ///
    /// # Safety
    /// The slice is used on streams that the owner of the memory knows. It is never dropped: before the
    /// memory goes, changes or is used otherwise, it is taken back from whoever has it and ended by
    /// `CudaSlice::leak`. Where neither can be seen to, the memory is leaked (`std::mem::forget`).
    #[must_use]
    pub unsafe fn into_parts(self) -> (CudaSlice<T>, M) {
        let Self { loan, memory, .. } = self;
        (loan.into_inner(), memory)
    }
}

impl<T: Pod, M: Memory<T>> DeviceSlice<T> for Slice<T, M> {
    fn len(&self) -> usize {
        self.loan.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.known.home()
    }
}

impl<T: Pod, M: Memory<T>> DevicePtr<T> for Slice<T, M> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.known.let_in(stream);
        let (address, use_) = self.loan.slice.device_ptr(stream);
        (address, self.known.see_out(stream, use_))
    }
}

impl<T: Pod, M: MemoryMut<T>> DevicePtrMut<T> for Slice<T, M> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.known.let_in(stream);
        let (address, use_) = self.loan.slice.device_ptr_mut(stream);
        (address, self.known.see_out(stream, use_))
    }
}

// SAFETY: what is pushed is what cudarc pushes for its own slice, which stays where it is while the
// borrow lasts.
unsafe impl<'a, 'b: 'a, T: Pod, M: Memory<T>> PushKernelArg<&'b Slice<T, M>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, slice: &'b Slice<T, M>) -> &mut Self {
        <Self as PushKernelArg<&'b CudaSlice<T>>>::arg(self, &slice.loan.slice)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T: Pod, M: MemoryMut<T>> PushKernelArg<&'b mut Slice<T, M>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, slice: &'b mut Slice<T, M>) -> &mut Self {
        <Self as PushKernelArg<&'b mut CudaSlice<T>>>::arg(self, &mut slice.loan.slice)
    }
}

impl<T, M> fmt::Debug for Slice<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice")
            .field("len", &self.loan.slice.len())
            .finish_non_exhaustive()
    }
}
