//! Running a program and counting its instructions between marks, where the system supports it.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod steps;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

#[derive(Debug)]
pub(crate) enum Stretches {
    /// The instructions in each stretch, marks included.
    Counted(Vec<u64>),
    /// The program may not be traced, with the reason.
    Refused(String),
}

/// The instructions of a program, as offsets from where it is loaded.
pub(crate) type Visited = BTreeSet<u64>;

/// Runs a program to its end. Adds the instructions that it executes in stretches to `visited`.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn trace(
    program: &Path,
    arguments: &[String],
    visited: Option<&mut Visited>,
) -> Result<Stretches> {
    steps::stay_on_one_core();
    steps::trace(program, arguments, visited)
}

/// Returns that the program cannot be traced on this platform.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) fn trace(_: &Path, _: &[String], _: Option<&mut Visited>) -> Result<Stretches> {
    let why = "instructions are counted on Linux on x86-64 only";
    Ok(Stretches::Refused(why.to_owned()))
}
