//! Code that the commands `cuvmm` and `cuvmm-bench` share: starting a command and ending it with an
//! exit code, processes of its own, output to a terminal, files, sizes and durations of the command
//! line, the choice of a driver, tables of costs, and clocks.
//!
//! This is not an interface for other programs. It may change in any release; programs use the crate
//! `cuvmm`.

pub mod command;
pub mod costs;
pub mod drivers;
pub mod duration;
pub mod files;
pub mod page;
pub mod signals;
pub mod size;
pub mod stop;
pub mod subprocess;
pub mod terminal;
pub mod watch;
