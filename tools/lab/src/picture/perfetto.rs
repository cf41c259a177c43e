//! Counter tracks as Chrome's trace events (JSON), which Perfetto and `chrome://tracing` open.
//!
//! Each ledger or pool is a process of the trace, with a track `memory` of all bands, and tracks for
//! the sum and the limit. Values are bytes, times microseconds. The first event of `memory` names all
//! bands, because `chrome://tracing` knows no others. Later events name those that hold memory, and with
//! 0 those that no longer do, so that a trace is not much larger than its recording.

use std::collections::BTreeSet;
use std::io::{self, Write};

use serde_json::{Map, Value, json};

use super::series::{Point, Series};

/// Writes the events of all series.
///
/// # Errors
/// The write is refused.
pub(super) fn write(to: &mut impl Write, all: &[Series]) -> io::Result<()> {
    to.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut before = "";
    for (series, id) in all.iter().zip(1u32..) {
        let process = json!({
            "ph": "M", "name": "process_name", "pid": id, "args": { "name": series.source },
        });
        write!(to, "{before}{process}")?;
        before = ",\n";
        let mut last = None;
        for point in &series.points {
            for (name, args) in [
                ("memory", bands(series, last, point)),
                ("held", one(point.total())),
                ("limit", one(point.limit)),
            ] {
                let event = json!({
                    "ph": "C", "name": name, "pid": id, "tid": 0, "ts": point.time, "args": args,
                });
                write!(to, "{before}{event}")?;
            }
            last = Some(point);
        }
    }
    to.write_all(b"]}\n")
}

/// Returns the values of the bands that a point has, and of those that the point before it had; of the
/// first point, those of all bands.
fn bands(series: &Series, last: Option<&Point>, point: &Point) -> Map<String, Value> {
    let named: BTreeSet<usize> = match last {
        None => (0..series.bands.len()).collect(),
        Some(last) => {
            let held = last.held.iter().chain(&point.held);
            held.map(|&(band, _)| band).collect()
        }
    };
    let named = named.into_iter().filter_map(|band| {
        let name = series.bands.get(band)?;
        Some((name.clone(), point.of(band).into()))
    });
    named.collect()
}

fn one(bytes: u64) -> Map<String, Value> {
    Map::from_iter([("bytes".to_owned(), bytes.into())])
}

#[cfg(test)]
mod tests {
    use cuvmm::recording::Recording;

    use super::*;

    fn written(recording: &str) -> Vec<u8> {
        let recording = Recording::read(recording.as_bytes()).unwrap();
        let mut trace = Vec::new();
        write(&mut trace, &Series::of(&recording).unwrap()).unwrap();
        trace
    }

    #[test]
    fn a_band_that_holds_nothing_more_is_said_once() {
        let recording = r#"{"recording":1,"begun_us":0}
{"t_us":0,"source":"a","limit":9,"parts":[["x",1]]}
{"t_us":1,"source":"a","limit":9,"parts":[["y",2]]}
{"t_us":2,"source":"a","limit":9,"parts":[["y",3]]}
"#;
        let trace: Value = serde_json::from_slice(&written(recording)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let memory = events.iter().filter(|event| event["name"] == "memory");
        let memory: Vec<_> = memory.map(|event| &event["args"]).collect();
        assert_eq!(
            memory,
            [
                &json!({"x": 1, "y": 0}),
                &json!({"x": 0, "y": 2}),
                &json!({"y": 3})
            ]
        );
    }

    #[test]
    fn a_trace_is_not_much_larger_than_its_recording() {
        let part = |band: usize| format!("[\"{}{band}\",1]", "long name ".repeat(10));
        let sample = |at, parts| {
            format!("{{\"t_us\":{at},\"source\":\"a\",\"limit\":1,\"parts\":[{parts}]}}\n")
        };
        let all: Vec<_> = (0..1000).map(part).collect();
        let mut recording =
            "{\"recording\":1,\"begun_us\":0}\n".to_owned() + &sample(0, all.join(","));
        (1..10_000).for_each(|at| recording += &sample(at, part(999)));
        let trace = written(&recording);
        assert!(trace.len() < 3 * recording.len(), "{}", trace.len());
    }
}
