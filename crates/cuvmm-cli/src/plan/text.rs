//! The figures of a plan as a table.

use comfy_table::Table;

use super::figures::{Failed, Figures, Total};
use cuvmm_command::page::{Page, Unit};
use cuvmm_command::size::iec;
use cuvmm_command::terminal::{counted, safe};
use cuvmm_command::watch::in_words;

pub(super) fn of(figures: &Figures, page: Page) -> String {
    let mut text = format!(
        "{} x {} with {} on the {} driver\nexpected by {}\n{}\n\n{}\n\n",
        figures.whose.devices,
        safe(&figures.whose.device),
        iec(figures.whose.device_memory),
        figures.whose.driver,
        safe(&figures.whose.costs),
        match range(&figures.ending) {
            Some(_) => "range: where all calls are as fast, and as slow, as the table's ranges say",
            None => "the table has no ranges: how much longer a call can take is not known",
        },
        table(figures, page)
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
        iec(peak.memory),
        iec(peak.waste),
        counted(peak.mappings, "mapping"),
        iec(peak.addresses)
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
    page.fold(&text)
}

pub(super) fn said(failed: &Failed) -> String {
    format!(
        "step {} fails ({}): {}",
        failed.step,
        safe(&failed.does),
        safe(&failed.error)
    )
}

struct Units {
    time: Unit,
    memory: Unit,
    /// The unit of the columns that only details have.
    waste: Unit,
    addresses: Unit,
}

impl Units {
    fn new(figures: &Figures) -> Self {
        let steps = || figures.steps.iter();
        let times = steps().flat_map(|row| [row.took.expected_us, row.took.measured_us]);
        let waste = steps().map(|row| row.held.memory - row.held.asked);
        Self {
            time: Unit::of_nanos(times.flatten().map(|micros| micros * 1e3)),
            memory: Unit::of_bytes(steps().map(|row| row.held.memory)),
            waste: Unit::of_bytes(waste),
            addresses: Unit::of_bytes(steps().map(|row| row.held.addresses)),
        }
    }
}

fn table(figures: &Figures, page: Page) -> Table {
    let measured = figures.total.measured_us.is_some() || figures.whose.driver != "model";
    let ranged = range(&figures.ending).is_some();
    let units = Units::new(figures);
    let mut head = vec!["step".to_owned(), "what".to_owned(), "calls".to_owned()];
    head.push(units.time.head("expected"));
    if ranged {
        head.push(units.time.head("range"));
    }
    if measured {
        head.extend([units.time.head("measured"), "ratio".to_owned()]);
    }
    head.push(units.memory.head("memory"));
    head.push(units.waste.head("waste"));
    if page.is_verbose() {
        head.extend([units.memory.head("asked"), "mappings".to_owned()]);
        head.push(units.addresses.head("addresses"));
    }
    let names: Vec<&str> = head.iter().map(String::as_str).collect();
    let mut table = page.table(&names, |column| column != 1);
    let time = |micros: f64| units.time.figure(micros * 1e3);
    let times = |took: &Total| {
        let mut cells = vec![took.expected_us.map(time)];
        if ranged {
            let ends = took.expected_low_us.zip(took.expected_high_us);
            cells.push(ends.map(|(low, high)| format!("{} to {}", time(low), time(high))));
        }
        if measured {
            cells.push(took.measured_us.map(time));
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
        let waste = row.held.memory - row.held.asked;
        cells.push(units.memory.figure(row.held.memory as f64));
        cells.push(units.waste.figure(waste as f64));
        if page.is_verbose() {
            cells.push(units.memory.figure(row.held.asked as f64));
            cells.push(row.held.mappings.to_string());
            cells.push(units.addresses.figure(row.held.addresses as f64));
        }
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
