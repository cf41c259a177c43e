//! Memory live and held over the operations of a trace, for a chart.

/// The most points of a course.
const POINTS: usize = 1_000;

/// A course of at most [`POINTS`] points, or of none. Each has the highest values of its operations.
#[derive(Clone, Debug, Default)]
pub(super) struct Course {
    /// How many operations are one point. Zero if nothing is kept.
    every: usize,
    operations: usize,
    /// Bytes live, bytes held.
    pub(super) points: Vec<(u64, u64)>,
}

impl Course {
    /// Returns an empty course of a trace.
    pub(super) fn of(operations: usize) -> Self {
        Self {
            every: operations.div_ceil(POINTS).max(1),
            ..Self::default()
        }
    }

    /// Notes the bytes live and held after the next operation.
    pub(super) fn note(&mut self, now: impl FnOnce() -> (u64, u64)) {
        if self.every == 0 {
            return;
        }
        let (live, held) = now();
        match self.points.last_mut() {
            Some(last) if !self.operations.is_multiple_of(self.every) => {
                *last = (last.0.max(live), last.1.max(held));
            }
            _ => self.points.push((live, held)),
        }
        self.operations += 1;
    }

    /// Returns how many operations were noted, and how many are one point.
    pub(super) fn scale(&self) -> (usize, usize) {
        (self.operations, self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_have_the_highest_values() {
        let mut course = Course::of(2_500);
        for at in 0..2_500 {
            course.note(|| (at, 5_000 - at));
        }
        assert_eq!(course.points.len(), 834);
        assert_eq!(course.points[0], (2, 5_000));
        assert_eq!(course.points[833], (2_499, 2_501));
        assert_eq!(course.scale(), (2_500, 3));
        let mut none = Course::default();
        none.note(|| unreachable!());
        assert!(none.points.is_empty());
    }
}
