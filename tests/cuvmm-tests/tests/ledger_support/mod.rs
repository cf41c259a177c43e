//! One device for several processes: a thread that counts what they have created, a driver that asks
//! it, and a storm that kills them. They share no code with the ledger.
#![allow(dead_code)]

pub mod counted;
pub mod device;
pub mod holders;
pub mod member;
#[path = "../../../../crates/cuvmm-model/testing/own_process.rs"]
mod own_process;
pub mod process;
pub mod storm;
