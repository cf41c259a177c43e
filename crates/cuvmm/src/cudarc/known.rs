//! The streams that the owner of some memory knows, and what becomes of a use on another.

use std::sync::Arc;

use ::cudarc::driver::{CudaStream, SyncOnDrop};

use crate::error::CudarcError;
use crate::own::Stream;

/// The home stream, as cudarc has it, and all that the owner knows.
pub(super) struct Known {
    home: Arc<CudaStream>,
    /// The home first.
    streams: Vec<Stream>,
}

impl Known {
    /// Of these streams the first is the home, and must be one of cudarc's.
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

    /// Another stream of the device that its owner knows from now on.
    pub(super) fn add(&mut self, stream: &Stream) {
        if !self.streams.contains(stream) {
            self.streams.push(stream.clone());
        }
    }

    /// Lets a use in whose stream the owner does not know, behind all that the home stream has queued.
    pub(super) fn let_in(&self, stream: &CudaStream) {
        if !self.has(stream) {
            let context = stream.context();
            context.record_err(stream.join(&self.home));
        }
    }

    /// What is to be done when a use has been queued on a stream: what cudarc would do if its owner
    /// knows the stream, else wait for it.
    pub(super) fn see_out<'a>(
        &self,
        stream: &'a CudaStream,
        by_cudarc: SyncOnDrop<'a>,
    ) -> SyncOnDrop<'a> {
        if self.has(stream) {
            return by_cudarc;
        }
        // Marking the stream now would put an event that says nothing in the place of one that another
        // stream was marked by.
        std::mem::forget(by_cudarc);
        SyncOnDrop::sync_stream(stream)
    }

    fn has(&self, stream: &CudaStream) -> bool {
        let same = |known: &Stream| known.as_raw().0 == handle(stream);
        // The default stream has one handle in all contexts.
        stream.context() == self.home.context() && self.streams.iter().any(same)
    }
}

fn handle(stream: &CudaStream) -> u64 {
    stream.cu_stream().addr() as u64
}
