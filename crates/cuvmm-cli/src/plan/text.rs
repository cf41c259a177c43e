//! The figures of a plan as a table.

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};

use super::figures::{Failed, Figures, Total};
use cuvmm_cli::terminal::{counted, safe};
use cuvmm_cli::watch::in_words;

pub(super) fn of(figures: &Figures) -> String {
    let mut text = format!(
        "{} x {} with {} on the {} driver\nexpected by {}\n{}\n\n{}\n\n",
        figures.devices,
        safe(&figures.device),
        bytes(figures.device_memory),
        figures.driver,
        safe(&figures.costs),
        match range(&figures.ending) {
            Some(_) => "range: where all calls are as fast, and as slow, as the table's ranges say",
            None => "the table has no ranges: how much longer a call can take is not known",
        },
        table(figures)
    );
    let Total { calls, .. } = &figures.total;
    let calls: Vec<_> = calls
        .iter()
        .map(|(call, count)| format!("{count} {call}"))
        .collect();
    text += &format!("Driver calls: {}\n", or_none(&calls.join(", ")));
    let peak = &figures.peak;
    text += &format!(
        "At most {} of memory, {} that no step asked for, {}, {} of addresses\n",
        bytes(peak.memory),
        bytes(peak.waste),
        counted(peak.mappings, "mapping"),
        bytes(peak.addresses)
    );
    let ending = &figures.ending;
    let times = [
        ("expected", ending.expected_us.map(micros)),
        ("range", range(ending)),
        ("measured", ending.measured_us.map(micros)),
    ];
    let times = times.into_iter();
    let times: Vec<_> = times
        .filter_map(|(what, time)| Some(format!("{what} {}", time?)))
        .collect();
    text += &format!(
        "Giving everything back: {}, {}\n",
        counted(ending.driver_calls, "driver call"),
        times.join(", ")
    );
    for (whose, failed) in [
        ("", &figures.failure),
        ("By the expectation ", &figures.expected_failure),
    ] {
        if let Some(failed) = failed {
            text += &format!("{whose}{}\n", said(failed));
        }
    }
    text
}

/// The step that fails and why.
pub(super) fn said(failed: &Failed) -> String {
    format!(
        "step {} fails ({}): {}",
        failed.step,
        safe(&failed.does),
        safe(&failed.error)
    )
}

fn table(figures: &Figures) -> Table {
    let measured = figures.total.measured_us.is_some() || figures.driver != "model";
    let ranged = range(&figures.ending).is_some();
    let mut head = vec!["step", "what", "calls", "expected"];
    if ranged {
        head.push("range");
    }
    if measured {
        head.extend(["measured", "ratio"]);
    }
    head.extend(["asked", "memory", "waste", "mappings", "addresses"]);
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(&head);
    for (index, column) in table.column_iter_mut().enumerate() {
        if index != 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let times = |took: &Total| {
        let mut cells = vec![took.expected_us.map(micros)];
        if ranged {
            cells.push(range(took));
        }
        if measured {
            cells.push(took.measured_us.map(micros));
            cells.push(took.ratio.map(|ratio| format!("{ratio:.2}")));
        }
        cells
            .into_iter()
            .map(|cell| or_none(&cell.unwrap_or_default()))
    };
    for row in &figures.steps {
        let mut cells = vec![
            row.step.to_string(),
            safe(&row.does).into_owned(),
            row.took.driver_calls.to_string(),
        ];
        cells.extend(times(&row.took));
        cells.extend([
            bytes(row.asked),
            bytes(row.memory),
            bytes(row.memory.saturating_sub(row.asked)),
            row.mappings.to_string(),
            bytes(row.addresses),
        ]);
        table.add_row(cells);
    }
    let total = &figures.total;
    let mut cells = vec![
        String::new(),
        "total".to_owned(),
        total.driver_calls.to_string(),
    ];
    cells.extend(times(total));
    cells.resize(head.len(), String::new());
    table.add_row(cells);
    table
}

/// From the least to the most that is expected, by a table with ranges.
fn range(took: &Total) -> Option<String> {
    let (low, high) = took.expected_low_us.zip(took.expected_high_us)?;
    Some(format!("{} to {}", micros(low), micros(high)))
}

fn or_none(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

fn micros(time: f64) -> String {
    in_words(time * 1e3)
}

fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}
