//! The lines of JSON between a replay and its processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::replay::figures::Cost;
use crate::replay::pooled::Division;
use crate::replay::process::Process;
use crate::replay::settings::Settings;
use crate::replay::simulate::{Outcome, Request};
use crate::replay::timeline::Course;

/// The first line to a process: the part that it plays.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// The number of the process.
    pub(super) index: usize,
    /// The models that it plays.
    pub(super) models: Vec<String>,
    pub(super) division: Division,
    /// The directory of the ledger, and whether the last process that leaves it is to remove it.
    pub(super) ledger: Option<PathBuf>,
    pub(super) private: bool,
    /// The word that chooses the driver.
    pub(super) driver: String,
    /// Bytes of memory that a driver without a GPU has.
    pub(super) capacity: u64,
    /// The cost of calls on the model, as a file has it.
    pub(super) costs: String,
    pub(super) device: u32,
    pub(super) settings: Settings,
    /// Seconds of the trace in one second.
    pub(super) speed: f64,
    pub(super) stamps: bool,
    /// The requests of these models alone.
    pub(super) requests: Vec<Request>,
}

/// The second line to a process: when the first second of the trace begins, in nanoseconds since
/// 1970. The end of its input ends the process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct StartAt(pub(super) u64);

/// A line from a process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// It waits for the start.
    Ready,
    /// It lives, and this many requests are done.
    Done(u64),
    Failed(String),
    Ended(Box<Played>),
}

/// The course of a process, and its cost.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Played {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) memory: Course,
    pub(super) waiting: Course,
    /// Of each model, and of all with the opening and closing of the pools.
    pub(super) costs: Vec<Cost>,
    pub(super) all: Cost,
    pub(super) process: Process,
}
