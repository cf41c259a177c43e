//! Several processes with one GPU.
#![allow(missing_docs)]

#[path = "../gpu/mod.rs"]
mod gpu;

mod ledger;
mod share;
mod share_pool;
