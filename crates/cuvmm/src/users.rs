//! The streams that use a container's memory: its home stream, on which its own copies run, and the
//! recorded streams. Memory that the container gives up waits for all of them.
//!
//! A recorded stream is kept alive. One that has no other owner and whose work is complete is
//! dropped from time to time, so that streams made for a single launch do not accumulate.

use std::collections::BTreeSet;

use cuvmm_driver::{Ordinal, StreamHandle};

use crate::error::CallError;
use crate::own::Stream;
use crate::sync::atomic::{AtomicBool, Ordering};

/// The number of streams that are kept before the driver is queried for completed ones.
const KEPT: usize = 16;

/// A container's streams, of the devices that have access to its memory.
#[derive(Debug)]
pub(crate) struct Users {
    home: Stream,
    others: Vec<Stream>,
    /// The identities of `others`.
    known: BTreeSet<(Ordinal, StreamHandle, u64)>,
    /// The number of other streams that are kept before the driver is queried for completed ones
    /// again.
    most: usize,
    /// Set if work on streams that were not recorded uses the memory too.
    anywhere: AtomicBool,
}

impl Users {
    pub(crate) fn at(home: &Stream) -> Self {
        Self {
            home: home.clone(),
            others: Vec::new(),
            known: BTreeSet::new(),
            most: KEPT,
            anywhere: AtomicBool::new(false),
        }
    }

    pub(crate) const fn home(&self) -> &Stream {
        &self.home
    }

    /// Records a stream of a device that has access.
    pub(crate) fn record(&mut self, stream: &Stream) {
        if *stream == self.home || self.known.contains(&stream.identity()) {
            return;
        }
        if self.others.len() >= self.most {
            self.forget_abandoned();
            // Queried again once the number of streams has doubled: a constant cost for each
            // record.
            self.most = KEPT.max(2 * self.others.len());
        }
        self.known.insert(stream.identity());
        self.others.push(stream.clone());
    }

    /// Drops streams on which no more work can be queued and whose work is complete.
    fn forget_abandoned(&mut self) {
        let done = |stream: &Stream| -> Result<bool, CallError> {
            // A query would break a capture.
            Ok(!stream.is_capturing()? && stream.is_done()?)
        };
        let known = &mut self.known;
        self.others.retain(|stream| {
            let gone = stream.is_abandoned()
                && matches!(stream.device().relaxed(|| done(stream)), Ok(Ok(true)));
            if gone {
                known.remove(&stream.identity());
            }
            !gone
        });
    }

    pub(crate) fn record_anywhere(&self) {
        self.anywhere.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if some work is on streams that were not recorded.
    pub(crate) fn are_anywhere(&self) -> bool {
        self.anywhere.load(Ordering::Relaxed)
    }

    /// The recorded streams, the home stream first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.home).chain(&self.others)
    }

    pub(crate) fn all(&self) -> Vec<Stream> {
        self.iter().cloned().collect()
    }

    /// Waits for the work queued on the recorded streams (`cuStreamSynchronize`).
    #[cfg(feature = "dlpack")]
    pub(crate) fn wait(&self) -> Result<(), CallError> {
        self.iter().try_for_each(Stream::settle)
    }
}
