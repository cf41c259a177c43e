//! Counts of a heap: what is live, and what was done.

/// Allocations with at most these bytes say nothing about the sizes of extents.
const LARGE: u64 = 1 << 20;

/// Counts of a heap. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// The sizes of the allocations that are being made.
    pub(super) making: u64,
    /// The sizes of all live allocations, as requested, and of those in stream caches.
    pub(super) live: u64,
    /// The number of those that have more than [`LARGE`] bytes, and their sizes.
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
    /// Counts an allocation that is about to be made.
    pub(super) const fn begin(&mut self, size: u64) {
        self.making += size;
    }

    /// Counts an allocation that was about to be made and could not be made.
    pub(super) const fn not_made(&mut self, size: u64) {
        self.making -= size;
    }

    /// Counts an allocation that was about to be made and was made, while `cached` returns how many
    /// bytes are in stream caches.
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

    /// Notes how much is live while `cached` returns how many bytes are in stream caches. To ask all
    /// of them takes longer than the rest of a request.
    pub(super) fn note_peak(&mut self, cached: impl FnOnce() -> u64) {
        if self.live > self.peak_live {
            self.peak_live = self.peak_live.max(self.live - cached());
        }
    }

    /// Counts an allocation that was freed, and is in no stream cache.
    pub(super) const fn end(&mut self, size: u64) {
        self.allocations -= 1;
        self.live -= size;
        if size > LARGE {
            self.large -= 1;
            self.large_bytes -= size;
        }
    }

    /// Returns the mean size of live allocations that have more than [`LARGE`] bytes.
    pub(super) fn mean_large(&self) -> u64 {
        self.large_bytes / self.large.max(1)
    }
}
