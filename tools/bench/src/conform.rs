//! `cuvmm-bench conform`: asks a driver every question of the conformance suite.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use conformance::{
    Comparison, Isolate, KernelToucher, MachineToucher, PtxToucher, Recording, Report, Suite, find,
    run_in_own_process,
};
use cuvmm::driver::Ordinal;
use serde_json::json;

use crate::stated::{driver_version, today};
use cuvmm_command::drivers::{Choice, Concrete, Opened};
use cuvmm_command::files;
use cuvmm_command::page::Page;
use cuvmm_command::terminal::{self, counted, print, safe};

/// Ask a driver about every rule that the library stands on
///
/// Each case is one question with a short answer. Without --against nothing is judged: the answers
/// are printed. The exit code is 1 if anything differs or a case leaves something behind.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm-bench conform --driver model
  cuvmm-bench conform --driver cuda --slow --record answers.json
  cuvmm-bench conform --driver cuda --against answers.json")]
pub(crate) struct Args {
    /// The driver to ask
    #[arg(long, value_enum, default_value_t)]
    driver: Choice,

    /// Write the answers to a file, with the GPU's name, the driver's version and today's date
    #[arg(long, value_name = "FILE", conflicts_with = "filter")]
    record: Option<PathBuf>,

    /// Compare with the answers in a file, and print what differs
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Only cases whose name contains this text
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,

    /// Also the cases that take many seconds
    #[arg(long)]
    slow: bool,

    /// Print the cases, what each asks and the rule it belongs to, and ask nothing
    #[arg(long, conflicts_with_all = ["record", "against"])]
    list: bool,

    /// Print each answer to standard error as it comes, and the result in lines of any length
    #[arg(short, long)]
    verbose: bool,

    /// Answer one case and end: how cases are run that want a process of their own
    #[arg(long, value_name = "CASE", hide = true)]
    one: Option<String>,
}

impl Args {
    /// # Errors
    /// The driver cannot be opened, or a file cannot be read or written.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        if self.list {
            return self.list();
        }
        let page = Page::verbose(self.verbose);
        // Read first: a wrong file should be found before a long run.
        let recorded = self.against.as_deref().map(recorded).transpose()?;
        if let Some(path) = &self.record {
            files::writable(path)?;
        }
        let opened = self.driver.open()?;
        if let Some(case) = &self.one {
            anyhow::ensure!(find(case).is_some(), "there is no case {case}");
            let kernels = kernels(&opened).ok();
            run_in_own_process(opened.driver, kernels, case)
        }
        let kernels = kernels(&opened);
        let report = self.ask(&opened, kernels.as_ref().ok().map(Arc::clone))?;
        anyhow::ensure!(
            !report.answers.is_empty() || !report.skipped.is_empty(),
            "no case has \"{}\" in its name",
            self.filter
        );
        let recording = recording(&opened, &report)?;
        if let Some(path) = &self.record {
            recording.write(path)?;
        }
        let comparison = recorded.as_ref().map(|recorded| recorded.compare(&report));
        let text = if self.json {
            as_json(&opened, &recording, &report, comparison.as_ref())?
        } else {
            let mut text = as_text(&opened, &recording, &report, comparison.as_ref())?;
            if let Err(reason) = &kernels {
                writeln!(text, "Kernels cannot be run: {reason}")?;
            }
            page.fold(&text)
        };
        print(&text)?;
        let wrong = !report.leaks.is_empty()
            || comparison.is_some_and(|comparison| !comparison.different.is_empty());
        Ok(if wrong {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }

    fn ask(
        &self,
        opened: &Opened,
        kernels: Option<Arc<dyn KernelToucher>>,
    ) -> anyhow::Result<Report> {
        let program = std::env::current_exe().context("this program cannot find itself")?;
        let word = Choice::of(opened.driver.kind()).word();
        let suite = Suite::new(Arc::clone(&opened.driver))
            .kernels(kernels)
            .isolate(Isolate::new(
                program,
                ["conform", "--driver", word, "--one"],
            ))
            .slow(self.slow)
            .filter(&self.filter);
        suite
            .run(|case, answer| {
                if self.verbose {
                    tell(case.name(), answer);
                }
            })
            .context("the driver does not answer what every case needs")
    }

    fn list(&self) -> anyhow::Result<ExitCode> {
        let cases = conformance::all().filter(|case| case.name().contains(&self.filter));
        let text = if self.json {
            let cases: Vec<_> = cases
                .map(|case| {
                    json!({ "case": case.name(), "rule": case.rule(), "about": case.about() })
                })
                .collect();
            terminal::json(&cases)?
        } else {
            let mut text = String::new();
            for case in cases {
                writeln!(
                    text,
                    "{:<50} {:<22} {}",
                    case.name(),
                    case.rule(),
                    case.about()
                )?;
            }
            Page::verbose(self.verbose).fold(&text)
        };
        print(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Reads recorded answers.
///
/// # Errors
/// Wrong usage: the file cannot be read, or holds something else.
fn recorded(path: &Path) -> anyhow::Result<Recording> {
    let read = serde_json::from_str(&files::text(path)?);
    read.map_err(|error| files::wrong(path, format!("this is no recording of answers: {error}")))
}

/// Prints a line, so that the last case of a run that hangs or dies is known.
fn tell(case: &str, answer: Result<&str, &str>) {
    let line = match answer {
        Ok(answer) => format!("{case}: {answer}"),
        Err(reason) => format!("{case}: left out, {reason}"),
    };
    terminal::tell(&line);
}

/// Returns kernels for a driver, or the reason that there are none.
fn kernels(opened: &Opened) -> Result<Arc<dyn KernelToucher>, String> {
    Ok(match &opened.concrete {
        Concrete::Cuda(driver) => {
            Arc::new(PtxToucher::new(Arc::clone(driver)).map_err(|error| error.to_string())?)
        }
        Concrete::Host(driver) => Arc::new(MachineToucher::new(Arc::clone(driver))),
        Concrete::Model(driver) => Arc::new(MachineToucher::new(Arc::clone(driver))),
    })
}

/// Returns the answers with their GPU, driver and date.
fn recording(opened: &Opened, report: &Report) -> anyhow::Result<Recording> {
    let driver = &opened.driver;
    Ok(Recording {
        gpu: driver.device_name(Ordinal(0))?,
        driver_version: driver_version(opened),
        date: today(),
        cuda_version: driver.version()?.to_string(),
        answers: report.answers.clone(),
    })
}

fn as_json(
    opened: &Opened,
    recording: &Recording,
    report: &Report,
    comparison: Option<&Comparison>,
) -> anyhow::Result<String> {
    let mut object = json!({
        "driver": opened.driver.kind().name(),
        "gpu": recording.gpu,
        "driver_version": recording.driver_version,
        "cuda_version": recording.cuda_version,
        "date": recording.date,
        "answers": report.answers,
        "skipped": report.skipped,
        "leaks": report.leaks.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    if let (Some(comparison), Some(fields)) = (comparison, object.as_object_mut()) {
        let different: Vec<_> = comparison
            .different
            .iter()
            .map(|one| json!({ "case": one.case, "recorded": one.recorded, "here": one.here }))
            .collect();
        let compared = json!({
            "same": comparison.same,
            "different": different,
            "not_recorded": comparison.not_recorded,
            "not_asked": comparison.not_asked,
        });
        fields.insert("comparison".to_owned(), compared);
    }
    Ok(terminal::json(&object)?)
}

/// Formats every answer or, with a comparison, the differences.
fn as_text(
    opened: &Opened,
    recording: &Recording,
    report: &Report,
    comparison: Option<&Comparison>,
) -> anyhow::Result<String> {
    let mut text = String::new();
    writeln!(
        text,
        "{}: {}, CUDA {}, by the {} driver ({})\n",
        recording.gpu,
        recording.driver_version,
        recording.cuda_version,
        opened.driver.kind().name(),
        opened.reason
    )?;
    match comparison {
        None => {
            for (case, answer) in &report.answers {
                writeln!(text, "{case:<50} {}", safe(answer))?;
            }
        }
        Some(comparison) => {
            for difference in &comparison.different {
                writeln!(text, "{}", safe(&difference.to_string()))?;
            }
            writeln!(
                text,
                "{} the same, {} different, {} not recorded, {} recorded and not asked here",
                comparison.same,
                comparison.different.len(),
                comparison.not_recorded.len(),
                comparison.not_asked.len()
            )?;
        }
    }
    writeln!(
        text,
        "\n{} answered, {} left out",
        counted(report.answers.len() as u64, "case"),
        report.skipped.len()
    )?;
    let mut reasons = BTreeMap::<&str, Vec<&str>>::new();
    for (case, reason) in &report.skipped {
        reasons.entry(reason).or_default().push(case);
    }
    for (reason, cases) in reasons {
        writeln!(text, "  {reason}: {}", cases.join(", "))?;
    }
    if report.leaks.is_empty() {
        writeln!(text, "Nothing was left behind")?;
    }
    for leak in &report.leaks {
        writeln!(text, "Left behind by {leak}")?;
    }
    Ok(text)
}
