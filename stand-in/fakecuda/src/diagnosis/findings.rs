//! Findings: what the program did wrong, each once with the number of times.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::site::Site;

/// The most different findings that are kept. Later ones are only counted.
const KEPT: usize = 1_000;

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    Leak,
    /// A call took memory, or access to it, from work that was queued.
    TakenFromWork,
    /// A handle or an address was used after its release.
    UsedAfterRelease,
    /// A copy to the host read bytes that were never written.
    ReadUnwritten,
}

impl What {
    /// Returns the word for this kind in the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Leak => "leaked",
            Self::TakenFromWork => "taken from queued work",
            Self::UsedAfterRelease => "used after release",
            Self::ReadUnwritten => "read but never written",
        }
    }

    /// Returns the word for this kind in JSON.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Leak => "leak",
            Self::TakenFromWork => "taken-from-work",
            Self::UsedAfterRelease => "used-after-release",
            Self::ReadUnwritten => "read-unwritten",
        }
    }
}

/// A finding.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) what: What,
    /// The kind of object, such as `physical`.
    pub(crate) object: &'static str,
    /// Handles or addresses, the first few.
    pub(crate) values: Vec<u64>,
    /// One line that says what happened.
    pub(crate) text: String,
    /// Places in the program, each with what was done there.
    pub(crate) sites: Vec<(&'static str, Arc<Site>)>,
    pub(crate) times: u64,
    pub(crate) bytes: u64,
}

/// The kind, the object and the places of a finding. Findings that are equal in this are counted.
type Key = (What, &'static str, Vec<(&'static str, Arc<Site>)>);

#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) kept: Vec<Finding>,
    /// The index of each finding that is kept.
    known: BTreeMap<Key, usize>,
    /// The number of findings that were not kept.
    pub(crate) dropped: u64,
}

impl Findings {
    /// Adds a finding, or counts it with one at the same places.
    pub(crate) fn add(&mut self, finding: Finding) {
        let room = self.kept.len() < KEPT;
        let key = (finding.what, finding.object, finding.sites.clone());
        let known = self.known.get(&key).copied();
        match known.and_then(|index| self.kept.get_mut(index)) {
            Some(known) => {
                known.times += finding.times;
                known.bytes = known.bytes.saturating_add(finding.bytes);
                if known.values.len() < 8 {
                    known.values.extend(finding.values);
                }
            }
            None if room => {
                self.known.insert(key, self.kept.len());
                self.kept.push(finding);
            }
            None => self.dropped += finding.times,
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.kept.iter().map(|finding| finding.times).sum::<u64>() + self.dropped
    }
}
