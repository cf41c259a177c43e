//! Findings: the program's mistakes, each once with the number of times.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::site::Site;

/// The most findings that are kept. Later ones are only counted.
const KEPT: usize = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    Leak,
    /// A call took memory, or access to memory, from queued work.
    TakenFromWork,
    /// A handle or an address was used after its release.
    UsedAfterRelease,
    /// A copy to the host read bytes that were never written.
    ReadUnwritten,
}

impl What {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Leak => "leaked",
            Self::TakenFromWork => "taken from queued work",
            Self::UsedAfterRelease => "used after release",
            Self::ReadUnwritten => "read but never written",
        }
    }

    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Leak => "leak",
            Self::TakenFromWork => "taken-from-work",
            Self::UsedAfterRelease => "used-after-release",
            Self::ReadUnwritten => "read-unwritten",
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) what: What,
    /// The kind of object, such as `physical`.
    pub(crate) object: &'static str,
    pub(crate) values: Vec<u64>,
    pub(crate) text: String,
    /// Sites in the program, each with the action there.
    pub(crate) sites: Vec<(&'static str, Arc<Site>)>,
    pub(crate) times: u64,
    pub(crate) bytes: u64,
}

/// The kind, the object and the sites of a finding. Findings with equal keys are counted together.
type Key = (What, &'static str, Vec<(&'static str, Arc<Site>)>);

#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) kept: Vec<Finding>,
    known: BTreeMap<Key, usize>,
    pub(crate) dropped: u64,
}

impl Findings {
    /// Adds a finding, or counts it with an equal one.
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
