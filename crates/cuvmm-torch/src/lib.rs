//! PyTorch's memory from a heap of cuvmm.
//!
//! The library `libcuvmm_torch.so` has the C functions that
//! `torch.cuda.memory.CUDAPluggableAllocator` takes. It is not linked with PyTorch and needs none to
//! build. The package's README says how it is used and which environment variables set it up.
//!
//! There is one [heap](cuvmm::Heap) for each device, in the device's primary context, which is
//! PyTorch's too. It is made by the first allocation on the device and is never dropped.
//!
//! Modules, from the bottom up: `edge` catches panics and prints messages, `fork` detects forked
//! children, `error` has what can go wrong, `settings` reads the environment, `heaps` makes heaps and
//! knows their streams, `live` finds allocations by address, `stats` writes figures.
//!
//! `unsafe` is allowed here to export functions under their C names, and to write into the buffer
//! that C passes to one of them.
#![allow(unsafe_code)]

mod edge;
mod error;
mod fork;
mod heaps;
mod live;
mod settings;
mod stats;

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use bytesize::ByteSize;

use self::edge::{guard, message};
use self::error::Error;

/// Allocates `size` bytes on a device for work on a stream (`alloc_fn`).
///
/// The address is a multiple of 512. Returns null for a size of 0. Returns null and prints one line
/// on standard error if the allocation fails, in a forked child of a process that has used this
/// library, and for the per-thread default stream.
///
/// # Safety
/// `stream` is a stream of the device's primary context, and stays one as long as this library
/// knows memory that was used on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        match live::allocate(size, device, handle(stream)) {
            Ok(address) => ptr::with_exposed_provenance_mut(address),
            Err(error) => {
                heaps::note_failure(device);
                let size = match u64::try_from(size) {
                    Ok(bytes) => ByteSize::b(bytes).display().iec().to_string(),
                    Err(_) => format!("{size} bytes"),
                };
                message(&format!(
                    "allocation of {size} on device {device} failed: {error}"
                ));
                ptr::null_mut()
            }
        }
    })
}

/// Frees an allocation in the order of the stream that it was made for, and of the streams that use
/// it (`free_fn`). `stream` counts as one of them.
///
/// Finds the allocation by its address; the size and the device are not read. Prints one line on
/// standard error for an address that is not allocated. Does nothing for null and in a forked child.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`]. Nothing uses the memory any more, except work that is
/// queued on the streams that this library knows for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    stream: *mut c_void,
) {
    guard((), || {
        let address = address.addr();
        match live::free(address, handle(stream)) {
            Ok(()) => {}
            Err(error @ Error::NotAllocated) => message(&format!("free of {address:#x}: {error}")),
            Err(error) => message(&format!(
                "free of {address:#x}: {error}; the memory is not reused"
            )),
        }
    });
}

/// Records that work of another stream uses an allocation (`set_record_stream_fn`).
///
/// Does nothing for null, in a forked child, and for memory that is not this library's, which
/// PyTorch passes too. Prints one line on standard error if the use cannot be recorded; the memory
/// is then never reused.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_record_stream(address: *mut c_void, stream: *mut c_void) {
    guard((), || {
        if let Err(error) = live::record(address.addr(), handle(stream)) {
            let address = address.addr();
            message(&format!(
                "use of {address:#x} by another stream: {error}; the memory is not reused"
            ));
        }
    });
}

/// Gives the free memory of all heaps back to the driver, where its work is complete
/// (`set_reset_fn`; PyTorch's `empty_cache`). Never waits for the GPU.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_reset() {
    guard((), || {
        for (device, error) in heaps::trim() {
            message(&format!("trim of device {device}: {error}"));
        }
    });
}

/// Writes a device's figures as one JSON object, terminated by a zero byte, if they fit in `length`
/// bytes. Returns the bytes needed, the zero byte included; 0 if the device has no heap yet, and in
/// a forked child. Makes no driver call.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_stats(device: c_int, buffer: *mut c_char, length: usize) -> usize {
    guard(0, || {
        let Some(mut text) = stats::json(device) else {
            return 0;
        };
        text.push(0);
        if !buffer.is_null() && text.len() <= length {
            // SAFETY: the caller passes at least this number of writable bytes, or null.
            unsafe { ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len()) };
        }
        text.len()
    })
}

/// Returns a stream's handle as a number.
fn handle(stream: *mut c_void) -> u64 {
    stream.addr() as u64
}
