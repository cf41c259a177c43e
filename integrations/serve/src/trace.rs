//! Requests: read from a trace or drawn from a seed, and arranged in bursts that do not overlap.
//!
//! A trace is the CSV of the Azure LLM inference traces, with the columns `TIMESTAMP`,
//! `ContextTokens` and `GeneratedTokens`. This module serves nothing.

use std::io::Read;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use jiff::civil::DateTime;
use jiff::tz::Offset;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) at: Duration,
    pub(crate) context: usize,
    pub(crate) generated: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) model: usize,
    /// The time since the server started.
    pub(crate) arrival: Duration,
    /// Tokens of the prompt, at least one.
    pub(crate) prompt: usize,
    /// Tokens of the answer, at least one.
    pub(crate) answer: usize,
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "TIMESTAMP")]
    timestamp: String,
    #[serde(rename = "ContextTokens")]
    context: usize,
    #[serde(rename = "GeneratedTokens")]
    generated: usize,
}

/// Reads a trace and sorts its rows.
///
/// # Errors
/// A line is invalid, or the trace has no rows.
pub(crate) fn read(from: impl Read) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut lines = csv::Reader::from_reader(from);
    // If the first line cannot be read, `deserialize` returns no lines and no error.
    lines.headers()?;
    for line in lines.deserialize() {
        let Line {
            timestamp,
            context,
            generated,
        } = line?;
        let at: DateTime = timestamp
            .trim()
            .parse()
            .with_context(|| format!("{timestamp:?} is no time"))?;
        rows.push((Offset::UTC.to_timestamp(at)?, context, generated));
    }
    rows.sort_unstable();
    let (first, _, _) = rows.first().copied().context("the trace has no request")?;
    let since = |(at, context, generated): (jiff::Timestamp, usize, usize)| {
        Ok(Row {
            at: at.duration_since(first).try_into()?,
            context,
            generated,
        })
    };
    rows.into_iter().map(since).collect()
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Drawn {
    pub(crate) window: Duration,
    pub(crate) windows: usize,
    /// Requests in each window, all in its first fifth.
    pub(crate) burst: usize,
}

impl Drawn {
    /// Draws prompts of 128 to 1536 tokens and answers of 48 to 144.
    pub(crate) fn rows(&self, seed: u64) -> Vec<Row> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut rows = Vec::new();
        for window in 0..self.windows {
            for _ in 0..self.burst {
                let within = self.window.mul_f64(random.f64() / 5.);
                rows.push(Row {
                    at: self.window * window as u32 + within,
                    context: random.usize(128..=1536),
                    generated: random.usize(48..=144),
                });
            }
        }
        rows.sort_unstable_by_key(|row| row.at);
        rows
    }
}

/// Parameters by which rows become requests of several models that take turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    pub(crate) window: Duration,
    pub(crate) windows: usize,
    /// The factor by which requests come faster than in the trace.
    pub(crate) speed: f64,
    /// The factor by which the lengths are multiplied.
    pub(crate) lengths: f64,
    /// The most tokens of prompt and answer; longer ones are cut.
    pub(crate) longest: usize,
}

impl Turns {
    /// Returns each model's rows, in order and at their distances, during its turns. A model's time
    /// stands still during the turns of others.
    pub(crate) fn requests(&self, models: &[Vec<Row>]) -> anyhow::Result<Vec<Request>> {
        ensure!(!self.window.is_zero(), "a turn must be longer than zero");
        ensure!(
            self.speed > 0. && self.lengths > 0.,
            "speed and lengths must be greater than zero"
        );
        ensure!(self.longest >= 2, "a request must have at least two tokens");
        let mut requests = Vec::new();
        for (model, rows) in models.iter().enumerate() {
            for row in rows {
                // A time too large to represent is after the last turn.
                let at = row.at.as_secs_f64() / self.speed;
                let Ok(at) = Duration::try_from_secs_f64(at) else {
                    break;
                };
                let before = at.as_nanos() / self.window.as_nanos();
                let turn = before * models.len() as u128 + model as u128;
                if turn >= self.windows as u128 {
                    break;
                }
                let turn = turn as u32;
                let within = (at.as_nanos() % self.window.as_nanos()) as u64;
                let scaled = |tokens: usize| ((tokens as f64 * self.lengths) as usize).max(1);
                let answer = scaled(row.generated).min(self.longest / 2);
                requests.push(Request {
                    model,
                    arrival: self.window * turn + Duration::from_nanos(within),
                    prompt: scaled(row.context).min(self.longest - answer),
                    answer,
                });
            }
        }
        requests.sort_by_key(|request| request.arrival);
        ensure!(
            !requests.is_empty(),
            "there are no requests in {} turns",
            self.windows
        );
        Ok(requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

    fn row(ms: u64, context: usize, generated: usize) -> Row {
        Row {
            at: Duration::from_millis(ms),
            context,
            generated,
        }
    }

    #[test]
    fn a_trace_is_read_whatever_ends_its_lines_and_put_in_order() {
        let lines = [
            HEADER,
            "2023-11-16 18:15:50.9951690,396,109",
            "2023-11-16 18:15:46.6805900,374,44",
            "",
        ];
        for end in ["\n", "\r\n"] {
            let rows = read(lines.join(end).as_bytes()).unwrap();
            let second = Row {
                at: Duration::from_nanos(4_314_579_000),
                ..row(0, 396, 109)
            };
            assert_eq!(rows, [row(0, 374, 44), second]);
        }
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        for (text, says) in [
            (HEADER.to_owned(), "no request"),
            (format!("{HEADER}\nyesterday,1,2"), "yesterday"),
            (
                format!("{HEADER}\n2023-11-16 18:15:46,-1,2"),
                "invalid digit",
            ),
            ("a,b\n1,2".to_owned(), "TIMESTAMP"),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert!(format!("{error:#}").contains(says), "{text:?}: {error:#}");
        }
        let folder = tempfile::tempdir().unwrap();
        let error = read(std::fs::File::open(folder.path()).unwrap()).unwrap_err();
        assert!(format!("{error:#}").contains("directory"), "{error:#}");
    }

    #[test]
    fn models_take_turns_and_keep_their_distances() {
        let turns = Turns {
            window: Duration::from_millis(100),
            windows: 4,
            speed: 2.,
            lengths: 0.5,
            longest: 100,
        };
        // The first's turns are 0 and 2, the second's 1 and 3; what comes later is left out.
        let first = vec![
            row(0, 10, 4),
            row(190, 300, 90),
            row(220, 1, 0),
            row(401, 9, 9),
        ];
        let second = vec![row(20, 40, 300)];
        let requests = turns.requests(&[first, second]).unwrap();
        let expected = [
            (0, 0, 5, 2),
            (0, 95, 55, 45),
            (1, 110, 20, 50),
            (0, 210, 1, 1),
        ];
        let expected = expected.map(|(model, ms, prompt, answer)| Request {
            model,
            arrival: Duration::from_millis(ms),
            prompt,
            answer,
        });
        assert_eq!(requests, expected);
        assert!(turns.requests(&[vec![], vec![]]).is_err());
    }

    #[test]
    fn drawn_bursts_are_the_same_for_a_seed() {
        let drawn = Drawn {
            window: Duration::from_secs(5),
            windows: 3,
            burst: 7,
        };
        let rows = drawn.rows(3);
        assert_eq!((rows.len(), &rows), (21, &drawn.rows(3)));
        assert_ne!(rows, drawn.rows(4));
        for (index, row) in rows.iter().enumerate() {
            let window = index / 7 * 5000;
            let within = row.at.as_millis() as usize - window;
            assert!(within <= 1000, "{row:?}");
        }
    }
}
