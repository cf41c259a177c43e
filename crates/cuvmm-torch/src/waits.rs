//! Waits for streams. None breaks a capture of this or another library: a stream is asked first, and
//! captures of other streams go on.
//!
//! `unsafe` is used to export the functions under their C names.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use cuvmm::driver::StreamHandle;
use cuvmm::{CallError, Stream};

use crate::edge::status;
use crate::error::Error;
use crate::heaps::{self, DeviceHeap};
use crate::{fork, graphs};

/// Does something with a stream and waits for it, unless a graph may be captured or the stream
/// captures.
pub(crate) fn with_leave(
    device: c_int,
    stream: *mut c_void,
    act: impl FnOnce(&DeviceHeap, &Stream) -> Result<(), Error>,
) -> Result<(), Error> {
    fork::check()?;
    let of = heaps::of(device)?;
    let _leave = graphs::waiting().ok_or(Error::Capturing)?;
    of.with_stream(crate::handle(stream), |stream| {
        // What is done could become part of the graph.
        if stream.is_capturing()? {
            return Err(Error::Capturing);
        }
        act(of, stream)
    })
}

/// Waits for the work of a stream of a device's primary context (`cuStreamSynchronize`). Refused
/// while a graph may be captured, and on a stream that captures.
///
/// # Safety
/// `stream` is such a stream, and stays one until [`cuvmm_stream_end`](crate::cuvmm_stream_end).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_synchronize(device: c_int, stream: *mut c_void) -> c_int {
    status(|| with_leave(device, stream, |_, stream| Ok(stream.settle()?)))
}

/// Waits for the work of a stream, which may be the calling thread's own default stream, unless it
/// captures. Does not ask for captures of other streams, which go on.
///
/// Returns 0 if the work is complete, 1 if the stream captures, and a negative number after another
/// failure.
///
/// # Safety
/// The requirements of [`cuvmm_synchronize`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_settle(device: c_int, stream: *mut c_void) -> c_int {
    let mut captures = false;
    let status = status(|| {
        fork::check()?;
        let of = heaps::of(device)?;
        let handle = crate::handle(stream);
        let settled = match StreamHandle(handle) {
            StreamHandle::PER_THREAD => Stream::settle_per_thread(&of.device),
            _ => of.with_stream(handle, |stream| Ok::<_, Error>(stream.settle()))?,
        };
        captures = settled == Err(CallError::Capturing);
        match captures {
            true => Ok(()),
            false => Ok(settled?),
        }
    });
    match captures {
        true => 1,
        false => status,
    }
}
