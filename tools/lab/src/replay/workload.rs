//! The workload of a replay: the requests of all models in the order of arrival, read from traces
//! or generated.
//!
//! The generated workload has two bursty services, which are quiet most of the time and busy at
//! different times. An even split of the memory serves such a load badly. Equal seeds give equal
//! requests.

use std::path::PathBuf;

use anyhow::bail;
use rand::SeedableRng;
use rand_distr::{Distribution, Exp, LogNormal, Uniform};
use rand_pcg::Pcg64Mcg;

use super::settings::Nanos;
use super::simulate::Request;
use super::trace::{self, Row};
use cuvmm_command::files;

/// The size limit of a trace in bytes: about 90 million requests.
const MOST_TRACE: u64 = 4 << 30;

#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// The names, in the order of the command line.
    pub(crate) models: Vec<String>,
    /// The requests in the order of arrival; of equal arrivals, in the order of the models and of
    /// the traces.
    pub(crate) requests: Vec<Request>,
}

impl Workload {
    /// Lets the requests arrive `factor` times as fast. Their sizes stay.
    pub(crate) fn faster(mut self, factor: f64) -> Self {
        if factor != 1.0 {
            for request in &mut self.requests {
                request.arrival = (request.arrival as f64 / factor) as Nanos;
            }
        }
        self
    }
}

/// Reads one trace per model.
///
/// # Errors
/// Wrong usage: a file that cannot be read or is not a trace. Also traces whose arrivals are more
/// than 64 bits of nanoseconds apart.
pub(crate) fn from_traces(traces: &[(String, PathBuf)]) -> anyhow::Result<Workload> {
    let mut rows = Vec::new();
    for (model, (_, path)) in traces.iter().enumerate() {
        let bytes = files::bytes(path, MOST_TRACE)?;
        let trace = trace::read(&bytes).map_err(|error| files::wrong(path, error))?;
        rows.extend(trace.into_iter().map(|row| (model, row)));
    }
    let models = traces.iter().map(|(name, _)| name.clone()).collect();
    Ok(Workload {
        models,
        requests: in_order(rows)?,
    })
}

fn in_order(mut rows: Vec<(usize, Row)>) -> anyhow::Result<Vec<Request>> {
    rows.sort_by_key(|(_, row)| row.arrival_ns);
    let start = rows.first().map_or(0, |(_, row)| row.arrival_ns);
    rows.into_iter()
        .map(|(model, row)| {
            let Ok(arrival) = u64::try_from(row.arrival_ns - start) else {
                bail!("the traces are more than 584 years apart");
            };
            Ok(Request {
                model,
                arrival,
                context: row.context,
                generated: row.generated,
            })
        })
        .collect()
}

struct Service {
    name: &'static str,
    /// Requests per second in a quiet and in a busy phase.
    rates: [f64; 2],
    /// Mean length of a quiet and of a busy phase in seconds. Each phase is up to a fifth longer or
    /// shorter.
    phases: [f64; 2],
    /// Start of the first busy phase, in seconds.
    first_busy: f64,
    /// Median and spread (sigma of the logarithm) of the tokens of context.
    context: (f64, f64),
    /// Median and spread of the tokens to generate.
    generated: (f64, f64),
}

/// The length of the generated workload, in seconds of virtual time.
const SPAN: f64 = 600.0;

/// The most tokens of context, and the most tokens to generate, of a generated request.
const LONGEST: f64 = 6_000.0;

const SERVICES: [Service; 2] = [
    Service {
        name: "chat",
        rates: [1.0, 6.0],
        phases: [60.0, 25.0],
        first_busy: 20.0,
        context: (700.0, 0.8),
        generated: (220.0, 0.6),
    },
    Service {
        name: "code",
        rates: [1.5, 9.0],
        phases: [60.0, 25.0],
        first_busy: 60.0,
        context: (1_600.0, 0.7),
        generated: (60.0, 0.8),
    },
];

/// Generates the requests of two bursty services. Equal seeds give equal requests.
///
/// # Errors
/// None in practice: the parameters of the distributions are constants.
pub(crate) fn generated(seed: u64) -> anyhow::Result<Workload> {
    let mut requests = Vec::new();
    for (model, service) in SERVICES.iter().enumerate() {
        // Each service has its own random stream, so that adding a service does not change the
        // others.
        let mut random = Pcg64Mcg::seed_from_u64(seed ^ ((model as u64) << 32));
        let log_normal = |(median, spread): (f64, f64)| LogNormal::new(median.ln(), spread);
        let context = log_normal(service.context)?;
        let generated = log_normal(service.generated)?;
        let (mut now, mut phase, mut phase_end) = (0.0, 0, service.first_busy);
        while now < SPAN {
            if now >= phase_end {
                phase = 1 - phase;
                phase_end =
                    now + service.phases[phase] * Uniform::new(0.8, 1.2)?.sample(&mut random);
            }
            let next = now + Exp::new(service.rates[phase])?.sample(&mut random);
            if next >= phase_end {
                // Arrivals are memoryless: draw again from the start of the next phase.
                now = phase_end;
                continue;
            }
            now = next;
            requests.push(Request {
                model,
                arrival: (now * 1e9) as Nanos,
                context: context.sample(&mut random).clamp(1.0, LONGEST) as u32,
                generated: generated.sample(&mut random).clamp(1.0, LONGEST) as u32,
            });
        }
    }
    requests.sort_by_key(|request| request.arrival);
    let models = SERVICES
        .iter()
        .map(|service| service.name.to_owned())
        .collect();
    Ok(Workload { models, requests })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_does_not() {
        let one = generated(1).unwrap();
        assert_eq!(one.requests, generated(1).unwrap().requests);
        assert_ne!(one.requests, generated(2).unwrap().requests);
    }

    #[test]
    fn generated_requests_are_in_order_and_of_both_services() {
        let workload = generated(7).unwrap();
        assert_eq!(workload.models, ["chat", "code"]);
        assert!(
            workload
                .requests
                .is_sorted_by_key(|request| request.arrival)
        );
        for model in 0..2 {
            assert!(
                workload
                    .requests
                    .iter()
                    .filter(|request| request.model == model)
                    .count()
                    > 500
            );
        }
        assert!(
            workload
                .requests
                .iter()
                .all(|request| request.context >= 1 && request.generated >= 1)
        );
    }

    #[test]
    fn a_load_moves_arrivals_and_keeps_their_order_and_sizes() {
        let workload = generated(3).unwrap();
        let faster = workload.clone().faster(4.0);
        assert!(faster.requests.is_sorted_by_key(|request| request.arrival));
        for (one, other) in workload.requests.iter().zip(&faster.requests) {
            assert_eq!(other.arrival, one.arrival / 4);
            assert_eq!(
                (other.context, other.generated),
                (one.context, one.generated)
            );
        }
        assert_eq!(workload.clone().faster(1.0).requests, workload.requests);
    }

    #[test]
    fn traces_are_merged_by_time_and_counted_from_the_first_arrival() {
        let row = |arrival_ns, context| Row {
            arrival_ns,
            context,
            generated: 1,
        };
        let rows = vec![
            (0, row(1_000, 1)),
            (0, row(1_500, 2)),
            (1, row(1_000, 3)),
            (1, row(900, 4)),
        ];
        let requests = in_order(rows).unwrap();
        let seen: Vec<_> = requests
            .iter()
            .map(|request| (request.arrival, request.context))
            .collect();
        assert_eq!(seen, [(0, 4), (100, 1), (100, 3), (600, 2)]);
        assert!(in_order(vec![(0, row(i128::from(u64::MAX) + 1, 1)), (0, row(0, 1))]).is_err());
    }
}
