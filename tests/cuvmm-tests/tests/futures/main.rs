//! Waiting for memory as a future.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod faults;
mod hazards;
mod leaked;
mod sleep;
