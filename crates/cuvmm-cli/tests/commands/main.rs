//! The command as programs and people start it: what it prints, and how it ends.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../../stand-in/fakecuda/testing/built.rs"]
mod built;
#[path = "../../../../stand-in/fakecuda/testing/programs.rs"]
mod programs;
#[path = "../support/mod.rs"]
mod support;

mod demo;
mod fake;
mod generated;
mod heap;
mod hostile;
mod info;
mod ledger;
mod metrics;
mod numbers;
mod plan;
mod record;
mod replay;
mod replay_paged;
mod replay_processes;
mod share;
mod width;
mod words;

#[test]
#[ignore = "a program of its own, started by another test"]
fn example_processes() {
    support::program::run();
}
