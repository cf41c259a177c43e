//! The memory of each model over virtual time: mean, peak, and points for a chart. The number of
//! points is bounded for runs of any length.

use super::settings::Nanos;

/// The most slices kept. Beyond them, adjacent slices are merged and the length of a slice doubles.
const SLICES: usize = 1024;

/// The memory of several models over time, in granules.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    models: Vec<Level>,
    total: Level,
    slice: Nanos,
    /// Granules times nanoseconds, for each slice and model. Sums, so that merging is exact.
    slices: Vec<Vec<u128>>,
    now: Nanos,
    course: Option<Course>,
}

/// Every change of memory: time, model, and granules.
pub(crate) type Course = Vec<(Nanos, usize, i64)>;

#[derive(Clone, Debug, Default)]
struct Level {
    now: u64,
    peak: u64,
    sum: u128,
}

impl Timeline {
    pub(crate) fn new(models: usize) -> Self {
        Self {
            models: vec![Level::default(); models],
            total: Level::default(),
            slice: 1_000_000,
            slices: Vec::new(),
            now: 0,
            course: None,
        }
    }

    /// Makes a timeline of all models from their changes, in any order.
    pub(crate) fn of(models: usize, mut changes: Course) -> Self {
        changes.sort_by_key(|&(at, ..)| at);
        let mut timeline = Self::new(models);
        for (at, model, by) in changes {
            timeline.change(at, model, by);
        }
        timeline
    }

    /// Keeps every change from now on.
    pub(crate) fn keep_course(&mut self) {
        self.course.get_or_insert_default();
    }

    /// Returns the kept changes.
    pub(crate) fn into_course(self) -> Course {
        self.course.unwrap_or_default()
    }

    /// Changes the memory of a model by `by` granules, from `now` on.
    pub(crate) fn change(&mut self, now: Nanos, model: usize, by: i64) {
        self.advance(now);
        if let Some(course) = self.course.as_mut().filter(|_| by != 0) {
            course.push((self.now, model, by));
        }
        for level in [&mut self.models[model], &mut self.total] {
            level.now = level.now.saturating_add_signed(by);
            level.peak = level.peak.max(level.now);
        }
    }

    /// Sets the memory of all models: what is less from `now` on, and what is more from `taken` on.
    pub(crate) fn set(&mut self, now: Nanos, taken: Nanos, to: &[u64]) {
        let levels = self.models.iter().zip(to);
        let changes = levels.map(|(level, to)| to.wrapping_sub(level.now).cast_signed());
        let mut changes: Vec<(i64, usize)> = changes.zip(0..).collect();
        // What one model takes from another is never with both.
        changes.sort_unstable();
        for (by, model) in changes {
            self.change(if by > 0 { taken } else { now }, model, by);
        }
    }

    /// Advances the time to `now` without a change of memory.
    pub(crate) fn advance(&mut self, now: Nanos) {
        let passed = u128::from(now.saturating_sub(self.now));
        for level in self.models.iter_mut().chain([&mut self.total]) {
            level.sum += u128::from(level.now) * passed;
        }
        while self.now < now {
            let mut at = self.now / self.slice;
            while at >= SLICES as u64 {
                self.merge();
                at = self.now / self.slice;
            }
            let at = at as usize;
            if self.slices.len() <= at {
                self.slices.resize(at + 1, vec![0; self.models.len()]);
            }
            let end = (self.now - self.now % self.slice)
                .saturating_add(self.slice)
                .min(now);
            for (sum, level) in self.slices[at].iter_mut().zip(&self.models) {
                *sum += u128::from(level.now) * u128::from(end - self.now);
            }
            self.now = end;
        }
    }

    fn merge(&mut self) {
        self.slice = self.slice.saturating_mul(2);
        self.slices = self
            .slices
            .chunks(2)
            .map(|pair| {
                (0..self.models.len())
                    .map(|model| pair.iter().map(|slice| slice[model]).sum())
                    .collect()
            })
            .collect();
    }

    /// Returns the time of the last call of `change` or `advance`.
    pub(crate) fn end(&self) -> Nanos {
        self.now
    }

    /// Returns the mean over the whole time in granules, of a model or of all; 0 if no time has
    /// passed.
    pub(crate) fn mean(&self, model: Option<usize>) -> f64 {
        self.level(model).sum as f64 / self.now.max(1) as f64
    }

    /// Returns the peak in granules, of a model or of all together.
    pub(crate) fn peak(&self, model: Option<usize>) -> u64 {
        self.level(model).peak
    }

    fn level(&self, model: Option<usize>) -> &Level {
        model.map_or(&self.total, |model| &self.models[model])
    }

    /// Returns the end of each slice and the mean granules of each model in it. The sum over the
    /// models never exceeds the total peak, because all means are over the same time.
    pub(crate) fn points(&self) -> impl Iterator<Item = (Nanos, Vec<f64>)> {
        self.slices.iter().enumerate().map(|(at, sums)| {
            let start = at as u64 * self.slice;
            let end = start.saturating_add(self.slice).min(self.now);
            (
                end,
                sums.iter()
                    .map(|&sum| sum as f64 / (end - start).max(1) as f64)
                    .collect(),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_is_weighted_by_time_and_peak_is_of_the_sum() {
        let mut timeline = Timeline::new(2);
        timeline.change(0, 0, 4);
        timeline.change(10, 1, 6);
        timeline.change(20, 0, -4);
        timeline.advance(40);
        assert_eq!(timeline.mean(Some(0)), 2.0);
        assert_eq!(timeline.mean(Some(1)), 4.5);
        assert_eq!(timeline.mean(None), 6.5);
        assert_eq!(
            (
                timeline.peak(Some(0)),
                timeline.peak(Some(1)),
                timeline.peak(None)
            ),
            (4, 6, 10)
        );
    }

    #[test]
    fn memory_that_passes_from_one_model_to_the_other_counts_once() {
        let mut timeline = Timeline::new(2);
        timeline.set(0, 0, &[0, 8]);
        timeline.set(10, 10, &[8, 0]);
        timeline.set(20, 20, &[3, 5]);
        timeline.advance(40);
        assert_eq!(
            [Some(0), Some(1), None].map(|model| timeline.peak(model)),
            [8; 3]
        );
        assert_eq!((timeline.mean(Some(0)), timeline.mean(None)), (3.5, 8.0));
    }

    #[test]
    fn courses_beside_each_other_are_one_timeline() {
        let mut whole = Timeline::new(2);
        let mut alone = [Timeline::new(1), Timeline::new(1)];
        for one in &mut alone {
            one.keep_course();
        }
        for (at, model, by) in [(0, 0, 4), (5, 1, 6), (9, 1, -6), (9, 0, -1), (12, 0, -3)] {
            whole.change(at, model, by);
            alone[model].change(at, 0, by);
        }
        let courses = alone.map(Timeline::into_course);
        let changes = courses.iter().enumerate();
        let changes = changes.flat_map(|(model, course)| {
            let changes = course.iter();
            changes.map(move |&(at, _, by)| (at, model, by))
        });
        let merged = Timeline::of(2, changes.collect());
        for model in [None, Some(0), Some(1)] {
            assert_eq!(merged.peak(model), whole.peak(model));
            assert_eq!(merged.mean(model), whole.mean(model));
        }
        assert_eq!(merged.end(), 12);
    }

    #[test]
    fn a_long_run_keeps_few_points_and_its_mean() {
        let mut timeline = Timeline::new(1);
        let end = 7_200_000_000_000;
        timeline.change(0, 0, 3);
        timeline.change(end / 2, 0, 2);
        timeline.advance(end);
        let points: Vec<_> = timeline.points().collect();
        assert!((SLICES / 2..=SLICES).contains(&points.len()));
        assert_eq!(points.last().map(|(end, _)| *end), Some(end));
        assert_eq!(timeline.mean(None), 4.0);
        let mut last = 0;
        let area: f64 = points
            .iter()
            .map(|(end, held)| held[0] * (end - std::mem::replace(&mut last, *end)) as f64)
            .sum();
        assert!((area / end as f64 - 4.0).abs() < 1e-9);
        assert!(
            points
                .iter()
                .all(|(_, held)| (3.0..=5.0).contains(&held[0]))
        );
    }

    #[test]
    fn a_far_jump_does_not_walk_every_first_slice() {
        let mut timeline = Timeline::new(1);
        timeline.change(0, 0, 1);
        timeline.advance(u64::MAX);
        assert_eq!(timeline.peak(None), 1);
        assert!(timeline.points().count() <= SLICES);
    }
}
