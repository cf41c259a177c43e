//! Functions of the program that run in the order of a stream.
//!
//! They run on the thread whose call makes the stream reach them, inside the driver, and may not
//! call the driver: what they call answers `NOT_PERMITTED`.
//!
//! `unsafe` is allowed here to export functions (see `state`), and to call what the program passes.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::StreamHandle;
use cuvmm_sys::{CUhostFn, CUresult, CUstream};

use crate::edge::{Outcome, export, export_also};
use crate::gate;
use crate::state::driver;
use crate::streams::{device_of, stream_handle};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// A callback of a stream.
type Callback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;

/// Queues a function of the program.
fn queue(stream: StreamHandle, call: impl Fn() + Send + Sync + 'static) -> Outcome {
    let device = device_of(stream)?;
    driver()?.queue_host_call(device, stream, move || gate::inside(&call))
}

export! {
    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) {
        let stream = stream_handle(stream);
        device_of(stream)?;
        let function = function.ok_or(INVALID)?;
        let data = data.expose_provenance();
        // SAFETY: the program promises that the function may be called with its data.
        queue(stream, move || unsafe {
            function(std::ptr::with_exposed_provenance_mut(data));
        })
    }
}

export_also! {
    fn cuStreamAddCallback(
        stream: CUstream,
        callback: Callback,
        data: *mut c_void,
        flags: u32,
    ) {
        let handle = stream_handle(stream);
        device_of(handle)?;
        let callback = callback.ok_or(INVALID)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let (data, stream) = (data.expose_provenance(), stream.addr());
        queue(handle, move || {
            let data = std::ptr::with_exposed_provenance_mut(data);
            let stream = std::ptr::without_provenance_mut(stream);
            // SAFETY: the program promises that the function may be called with its data.
            unsafe { callback(stream, CUresult::CUDA_SUCCESS, data) }
        })
    }
}
