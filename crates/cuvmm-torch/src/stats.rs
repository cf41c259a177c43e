//! A device's figures as JSON.

use std::sync::atomic::Ordering;

use cuvmm::heap::HeapStats;
use serde::Serialize;

use crate::{fork, heaps};

/// The figures. The keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
struct Figures<'a> {
    version: u32,
    device: i32,
    name: &'a str,
    limit: u64,
    /// Allocations that returned null since the heap was made.
    failed: u64,
    heap: HeapStats,
}

/// Returns the figures of a device that has a heap.
pub(crate) fn json(device: i32) -> Option<Vec<u8>> {
    if fork::is_child() {
        return None;
    }
    let known = heaps::known(device)?;
    let figures = Figures {
        version: 1,
        device,
        name: known.heap.device().name(),
        limit: known.pool.stats().limit,
        failed: known.failed.load(Ordering::Relaxed),
        heap: known.heap.stats(),
    };
    serde_json::to_vec(&figures).ok()
}
