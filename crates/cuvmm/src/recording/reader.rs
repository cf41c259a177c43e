//! Reading recordings, which may come from anywhere.

use std::io::{self, BufRead, Read as _};

use super::{Header, Sample, VERSION};

/// The most bytes of a line.
pub(super) const LONGEST: u64 = 1 << 20;

/// A recording of memory over time. See [the module](super).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// When the recording began, in microseconds since 1970.
    pub begun_us: u64,
    /// The samples, oldest first.
    pub samples: Vec<Sample>,
}

/// The reason why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// The input fails.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// The first line is not that of a recording.
    #[error("this is no recording: its first line has no version and time")]
    NoRecording,
    /// The recording has another version.
    #[error("this recording has version {0}, and {VERSION} can be read")]
    Version(u32),
    /// A line has more than 1 MiB.
    #[error("line {line} has more than 1 MiB")]
    TooLong {
        /// The number of the line, from 1.
        line: usize,
    },
    /// A line is no sample.
    #[error("line {line} is no sample: {reason}")]
    NoSample {
        /// The number of the line, from 1.
        line: usize,
        /// The part that is wrong.
        reason: String,
    },
    /// A sample is earlier than the one before it.
    #[error("line {line} is earlier than the line before it")]
    Earlier {
        /// The number of the line, from 1.
        line: usize,
    },
}

impl Recording {
    /// Reads a recording to its end. A last line without a line end, as in a recording that is being
    /// written or was cut off, is left out.
    ///
    /// # Errors
    /// The input fails or is no recording; the error names the line.
    pub fn read(mut input: impl BufRead) -> Result<Self, RecordingError> {
        let first = line(&mut input, 1)?.ok_or(RecordingError::NoRecording)?;
        let header: Header =
            serde_json::from_slice(&first).map_err(|_| RecordingError::NoRecording)?;
        if header.recording != VERSION {
            return Err(RecordingError::Version(header.recording));
        }
        let mut samples = Vec::<Sample>::new();
        for number in 2.. {
            let Some(text) = line(&mut input, number)? else {
                break;
            };
            let sample: Sample =
                serde_json::from_slice(&text).map_err(|error| RecordingError::NoSample {
                    line: number,
                    reason: error.to_string(),
                })?;
            if samples.last().is_some_and(|last| last.t_us > sample.t_us) {
                return Err(RecordingError::Earlier { line: number });
            }
            samples.push(sample);
        }
        Ok(Self {
            begun_us: header.begun_us,
            samples,
        })
    }
}

/// Returns the next whole line, or `None` at the end.
fn line(input: &mut impl BufRead, number: usize) -> Result<Option<Vec<u8>>, RecordingError> {
    let mut line = Vec::new();
    input.take(LONGEST + 1).read_until(b'\n', &mut line)?;
    if line.last() == Some(&b'\n') {
        return Ok(Some(line));
    }
    match line.len() as u64 > LONGEST {
        true => Err(RecordingError::TooLong { line: number }),
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, Recording};

    const HEADER: &str = "{\"recording\":1,\"begun_us\":7}\n";
    const SAMPLE: &str =
        "{\"t_us\":5,\"source\":\"a\",\"limit\":9,\"parts\":[[\"x\",3]],\"more\":0}\n";

    fn refused(text: &str) -> String {
        Recording::read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_whole_is_read() {
        let read = |text: &str| Recording::read(text.as_bytes()).unwrap();
        let found = read(&format!("{HEADER}{SAMPLE}{SAMPLE}"));
        assert_eq!((found.begun_us, found.samples.len()), (7, 2));
        assert_eq!(found.samples[0].parts, [("x".to_owned(), 3)]);
        let cut = &SAMPLE[..20];
        assert_eq!(read(&format!("{HEADER}{SAMPLE}{cut}")).samples.len(), 1);
        assert_eq!(read(HEADER).samples, []);
    }

    #[test]
    fn what_is_no_recording_is_refused_with_the_line() {
        for text in ["", "no recording\n", "{}\n", &HEADER[..9], "\u{0}\n"] {
            assert!(refused(text).contains("no recording"), "{text}");
        }
        let later = HEADER.replace(":1,", ":2,");
        assert_eq!(
            refused(&later),
            "this recording has version 2, and 1 can be read"
        );
        for wrong in [
            SAMPLE.replace("5", "-1"),
            SAMPLE.replace('9', "1e40"),
            SAMPLE.replace("[[", "[[7,"),
            "{}\n".to_owned(),
            "\n".to_owned(),
        ] {
            let error = refused(&format!("{HEADER}{SAMPLE}{wrong}"));
            assert!(error.starts_with("line 3 is no sample"), "{wrong}: {error}");
        }
        let earlier = SAMPLE.replace('5', "4");
        let error = refused(&format!("{HEADER}{SAMPLE}{earlier}"));
        assert_eq!(error, "line 3 is earlier than the line before it");
        let long = " ".repeat(usize::try_from(LONGEST).unwrap() + 1);
        assert_eq!(
            refused(&format!("{HEADER}{long}")),
            "line 2 has more than 1 MiB"
        );
        // As deep as a line can be.
        let deep = format!("{HEADER}{}\n", "[".repeat(1 << 19));
        assert!(refused(&deep).starts_with("line 2 is no sample"));
    }
}
