//! Counters of a device's allocations, as PyTorch names them. One lock guards them, and nothing
//! else.

use serde::Serialize;

/// The largest small allocation, in bytes.
const SMALL: u64 = 1 << 20;

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
        self.set(self.current + by);
        self.allocated += by;
    }

    const fn set(&mut self, current: u64) {
        self.current = current;
        if current > self.peak {
            self.peak = current;
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

/// The figures of one class of sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) count: Figure,
    /// Bytes, rounded up.
    pub(crate) bytes: Figure,
    /// Bytes as requested.
    pub(crate) requested: Figure,
}

impl Class {
    fn each(&mut self, change: fn(&mut Figure)) {
        for figure in [&mut self.count, &mut self.bytes, &mut self.requested] {
            change(figure);
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) all: Class,
    pub(crate) small: Class,
    pub(crate) large: Class,
    /// Allocations retried after free memory had gone back to the driver.
    pub(crate) retries: u64,
    pub(crate) ooms: u64,
    /// Allocations that waited for all work of the device.
    pub(crate) syncs: u64,
    /// The rounded-up bytes of sleeping allocations. No other figure includes them.
    pub(crate) sleeping: u64,
    /// The most bytes held at any [`Self::look`].
    peak_held: u64,
}

impl Figures {
    pub(crate) fn made(&mut self, size: u64) {
        self.change(size, Figure::rise);
    }

    pub(crate) fn ended(&mut self, size: u64) {
        self.change(size, Figure::fall);
    }

    /// Counts an allocation as asleep: it has no memory, and is not freed.
    pub(crate) fn slept(&mut self, size: u64) {
        self.sleeping += size.next_multiple_of(ALIGNMENT);
        self.change(size, |figure, by| {
            figure.current = figure.current.saturating_sub(by);
        });
    }

    pub(crate) fn woke(&mut self, size: u64) {
        self.sleeping -= size.next_multiple_of(ALIGNMENT);
        self.change(size, |figure, by| figure.set(figure.current + by));
    }

    pub(crate) fn ended_asleep(&mut self, size: u64) {
        self.sleeping -= size.next_multiple_of(ALIGNMENT);
        self.change(size, |figure, by| figure.freed += by);
    }

    fn change(&mut self, size: u64, change: impl Fn(&mut Figure, u64)) {
        let rounded = size.next_multiple_of(ALIGNMENT);
        let class = match size <= SMALL {
            true => &mut self.small,
            false => &mut self.large,
        };
        for class in [&mut self.all, class] {
            change(&mut class.count, 1);
            change(&mut class.bytes, rounded);
            change(&mut class.requested, size);
        }
    }

    /// Notes the held bytes, and returns the most bytes noted so far.
    ///
    /// Held bytes fall only when memory goes back to the driver: they are noted before that, and
    /// whenever the peak is read.
    pub(crate) fn look(&mut self, held: u64) -> u64 {
        // Allocated bytes were held, also between two looks.
        let least = held.max(self.all.bytes.peak);
        self.peak_held = self.peak_held.max(least);
        self.peak_held
    }

    /// Resets the peaks to the current figures; `held` are the bytes held now.
    pub(crate) fn reset_peaks(&mut self, held: u64) {
        for class in [&mut self.all, &mut self.small, &mut self.large] {
            class.each(Figure::reset_peak);
        }
        self.peak_held = held;
    }

    pub(crate) fn reset_accumulated(&mut self) {
        for class in [&mut self.all, &mut self.small, &mut self.large] {
            class.each(Figure::reset_accumulated);
        }
        self.retries = 0;
        self.ooms = 0;
        self.syncs = 0;
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
        let (most, more) = (1024 + (3 << 20), 4 << 20);
        let looks = [figures.look(70), figures.look(more), figures.look(5)];
        assert_eq!(looks, [most, more, more]);
        figures.reset_peaks(5000);
        assert_eq!(figures.all.bytes.peak, 1024);
        assert_eq!(figures.look(0), 5000);
        figures.reset_accumulated();
        assert_eq!(figures.all.bytes.freed, 0);
        assert_eq!(figures.all.bytes.current, 1024);
    }

    #[test]
    fn what_sleeps_is_neither_allocated_nor_freed() {
        let mut figures = Figures::default();
        figures.made(1000);
        figures.made(3 << 20);
        figures.slept(1000);
        figures.slept(3 << 20);
        let (all, asleep) = (figures.all.bytes, 1024 + (3 << 20));
        assert_eq!((all.current, all.freed, figures.sleeping), (0, 0, asleep));
        figures.woke(1000);
        assert_eq!(
            (figures.small.count.current, figures.large.count.current),
            (1, 0)
        );
        figures.ended_asleep(3 << 20);
        figures.ended(1000);
        let all = figures.all.bytes;
        assert_eq!(
            (all.current, all.peak, all.freed),
            (0, asleep, all.allocated)
        );
        assert_eq!(figures.sleeping, 0);
    }
}
