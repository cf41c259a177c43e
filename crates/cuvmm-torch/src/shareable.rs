//! The names of tags whose memory other processes may get.
//!
//! Memory of such a tag is created in the device's pool of shareable memory.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns `true` if the memory of a tag is shareable.
pub(crate) fn has(name: &str) -> bool {
    let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    names.contains(name)
}

/// Makes the memory of a tag shareable, for good. The caller has checked that the tag has none yet.
pub(crate) fn add(name: &str) {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    names.insert(name.to_owned());
}

/// Refuses a shareable tag for memory of graphs, which no other process gets.
pub(crate) fn refuse_graphs(name: &str) -> Result<(), Error> {
    match has(name) {
        true => Err(Error::GraphsInShareable(name.to_owned())),
        false => Ok(()),
    }
}

/// Refuses a shareable tag for a paged cache, whose memory no other process gets.
pub(crate) fn refuse_paged(name: &str) -> Result<(), Error> {
    match has(name) {
        true => Err(Error::PagedInShareable(name.to_owned())),
        false => Ok(()),
    }
}
