//! Who a tensor is exported for, and how its work comes behind what is queued on the memory.
//!
//! `unsafe` here: a stream that another library names by its handle.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm_driver::StreamHandle;

use super::memory::Held;
use crate::error::{ArgumentError, CallError, TensorError};
use crate::own::Stream;
use crate::region::Fence;

/// Who is to use an exported tensor first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Consumer {
    /// Anybody, the host's processors included: exporting waits until what the memory's streams
    /// have queued is done (`cuStreamSynchronize`, or `cuCtxSynchronize` where it has none).
    Anybody,
    /// Work on this stream: it is ordered behind what the memory's streams have queued, by events,
    /// and nobody waits. Host memory is waited for all the same.
    Stream(Stream),
    /// Work on the per-thread default stream of the thread that exports, ordered as on any other.
    PerThread,
    /// Somebody who knows that nothing is queued, or sees to the order.
    Ordered,
}

impl Consumer {
    /// What Python's `__dlpack__(stream=...)` means for memory of a GPU: `None` and 1 are the legacy
    /// default stream of the memory's device, 2 the per-thread one, -1 no order at all, and anything
    /// else the handle of a stream. Host memory is asked for with `None`, and [exporting](Consumer)
    /// waits.
    ///
    /// # Errors
    /// [`ArgumentError`] for 0, which could be either default stream, and for numbers below -1.
    ///
    /// # Safety
    /// Another number is a live stream of the device's primary context, and stays one until the
    /// tensor has been exported for it.
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
        // SAFETY: the caller says that it is a stream, and it is used only while exporting.
        let stream = unsafe { Stream::from_raw(device, StreamHandle(handle), Arc::new(())) };
        stream.map(Self::Stream).map_err(|_| no_stream)
    }

    /// Has the consumer come behind what is queued on the memory.
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
            Self::Stream(_) | Self::PerThread | Self::Anybody => None,
        };
        let streams = memory.streams();
        // All work of a device is marked, or waited for, by what breaks a capture.
        if streams.is_none() && memory.is_capturing() {
            return Err(TensorError::NoOrder);
        }
        match stream {
            None => wait(memory, streams),
            Some(stream) if !stream.device().same_driver(memory.device()) => {
                Err(CallError::WrongDriver.into())
            }
            Some(stream) => {
                let mut fence = match streams {
                    Some(streams) => Fence::streams(streams),
                    None => Fence::device(memory.device().clone()),
                };
                let ordered = fence.order_before(stream)?;
                ordered.then_some(()).ok_or(TensorError::NoOrder)
            }
        }
    }
}

/// Waits until what is queued on the memory is done.
fn wait(memory: &impl Held, streams: Option<Vec<Stream>>) -> Result<(), TensorError> {
    let Some(streams) = streams else {
        return Ok(memory.device().settle()?);
    };
    memory.device().relaxed(|| {
        for stream in &streams {
            if stream.is_capturing()? {
                return Err(TensorError::NoOrder);
            }
            stream.synchronize()?;
        }
        Ok(())
    })?
}
