//! Functions of the program that run in the order of a stream.
//!
//! Each device has a thread that runs its functions one after the other, made by the first call
//! that queues one. No lock is held meanwhile, so a function may wait for a thread that calls the
//! driver. The queueing call returns at once; the stream, and waits for it, are busy until the
//! function returns. A function may not call the driver: its calls answer `NOT_PERMITTED`. The
//! documentation allows functions of independent streams to be serialized, as they are here.
//!
//! The thread lives until the process ends, so this library stays loaded. A forked child has no
//! thread, and its calls are refused before they need one. A function that does not return does not
//! keep the process from ending.
//!
//! `unsafe` exports functions (see `state`), and calls what the program passes.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::thread;

use cuvmm_driver::{CaptureStatus, Ordinal, StreamHandle};
use cuvmm_sys::{CUhostFn, CUresult, CUstream};

use crate::edge::{Outcome, code, export, export_also};
use crate::gate;
use crate::state::driver;
use crate::streams::{device_of, stream_handle};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

type Callback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;

/// The stack size of a thread that runs functions. The system provides it page by page.
const STACK: usize = 8 << 20;

fn queue(stream: StreamHandle, call: impl Fn() + Send + Sync + 'static) -> Outcome {
    let device = device_of(stream)?;
    serve(device)?;
    driver()?.queue_host_call(device, stream, move || gate::inside(&call))
}

/// Starts a device's thread, if there is none.
fn serve(device: Ordinal) -> Outcome {
    static SERVED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
    let driver = driver()?;
    let mut served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    if served.contains(&device.0) {
        return Ok(());
    }
    thread::Builder::new()
        .name("fakecuda".to_owned())
        .stack_size(STACK)
        .spawn(move || {
            loop {
                driver.next_host_work(device).run();
            }
        })
        .map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    served.insert(device.0);
    Ok(())
}

export! {
    fn cuLaunchHostFunc + ptsz(stream: CUstream, function: CUhostFn, data: *mut c_void) {
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
    fn cuStreamAddCallback + ptsz(
        stream: CUstream,
        callback: Callback,
        data: *mut c_void,
        flags: u32,
    ) {
        let handle = stream_handle(stream);
        let (device, driver) = (device_of(handle)?, driver()?);
        let callback = callback.ok_or(INVALID)?;
        if flags != 0 {
            return Err(INVALID);
        }
        // SAFETY: the stream exists.
        let status = unsafe { driver.capture_status(device, handle) }.map_err(code)?;
        if status == CaptureStatus::ACTIVE {
            // A callback cannot be captured; it ends the capture as a wait for its stream does.
            // SAFETY: the stream exists.
            unsafe { driver.stream_synchronize(device, handle) }.map_err(code)?;
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
