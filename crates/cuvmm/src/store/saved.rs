//! The saved contents of one block, or of ranges of it, in parts that return to the store. The
//! bytes of the ranges lie in the parts one behind the other.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use super::{HostStore, PART, Ranges, Shared};
use crate::own::{HostPart, Stream};
use crate::sync::Mutex;

pub(crate) struct Saved {
    parts: Vec<HostPart>,
    /// The ranges of the block whose bytes are saved.
    ranges: Ranges,
    store: Arc<Shared>,
    unfinished: Unfinished,
}

/// Host memory for the bytes of some ranges of a block, one behind the other.
pub(super) struct Part<'a> {
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) host: &'a mut HostPart,
}

/// The streams of copies to or from the parts of a [`Saved`] that the driver failed to wait for.
#[derive(Debug, Default)]
pub(super) struct Unfinished(Mutex<Vec<Stream>>);

impl Unfinished {
    /// Records that a copy on the stream may still be running.
    pub(super) fn add(&self, stream: &Stream) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push(stream.clone());
    }

    fn streams(&mut self) -> &mut Vec<Stream> {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Saved {
    pub(super) fn new(parts: Vec<HostPart>, ranges: Ranges, store: Arc<Shared>) -> Self {
        Self {
            parts,
            ranges,
            store,
            unfinished: Unfinished::default(),
        }
    }

    /// Returns contents of no bytes, for a block without contents.
    pub(crate) fn nothing(store: &HostStore) -> Self {
        Self::new(Vec::new(), Ranges::default(), Arc::clone(&store.shared))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.bytes()
    }

    /// Returns `true` if the first `bytes` bytes of the block are all saved.
    pub(crate) fn has_all(&self, bytes: u64) -> bool {
        self.ranges.before(bytes).bytes() == bytes
    }

    pub(crate) fn store(&self) -> HostStore {
        HostStore {
            shared: Arc::clone(&self.store),
        }
    }

    /// Copies bytes at an offset of the block. Returns `false` if some of them are not saved.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        let position = self.ranges.position(offset, bytes.len() as u64);
        let Some(Ok(mut skipped)) = position.map(usize::try_from) else {
            return false;
        };
        let mut left = bytes;
        for part in &self.parts {
            let found = part.bytes().get(skipped..).unwrap_or_default();
            skipped = skipped.saturating_sub(part.size());
            let (to, rest) = left.split_at_mut(found.len().min(left.len()));
            to.copy_from_slice(found.get(..to.len()).unwrap_or_default());
            left = rest;
        }
        left.is_empty()
    }

    /// Returns the streams of copies that may still be running.
    pub(crate) fn unfinished(&mut self) -> &[Stream] {
        self.unfinished.streams()
    }

    /// Notes that the copies that may still have been running have ended.
    pub(crate) fn copies_ended(&mut self) {
        self.unfinished.streams().clear();
    }

    /// Returns the parts in order, each with the ranges of the block whose bytes it has, and the
    /// list for copies that may still be running.
    pub(super) fn split(&mut self) -> (impl Iterator<Item = Part<'_>>, &Unfinished) {
        let groups = self.ranges.groups(PART as u64);
        let parts = groups.zip(&mut self.parts);
        let parts = parts.map(|(ranges, host)| Part { ranges, host });
        (parts, &self.unfinished)
    }
}

impl Drop for Saved {
    /// Returns the parts to the store, which uses them again when no copy runs on them.
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        let streams = std::mem::take(self.unfinished.streams());
        match streams.is_empty() {
            true => self.store.take_back(parts),
            false => self.store.set_aside(streams, parts),
        }
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Saved").field(&self.bytes()).finish()
    }
}
