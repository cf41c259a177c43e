//! Running a program and counting its instructions between marks, where the system can.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod steps;

use std::path::Path;

use anyhow::Result;

/// What became of a program.
#[derive(Debug)]
pub(crate) enum Stretches {
    /// Instructions in each stretch, marks included.
    Counted(Vec<u64>),
    /// It may not be traced, and why.
    Refused(String),
}

/// Runs a program to its end.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn trace(program: &Path, arguments: &[String]) -> Result<Stretches> {
    steps::stay_on_one_core();
    steps::trace(program, arguments)
}

/// Runs nothing.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) fn trace(_: &Path, _: &[String]) -> Result<Stretches> {
    let why = "instructions are counted on Linux on x86-64 only";
    Ok(Stretches::Refused(why.to_owned()))
}
