//! Holders: owners of memory that is in no slot, what the pool lends to them, and how it takes
//! memory back from them.

mod container;
mod driver_figures;
mod driver_memory;
mod giving;
mod holder;
mod lend;

pub(in crate::pool) use holder::Held;
pub(crate) use holder::{Given, Holder, HolderFigures, HolderId};
pub(crate) use lend::Lending;
