//! Pools of several processes that share one budget. The processes are in one here, except for a few
//! tests that start programs.

#[path = "../common/mod.rs"]
mod common;
#[path = "../ledger_contents_support/mod.rs"]
mod ledger_contents_support;

mod basics;
mod contents;
mod control;
mod exports;
mod foreign;
mod leaving;
mod pressure;
mod stalls;
mod turns;
