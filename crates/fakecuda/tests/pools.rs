//! Memory pools and host memory from programs in C.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

#[path = "../testing/built.rs"]
mod built;
#[path = "../testing/programs.rs"]
mod programs;

use programs::{Programs, said};

/// The program's work runs at once, and late. It leaves nothing behind.
#[test]
fn pools_work_without_a_context_and_host_memory_is_copied() {
    let programs = Programs::new();
    let pools = programs.compile("pools");
    for work in ["at-once", "late"] {
        let settings = [
            ("FAKECUDA_DEVICES", "2"),
            ("FAKECUDA_WORK", work),
            ("FAKECUDA_REPORT", "-"),
            ("FAKECUDA_EXIT_CODE", "1"),
        ];
        let output = programs.run(&pools, &[], &settings);
        assert!(output.status.success(), "{work}: {}", said(&output));
    }
}
