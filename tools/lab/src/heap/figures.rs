//! The figures of a run, as JSON and as text.

use serde::Serialize;

use super::run;
use super::torch::Modelled;
use cuvmm_command::page::Page;
use cuvmm_command::size::iec as size;
use cuvmm_command::terminal::counted;

/// The figures of a run. The keys are a stable interface; further keys may be added.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    driver: &'static str,
    #[serde(flatten)]
    terms: Terms,
    operations: u64,
    peak_live_bytes: u64,
    peak_held_bytes: u64,
    /// Peak held over peak live.
    ratio: f64,
    mappings: u64,
    stitches: u64,
    stream_waits: u64,
    driver_calls: u64,
    /// `None` where the driver's time is not modelled.
    driver_us_per_operation: Option<f64>,
    /// The time of the whole run. `None` on the model.
    us_per_operation: Option<f64>,
    failed: u64,
    smallest_limit_bytes: Option<u64>,
    /// PyTorch's native allocator, modelled.
    native: Modelled,
    /// PyTorch's expandable segments, modelled.
    expandable: Modelled,
}

#[derive(Debug, Serialize)]
pub(super) struct Terms {
    /// The law of the trace, and its seed. `None` if the trace was read from a file.
    pub(super) law: Option<String>,
    pub(super) seed: Option<u64>,
    pub(super) preset: String,
    /// `None` if the device's memory is the limit.
    pub(super) limit_bytes: Option<u64>,
}

/// Divides by at least 1.
fn over(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

impl Figures {
    pub(super) fn new(
        terms: Terms,
        outcome: &run::Outcome,
        smallest_limit_bytes: Option<u64>,
        [native, expandable]: [Modelled; 2],
    ) -> Self {
        let stats = &outcome.stats;
        let operations = outcome.operations;
        let per_operation =
            |time: std::time::Duration| time.as_secs_f64() * 1e6 / operations.max(1) as f64;
        Self {
            driver: outcome.driver,
            terms,
            operations,
            peak_live_bytes: stats.peak_live,
            peak_held_bytes: stats.peak_held,
            ratio: over(stats.peak_held, stats.peak_live),
            mappings: stats.mapped,
            stitches: stats.stitches,
            stream_waits: stats.stream_waits,
            driver_calls: outcome.driver_calls,
            driver_us_per_operation: outcome.driver_time.map(per_operation),
            us_per_operation: outcome.time.map(per_operation),
            failed: outcome.failed,
            smallest_limit_bytes,
            native,
            expandable,
        }
    }

    pub(super) fn text(&self) -> String {
        let origin = match (&self.terms.law, self.terms.seed) {
            (Some(law), Some(seed)) => format!(" made by `{law}` from seed {seed}"),
            _ => String::new(),
        };
        let mut text = format!(
            "{}{origin}, at most {} live\n",
            counted(self.operations, "operation"),
            size(self.peak_live_bytes)
        );
        let head = ["", "heap", "PyTorch, native", "PyTorch, expandable"];
        let mut table = Page::Narrow.table(&head, |column| column > 0);
        let models = [&self.native, &self.expandable];
        let mut row = |name: &str, own: String, of: &dyn Fn(&Modelled) -> String| {
            let modelled = models.map(of);
            table.add_row([vec![name.to_owned(), own], modelled.to_vec()].concat());
        };
        row("peak held", size(self.peak_held_bytes), &|model| {
            size(model.peak_held_bytes)
        });
        row("held over live", format!("{:.3}", self.ratio), &|model| {
            format!("{:.3}", model.ratio)
        });
        if self.smallest_limit_bytes.is_some() {
            let limit = |limit: Option<u64>, live| match limit {
                Some(limit) => format!("{:.3}", over(limit, live)),
                None => "none".to_owned(),
            };
            let own = limit(self.smallest_limit_bytes, self.peak_live_bytes);
            row("smallest limit over live", own, &|model| {
                limit(model.smallest_limit_bytes, model.peak_live_bytes)
            });
        }
        row("driver calls", self.driver_calls.to_string(), &|model| {
            model.driver_calls.to_string()
        });
        let time = |us: f64| format!("{us:.2}");
        let own = self.driver_us_per_operation.map_or_else(String::new, time);
        row("driver us an operation", own, &|model| {
            time(model.driver_us_per_operation)
        });
        row("failed", self.failed.to_string(), &|model| {
            model.failed.to_string()
        });
        text += &format!("{table}\n");
        text +=
            "The columns of PyTorch are of models of its allocators, with the table of costs.\n";
        text += &format!(
            "The heap: mappings {}, stitches {}, stream waits {}.\n",
            self.mappings, self.stitches, self.stream_waits
        );
        if let Some(time) = self.us_per_operation {
            text += &format!("An operation took {time:.2} us in all.\n");
        }
        Page::Narrow.fold(&text)
    }
}
