//! Code that the commands `cuvmm` and `cuvmm-bench` share: a command's start and exit code, its own
//! processes, terminal output, files, sizes and durations, the choice of a driver, cost tables, and
//! clocks.
//!
//! Signals and own processes are for Linux.
//!
//! This is not an interface for other programs, which use the crate `cuvmm`. It may change in any
//! release.

pub mod command;
pub mod costs;
pub mod drivers;
pub mod duration;
pub mod files;
pub mod page;
#[cfg(target_os = "linux")]
pub mod signals;
pub mod size;
#[cfg(target_os = "linux")]
pub mod stop;
#[cfg(target_os = "linux")]
pub mod subprocess;
pub mod terminal;
pub mod watch;
