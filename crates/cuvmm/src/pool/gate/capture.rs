//! Guards for the time in which a CUDA graph is captured on the pool's context.

use std::sync::Arc;

use crate::deferred::{Section, Unlocked};
use crate::pool::core::Core;

/// A guard that keeps the pool from breaking graph captures. While it lives, no thread of the pool
/// queries, synchronizes or records on the context, since each of these can break a capture. Nor
/// does any other part of the library wait for all work of the pool's device, or mark it: an
/// operation that needs to is refused, and memory that needs it stays pending free.
///
/// Cached memory of the home stream and new memory can still be allocated. An allocation that would
/// need a fence or a scrub is refused with the figures of memory pending free,
/// [`Block::free`](crate::Block::free) on a capturing home stream hands the block back, and copies
/// that wait are refused.
///
/// Without a guard the pool leaves the captures of other libraries alone, as long as no block without a
/// home stream is pending free or published: marking all work of a context, or waiting for it,
/// breaks every capture on it. A capture that begins on a home stream while a call queues a scrub or
/// a copy of its own there is invalidated, and the call refused.
///
/// A region that is dropped while a guard lives stays mapped, and counts in
/// [`Device::leaked`](crate::Device::leaked), as far as it would have waited for all work of the
/// device.
///
/// A graph that uses a block after its capture needs a [`Lease`](crate::Lease) on the block.
#[derive(Debug)]
pub struct CaptureGuard {
    core: Arc<Core>,
}

impl CaptureGuard {
    pub(in crate::pool) fn new(core: Arc<Core>) -> Self {
        let mut state = core.lock();
        // They may still query the driver.
        let flights = state.memory.gate.begin_guard();
        while state.memory.gate.holds_up_guard(&flights) {
            state = state.wait(&core.settled, None);
        }
        drop(state);
        core.device.begin_guard();
        Self { core }
    }
}

impl Drop for CaptureGuard {
    fn drop(&mut self) {
        if !self.core.device.is_forked() {
            self.core.device.end_guard();
            let mut state = self.core.lock();
            state.memory.gate.end_guard();
            drop(state);
            self.core.announce();
        }
    }
}

/// Permission to query, synchronize and record on the context. No capture guard begins while it
/// lives. User code that its thread defers runs after it, since that code may take a capture guard.
pub(crate) struct Polling<'a> {
    core: &'a Core,
    _unlocked: Unlocked,
    _section: Section,
}

impl Core {
    /// Returns the permission to poll, or `None` while a capture guard lives. It must not be
    /// dropped under the pool's lock.
    pub(crate) fn polling(&self) -> Option<Polling<'_>> {
        let section = Section::enter();
        let unlocked = section.unlocked();
        let mut state = self.lock();
        if !state.memory.gate.begin_synchronising() {
            return None;
        }
        drop(state);
        Some(Polling {
            core: self,
            _unlocked: unlocked,
            _section: section,
        })
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        let mut state = self.core.lock();
        state.memory.gate.end_synchronising();
        drop(state);
        // A capture guard waits for the count.
        self.core.settled.notify_all();
    }
}
