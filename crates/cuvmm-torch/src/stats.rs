//! A device's figures as JSON and as a table.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use cuvmm::driver::Call;
use cuvmm::heap::HeapStats;
use serde::Serialize;
use serde_json::json;

use crate::error::size;
use crate::figures::{Figure, Figures};
use crate::heaps::DeviceHeap;
use crate::{fork, heaps, live, tags};

/// The figures. The keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
struct All<'a> {
    version: u32,
    device: i32,
    name: &'a str,
    limit: u64,
    /// Allocations that failed since the heap was made.
    failed: u64,
    /// Memory of publications, in bytes.
    published: u64,
    heap: HeapStats,
}

/// Returns a device that has a heap, in a process that can use it.
fn usable(device: i32) -> Option<&'static DeviceHeap> {
    match fork::is_child() {
        true => None,
        false => heaps::known(device),
    }
}

/// Returns the figures of a device that has a heap.
pub(crate) fn json(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let figures = All {
        version: 1,
        device,
        name: known.device.name(),
        limit: known.pool.stats().limit,
        failed: known.failed.load(Ordering::Relaxed),
        published: known.published().map_or(0, heaps::held),
        heap: known.heap.stats(),
    };
    serde_json::to_vec(&figures).ok()
}

/// A figure that is not kept apart for small and large allocations: all of it counts as large.
fn together(figure: Figure) -> serde_json::Value {
    json!({ "all": figure, "small_pool": Figure::default(), "large_pool": figure })
}

/// Returns the figures under PyTorch's names.
pub(crate) fn memory(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let (heap, pool) = (known.heap.stats(), known.pool.stats());
    let held = pool.committed + pool.free + pool.quarantined;
    let mut figures = known.figures();
    let peak = figures.look(held);
    let Figures {
        all,
        small,
        large,
        retries,
        ooms,
        syncs,
        ..
    } = *figures;
    drop(figures);
    let (created, released) = (
        pool.calls.count(Call::MemCreate),
        pool.calls.count(Call::MemRelease),
    );
    let count = json!({ "all": all.count, "small_pool": small.count, "large_pool": large.count });
    let bytes = json!({ "all": all.bytes, "small_pool": small.bytes, "large_pool": large.bytes });
    let reserved = Figure {
        peak,
        ..Figure::of(held, 0)
    };
    let figures = json!({
        "allocation": count,
        "allocated_bytes": bytes,
        "requested_bytes": {
            "all": all.requested,
            "small_pool": small.requested,
            "large_pool": large.requested,
        },
        "active": count,
        "active_bytes": bytes,
        "reserved_bytes": together(reserved),
        "segment": together(Figure {
            current: heap.extents,
            peak: heap.extents,
            allocated: created,
            freed: released,
        }),
        "inactive_split": together(Figure::default()),
        "inactive_split_bytes": together(Figure::of(pool.stranded, 0)),
        "num_alloc_retries": retries,
        "num_ooms": ooms,
        "num_device_alloc": created + pool.calls.count(Call::MemMap),
        "num_device_free": released + pool.calls.count(Call::MemUnmap),
        "num_sync_all_streams": syncs,
        "max_split_size": -1,
    });
    serde_json::to_vec(&figures).ok()
}

/// Begins a device's peaks anew.
pub(crate) fn reset_peaks(device: i32) {
    if let Some(known) = usable(device) {
        let held = known.held();
        known.figures().reset_peaks(held);
    }
}

/// Begins a device's sums anew.
pub(crate) fn reset_accumulated(device: i32) {
    if let Some(known) = usable(device) {
        known.figures().reset_accumulated();
    }
}

/// Returns all live allocations of a device, and what it holds.
pub(crate) fn snapshot(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let mut entries = live::entries(known);
    entries.extend(tags::entries(known));
    let snapshot = json!({
        "version": 1,
        "device": device,
        "held": known.held(),
        "allocations": entries,
    });
    serde_json::to_vec(&snapshot).ok()
}

/// Returns the figures as a table.
pub(crate) fn table(device: i32) -> Option<String> {
    let known = usable(device)?;
    let (heap, pool, figures) = (known.heap.stats(), known.pool.stats(), *known.figures());
    let mut text = String::new();
    let name = known.device.name();
    let (bytes, count) = (figures.all.bytes, figures.all.count);
    // Writing into a string does not fail.
    let _ = writeln!(
        text,
        "cuvmm on device {device} ({name}, {})",
        size(known.device.total_memory())
    );
    let _ = writeln!(
        text,
        "allocated  {} in {} allocations, at most {} so far",
        size(bytes.current),
        count.current,
        size(bytes.peak)
    );
    let _ = writeln!(
        text,
        "held       {} in {} extents with {} mappings, at most {} so far",
        size(heap.held),
        heap.extents,
        heap.mappings,
        size(heap.peak_held)
    );
    let _ = writeln!(
        text,
        "free       {} of it, {} pending on GPU work; the longest range is {}",
        size(heap.free),
        size(heap.pending_free),
        size(heap.largest_run)
    );
    let _ = writeln!(
        text,
        "failed     {} allocations, {} for lack of memory",
        known.failed.load(Ordering::Relaxed),
        figures.ooms
    );
    if let Some(published) = known.published().map(heaps::held).filter(|&it| it > 0) {
        let _ = writeln!(
            text,
            "published  {}, which lower a limit that was set",
            size(published)
        );
    }
    let _ = write!(text, "{pool}");
    Some(text)
}
