//! Counters of a device's allocations, as PyTorch names them.
//!
//! An allocation and its end add to a few numbers under one lock, which is held for nothing else.

use serde::Serialize;

/// The largest small allocation, in bytes.
const SMALL: u64 = 1 << 20;

/// The multiple to which sizes are rounded up.
const ALIGNMENT: u64 = cuvmm::heap::ALIGNMENT;

/// A figure that rises and falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Figure {
    pub(crate) current: u64,
    pub(crate) peak: u64,
    /// The sum of all rises.
    pub(crate) allocated: u64,
    /// The sum of all falls.
    pub(crate) freed: u64,
}

impl Figure {
    /// Returns a figure that is known by its rises and falls.
    pub(crate) const fn of(allocated: u64, freed: u64) -> Self {
        let current = allocated.saturating_sub(freed);
        Self {
            current,
            peak: current,
            allocated,
            freed,
        }
    }

    const fn rise(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        if self.current > self.peak {
            self.peak = self.current;
        }
    }

    const fn fall(&mut self, by: u64) {
        self.current = self.current.saturating_sub(by);
        self.freed += by;
    }

    const fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    const fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// The figures of the allocations of some sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Class {
    /// The number of allocations.
    pub(crate) count: Figure,
    /// Their bytes, rounded up.
    pub(crate) bytes: Figure,
    /// Their bytes, as requested.
    pub(crate) requested: Figure,
}

impl Class {
    const fn rise(&mut self, size: u64, rounded: u64) {
        self.count.rise(1);
        self.bytes.rise(rounded);
        self.requested.rise(size);
    }

    const fn fall(&mut self, size: u64, rounded: u64) {
        self.count.fall(1);
        self.bytes.fall(rounded);
        self.requested.fall(size);
    }

    fn each(&mut self, change: fn(&mut Figure)) {
        for figure in [&mut self.count, &mut self.bytes, &mut self.requested] {
            change(figure);
        }
    }
}

/// All figures of a device's allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) all: Class,
    pub(crate) small: Class,
    pub(crate) large: Class,
    /// Allocations that were tried again after free memory had gone back to the driver.
    pub(crate) retries: u64,
    /// Allocations that failed for lack of memory.
    pub(crate) ooms: u64,
    /// Allocations that waited for all work of the device.
    pub(crate) syncs: u64,
    /// The most bytes that were held, where that was looked at: see [`Self::look`].
    peak_held: u64,
}

impl Figures {
    /// Counts an allocation.
    pub(crate) const fn made(&mut self, size: u64) {
        let rounded = size.next_multiple_of(ALIGNMENT);
        self.all.rise(size, rounded);
        self.class(size).rise(size, rounded);
    }

    /// Counts the end of an allocation.
    pub(crate) const fn ended(&mut self, size: u64) {
        let rounded = size.next_multiple_of(ALIGNMENT);
        self.all.fall(size, rounded);
        self.class(size).fall(size, rounded);
    }

    /// Notes the bytes that are held, and returns the most that were held when they were noted.
    ///
    /// What is held falls only where memory goes back, so it is noted before that, and whenever it
    /// is asked for.
    pub(crate) const fn look(&mut self, held: u64) -> u64 {
        if held > self.peak_held {
            self.peak_held = held;
        }
        self.peak_held
    }

    /// Begins the peaks anew, with the bytes that are held now.
    pub(crate) fn reset_peaks(&mut self, held: u64) {
        for class in [&mut self.all, &mut self.small, &mut self.large] {
            class.each(Figure::reset_peak);
        }
        self.peak_held = held;
    }

    /// Begins the sums and the counts anew.
    pub(crate) fn reset_accumulated(&mut self) {
        for class in [&mut self.all, &mut self.small, &mut self.large] {
            class.each(Figure::reset_accumulated);
        }
        self.retries = 0;
        self.ooms = 0;
        self.syncs = 0;
    }

    const fn class(&mut self, size: u64) -> &mut Class {
        if size <= SMALL {
            &mut self.small
        } else {
            &mut self.large
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Figure, Figures};

    #[test]
    fn figures_rise_fall_and_begin_anew() {
        let mut figures = Figures::default();
        figures.made(1000);
        figures.made(3 << 20);
        figures.ended(3 << 20);
        let bytes = Figure {
            current: 1024,
            peak: 1024 + (3 << 20),
            allocated: 1024 + (3 << 20),
            freed: 3 << 20,
        };
        assert_eq!(figures.all.bytes, bytes);
        assert_eq!(figures.all.requested.current, 1000);
        assert_eq!(figures.small.count, Figure::of(1, 0));
        assert_eq!(
            (figures.large.count.current, figures.large.count.peak),
            (0, 1)
        );
        assert_eq!((figures.look(70), figures.look(5)), (70, 70));
        figures.reset_peaks(5);
        assert_eq!(figures.all.bytes.peak, 1024);
        assert_eq!(figures.look(0), 5);
        figures.reset_accumulated();
        assert_eq!(figures.all.bytes.freed, 0);
        assert_eq!(figures.all.bytes.current, 1024);
    }
}
