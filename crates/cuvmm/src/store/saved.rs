//! What is kept of one block: its bytes in parts, which go back to the store.

use std::fmt;
use std::sync::Arc;

use super::{HostStore, Shared};
use crate::own::HostPart;

/// Bytes kept in a store.
pub(crate) struct Saved {
    parts: Vec<HostPart>,
    bytes: u64,
    store: Arc<Shared>,
}

impl Saved {
    pub(super) const fn new(parts: Vec<HostPart>, bytes: u64, store: Arc<Shared>) -> Self {
        Self {
            parts,
            bytes,
            store,
        }
    }

    /// How many bytes are kept.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The store that they are kept in.
    pub(crate) fn store(&self) -> HostStore {
        HostStore {
            shared: Arc::clone(&self.store),
        }
    }

    /// The parts in order: where each begins, and its bytes, of the last only those that are kept.
    pub(crate) fn parts_mut(&mut self) -> impl Iterator<Item = (u64, &mut HostPart)> {
        let mut next = 0;
        self.parts.iter_mut().map(move |part| {
            let offset = next;
            next += part.size() as u64;
            (offset, part)
        })
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        self.store.take_back(std::mem::take(&mut self.parts));
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Saved").field(&self.bytes).finish()
    }
}
