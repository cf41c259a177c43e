//! Columns of the live table, and the order of processes by a column.

use std::cmp::Ordering;

use cuvmm::ledger::{ProcessState, ProcessStats};

use super::detail::seconds;
use super::look::Process;
use cuvmm_command::page::Unit;
use cuvmm_command::terminal::safe;

/// Columns of the table, from left to right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Column {
    Name,
    Pid,
    State,
    #[default]
    Charged,
    InUse,
    Cached,
    Idle,
    Guarantee,
    Limit,
    Priority,
    Stalled,
    Some,
    Full,
    Growth,
}

/// The least width of the column of names.
const NAME: u16 = 12;

impl Column {
    pub(super) const ALL: [Self; 14] = [
        Self::Name,
        Self::Pid,
        Self::State,
        Self::Charged,
        Self::InUse,
        Self::Cached,
        Self::Idle,
        Self::Guarantee,
        Self::Limit,
        Self::Priority,
        Self::Stalled,
        Self::Some,
        Self::Full,
        Self::Growth,
    ];

    /// The columns that a narrow screen omits, in the order of omission.
    const OMITTED: [Self; 13] = [
        Self::Priority,
        Self::Cached,
        Self::Guarantee,
        Self::Pid,
        Self::Growth,
        Self::Full,
        Self::Stalled,
        Self::Limit,
        Self::Some,
        Self::Idle,
        Self::InUse,
        Self::State,
        Self::Charged,
    ];

    pub(super) const fn head(self) -> &'static str {
        self.shape().0
    }

    /// Returns the head and the width of the column; for names, the least width.
    const fn shape(self) -> (&'static str, u16) {
        match self {
            Self::Name => ("process", NAME),
            Self::Pid => ("pid", 7),
            Self::State => ("state", 7),
            Self::Charged => ("charged", 7),
            Self::InUse => ("in use", 6),
            Self::Cached => ("cached", 6),
            Self::Idle => ("idle", 6),
            Self::Guarantee => ("guar.", 6),
            Self::Limit => ("limit", 6),
            Self::Priority => ("prio", 4),
            Self::Stalled => ("stalled", 7),
            Self::Some => ("some%", 5),
            Self::Full => ("full%", 5),
            Self::Growth => ("growth", 6),
        }
    }

    pub(super) const fn is_figure(self) -> bool {
        !matches!(self, Self::Name | Self::State)
    }

    /// Returns the columns that fit, with their widths; one space separates columns.
    pub(super) fn that_fit(width: u16) -> Vec<(Self, u16)> {
        let mut columns = Self::ALL.to_vec();
        let needed = |columns: &[Self]| columns.iter().map(|it| it.shape().1 + 1).sum::<u16>() - 1;
        for omitted in Self::OMITTED {
            if needed(&columns) <= width {
                break;
            }
            columns.retain(|column| *column != omitted);
        }
        let left = width.saturating_sub(needed(&columns));
        let wide = columns.into_iter().map(|column| match column {
            Self::Name => (column, NAME + left),
            column => (column, column.shape().1),
        });
        wide.collect()
    }

    pub(super) fn next(self, back: bool) -> Self {
        let step = if back { Self::ALL.len() - 1 } else { 1 };
        let at = Self::ALL.iter().position(|it| *it == self);
        let next = (at.unwrap_or_default() + step) % Self::ALL.len();
        Self::ALL.get(next).copied().unwrap_or(Self::Charged)
    }

    pub(super) fn cell(self, process: &Process, growth: Option<f64>, unit: Unit) -> String {
        let stats = &process.stats;
        let figure = |bytes: u64| unit.figure(bytes as f64);
        let told = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), figure);
        match self {
            Self::Name => safe(&stats.name).into_owned(),
            Self::Pid => stats.pid.to_string(),
            Self::State => state(stats.state).to_owned(),
            Self::Charged => figure(stats.charged),
            Self::InUse => told(in_use(process)),
            Self::Cached => told(cached(process)),
            Self::Idle => figure(stats.idle),
            Self::Guarantee => figure(stats.guarantee),
            Self::Limit => figure(stats.limit),
            Self::Priority => stats.priority.to_string(),
            Self::Stalled => seconds(stats.stalled),
            Self::Some => percent(stats.stalled_average.avg10),
            Self::Full => percent(stats.stalled_full_average.avg10),
            Self::Growth => match growth {
                Some(it) if it > 0.0 => format!("+{}", unit.figure(it)),
                Some(it) => unit.figure(it),
                None => String::new(),
            },
        }
    }

    /// Compares two processes by this column: large figures first, low names first.
    pub(super) fn compare(
        self,
        (one, one_growth): (&Process, Option<f64>),
        (two, two_growth): (&Process, Option<f64>),
    ) -> Ordering {
        let (a, b) = (&one.stats, &two.stats);
        match self {
            Self::Name => a.name.cmp(&b.name),
            Self::Pid => a.pid.cmp(&b.pid),
            Self::State => state(a.state).cmp(state(b.state)),
            Self::Charged => b.charged.cmp(&a.charged),
            Self::InUse => in_use(two).cmp(&in_use(one)),
            Self::Cached => cached(two).cmp(&cached(one)),
            Self::Idle => b.idle.cmp(&a.idle),
            Self::Guarantee => b.guarantee.cmp(&a.guarantee),
            Self::Limit => b.limit.cmp(&a.limit),
            Self::Priority => b.priority.cmp(&a.priority),
            Self::Stalled => b.stalled.cmp(&a.stalled),
            Self::Some => b.stalled_average.avg10.total_cmp(&a.stalled_average.avg10),
            Self::Full => {
                let of = |it: &ProcessStats| it.stalled_full_average.avg10;
                of(b).total_cmp(&of(a))
            }
            Self::Growth => {
                let of = |growth: Option<f64>| growth.unwrap_or_default();
                of(two_growth).total_cmp(&of(one_growth))
            }
        }
    }
}

fn in_use(process: &Process) -> Option<u64> {
    process.sum(|tenant| tenant.in_use)
}

fn cached(process: &Process) -> Option<u64> {
    process.sum(|tenant| tenant.cached)
}

pub(super) fn state(state: ProcessState) -> &'static str {
    match state {
        ProcessState::Running => "running",
        ProcessState::NotAnswering => "silent",
        ProcessState::Lending => "lending",
        ProcessState::Dying => "dying",
        _ => "?",
    }
}

/// Formats a percentage; less than 0.05 is `0`.
pub(super) fn percent(share: f64) -> String {
    match share {
        ..0.05 => "0".to_owned(),
        share => format!("{share:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn columns_fit_and_names_get_the_rest() {
        let width = |columns: &[(Column, u16)]| columns.iter().map(|(_, it)| it + 1).sum::<u16>();
        for wide in NAME..200 {
            let columns = Column::that_fit(wide);
            assert_eq!(width(&columns), wide + 1);
            assert_eq!(columns[0].0, Column::Name);
        }
        let normal = Column::that_fit(100);
        assert_eq!(normal.len(), Column::ALL.len() - 1);
        assert!(normal.iter().all(|(it, _)| *it != Column::Priority));
        assert_eq!(Column::that_fit(103).len(), Column::ALL.len());
        let narrow: Vec<_> = Column::that_fit(60).into_iter().map(|(it, _)| it).collect();
        assert!(narrow.contains(&Column::Some) && narrow.contains(&Column::Limit));
        assert!(!narrow.contains(&Column::Cached));
        assert_eq!(Column::that_fit(3).len(), 1);
    }

    #[test]
    fn every_column_is_next_to_another() {
        let mut column = Column::Charged;
        for _ in Column::ALL {
            assert_eq!(column.next(false).next(true), column);
            column = column.next(false);
        }
        assert_eq!(column, Column::Charged);
    }

    #[test]
    fn times_and_shares_fit_their_columns() {
        let ms = Duration::from_millis;
        let times = [0, 49, 12_340, 99_960, 1_234_567_890].map(|time| seconds(ms(time)));
        assert_eq!(times, ["0", "0.0", "12.3", "100", "1234568"]);
        let shares = [0.0, 0.04, 0.06, 99.94, 100.0].map(percent);
        assert_eq!(shares, ["0", "0", "0.1", "99.9", "100.0"]);
    }
}
