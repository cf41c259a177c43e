//! The consumer of an exported tensor, and the order of its work after the work queued on the
//! memory.
//!
//! `unsafe` in this file: a stream that another library names by its handle.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm_driver::StreamHandle;

use super::memory::Held;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, TensorError};
use crate::extents::Fence;
use crate::own::Stream;

/// The first user of an exported tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Consumer {
    /// Any user, including the host's processors: exporting waits until the work queued on the
    /// memory's streams is complete (`cuStreamSynchronize`; without streams `cuCtxSynchronize` for
    /// each device that has access). Refused while one of the streams captures.
    #[doc(alias = "Anybody")]
    Synchronized,
    /// Work on this stream, which events order after the work queued on the memory's streams,
    /// without waiting. For host memory, exporting waits. If the memory has no streams, all work of
    /// each device that has access is marked (`cuCtxRecordEvent`). That breaks every capture on its
    /// context, as waiting would, and is refused while a [capture guard](crate::pool::CaptureGuard)
    /// for the device lives.
    Stream(Stream),
    /// Work on the per-thread default stream of the exporting thread, ordered like work on any
    /// other stream.
    PerThread,
    /// A user that knows that no work is queued, or orders itself. The tensor's deleter does not
    /// wait either: it frees the memory behind the work of the memory's own streams. If the user's
    /// work on another stream is still queued then, it overwrites the next owner's bytes.
    Ordered,
}

impl Consumer {
    /// Converts the argument of Python's `__dlpack__(stream=...)` for memory of a GPU: `None` and 1
    /// are the legacy default stream of the memory's device, 2 is the per-thread one, -1 is
    /// [`Ordered`](Self::Ordered), any other number a stream handle. For host memory the argument
    /// is `None`, and [exporting](Consumer) waits.
    ///
    /// # Errors
    /// [`ArgumentError`] for 0, which could mean either default stream, and for numbers below -1.
    ///
    /// # Safety
    /// Any other number must be a live stream of the device's primary context, and stay one until
    /// the tensor has been exported for it.
    pub unsafe fn from_python(
        memory: &impl super::Memory,
        stream: Option<i64>,
    ) -> Result<Self, ArgumentError> {
        let device = memory.device();
        let number = match stream {
            None | Some(1) => return Ok(Self::Stream(Stream::legacy(device))),
            Some(2) => return Ok(Self::PerThread),
            Some(-1) => return Ok(Self::Ordered),
            Some(number) => number,
        };
        let handle = u64::try_from(number).ok().filter(|&handle| handle > 0);
        let no_stream = ArgumentError::NoSuch {
            what: "stream",
            number,
        };
        let handle = handle.ok_or(no_stream)?;
        // SAFETY: the caller guarantees that it is a live stream, used only during the export.
        let stream = unsafe { Stream::from_raw(device, StreamHandle(handle), Arc::new(())) };
        stream.map(Self::Stream).map_err(|_| no_stream)
    }

    /// Orders the consumer after the work queued on the memory.
    pub(super) fn order_behind(
        &self,
        memory: &impl Held,
        on_host: bool,
    ) -> Result<(), TensorError> {
        let own;
        let stream = match self {
            Self::Ordered => return Ok(()),
            Self::Stream(stream) if !on_host => Some(stream),
            Self::PerThread if !on_host => {
                own = Stream::per_thread(memory.device());
                Some(&own)
            }
            Self::Stream(_) | Self::PerThread | Self::Synchronized => None,
        };
        let streams = memory.streams();
        match stream {
            None => wait(memory, streams),
            Some(stream) if !stream.device().same_driver(memory.device()) => {
                Err(CallError::WrongDriver.into())
            }
            Some(stream) => {
                let mut fence = match streams {
                    Some(streams) => Fence::streams(streams),
                    None => Fence::devices(memory.users()),
                };
                let ordered = fence.order_before(stream)?;
                ordered.then_some(()).ok_or(TensorError::NoOrder)
            }
        }
    }
}

fn wait(memory: &impl Held, streams: Option<Vec<Stream>>) -> Result<(), TensorError> {
    let waited = match streams {
        Some(streams) => streams.iter().try_for_each(Stream::settle),
        None => Device::settle_all(&memory.users()),
    };
    waited.map_err(|error| match error {
        CallError::Capturing => TensorError::NoOrder,
        error => error.into(),
    })
}
