//! Copies between device and host memory, for programs without another library that copies.
//!
//! `unsafe` is used to export the functions under their C names, and for the driver's copies.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use cuvmm::CallError;
use cuvmm::driver::{DeviceAddress, Driver, DriverError, Ordinal, StreamHandle};

use crate::edge::status;
use crate::waits::with_leave;
use crate::{fork, heaps};

/// Copies `size` bytes of host memory to a device, behind the work of a stream, and waits for the
/// copy (`cuMemcpyHtoDAsync`, `cuStreamSynchronize`). Refused while a graph may be captured, and on
/// a stream that captures.
///
/// # Safety
/// Both ranges have `size` bytes, and nothing else uses them until the call returns, except work of the
/// stream. `stream` is a stream of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_write(
    device: c_int,
    to: u64,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copied(device, size, stream, |driver, ordinal, stream| {
        let (from, size) = (from.cast(), size as u64);
        // SAFETY: the caller says so, and the copy is waited for.
        unsafe { driver.copy_to_device_async(ordinal, DeviceAddress(to), from, size, stream) }
    })
}

/// Copies `size` bytes of a device to host memory, like [`cuvmm_write`] in the other direction.
///
/// # Safety
/// The requirements of [`cuvmm_write`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_read(
    device: c_int,
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: *mut c_void,
) -> c_int {
    copied(device, size, stream, |driver, ordinal, stream| {
        let (to, size) = (to.cast(), size as u64);
        // SAFETY: the caller says so, and the copy is waited for.
        unsafe { driver.copy_to_host_async(ordinal, to, DeviceAddress(from), size, stream) }
    })
}

/// Queues a copy on a stream and waits for it. Does nothing for a size of 0.
fn copied(
    device: c_int,
    size: usize,
    stream: *mut c_void,
    queue: impl FnOnce(&dyn Driver, Ordinal, StreamHandle) -> Result<(), DriverError>,
) -> c_int {
    status(|| {
        if size == 0 {
            fork::check()?;
            return heaps::of(device).map(drop);
        }
        with_leave(device, stream, |of, stream| {
            let (driver, handle) = (of.device.driver(), stream.as_raw());
            queue(&**driver, of.device.ordinal(), handle).map_err(CallError::Driver)?;
            // A capture that began meanwhile may contain the copy, which uses memory of the host: it has
            // to break.
            stream.settle().inspect_err(|error| {
                if *error == CallError::Capturing {
                    let _ = stream.synchronize();
                }
            })?;
            Ok(())
        })
    })
}
