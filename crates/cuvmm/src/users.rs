//! The streams that use a container's memory: its home, where its own copies run, and those that
//! were named besides. What the container gives up waits for all of them.
//!
//! A stream that was named is kept alive. One that nothing else holds any more, and whose work is
//! done, is let go of now and then, so that streams made for a single launch do not pile up.

use std::collections::BTreeSet;

use cuvmm_driver::StreamHandle;

use crate::error::CallError;
use crate::own::Stream;
use crate::region::Region;
use crate::sync::atomic::{AtomicBool, Ordering};

/// The number of streams that are kept before the driver is asked which of them are done.
const KEPT: usize = 16;

/// A container's streams, all of one device.
#[derive(Debug)]
pub(crate) struct Users {
    home: Stream,
    others: Vec<Stream>,
    /// The handles of the others. Handles of live streams of one device differ.
    known: BTreeSet<StreamHandle>,
    /// The number of other streams that are kept before the driver is asked again which are done.
    most: usize,
    /// Whether work on streams that nobody named uses it too.
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

    /// Notes another one. False, and nothing noted, if it is another device's.
    pub(crate) fn record(&mut self, stream: &Stream) -> bool {
        if !stream.device().is_same(self.home.device()) {
            return false;
        }
        if *stream == self.home || self.known.contains(&stream.as_raw()) {
            return true;
        }
        if self.others.len() >= self.most {
            self.forget_abandoned();
            // Asked again once as many have come as are left: a constant share of each record.
            self.most = KEPT.max(2 * self.others.len());
        }
        self.known.insert(stream.as_raw());
        self.others.push(stream.clone());
        true
    }

    /// Lets go of streams that no work can be queued on any more and whose work is done.
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
                known.remove(&stream.as_raw());
            }
            !gone
        });
    }

    /// Notes work that is on no stream which could be named.
    pub(crate) fn record_anywhere(&self) {
        self.anywhere.store(true, Ordering::Relaxed);
    }

    /// Whether some work is on streams that nobody named.
    pub(crate) fn are_anywhere(&self) -> bool {
        self.anywhere.load(Ordering::Relaxed)
    }

    /// Those that were named, the home first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.home).chain(&self.others)
    }

    /// The same, kept alive.
    pub(crate) fn all(&self) -> Vec<Stream> {
        self.iter().cloned().collect()
    }

    /// Withdraws all of a region behind their work, as their container goes. Where work may be on
    /// streams that were not named, the region waits for all work when it is dropped.
    pub(crate) fn end(&self, region: &mut Region) {
        if !self.are_anywhere() {
            region.end_after(&self.all());
        }
    }

    /// Waits for what they have queued (`cuStreamSynchronize`).
    pub(crate) fn wait(&self) -> Result<(), CallError> {
        self.home.device().relaxed(|| {
            self.home.synchronize()?;
            self.others.iter().try_for_each(Stream::synchronize)
        })?
    }
}
