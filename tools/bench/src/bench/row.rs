//! A row of the result: a measurement, and the baseline that it is compared with.

use std::collections::BTreeMap;

use serde::Serialize;

use super::samples::Samples;

/// A row. Times are in nanoseconds. A row of another quantity names its unit in `unit`; its keys
/// keep their names.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) unit: &'static str,
    pub(super) n: usize,
    pub(super) p50_ns: f64,
    pub(super) p99_ns: f64,
    pub(super) max_ns: f64,
    pub(super) baseline: String,
    pub(super) baseline_p50_ns: f64,
    /// The median of cuvmm's side divided by the baseline's; `None` if the baseline costs nothing.
    pub(super) ratio: Option<f64>,
    /// Further figures that were counted during the measurement.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) counts: BTreeMap<&'static str, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
}

impl Row {
    pub(super) fn new(
        name: impl Into<String>,
        ours: &Samples,
        baseline: impl Into<String>,
        baselines: &Samples,
    ) -> Self {
        let p50_ns = rounded(ours.median());
        let baseline_p50_ns = rounded(baselines.median());
        Self {
            name: name.into(),
            unit: "ns",
            n: ours.count(),
            p50_ns,
            p99_ns: rounded(ours.per_mille(990)),
            max_ns: rounded(ours.max()),
            baseline: baseline.into(),
            baseline_p50_ns,
            ratio: (baseline_p50_ns > 0.0).then(|| p50_ns / baseline_p50_ns),
            counts: BTreeMap::new(),
            note: None,
        }
    }

    /// Marks the row as counting bytes instead of time.
    pub(super) fn in_bytes(mut self) -> Self {
        self.unit = "bytes";
        self
    }

    pub(super) fn turned_over(mut self) -> Self {
        self.ratio = (self.p50_ns > 0.0).then(|| self.baseline_p50_ns / self.p50_ns);
        self
    }

    pub(super) fn count(mut self, what: &'static str, count: f64) -> Self {
        self.counts.insert(what, rounded(count));
        self
    }

    pub(super) fn moved(self, bytes: u64) -> Self {
        // Bytes per nanosecond equal gigabytes per second.
        let rate = |ns: f64| bytes as f64 / ns.max(1.0);
        let (ours, baseline) = (rate(self.p50_ns), rate(self.baseline_p50_ns));
        self.count("gb_per_s", ours)
            .count("baseline_gb_per_s", baseline)
    }

    pub(super) fn note(mut self, note: impl Into<Option<&'static str>>) -> Self {
        if let Some(note) = note.into() {
            self.note = Some(match self.note {
                Some(first) => format!("{first}; {note}"),
                None => note.to_owned(),
            });
        }
        self
    }
}

/// Rounds to a tenth, the resolution of the clocks.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::{Row, Samples};

    fn samples(values: &[f64]) -> Samples {
        values.iter().copied().collect()
    }

    #[test]
    fn a_ratio_is_of_the_medians_that_are_shown() {
        let row = Row::new("x", &samples(&[3.04, 3.0, 9.0]), "y", &samples(&[1.5, 1.5]));
        assert_eq!(
            (row.n, row.p50_ns, row.p99_ns, row.max_ns),
            (3, 3.0, 9.0, 9.0)
        );
        assert_eq!(row.ratio, Some(3.0 / 1.5));
        assert_eq!(row.turned_over().ratio, Some(1.5 / 3.0));
    }

    #[test]
    fn rates_are_of_the_medians_too() {
        let row = Row::new("x", &samples(&[4.0]), "y", &samples(&[2.0])).moved(100);
        assert_eq!(row.counts["gb_per_s"], 25.0);
        assert_eq!(row.counts["baseline_gb_per_s"], 50.0);
    }

    #[test]
    fn nothing_is_divided_by_nothing() {
        let row = Row::new("x", &samples(&[3.0]), "y", &samples(&[0.0]));
        assert_eq!(row.ratio, None);
        let row = Row::new("x", &samples(&[0.0]), "y", &samples(&[1.0]));
        assert_eq!(row.turned_over().ratio, None);
    }

    #[test]
    fn notes_add_up() {
        let row = Row::new("x", &samples(&[]), "y", &samples(&[]))
            .note("a")
            .note(None);
        assert_eq!(row.note("b").note.as_deref(), Some("a; b"));
    }
}
