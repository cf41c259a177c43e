//! Modules that are for Linux, as the rest of the library sees them on other systems.
//!
//! There, no process is forked, no call lacks descriptors, and there are no ledgers: no value of a ledger's
//! types exists, so what a pool does in a ledger is never done.

pub(crate) mod descriptors;
pub(crate) mod fork;
pub(crate) mod ledger;
