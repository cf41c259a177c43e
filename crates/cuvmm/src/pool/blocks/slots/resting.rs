//! Resting addresses of freed blocks: reserved with nothing mapped, so that the next reservation
//! does not get them.
//!
//! The addresses belong to no tenant and count against the pool's address limit. When that limit is
//! short they are freed, the oldest first: resting is a precaution, and no allocation fails because
//! of it. Nothing is unmapped here.
//!
//! Keeps I-8.

use std::collections::VecDeque;

use crate::extents::Space;

#[derive(Debug)]
pub(in crate::pool) struct Resting {
    spaces: VecDeque<Space>,
    bytes: u64,
    most_spaces: u64,
    most_bytes: u64,
}

impl Resting {
    pub(super) const fn new(most_spaces: u64, most_bytes: u64) -> Self {
        Self {
            spaces: VecDeque::new(),
            bytes: 0,
            most_spaces,
            most_bytes,
        }
    }

    pub(in crate::pool::blocks) fn count(&self) -> u64 {
        self.spaces.len() as u64
    }

    pub(in crate::pool::blocks) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::pool::blocks) fn add(&mut self, space: Space) {
        self.bytes += space.addresses();
        self.spaces.push_back(space);
    }

    pub(in crate::pool::blocks) fn is_over(&self) -> bool {
        self.count() > self.most_spaces || self.bytes > self.most_bytes
    }

    pub(in crate::pool::blocks) fn oldest(&mut self) -> Option<Space> {
        let space = self.spaces.pop_front()?;
        self.bytes -= space.addresses();
        Some(space)
    }
}
