//! Memory pools, host memory and two devices, from programs in C.

use crate::programs::{Programs, said};

/// Runs a program with two devices, whose work runs at once, and late. It leaves nothing behind.
fn run(name: &str) {
    let programs = Programs::new();
    let program = programs.compile(name);
    for work in ["at-once", "late"] {
        let settings = [
            ("FAKECUDA_DEVICES", "2"),
            ("FAKECUDA_WORK", work),
            ("FAKECUDA_REPORT", "-"),
            ("FAKECUDA_EXIT_CODE", "1"),
        ];
        let output = programs.run(&program, &[], &settings);
        assert!(output.status.success(), "{name} {work}: {}", said(&output));
    }
}

#[test]
fn pools_work_without_a_context_and_host_memory_is_copied() {
    run("pools");
}

#[test]
fn a_copy_runs_on_a_stream_of_any_device() {
    run("apart");
}
