//! Processes with contexts of their own that are killed while they allocate, grow, free and pass on
//! memory of one budget. `ledger_processes.rs` has the same on the host driver, ten times as often.

use crate::gpu::Stage;
use crate::ledger_support::member;
use crate::ledger_support::process::{ON_GPU, Place};
use crate::ledger_support::storm;

/// Granules of the ledger and of the counted device, so that processes could exceed the limit.
const SIZES: (u64, u64) = (100, 500);

/// Plays a process. Does nothing when it runs as a test.
#[test]
fn process() {
    member::play();
}

/// The code that the GPU runs, where there is none.
#[test]
fn killed_processes_keep_nothing_on_host() {
    let place = Place::of("storm::process", "host", SIZES);
    storm::run(&place, None, 10);
}

#[test]
fn a_hundred_killed_processes_keep_nothing_on_gpu() {
    let name = "storm::a_hundred_killed_processes_keep_nothing_on_gpu";
    let Some(stage) = Stage::on_gpu(name) else {
        return;
    };
    let place = Place::of("storm::process", ON_GPU, SIZES);
    storm::run(&place, Some(&stage.device), storm::kills(100));
    stage.finish();
}
