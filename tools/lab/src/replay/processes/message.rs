//! Lines of JSON between a replay and its processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::replay::figures::Cost;
use crate::replay::paged;
use crate::replay::process::Process;
use crate::replay::settings::Settings;
use crate::replay::simulate::{Outcome, Request};
use crate::replay::tenants::Division;
use crate::replay::timeline::Course;

/// The first line to a process: its part of the replay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) index: usize,
    pub(super) models: Vec<String>,
    pub(super) division: Division,
    /// The directory of the ledger; `private` if the last process that leaves it should remove it.
    pub(super) ledger: Option<PathBuf>,
    pub(super) private: bool,
    /// The command-line word of the driver.
    pub(super) driver: String,
    /// The memory in bytes of a driver without a GPU.
    pub(super) capacity: u64,
    /// The cost of calls on the model, as in a file.
    pub(super) costs: String,
    pub(super) device: u32,
    pub(super) settings: Settings,
    pub(super) caches: paged::Options,
    /// Seconds of the trace in one second.
    pub(super) speed: f64,
    pub(super) stamps: bool,
    /// The requests of these models alone.
    pub(super) requests: Vec<Request>,
}

/// The second line to a process: the time at which the first second of the trace begins, in
/// nanoseconds on the [clock](super::paced::since_boot) of all processes. The end of the input ends the process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct StartAt(pub(super) u64);

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// The process waits for the start.
    Ready,
    /// The process lives, and has done this many requests.
    Done(u64),
    Failed(String),
    Ended(Box<Played>),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Played {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) memory: Course,
    pub(super) waiting: Course,
    /// The courses of memory held and of kept blocks, and the blocks evicted by model, if the memory
    /// keeps account of them.
    pub(super) held: Option<(Course, Course, Vec<u64>)>,
    /// Costs of each model, and of all with the opening and closing of the pools.
    pub(super) costs: Vec<Cost>,
    pub(super) all: Cost,
    pub(super) process: Process,
}
