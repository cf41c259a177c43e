//! Heaps: allocations of any size in stream order over a tenant's memory.

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod basics;
mod faults;
mod hazards;
mod mapper;
mod merge;
mod panics;
mod peers;
mod policy;
mod refused;
mod reports;
mod sleep;
mod sleep_faults;
mod tenants;
mod threads;
mod waits;
