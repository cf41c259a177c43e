//! Holders: owners of memory that is in no slot, what the pool lends to them, and how it takes
//! memory back from them.

mod container;
mod driver_figures;
mod driver_memory;
mod giving;
mod held;
mod holder;
mod lend;
mod moving;
mod rest;

pub(crate) use held::HolderId;
pub(in crate::pool) use held::Holders;
pub(crate) use holder::{Given, Holder, HolderFigures};
pub(crate) use lend::{Lending, Lent};
pub(crate) use moving::{
    Attempts, CanSleep, HolderToSleep, HolderToWake, Marked, MovingHolder, WakingHolder,
};
pub(crate) use rest::Rest;
