//! Several processes with one GPU.
// `common`, `gpu` and `ledger_support` each have the small files that they need.
#![allow(clippy::duplicate_mod)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../ledger_support/mod.rs"]
mod ledger_support;

mod ledger;
mod share;
mod share_pool;
mod storm;
