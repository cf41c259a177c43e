//! Counts over several runs.

use std::fmt;

/// The instructions per operation, over several runs.
#[derive(Debug, PartialEq)]
pub(crate) struct Count {
    pub(crate) median: f64,
    least: f64,
    most: f64,
}

impl Count {
    pub(crate) fn of(mut runs: Vec<f64>) -> Self {
        runs.sort_by(f64::total_cmp);
        let at = |index: usize| runs.get(index).copied().unwrap_or_default();
        let last = runs.len().saturating_sub(1);
        Self {
            median: (at(last / 2) + at(last.div_ceil(2))) / 2.0,
            least: at(0),
            most: at(last),
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            median,
            least,
            most,
        } = self;
        write!(f, "{median:>7.1}  ({least:.1} to {most:.1})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_runs() {
        let count = |runs: &[f64]| {
            let count = Count::of(runs.to_vec());
            (count.least, count.median, count.most)
        };
        assert_eq!(count(&[3.0, 1.0, 2.0]), (1.0, 2.0, 3.0));
        assert_eq!(count(&[4.0, 1.0, 2.0, 3.0]), (1.0, 2.5, 4.0));
        assert_eq!(count(&[7.0]), (7.0, 7.0, 7.0));
    }
}
