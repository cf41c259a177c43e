//! A C library for `dlpack.py`: exports memory of this library as DLPack pointers, and imports
//! foreign tensors. It serves that script only and trusts its arguments.
//!
//! `unsafe` is used for the C boundary. Every pointer was returned by this library before, or the
//! script vouches for it.
#![allow(
    unsafe_code,
    missing_docs,
    missing_debug_implementations,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks
)]

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use cuvmm::dlpack::dlpark::ffi::{
    DLDataType, DLDataTypeCode, DLManagedTensor, DLManagedTensorVersioned,
};
use cuvmm::dlpack::dlpark::{Managed, ManagedTensorBase};
use cuvmm::dlpack::{Consumer, Imported, Memory, Tensor};
use cuvmm::driver::auto::{self, OpenOptions, Wanted};
use cuvmm::{Block, Device, DeviceVec, Limit, Pool, Region, Stream, Tenant};

type Outcome<T> = Result<T, Box<dyn Error>>;

pub struct World {
    device: Device,
    stream: Stream,
    pool: Pool,
    tenant: Tenant,
}

pub enum Owner {
    Block(Arc<Block>),
    Vector(Arc<DeviceVec<u8>>),
    Region(Arc<Region>),
}

/// A tensor to export, as the script describes it.
#[repr(C)]
pub struct Request {
    offset: u64,
    shape: *const usize,
    /// Null for the strides of a contiguous tensor.
    strides: *const usize,
    dimensions: usize,
    code: u8,
    bits: u8,
    read_only: bool,
    versioned: bool,
    has_stream: bool,
    stream: i64,
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// Converts an outcome for C: the value, or `failed` with the message stored.
fn said<T>(outcome: Outcome<T>, failed: T) -> T {
    outcome.unwrap_or_else(|error| {
        let words = CString::new(error.to_string()).unwrap_or_default();
        ERROR.with_borrow_mut(|kept| *kept = words);
        failed
    })
}

fn owned<T>(outcome: Outcome<T>) -> *mut T {
    said(
        outcome.map(|made| Box::into_raw(Box::new(made))),
        ptr::null_mut(),
    )
}

/// Returns the message of this thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn last_error() -> *const c_char {
    ERROR.with_borrow(|kept| kept.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn world_open(on_gpu: bool, limit: u64) -> *mut World {
    let open = || -> Outcome<World> {
        let wanted = if on_gpu { Wanted::Cuda } else { Wanted::Host };
        let driver = auto::open(OpenOptions::new().wanted(wanted))?.driver;
        let device = Device::open(driver, 0)?;
        let pool = Pool::builder(&device).limit(Limit::Bytes(limit)).build()?;
        Ok(World {
            stream: Stream::new(&device)?,
            tenant: pool.tenant("python").register()?,
            pool,
            device,
        })
    };
    owned(open())
}

/// Returns everything to the driver. Returns `false` if something is still lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn world_close(world: *mut World) -> bool {
    let World {
        device,
        stream,
        pool,
        tenant,
    } = *unsafe { Box::from_raw(world) };
    drop((stream, tenant));
    let closed = pool.close().map_err(|error| error.to_string().into());
    said(closed.map(|()| device.drop_failures() == 0), false)
}

/// Returns the used bytes of the device as the driver reports them, or -1 on an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn world_used(world: *mut World) -> i64 {
    let ask = || -> Outcome<i64> {
        let info = unsafe { &*world }.device.memory_info()?;
        Ok(i64::try_from(info.total - info.free)?)
    };
    said(ask(), -1)
}

/// Returns the bytes of the pool that are in use or leased, without pending frees.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn world_in_use(world: *mut World) -> u64 {
    let stats = unsafe { &*world }.pool.stats();
    stats.in_use + stats.leased
}

/// Releases unused memory to the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn world_trim(world: *mut World) -> bool {
    let trimmed = unsafe { &*world }.pool.trim(0);
    said(trimmed.map(|_| true).map_err(Into::into), false)
}

/// Returns the handle of the home stream, so that other libraries can order their work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn world_stream(world: *mut World) -> u64 {
    unsafe { &*world }.stream.as_raw().0
}

/// Allocates a block (`b`), a vector of bytes (`v`) or a committed region (`r`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_new(world: *mut World, kind: u8, size: u64) -> *mut Owner {
    let world = unsafe { &*world };
    let make = || -> Outcome<Owner> {
        Ok(match kind {
            b'b' => Owner::Block(Arc::new(world.tenant.allocate_on(&world.stream, size)?)),
            b'v' => {
                let length = usize::try_from(size)?;
                let mut vector = DeviceVec::new(&world.device, &world.stream, length)?;
                vector.resize(length, 0u8)?;
                Owner::Vector(Arc::new(vector))
            }
            b'r' => {
                let mut region = Region::reserve(&world.device, size)?;
                let all = 0..region.size();
                region.commit(all)?;
                Owner::Region(Arc::new(region))
            }
            other => return Err(format!("there is no owner {other}").into()),
        })
    };
    owned(make())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_drop(owner: *mut Owner) {
    drop(unsafe { Box::from_raw(owner) });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_write(
    world: *mut World,
    owner: *mut Owner,
    offset: u64,
    bytes: *const u8,
    length: usize,
) -> bool {
    let (world, bytes) = unsafe { (&*world, std::slice::from_raw_parts(bytes, length)) };
    let written = match unsafe { &*owner } {
        Owner::Block(block) => block.write(offset, bytes).map_err(Into::into),
        Owner::Region(region) => region
            .write(&world.stream, offset, bytes)
            .map_err(Into::into),
        Owner::Vector(_) => Err("a shared vector cannot be written".into()),
    };
    said(written.map(|()| true), false)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_read(
    world: *mut World,
    owner: *mut Owner,
    offset: u64,
    bytes: *mut u8,
    length: usize,
) -> bool {
    let (world, bytes) = unsafe { (&*world, std::slice::from_raw_parts_mut(bytes, length)) };
    let read = match unsafe { &*owner } {
        Owner::Block(block) => block.read(offset, bytes).map_err(Into::into),
        Owner::Region(region) => region
            .read(&world.stream, offset, bytes)
            .map_err(Into::into),
        Owner::Vector(vector) => match usize::try_from(offset) {
            Ok(first) => vector.read(first, bytes).map_err(Into::into),
            Err(error) => Err(error.into()),
        },
    };
    said(read.map(|()| true), false)
}

/// Returns a managed tensor, versioned or not, for a capsule.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_export(owner: *mut Owner, wanted: *const Request) -> *mut c_void {
    let wanted = unsafe { &*wanted };
    let exported = match unsafe { &*owner } {
        Owner::Block(block) => export(Arc::clone(block), wanted),
        Owner::Vector(vector) => export(Arc::clone(vector), wanted),
        Owner::Region(region) => export(Arc::clone(region), wanted),
    };
    said(exported, ptr::null_mut())
}

/// Writes the device's type and number, as `__dlpack_device__` returns them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn owner_device(owner: *mut Owner, device: *mut [i32; 2]) -> bool {
    let ask = || -> Outcome<[i32; 2]> {
        let nothing = Tensor::of::<u8>(&[0]);
        let consumer = Consumer::Ordered;
        let tensor = match unsafe { &*owner } {
            Owner::Block(block) => nothing.export(Arc::clone(block), &consumer)?,
            Owner::Vector(vector) => nothing.export(Arc::clone(vector), &consumer)?,
            Owner::Region(region) => nothing.export(Arc::clone(region), &consumer)?,
        };
        let place = tensor.validate()?.device();
        Ok([i32::try_from(place.device_type.0)?, place.device_id])
    };
    let found = ask().map(|found| {
        unsafe { *device = found };
        true
    });
    said(found, false)
}

fn export<O: Memory>(owner: O, wanted: &Request) -> Outcome<*mut c_void> {
    let shape = unsafe { std::slice::from_raw_parts(wanted.shape, wanted.dimensions) };
    let element = DLDataType::scalar(DLDataTypeCode(wanted.code), wanted.bits);
    let mut tensor = Tensor::new(element, shape).offset(wanted.offset);
    if !wanted.strides.is_null() {
        let strides = unsafe { std::slice::from_raw_parts(wanted.strides, wanted.dimensions) };
        tensor = tensor.strides(strides);
    }
    if wanted.read_only {
        tensor = tensor.read_only();
    }
    let stream = wanted.has_stream.then_some(wanted.stream);
    let consumer = unsafe { Consumer::from_python(&owner, stream) }?;
    Ok(if wanted.versioned {
        tensor.export(owner, &consumer)?.into_raw().cast()
    } else {
        tensor.export_legacy(owner, &consumer)?.into_raw().cast()
    })
}

/// Deletes a tensor whose capsule was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tensor_delete(tensor: *mut c_void, versioned: bool) {
    unsafe {
        if versioned {
            DLManagedTensorVersioned::drop_raw(tensor.cast());
        } else {
            DLManagedTensor::drop_raw(tensor.cast());
        }
    }
}

/// Imports a tensor from a capsule. Deletes the tensor on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tensor_import(
    world: *mut World,
    tensor: *mut c_void,
    versioned: bool,
) -> *mut Imported {
    unsafe fn take<M: ManagedTensorBase + 'static>(
        world: &World,
        tensor: *mut c_void,
    ) -> Outcome<Imported> {
        let tensor = unsafe { Managed::<M>::from_raw(tensor.cast()) }?;
        Ok(unsafe { Imported::new(&world.stream, tensor) }?)
    }
    let world = unsafe { &*world };
    owned(if versioned {
        unsafe { take::<DLManagedTensorVersioned>(world, tensor) }
    } else {
        unsafe { take::<DLManagedTensor>(world, tensor) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn imported_read(
    imported: *mut Imported,
    offset: u64,
    bytes: *mut u8,
    length: usize,
) -> bool {
    let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, length) };
    let read = unsafe { &*imported }.read(offset, bytes);
    said(read.map(|()| true).map_err(Into::into), false)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn imported_write(
    imported: *mut Imported,
    offset: u64,
    bytes: *const u8,
    length: usize,
) -> bool {
    let bytes = unsafe { std::slice::from_raw_parts(bytes, length) };
    let written = unsafe { &mut *imported }.write(offset, bytes);
    said(written.map(|()| true).map_err(Into::into), false)
}

/// Releases an import: ordered behind our work by a stream of its producer, or after waiting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imported_close(
    world: *mut World,
    imported: *mut Imported,
    producer: i64,
) -> bool {
    let imported = *unsafe { Box::from_raw(imported) };
    let closed = if producer < 0 {
        imported.close()
    } else {
        // The legacy default stream is 0 or 1.
        let device = &unsafe { &*world }.device;
        let handle = cuvmm::driver::StreamHandle(producer.unsigned_abs());
        let stream = unsafe { Stream::from_raw(device, handle, Arc::new(())) };
        match stream {
            Ok(stream) => imported.give_back(&stream),
            // The per-thread default stream differs from thread to thread.
            Err(_) => imported.close(),
        }
    };
    said(
        closed
            .map(|()| true)
            .map_err(|error| error.to_string().into()),
        false,
    )
}
