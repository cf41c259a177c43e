//! Waiting for memory as a future.
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod faults;
mod hazards;
mod leaked;
mod sleep;
