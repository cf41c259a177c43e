//! Figures of a ledger, for people and for monitoring.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::charge::Count;
use super::control::{Control, socket_path};
use super::dead;
use super::exports;
use super::file::LedgerFile;
use super::layout::{Layout, Slot, State};
use super::seen::{Seen, What};
use super::stall;
use super::waits::{self, WaitStats};
use super::word::Word;
use crate::display::{Bytes, Table};
use crate::error::LedgerError;

/// How long after its last sign of life a process is shown as not answering.
const SILENT: Duration = Duration::from_secs(3);

/// A view of a ledger without joining it: nothing is charged, and no slot is taken.
///
/// Needs read access to the file only.
///
/// # Examples
/// ```rust
/// # use cuvmm::{Device, Ledger, LedgerView, driver::auto};
/// # let directory = tempfile::tempdir()?;
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// # let ledger = Ledger::builder(&device, directory.path()).limit(1 << 30).name("engine").open()?;
/// let view = LedgerView::open(ledger.path())?;
/// let stats = view.stats();
/// assert_eq!(stats.limit, 1 << 30);
/// assert_eq!(stats.processes[0].name, "engine");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LedgerView {
    file: LedgerFile,
    seen: Mutex<Seen>,
}

/// The figures of a ledger. Sizes in bytes.
///
/// They are read in turn while processes go on, so they may not add up exactly.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct LedgerStats {
    /// The UUID of the device.
    pub device: [u8; 16],
    /// The most that all processes together may be charged.
    pub limit: u64,
    /// Memory charged to processes. It never exceeds the limit, except after the limit was lowered.
    pub charged: u64,
    /// Memory of the device that no pool of the ledger has (contexts, other libraries, other
    /// programs): the largest value that a running process has measured within about a second; 0 if
    /// none has.
    pub foreign: u64,
    /// The most that all processes together can be charged now: the limit, or what foreign memory
    /// leaves of the device if that is less.
    pub usable: u64,
    /// How long at least one process has waited for memory of other processes, since the file was
    /// made ("some" of [pressure stall information](super#stall-times)).
    pub stalled: Duration,
    /// The part of `stalled` in which each running process that has memory was [stalled in
    /// full](ProcessStats::stalled_full).
    pub stalled_full: Duration,
    /// Averages of `stalled`, as the longest-running process has computed them.
    pub stalled_average: StallAverages,
    /// Averages of `stalled_full`.
    pub stalled_full_average: StallAverages,
    /// The processes, by slot.
    pub processes: Vec<ProcessStats>,
    /// The blocks that processes have exported.
    pub exports: Vec<ExportStats>,
}

/// The share of the time in which requests waited for memory, in percent: exponentially decaying
/// averages, as in Linux's pressure stall information. A process computes them each second.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct StallAverages {
    /// The average over 10 seconds.
    pub avg10: f64,
    /// The average over a minute.
    pub avg60: f64,
    /// The average over five minutes.
    pub avg300: f64,
}

/// The memory that a process has released because requests of other processes lacked it, since it
/// joined the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct GivenStats {
    /// How often memory was released.
    pub times: u64,
    /// The memory in bytes.
    pub bytes: u64,
    /// The time spent on the ledger's thread, with the driver calls that unmap and release.
    pub took: Duration,
}

/// A block that a process has exported. Its memory is charged to its owner only.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct ExportStats {
    /// The slot of the process that created the memory.
    pub owner: usize,
    /// The size in bytes.
    pub bytes: u64,
    /// `true` if the owner has released the memory, has left or has ended. The memory stays charged
    /// to the owner's slot until no process has it.
    pub given_back: bool,
    /// The slots of the processes that have attached the memory.
    pub holders: Vec<usize>,
}

/// The figures of one process in a ledger. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct ProcessStats {
    /// The process's slot in the file.
    pub slot: usize,
    /// The process id in the process's own PID namespace.
    pub pid: u32,
    /// The user id of the process.
    pub uid: u32,
    /// The name under which the process joined.
    pub name: String,
    /// The state of the process.
    pub state: ProcessState,
    /// Memory charged to the process: what its pools have, what it keeps for its guarantee, and
    /// what it has ready for its next allocations.
    pub charged: u64,
    /// Memory that the process's pools have from the driver.
    pub obtained: u64,
    /// Memory that the process could release without waiting, as it last found.
    pub idle: u64,
    /// Memory that the process always keeps charged.
    pub guarantee: u64,
    /// The most that the process may be charged: its own limit, or the ledger's if that is less.
    pub limit: u64,
    /// Memory of the device that no pool of the ledger has, as the process last measured; 0 if it has
    /// not.
    pub foreign: u64,
    /// The process's [priority](super::LedgerBuilder::priority).
    pub priority: i32,
    /// The bytes that the process's requests wait for, if any waits.
    pub waits_for: Option<u64>,
    /// The reason why the requests wait, unless the process has shown no sign of it for 100 ms.
    pub waits: Option<WaitStats>,
    /// How long at least one request of the process has waited for memory of other processes.
    /// Simultaneous requests count once. The time grows while a request waits. See [stall
    /// times](super#stall-times).
    pub stalled: Duration,
    /// The part of `stalled` in which the process was stalled in full: each of its pools had a
    /// waiting request, and so had each tenant of these pools that had memory in use.
    pub stalled_full: Duration,
    /// Averages of `stalled`.
    pub stalled_average: StallAverages,
    /// Averages of `stalled_full`.
    pub stalled_full_average: StallAverages,
}

/// The state of a process in a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum ProcessState {
    /// The process runs.
    Running,
    /// The process has shown no sign of life for three seconds: it may be stopped. Its memory still
    /// counts. Only a view that has observed it for that long shows this state.
    NotAnswering,
    /// The process has left or ended. Its charge is exported memory that other processes still
    /// have.
    Lending,
    /// The process is dead. Its memory counts until another process of the ledger has found that
    /// the driver has it again; if none is left, until the next one joins.
    Dying,
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Running => "running",
            Self::NotAnswering => "not answering",
            Self::Lending => "lending",
            Self::Dying => "dying",
        })
    }
}

impl LedgerView {
    /// Opens the ledger at a path.
    ///
    /// # Errors
    /// [`LedgerError`] if there is none, or the file is not a ledger of this version.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, LedgerError> {
        Ok(Self {
            file: LedgerFile::look(path.into())?,
            seen: Mutex::default(),
        })
    }

    /// Returns the path of the ledger's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns `false` if the file was removed or replaced: the figures are then of no use.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.file.is_in_place()
    }

    /// Returns the process in a slot, to ask it for its tenants' figures or to change its terms.
    /// Sends nothing.
    #[must_use]
    pub fn control(&self, slot: usize) -> Control {
        let found = self.file.layout().slots.get(slot);
        let generation = found.map_or(0, |slot| slot.state().1);
        let uid = found.and_then(|slot| u32::try_from(slot.uid.load()).ok());
        let socket = socket_path(&self.file, slot, generation);
        Control::new(socket, uid.unwrap_or(u32::MAX))
    }

    /// Returns the current figures.
    #[must_use]
    pub fn stats(&self) -> LedgerStats {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        stats(&self.file, None, &mut seen)
    }
}

/// Reads the figures of a ledger. `own` is the slot of this open file, if any.
pub(super) fn stats(file: &LedgerFile, own: Option<usize>, seen: &mut Seen) -> LedgerStats {
    let layout = file.layout();
    let header = &layout.header;
    let granule = header.granule.load();
    let counts = layout.charges.iter().map(|word| Count::of(word.load()));
    let counts: Vec<Count> = counts.collect();
    let slots = layout.slots.iter().zip(&counts).enumerate();
    let processes = slots.filter_map(|(index, (slot, count))| {
        let state = state_of(file, index, slot, own == Some(index), seen)?;
        Some(process(layout, index, state, count.charged()))
    });
    let mut processes: Vec<ProcessStats> = processes.collect();
    add_waits(layout, &mut processes, seen);
    let running = |it: &&ProcessStats| it.state == ProcessState::Running;
    let running: Vec<_> = processes.iter().filter(running).collect();
    let usable = running.iter().map(|it| layout.slots[it.slot].usable.load());
    let usable = usable.filter(|&bytes| bytes > 0).min();
    let foreign = running.iter().map(|it| it.foreign).max();
    let limit = header.limit().saturating_mul(granule);
    let averages = longest_averages(&running, layout);
    LedgerStats {
        device: header.uuid(),
        limit,
        foreign: foreign.unwrap_or(0),
        stalled: Duration::from_nanos(header.stalled.load()),
        stalled_full: Duration::from_nanos(header.stalled_full.load()),
        stalled_average: averages[0],
        stalled_full_average: averages[1],
        usable: usable.map_or(limit, |usable| limit.min(usable)),
        charged: counts
            .iter()
            .map(|count| count.charged())
            .sum::<u64>()
            .saturating_mul(granule),
        processes,
        exports: exports::all(layout)
            .map(|shown| ExportStats {
                owner: shown.owner,
                bytes: shown.granules.saturating_mul(granule),
                given_back: shown.is_given_back,
                holders: shown.holders,
            })
            .collect(),
    }
}

/// Returns `None` if the slot is free.
fn state_of(
    file: &LedgerFile,
    index: usize,
    slot: &Slot,
    is_own: bool,
    seen: &mut Seen,
) -> Option<ProcessState> {
    let (state, generation) = slot.state();
    if state == State::Free {
        seen.forget(What::Beat, index);
        return None;
    }
    // A new owner of the slot is another value.
    let life = slot.beat.load().wrapping_add(generation << 32);
    let silent = seen.age(What::Beat, index, life) >= SILENT;
    let lost = !is_own && dead::has_lost(file, index, slot);
    Some(match (state, silent) {
        (State::Lending, _) => ProcessState::Lending,
        (State::Dying, _) => ProcessState::Dying,
        _ if lost => ProcessState::Dying,
        (_, true) => ProcessState::NotAnswering,
        _ => ProcessState::Running,
    })
}

fn add_waits(layout: &Layout, processes: &mut [ProcessStats], seen: &mut Seen) {
    let states = [ProcessState::Running, ProcessState::NotAnswering];
    let alive = processes.iter().filter(|it| states.contains(&it.state));
    let alive: Vec<usize> = alive.map(|it| it.slot).collect();
    let mut waits = waits::all(layout, &alive, seen);
    for process in processes {
        process.waits = waits.remove(&process.slot);
    }
}

/// Returns the ledger's averages of the running process that has computed them most often.
fn longest_averages(running: &[&ProcessStats], layout: &Layout) -> [StallAverages; 2] {
    let slots = running.iter().filter_map(|it| layout.slots.get(it.slot));
    let oldest = slots.max_by_key(|slot| slot.averaged.load());
    oldest.map_or_else(Default::default, |slot| averages(&slot.ledger_averages))
}

fn averages(words: &[Word; 6]) -> [StallAverages; 2] {
    let [a, b, c, d, e, f] = words.each_ref().map(|word| stall::percent(word.load()));
    let of = |[avg10, avg60, avg300]: [f64; 3]| StallAverages {
        avg10,
        avg60,
        avg300,
    };
    [of([a, b, c]), of([d, e, f])]
}

fn process(layout: &Layout, index: usize, state: ProcessState, charged: u64) -> ProcessStats {
    let (slot, granule) = (&layout.slots[index], layout.header.granule.load());
    let bytes = |granules: u64| granules.saturating_mul(granule);
    let small = |word: u64| u32::try_from(word).unwrap_or(u32::MAX);
    let priority = slot.priority.load().cast_signed();
    let waits = layout.tickets[index].load() != 0;
    let [stalled_average, stalled_full_average] = averages(&slot.averages);
    ProcessStats {
        slot: index,
        pid: small(slot.pid.load()),
        uid: small(slot.uid.load()),
        name: slot.name(),
        state,
        charged: bytes(charged),
        obtained: layout.obtained(index),
        idle: bytes(slot.idle.load()),
        guarantee: bytes(slot.guarantee.load()),
        limit: bytes(slot.limit.load().min(layout.header.limit())),
        priority: priority.clamp(i32::MIN.into(), i32::MAX.into()) as i32,
        waits_for: waits.then(|| bytes(slot.want.load())),
        foreign: slot.foreign.load(),
        waits: None,
        stalled: Duration::from_nanos(slot.stalled.load()),
        stalled_full: Duration::from_nanos(slot.stalled_full.load()),
        stalled_average,
        stalled_full_average,
    }
}

/// Shows a table with a row for each process.
impl fmt::Display for LedgerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (charged, limit) = (Bytes(self.charged), Bytes(self.limit));
        writeln!(f, "{charged} of {limit} charged to processes")?;
        let mut table = Table::new([
            "process",
            "pid",
            "charged",
            "obtained",
            "idle",
            "guarantee",
            "waits for",
            "state",
        ]);
        for process in &self.processes {
            let waits = process.waits_for.map(|bytes| Bytes(bytes).to_string());
            table.row([
                process.name.clone(),
                process.pid.to_string(),
                Bytes(process.charged).to_string(),
                Bytes(process.obtained).to_string(),
                Bytes(process.idle).to_string(),
                Bytes(process.guarantee).to_string(),
                waits.unwrap_or_default(),
                process.state.to_string(),
            ]);
        }
        table.fmt(f)
    }
}
