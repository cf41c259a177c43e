//! The model of the driver, and the host driver where both must answer alike.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::undocumented_unsafe_blocks
)]

#[path = "../model_support/mod.rs"]
mod model_support;

mod agreement;
mod capture;
mod clock;
mod facts;
mod fault_wrapper;
mod hazards;
mod hostile;
mod mem_pools;
mod others;
mod plain;
mod streams;
