//! The result of a run, as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::Table;
use serde::Serialize;

use super::row::Row;
use super::stage::Skip;
use cuvmm_command::page::Page;
use cuvmm_command::terminal::{self, safe};
use cuvmm_command::watch::in_words;

/// The rows of a run, and the omitted rows. The keys are a stable interface; others may be added.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    driver: &'static str,
    device: String,
    /// The reason for this driver, and its version, for people.
    about: String,
    quick: bool,
    rows: Vec<Row>,
    /// Reasons of the rows that are left out.
    skipped: BTreeMap<String, String>,
    /// The rows among those whose omission is a failure.
    #[serde(skip)]
    failed: Vec<String>,
    #[serde(skip)]
    verbose: bool,
}

impl Report {
    pub(super) const fn new(
        driver: &'static str,
        device: String,
        about: String,
        quick: bool,
        verbose: bool,
    ) -> Self {
        Self {
            driver,
            device,
            about,
            quick,
            rows: Vec::new(),
            skipped: BTreeMap::new(),
            failed: Vec::new(),
            verbose,
        }
    }

    pub(super) fn add(&mut self, row: Row) {
        self.tell(|| {
            let (name, n, p50) = (&row.name, row.n, amount(row.p50_ns, row.unit));
            format!("{name}: {p50} ({n}), baseline {}", baseline(&row))
        });
        self.rows.push(row);
    }

    pub(super) fn skip(&mut self, name: &str, reason: impl Into<String>) {
        let reason = reason.into();
        self.tell(|| format!("{name}: left out, {reason}"));
        self.skipped.insert(name.to_owned(), reason);
    }

    /// Leaves a row out because of an error. [`Skip`] means that the row cannot be measured here;
    /// any other error is a failure of the run.
    pub(super) fn leave_out(&mut self, name: &str, error: &anyhow::Error) {
        if error.is::<Skip>() {
            self.skip(name, error.to_string());
        } else {
            self.skip(name, format!("failed: {}", terminal::chain(error)));
            self.failed.push(name.to_owned());
        }
    }

    /// Returns `true` if a row is there, or named as left out.
    pub(super) fn has(&self, name: &str) -> bool {
        self.skipped.contains_key(name) || self.rows.iter().any(|row| row.name == name)
    }

    pub(super) fn failed(&self) -> &[String] {
        &self.failed
    }

    /// Prints a line on the progress of a run, with `--verbose`.
    fn tell(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            terminal::tell(&line());
        }
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(terminal::json(self)?)
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let page = Page::verbose(self.verbose);
        let _ = self.write_text(&mut text, page);
        page.fold(&text)
    }

    fn write_text(&self, text: &mut String, page: Page) -> std::fmt::Result {
        writeln!(text, "{} on {}", safe(&self.device), safe(&self.about))?;
        if !self.rows.is_empty() {
            writeln!(text, "\n{}", table(&self.rows, page))?;
        }
        let remarks = self.rows.iter().filter_map(remark).collect::<Vec<_>>();
        if page.is_verbose() && !remarks.is_empty() {
            writeln!(text, "\n{}", remarks.join("\n"))?;
        }
        if !self.rows.is_empty() && !page.is_verbose() {
            writeln!(
                text,
                "\nThe ratio is that of p50 and baseline. --verbose prints what each baseline is, and \
                 counts and notes of each row; docs/bench.md describes the rows."
            )?;
        }
        if !self.skipped.is_empty() {
            writeln!(text, "\nLeft out")?;
            for (name, reason) in &self.skipped {
                writeln!(text, "{name}: {}", safe(reason))?;
            }
        }
        Ok(())
    }
}

/// Times are in microseconds in all columns; other figures have their unit beside them.
fn table(rows: &[Row], page: Page) -> Table {
    let mut head = vec!["row", "n", "p50 us", "p99 us", "baseline us", "ratio"];
    if page.is_verbose() {
        head.extend(["max us", "the baseline is"]);
    }
    let mut table = page.table(&head, |column| !matches!(column, 0 | 7));
    for row in rows {
        let mut cells = vec![
            row.name.clone(),
            row.n.to_string(),
            figure(row.p50_ns, row.unit),
            figure(row.p99_ns, row.unit),
            if has_baseline(row) {
                figure(row.baseline_p50_ns, row.unit)
            } else {
                "-".to_owned()
            },
            row.ratio.map_or_else(|| "-".to_owned(), ratio),
        ];
        if page.is_verbose() {
            cells.extend([figure(row.max_ns, row.unit), row.baseline.clone()]);
        }
        table.add_row(cells);
    }
    table
}

fn figure(value: f64, unit: &str) -> String {
    match unit {
        "ns" if value < 1e5 => format!("{:.3}", value / 1e3),
        "ns" => format!("{:.0}", value / 1e3),
        unit => format!("{value} {unit}"),
    }
}

fn remark(row: &Row) -> Option<String> {
    let counts = row
        .counts
        .iter()
        .map(|(what, count)| format!("{what} {count}"));
    let said: Vec<String> = row.note.iter().cloned().chain(counts).collect();
    (!said.is_empty()).then(|| format!("{}: {}", row.name, said.join(", ")))
}

fn amount(value: f64, unit: &str) -> String {
    if unit != "ns" {
        return format!("{value} {unit}");
    }
    in_words(value)
}

/// Returns `false` for a baseline that costs nothing, or could not be measured.
fn has_baseline(row: &Row) -> bool {
    row.ratio.is_some() || row.baseline_p50_ns != 0.0
}

fn baseline(row: &Row) -> String {
    if has_baseline(row) {
        amount(row.baseline_p50_ns, row.unit)
    } else {
        "-".to_owned()
    }
}

fn ratio(ratio: f64) -> String {
    if ratio >= 100.0 || ratio == 0.0 {
        return format!("{ratio:.0}");
    }
    let digits = 2 - ratio.log10().floor() as i32;
    format!("{ratio:.*}", digits.clamp(0, 6) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::samples::Samples;

    fn report() -> Report {
        Report::new(
            "model",
            "model GPU".to_owned(),
            "nothing".to_owned(),
            true,
            false,
        )
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(amount(0.0, "ns"), "0 ns");
        assert_eq!(amount(103.4, "ns"), "103.4 ns");
        assert_eq!(amount(1_234.0, "ns"), "1.23 us");
        assert_eq!(amount(138e6, "ns"), "138.00 ms");
        assert_eq!(amount(2e9, "ns"), "2.00 s");
        assert_eq!(amount(512.0, "bytes"), "512 bytes");
        assert_eq!(ratio(1.0), "1.00");
        assert_eq!(ratio(1.149), "1.15");
        assert_eq!(ratio(12.34), "12.3");
        assert_eq!(ratio(150.4), "150");
        assert_eq!(ratio(0.006_654), "0.00665");
        assert_eq!(ratio(0.0), "0");
    }

    #[test]
    fn a_baseline_without_a_figure_has_none() {
        let one: Samples = [1.0].into_iter().collect();
        let none = Row::new("x", &one, "y", &Samples::default());
        assert_eq!(baseline(&none), "-");
        assert_eq!(baseline(&Row::new("x", &one, "y", &one)), "1 ns");
    }

    #[test]
    fn a_skip_is_no_failure_and_an_error_is() {
        let mut report = report();
        report.leave_out("a", &Skip("no kernels".to_owned()).into());
        assert!(report.failed().is_empty());
        report.leave_out("b", &anyhow::anyhow!("it broke"));
        assert_eq!(report.failed(), ["b"]);
        assert!(report.has("a") && report.has("b") && !report.has("c"));
        assert_eq!(report.skipped["b"], "failed: it broke");
    }

    #[test]
    fn remarks_stand_below_the_table() {
        let mut report = report();
        report.verbose = true;
        let one: Samples = [1.0].into_iter().collect();
        report.add(
            Row::new("x", &one, "y", &one)
                .note("so")
                .count("calls", 3.0),
        );
        report.skip("z", "why");
        let text = report.text();
        assert!(text.contains("\nx: so, calls 3\n"), "{text}");
        assert!(text.contains("\nz: why\n"), "{text}");
    }
}
