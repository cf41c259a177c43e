//! The library and the process that it is in: forked children, and the library closed and opened again.

use crate::programs::{Programs, said};

#[test]
fn a_child_of_a_process_with_busy_threads_answers() {
    let programs = Programs::new();
    let forks = programs.compile("forks");
    for settings in [&[][..], &[("FAKECUDA_REPORT", "-")]] {
        let output = programs.run(&forks, &[], settings);
        assert!(output.status.success(), "{settings:?}: {}", said(&output));
    }
}

#[test]
fn the_library_can_be_closed_while_its_objects_live() {
    let programs = Programs::new();
    let reloads = programs.compile("reloads");
    for how in ["", "functions"] {
        for settings in [&[][..], &[("FAKECUDA_REPORT", "-")]] {
            let output = programs.run(&reloads, &[how], settings);
            assert!(
                output.status.success(),
                "{how} {settings:?}: {} {}",
                output.status,
                said(&output)
            );
        }
        // With a report the library stays, and its tables with what every round left.
        let output = programs.run(&reloads, &[how], &[("FAKECUDA_REPORT", "-")]);
        let text = said(&output);
        assert!(
            text.contains("5 times here, 20 KiB in all"),
            "{how}: {text}"
        );
    }
}
