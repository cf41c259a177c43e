//! The saved contents of one block, in parts that return to the store.

use std::fmt;
use std::sync::{Arc, PoisonError};

use super::{HostStore, Shared};
use crate::own::{HostPart, Stream};
use crate::sync::Mutex;

pub(crate) struct Saved {
    parts: Vec<HostPart>,
    bytes: u64,
    store: Arc<Shared>,
    unfinished: Unfinished,
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
    pub(super) fn new(parts: Vec<HostPart>, bytes: u64, store: Arc<Shared>) -> Self {
        Self {
            parts,
            bytes,
            store,
            unfinished: Unfinished::default(),
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn store(&self) -> HostStore {
        HostStore {
            shared: Arc::clone(&self.store),
        }
    }

    /// Copies bytes at an offset of the block. Returns `false` if some of them are not saved.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        let Some(mut skipped) = self.position(offset, bytes.len() as u64) else {
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

    /// Returns where bytes at an offset of the block begin in the parts, if all of them are saved.
    fn position(&self, offset: u64, bytes: u64) -> Option<usize> {
        let end = offset.checked_add(bytes);
        end.filter(|&end| end <= self.bytes)?;
        usize::try_from(offset).ok()
    }

    /// Returns the streams of copies that may still be running.
    pub(crate) fn unfinished(&mut self) -> &[Stream] {
        self.unfinished.streams()
    }

    /// Returns the parts in order, each with the offset at which it begins, and the list for copies
    /// that may still be running.
    pub(super) fn split(&mut self) -> (impl Iterator<Item = (u64, &mut HostPart)>, &Unfinished) {
        let mut next = 0;
        let parts = self.parts.iter_mut().map(move |part| {
            let offset = next;
            next += part.size() as u64;
            (offset, part)
        });
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
        f.debug_tuple("Saved").field(&self.bytes).finish()
    }
}
