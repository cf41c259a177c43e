//! Repeated measurements of one quantity.

/// Samples in the order of measurement: nanoseconds, or another unit of the row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Creates an empty set with capacity for `count` samples, so that measuring does not allocate.
    pub(super) fn with_room(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    pub(super) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn values(&self) -> &[f64] {
        &self.0
    }

    /// Returns the given per-mille rank by the nearest-rank method (so always a measured value), or
    /// 0 without samples.
    pub(super) fn per_mille(&self, thousandths: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = (sorted.len() * thousandths).div_ceil(1000);
        let index = rank.max(1) - 1;
        sorted.get(index).copied().unwrap_or_default()
    }

    pub(crate) fn median(&self) -> f64 {
        self.per_mille(500)
    }

    pub(super) fn max(&self) -> f64 {
        self.per_mille(1000)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::Samples;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let samples: Samples = (1..=200).rev().map(f64::from).collect();
        assert_eq!(samples.count(), 200);
        assert_eq!(samples.median(), 100.0);
        assert_eq!(samples.per_mille(990), 198.0);
        assert_eq!(samples.per_mille(0), 1.0);
        assert_eq!(samples.max(), 200.0);
    }

    #[test]
    fn few_samples_have_percentiles_too() {
        assert_eq!(Samples::default().median(), 0.0);
        assert_eq!(Samples::default().max(), 0.0);
        let one: Samples = [7.0].into_iter().collect();
        assert_eq!(
            (one.median(), one.per_mille(990), one.max()),
            (7.0, 7.0, 7.0)
        );
        let three: Samples = [3.0, 1.0, 2.0].into_iter().collect();
        assert_eq!((three.median(), three.per_mille(990)), (2.0, 3.0));
    }

    proptest! {
        #[test]
        fn a_percentile_was_measured_and_so_many_are_at_most_it(
            values in prop::collection::vec(0.0..1e9, 1..300),
            thousandths in 1usize..=1000,
        ) {
            let samples: Samples = values.iter().copied().collect();
            let found = samples.per_mille(thousandths);
            prop_assert!(values.contains(&found));
            let at_most = values.iter().filter(|&&value| value <= found).count();
            prop_assert!(at_most * 1000 >= values.len() * thousandths);
            let below = values.iter().filter(|&&value| value < found).count();
            prop_assert!(below * 1000 < values.len() * thousandths);
        }
    }
}
