//! Functions that a stream runs, from a program in C.

use crate::programs::{Programs, said};

const REPORT: (&str, &str) = ("FAKECUDA_REPORT", "-");

/// The program leaves nothing behind, and nothing is done twice or too early.
#[test]
fn a_function_keeps_its_stream_busy_and_nothing_else() {
    let programs = Programs::new();
    let functions = programs.compile("functions");
    for settings in [
        &[REPORT][..],
        &[REPORT, ("FAKECUDA_WORK", "late")],
        &[REPORT, ("FAKECUDA_MANNER", "strict")],
    ] {
        let output = programs.run(&functions, &[], settings);
        assert!(output.status.success(), "{settings:?}: {}", said(&output));
        let text = said(&output);
        assert!(text.ends_with("nothing found\n"), "{settings:?}: {text}");
    }
}

#[test]
fn a_process_ends_and_reports_while_a_function_runs() {
    let programs = Programs::new();
    let functions = programs.compile("functions");
    for how in ["exit-while-one-runs", "exit-inside"] {
        for work in ["at-once", "late"] {
            let settings = [REPORT, ("FAKECUDA_WORK", work)];
            let output = programs.run(&functions, &[how], &settings);
            assert!(output.status.success(), "{how} {work}: {}", said(&output));
            let text = said(&output);
            assert!(text.contains("leaked: allocation"), "{how} {work}: {text}");
        }
    }
}
