//! Plans as TOML files. `docs/plan.md` says how they are written.

use std::path::Path;

use anyhow::anyhow;
use serde::Deserialize;
use toml::Spanned;

use cuvmm_command::command::usage;
use cuvmm_command::files;
use cuvmm_command::terminal::shown;

use super::run::Wrong;
use super::step::Step;

/// The steps of a plan, with their lines.
#[derive(Debug)]
pub(super) struct File {
    name: String,
    pub(super) steps: Vec<Step>,
    lines: Vec<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    step: Vec<Spanned<Step>>,
}

impl File {
    /// # Errors
    /// Wrong usage: the file cannot be read or is no plan; the error names the line.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = files::text(path)?;
        Self::parse(shown(path), &text).map_err(|error| usage(error.to_string()))
    }

    fn parse(name: String, text: &str) -> anyhow::Result<Self> {
        let breaks: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let line_of = |offset: usize| 1 + breaks.partition_point(|&at| at < offset);
        let written: Written = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(span.start));
            anyhow!("{name}, line {line}: {}", error.message())
        })?;
        let lines = written.step.iter().map(|step| line_of(step.span().start));
        Ok(Self {
            lines: lines.collect(),
            steps: written.step.into_iter().map(Spanned::into_inner).collect(),
            name,
        })
    }

    /// Makes the error for a wrong step, with its line.
    pub(super) fn wrong(&self, wrong: &Wrong) -> anyhow::Error {
        let line = self.lines.get(wrong.step - 1).copied().unwrap_or(1);
        usage(format!("{}, line {line}: {wrong}", self.name))
    }

    pub(super) fn does(&self, step: usize) -> String {
        let step = step.checked_sub(1).and_then(|index| self.steps.get(index));
        step.map(Step::to_string).unwrap_or_default()
    }

    /// Returns the number of devices that the steps name.
    pub(super) fn devices(&self) -> usize {
        let most = self.steps.iter().filter_map(Step::last_device).max();
        most.unwrap_or(0).saturating_add(1)
    }
}

#[cfg(test)]
mod tests;
