//! The memory of a ledger that requests of the [queue](super::queue) lack, of which other processes see
//! the largest size, at the place of the oldest request.

use std::collections::BTreeMap;

use crate::ledger::InLine;
use crate::wanted::Lacking;

/// The bytes that requests lack, by the requests' numbers.
#[derive(Debug, Default)]
pub(super) struct Lacked {
    /// Each request's place in the line of all processes, and the bytes that it lacks.
    requests: BTreeMap<u64, (InLine, u64)>,
    /// The tenants of all of them, and of requests that have ended meanwhile.
    all: Option<Lacking>,
}

impl Lacked {
    pub(super) fn note(&mut self, number: u64, place: InLine, lacking: Lacking) {
        self.requests.insert(number, (place, lacking.bytes));
        self.all = Some(lacking.with(self.all.take()));
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.requests.extend(&other.requests);
        if let Some(all) = &other.all {
            self.all = Some(all.clone().with(self.all.take()));
        }
    }

    /// Removes a request that has ended. Returns `true` if it was noted.
    pub(super) fn remove(&mut self, number: u64) -> bool {
        self.requests.remove(&number).is_some()
    }

    pub(super) fn all(&self) -> Option<(InLine, Lacking)> {
        let place = self.requests.values().map(|&(place, _)| place).min()?;
        let bytes = self.requests.values().map(|&(_, bytes)| bytes).max()?;
        let lacking = Lacking {
            bytes,
            ..self.all.clone()?
        };
        Some((place, lacking))
    }
}
