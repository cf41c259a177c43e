//! The memory of each model over virtual time: mean and peak.

use super::settings::Nanos;

/// The memory of several models over time, in granules.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    models: Vec<Level>,
    total: Level,
    /// The time of the last change.
    pub(crate) now: Nanos,
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

    pub(crate) fn keep_course(&mut self) {
        self.course.get_or_insert_default();
    }

    pub(crate) fn into_course(self) -> Course {
        self.course.unwrap_or_default()
    }

    pub(crate) fn change(&mut self, now: Nanos, model: usize, by: i64) {
        self.advance(now);
        if let Some(course) = &mut self.course {
            course.push((self.now, model, by));
        }
        for level in [&mut self.models[model], &mut self.total] {
            level.now = level.now.saturating_add_signed(by);
            level.peak = level.peak.max(level.now);
        }
    }

    fn advance(&mut self, now: Nanos) {
        let passed = u128::from(now.saturating_sub(self.now));
        for level in self.models.iter_mut().chain([&mut self.total]) {
            level.sum += u128::from(level.now) * passed;
        }
        self.now = self.now.max(now);
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
        assert_eq!(merged.now, 12);
    }
}
