//! The figures of a replay, for each model and for all models, and the models that lose.

use std::collections::BTreeMap;
use std::time::Duration;

use cuvmm::driver::Call;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use super::process::Process;
use super::settings::Nanos;
use super::simulate::{Fate, Played, Request};
use super::stamps::Verified;
use cuvmm_command::terminal::counted;

/// The cost of the memory operations of one model or of all models.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Driver calls, without those that stamp and verify.
    pub(crate) calls: u64,
    /// Time in these calls; virtual time on the model driver.
    pub(crate) time: Duration,
    /// Count and time by kind of call. Empty for the cost of one model.
    #[serde(skip)]
    pub(crate) by_call: BTreeMap<Call, (u64, Duration)>,
    pub(crate) verified: Verified,
}

/// Percentiles of the time to first token over the completed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FirstToken {
    pub(crate) p50: Nanos,
    pub(crate) p95: Nanos,
    pub(crate) p99: Nanos,
    pub(crate) max: Nanos,
}

#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) requests: usize,
    pub(crate) completed: usize,
    pub(crate) rejected: usize,
    /// A request may be preempted several times.
    pub(crate) preempted: u64,
    /// `None` if no request completed.
    pub(crate) first_token: Option<FirstToken>,
    /// Time in the queue, over the completed requests.
    pub(crate) waited_mean: Nanos,
    pub(crate) waited_max: Nanos,
    /// Mean memory of the blocks over virtual time, in bytes.
    pub(crate) memory_mean: f64,
    pub(crate) memory_peak: u64,
    pub(crate) cost: Cost,
}

#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) played: Played,
    pub(crate) costs: Vec<Cost>,
    /// The cost of all models, with opening and closing of the pools.
    pub(crate) all: Cost,
    /// Empty if time was virtual.
    pub(crate) processes: Vec<Process>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct PolicyFigures {
    #[serde(flatten)]
    pub(crate) all: Figures,
    /// Names and figures, in the order of the workload.
    #[serde(serialize_with = "in_order")]
    pub(crate) models: Vec<(String, Figures)>,
    /// The expected cost, if `--expect` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expected: Option<Expected>,
    /// Empty if time was virtual.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) processes: Vec<Process>,
}

/// A replay's cost that a cost table predicts, beside the measured cost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Expected {
    /// The origin of the table.
    pub(crate) costs: String,
    pub(crate) driver_calls: u64,
    pub(crate) driver_time_ms: f64,
    pub(crate) ratio: Option<f64>,
    pub(crate) by_call: BTreeMap<&'static str, Pair>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pair {
    measured: u64,
    measured_ms: f64,
    expected: u64,
    expected_ms: f64,
}

impl Expected {
    /// Compares the cost of a replay with its cost on the model driver.
    pub(crate) fn new(costs: &str, measured: &Cost, model: &Cost) -> Self {
        let mut by_call = BTreeMap::<_, Pair>::new();
        for (call, &(count, time)) in &measured.by_call {
            let pair = by_call.entry(call.name()).or_default();
            (pair.measured, pair.measured_ms) = (count, in_milliseconds(time));
        }
        for (call, &(count, time)) in &model.by_call {
            let pair = by_call.entry(call.name()).or_default();
            (pair.expected, pair.expected_ms) = (count, in_milliseconds(time));
        }
        let expected = model.time.as_secs_f64();
        Self {
            costs: costs.to_owned(),
            driver_calls: model.calls,
            driver_time_ms: in_milliseconds(model.time),
            ratio: (expected > 0.0).then(|| measured.time.as_secs_f64() / expected),
            by_call,
        }
    }
}

impl PolicyFigures {
    pub(crate) fn new(names: &[String], requests: &[Request], granule: u64, run: &Run) -> Self {
        let of = |model: Option<usize>, cost: &Cost| {
            figures(requests, &run.played, granule, model, cost.clone())
        };
        let models = names.iter().zip(&run.costs).enumerate();
        Self {
            models: models
                .map(|(model, (name, cost))| (name.clone(), of(Some(model), cost)))
                .collect(),
            all: of(None, &run.all),
            expected: None,
            processes: run.processes.clone(),
        }
    }
}

fn figures(
    requests: &[Request],
    played: &Played,
    granule: u64,
    model: Option<usize>,
    cost: Cost,
) -> Figures {
    let mut figures = Figures {
        requests: 0,
        completed: 0,
        rejected: 0,
        preempted: 0,
        first_token: None,
        waited_mean: 0,
        waited_max: 0,
        memory_mean: played.timeline.mean(model) * granule as f64,
        memory_peak: played.timeline.peak(model) * granule,
        cost,
    };
    let mut first_tokens = Vec::new();
    let mut waited = 0u128;
    for (request, outcome) in requests.iter().zip(&played.outcomes) {
        if model.is_some_and(|model| model != request.model) {
            continue;
        }
        figures.requests += 1;
        figures.preempted += u64::from(outcome.preempted);
        match outcome.fate {
            Fate::Completed { first_token } => {
                figures.completed += 1;
                first_tokens.push(first_token);
                waited += u128::from(outcome.waited);
                figures.waited_max = figures.waited_max.max(outcome.waited);
            }
            Fate::Rejected => figures.rejected += 1,
            Fate::Unfinished => {}
        }
    }
    figures.waited_mean =
        Nanos::try_from(waited / figures.completed.max(1) as u128).unwrap_or(Nanos::MAX);
    first_tokens.sort_unstable();
    figures.first_token = percentiles(&first_tokens);
    figures
}

/// Returns nearest-rank percentiles of sorted values: the smallest value that at least the given
/// percentage of the values do not exceed. Returns `None` without values.
fn percentiles(sorted: &[Nanos]) -> Option<FirstToken> {
    let rank = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
    let max = *sorted.last()?;
    Some(FirstToken {
        p50: rank(50),
        p95: rank(95),
        p99: rank(99),
        max,
    })
}

/// A model that does worse under elastic, and its worse figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Loss {
    pub(crate) model: String,
    pub(crate) how: String,
}

/// Returns the models that lose under elastic: with a longer time to first token at the median or
/// at p99, or with fewer completed requests.
pub(crate) fn losses(split: &PolicyFigures, elastic: &PolicyFigures) -> Vec<Loss> {
    let mut losses = Vec::new();
    for ((model, before), (_, after)) in split.models.iter().zip(&elastic.models) {
        let mut how = Vec::new();
        if let (Some(before), Some(after)) = (before.first_token, after.first_token) {
            for (name, before, after) in [
                ("p50", before.p50, after.p50),
                ("p99", before.p99, after.p99),
            ] {
                if after > before {
                    let (before, after) = (milliseconds(before), milliseconds(after));
                    how.push(format!(
                        "{name} time to first token {after:.1} ms instead of {before:.1} ms"
                    ));
                }
            }
        }
        if after.completed < before.completed {
            how.push(format!(
                "{} completed instead of {}",
                counted(after.completed as u64, "request"),
                before.completed
            ));
        }
        if !how.is_empty() {
            losses.push(Loss {
                model: model.clone(),
                how: how.join(", "),
            });
        }
    }
    losses
}

/// Divides the p99 time to first token of a policy by another's, over all requests.
pub(crate) fn p99_ratio(one: &PolicyFigures, other: &PolicyFigures) -> Option<f64> {
    let (before, after) = (one.all.first_token?, other.all.first_token?);
    (after.p99 > 0).then(|| before.p99 as f64 / after.p99 as f64)
}

/// Converts a time to milliseconds, rounded to the microsecond.
pub(crate) fn milliseconds(time: Nanos) -> f64 {
    (time as f64 / 1e3).round() / 1e3
}

fn in_milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Serialize for Figures {
    /// Writes the keys of the JSON output, for a policy and for each of its models.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let first_token =
            |pick: fn(FirstToken) -> Nanos| json!(self.first_token.map(pick).map(milliseconds));
        serializer.collect_map([
            ("requests", json!(self.requests)),
            ("completed", json!(self.completed)),
            ("rejected", json!(self.rejected)),
            ("preempted", json!(self.preempted)),
            ("ttft_p50_ms", first_token(|ttft| ttft.p50)),
            ("ttft_p95_ms", first_token(|ttft| ttft.p95)),
            ("ttft_p99_ms", first_token(|ttft| ttft.p99)),
            ("ttft_max_ms", first_token(|ttft| ttft.max)),
            ("wait_mean_ms", json!(milliseconds(self.waited_mean))),
            ("wait_max_ms", json!(milliseconds(self.waited_max))),
            ("mean_bytes", json!(self.memory_mean.round() as u64)),
            ("peak_bytes", json!(self.memory_peak)),
            ("driver_calls", json!(self.cost.calls)),
            ("driver_time_ms", json!(in_milliseconds(self.cost.time))),
            ("verified_stamps", json!(self.cost.verified.stamps)),
            ("wrong_stamps", json!(self.cost.verified.wrong)),
        ])
    }
}

/// Writes entries as a map in their order.
pub(super) fn in_order<K: Serialize, V: Serialize, S: Serializer>(
    entries: &[(K, V)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(key, value)| (key, value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::simulate::Outcome;
    use crate::replay::timeline::Timeline;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let sorted: Vec<Nanos> = (1..=200).collect();
        let expected = FirstToken {
            p50: 100,
            p95: 190,
            p99: 198,
            max: 200,
        };
        assert_eq!(percentiles(&sorted), Some(expected));
        assert_eq!(
            percentiles(&[7]),
            Some(FirstToken {
                p50: 7,
                p95: 7,
                p99: 7,
                max: 7
            })
        );
        assert_eq!(percentiles(&[]), None);
    }

    fn policy(first_tokens: &[(usize, Option<Nanos>)]) -> PolicyFigures {
        let request = |&(model, _): &(usize, _)| Request {
            model,
            arrival: 0,
            context: 1,
            generated: 1,
        };
        let requests: Vec<_> = first_tokens.iter().map(request).collect();
        let outcome = |&(_, first_token): &(usize, Option<Nanos>)| Outcome {
            fate: first_token.map_or(Fate::Rejected, |first_token| Fate::Completed {
                first_token,
            }),
            preempted: 1,
            waited: 4,
        };
        let outcomes = first_tokens.iter().map(outcome).collect();
        let played = Played {
            outcomes,
            timeline: Timeline::new(2),
            waiting: Timeline::new(2),
        };
        let names = ["a".to_owned(), "b".to_owned()];
        let run = Run {
            played,
            costs: vec![Cost::default(); 2],
            all: Cost::default(),
            processes: Vec::new(),
        };
        PolicyFigures::new(&names, &requests, 2, &run)
    }

    #[test]
    fn counts_are_by_model_and_in_all() {
        let figures = policy(&[(0, Some(5)), (1, None), (1, Some(9))]);
        let counts = |figures: &Figures| {
            (
                figures.requests,
                figures.completed,
                figures.rejected,
                figures.preempted,
            )
        };
        assert_eq!(counts(&figures.all), (3, 2, 1, 3));
        assert_eq!(counts(&figures.models[0].1), (1, 1, 0, 1));
        assert_eq!(counts(&figures.models[1].1), (2, 1, 1, 2));
        assert_eq!(figures.all.waited_mean, 4);
        assert_eq!(figures.all.first_token.map(|ttft| ttft.max), Some(9));
    }

    #[test]
    fn a_model_that_waits_longer_or_completes_less_is_named() {
        let split = policy(&[(0, Some(5_000_000)), (1, Some(7_000_000))]);
        assert_eq!(losses(&split, &split), []);
        let slower = policy(&[(0, Some(4_000_000)), (1, Some(8_000_000))]);
        let named = losses(&split, &slower);
        assert_eq!(named.len(), 1);
        assert_eq!(named[0].model, "b");
        assert!(
            named[0]
                .how
                .contains("p99 time to first token 8.0 ms instead of 7.0 ms"),
            "{}",
            named[0].how
        );
        let fewer = policy(&[(0, None), (1, Some(7_000_000))]);
        assert_eq!(
            losses(&split, &fewer)[0].how,
            "0 requests completed instead of 1"
        );
        assert_eq!(p99_ratio(&split, &slower), Some(7.0 / 8.0));
    }
}
