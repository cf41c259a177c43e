//! Lines about a ledger and about one process: stall times, waits, foreign memory and exported
//! blocks.

use std::collections::BTreeMap;
use std::time::Duration;

use cuvmm::ledger::{ExportStats, StallAverages};

use super::look::{Process, Shown};
use cuvmm_command::size::iec as size;
use cuvmm_command::terminal::{counted, safe};

const LISTED: usize = 5;

pub(super) fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        0.0 => "0".to_owned(),
        time if time < 99.95 => format!("{time:.1}"),
        time => format!("{time:.0}"),
    }
}

pub(super) fn name(ledger: &Shown, slot: usize) -> String {
    let mut processes = ledger.processes.iter();
    match processes.find(|it| it.stats.slot == slot) {
        Some(process) => safe(&process.stats.name).into_owned(),
        None => format!("slot {slot}"),
    }
}

fn shares(some: StallAverages, full: StallAverages) -> String {
    let of = |it: StallAverages| format!("{:.1} {:.1} {:.1} %", it.avg10, it.avg60, it.avg300);
    format!("some {}, full {} (10, 60, 300 s)", of(some), of(full))
}

pub(super) fn stalls(ledger: &Shown) -> String {
    let lately = shares(ledger.stalled_average, ledger.stalled_full_average);
    format!("stalled: {lately}")
}

/// Describes the memory of the device outside the ledger, if any is known.
pub(super) fn foreign(ledger: &Shown) -> Option<String> {
    let found = size(ledger.foreign);
    let leaves = match ledger.usable < ledger.limit {
        true => format!("leaves {} of the limit", size(ledger.usable)),
        false => "leaves the whole limit".to_owned(),
    };
    (ledger.foreign > 0).then(|| format!("foreign memory: {found}, which {leaves}"))
}

/// Describes exported memory, in one line for each pair of owner and holders.
pub(super) fn exports(ledger: &Shown) -> Vec<String> {
    let mut alike: BTreeMap<_, (u64, u64)> = BTreeMap::new();
    for export in &ledger.exports {
        let ExportStats {
            owner,
            given_back,
            holders,
            bytes,
            ..
        } = export;
        let (blocks, sum) = alike.entry((owner, given_back, holders)).or_default();
        *blocks += 1;
        *sum = sum.saturating_add(*bytes);
    }
    let line =
        |((owner, given_back, holders), (blocks, bytes)): ((&usize, &bool, &Vec<usize>), _)| {
            let to: Vec<String> = holders.iter().map(|&slot| name(ledger, slot)).collect();
            let to = match to.is_empty() {
                true => "no process yet".to_owned(),
                false => to.join(", "),
            };
            let kept = match given_back {
                true => "; given back, and charged until they let it go",
                false => "",
            };
            format!(
                "{} lends {} in {} to {to}{kept}",
                name(ledger, *owner),
                size(bytes),
                counted(blocks, "block")
            )
        };
    alike.into_iter().map(line).collect()
}

pub(super) fn lines(ledger: &Shown, process: &Process) -> Vec<String> {
    let stats = &process.stats;
    let lately = shares(stats.stalled_average, stats.stalled_full_average);
    let (some, full) = (seconds(stats.stalled), seconds(stats.stalled_full));
    let mut lines = vec![
        format!("stalled {some} s, {full} s in full; {lately}"),
        format!(
            "user {}, priority {}, slot {}",
            stats.uid, stats.priority, stats.slot
        ),
    ];
    let Some(waits) = &stats.waits else {
        return lines;
    };
    let older = waits.behind.iter().filter_map(|slot| {
        let mut all = ledger.processes.iter();
        let older = all.find(|it| it.stats.slot == *slot)?;
        let waits = older.stats.waits.as_ref()?;
        let (lacks, waited) = (size(waits.lacks), seconds(waits.waited));
        let name = safe(&older.stats.name);
        Some(format!("before it: {name} waits {waited} s for {lacks}"))
    });
    lines.extend(older);
    let holders = waits.holders.iter().zip(1..).take(LISTED);
    lines.extend(holders.map(|(it, number)| {
        let (name, above, idle) = (name(ledger, it.slot), size(it.above), size(it.idle));
        format!("asked {number}: {name}, {above} above its guarantee, {idle} of that idle")
    }));
    let more = waits.holders.len().saturating_sub(LISTED) as u64;
    if more > 0 {
        lines.push(format!(
            "and then {}",
            match more {
                1 => "one more process".to_owned(),
                more => format!("{more} more processes"),
            }
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::sample::{MIB, ledger, process, waiting};
    use super::*;

    fn export(owner: usize, mib: u64, given_back: bool, holders: &[usize]) -> ExportStats {
        let mut export = ExportStats::default();
        (export.owner, export.bytes, export.given_back) = (owner, mib * MIB, given_back);
        export.holders = holders.to_vec();
        export
    }

    #[test]
    fn exports_are_shown_by_owner_and_holders() {
        let mut ledger = ledger("/x", vec![process(0, "chat"), process(1, "co\nde")]);
        assert!(exports(&ledger).is_empty());
        ledger.exports = vec![
            export(0, 64, false, &[1]),
            export(3, 32, true, &[0, 1]),
            export(0, 128, false, &[1]),
            export(1, 2, false, &[]),
        ];
        let expected = [
            "chat lends 192 MiB in 2 blocks to co\\nde",
            "co\\nde lends 2 MiB in 1 block to no process yet",
            "slot 3 lends 32 MiB in 1 block to chat, co\\nde; given back, and charged until they let it go",
        ];
        assert_eq!(exports(&ledger), expected);
    }

    #[test]
    fn foreign_memory_is_shown_if_there_is_some() {
        let mut ledger = ledger("/x", Vec::new());
        assert_eq!(foreign(&ledger), None);
        ledger.foreign = 512 * MIB;
        let all = "foreign memory: 512 MiB, which leaves the whole limit";
        assert_eq!(foreign(&ledger).as_deref(), Some(all));
        ledger.usable = 100 * MIB;
        let less = "foreign memory: 512 MiB, which leaves 100 MiB of the limit";
        assert_eq!(foreign(&ledger).as_deref(), Some(less));
    }

    #[test]
    fn a_waiting_process_lists_requests_and_holders() {
        let mut processes: Vec<_> = (0..9)
            .map(|slot| process(slot, &format!("p{slot}")))
            .collect();
        waiting(&mut processes[1], 32 * MIB, &[], &[]);
        let holders: Vec<_> = (2..9).map(|slot| (slot, 10 * MIB, MIB)).collect();
        waiting(&mut processes[0], 64 * MIB, &[1], &holders);
        let stats = &mut processes[0].stats;
        stats.stalled = Duration::from_millis(12_300);
        stats.stalled_full = Duration::from_millis(400);
        stats.stalled_average.avg10 = 12.34;
        let ledger = ledger("/x", processes);
        let shown = lines(&ledger, &ledger.processes[0]);
        assert_eq!(
            shown[0],
            "stalled 12.3 s, 0.4 s in full; some 12.3 0.0 0.0 %, full 0.0 0.0 0.0 % (10, 60, 300 s)"
        );
        assert!(shown[1].ends_with("priority 0, slot 0"), "{shown:?}");
        assert_eq!(shown[2], "before it: p1 waits 1.3 s for 32 MiB");
        let first = "asked 1: p2, 10 MiB above its guarantee, 1 MiB of that idle";
        assert_eq!(shown[3], first);
        assert_eq!(shown[8], "and then 2 more processes");
        assert_eq!(shown.len(), 9);
        assert_eq!(lines(&ledger, &ledger.processes[5]).len(), 2);
    }
}
