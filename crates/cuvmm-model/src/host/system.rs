//! Figures of the operating system: page size, memory areas, available memory.

use std::fs;

/// Defaults for figures that the system does not report.
const USUAL_AREAS: usize = 65_530;
const USUAL_MEMORY: u64 = 4 << 30;

pub(super) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns the most memory areas that a process may have.
pub(super) fn most_areas() -> usize {
    let said = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    said.and_then(|text| text.trim().parse().ok())
        .unwrap_or(USUAL_AREAS)
}

/// Returns the bytes that programs can still allocate without swapping.
pub(super) fn available_memory() -> u64 {
    let said = fs::read_to_string("/proc/meminfo").ok();
    let line = said.as_deref().and_then(|text| {
        text.lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
    });
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(USUAL_MEMORY, |kib| kib.saturating_mul(1024))
}
