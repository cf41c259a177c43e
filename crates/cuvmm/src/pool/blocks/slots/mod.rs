//! Slots: places for blocks, and the lists in which the pool finds them.

mod hardened;
mod ids;
mod resting;
mod rows;
mod share_table;
mod sleep_state;
mod slot;
mod tenancy;

pub use hardened::Hardened;
pub(in crate::pool) use hardened::Hardening;
pub(in crate::pool) use ids::{BYTES, BlockPlace, SlotId, too_large};
pub(in crate::pool) use share_table::Sharers;
pub(in crate::pool) use sleep_state::SleepState;
pub(in crate::pool) use slot::{Class, Figures, Freed, Occupant, Slot};
pub(in crate::pool) use tenancy::{Aged, FreedBlock, Give, Tenancy, Unswept};
