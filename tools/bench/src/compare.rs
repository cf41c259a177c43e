//! `cuvmm-bench compare`: the rows of two builds, from the files of several runs of each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cuvmm_command::command::usage;
use cuvmm_command::files;
use cuvmm_command::page::Page;
use cuvmm_command::terminal::{self, counted, print, safe};
use serde::{Deserialize, Serialize};

use crate::bench::Samples;

/// Compare the rows of two builds, measured by several runs of each
///
/// The cost of a row in a run is its median over its baseline's, or its median if there is no
/// baseline. The quotient of a row is the median of the new build's costs over the old one's. A row is
/// above the bound if its quotient is, and each of its new costs is larger than each old one. The exit
/// code is 1 if a row is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example, with two builds on one machine, in turns:
  for turn in 1 2 3; do
    old/cuvmm-bench run --json >old-$turn.json
    new/cuvmm-bench run --json >new-$turn.json
  done
  new/cuvmm-bench compare --old old-*.json --new new-*.json")]
pub(crate) struct Args {
    /// Files that `run --json` of the old build printed, one for each run
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    old: Vec<PathBuf>,

    /// Those of the new build
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    new: Vec<PathBuf>,

    /// The quotient above which a row is named
    #[arg(long, value_name = "QUOTIENT", default_value_t = 1.05)]
    bound: f64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print all rows, and not only those with a quotient above the bound
    #[arg(short, long)]
    verbose: bool,
}

impl Args {
    /// # Errors
    /// A file cannot be read or is not of such a run, or the runs are not of one device.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        if !self.bound.is_finite() || self.bound <= 0.0 {
            return Err(usage("--bound: a quotient is larger than 0, such as 1.05"));
        }
        let read = |paths: &[PathBuf]| paths.iter().map(|path| Run::read(path)).collect();
        let (old, new): (anyhow::Result<Vec<Run>>, _) = (read(&self.old), read(&self.new));
        let comparison = Comparison::of(&old?, &new?, self.bound)?;
        match self.json {
            true => print(&terminal::json(&comparison)?)?,
            false => print(&comparison.text(Page::verbose(self.verbose)))?,
        }
        Ok(match comparison.above.is_empty() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        })
    }
}

/// A run, of whose JSON only this is read.
#[derive(Debug, Deserialize)]
struct Run {
    driver: String,
    device: String,
    quick: bool,
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Row {
    name: String,
    p50_ns: f64,
    baseline_p50_ns: f64,
}

impl Run {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let run = serde_json::from_str(&files::text(path)?);
        run.map_err(|error| {
            let what = format!("this is not the output of `cuvmm-bench run --json`: {error}");
            files::wrong(path, what)
        })
    }
}

impl Row {
    fn cost(&self) -> f64 {
        match self.baseline_p50_ns > 0.0 {
            true => self.p50_ns / self.baseline_p50_ns,
            false => self.p50_ns,
        }
    }
}

/// The rows that both builds have. The keys are those of `--json`.
#[derive(Debug, Serialize)]
struct Comparison {
    driver: String,
    device: String,
    quick: bool,
    bound: f64,
    /// The median of all quotients.
    quotient: f64,
    rows: Vec<Compared>,
    above: Vec<String>,
    only_old: BTreeSet<String>,
    only_new: BTreeSet<String>,
}

/// A row's costs in the order of size, and the quotient of their medians: `None` if the old one is 0.
#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    old: Vec<f64>,
    new: Vec<f64>,
    quotient: Option<f64>,
}

impl Compared {
    fn of(name: &str, old: &[f64], new: &[f64]) -> Self {
        let sorted = |costs: &[f64]| {
            let mut costs = costs.to_vec();
            costs.sort_unstable_by(f64::total_cmp);
            costs
        };
        let (before, now) = (median(old), median(new));
        Self {
            name: name.to_owned(),
            old: sorted(old),
            new: sorted(new),
            quotient: (before > 0.0).then(|| now / before),
        }
    }

    fn exceeds(&self, bound: f64) -> bool {
        match self.quotient {
            Some(quotient) => quotient > bound,
            None => self.new.last() > self.old.last(),
        }
    }

    /// Returns `true` if each new cost is larger than each old one.
    fn is_apart(&self) -> bool {
        self.new.first() > self.old.last()
    }
}

impl Comparison {
    fn of(old: &[Run], new: &[Run], bound: f64) -> anyhow::Result<Self> {
        let runs: Vec<&Run> = old.iter().chain(new).collect();
        let (driver, device) = match runs.first() {
            Some(first) => (first.driver.clone(), first.device.clone()),
            None => return Err(usage("there is no run to compare")),
        };
        for run in &runs {
            if run.driver != driver || run.device != device {
                return Err(usage(format!(
                    "runs of one device can be compared, and these are of {} on {} and of {} on {}",
                    safe(&device),
                    safe(&driver),
                    safe(&run.device),
                    safe(&run.driver)
                )));
            }
        }
        let (before, now) = (costs(old), costs(new));
        let rows: Vec<Compared> = before
            .iter()
            .filter_map(|(name, old)| Some(Compared::of(name, old, now.get(name)?)))
            .collect();
        let above = rows
            .iter()
            .filter(|row| row.exceeds(bound) && row.is_apart());
        let only = |these: &Costs<'_>, others: &Costs<'_>| {
            let names = these.keys().filter(|name| !others.contains_key(*name));
            names.map(|&name| name.to_owned()).collect()
        };
        let quotients: Vec<f64> = rows.iter().filter_map(|row| row.quotient).collect();
        Ok(Self {
            quick: runs.iter().any(|run| run.quick),
            quotient: median(&quotients),
            above: above.map(|row| row.name.clone()).collect(),
            only_old: only(&before, &now),
            only_new: only(&now, &before),
            driver,
            device,
            bound,
            rows,
        })
    }

    fn text(&self, page: Page) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write_text(&mut text, page);
        page.fold(&text)
    }

    fn write_text(&self, text: &mut String, page: Page) -> std::fmt::Result {
        let Self { bound, .. } = self;
        let few = if self.quick { ", with few samples" } else { "" };
        writeln!(
            text,
            "{} on {}{few}",
            safe(&self.device),
            safe(&self.driver)
        )?;
        let exceeding = self.rows.iter().filter(|row| row.exceeds(*bound)).count();
        if page.is_verbose() || exceeding > 0 {
            writeln!(text, "\n{}", self.table(page))?;
        }
        writeln!(
            text,
            "\n{} of both builds, median quotient {:.3}; {} above {bound}, {} more whose runs overlap",
            counted(self.rows.len() as u64, "row"),
            self.quotient,
            self.above.len(),
            exceeding - self.above.len()
        )?;
        for (names, which) in [(&self.only_old, "old"), (&self.only_new, "new")] {
            if !names.is_empty() {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                writeln!(
                    text,
                    "Only in runs of the {which} build: {}",
                    safe(&names.join(", "))
                )?;
            }
        }
        Ok(())
    }

    fn table(&self, page: Page) -> comfy_table::Table {
        let head = ["row", "old", "new", "quotient", ""];
        let mut table = page.table(&head, |column| matches!(column, 1..=3));
        for row in &self.rows {
            let exceeds = row.exceeds(self.bound);
            if !exceeds && !page.is_verbose() {
                continue;
            }
            table.add_row([
                safe(&row.name).to_string(),
                range(&row.old),
                range(&row.new),
                row.quotient
                    .map_or_else(|| "-".to_owned(), |it| format!("{it:.3}")),
                match (exceeds, row.is_apart()) {
                    (true, true) => "above",
                    (true, false) => "runs overlap",
                    (false, _) => "",
                }
                .to_owned(),
            ]);
        }
        table
    }
}

type Costs<'a> = BTreeMap<&'a str, Vec<f64>>;

/// Returns each row's costs in the runs that have it.
fn costs(runs: &[Run]) -> Costs<'_> {
    let mut costs = Costs::new();
    for row in runs.iter().flat_map(|run| &run.rows) {
        costs.entry(&row.name).or_default().push(row.cost());
    }
    costs
}

fn median(values: &[f64]) -> f64 {
    values.iter().copied().collect::<Samples>().median()
}

/// Returns the median of sorted costs, and the least and the most if they differ.
fn range(costs: &[f64]) -> String {
    match (costs, median(costs)) {
        ([least, .., most], middle) => format!("{middle:.4} ({least:.4}-{most:.4})"),
        (_, middle) => format!("{middle:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rows: &[(&str, f64, f64)]) -> Run {
        let rows = rows.iter().map(|&(name, p50_ns, baseline_p50_ns)| Row {
            name: name.to_owned(),
            p50_ns,
            baseline_p50_ns,
        });
        Run {
            driver: "model".to_owned(),
            device: "GPU".to_owned(),
            quick: false,
            rows: rows.collect(),
        }
    }

    #[test]
    fn a_row_is_above_if_all_its_new_costs_are_larger() {
        let old = [
            run(&[
                ("slower", 10.0, 10.0),
                ("varies", 10.0, 10.0),
                ("faster", 9.0, 0.0),
            ]),
            run(&[
                ("slower", 12.0, 10.0),
                ("varies", 20.0, 10.0),
                ("faster", 8.0, 0.0),
            ]),
        ];
        let new = [
            run(&[
                ("slower", 13.0, 10.0),
                ("varies", 15.0, 10.0),
                ("faster", 4.0, 0.0),
            ]),
            run(&[
                ("slower", 26.0, 20.0),
                ("varies", 40.0, 10.0),
                ("faster", 4.0, 0.0),
            ]),
        ];
        let found = Comparison::of(&old, &new, 1.05).unwrap();
        assert_eq!(found.above, ["slower"]);
        let row = |name| found.rows.iter().find(|row| row.name == name).unwrap();
        // The same time over a baseline of twice the time is half the cost.
        assert_eq!(row("slower").new, [1.3, 1.3]);
        assert_eq!(row("slower").quotient, Some(1.3));
        assert!(row("varies").exceeds(1.05) && !row("varies").is_apart());
        assert_eq!(row("faster").quotient, Some(0.5));
        assert_eq!(found.quotient, 1.3);
        let text = found.text(Page::Narrow);
        assert!(
            text.contains("3 rows of both builds, median quotient 1.300"),
            "{text}"
        );
        assert!(
            text.contains("1 above 1.05, 1 more whose runs overlap"),
            "{text}"
        );
        assert!(!text.contains("faster"), "{text}");
        assert!(found.text(Page::Verbose).contains("faster"));
    }

    #[test]
    fn a_cost_of_nothing_has_no_quotient_and_may_not_grow() {
        let old = [run(&[("calls", 0.0, 0.0), ("none", 0.0, 0.0)])];
        let new = [run(&[("calls", 1.0, 0.0), ("none", 0.0, 0.0)])];
        let found = Comparison::of(&old, &new, 1.05).unwrap();
        assert_eq!(found.above, ["calls"]);
        assert!(found.rows.iter().all(|row| row.quotient.is_none()));
    }

    #[test]
    fn rows_of_one_build_are_named() {
        let found = Comparison::of(
            &[run(&[("a", 1.0, 1.0), ("b", 1.0, 1.0)])],
            &[run(&[("b", 1.0, 1.0), ("c", 1.0, 1.0)])],
            1.05,
        );
        let text = found.unwrap().text(Page::Narrow);
        assert!(
            text.contains("Only in runs of the old build: a\n"),
            "{text}"
        );
        assert!(
            text.contains("Only in runs of the new build: c\n"),
            "{text}"
        );
    }

    #[test]
    fn runs_of_two_devices_are_refused() {
        let mut other = run(&[]);
        other.device = "another GPU".to_owned();
        let error = Comparison::of(&[run(&[])], &[other], 1.05).unwrap_err();
        assert!(
            error.to_string().contains("another GPU on model"),
            "{error}"
        );
    }
}
