//! Import of a tensor of another library: access to its bytes, and its ordered release.
//!
//! `unsafe` in this file: the memory belongs to another library. The importing caller guarantees
//! that the memory stays until the deleter is called, once, when an [`Imported`] ends.
#![allow(unsafe_code)]

use std::fmt;

use cuvmm_driver::{Call, DeviceAddress, DeviceMemory, DriverError, PointerAttribute};
use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::{
    AllocationDeleter, DlpackElement, DlpackFlags, Managed, ManagedTensorBase, TensorRef,
};

use super::tensor::{Figures, alignment_of, bits_of};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, HandedBack, MemoryError, TensorError};
use crate::extents::Fence;
use crate::own::{CloseError, CloseRefusal, Span, Stream};
use crate::size::range_within;
use crate::users::Users;
use crate::view::{View, ViewMut};

/// `CUmemorytype`: device memory.
const DEVICE_MEMORY: u64 = 2;

/// A tensor of another library, used on a home stream of this library.
///
/// The library that made the tensor orders the home stream after its own work when the tensor is
/// requested from it: in Python, `tensor.__dlpack__(stream=handle)` with the home stream's
/// [handle](Stream::as_raw), or 1 for the legacy default stream. After the deleter it may reuse the
/// memory at once, without regard to this library's streams. So dropping an imported tensor waits
/// for the home stream and the [recorded](Self::record_use) streams before it calls the deleter.
/// [`give_back`](Self::give_back) does not wait.
///
/// In a forked child, a drop neither waits nor calls the deleter. If the wait fails and the context
/// is not lost, the deleter is not called either, and the drop [counts](Device::drop_failures) as
/// failed.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let stream = cuvmm::Stream::new(&device)?;
/// # let mut samples = cuvmm::DeviceVec::<u16>::new(&device, &stream, 1024)?;
/// # samples.resize(1024, 7)?;
/// # let tensor = cuvmm::dlpack::Tensor::of::<u16>(&[32, 32]);
/// # let tensor = tensor.export(samples, &cuvmm::dlpack::Consumer::Synchronized)?;
/// use cuvmm::dlpack::Imported;
///
/// // `tensor` came from another library.
/// // SAFETY: its descriptor is true, and nothing else writes to it.
/// let imported = unsafe { Imported::new(&stream, tensor) }?;
/// assert_eq!(imported.shape(), [32, 32]);
/// let mut last = [0; 2];
/// imported.read(imported.size() - 2, &mut last)?;
/// assert_eq!(u16::from_le_bytes(last), 7);
/// imported.close()?; // waits for the stream, and calls the deleter
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Imported {
    /// `None` once it was called.
    deleter: Option<AllocationDeleter>,
    users: Users,
    element: DLDataType,
    figures: Figures,
    address: DeviceAddress,
    on_host: bool,
    read_only: bool,
}

impl Imported {
    /// Imports a tensor that is on the stream's device, or in host memory.
    ///
    /// With the real driver, verifies that every byte is memory of the device:
    /// `cuMemGetAddressRange` and two calls of `cuPointerGetAttribute` for each mapping that the
    /// tensor covers. Host memory is not verified.
    ///
    /// # Errors
    /// [`HandedBack`] with the tensor in it.
    ///
    /// # Safety
    /// The descriptor must be true: the memory exists until the deleter is called, its elements may
    /// be read, and written unless the descriptor is read-only. The home stream's work must be
    /// ordered after all work that wrote the elements.
    pub unsafe fn new<M: ManagedTensorBase>(
        home: &Stream,
        tensor: Managed<M>,
    ) -> Result<Self, HandedBack<Managed<M>, TensorError>> {
        let seen = tensor
            .validate()
            .map_err(TensorError::from)
            .and_then(|seen| Seen::of(home.device(), &seen, tensor.flags()));
        match seen {
            Ok(Seen {
                element,
                figures,
                address,
                on_host,
            }) => Ok(Self {
                read_only: tensor.flags().contains(DlpackFlags::READ_ONLY),
                deleter: Some(tensor.into_deleter()),
                users: Users::at(home),
                element,
                figures,
                address,
                on_host,
            }),
            Err(reason) => Err(HandedBack::new(tensor, reason)),
        }
    }

    /// Returns the home stream.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        self.users.home()
    }

    /// Returns the type of the elements.
    #[must_use]
    pub const fn element(&self) -> DLDataType {
        self.element
    }

    /// Returns the number of elements in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.figures.shape
    }

    /// Returns the distance in elements between consecutive indices of each dimension.
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        &self.figures.strides
    }

    /// Returns the address of the first element, or null if there is none.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the bytes from the first element to the end of the last.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.figures.bytes
    }

    /// Returns `true` if the elements are contiguous in row-major order.
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.figures.is_compact()
    }

    /// Returns `true` if the tensor is marked as read-only.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns `true` if the tensor is in host memory.
    #[must_use]
    pub const fn is_on_host(&self) -> bool {
        self.on_host
    }

    /// Records that another stream uses the elements.
    ///
    /// # Errors
    /// [`ArgumentError::WrongDevice`] if the stream belongs to another device.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), TensorError> {
        stream.check_on(self.device())?;
        self.users.record(stream);
        Ok(())
    }

    /// Copies bytes of a contiguous tensor to the host, after the work queued on the home stream
    /// (`cuMemcpyDtoHAsync`, followed by a wait; for host memory, this waits for the streams and
    /// copies with the processor).
    ///
    /// # Errors
    /// [`TensorError`] if the tensor is not contiguous, the range is not within it, or the copy
    /// fails.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), TensorError> {
        self.compact()?;
        if !self.on_host {
            return Ok(self.span().read(self.home_stream(), offset, bytes)?);
        }
        let from = self.host_pointer(offset, bytes.len())?;
        // SAFETY: `host_pointer` checked that this many bytes of the tensor follow the pointer and
        // waited for this library's work on them; by the promise to `new` the memory exists and may
        // be read. `copy` permits overlap.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes bytes of a contiguous tensor behind the home stream's work, and waits for the copy.
    ///
    /// # Errors
    /// [`TensorError`] if the tensor is read-only or not contiguous, the range is not within it, or
    /// the copy fails.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), TensorError> {
        self.writable()?;
        self.compact()?;
        if !self.on_host {
            return Ok(self.span().write(self.home_stream(), offset, bytes)?);
        }
        let to = self.host_pointer(offset, bytes.len())?;
        // SAFETY: as for `read`; the tensor is not read-only, so by the promise to `new` it may be
        // written.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Returns a view of the elements of a contiguous tensor for a kernel to read, on the home
    /// stream or a [recorded](Self::record_use) one. For other tensors, use
    /// [`address`](Self::address) and [`strides`](Self::strides).
    ///
    /// # Errors
    /// [`TensorError`] if the elements are of another type, are not contiguous, are in host memory
    /// that kernels do not reach, or are not aligned.
    pub fn view<T: DlpackElement>(&self) -> Result<View<'_, T>, TensorError> {
        self.kernel_reaches()?;
        self.compact()?;
        if !self.element.is::<T>() {
            return Err(TensorError::OtherElements {
                found: self.element,
                wanted: T::DTYPE,
            });
        }
        let alignment = alignment_of(self.element).max(align_of::<T>() as u64);
        ArgumentError::aligned("the address of a tensor", self.address.0, alignment)?;
        let elements = self.figures.shape.iter().product();
        Ok(View::new(self.address, elements, &self.users))
    }

    /// Returns a mutable view of the elements of a contiguous tensor, for a kernel to write.
    ///
    /// # Errors
    /// [`TensorError`] in the cases of [`view`](Self::view), and if the tensor is read-only.
    pub fn view_mut<T: DlpackElement>(&mut self) -> Result<ViewMut<'_, T>, TensorError> {
        self.writable()?;
        let view = self.view::<T>()?;
        Ok(ViewMut::new(view.address(), view.len(), &self.users))
    }

    /// Orders a stream of the library that made the tensor after this library's work on it, by
    /// events, and calls the deleter. That library uses the memory next on `producer`. Does not
    /// wait.
    ///
    /// # Errors
    /// [`CloseError`] with the tensor in it, if a stream is capturing (reported as in use), or the
    /// driver refuses.
    #[expect(clippy::result_large_err, reason = "the tensor itself is handed back")]
    pub fn give_back(mut self, producer: &Stream) -> Result<(), CloseError<Self>> {
        let reason = if producer.device().same_driver(self.device()) {
            match Fence::streams(self.users.all()).order_before(producer) {
                Ok(true) => {
                    drop(self.deleter.take());
                    return Ok(());
                }
                Ok(false) => CloseRefusal::InUse,
                Err(error) => error.into(),
            }
        } else {
            CallError::WrongDriver.into()
        };
        CloseError::of(self, Err(reason))
    }

    /// Waits for the streams and calls the deleter, as dropping the tensor does.
    ///
    /// # Errors
    /// [`CloseError`] with the tensor in it, if the wait fails.
    #[expect(clippy::result_large_err, reason = "the tensor itself is handed back")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let called = self.call_deleter();
        CloseError::of(self, called)
    }

    fn call_deleter(&mut self) -> Result<(), CallError> {
        if self.deleter.is_none() {
            return Ok(());
        }
        self.device().own_process()?;
        // On a lost context no work runs any more.
        match self.users.wait() {
            Err(error) if self.device().lost().is_none() => Err(error),
            _ => {
                drop(self.deleter.take());
                Ok(())
            }
        }
    }

    fn device(&self) -> &Device {
        self.home_stream().device()
    }

    fn span(&self) -> Span<'_> {
        // SAFETY: by the promise to `new` the memory exists until the deleter is called, which
        // happens only after this borrow.
        unsafe { Span::new(self.device(), self.address, self.size()) }
    }

    fn compact(&self) -> Result<(), TensorError> {
        if self.is_compact() {
            return Ok(());
        }
        Err(TensorError::NotCompact {
            shape: self.figures.shape.clone(),
            strides: self.figures.strides.clone(),
        })
    }

    fn writable(&self) -> Result<(), TensorError> {
        let writable = !self.read_only;
        writable.then_some(()).ok_or(TensorError::ReadOnly)
    }

    fn kernel_reaches(&self) -> Result<(), TensorError> {
        let ours = self.device().driver().device_memory() == DeviceMemory::Host;
        (ours || !self.on_host)
            .then_some(())
            .ok_or(TensorError::OnHost)
    }

    /// Returns a pointer to bytes in host memory, after waiting for this library's work on them.
    fn host_pointer(&self, offset: u64, length: usize) -> Result<*mut u8, TensorError> {
        let size = length as u64;
        let fits = range_within(offset, size, self.size()).is_some();
        let nothing = size == 0 && offset <= self.size();
        if !(fits || nothing) {
            return Err(ArgumentError::bytes(offset, size, self.size()).into());
        }
        self.users
            .wait()
            .map_err(|cause| MemoryError::range(offset, size, cause))?;
        let address = usize::try_from(self.address.0.saturating_add(offset)).unwrap_or_default();
        Ok(if size == 0 {
            std::ptr::dangling_mut()
        } else {
            std::ptr::with_exposed_provenance_mut(address)
        })
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let bytes = self.size();
        if let Err(error) = self.call_deleter() {
            self.device().report_drop("imported tensor", bytes, error);
            // Its library must not reuse it while work of this library may still access it.
            std::mem::forget(self.deleter.take());
        }
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("address", &self.address)
            .field("element", &self.element)
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .finish_non_exhaustive()
    }
}

/// The contents of a descriptor, as far as they were verified.
struct Seen {
    element: DLDataType,
    figures: Figures,
    address: DeviceAddress,
    on_host: bool,
}

impl Seen {
    fn of(
        device: &Device,
        tensor: &TensorRef<'_>,
        flags: DlpackFlags,
    ) -> Result<Self, TensorError> {
        let element = tensor.dtype();
        let bits = match flags.contains(DlpackFlags::IS_SUBBYTE_TYPE_PADDED) {
            true => 8 * bits_of(element).div_ceil(8),
            false => bits_of(element),
        };
        let figures = figures_of(tensor, bits)?;
        let size = figures.bytes;
        let found = tensor.device();
        let on_host = found == DLDevice::CPU;
        if !on_host && !is_of(device, found) {
            return Err(TensorError::WrongDevice {
                found,
                device: device.ordinal(),
            });
        }
        let base = DeviceAddress(tensor.data_ptr().expose_provenance() as u64);
        let address = if size == 0 {
            DeviceAddress::NULL
        } else {
            let first = base.checked_add(tensor.byte_offset());
            let outside = ArgumentError::bytes(base.0, size, u64::MAX);
            let first = first.filter(|first| base.0 != 0 && first.checked_add(size).is_some());
            first.ok_or(outside)?
        };
        if !on_host {
            find(device, address, size)?;
        }
        Ok(Self {
            element,
            figures,
            address,
            on_host,
        })
    }
}

/// Returns `true` if a descriptor's device is `device`.
fn is_of(device: &Device, found: DLDevice) -> bool {
    device.driver().device_memory() == DeviceMemory::Device
        && found.device_type == DLDeviceType::CUDA
        && found.device_id == device.ordinal().0
}

fn figures_of(tensor: &TensorRef<'_>, bits: u64) -> Result<Figures, TensorError> {
    let said = tensor.strides_or_compact()?;
    let too_large = || TensorError::TooLarge {
        shape: vec![],
        strides: vec![],
    };
    let mut shape = Vec::with_capacity(said.len());
    let mut strides = Vec::with_capacity(said.len());
    for (dimension, (&length, &stride)) in tensor.shape().iter().zip(&*said).enumerate() {
        let length = usize::try_from(length).map_err(|_| too_large())?;
        shape.push(length);
        strides.push(match usize::try_from(stride) {
            Ok(stride) => stride,
            // The stride does not matter if there is at most one index.
            Err(_) if length < 2 => 0,
            Err(_) => return Err(TensorError::NegativeStride { dimension, stride }),
        });
    }
    Figures::stored(tensor.dtype(), bits, &shape, Some(&strides))
}

/// Verifies that every byte of a range is memory of the device.
fn find(device: &Device, address: DeviceAddress, size: u64) -> Result<(), TensorError> {
    let mut at = address.0;
    let end = address.0.saturating_add(size);
    while at < end {
        let address = DeviceAddress(at);
        let missing = TensorError::NotThere {
            address,
            device: device.ordinal(),
        };
        let asked = device.call(Call::MemGetAddressRange, |driver, device| {
            driver.address_range(device, address)
        });
        let (start, length) = match asked {
            Ok(range) => range,
            Err(CallError::Driver(error)) if says_no(&error) => return Err(missing),
            Err(error) => return Err(error.into()),
        };
        let attribute = |attribute: PointerAttribute| {
            device.call(Call::PointerGetAttribute, |driver, device| {
                driver.pointer_attribute(device, address, attribute)
            })
        };
        let own = attribute(PointerAttribute::MEMORY_TYPE)? == DEVICE_MEMORY
            && i32::try_from(attribute(PointerAttribute::DEVICE_ORDINAL)?)
                == Ok(device.ordinal().0);
        let behind = start.0.saturating_add(length);
        if !own || behind <= at {
            return Err(missing);
        }
        at = behind;
    }
    Ok(())
}

/// Returns `true` if the driver's answer means that there is no such memory.
fn says_no(error: &DriverError) -> bool {
    use cuvmm_driver::CUresult;
    let code = error.code();
    [
        CUresult::CUDA_ERROR_NOT_FOUND,
        CUresult::CUDA_ERROR_INVALID_VALUE,
    ]
    .map(Some)
    .contains(&code)
}
