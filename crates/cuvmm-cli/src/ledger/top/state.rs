//! State of the live picture: the last look, the selection, and the order of processes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use cuvmm::ledger::TenantReport;

use super::columns::Column;
use super::detail::{exports, foreign, lines, stalls};
use super::history::History;
use super::look::{Process, Shown};

/// A process of a ledger. The pid distinguishes it from a later process in its slot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ProcessId {
    pub(super) path: String,
    pub(super) slot: usize,
    pub(super) pid: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) process: ProcessId,
    pub(super) name: String,
    /// The number of the pool, and the name of the tenant.
    pub(super) tenant: Option<(usize, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Trim,
    Sleep,
    Wake,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) change: Change,
    pub(super) target: Target,
}

#[derive(Debug)]
pub(super) struct Look {
    pub(super) at: Instant,
    /// `None` if no ledger could be read.
    pub(super) ledgers: Option<Vec<Shown>>,
    /// Errors of unreadable ledgers; empty if there are none.
    pub(super) wrong: String,
}

#[derive(Debug)]
pub(super) enum Row<'a> {
    Path(&'a Shown),
    Bar(&'a Shown),
    Head,
    Process(&'a Shown, &'a Process),
    /// The reason why the process in the row above waits.
    Waits(&'a Shown, &'a Process),
    Line(String),
    /// Text about the process in the row above.
    Detail(String),
    TenantHead,
    Tenant(&'a Shown, &'a Process, usize, &'a TenantReport),
    Note(String),
    Blank,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The ledgers of the last successful look.
    pub(super) ledgers: Option<Vec<Shown>>,
    pub(super) folder: String,
    pub(super) trouble: Option<String>,
    pub(super) said: String,
    /// The request to send after a confirmation.
    pub(super) asking: Option<Request>,
    pub(super) help: bool,
    pub(super) sort: Column,
    pub(super) reverse: bool,
    pub(super) selected: Option<Target>,
    /// The index of the selection among all selectable rows.
    place: usize,
    expanded: BTreeSet<ProcessId>,
    at: Option<Instant>,
    /// Bytes charged per second between the last two looks, negative if the charge shrank.
    growth: BTreeMap<ProcessId, f64>,
    histories: BTreeMap<ProcessId, History>,
}

impl ProcessId {
    pub(super) fn of(ledger: &Shown, process: &Process) -> Self {
        Self {
            path: ledger.path.clone(),
            slot: process.stats.slot,
            pid: process.stats.pid,
        }
    }
}

impl Row<'_> {
    /// Returns the process or tenant that the row selects.
    pub(super) fn target(&self) -> Option<Target> {
        let of = |ledger, process: &Process, tenant| Target {
            process: ProcessId::of(ledger, process),
            name: process.stats.name.clone(),
            tenant,
        };
        match self {
            Row::Process(ledger, process) => Some(of(ledger, process, None)),
            Row::Tenant(ledger, process, pool, tenant) => {
                Some(of(ledger, process, Some((*pool, tenant.name.clone()))))
            }
            _ => None,
        }
    }
}

impl State {
    pub(super) fn look(&mut self, look: Look) {
        self.trouble = Some(look.wrong).filter(|wrong| !wrong.is_empty());
        let Some(ledgers) = look.ledgers else {
            return;
        };
        let seconds = self.at.map(|at| look.at.saturating_duration_since(at));
        let seconds = seconds.map_or(0.0, |time| time.as_secs_f64());
        if seconds > 0.0 {
            self.growth = growth(
                self.ledgers.as_deref().unwrap_or_default(),
                &ledgers,
                seconds,
            );
        }
        self.at = Some(look.at);
        for (ledger, process) in ledgers
            .iter()
            .flat_map(|it| it.processes.iter().map(move |process| (it, process)))
        {
            let history = self.histories.entry(ProcessId::of(ledger, process));
            let history = history.or_insert_with(|| History::new(look.at));
            history.note(look.at, process.stats.charged);
        }
        let there: BTreeSet<ProcessId> = ledgers
            .iter()
            .flat_map(|it| {
                it.processes
                    .iter()
                    .map(|process| ProcessId::of(it, process))
            })
            .collect();
        self.expanded.retain(|process| there.contains(process));
        self.histories.retain(|process, _| there.contains(process));
        self.ledgers = Some(ledgers);
        self.find_selection();
    }

    pub(super) fn growth(&self, ledger: &Shown, process: &Process) -> Option<f64> {
        self.growth.get(&ProcessId::of(ledger, process)).copied()
    }

    pub(super) fn is_expanded(&self, ledger: &Shown, process: &Process) -> bool {
        self.expanded.contains(&ProcessId::of(ledger, process))
    }

    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        for ledger in self.ledgers.iter().flatten() {
            if !rows.is_empty() {
                rows.push(Row::Blank);
            }
            rows.extend([Row::Path(ledger), Row::Bar(ledger)]);
            rows.push(Row::Line(stalls(ledger)));
            rows.extend(foreign(ledger).map(Row::Line));
            if !ledger.in_place {
                rows.push(Row::Note("the file was removed or replaced".to_owned()));
            }
            if ledger.processes.is_empty() {
                rows.push(Row::Note("no process uses it".to_owned()));
                continue;
            }
            rows.push(Row::Head);
            for process in self.sorted(ledger) {
                self.rows_of(ledger, process, &mut rows);
            }
            rows.extend(exports(ledger).into_iter().map(Row::Line));
        }
        rows
    }

    fn rows_of<'a>(&self, ledger: &'a Shown, process: &'a Process, rows: &mut Vec<Row<'a>>) {
        rows.push(Row::Process(ledger, process));
        if process.stats.waits_for.is_some() {
            rows.push(Row::Waits(ledger, process));
        }
        if !self.is_expanded(ledger, process) {
            return;
        }
        rows.extend(lines(ledger, process).into_iter().map(Row::Detail));
        let history = self.histories.get(&ProcessId::of(ledger, process));
        let history = history.and_then(|it| it.text(ledger.limit));
        rows.extend(history.map(Row::Detail));
        if let Some(reason) = &process.no_report {
            rows.push(Row::Note(format!("    no tenants: {reason}")));
            return;
        }
        if process.tenants().next().is_none() {
            rows.push(Row::Note("    it has no tenants".to_owned()));
            return;
        }
        rows.push(Row::TenantHead);
        for (pool, tenant) in process.tenants() {
            rows.push(Row::Tenant(ledger, process, pool, tenant));
        }
    }

    fn sorted<'a>(&self, ledger: &'a Shown) -> Vec<&'a Process> {
        let mut processes: Vec<&Process> = ledger.processes.iter().collect();
        let of = |process| (process, self.growth(ledger, process));
        processes.sort_by(|one, two| {
            let order = self.sort.compare(of(one), of(two));
            if self.reverse { order.reverse() } else { order }
        });
        processes
    }

    fn targets(&self) -> Vec<Target> {
        self.rows().iter().filter_map(Row::target).collect()
    }

    /// Keeps the selection if it still exists, else selects the row in its place.
    fn find_selection(&mut self) {
        let targets = self.targets();
        let found = targets
            .iter()
            .position(|it| self.selected.as_ref() == Some(it));
        self.place = found
            .unwrap_or(self.place)
            .min(targets.len().saturating_sub(1));
        self.selected = targets.into_iter().nth(self.place);
    }

    pub(super) fn select(&mut self, by: isize) {
        self.find_selection();
        self.place = self.place.saturating_add_signed(by);
        self.selected = None;
        self.find_selection();
    }

    /// Shows or hides the details and tenants of the selected process.
    pub(super) fn expand(&mut self) {
        let Some(selected) = &mut self.selected else {
            return;
        };
        selected.tenant = None;
        let process = selected.process.clone();
        if !self.expanded.remove(&process) {
            self.expanded.insert(process);
        }
        self.find_selection();
    }

    /// Sorts by the next column, or the previous one if `back`.
    pub(super) fn sort(&mut self, back: bool) {
        self.sort = self.sort.next(back);
        self.find_selection();
    }

    pub(super) fn turn(&mut self) {
        self.reverse = !self.reverse;
        self.find_selection();
    }
}

/// Returns the growth of all processes that the look before saw too.
fn growth(before: &[Shown], now: &[Shown], seconds: f64) -> BTreeMap<ProcessId, f64> {
    let processes = |ledgers: &[Shown]| -> BTreeMap<ProcessId, u64> {
        let all = ledgers.iter().flat_map(|ledger| {
            let processes = ledger.processes.iter();
            processes.map(|it| {
                let stats = &it.stats;
                (ProcessId::of(ledger, it), stats.charged)
            })
        });
        all.collect()
    };
    let before = processes(before);
    let now = processes(now).into_iter();
    let found = now.filter_map(|(id, charged)| {
        let before = *before.get(&id)?;
        Some((id, (charged as f64 - before as f64) / seconds))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::sample::{MIB, ledger, process, with_tenant};
    use super::*;

    fn looked(state: &mut State, at: Instant, ledgers: Vec<Shown>) {
        let (ledgers, wrong) = (Some(ledgers), String::new());
        state.look(Look { at, ledgers, wrong });
    }

    #[test]
    fn the_details_show_the_last_minutes_of_a_process_that_is_there() {
        let (mut state, begin) = (State::default(), Instant::now());
        let look = |state: &mut State, second: u64, charged: u64| {
            let mut one = process(0, "a");
            one.stats.charged = charged;
            looked(
                state,
                begin + Duration::from_secs(second),
                vec![ledger("/l", vec![one])],
            );
        };
        let history = |state: &State| {
            let mut rows = state.rows().into_iter();
            rows.find_map(|row| match row {
                Row::Detail(line) => Some(line).filter(|line| line.starts_with("last 5 min")),
                _ => None,
            })
        };
        look(&mut state, 0, 1 << 30);
        state.expand();
        assert_eq!(history(&state), None);
        look(&mut state, 10, 1 << 29);
        assert_eq!(history(&state).unwrap(), "last 5 min: █▄|");
        looked(&mut state, begin, Vec::new());
        look(&mut state, 20, 0);
        state.expand();
        assert_eq!(history(&state), None, "it had left");
    }

    fn three() -> Vec<Process> {
        let mut all: Vec<_> = ["b", "c", "a"]
            .iter()
            .enumerate()
            .map(|(slot, name)| process(slot, name))
            .collect();
        all[1].stats.charged = 30 * MIB;
        all[2].stats.charged = 20 * MIB;
        all
    }

    fn names(state: &State) -> Vec<String> {
        state.targets().into_iter().map(|it| it.name).collect()
    }

    fn selected(state: &State) -> &str {
        &state.selected.as_ref().unwrap().name
    }

    #[test]
    fn processes_are_sorted_and_turned_around() {
        let mut state = State::default();
        looked(&mut state, Instant::now(), vec![ledger("/x", three())]);
        assert_eq!(names(&state), ["c", "a", "b"]);
        state.turn();
        assert_eq!(names(&state), ["b", "a", "c"]);
        state.turn();
        state.sort = Column::Name;
        assert_eq!(names(&state), ["a", "b", "c"]);
    }

    #[test]
    fn the_selection_stays_with_its_process_and_its_place() {
        let (mut state, now) = (State::default(), Instant::now());
        looked(&mut state, now, vec![ledger("/x", three())]);
        assert_eq!(selected(&state), "c");
        state.select(1);
        assert_eq!(selected(&state), "a");
        state.turn();
        state.select(-9);
        assert_eq!(selected(&state), "b");
        state.select(isize::MAX);
        assert_eq!(selected(&state), "c");
        state.turn();
        assert_eq!(selected(&state), "c", "it is the first again");
        state.select(2);
        let mut fewer = three();
        fewer.remove(0);
        looked(&mut state, now, vec![ledger("/x", fewer)]);
        assert_eq!(selected(&state), "a", "the last one left");
        looked(&mut state, now, vec![]);
        assert_eq!(state.selected, None);
        state.select(1);
        state.expand();
    }

    #[test]
    fn a_process_is_expanded_until_it_is_gone() {
        let (mut state, now) = (State::default(), Instant::now());
        let with = || {
            vec![ledger(
                "/x",
                vec![with_tenant(process(0, "p"), "chat", MIB)],
            )]
        };
        looked(&mut state, now, with());
        assert_eq!(state.targets().len(), 1);
        state.expand();
        assert_eq!(state.targets().len(), 2);
        state.select(1);
        let tenant = state.selected.as_ref().unwrap().tenant.clone();
        assert_eq!(tenant, Some((0, "chat".to_owned())));
        state.expand();
        assert_eq!(state.targets().len(), 1);
        assert_eq!(state.selected.as_ref().unwrap().tenant, None);
        state.expand();
        looked(&mut state, now, vec![]);
        looked(&mut state, now, with());
        assert_eq!(state.targets().len(), 1, "it may be another process");
    }

    #[test]
    fn growth_is_by_second_and_of_one_process() {
        let (mut state, now) = (State::default(), Instant::now());
        let at = |charged: u64, pid: u32| {
            let mut process = process(0, "p");
            process.stats.charged = charged * MIB;
            process.stats.pid = pid;
            vec![ledger("/x", vec![process])]
        };
        let grown = |state: &State| {
            let ledger = &state.ledgers.as_ref().unwrap()[0];
            state.growth(ledger, &ledger.processes[0])
        };
        looked(&mut state, now, at(10, 1));
        assert_eq!(grown(&state), None);
        looked(&mut state, now + Duration::from_secs(2), at(4, 1));
        assert_eq!(grown(&state), Some(-3.0 * MIB as f64));
        looked(&mut state, now + Duration::from_secs(3), at(90, 2));
        assert_eq!(grown(&state), None, "another process has the slot");
    }

    #[test]
    fn a_look_that_fails_keeps_the_last_figures() {
        let (mut state, now) = (State::default(), Instant::now());
        looked(&mut state, now, vec![ledger("/x", three())]);
        let wrong = "it is gone".to_owned();
        let (at, ledgers) = (now, None);
        state.look(Look { at, ledgers, wrong });
        assert_eq!(state.trouble.as_deref(), Some("it is gone"));
        assert_eq!(names(&state).len(), 3);
        looked(&mut state, now, vec![]);
        assert_eq!(state.trouble, None);
        let wrong = "one is no ledger".to_owned();
        let (at, ledgers) = (now, Some(vec![ledger("/x", three())]));
        state.look(Look { at, ledgers, wrong });
        assert_eq!(state.trouble.as_deref(), Some("one is no ledger"));
        assert_eq!(names(&state).len(), 3, "the others are shown");
    }
}
