//! What the system says about itself.

use std::fs;

/// When the system does not say.
const USUAL_AREAS: usize = 65_530;
const USUAL_MEMORY: u64 = 4 << 30;

/// The size of a page in bytes.
pub(super) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// How many memory areas a process may have.
pub(super) fn most_areas() -> usize {
    let said = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    said.and_then(|text| text.trim().parse().ok())
        .unwrap_or(USUAL_AREAS)
}

/// Bytes that programs can still take without swapping.
pub(super) fn available_memory() -> u64 {
    let said = fs::read_to_string("/proc/meminfo").ok();
    let line = said.as_deref().and_then(|text| {
        text.lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
    });
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(USUAL_MEMORY, |kib| kib.saturating_mul(1024))
}
