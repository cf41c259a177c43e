//! Running a program and counting its instructions between marks, where the system supports it.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod steps;

use std::path::Path;

use anyhow::Result;

/// The result of tracing a program.
#[derive(Debug)]
pub(crate) enum Stretches {
    /// The instructions in each stretch, marks included.
    Counted(Vec<u64>),
    /// The program may not be traced, with the reason.
    Refused(String),
}

/// Runs a program to its end.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn trace(program: &Path, arguments: &[String]) -> Result<Stretches> {
    steps::stay_on_one_core();
    steps::trace(program, arguments)
}

/// Returns that the program cannot be traced on this platform.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) fn trace(_: &Path, _: &[String]) -> Result<Stretches> {
    let why = "instructions are counted on Linux on x86-64 only";
    Ok(Stretches::Refused(why.to_owned()))
}
