//! A replay in real time: in one process, or in one for each model, under one ledger.
//!
//! From the bottom up: `message` has the lines between processes, `paced` memory in real time,
//! `one` a process, `children` all processes as the command sees them.

mod children;
mod message;
mod one;
mod paced;

use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use cuvmm::driver::DriverKind;
use indicatif::ProgressBar;
use tempfile::TempDir;

use self::children::Children;
use self::message::{Order, Played, Said, StartAt};
use super::figures::{Cost, Run};
use super::options::{Args, Policies};
use super::paged;
use super::policy::Policy;
use super::report::Setup;
use super::simulate::{self, Request};
use super::timeline::{Course, Timeline};
use super::workload::Workload;
use cuvmm_command::command::usage;
use cuvmm_command::drivers::Choice;
use cuvmm_command::stop::Stop;
use cuvmm_command::subprocess::private_directory;

pub use self::one::One;

/// The time between the last process's readiness and the first second of the trace.
const AHEAD: Duration = Duration::from_millis(50);

/// The terms for the processes.
#[derive(Debug)]
pub(crate) struct Terms {
    /// The command-line word of the driver.
    pub(crate) driver: &'static str,
    /// The memory in bytes of a driver without a GPU.
    pub(crate) capacity: u64,
    /// The cost of calls on the model, as in a file.
    pub(crate) costs: String,
    pub(crate) device: u32,
    pub(crate) caches: paged::Options,
    /// The directory of the ledger, by default a private one.
    pub(crate) ledger: Option<PathBuf>,
    /// Seconds of the trace in one second.
    pub(crate) speed: f64,
    /// The longest silence of a process.
    pub(crate) patience: Duration,
    pub(crate) stop: Stop,
}

impl Args {
    /// Returns the terms for processes, if time is real.
    ///
    /// # Errors
    /// Options contradict each other, or signals cannot be handled.
    pub(crate) fn terms(&self, driver: DriverKind, costs: String) -> anyhow::Result<Option<Terms>> {
        if !self.processes {
            return Ok(None);
        }
        if self.policy == Policies::Static {
            return Err(usage(
                "--processes: under --policy static processes share no memory",
            ));
        }
        Ok(Some(Terms {
            driver: Choice::of(driver).word(),
            capacity: self.capacity(),
            costs,
            device: self.device,
            caches: self.caches.clone(),
            ledger: self.ledger.clone(),
            speed: self.speed.unwrap_or(20.0),
            patience: self.patience,
            stop: Stop::on_signals()?,
        }))
    }
}

/// Plays the workload in one process, or in one for each model if that is the policy.
///
/// # Errors
/// A signal comes, or a process fails; the error names its models. All processes have ended then.
pub(crate) fn play(
    policy: Policy,
    workload: &Workload,
    setup: &Setup,
    terms: &Terms,
    bar: &ProgressBar,
) -> anyhow::Result<Run> {
    let count = workload.models.len();
    let shared = policy == Policy::Ledger;
    let size = if shared { 1 } else { count.max(1) };
    let parts = (0..count).step_by(size).map(|first| first..first + size);
    let parts: Vec<_> = parts.collect();
    // Removed when the processes have ended.
    let private = (shared && terms.ledger.is_none())
        .then(|| private_directory("cuvmm-replay-"))
        .transpose()?;
    let named = terms.ledger.as_deref().filter(|_| shared);
    let ledger = named.or(private.as_ref().map(TempDir::path));
    let ledger = ledger.map(std::path::absolute).transpose()?;
    let mut children = Children::new(terms.patience);
    for (index, part) in parts.iter().enumerate() {
        let models = workload.models[part.clone()].to_vec();
        let mut command = Command::new(std::env::current_exe()?);
        children.start(&models.join(", "), command.arg("replay-one"))?;
        let order = Order {
            index,
            models,
            division: setup.division(policy, count),
            ledger: ledger.clone(),
            private: private.is_some(),
            driver: terms.driver.to_owned(),
            capacity: terms.capacity,
            costs: terms.costs.clone(),
            device: terms.device,
            settings: setup.settings,
            caches: terms.caches.clone(),
            speed: terms.speed,
            stamps: setup.stamps,
            requests: requests(workload, part),
        };
        children.tell(index, &order)?;
    }
    let played = hear_all(&mut children, parts.len(), &terms.stop, bar)?;
    children.finish()?;
    merge(workload, &parts, played)
}

/// Returns the requests of a part of the models, numbered within the part.
fn requests(workload: &Workload, part: &Range<usize>) -> Vec<Request> {
    let all = workload.requests.iter();
    let mine = all.filter(|request| part.contains(&request.model));
    mine.map(|request| Request {
        model: request.model - part.start,
        ..*request
    })
    .collect()
}

/// Starts all processes together when all are ready, and waits until all have played.
fn hear_all(
    children: &mut Children,
    count: usize,
    stop: &Stop,
    bar: &ProgressBar,
) -> anyhow::Result<Vec<Played>> {
    let mut ready = 0;
    let mut done = vec![0; count];
    let mut played: Vec<Option<Played>> = (0..count).map(|_| None).collect();
    while played.iter().any(Option::is_none) {
        let (index, said) = children.hear(stop)?;
        match said {
            Said::Ready => {
                ready += 1;
                if ready == count {
                    let start = paced::since_boot().saturating_add(AHEAD).as_nanos();
                    let start = StartAt(u64::try_from(start)?);
                    (0..count).try_for_each(|index| children.tell(index, &start))?;
                }
            }
            Said::Done(requests) => {
                done[index] = requests;
                bar.set_position(done.iter().sum());
            }
            Said::Ended(course) => played[index] = Some(*course),
            // `hear` has returned an error by now.
            Said::Failed(_) => {}
        }
    }
    Ok(played.into_iter().flatten().collect())
}

/// Merges the processes' results into one run of all models.
fn merge(workload: &Workload, parts: &[Range<usize>], played: Vec<Played>) -> anyhow::Result<Run> {
    let (mut outcomes, mut memory, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    let mut held: Option<(Course, Course, Vec<u64>)> = None;
    let (mut costs, mut all, mut processes) = (Vec::new(), Cost::default(), Vec::new());
    for (one, part) in played.into_iter().zip(parts) {
        let changes = |course: Course| {
            let changes = course.into_iter();
            changes.map(|(at, model, by)| (at, model + part.start, by))
        };
        memory.extend(changes(one.memory));
        waiting.extend(changes(one.waiting));
        if let Some((bytes, kept, evicted)) = one.held {
            let all = held.get_or_insert_default();
            all.0.extend(changes(bytes));
            all.1.extend(changes(kept));
            all.2.extend(evicted);
        }
        outcomes.push(one.outcomes.into_iter());
        // Everything that a process with one model does is for this model.
        costs.extend(match part.len() {
            1 => vec![one.all.clone()],
            _ => one.costs,
        });
        all.calls += one.all.calls;
        all.time += one.all.time;
        all.verified.add(one.all.verified);
        processes.push(one.process);
    }
    let next = |request: &Request| {
        let part = parts.iter().position(|part| part.contains(&request.model));
        let outcome = part.and_then(|part| outcomes.get_mut(part)?.next());
        outcome.with_context(|| format!("{}: requests were lost", workload.models[request.model]))
    };
    let count = workload.models.len();
    let memory = Timeline::of(count, memory);
    // Means are over the same time.
    let over = |course| {
        let mut timeline = Timeline::of(count, course);
        timeline.advance(memory.end());
        timeline
    };
    let held = held.map(|(bytes, kept, evicted)| simulate::Held {
        memory: over(bytes),
        kept: over(kept),
        evicted,
    });
    let played = simulate::Played {
        outcomes: workload
            .requests
            .iter()
            .map(next)
            .collect::<Result<_, _>>()?,
        timeline: memory,
        waiting: Timeline::of(count, waiting),
        held,
    };
    Ok(Run {
        played,
        costs,
        all,
        processes,
    })
}
