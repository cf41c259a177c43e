//! Pairs of a context and a peer whose memory it may access. Contexts are numbers here.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

pub(crate) type Pair = (usize, usize);

static ENABLED: Mutex<BTreeSet<Pair>> = Mutex::new(BTreeSet::new());

fn table<T>(act: impl FnOnce(&mut BTreeSet<Pair>) -> T) -> T {
    act(&mut ENABLED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Enables access. Returns `false` if it was enabled.
pub(crate) fn enable(pair: Pair) -> bool {
    table(|enabled| enabled.insert(pair))
}

/// Disables access. Returns `false` if it was not enabled.
pub(crate) fn disable(pair: Pair) -> bool {
    table(|enabled| enabled.remove(&pair))
}

pub(crate) fn is_enabled(pair: Pair) -> bool {
    table(|enabled| enabled.contains(&pair))
}

/// Disables all access of and to a context that ends.
pub(crate) fn forget(context: usize) {
    table(|enabled| enabled.retain(|&(own, peer)| own != context && peer != context));
}
