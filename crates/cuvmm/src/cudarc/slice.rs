//! Memory of this library as a slice of cudarc, which cudarc never frees.
//!
//! `unsafe` in this file: making a `CudaSlice` over memory that cudarc did not allocate, ensuring
//! that it is taken apart and never dropped, and the three functions that hand it out, whose rules
//! their documentation states.
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
use crate::error::CudarcError;
use crate::own::Stream;

/// Elements in memory of this library, for all of cudarc's functions that take a `DevicePtr` or a
/// `DevicePtrMut`, and as an argument of a launch. See the [module](super) for the streams that may
/// use it.
///
/// Its length is that of the memory when the slice is made. To let a container grow, [take it
/// out](Self::into_memory) and make another slice of it; while cudarc tracks events, that creates
/// two events for each slice.
///
/// When a slice is dropped, the home stream waits for the uses that cudarc tracked on other streams
/// (`cuStreamWaitEvent`), and then the memory is dropped.
///
/// # Functions that take a `CudaSlice`
/// Three functions hand it out: [`as_cuda_slice`](Self::as_cuda_slice),
/// [`as_cuda_slice_mut`](Self::as_cuda_slice_mut) and [`into_parts`](Self::into_parts). They are
/// `unsafe`, because uses of it are not observed and it could be dropped.
///
/// # Examples
/// ```no_run
/// use cuvmm::DeviceVec;
/// use cuvmm::cudarc::{Context, Slice};
///
/// let context = Context::open(0)?;
/// let stream = context.as_cudarc().new_stream()?;
/// let home = context.stream(&stream)?;
/// let mut samples = DeviceVec::<f32>::new(context.device(), &home, 1 << 20)?;
/// samples.extend_from_slice(&[1.0, 2.0, 3.0])?;
///
/// let mut slice = Slice::new(samples)?; // owns the vector
/// stream.memcpy_htod(&[4.0, 5.0, 6.0], &mut slice)?;
/// assert_eq!(stream.clone_dtoh(&slice)?, [4.0, 5.0, 6.0]);
/// let mut samples = slice.into_memory();
/// samples.extend_from_slice(&[7.0])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Slice<T, M> {
    // Dropped before the memory.
    loan: BorrowedSlice<T>,
    known: Known,
    memory: M,
}

/// A `CudaSlice` that does not own the memory it points to.
struct BorrowedSlice<T> {
    /// Must not be dropped as a `CudaSlice`, because cudarc would free the memory.
    slice: ManuallyDrop<CudaSlice<T>>,
    device: Device,
}

impl<T> BorrowedSlice<T> {
    /// # Safety
    /// The elements must stay in place until this is dropped, and every bit pattern must be a valid
    /// `T`.
    unsafe fn new(
        backing: &Backing,
        home: &Arc<CudaStream>,
        device: &Device,
    ) -> Result<Self, CudarcError> {
        let refused = |error| CudarcError::Cudarc(code(error));
        let context = home.context();
        context.bind_to_thread().map_err(refused)?;
        if context.is_event_tracking() {
            // cudarc panics if it cannot create the events of a slice, so creating one is tried
            // before.
            drop(context.new_event(None).map_err(refused)?);
        }
        // SAFETY: the caller guarantees that the elements stay in place and are valid for any bit
        // pattern; the slice is taken apart before the memory is dropped.
        let slice = unsafe { home.upgrade_device_ptr(backing.address, backing.len) };
        Ok(Self {
            slice: ManuallyDrop::new(slice),
            device: device.clone(),
        })
    }

    /// Returns the slice, which the caller must not drop.
    fn into_inner(self) -> CudaSlice<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, and neither field is used after this block.
        unsafe {
            std::ptr::drop_in_place(&mut this.device);
            ManuallyDrop::take(&mut this.slice)
        }
    }
}

impl<T> Drop for BorrowedSlice<T> {
    fn drop(&mut self) {
        // SAFETY: this is the only place that takes the slice out in `drop`, and it is not used
        // afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        if self.device.forked().is_some() {
            // A forked child has no events or streams to release.
            std::mem::forget(slice);
        } else {
            slice.leak();
        }
    }
}

impl<T: Pod, M: Memory<T>> Slice<T, M> {
    /// Makes a slice of memory whose home stream was wrapped from cudarc
    /// ([`Context::stream`](super::Context::stream)).
    ///
    /// While cudarc tracks events, this creates two (`cuEventCreate`). If there are several
    /// streams, one is recorded, so that other streams come after the work queued on the home
    /// stream.
    ///
    /// # Errors
    /// [`CudarcError`], with the owner of the memory [handed back](crate::error::HandedBack), if
    /// the home stream is not a stream of cudarc, the memory is not a whole number of aligned
    /// elements, or the context is lost.
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

    fn borrow(memory: &M) -> Result<(BorrowedSlice<T>, Known), CudarcError> {
        let mut backing = memory.backing()?;
        let streams = std::mem::take(&mut backing.streams);
        let device = streams.first().map(|home| home.device().clone());
        let device = device.ok_or(CudarcError::NotOfCudarc)?;
        let known = Known::new(streams)?;
        device.usable()?;
        // SAFETY: the memory stays in place while `memory` lives, which is dropped after the loan,
        // and `T: Pod` permits any bit pattern.
        let mut loan = unsafe { BorrowedSlice::new(&backing, known.home(), &device) }?;
        // Work of the home stream that cudarc has not seen comes before the first use too.
        drop(loan.slice.device_ptr_mut(known.home()));
        Ok((loan, known))
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.loan.slice.len()
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that the slice was made of.
    #[must_use]
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Ends the slice and returns the memory that it was made of. The home stream waits for the
    /// uses that cudarc tracked on other streams.
    #[must_use]
    pub fn into_memory(self) -> M {
        let Self { loan, memory, .. } = self;
        drop(loan);
        memory
    }

    /// Records that another stream of the context uses the memory: from now on uses on it are not
    /// waited for, and the memory is reused only after its work too. For memory that a container
    /// lends, record the stream with the container beforehand.
    ///
    /// # Errors
    /// [`CudarcError`] if the stream belongs to another device.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), CudarcError>
    where
        M: Owner<T>,
    {
        stream.check_on(&self.loan.device)?;
        self.memory.note(stream)?;
        self.known.add(stream);
        Ok(())
    }

    /// Returns a range of the elements, or `None` if it is out of bounds.
    #[must_use]
    pub fn try_slice(&self, range: Range<usize>) -> Option<Part<'_, T>> {
        let view = self.loan.slice.try_slice(range)?;
        Some(Part::new(view, &self.known))
    }

    /// Returns a mutable range of the elements, or `None` if it is out of bounds.
    #[must_use]
    pub fn try_slice_mut(&mut self, range: Range<usize>) -> Option<PartMut<'_, T>>
    where
        M: MemoryMut<T>,
    {
        let view = self.loan.slice.try_slice_mut(range)?;
        Some(PartMut::new(view, &self.known))
    }

    /// Splits the elements at `middle` into two mutable parts, or returns `None` if there are
    /// fewer.
    #[must_use]
    pub fn try_split_at_mut(&mut self, middle: usize) -> Option<(PartMut<'_, T>, PartMut<'_, T>)>
    where
        M: MemoryMut<T>,
    {
        let (first, rest) = self.loan.slice.try_split_at_mut(middle)?;
        let part = |view| PartMut::new(view, &self.known);
        Some((part(first), part(rest)))
    }

    /// Returns cudarc's slice, for functions that take nothing else. Cloning it copies the elements
    /// to memory that cudarc allocates.
    ///
    /// # Safety
    /// It must be used only on streams that the owner of the memory knows, and the elements must
    /// not be written through it.
    #[must_use]
    pub unsafe fn as_cuda_slice(&self) -> &CudaSlice<T> {
        &self.loan.slice
    }

    /// Returns cudarc's slice, to be written.
    ///
    /// # Safety
    /// It must be used only on streams that the owner of the memory knows, and must stay in place:
    /// it must not be replaced (`std::mem::swap`, `std::mem::replace`, an assignment). cudarc would
    /// free the slice that was moved out, and this library would treat the one moved in as its own.
    #[must_use]
    pub unsafe fn as_cuda_slice_mut(&mut self) -> &mut CudaSlice<T>
    where
        M: MemoryMut<T>,
    {
        &mut self.loan.slice
    }

    /// Splits the slice into cudarc's slice and the memory, for a framework that must own the slice
    /// (for example candle's `CudaStorage::wrap_cuda_slice`).
    ///
    /// # Safety
    /// The slice must be used only on streams that the owner of the memory knows. It must never be
    /// dropped: before the memory is dropped, changed or used in another way, the slice must be
    /// taken back from its holder and ended by `CudaSlice::leak`. If that cannot be guaranteed, the
    /// memory must be leaked (`std::mem::forget`).
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
        self.known.grant_to(stream);
        let (address, use_) = self.loan.slice.device_ptr(stream);
        (address, self.known.finish_use(stream, use_))
    }
}

impl<T: Pod, M: MemoryMut<T>> DevicePtrMut<T> for Slice<T, M> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.known.grant_to(stream);
        let (address, use_) = self.loan.slice.device_ptr_mut(stream);
        (address, self.known.finish_use(stream, use_))
    }
}

// SAFETY: the argument that is pushed is the one that cudarc pushes for its own slice, which stays
// in place during the borrow.
unsafe impl<'a, 'b: 'a, T: Pod, M: Memory<T>> PushKernelArg<&'b Slice<T, M>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, slice: &'b Slice<T, M>) -> &mut Self {
        <Self as PushKernelArg<&'b CudaSlice<T>>>::arg(self, &slice.loan.slice)
    }
}

// SAFETY: the argument that is pushed is the one that cudarc pushes for its own slice, which stays
// in place during the borrow.
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
