//! The streams that the owner of some memory knows, and the treatment of uses on other streams.

use std::sync::Arc;

use ::cudarc::driver::{CudaStream, SyncOnDrop};

use crate::error::CudarcError;
use crate::own::Stream;

/// The home stream as cudarc's object, and all streams that the owner knows.
pub(super) struct Known {
    home: Arc<CudaStream>,
    /// The home stream is first.
    streams: Vec<Stream>,
}

impl Known {
    /// Creates the set. The first stream is the home stream, and must be one of cudarc's.
    pub(super) fn new(streams: Vec<Stream>) -> Result<Self, CudarcError> {
        let home = streams.first().ok_or(CudarcError::NotOfCudarc)?;
        let theirs = home
            .keep_alive::<CudaStream>()
            .filter(|theirs| handle(theirs) == home.as_raw().0)
            .ok_or(CudarcError::NotOfCudarc)?;
        Ok(Self {
            home: theirs,
            streams,
        })
    }

    pub(super) const fn home(&self) -> &Arc<CudaStream> {
        &self.home
    }

    /// Adds another stream of the device that the owner now knows.
    pub(super) fn add(&mut self, stream: &Stream) {
        if !self.streams.contains(stream) {
            self.streams.push(stream.clone());
        }
    }

    /// Orders a use on an unknown stream after the work queued on the home stream.
    pub(super) fn grant_to(&self, stream: &CudaStream) {
        if !self.has(stream) {
            let context = stream.context();
            context.record_err(stream.join(&self.home));
        }
    }

    /// Returns what happens after a use was queued on a stream: cudarc's own action if the owner
    /// knows the stream, otherwise a wait for it.
    pub(super) fn finish_use<'a>(
        &self,
        stream: &'a CudaStream,
        by_cudarc: SyncOnDrop<'a>,
    ) -> SyncOnDrop<'a> {
        if self.has(stream) {
            return by_cudarc;
        }
        // cudarc's action would record an event on this stream, whose work will have been waited
        // for anyway, and so overwrite an event that another stream recorded.
        std::mem::forget(by_cudarc);
        SyncOnDrop::sync_stream(stream)
    }

    fn has(&self, stream: &CudaStream) -> bool {
        let same = |known: &Stream| known.as_raw().0 == handle(stream);
        // The default stream has the same handle in all contexts.
        stream.context() == self.home.context() && self.streams.iter().any(same)
    }
}

fn handle(stream: &CudaStream) -> u64 {
    stream.cu_stream().addr() as u64
}
