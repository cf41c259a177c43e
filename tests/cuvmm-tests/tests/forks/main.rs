//! Forked blocks, and the compaction before a fork.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/programs.rs"]
mod programs;

mod blocks;
mod compact;
mod compact_prefix;
mod hazards;
