//! `cuvmm replay --processes` on systems without ledgers, where it is refused.

use std::convert::Infallible;

use cuvmm::driver::DriverKind;
use indicatif::ProgressBar;

use super::figures::Run;
use super::options::Args;
use super::policy::Policy;
use super::report::Setup;
use super::workload::Workload;
use cuvmm_command::command::usage;

/// The terms for processes, of which no value exists.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) speed: f64,
    none: Infallible,
}

impl Args {
    /// Returns no terms.
    ///
    /// # Errors
    /// `--processes` is given.
    pub(crate) fn terms(&self, _: DriverKind, _: String) -> anyhow::Result<Option<Terms>> {
        match self.processes {
            true => Err(usage("--processes: ledgers are for Linux")),
            false => Ok(None),
        }
    }
}

/// Plays the workload in processes, which never happens here.
pub(crate) fn play(
    _: Policy,
    _: &Workload,
    _: &Setup,
    terms: &Terms,
    _: &ProgressBar,
) -> anyhow::Result<Run> {
    match terms.none {}
}
