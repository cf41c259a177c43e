//! The reason why a process waits, as far as figures tell.

use super::detail::{name, seconds};
use super::look::{Process, Shown};
use cuvmm_command::size::iec as size;

const NAMED: usize = 3;

/// Describes a waiting process: the bytes it waits for, the time, the requests before its own, and
/// the processes that hold the memory, in the order in which they are asked.
pub(super) fn waits(ledger: &Shown, process: &Process) -> Option<String> {
    let stats = &process.stats;
    let wanted = stats.waits_for?;
    let Some(waits) = &stats.waits else {
        let why = "it shows no sign of life, so its request does not count";
        return Some(format!("waits for {}: {why}", size(wanted)));
    };
    let mut begins = format!("waits {} s for {}", seconds(waits.waited), size(wanted));
    let own = stats.limit.saturating_sub(stats.charged);
    if own < wanted && stats.limit < ledger.limit {
        return Some(format!("{begins}: its own limit leaves {}", size(own)));
    }
    if !waits.behind.is_empty() {
        let before = waits.behind.iter().map(|&slot| name(ledger, slot));
        begins += &format!(", behind {}", named(before.collect()));
    }
    let free = ledger.limit.saturating_sub(ledger.charged);
    let usable = ledger.usable.saturating_sub(ledger.charged);
    if usable >= wanted {
        return Some(format!("{begins}: {} are free", size(usable)));
    }
    if free >= wanted {
        let left = size(usable);
        return Some(format!(
            "{begins}: foreign memory leaves {left} of the limit"
        ));
    }
    let of = |slot, bytes| format!("{} ({})", name(ledger, slot), size(bytes));
    let holders = &waits.holders;
    let idle = holders.iter().filter(|it| it.idle > 0);
    let idle: Vec<_> = idle.map(|it| of(it.slot, it.idle)).collect();
    if !idle.is_empty() {
        return Some(format!("{begins}: idle at {}", named(idle)));
    }
    let used: Vec<_> = holders.iter().map(|it| of(it.slot, it.above)).collect();
    Some(match used.is_empty() {
        true => format!("{begins}: the rest is guaranteed to others"),
        false => format!("{begins}: above guarantees at {}", named(used)),
    })
}

/// Lists the first [`NAMED`] names and the number of the rest.
fn named(mut all: Vec<String>) -> String {
    let more = match all.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    all.truncate(NAMED);
    all.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::super::look::Shown;
    use super::super::sample::{MIB, ledger, process, waiting};
    use super::waits;

    /// The slots of processes with older requests; and for each holder its slot, its memory above
    /// the guarantee and its idle memory, in MiB.
    type Others<'a> = (&'a [usize], &'a [(usize, u64, u64)]);

    /// Returns a ledger of 1000 MiB, `charged` MiB of them charged, with a process that waits.
    fn waits_in(charged: u64, limit: u64, (behind, holders): Others<'_>) -> Shown {
        let mut processes: Vec<_> = (0..6)
            .map(|slot| process(slot, &format!("p{slot}")))
            .collect();
        let holders = holders
            .iter()
            .map(|&(slot, above, idle)| (slot, above * MIB, idle * MIB));
        let holders: Vec<_> = holders.collect();
        waiting(&mut processes[0], 64 * MIB, behind, &holders);
        processes[0].stats.limit = limit * MIB;
        let mut ledger = ledger("/x", processes);
        (ledger.limit, ledger.usable, ledger.charged) = (1000 * MIB, 1000 * MIB, charged * MIB);
        ledger
    }

    fn said(ledger: &Shown) -> Option<String> {
        waits(ledger, &ledger.processes[0])
    }

    #[test]
    fn a_process_that_waits_for_nothing_says_nothing() {
        let ledger = ledger("/x", vec![process(0, "p")]);
        assert_eq!(said(&ledger), None);
    }

    #[test]
    fn a_waiting_process_says_where_the_memory_is() {
        let many = [(1, 4, 1), (2, 3, 0), (3, 3, 3), (4, 2, 2), (5, 1, 1)];
        for (charged, limit, others, expected) in [
            (980, 20, (&[][..], &[][..]), ": its own limit leaves 20 MiB"),
            (200, 1000, (&[], &[(1, 100, 0)]), ": 800 MiB are free"),
            (
                1000,
                1000,
                (&[2], &[(2, 700, 90), (1, 200, 10)]),
                ", behind p2: idle at p2 (90 MiB), p1 (10 MiB)",
            ),
            (
                1000,
                1000,
                (&[3, 1, 4, 9], &[(1, 600, 0)]),
                ", behind p3, p1, p4 and 1 more: above guarantees at p1 (600 MiB)",
            ),
            (1000, 1000, (&[], &[]), ": the rest is guaranteed to others"),
            (
                1000,
                1000,
                (&[], &many),
                ": idle at p1 (1 MiB), p3 (3 MiB), p4 (2 MiB) and 1 more",
            ),
        ] {
            let expected = format!("waits 1.3 s for 64 MiB{expected}");
            assert_eq!(said(&waits_in(charged, limit, others)), Some(expected));
        }
        let mut ledger = waits_in(1000, 1000, (&[], &[(1, 40, 0)]));
        ledger.processes[0].stats.charged = 960 * MIB;
        let text = said(&ledger).unwrap();
        assert!(
            !text.contains("its own limit"),
            "it has none of its own: {text}"
        );
        let mut ledger = waits_in(900, 1000, (&[], &[]));
        ledger.usable = 930 * MIB;
        let expected = "waits 1.3 s for 64 MiB: foreign memory leaves 30 MiB of the limit";
        assert_eq!(said(&ledger).as_deref(), Some(expected));
        ledger.processes[0].stats.waits = None;
        let text = said(&ledger).unwrap();
        assert!(text.contains("shows no sign of life"), "{text}");
    }
}
