//! The streams that use a container's memory: its home, where its own copies run, and those that
//! were named besides. What the container gives up waits for all of them.

use crate::error::CallError;
use crate::own::Stream;
use crate::sync::atomic::{AtomicBool, Ordering};

/// A container's streams, all of one device.
#[derive(Debug)]
pub(crate) struct Users {
    home: Stream,
    others: Vec<Stream>,
    /// Whether work on streams that nobody named uses it too.
    anywhere: AtomicBool,
}

impl Users {
    pub(crate) fn at(home: &Stream) -> Self {
        Self {
            home: home.clone(),
            others: Vec::new(),
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
        if *stream != self.home && !self.others.contains(stream) {
            self.others.push(stream.clone());
        }
        true
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

    /// Waits for what they have queued (`cuStreamSynchronize`).
    pub(crate) fn wait(&self) -> Result<(), CallError> {
        self.home.device().relaxed(|| {
            self.home.synchronize()?;
            self.others.iter().try_for_each(Stream::synchronize)
        })?
    }
}
