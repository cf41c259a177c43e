//! Forked blocks, and the compaction before a fork.
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod compact;
mod compact_prefix;
mod hazards;
