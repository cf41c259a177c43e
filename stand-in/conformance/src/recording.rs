//! Recorded answers as committed data, and comparisons with them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Report;

/// The answers of one driver, with a description of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recording {
    /// The product name of the device.
    pub gpu: String,
    /// The version of the driver: `580.159`.
    pub driver_version: String,
    /// The date of the recording: `2026-11-30`.
    pub date: String,
    /// The CUDA version of the driver: `13.0`.
    pub cuda_version: String,
    /// The answers by case.
    pub answers: BTreeMap<String, String>,
}

/// A recording that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// The file is not a recording.
    #[error("{} is no recording of answers: {error}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The error.
        error: serde_json::Error,
    },
}

/// A case that two drivers answer differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The case's name.
    pub case: String,
    /// The recorded answer.
    pub recorded: String,
    /// The answer of this run.
    pub here: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            case,
            recorded,
            here,
        } = self;
        write!(f, "{case}: recorded \"{recorded}\", here \"{here}\"")
    }
}

/// The comparison of a run with a recording.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Comparison {
    /// The number of cases with the same answer.
    pub same: usize,
    /// Cases with different answers.
    pub different: Vec<Difference>,
    /// Cases that were run and are not in the recording.
    pub not_recorded: Vec<String>,
    /// Cases in the recording that were not run.
    pub not_asked: Vec<String>,
}

impl Recording {
    /// Reads a recording.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not a recording.
    pub fn read(path: &Path) -> Result<Self, RecordingError> {
        let text = fs::read_to_string(path).map_err(|error| RecordingError::File {
            path: path.to_owned(),
            error,
        })?;
        serde_json::from_str(&text).map_err(|error| RecordingError::Format {
            path: path.to_owned(),
            error,
        })
    }

    /// Writes a recording, one answer per line, ordered by name.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), RecordingError> {
        let text = serde_json::to_string_pretty(self).map_err(|error| RecordingError::Format {
            path: path.to_owned(),
            error,
        })?;
        fs::write(path, text + "\n").map_err(|error| RecordingError::File {
            path: path.to_owned(),
            error,
        })
    }

    /// Compares the answers of a run with the recording.
    #[must_use]
    pub fn compare(&self, report: &Report) -> Comparison {
        let mut comparison = Comparison::default();
        for (case, here) in &report.answers {
            match self.answers.get(case) {
                Some(recorded) if recorded == here => comparison.same += 1,
                Some(recorded) => comparison.different.push(Difference {
                    case: case.clone(),
                    recorded: recorded.clone(),
                    here: here.clone(),
                }),
                None => comparison.not_recorded.push(case.clone()),
            }
        }
        let asked = |case: &&String| !report.answers.contains_key(*case);
        comparison.not_asked = self.answers.keys().filter(asked).cloned().collect();
        comparison
    }
}

/// Returns the version of the installed NVIDIA driver, as its kernel module states it.
#[must_use]
pub fn driver_version() -> Option<String> {
    let stated = fs::read_to_string("/sys/module/nvidia/version").ok();
    let version = stated.map(|text| text.trim().to_owned()).or_else(|| {
        let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
        version_in(&text)
    });
    version.filter(|version| !version.is_empty())
}

/// Returns the first word made of digits and dots, on the line of the kernel module.
fn version_in(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let numeric =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(numeric).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(answers: &[(&str, &str)]) -> Recording {
        Recording {
            gpu: "a GPU".to_owned(),
            driver_version: "1.2".to_owned(),
            date: "2026-01-02".to_owned(),
            cuda_version: "13.0".to_owned(),
            answers: owned(answers),
        }
    }

    fn owned(answers: &[(&str, &str)]) -> BTreeMap<String, String> {
        answers
            .iter()
            .map(|(case, answer)| ((*case).to_owned(), (*answer).to_owned()))
            .collect()
    }

    #[test]
    fn comparison_tells_the_four_kinds_apart() {
        let recorded = recording(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let report = Report {
            answers: owned(&[("a", "1"), ("b", "9"), ("d", "4")]),
            ..Report::default()
        };
        let comparison = recorded.compare(&report);
        assert_eq!(comparison.same, 1);
        assert_eq!(comparison.different.len(), 1);
        assert_eq!(
            comparison.different[0].to_string(),
            "b: recorded \"2\", here \"9\""
        );
        assert_eq!(comparison.not_recorded, ["d"]);
        assert_eq!(comparison.not_asked, ["c"]);
    }

    #[test]
    fn what_is_written_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("answers.json");
        let recorded = recording(&[("map.past_end", "CUDA_SUCCESS")]);
        recorded.write(&path).unwrap();
        assert_eq!(Recording::read(&path).unwrap(), recorded);
    }

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("answers.json");
        assert!(
            Recording::read(&path)
                .unwrap_err()
                .to_string()
                .contains("answers.json")
        );
        fs::write(&path, "{}").unwrap();
        let error = Recording::read(&path).unwrap_err().to_string();
        assert!(error.contains("is no recording of answers"), "{error}");
    }

    #[test]
    fn the_version_is_found_in_the_modules_line() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release \
                    Build\nGCC version:  gcc version 12.2.0\n";
        assert_eq!(version_in(text).as_deref(), Some("580.159.03"));
        assert_eq!(version_in("GCC version: 12.2.0"), None);
    }
}
