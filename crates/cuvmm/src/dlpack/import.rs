//! A tensor of another library: its figures, its bytes, and letting go of it in order.
//!
//! `unsafe` here: the memory is somebody else's. Whoever imports a tensor says that it stays until
//! the deleter is called, and it is called once, by whatever ends an [`Imported`].
#![allow(unsafe_code)]

use std::fmt;

use cuvmm_driver::{Call, DeviceAddress, DeviceMemory, DriverError, PointerAttribute};
use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::{
    AllocationDeleter, DlpackElement, DlpackFlags, Managed, ManagedTensorBase, TensorRef,
};

use super::tensor::{Figures, alignment_of};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, HandedBack, MemoryError, TensorError};
use crate::own::{CloseError, CloseRefusal, Span, Stream};
use crate::region::Fence;
use crate::size::range_within;
use crate::users::Users;
use crate::view::{View, ViewMut};

/// `CUmemorytype`: device memory.
const DEVICE_MEMORY: u64 = 2;

/// A tensor of another library, used on a home stream of ours.
///
/// The library that made it orders the home stream behind its own work when it is asked for the
/// tensor: in Python, `tensor.__dlpack__(stream=handle)` with the home stream's
/// [handle](Stream::as_raw), or 1 for the legacy default stream. When it gets the tensor back it may
/// use the memory again at once, and knows nothing of our streams. So dropping this waits for the
/// home stream, and for those that were [recorded](Self::record_use), before it calls the deleter;
/// [`give_back`](Self::give_back) does not wait.
///
/// In a forked child nothing is waited for and the deleter is not called. Where the streams cannot be
/// waited for although the context is not lost, it is not called either, and the drop
/// [counts](Device::drop_failures) as failed.
pub struct Imported {
    /// Nothing once it has been called.
    deleter: Option<AllocationDeleter>,
    users: Users,
    element: DLDataType,
    figures: Figures,
    address: DeviceAddress,
    on_host: bool,
    read_only: bool,
}

impl Imported {
    /// Takes a tensor that lies on the stream's device, or in host memory.
    ///
    /// Of the real driver's memory every byte is looked for: for each of its mappings that the tensor
    /// lies in, `cuMemGetAddressRange` and twice `cuPointerGetAttribute`. A tensor in host memory is
    /// believed.
    ///
    /// # Errors
    /// [`HandedBack`] with the tensor in it.
    ///
    /// # Safety
    /// What the descriptor says is so: the memory is there until the deleter is called, the
    /// elements may be read, and written unless it says otherwise, and the home stream's
    /// work comes behind whatever wrote them.
    pub unsafe fn new<M: ManagedTensorBase>(
        home: &Stream,
        tensor: Managed<M>,
    ) -> Result<Self, HandedBack<Managed<M>, TensorError>> {
        let seen = tensor
            .validate()
            .map_err(TensorError::from)
            .and_then(|seen| Seen::of(home.device(), &seen));
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

    /// The stream it is used on.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        self.users.home()
    }

    /// What its elements are.
    #[must_use]
    pub const fn element(&self) -> DLDataType {
        self.element
    }

    /// How many elements it has in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.figures.shape
    }

    /// How many elements further the next one of each dimension lies.
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        &self.figures.strides
    }

    /// Where its first element lies; null if it has none.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Bytes from its first element to behind its last.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.figures.bytes
    }

    /// Whether its elements lie side by side in row-major order.
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.figures.is_compact()
    }

    /// Whether the library that made it wants it not to be written.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether it lies in host memory.
    #[must_use]
    pub const fn is_on_host(&self) -> bool {
        self.on_host
    }

    /// Notes that another stream uses the elements.
    ///
    /// # Errors
    /// [`ArgumentError::WrongDevice`] when it is another device's.
    pub fn record_use(&mut self, stream: &Stream) -> Result<(), TensorError> {
        let noted = self.users.record(stream);
        Ok(noted.then_some(()).ok_or(ArgumentError::STREAM)?)
    }

    /// Reads bytes of elements that lie side by side, behind what the home stream has queued
    /// (`cuMemcpyDtoHAsync`, waited for; for host memory the streams are waited for, and the
    /// processors copy).
    ///
    /// # Errors
    /// [`TensorError`] when the bytes are not all there, or the copy fails.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), TensorError> {
        self.compact()?;
        if !self.on_host {
            return Ok(self.span().read(self.home_stream(), offset, bytes)?);
        }
        let from = self.host_pointer(offset, bytes.len())?;
        // SAFETY: so many bytes of the tensor lie behind the pointer, its memory is there and may be
        // read, as was said when it was imported, and no work of ours is at it.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes bytes of elements that lie side by side, behind what the home stream has queued, and
    /// returns when they are there.
    ///
    /// # Errors
    /// [`TensorError`] when the tensor is only to be read, the bytes are not all there, or the copy
    /// fails.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), TensorError> {
        self.writable()?;
        self.compact()?;
        if !self.on_host {
            return Ok(self.span().write(self.home_stream(), offset, bytes)?);
        }
        let to = self.host_pointer(offset, bytes.len())?;
        // SAFETY: as for reading, and the tensor may be written.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// The elements for a kernel to read, if they lie side by side: on the home stream, or on one
    /// that was [recorded](Self::record_use). Others are named by [`address`](Self::address) and
    /// [`strides`](Self::strides).
    ///
    /// # Errors
    /// [`TensorError`] when they are of another type, do not lie side by side, lie where no kernel
    /// reaches them, or do not begin at a multiple of their alignment.
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

    /// The elements for a kernel to write.
    ///
    /// # Errors
    /// As [`view`](Self::view), and when the tensor is only to be read.
    pub fn view_mut<T: DlpackElement>(&mut self) -> Result<ViewMut<'_, T>, TensorError> {
        self.writable()?;
        let view = self.view::<T>()?;
        Ok(ViewMut::new(view.address(), view.len(), &self.users))
    }

    /// Has a stream of the library that made the tensor come behind our work on it, by events, and
    /// calls the deleter: the stream that it will use the memory on next. Nobody waits.
    ///
    /// # Errors
    /// [`CloseError`] with the tensor in it, when a stream captures (it is in use then), or the
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
        Err(CloseError {
            owner: self,
            reason,
        })
    }

    /// Waits for the streams and calls the deleter, as dropping it does.
    ///
    /// # Errors
    /// [`CloseError`] with the tensor in it, when the streams cannot be waited for.
    #[expect(clippy::result_large_err, reason = "the tensor itself is handed back")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        match self.let_go() {
            Ok(()) => Ok(()),
            Err(error) => Err(CloseError {
                owner: self,
                reason: error.into(),
            }),
        }
    }

    fn let_go(&mut self) -> Result<(), CallError> {
        if self.deleter.is_none() {
            return Ok(());
        }
        if let Some(forked) = self.device().forked() {
            return Err(forked);
        }
        // On a lost context nothing runs any more.
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
        // SAFETY: whoever imported it said that the memory is there until the deleter is called,
        // which the borrow comes before.
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

    /// Where bytes in host memory are, once no work of ours is at them.
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
        if let Err(error) = self.let_go() {
            self.device().report_drop("imported tensor", bytes, error);
            // Who made it may not have it back while our work may be at it.
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

/// What a descriptor says, as far as it was found to be so.
struct Seen {
    element: DLDataType,
    figures: Figures,
    address: DeviceAddress,
    on_host: bool,
}

impl Seen {
    fn of(device: &Device, tensor: &TensorRef<'_>) -> Result<Self, TensorError> {
        let element = tensor.dtype();
        let figures = figures_of(tensor)?;
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

/// Whether a descriptor's device is memory of this one.
fn is_of(device: &Device, found: DLDevice) -> bool {
    device.driver().device_memory() == DeviceMemory::Device
        && found.device_type == DLDeviceType::CUDA
        && found.device_id == device.ordinal().0
}

fn figures_of(tensor: &TensorRef<'_>) -> Result<Figures, TensorError> {
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
            // Of no consequence where there is nothing to step to.
            Err(_) if length < 2 => 0,
            Err(_) => return Err(TensorError::NegativeStride { dimension, stride }),
        });
    }
    Figures::of(tensor.dtype(), &shape, Some(&strides))
}

/// Looks for the device's memory under every byte of a range.
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

/// Whether the driver says that there is no such memory.
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
