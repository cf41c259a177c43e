//! Pools, tenants and blocks: what they hold, what they refuse, and what is left when a driver call
//! fails.

#[path = "../common/mod.rs"]
mod common;

mod adjacent;
mod basics;
mod batch;
mod beside;
mod calls;
mod cuts;
mod drawn_in;
mod faults;
mod figures;
mod gate;
mod hardened;
mod hazards;
mod lease_faults;
mod limits;
mod mapper;
mod meanwhile;
mod other_programs;
mod out_of_memory;
mod panic_sweep;
mod panics;
mod parts;
mod peers;
mod pending_free;
mod pool_faults;
mod pressure;
mod proof;
mod quarantine;
mod quarantine_aliases;
mod ranges;
mod shrinks;
mod user_code;
mod warm;
