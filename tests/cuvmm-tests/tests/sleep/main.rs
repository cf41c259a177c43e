//! Blocks that sleep and wake.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod exchange;
mod exchange_faults;
mod faults;
mod figures;
#[cfg(target_os = "linux")]
mod groups;
mod holder_faults;
mod holders;
mod kept;
mod leases;
mod marks;
mod panics;
mod processes;
mod store_faults;
mod stores;
