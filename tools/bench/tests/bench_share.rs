//! `cuvmm-bench run`: the rows that take another process. As in the tests of the others, no figure is
//! judged but what can be counted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rows;

use rows::{check, number, object, row};

/// The rows that every run has or names as left out.
const NAMES: &[&str] = &[
    "share_attach_8GiB",
    "share_attach_8GiB_vs_copy",
    "share_attach_8GiB_by_1GiB",
    "share_attach_8GiB_by_2MiB",
];

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn another_process_attaches_and_takes_no_memory() {
    let found = object(&["--driver", "host", "--only", &NAMES.join(",")]);
    check(&found, "host", NAMES);
    for (name, extents) in [(NAMES[0], 1.0), (NAMES[2], 8.0), (NAMES[3], 4096.0)] {
        // Left out where a process may have few descriptors.
        if found["skipped"][name].is_null() {
            let counts = &row(&found, name)["counts"];
            assert_eq!(number(counts, "extents"), extents, "{name}");
            assert_eq!(number(counts, "mib"), 8192.0);
            assert_eq!(number(counts, "mib_more_in_use"), 0.0);
            assert!(number(counts, "publish_us") > 0.0);
        }
    }
    if found["skipped"][NAMES[1]].is_null() {
        let row = row(&found, NAMES[1]);
        assert_eq!(number(&row["counts"], "copied_mib"), 128.0, "{row}");
    }
}

#[test]
fn what_has_no_memory_has_nothing_to_share() {
    let found = object(&["--driver", "model", "--only", &NAMES.join(",")]);
    check(&found, "model", NAMES);
    for name in NAMES {
        let reason = found["skipped"][name].as_str().unwrap();
        assert!(reason.contains("no memory to share"), "{name}: {reason}");
    }
    let little = ["--driver", "host", "--memory", "4GiB", "--only", NAMES[0]];
    let found = object(&little);
    let reason = found["skipped"][NAMES[0]].as_str().unwrap();
    assert!(reason.contains("takes 16 GiB to map"), "{reason}");
}

#[test]
fn the_other_process_is_for_the_bench_alone() {
    let said = assert_cmd::Command::new(env!("CARGO_BIN_EXE_cuvmm-bench"))
        .arg("--help")
        .assert()
        .success();
    let said = String::from_utf8(said.get_output().stdout.clone()).unwrap();
    assert!(!said.contains("reader"), "{said}");
}
