//! The parts of the report that depend on real time, from given figures.

use super::*;
use crate::replay::figures::{Cost, FirstToken};
use crate::replay::process::Made;

/// Returns the figures of a policy whose median time to first token is 100 ms, with the lateness of
/// its processes in milliseconds.
fn late(each: &[f64]) -> PolicyFigures {
    let ttft = 100_000_000;
    let process = |late_max_ms: &f64| Process {
        late_max_ms: *late_max_ms,
        ..Process::default()
    };
    PolicyFigures {
        all: Figures {
            requests: 1,
            completed: 1,
            rejected: 0,
            preempted: 0,
            first_token: Some(FirstToken {
                p50: ttft,
                p95: ttft,
                p99: ttft,
                max: ttft,
            }),
            waited_mean: 0,
            waited_max: 0,
            memory_mean: 0.0,
            memory_peak: 0,
            tokens_per_second: 0.0,
            paged: None,
            cost: Cost::default(),
        },
        models: Vec::new(),
        expected: None,
        processes: each.iter().map(process).collect(),
    }
}

#[test]
fn lateness_counts_from_a_quarter_of_the_median_time_to_first_token() {
    let results = |elastic: &[f64], ledger: &[f64]| {
        [
            (Policy::Elastic, late(elastic)),
            (Policy::Ledger, late(ledger)),
        ]
    };
    // At twice the pace 12.5 ms are 25 ms of the trace.
    assert_eq!(too_late(&results(&[1.0], &[12.5, 3.0]), 2.0), None);
    let seen = results(&[1.0], &[12.6, 3.0]);
    assert_eq!(too_late(&seen, 2.0), Some((12.6, Policy::Ledger)));
    assert_eq!(too_late(&seen, 1.0), None, "a lower speed keeps the pace");
    let virtual_time = results(&[], &[]);
    assert_eq!(too_late(&virtual_time, 100.0), None);
    let mut none_done = results(&[50.0], &[50.0]);
    for (_, figures) in &mut none_done {
        figures.all.first_token = None;
    }
    assert_eq!(too_late(&none_done, 1.0), None);
}

#[test]
fn the_report_warns_of_lateness_and_names_the_policy() {
    let setup = Setup {
        driver: "the host driver".to_owned(),
        device: "a device".to_owned(),
        workload: "a workload".to_owned(),
        demand: None,
        seed: None,
        load: 1.0,
        memory: 1 << 30,
        granule: 2 << 20,
        guarantee: 0,
        settings: Settings::default(),
        stamps: true,
        speed: Some(4.0),
        paged: None,
    };
    let warned = |ms: f64| {
        let results = [(Policy::Elastic, late(&[ms]))];
        text(&setup, &results, Page::Verbose)
    };
    let line = "warning: under elastic events were up to 30.0 ms late, 120 ms of the trace: ";
    assert!(warned(30.0).contains(line), "{}", warned(30.0));
    assert!(!warned(6.0).contains("warning"), "{}", warned(6.0));
}

#[test]
fn rows_of_zeros_are_only_in_verbose_output() {
    let mut process = Process {
        models: vec!["chat".to_owned()],
        ledger_stalled_ms: Some(0.0),
        gave: 2,
        gave_bytes: 64 << 20,
        ..Process::default()
    };
    let made = Made { count: 3, ms: 0.0 };
    process.calls.insert("cuMemMap".to_owned(), made);
    let narrow = grants_table(&[&process], Page::Narrow);
    let text = narrow.to_string();
    assert_eq!(narrow.row_count(), 2, "{text}");
    assert!(text.contains("gave to others |     2 |"), "{text}");
    assert!(text.contains("cuMemMap"), "{text}");
    assert_eq!(grants_table(&[&process], Page::Verbose).row_count(), 7);
}
