//! Counts of a heap: what is live, and what was done.

/// Allocations of at most this size do not affect the sizes of extents.
const LARGE: u64 = 1 << 20;

/// In bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) making: u64,
    /// The sizes of all live allocations, as requested, including those in stream caches.
    pub(super) live: u64,
    /// The number and sizes of live allocations of more than [`LARGE`] bytes.
    large: u64,
    large_bytes: u64,
    pub(super) peak_live: u64,
    pub(super) peak_held: u64,
    pub(super) allocations: u64,
    pub(super) small: u64,
    pub(super) stitches: u64,
    pub(super) mapped: u64,
    pub(super) waits: u64,
}

impl Counts {
    pub(super) const fn begin(&mut self, size: u64) {
        self.making += size;
    }

    pub(super) const fn not_made(&mut self, size: u64) {
        self.making -= size;
    }

    /// Counts an allocation that was made; `cached` returns the bytes in stream caches.
    pub(super) fn made(&mut self, size: u64, cached: impl FnOnce() -> u64) {
        self.making -= size;
        self.allocations += 1;
        self.live += size;
        if size > LARGE {
            self.large += 1;
            self.large_bytes += size;
        }
        self.note_peak(cached);
    }

    /// Notes the peak of live bytes; `cached` returns the bytes in stream caches. To ask all caches
    /// takes longer than the rest of a request.
    pub(super) fn note_peak(&mut self, cached: impl FnOnce() -> u64) {
        if self.live > self.peak_live {
            self.peak_live = self.peak_live.max(self.live - cached());
        }
    }

    /// Counts a freed allocation that is in no stream cache.
    pub(super) const fn end(&mut self, size: u64) {
        self.allocations -= 1;
        self.live -= size;
        if size > LARGE {
            self.large -= 1;
            self.large_bytes -= size;
        }
    }

    pub(super) fn mean_large(&self) -> u64 {
        self.large_bytes / self.large.max(1)
    }
}
