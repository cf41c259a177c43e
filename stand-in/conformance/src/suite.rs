//! Running cases on a driver.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Driver, DriverError, DriverKind, Ordinal};

use crate::{Answer, Bench, Case, Isolate, KernelToucher, Manner, Need, all};

/// The bytes that a real driver may keep for itself after a case: page tables, code and the like.
const HOUSEKEEPING: u64 = 64 << 20;

/// The cases to run, and the driver to run them on.
#[derive(Debug)]
pub struct Suite {
    driver: Arc<dyn Driver>,
    kernels: Option<Arc<dyn KernelToucher>>,
    isolate: Option<Isolate>,
    slow: bool,
    filter: String,
    housekeeping: u64,
}

/// A resource that a case left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leak {
    /// The case's name.
    pub case: &'static str,
    /// A description of the resource.
    pub what: String,
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.case, self.what)
    }
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// The answers by case.
    pub answers: BTreeMap<String, String>,
    /// The cases that were skipped, with reasons.
    pub skipped: BTreeMap<String, String>,
    /// The resources that cases left behind.
    pub leaks: Vec<Leak>,
}

impl Suite {
    /// Creates a suite of all cases except the slow ones, on device 0 of a driver.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        let housekeeping = if driver.kind() == DriverKind::Cuda {
            HOUSEKEEPING
        } else {
            0
        };
        Self {
            driver,
            kernels: None,
            isolate: None,
            slow: false,
            filter: String::new(),
            housekeeping,
        }
    }

    /// Sets the kernels, for the cases that need them.
    #[must_use]
    pub fn kernels(mut self, kernels: Option<Arc<dyn KernelToucher>>) -> Self {
        self.kernels = kernels;
        self
    }

    /// Sets the command that starts processes, for the cases that need a separate one.
    #[must_use]
    pub fn isolate(mut self, isolate: Isolate) -> Self {
        self.isolate = Some(isolate);
        self
    }

    /// Includes the slow cases.
    #[must_use]
    pub fn slow(mut self, yes: bool) -> Self {
        self.slow = yes;
        self
    }

    /// Restricts the suite to cases whose name contains a text.
    #[must_use]
    pub fn filter(mut self, text: impl Into<String>) -> Self {
        self.filter = text.into();
        self
    }

    /// Sets the bytes that the driver may keep for itself after a case: by default 0, and 64 MiB
    /// for the real driver.
    #[must_use]
    pub fn housekeeping(mut self, bytes: u64) -> Self {
        self.housekeeping = bytes;
        self
    }

    /// Runs all cases in order, and calls `told` with each answer, or with the reason why there is
    /// none.
    ///
    /// # Errors
    /// Returns an error if the driver refuses calls that every case needs: the number of its
    /// devices, their memory.
    pub fn run(
        &self,
        mut told: impl FnMut(&Case, Result<&str, &str>),
    ) -> Result<Report, DriverError> {
        let two_devices = self.two_devices()?;
        let mut report = Report::default();
        for case in all().filter(|case| case.name().contains(&self.filter)) {
            let answer = match self.hindrance(case, two_devices) {
                Some(reason) => Err(reason),
                None => self.ask(case, &mut report.leaks)?,
            };
            told(case, answer.as_deref().map_err(String::as_str));
            match answer {
                Ok(answer) => report.answers.insert(case.name().to_owned(), answer),
                Err(reason) => report.skipped.insert(case.name().to_owned(), reason),
            };
        }
        Ok(report)
    }

    /// Returns `true` if there are two devices that can access each other's memory.
    fn two_devices(&self) -> Result<bool, DriverError> {
        Ok(self.driver.device_count()? > 1
            && self.driver.can_access_peer(Ordinal(0), Ordinal(1))?
            && self.driver.can_access_peer(Ordinal(1), Ordinal(0))?)
    }

    /// Returns the reason why a case cannot be run here.
    fn hindrance(&self, case: &Case, two_devices: bool) -> Option<String> {
        let comparing = self
            .kernels
            .as_ref()
            .and_then(|kernels| kernels.comparing());
        for need in case.needs() {
            let (met, lack) = match need {
                Need::Memory => (
                    self.driver.kind() != DriverKind::Model,
                    "the model has no memory behind its addresses",
                ),
                Need::Kernels => (self.kernels.is_some(), "there are no kernels to run here"),
                Need::ComparingKernels => (
                    comparing.is_some(),
                    "kernels that compare what they read run on a GPU only",
                ),
                Need::ProgrammaticLaunch => (
                    comparing.is_some_and(|kernels| kernels.is_programmatic()),
                    "no kernel can start before the kernel ahead of it has ended",
                ),
                Need::TwoDevices => (
                    two_devices,
                    "there are no two devices that reach each other",
                ),
            };
            if !met {
                return Some(lack.to_owned());
            }
        }
        if case.is_slow() && !self.slow {
            return Some("slow cases were not requested".to_owned());
        }
        if case.manner() == Manner::Isolated && self.isolate.is_none() {
            let reason = "it needs a separate process, and no command to start one was given";
            return Some(reason.to_owned());
        }
        None
    }

    /// Runs one case. The outer error ends the run, the inner one skips the case.
    fn ask(
        &self,
        case: &'static Case,
        leaks: &mut Vec<Leak>,
    ) -> Result<Result<String, String>, DriverError> {
        if case.manner() == Manner::Isolated
            && let Some(isolate) = &self.isolate
        {
            return Ok(isolate.ask(case));
        }
        let mut bench = Bench::new(Arc::clone(&self.driver), self.kernels.clone())?;
        if let Some(warm) = case.warm {
            // If this fails, the case itself fails too and reports it.
            let _ = warm(&mut bench);
        }
        let before = bench.free_memory()?;
        let answer = (case.ask)(&mut bench).unwrap_or_else(Answer::setup_failed);
        let mut left = bench.give_back();
        let lost = before.saturating_sub(bench.free_memory()?);
        if lost > self.housekeeping {
            left.push(format!("{lost} bytes of device memory did not come back"));
        }
        leaks.extend(left.into_iter().map(|what| Leak {
            case: case.name(),
            what,
        }));
        Ok(Ok(answer.into_string()))
    }
}
