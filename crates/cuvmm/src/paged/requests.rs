//! The requests for blocks of a cache that wait in the pool's queue.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The requests of a cache that were neither taken nor withdrawn, by their numbers.
#[derive(Default)]
pub(super) struct Requests {
    open: BTreeMap<u64, Requested>,
    made: u64,
}

#[derive(Clone)]
pub(super) struct Requested {
    pub(super) numbers: Arc<[u32]>,
    /// `true` if the request has uses of the blocks' extents.
    pub(super) has_memory: bool,
}

impl Requests {
    /// Returns `true` if a request has memory that it has not taken.
    pub(super) fn have_memory(&self) -> bool {
        self.open.values().any(|it| it.has_memory)
    }

    /// Returns the blocks of requests that have memory, with each use that they have.
    pub(super) fn granted(&self) -> impl Iterator<Item = u32> + Clone {
        let granted = self.open.values().filter(|it| it.has_memory);
        granted.flat_map(|it| it.numbers.iter().copied())
    }

    /// Adds a request for blocks. Returns its number.
    pub(super) fn add(&mut self, numbers: Arc<[u32]>) -> u64 {
        self.made += 1;
        let has_memory = false;
        let requested = Requested {
            numbers,
            has_memory,
        };
        self.open.insert(self.made, requested);
        self.made
    }

    pub(super) fn get(&self, request: u64) -> Option<Requested> {
        self.open.get(&request).cloned()
    }

    pub(super) fn has_got_memory(&mut self, request: u64) {
        if let Some(requested) = self.open.get_mut(&request) {
            requested.has_memory = true;
        }
    }

    pub(super) fn remove(&mut self, request: u64) -> Option<Requested> {
        self.open.remove(&request)
    }
}
