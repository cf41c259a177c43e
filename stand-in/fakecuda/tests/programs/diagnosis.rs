//! The report: nothing for programs that are right, and each fault of programs that are not.

use std::process::Output;

use serde_json::Value;

use crate::programs::{Programs, said};

const REPORT: (&str, &str) = ("FAKECUDA_REPORT", "-");
const ALL: (&str, &str) = ("FAKECUDA_LEAKS", "all");
const LATE: (&str, &str) = ("FAKECUDA_WORK", "late");
const UNWRITTEN: (&str, &str) = ("FAKECUDA_UNWRITTEN", "1");
const JSON: (&str, &str) = ("FAKECUDA_REPORT_FORMAT", "json");

/// Returns the reports that a program wrote as JSON.
fn reports(output: &Output) -> Vec<Value> {
    let text = said(output);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{text}")))
        .collect()
}

/// Returns the findings of the one report of a program, as pairs of the finding and the object.
fn found(output: &Output) -> Vec<(String, String, u64)> {
    let reports = reports(output);
    assert_eq!(reports.len(), 1, "{}", said(output));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let findings = reports[0]["findings"].as_array().unwrap();
    findings
        .iter()
        .map(|one| {
            (
                text(&one["finding"]),
                text(&one["object"]),
                one["times"].as_u64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn a_program_that_is_right_has_no_finding() {
    let programs = Programs::new();
    let clean = programs.compile("clean");
    let ways: [&[(&str, &str)]; 4] = [
        &[REPORT],
        &[REPORT, ALL],
        &[REPORT, ALL, LATE, UNWRITTEN],
        &[REPORT, ALL, LATE, ("FAKECUDA_MANNER", "strict")],
    ];
    for settings in ways {
        for how in ["", "atexit", "forked", "current-atexit", "contexts"] {
            let output = programs.run(&clean, &[how], settings);
            assert!(
                output.status.success(),
                "{how} {settings:?}: {}",
                said(&output)
            );
            let lines: Vec<_> = said(&output).lines().map(str::to_owned).collect();
            assert_eq!(lines.len(), 1, "{how} {settings:?}: {lines:?}");
            assert!(lines[0].ends_with("calls: nothing found"), "{lines:?}");
        }
    }
    // Without a setting nothing is said.
    let output = programs.run(&clean, &[], &[]);
    assert!(output.status.success() && said(&output).is_empty());
}

#[test]
fn each_leak_is_named_with_its_size_and_its_place() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    for (what, said_of_it, line) in [
        (
            "reservation",
            "leaked: reservation 0x",
            "cuMemAddressReserve",
        ),
        ("physical", "2 MiB on device 0", "cuMemCreate"),
        ("reference", "leaked: physical 0x", "cuMemCreate"),
        ("mapping", "leaked: mapping 0x", "cuMemMap"),
        ("allocation", "3 times here, 12 KiB in all", "cuMemAlloc_v2"),
        (
            "pooled",
            "leaked: allocation of a memory pool 0x",
            "cuMemAllocAsync",
        ),
        ("pinned", "leaked: pinned allocation 0x", "cuMemHostAlloc"),
        (
            "managed",
            "leaked: managed allocation 0x",
            "cuMemAllocManaged",
        ),
        (
            "exported",
            "leaked: exported descriptor of a physical ",
            "cuMemExportToShareableHandle",
        ),
        ("pool", "leaked: memory pool 0x", "cuMemPoolCreate"),
    ] {
        let output = programs.run(&faulty, &[what, "keeps-context"], &[REPORT]);
        assert!(output.status.success(), "{what}: {}", said(&output));
        let text = said(&output);
        assert!(text.contains(said_of_it), "{what}: {text}");
        assert!(
            text.contains(&format!("made by {line}\n")),
            "{what}: {text}"
        );
        let in_source = text
            .lines()
            .any(|line| line.contains("c/faulty.c:") && line.contains(" in leak"));
        assert!(in_source, "{what}: {text}");
    }
    // A mapping that is forgotten leaves its reservation too.
    let output = programs.run(&faulty, &["mapping"], &[REPORT, JSON]);
    let leak = |object: &str| ("leak".to_owned(), object.to_owned(), 1);
    assert_eq!(found(&output), [leak("reservation"), leak("mapping")]);
}

#[test]
fn streams_and_contexts_are_leaks_if_all_are_asked_for() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    let leak = |object: &str| ("leak".to_owned(), object.to_owned(), 1);
    for what in ["stream", "event", "graph", "context"] {
        let words = [what, "keeps-context"];
        let output = programs.run(&faulty, &words, &[REPORT, JSON]);
        assert_eq!(found(&output), [], "{what}");
        let output = programs.run(&faulty, &words, &[REPORT, JSON, ALL]);
        let wanted = [leak(what), leak("primary context")];
        assert_eq!(found(&output), wanted, "{what}");
        let place = &reports(&output)[0]["findings"][1]["sites"][0];
        assert_eq!(place["call"], "cuDevicePrimaryCtxRetain", "{what}");
        assert_eq!(place["frames"][0]["function"], "enter", "{what}");
    }
    let output = programs.run(
        &faulty,
        &["physical"],
        &[REPORT, ("FAKECUDA_LEAKS", "none")],
    );
    assert!(said(&output).contains("nothing found"), "{}", said(&output));
}

#[test]
fn what_a_library_keeps_is_no_leak_and_what_its_users_have_is() {
    let programs = Programs::new();
    let keeper = programs.compile_with("keeper", &["-rdynamic"]);
    let output = programs.run(&keeper, &[], &[REPORT, ALL]);
    assert!(output.status.success(), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("calls: 2 findings\n"), "{text}");
    for line in [
        "leaked: memory of keeper, 1000 B at 0x",
        " on device 0; 2 times here, 1 KiB in all\n    made by cuMemAlloc_v2\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let output = programs.run(&keeper, &["forget"], &[REPORT, ALL]);
    assert!(said(&output).contains("nothing found"), "{}", said(&output));
    // Without the function the same calls are leaks.
    let keeper = programs.compile("keeper");
    let output = programs.run(&keeper, &[], &[REPORT, ALL]);
    assert!(!output.status.success(), "{}", said(&output));
}

#[test]
fn uses_after_release_are_found_with_three_places() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    for (what, object, used) in [
        ("released-twice", "physical", "cuMemRelease"),
        ("freed-twice", "allocation", "cuMemFree_v2"),
        ("mapped-after-release", "physical", "cuMemMap"),
        ("stream-after-destroy", "stream", "cuStreamQuery"),
        ("event-after-destroy", "event", "cuEventRecord"),
        ("context-after-destroy", "context", "cuCtxSetCurrent"),
        ("read-after-free", "allocation", "cuMemcpyDtoH_v2"),
        ("write-after-unmap", "mapping", "cuMemsetD8_v2"),
    ] {
        let output = programs.run(&faulty, &[what], &[REPORT, JSON, ALL]);
        assert!(output.status.success(), "{what}: {}", said(&output));
        let wanted = [("used-after-release".to_owned(), object.to_owned(), 1)];
        assert_eq!(found(&output), wanted, "{what}");
        let sites = &reports(&output)[0]["findings"][0]["sites"];
        let did: Vec<_> = (0..3)
            .map(|at| sites[at]["what"].as_str().unwrap())
            .collect();
        assert_eq!(did, ["used", "released", "made"], "{what}");
        assert_eq!(sites[0]["call"], used, "{what}");
        for at in 0..3 {
            let frames = sites[at]["frames"].as_array().unwrap();
            let last = frames.last().unwrap();
            assert_eq!(last["function"], "main", "{what}: {sites}");
            assert!(last["line"].as_u64().unwrap() > 100, "{what}: {sites}");
        }
    }
}

#[test]
fn memory_that_is_taken_from_queued_work_is_found() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    for (what, settings, call) in [
        ("unmap-under-work", &[REPORT, JSON, LATE][..], "cuMemUnmap"),
        ("access-under-work", &[REPORT, JSON, LATE], "cuMemSetAccess"),
        ("held", &[REPORT, JSON], "cuMemUnmap"),
    ] {
        let output = programs.run(&faulty, &[what], settings);
        assert!(output.status.success(), "{what}: {}", said(&output));
        let wanted = [("taken-from-work".to_owned(), "fill".to_owned(), 1)];
        assert_eq!(found(&output), wanted, "{what}");
        let finding = &reports(&output)[0]["findings"][0];
        assert_eq!(finding["sites"][0]["call"], call, "{what}");
        assert_eq!(finding["bytes"], 64, "{what}");
    }
    // Work that runs at once is over when its memory goes.
    let output = programs.run(&faulty, &["unmap-under-work"], &[REPORT, JSON]);
    assert_eq!(found(&output), []);
}

#[test]
fn reads_of_bytes_that_were_never_written_are_found_if_asked_for() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    for what in ["unwritten", "unwritten-small"] {
        let output = programs.run(&faulty, &[what], &[REPORT, UNWRITTEN]);
        let line = "read but never written: 32 B at 0x";
        assert!(said(&output).contains(line), "{}", said(&output));
        assert!(said(&output).contains("of 64 B read by a copy to the host on device 0"));
        assert!(said(&output).contains(": 1 finding\n"), "{}", said(&output));
    }
    let output = programs.run(&faulty, &["unwritten"], &[REPORT]);
    assert!(said(&output).contains("nothing found"), "{}", said(&output));
}

#[test]
fn the_exit_code_says_that_something_was_found() {
    let programs = Programs::new();
    let (clean, faulty) = (programs.compile("clean"), programs.compile("faulty"));
    let code = ("FAKECUDA_EXIT_CODE", "23");
    let output = programs.run(&faulty, &["physical"], &[code]);
    assert_eq!(output.status.code(), Some(23));
    assert!(
        said(&output).contains("leaked: physical"),
        "{}",
        said(&output)
    );
    let output = programs.run(&clean, &[], &[code]);
    assert_eq!(
        (output.status.code(), &output.stdout[..]),
        (Some(0), &b"done"[..])
    );
    // The program's own failure is kept, and its output is not lost.
    let output = programs.run(&clean, &["fails"], &[code]);
    assert_eq!(
        (output.status.code(), &output.stdout[..]),
        (Some(5), &b"done"[..])
    );
    let output = programs.run(&faulty, &["physical"], &[REPORT]);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_file_has_the_reports_of_all_processes() {
    let programs = Programs::new();
    let faulty = programs.compile("faulty");
    let path = programs.path("report.json");
    let file = ("FAKECUDA_REPORT", path.to_str().unwrap());
    for what in ["physical", "stream"] {
        let output = programs.run(&faulty, &[what], &[file, JSON]);
        assert!(output.status.success() && said(&output).is_empty());
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let found: Vec<_> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["found"].as_u64())
        .collect();
    assert_eq!(found, [Some(1), Some(0)]);
    // Relative to the folder in which the program starts, one file for each process.
    let output = programs.run(&faulty, &["physical"], &[("FAKECUDA_REPORT", "own-%p.txt")]);
    assert!(output.status.success(), "{}", said(&output));
    let folder = std::fs::read_dir(path.parent().unwrap()).unwrap();
    let own = folder.map(|entry| entry.unwrap().path()).find(|path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("own-")
    });
    let text = std::fs::read_to_string(own.unwrap()).unwrap();
    assert!(text.contains("leaked: physical"), "{text}");
}
