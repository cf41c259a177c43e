//! The reason why a process waits, as far as figures tell.

use std::cmp::Reverse;

use bytesize::ByteSize;

use super::look::{Process, Shown};
use cuvmm_cli::terminal::safe;

/// The most processes that are named.
const NAMED: usize = 3;

/// Says for how much memory a process waits, and which processes have it.
pub(super) fn waits(ledger: &Shown, process: &Process) -> Option<String> {
    let stats = &process.stats;
    let wanted = stats.waits_for?;
    let size = |bytes: u64| ByteSize(bytes).display().iec().to_string();
    let begins = format!("waits for {}", size(wanted));
    let own = stats.limit.saturating_sub(stats.charged);
    if own < wanted {
        return Some(format!("{begins}: its own limit leaves {}", size(own)));
    }
    let free = ledger.limit.saturating_sub(ledger.charged);
    if free >= wanted {
        return Some(format!("{begins}: {} are free", size(free)));
    }
    let above = |it: &Process| it.stats.charged.saturating_sub(it.stats.guarantee);
    let others = ledger.processes.iter();
    let others = others.filter(|it| it.stats.slot != stats.slot && above(it) > 0);
    let mut others: Vec<&Process> = others.collect();
    // This is the order in which processes give memory.
    others.sort_by_key(|it| (Reverse(above(it)), it.stats.priority, it.stats.slot));
    let named = |all: Vec<(&Process, u64)>| {
        let named = all.iter().take(NAMED);
        let named: Vec<String> = named
            .map(|(it, bytes)| format!("{} ({})", safe(&it.stats.name), size(*bytes)))
            .collect();
        let more = match all.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        named.join(", ") + &more
    };
    let idle: Vec<_> = others
        .iter()
        .map(|it| (*it, it.stats.idle.min(above(it))))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    if !idle.is_empty() {
        return Some(format!("{begins}: idle at {}", named(idle)));
    }
    let used: Vec<_> = others.iter().map(|it| (*it, above(it))).collect();
    Some(match used.is_empty() {
        true => format!("{begins}: the rest is guaranteed to others"),
        false => format!("{begins}: above guarantees at {}", named(used)),
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample::{MIB, ledger, process};
    use super::waits;

    fn said(limit: u64, figures: &[[u64; 4]]) -> Option<String> {
        let processes = figures.iter().enumerate();
        let processes = processes.map(|(slot, [charged, guarantee, idle, limit])| {
            let mut process = process(slot, &format!("p{slot}"));
            process.stats.charged = charged * MIB;
            process.stats.guarantee = guarantee * MIB;
            process.stats.idle = idle * MIB;
            process.stats.limit = limit * MIB;
            process
        });
        let mut ledger = ledger("/x", processes.collect());
        ledger.limit = limit * MIB;
        ledger.processes[0].stats.waits_for = Some(64 * MIB);
        waits(&ledger, &ledger.processes[0])
    }

    #[test]
    fn a_process_that_waits_for_nothing_says_nothing() {
        let ledger = ledger("/x", vec![process(0, "p")]);
        assert_eq!(waits(&ledger, &ledger.processes[0]), None);
    }

    #[test]
    fn a_waiting_process_says_where_the_memory_is() {
        for (limit, figures, expected) in [
            (
                1000,
                &[[80, 0, 0, 100], [900, 0, 0, 1000]][..],
                "its own limit leaves 20.0 MiB",
            ),
            (
                1000,
                &[[100, 0, 0, 1000], [100, 0, 0, 1000]],
                "800.0 MiB are free",
            ),
            (
                1000,
                &[[100, 0, 0, 1000], [200, 0, 10, 1000], [700, 0, 90, 1000]],
                "idle at p2 (90.0 MiB), p1 (10.0 MiB)",
            ),
            (
                1000,
                &[[100, 0, 0, 1000], [900, 300, 0, 1000]],
                "above guarantees at p1 (600.0 MiB)",
            ),
            (
                1000,
                &[[100, 0, 0, 1000], [900, 900, 50, 1000]],
                "the rest is guaranteed to others",
            ),
            (
                100,
                &[
                    [20, 0, 0, 100],
                    [20, 0, 1, 100],
                    [20, 0, 2, 100],
                    [20, 0, 3, 100],
                    [20, 0, 4, 100],
                ],
                "idle at p1 (1.0 MiB), p2 (2.0 MiB), p3 (3.0 MiB) and 1 more",
            ),
        ] {
            let expected = format!("waits for 64.0 MiB: {expected}");
            assert_eq!(said(limit, figures), Some(expected));
        }
    }
}
