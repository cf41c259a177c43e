//! The results, as a table for people and as JSON for programs.

use std::fmt::Write as _;

use bytesize::ByteSize;
use comfy_table::Table;
use serde::Serialize;

use super::kind::{Kind, Whose};
use crate::bench::samples::Samples;
use cuvmm_cli::page::Page;
use cuvmm_cli::terminal::{self, safe};
use cuvmm_cli::watch::in_words;

/// One kind of memory at one size. The keys are a stable interface; others may be added.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Of each rank.
    pub(super) bytes: u64,
    pub(super) memory: &'static str,
    pub(super) registered: &'static str,
    /// Mappings that the whole buffer is.
    pub(super) extents: usize,
    pub(super) n: usize,
    pub(super) p50_ns: f64,
    pub(super) p99_ns: f64,
    pub(super) max_ns: f64,
    /// 10^9 bytes of one rank a second, by the median.
    pub(super) algorithm_gb_per_s: f64,
    /// The rate on the links between the ranks.
    pub(super) bus_gb_per_s: f64,
    /// Bandwidth by that of NCCL's own memory in the same state, medians of the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) vs_nccl: Option<f64>,
}

/// Memory that NCCL did not register, and why.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Refused {
    pub(super) memory: &'static str,
    pub(super) registered: &'static str,
    pub(super) reason: String,
}

/// A whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) nccl: String,
    pub(super) library: String,
    pub(super) driver: String,
    pub(super) device: String,
    pub(super) devices: usize,
    pub(super) rows: Vec<Row>,
    pub(super) refused: Vec<Refused>,
}

impl Row {
    /// The rows of a size. What is held against NCCL's own has it among the measured.
    pub(super) fn of_size(
        bytes: u64,
        ranks: usize,
        measured: &[(Kind, usize, Samples)],
    ) -> Vec<Self> {
        let p50 = |kind: Kind| {
            let found = measured.iter().find(|(other, ..)| *other == kind);
            found.map(|(_, _, samples)| samples.median())
        };
        let row = |(kind, extents, samples): &(Kind, usize, Samples)| {
            let p50_ns = samples.median();
            let algorithm = rate(bytes, p50_ns);
            let theirs = p50(kind.rival()).filter(|_| kind.whose != Whose::Nccl);
            Self {
                bytes,
                memory: kind.memory(),
                registered: kind.how(),
                extents: *extents,
                n: samples.count(),
                p50_ns,
                p99_ns: samples.per_mille(990),
                max_ns: samples.max(),
                algorithm_gb_per_s: algorithm,
                bus_gb_per_s: algorithm * on_the_bus(ranks),
                vs_nccl: theirs
                    .filter(|_| p50_ns > 0.0)
                    .map(|theirs| theirs / p50_ns),
            }
        };
        measured.iter().map(row).collect()
    }
}

/// Bytes in a nanosecond are 10^9 bytes in a second.
fn rate(bytes: u64, nanoseconds: f64) -> f64 {
    if nanoseconds > 0.0 {
        bytes as f64 / nanoseconds
    } else {
        0.0
    }
}

/// How often each byte of an all-reduce goes over a rank's links: there and back, but for its own
/// part.
fn on_the_bus(ranks: usize) -> f64 {
    let ranks = ranks.max(1) as f64;
    2.0 * (ranks - 1.0) / ranks
}

impl Report {
    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(terminal::json(self)?)
    }

    /// Returns the text for people: a line about the run, a table, and what was refused.
    pub(super) fn text(&self, page: Page) -> String {
        let mut text = format!(
            "{} x {} on CUDA {}, NCCL {} ({}), no multicast\n\n{}\n",
            self.devices,
            self.device,
            self.driver,
            self.nccl,
            safe(&self.library),
            table(&self.rows, page)
        );
        for refused in &self.refused {
            let (memory, how) = (refused.memory, refused.registered);
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{memory}, registered {how}: refused, {}",
                safe(&refused.reason)
            );
        }
        page.fold(&text)
    }
}

/// Returns the table of all rows, in its narrow form without the counts of extents and of samples
/// and without the rate on the links.
fn table(rows: &[Row], page: Page) -> Table {
    let verbose = page.is_verbose();
    let mut head = vec![
        "bytes",
        "memory",
        "registered",
        "p50",
        "p99",
        "GB/s",
        "vs NCCL's",
    ];
    if verbose {
        head.extend(["bus GB/s", "extents", "n"]);
    }
    let mut table = page.table(&head, |column| column > 2);
    for row in rows {
        let mut cells = vec![
            ByteSize(row.bytes).display().iec().to_string(),
            row.memory.to_owned(),
            row.registered.to_owned(),
            in_words(row.p50_ns),
            in_words(row.p99_ns),
            format!("{:.1}", row.algorithm_gb_per_s),
            row.vs_nccl
                .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
        ];
        if verbose {
            cells.push(format!("{:.1}", row.bus_gb_per_s));
            cells.push(row.extents.to_string());
            cells.push(row.n.to_string());
        }
        table.add_row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::memory::By;
    use super::*;
    use cuvmm_cli::page::WIDTH;

    fn rows() -> Vec<Row> {
        let of = |whose, registered, ns: f64| {
            let samples: Samples = [ns].into_iter().collect();
            (Kind { whose, registered }, 1, samples)
        };
        let measured = [
            of(Whose::Nccl, None, 100.0),
            of(Whose::Ours, None, 80.0),
            of(Whose::Nccl, Some(By::Extent), 50.0),
            of(Whose::Grown, Some(By::Whole), 100.0),
        ];
        Row::of_size(3000, 4, &measured)
    }

    #[test]
    fn bandwidths_are_those_that_nccl_tests_print() {
        let rows = rows();
        assert_eq!(rows[0].algorithm_gb_per_s, 30.0);
        assert_eq!(rows[0].bus_gb_per_s, 45.0, "2 * 3 / 4");
        assert_eq!(on_the_bus(2), 1.0);
        assert_eq!(on_the_bus(1), 0.0);
        assert_eq!(rate(5, 0.0), 0.0);
    }

    #[test]
    fn each_stands_beside_nccls_own_in_the_same_state() {
        let ratios: Vec<_> = rows().iter().map(|row| row.vs_nccl).collect();
        assert_eq!(ratios, [None, Some(1.25), None, Some(0.5)]);
    }

    fn report() -> Report {
        Report {
            nccl: "2.32.3".to_owned(),
            library: "libnccl.so.2".to_owned(),
            driver: "13.0".to_owned(),
            device: "a GPU".to_owned(),
            devices: 4,
            rows: rows(),
            refused: vec![Refused {
                memory: "grown region",
                registered: "whole",
                reason: "no".to_owned(),
            }],
        }
    }

    #[test]
    fn the_table_says_what_was_refused() {
        let report = report();
        let text = report.text(Page::Narrow);
        assert!(
            text.starts_with("4 x a GPU on CUDA 13.0, NCCL 2.32.3"),
            "{text}"
        );
        assert!(
            text.ends_with("\ngrown region, registered whole: refused, no\n"),
            "{text}"
        );
        assert!(text.contains("1.250"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        assert_eq!(json["rows"][1]["vs_nccl"], 1.25);
        assert_eq!(json["refused"][0]["reason"], "no");
    }

    #[test]
    fn lines_fit_unless_all_columns_are_asked_for() {
        let mut report = report();
        report.library = format!("/{}libnccl.so.2", "a/long/path/".repeat(12));
        report.refused[0].reason = "many words ".repeat(30);
        // Figures as wide as they get.
        for row in &mut report.rows {
            row.bytes = 1023 << 20;
            row.p50_ns = 123_456_789_000.0;
            row.p99_ns = row.p50_ns;
            row.algorithm_gb_per_s = 12_345.6;
        }
        let narrow = report.text(Page::Narrow);
        let widest = narrow.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(WIDTH), "{narrow}");
        // Each row of the table has one line.
        let lines = narrow.lines().filter(|line| line.starts_with('|')).count();
        assert_eq!(lines, 2 + report.rows.len(), "{narrow}");
        let wide = report.text(Page::Verbose);
        for column in ["bus GB/s", "extents", " n "] {
            assert!(!narrow.contains(column) && wide.contains(column), "{wide}");
        }
        assert!(wide.contains(&report.library), "{wide}");
    }
}
