//! A device's figures as JSON and as a table.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use cuvmm::display::{Bytes, Count};
use cuvmm::driver::Call;
use cuvmm::heap::HeapStats;
use cuvmm::pool::PoolStats;
use serde::Serialize;
use serde_json::json;

use crate::error::as_pytorch;
use crate::figures::{Figure, Figures};
use crate::heaps::DeviceHeap;
use crate::paged::caches;
use crate::tags::figures::TagFigures;
use crate::{fork, graphs, heaps, tags};

/// The figures. The keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
struct All<'a> {
    version: u32,
    device: i32,
    name: &'a str,
    /// The tenant that the heap and the pools of graphs are charged to.
    tenant: &'a str,
    limit: u64,
    /// Allocations that failed since the heap was made.
    failed: u64,
    /// The bytes of publications.
    published: u64,
    /// The bytes that sleeping allocations and paged caches have when awake.
    sleeping: u64,
    /// The bytes of host memory kept for contents.
    host: u64,
    /// The bytes that are marked to be kept by a sleep that discards the rest.
    kept: u64,
    /// The part of `held` in bytes that the driver refused to take back. Nothing uses it, and it is
    /// offered again.
    quarantined: u64,
    /// All allocations: of the heap, under tags, and of graphs.
    total: Total,
    heap: HeapStats,
    pools: Vec<TagFigures>,
    paged: Vec<caches::Figures>,
    graphs: Graphs,
}

/// Figures of all awake allocations, in bytes.
#[derive(Debug, Serialize)]
struct Total {
    allocations: u64,
    live: u64,
    peak_live: u64,
    /// Memory that the driver gave.
    held: u64,
    peak_held: u64,
    free: u64,
    pending_free: u64,
    /// Mappings that were ever made.
    mapped: u64,
    stitches: u64,
}

/// Figures of pools of graphs, in bytes.
#[derive(Debug, Serialize)]
struct Graphs {
    pools: usize,
    live: u64,
    held: u64,
    free: u64,
    /// The part of `held` that sleeps with tags, and counts in their bytes.
    tagged: u64,
}

impl Graphs {
    fn of(heaps: &[(HeapStats, bool)]) -> Self {
        let sum = |of: fn(&HeapStats) -> u64| heaps.iter().map(|(heap, _)| of(heap)).sum();
        let tagged = heaps.iter().filter(|&&(_, is_tagged)| is_tagged);
        Self {
            pools: heaps.len(),
            live: sum(|heap| heap.live),
            held: sum(|heap| heap.held),
            free: sum(|heap| heap.free),
            tagged: tagged.map(|(heap, _)| heap.held).sum(),
        }
    }
}

/// Returns a device with a heap, unless in a forked child.
fn usable(device: i32) -> Option<&'static DeviceHeap> {
    match fork::is_child() {
        true => None,
        false => heaps::known(device),
    }
}

pub(crate) fn json(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let graphs = graph_heaps(known);
    let pools = tags::figures::figures(known);
    let (figures, heap, pool) = together(known);
    let heaps = || std::iter::once(&heap).chain(graphs.iter().map(|(heap, _)| heap));
    let free = heaps().map(|it| it.free).sum::<u64>();
    let free = free + pool.free + pool.precommitted + pool.cached + pool.pending_free;
    let pending = heaps().map(|it| it.pending_free).sum::<u64>() + pool.pending_free;
    let held = heaps::held_of(&pool) + known.held_shareable();
    let live = figures.all.requested.current;
    let all = All {
        version: 1,
        device,
        name: known.device.name(),
        tenant: known.tenant().name(),
        limit: pool.limit,
        failed: known.failed.load(Ordering::Relaxed),
        published: known.published(),
        sleeping: figures.sleeping + caches::asleep(known),
        host: pools.iter().map(TagFigures::host).sum(),
        kept: pools.iter().map(TagFigures::kept).sum(),
        quarantined: pool.quarantined,
        total: Total {
            allocations: figures.all.count.current,
            live,
            peak_live: figures.all.requested.peak,
            held,
            peak_held: known.table().figures.look(held),
            free: free.min(held.saturating_sub(live)),
            pending_free: pending,
            mapped: pool.calls.count(Call::MemMap),
            stitches: heaps().map(|it| it.stitches).sum(),
        },
        heap,
        pools,
        paged: caches::figures(known),
        graphs: Graphs::of(&graphs),
    };
    serde_json::to_vec(&all).ok()
}

fn graph_heaps(of: &DeviceHeap) -> Vec<(HeapStats, bool)> {
    let heaps = graphs::heaps(of).into_iter();
    heaps
        .map(|(heap, is_tagged)| (heap.stats(), is_tagged))
        .collect()
}

/// Returns a device's figures at one moment, in which no allocation begins or ends: no more is
/// allocated than held.
fn together(of: &DeviceHeap) -> (Figures, HeapStats, PoolStats) {
    let mut table = of.table();
    let (heap, pool) = (of.heap.stats(), of.pool.stats());
    let held = heaps::held_of(&pool) + of.held_shareable();
    table.figures.look(held);
    (table.figures, heap, pool)
}

/// Formats a figure that is not kept apart by size: all of it counts as large.
fn as_large(figure: Figure) -> serde_json::Value {
    json!({ "all": figure, "small_pool": Figure::default(), "large_pool": figure })
}

pub(crate) fn memory(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let (mut figures, heap, pool) = together(known);
    let held = heaps::held_of(&pool) + known.held_shareable();
    let peak = figures.look(held);
    let Figures {
        all,
        small,
        large,
        retries,
        ooms,
        syncs,
        ..
    } = figures;
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
        "reserved_bytes": as_large(reserved),
        "segment": as_large(Figure {
            current: heap.extents,
            peak: heap.extents,
            allocated: created,
            freed: released,
        }),
        "inactive_split": as_large(Figure::default()),
        "inactive_split_bytes": as_large(Figure::of(pool.stranded, 0)),
        "num_alloc_retries": retries,
        "num_ooms": ooms,
        "num_device_alloc": created + pool.calls.count(Call::MemMap),
        "num_device_free": released + pool.calls.count(Call::MemUnmap),
        "num_sync_all_streams": syncs,
        "max_split_size": -1,
    });
    serde_json::to_vec(&figures).ok()
}

pub(crate) fn reset_peaks(device: i32) {
    if let Some(known) = usable(device) {
        let held = known.held();
        known.table().figures.reset_peaks(held);
    }
}

pub(crate) fn reset_accumulated(device: i32) {
    if let Some(known) = usable(device) {
        known.table().figures.reset_accumulated();
    }
}

pub(crate) fn snapshot(device: i32) -> Option<Vec<u8>> {
    let known = usable(device)?;
    let snapshot = tags::figures::with_entries(known, |tagged, table| {
        let (mut awake, mut asleep) = table.entries();
        awake.extend(tagged.awake);
        asleep.extend(tagged.asleep);
        // Read after the allocations, whose memory cannot go meanwhile.
        let held = known.held();
        table.figures.look(held);
        json!({
            "version": 1,
            "device": device,
            "held": held,
            "allocations": awake,
            "sleeping": asleep,
        })
    });
    serde_json::to_vec(&snapshot).ok()
}

/// Returns the beginning of PyTorch's message for a lack of memory: programs parse the text.
pub(crate) fn out_of_memory(device: i32, tried: u64) -> String {
    /// PyTorch formats sizes below this.
    const EXABYTE: u64 = 1 << 60;
    let begins = "CUDA out of memory. Tried to allocate";
    if tried >= EXABYTE {
        return format!("{begins} more than 1EB memory.");
    }
    let tried = as_pytorch(tried);
    let Some(known) = usable(device) else {
        return format!("{begins} {tried}.");
    };
    let (figures, _, pool) = together(known);
    let free = known.device.memory_info().map_or(0, |info| info.free);
    let held = heaps::held_of(&pool) + known.held_shareable();
    let allocated = figures.all.bytes.current;
    format!(
        "{begins} {tried}. GPU {device} has a total capacity of {} of which {} is free. {} allowed; Of the \
         allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated.",
        as_pytorch(known.device.total_memory()),
        as_pytorch(free),
        as_pytorch(pool.limit),
        as_pytorch(allocated),
        as_pytorch(held.saturating_sub(allocated)),
    )
}

pub(crate) fn table(device: i32) -> Option<String> {
    let known = usable(device)?;
    let (figures, heap, pool) = together(known);
    let mut text = String::new();
    let name = known.device.name();
    let (bytes, count) = (figures.all.bytes, figures.all.count);
    // Writing into a string does not fail.
    let _ = writeln!(
        text,
        "cuvmm on device {device} ({name}, {})",
        Bytes(known.device.total_memory())
    );
    let _ = writeln!(
        text,
        "allocated  {} in {}, at most {} so far",
        Bytes(bytes.current),
        Count(count.current, "allocation"),
        Bytes(bytes.peak)
    );
    let _ = writeln!(
        text,
        "held       {} in {} with {}, at most {} so far",
        Bytes(heap.held),
        Count(heap.extents, "extent"),
        Count(heap.mappings, "mapping"),
        Bytes(heap.peak_held)
    );
    let _ = writeln!(
        text,
        "free       {} of it, {} pending on GPU work; the longest range is {}",
        Bytes(heap.free),
        Bytes(heap.pending_free),
        Bytes(heap.largest_run)
    );
    let _ = writeln!(
        text,
        "failed     {}, {} for lack of memory",
        Count(known.failed.load(Ordering::Relaxed), "allocation"),
        figures.ooms
    );
    let host: u64 = tags::figures::figures(known)
        .iter()
        .map(TagFigures::host)
        .sum();
    let sleeping = figures.sleeping + caches::asleep(known);
    if sleeping > 0 || host > 0 {
        let _ = writeln!(
            text,
            "asleep     {}, and {} of host memory kept for contents",
            Bytes(sleeping),
            Bytes(host)
        );
    }
    let graphs = Graphs::of(&graph_heaps(known));
    if graphs.pools > 0 {
        let _ = writeln!(
            text,
            "graphs     {} live of {} held in {}",
            Bytes(graphs.live),
            Bytes(graphs.held),
            Count(graphs.pools, "pool")
        );
    }
    let lines = [
        ("published", known.published()),
        ("shareable", known.held_shareable()),
    ];
    for (name, bytes) in lines.into_iter().filter(|&(_, bytes)| bytes > 0) {
        let _ = writeln!(
            text,
            "{name}  {}, which lower a limit that was set",
            Bytes(bytes)
        );
    }
    let _ = write!(text, "{pool}");
    Some(text)
}
