//! The figures of a server, as numbers and as tables.

use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{Table, presets};
use hdrhistogram::Histogram;

use super::cache_memory::Held;
use super::prefix::Uses;

const APART: Duration = Duration::from_millis(100);

const SHOWN: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Tokens of answers.
    pub(crate) tokens: u64,
    /// Tokens computed again, with the same result.
    pub(crate) again: u64,
    /// Evictions of requests.
    pub(crate) thrown_out: u64,
    pub(crate) slept: Vec<Duration>,
    pub(crate) woken: Vec<Duration>,
    pub(crate) first: Vec<Duration>,
    pub(crate) prefixes: Vec<Uses>,
    samples: Vec<(Duration, Vec<Sample>)>,
    all: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) held: Held,
    pub(crate) asleep: bool,
    pub(crate) waiting: usize,
    pub(crate) running: usize,
}

impl Figures {
    pub(crate) fn wants_sample(&self, at: Duration) -> bool {
        let last = self.samples.last().map(|&(last, _)| last);
        last.is_none_or(|last| at >= last + APART)
    }

    pub(crate) fn sample(&mut self, at: Duration, models: Vec<Sample>) {
        self.samples.push((at, models));
    }

    pub(crate) fn finish(&mut self, all: Duration) {
        self.all = all;
    }

    pub(crate) fn rate(&self) -> f64 {
        self.tokens as f64 / self.all.as_secs_f64()
    }

    /// Returns the time to the first token that `percentile` percent of the requests do not exceed.
    pub(crate) fn first_token(&self, percentile: f64) -> anyhow::Result<Duration> {
        let mut all = Histogram::<u64>::new(3)?;
        for first in &self.first {
            all.record(first.as_micros().try_into()?)?;
        }
        Ok(Duration::from_micros(all.value_at_percentile(percentile)))
    }

    /// Returns the number of sequences that found their prefix present.
    pub(crate) fn hits(&self) -> u64 {
        self.prefixes.iter().map(|uses| uses.hits).sum()
    }

    /// Returns the most memory in use for weights and caches by all models together.
    fn peak(&self) -> u64 {
        let sum = |(_, models): &(_, Vec<Sample>)| {
            let used = models
                .iter()
                .map(|sample| sample.held.weights + sample.held.caches);
            used.sum::<u64>()
        };
        self.samples.iter().map(sum).max().unwrap_or(0)
    }

    /// Returns the most memory that sequences shared, counted once.
    pub(crate) fn most_shared(&self) -> u64 {
        let sum = |(_, models): &(_, Vec<Sample>)| {
            let shared = models.iter().map(|sample| sample.held.shared);
            shared.sum::<u64>()
        };
        self.samples.iter().map(sum).max().unwrap_or(0)
    }

    /// Prints some samples of each model's memory over time, and the usage of prefixes.
    pub(crate) fn print_models(&self, names: &[&str]) {
        let apart = self.samples.len().div_ceil(SHOWN).max(1);
        for (at, samples) in self.samples.iter().step_by(apart) {
            let of = |(name, sample): (&&str, &Sample)| {
                let Sample {
                    held,
                    asleep,
                    waiting,
                    running,
                } = sample;
                let asleep = if *asleep { ", asleep" } else { "" };
                let shared = match held.shared {
                    0 => String::new(),
                    shared => format!(" ({} shared)", shared >> 20),
                };
                format!(
                    "{name}: weights {} + caches {}{shared} + idle {} MiB, {running} run, {waiting} wait{asleep}",
                    held.weights >> 20,
                    held.caches >> 20,
                    held.idle >> 20,
                )
            };
            let all: Vec<String> = names.iter().zip(samples).map(of).collect();
            println!("  {:6.2} s  {}", at.as_secs_f64(), all.join(" | "));
        }
        for (name, Uses { read, hits }) in names.iter().zip(&self.prefixes) {
            if *read > 0 {
                println!(
                    "  {name}: the system prompt was read {read} times, and found {hits} times"
                );
            }
        }
    }
}

pub(crate) fn table(servers: &[(&str, &Figures)]) -> anyhow::Result<Table> {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "server",
        "requests",
        "tokens",
        "tokens/s",
        "first token p50",
        "p99",
        "thrown out",
        "asleep",
        "prefix hits",
        "most shared",
        "most in use",
    ]);
    for (name, figures) in servers {
        let ms = |percentile| {
            let at = figures.first_token(percentile)?.as_secs_f64() * 1e3;
            anyhow::Ok(format!("{at:.1} ms"))
        };
        table.add_row([
            (*name).to_owned(),
            figures.first.len().to_string(),
            figures.tokens.to_string(),
            format!("{:.0}", figures.rate()),
            ms(50.)?,
            ms(99.)?,
            figures.thrown_out.to_string(),
            figures.slept.len().to_string(),
            figures.hits().to_string(),
            format!("{} MiB", figures.most_shared() >> 20),
            format!("{} MiB", figures.peak() >> 20),
        ]);
    }
    Ok(table)
}

pub(crate) fn median(mut all: Vec<f64>) -> anyhow::Result<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2)
        .copied()
        .context("nothing was measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_rates_are_of_what_was_counted() {
        let mut figures = Figures {
            tokens: 300,
            first: (1..=100).rev().map(Duration::from_millis).collect(),
            prefixes: [4, 5].map(|hits| Uses { read: 1, hits }).to_vec(),
            ..Figures::default()
        };
        figures.finish(Duration::from_secs(2));
        assert_eq!(figures.rate(), 150.);
        for (percentile, ms) in [(50., 50.), (99., 99.), (100., 100.)] {
            let at = figures.first_token(percentile).unwrap().as_secs_f64() * 1e3;
            assert!((at / ms - 1.).abs() < 0.002, "{percentile}: {at} ms");
        }
        let row = table(&[("one", &figures)]).unwrap().to_string();
        assert!(row.contains("one") && row.contains("150"), "{row}");
        assert_eq!(figures.hits(), 9);
        assert_eq!(median(vec![3., 1., 2.]).unwrap(), 2.);
    }

    #[test]
    fn the_peak_is_of_all_models_together_and_leaves_idle_memory_out() {
        let mut figures = Figures::default();
        let sample = |weights, caches| Sample {
            held: Held {
                weights,
                caches,
                shared: caches / 2,
                idle: 100,
            },
            asleep: false,
            waiting: 0,
            running: 0,
        };
        assert!(figures.wants_sample(Duration::ZERO));
        figures.sample(Duration::ZERO, vec![sample(1, 2), sample(3, 4)]);
        assert!(!figures.wants_sample(APART / 2) && figures.wants_sample(APART));
        figures.sample(APART, vec![sample(0, 9), sample(0, 0)]);
        assert_eq!((figures.peak(), figures.most_shared()), (10, 4));
    }
}
