//! One process: reads its order, waits for the start, plays, and reports the result.

use std::cell::Cell;
use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum as _;
use cuvmm::{Device, Ledger};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{Order, Played, Said, StartAt};
use super::paced::{Clock, Paced, since_boot};
use crate::replay::paged::{self, Paged};
use crate::replay::pooled::Pooled;
use crate::replay::process::{Made, Process, ms};
use crate::replay::shared::Shared;
use crate::replay::{simulate, tenants};
use cuvmm_command::drivers::{Choice, StandIn};
use cuvmm_command::stop::Stop;
use cuvmm_command::subprocess::remove_left;
use cuvmm_command::terminal;

/// The interval of a process's signs of life.
const BEAT: Duration = Duration::from_millis(250);

/// Play a part of `cuvmm replay --processes`, which starts this command
#[derive(Debug, clap::Args)]
pub struct One {}

impl One {
    /// Plays, and reports to the command that started this process.
    ///
    /// # Errors
    /// Standard output cannot be written. Other failures are reported there.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match play() {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => {
                say(&Said::Failed(terminal::chain(&error)))?;
                Ok(ExitCode::FAILURE)
            }
        }
    }
}

fn play() -> anyhow::Result<()> {
    let order: Order = line()?;
    let played = join(&order);
    if let Some(directory) = order.ledger.as_deref().filter(|_| order.private) {
        remove_left(directory);
    }
    played
}

/// Plays as a member of the ledger, if there is one.
fn join(order: &Order) -> anyhow::Result<()> {
    let driver = Choice::from_str(&order.driver, false).map_err(anyhow::Error::msg)?;
    let opened = driver.open_as(&StandIn {
        capacity: Some(order.capacity),
        costs: Some(order.costs.parse()?),
        ..StandIn::default()
    })?;
    let clock = opened.model();
    let device = Device::open(opened.driver, order.device)?;
    let (models, division) = (&order.models, &order.division);
    let join = |directory| {
        let ledger = Ledger::builder(&device, directory).limit(division.limit);
        let ledger = ledger.guarantee(division.guarantee);
        ledger.name(models.join(", ")).open()
    };
    let ledger = order.ledger.as_ref().map(join).transpose()?;
    let (stamped, ledger) = (order.stamps, ledger.as_ref());
    match paged(order, &device)? {
        None => {
            let memory = Pooled::new(&device, models, division, stamped, clock, ledger)?;
            start(order, memory, ledger)
        }
        Some(terms) => {
            let memory = Paged::new(&device, models, division, &terms, stamped, clock, ledger)?;
            start(order, memory, ledger)
        }
    }
}

/// Returns the terms of the paged caches, if the order has such.
fn paged(order: &Order, device: &Device) -> anyhow::Result<Option<paged::Terms>> {
    let (granule, division) = (device.granularity(), &order.division);
    let share = tenants::share(division.limit, division.models, granule);
    let bytes = order.settings.kv_bytes_per_token;
    order
        .caches
        .terms(bytes, granule, (share, division.guarantee))
}

/// Waits for the start, plays, and reports.
fn start<M: Shared>(order: &Order, memory: M, ledger: Option<&Ledger>) -> anyhow::Result<()> {
    say(&Said::Ready)?;
    let StartAt(start) = line()?;
    let unwanted = Stop::on_input_end()?;
    let clock = Clock {
        start: Duration::from_nanos(start),
        speed: order.speed,
    };
    std::thread::sleep(clock.start.saturating_sub(since_boot()));
    let played = run(order, memory, ledger, clock, &unwanted)?;
    say(&Said::Ended(Box::new(played)))?;
    // The guarantee stays charged until all models have played, as in one process.
    unwanted.wait();
    Ok(())
}

/// Plays the requests against the memory, and gives the memory back.
fn run<M: Shared>(
    order: &Order,
    memory: M,
    ledger: Option<&Ledger>,
    clock: Clock,
    unwanted: &Stop,
) -> anyhow::Result<Played> {
    let done = Cell::new(0);
    let said = Cell::new(Instant::now());
    let lives = || match said.get().elapsed() >= BEAT {
        true => {
            said.set(Instant::now());
            say(&Said::Done(done.get()))
        }
        false => Ok(()),
    };
    let mut memory = Paced {
        memory,
        clock,
        asks: ledger.is_some(),
        unwanted,
        lives: &lives,
        first: (order.index as u64) << 32,
        counts: Process::default(),
        asked: order.models.iter().map(|_| None).collect(),
    };
    let played = simulate::run(
        &order.requests,
        order.models.len(),
        &order.settings,
        &mut memory,
        &mut || done.set(done.get() + 1),
    )?;
    let Paced { memory, counts, .. } = memory;
    let stalled = ledger.map(|ledger| {
        let stats = ledger.stats();
        let mine = stats.processes.iter().find(|it| it.slot == ledger.slot());
        mine.map_or(Duration::ZERO, |it| it.stalled)
    });
    let given = ledger.map(Ledger::given).unwrap_or_default();
    let (costs, all) = memory.finish()?;
    let calls = all.by_call.iter().filter(|(_, made)| made.0 > 0);
    let calls = calls.map(|(call, &(count, time))| {
        let ms = ms(time);
        (call.name().to_owned(), Made { count, ms })
    });
    let calls = calls.collect();
    Ok(Played {
        outcomes: played.outcomes,
        held: played.held.map(|mut held| {
            // The memory was given back by now, what was kept too.
            let (end, none) = (played.timeline.end(), vec![0; order.models.len()]);
            held.memory.set(end, end, &none);
            held.kept.set(end, end, &none);
            let courses = (held.memory.into_course(), held.kept.into_course());
            (courses.0, courses.1, held.evicted)
        }),
        memory: played.timeline.into_course(),
        waiting: played.waiting.into_course(),
        costs,
        all,
        process: Process {
            models: order.models.clone(),
            pid: std::process::id(),
            gave: given.times,
            gave_bytes: given.bytes,
            gave_ms: ms(given.took),
            calls,
            ledger_stalled_ms: stalled.map(ms),
            ..counts
        },
    })
}

fn line<T: DeserializeOwned>() -> anyhow::Result<T> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line).context("standard input is not that of a replay")
}

fn say<T: Serialize>(said: &T) -> anyhow::Result<()> {
    let line = serde_json::to_string(said)? + "\n";
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}
