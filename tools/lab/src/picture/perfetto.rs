//! Counter tracks as Chrome's trace events (JSON), which Perfetto and `chrome://tracing` open.
//!
//! Each ledger or pool is a process of the trace, with a track `memory` of all bands, and tracks for
//! the sum and the limit. Values are bytes, times microseconds.

use serde_json::{Map, Value, json};

use super::series::Series;

/// Returns the events of all series.
///
/// # Errors
/// They cannot be written as JSON.
pub(super) fn json(all: &[Series]) -> anyhow::Result<String> {
    let events = all
        .iter()
        .zip(1..)
        .flat_map(|(series, id)| events(series, id));
    let events: Vec<Value> = events.collect();
    let trace = json!({ "displayTimeUnit": "ms", "traceEvents": events });
    Ok(serde_json::to_string(&trace)?)
}

fn events(series: &Series, id: u32) -> Vec<Value> {
    let mut events = vec![json!({
        "ph": "M", "name": "process_name", "pid": id, "args": { "name": series.source },
    })];
    let names: Vec<String> = series.bands.clone();
    for point in &series.points {
        let mut counter = |name: &str, args: Map<String, Value>| {
            events.push(json!({
                "ph": "C", "name": name, "pid": id, "tid": 0, "ts": point.time, "args": args,
            }));
        };
        let bands = names.iter().enumerate();
        let bands = bands.map(|(band, name)| (name.clone(), point.of(band).into()));
        counter("memory", bands.collect());
        counter("held", one(point.total()));
        counter("limit", one(point.limit));
    }
    events
}

fn one(bytes: u64) -> Map<String, Value> {
    Map::from_iter([("bytes".to_owned(), bytes.into())])
}
