//! `cuvmm-bench run`: the rows of the containers, of what a region does besides, and of two devices. As
//! in the tests of the others, no figure is judged but those that the model counts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rows;

use cuvmm::driver::model::Costs;
use rows::{check, number, object, output, row};

/// The rows that every run has or names as left out.
const NAMES: &[&str] = &[
    "vec_doubling_2MiB",
    "vec_doubling_2MiB_vs_alloc_copy_free",
    "vec_doubling_2MiB_vs_reserved",
    "vec_doubling_32MiB",
    "vec_doubling_32MiB_vs_alloc_copy_free",
    "vec_doubling_32MiB_vs_reserved",
    "vec_doubling_512MiB",
    "vec_doubling_512MiB_vs_alloc_copy_free",
    "vec_doubling_512MiB_vs_reserved",
    "vec_doubling_8GiB",
    "vec_doubling_8GiB_vs_alloc_copy_free",
    "vec_doubling_8GiB_vs_reserved",
    "vec_doubling_75pct",
    "vec_doubling_75pct_vs_alloc_copy_free",
    "vec_doubling_75pct_vs_reserved",
    "sparse_commit_1GiB",
    "sparse_zeros_1TiB",
    "snapshot_1GiB",
    "snapshot_1GiB_by_8MiB",
    "snapshot_1GiB_by_512MiB",
    "snapshot_make_mut_8MiB",
    "ring_push_pop",
    "relocate_1GiB_to_host",
    "relocate_1GiB_to_device",
    "stripe_write_1GiB",
    "stripe_write_1GiB_vs_one_copy",
    "stripe_write_1GiB_vs_plain",
    "stripe_read_by_peer_1GiB",
    "stripe_read_by_peer_1GiB_vs_one_copy",
    "stripe_read_by_peer_1GiB_vs_plain",
    "grant_2MiB",
    "grant_2MiB_vs_own_device",
    "revoke_2MiB",
    "grant_128MiB",
    "grant_128MiB_vs_own_device",
    "revoke_128MiB",
    "grant_2GiB",
    "grant_2GiB_vs_own_device",
    "revoke_2GiB",
];

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_host_has_every_row() {
    let found = object(&["--driver", "host", "--only", &NAMES.join(",")]);
    check(&found, "host", NAMES);
    for name in ["relocate_1GiB_to_host", "stripe_read_by_peer_1GiB"] {
        // Left out where the system has little memory to write.
        if found["skipped"][name].is_null() {
            let counts = &row(&found, name)["counts"];
            assert!(number(counts, "gb_per_s") > 0.0, "{counts}");
            assert!(number(counts, "baseline_gb_per_s") > 0.0, "{counts}");
        }
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_calls_of_the_model_are_known() {
    let found = object(&["--driver", "model", "--only", &NAMES.join(",")]);
    check(&found, "model", NAMES);
    assert_eq!(found["skipped"].as_object().unwrap().len(), 0);
    let count = |name: &str, what: &str| number(&row(&found, name)["counts"], what);
    for (name, what, expected) in [
        // A reservation; create, map and set_access for one extent.
        ("vec_doubling_2MiB", "driver_calls", 4.0),
        ("vec_doubling_8GiB", "mib", 8192.0),
        ("vec_doubling_8GiB_vs_reserved", "extents", 8.0),
        ("sparse_commit_1GiB", "driver_calls", 3.0 * 32.0),
        ("sparse_zeros_1TiB", "mappings", 16_384.0),
        ("sparse_zeros_1TiB", "mib_held", 64.0),
        // A reservation; a mapping and two changes of rights for each extent.
        ("snapshot_1GiB_by_8MiB", "driver_calls", 1.0 + 3.0 * 128.0),
        ("relocate_1GiB_to_host", "extents", 16.0),
    ] {
        assert_eq!(count(name, what), expected, "{what} of {name}");
    }
    // A call costs the same by hand: where ours makes the same ones, all that differs is rounding.
    for name in [
        "sparse_commit_1GiB",
        "sparse_zeros_1TiB",
        "snapshot_1GiB_by_8MiB",
    ] {
        let ratio = number(row(&found, name), "ratio");
        assert!((ratio - 1.0).abs() < 1e-3, "{name}: {ratio}");
    }
    // Rights for a second device, and for the first.
    let costs = Costs::default();
    let (own, peer) = (
        costs.set_access.at(2 << 20),
        costs.set_access_peer.at(2 << 20),
    );
    for (name, micros) in [
        ("grant_2MiB", own + peer),
        ("grant_2MiB_vs_own_device", own),
    ] {
        let baseline = number(row(&found, name), "baseline_p50_ns");
        assert!((baseline - 1e3 * micros).abs() <= 1.0, "{name}: {baseline}");
    }
    // A table knows no links, so a rate would say nothing.
    let stripes = row(&found, "stripe_write_1GiB");
    assert!(stripes["counts"]["gb_per_s"].is_null(), "{stripes}");
    let note = stripes["note"].as_str().unwrap();
    assert!(note.contains("virtual time"), "{note}");
}

#[test]
fn what_does_not_fit_by_hand_is_told() {
    let name = "vec_doubling_75pct_vs_alloc_copy_free";
    let arguments = ["--driver", "model", "--memory", "8GiB", "--only", name];
    let found = object(&arguments);
    let row = row(&found, name);
    let count = |what: &str| number(&row["counts"], what);
    // Whole hundredths of whole pages.
    assert_eq!(count("mib"), 6000.0);
    assert_eq!(count("baseline_held_mib"), 4096.0);
    assert_eq!(count("baseline_wanted_mib"), 8192.0);
    assert_eq!(number(row, "baseline_p50_ns"), 0.0);
    assert!(number(row, "p50_ns") > 0.0, "ours came to the end: {row}");
    let note = row["note"].as_str().unwrap();
    assert!(note.contains("more than the device has"), "{note}");
    let text = output(&[&arguments[..], &["--quick", "--verbose"]].concat());
    let line = text.lines().find(|line| line.starts_with("| vec_doubling"));
    let line = line.unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("| cuMemAlloc of twice"), "{text}");
    assert!(line.contains("|           - |     - |"), "{text}");
}

#[test]
fn what_does_not_fit_at_all_is_left_out_with_the_figures() {
    let names = ["grant_2GiB", "grant_2MiB", "vec_doubling_8GiB"];
    let only = names.join(",");
    let found = object(&["--driver", "model", "--memory", "2GiB", "--only", &only]);
    row(&found, "grant_2MiB");
    for (name, asked) in [("grant_2GiB", "4 GiB"), ("vec_doubling_8GiB", "8 GiB")] {
        let reason = found["skipped"][name].as_str().unwrap();
        assert!(reason.contains(asked), "{name}: {reason}");
        assert!(reason.contains("2 GiB"), "{name}: {reason}");
    }
}

#[test]
fn the_second_device_is_the_next_one() {
    // Each reaches the other: from the last one it is the first.
    let found = object(&["--driver", "host", "--device", "1", "--only", "grant_2MiB"]);
    check(&found, "host", &["grant_2MiB", "grant_2MiB_vs_own_device"]);
    row(&found, "grant_2MiB_vs_own_device");
}
