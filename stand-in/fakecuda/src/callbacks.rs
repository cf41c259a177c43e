//! Functions of the program that run in the order of a stream.
//!
//! Each device has a thread that runs them one after the other, made by the first call that queues
//! one. No lock is held meanwhile, so a function may wait for a thread that calls the driver. The
//! call that queues it returns at once, the stream is busy until it has returned, and what waits for
//! the stream waits for it. A function may not call the driver: what it calls answers
//! `NOT_PERMITTED`. Functions of independent streams may be serialized, says the documentation, and
//! here they are.
//!
//! The thread lives until the process ends, so this library stays loaded. A forked child has none,
//! and none of its calls comes as far. A function that does not return keeps no process from ending.
//!
//! `unsafe` is allowed here to export functions (see `state`), and to call what the program passes.
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

/// A callback of a stream.
type Callback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;

/// The stack of a thread that runs functions of the program, which the system gives it page by page.
const STACK: usize = 8 << 20;

/// Queues a function of the program.
fn queue(stream: StreamHandle, call: impl Fn() + Send + Sync + 'static) -> Outcome {
    let device = device_of(stream)?;
    serve(device)?;
    driver()?.queue_host_call(device, stream, move || gate::inside(&call))
}

/// Starts the thread that runs the functions of a device, if there is none.
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
        let (device, driver) = (device_of(handle)?, driver()?);
        let callback = callback.ok_or(INVALID)?;
        if flags != 0 {
            return Err(INVALID);
        }
        // SAFETY: the stream exists.
        let status = unsafe { driver.capture_status(device, handle) }.map_err(code)?;
        if status == CaptureStatus::ACTIVE {
            // A callback cannot be captured, and ends the capture as waiting for its stream does.
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
