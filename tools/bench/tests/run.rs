//! `cuvmm-bench run` as a user meets it. No figure is judged here: what is measured on a machine that
//! tests run on says nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rows;

use std::fs;
use std::path::Path;

use cuvmm::driver::model::{Costs, Curve};
use rows::{bench, check, complaint, number, object, output, row};

/// The rows that every run has or names as left out.
const NAMES: &[&str] = &[
    "commit_cold_2MiB",
    "commit_cold_32MiB",
    "commit_cold_128MiB",
    "commit_cold_512MiB",
    "commit_cold_1GiB",
    "commit_cold_2GiB",
    "commit_cold_4GiB",
    "commit_cold_8GiB",
    "free_1GiB",
    "warm_alloc_free_2MiB",
    "warm_alloc_free_32MiB",
    "warm_alloc_free_1GiB",
    "grow_8GiB",
    "grow_mapper_step",
    "vec_push_8GiB",
    "kv_decode_step_token_major",
    "kv_decode_step_layer_major",
    "kv_create_after_free",
    "kv_fork",
    "kv_fork_few_extents",
    "paged_back_256",
    "paged_release_256",
    "paged_decode_step_256",
    "paged_decode_step_256_ahead",
    "paged_take_1GiB_by_32MiB",
    "paged_take_1GiB_by_2MiB",
    "sleep_discard_8GiB_in_1GiB_pool",
    "wake_at_once_8GiB_in_1GiB_pool",
    "wake_later_8GiB_in_1GiB_pool",
    "sleep_discard_8GiB_in_32MiB_pool",
    "wake_at_once_8GiB_in_32MiB_pool",
    "wake_later_8GiB_in_32MiB_pool",
    "sleep_discard_8GiB_in_1GiB_driver",
    "wake_at_once_8GiB_in_1GiB_driver",
    "wake_later_8GiB_in_1GiB_driver",
    "sleep_discard_8GiB_in_32MiB_driver",
    "wake_at_once_8GiB_in_32MiB_driver",
    "wake_later_8GiB_in_32MiB_driver",
    "sleep_keep_8GiB",
    "wake_kept_8GiB",
    "sleep_keep_8GiB_staged",
    "wake_kept_8GiB_staged",
    "exchange_8GiB",
    "exchange_pieces_2MiB",
    "exchange_pieces_8MiB",
    "exchange_pieces_16MiB",
    "exchange_pieces_32MiB",
    "exchange_pieces_64MiB",
    "exchange_pieces_256MiB",
    "cut_1GiB_to_half",
    "shrink_1GiB_to_half",
    "take_back_16GiB",
    "take_back_16GiB_scrub",
    "lower_limit_16GiB",
    "memory_pool_alloc_free_2MiB",
    "memory_pool_current_2MiB",
    "memory_pool_reserve",
    "memory_pool_exchange_1GiB",
    "memory_pool_trim_1GiB",
    "ledger_charge",
    "ledger_take_idle_1GiB",
    "ledger_wait_8",
    "wake_one_of_1000_futures",
    "wake_50_of_1000_futures",
    "drop_under_kernel",
    "lease_beside_waiter",
    "lease_beside_take_back",
    "alloc_beside_take_back",
    "pair_beside_take_back",
    "metadata",
    "threads_8",
    "threads_8_tenant_each",
    "threads_8_other_sizes",
];

/// They take a while to set up, so they have a test of their own.
const SLOW: &[&str] = &["scale_100k_blocks", "scale_100k_blocks_same_tenant"];

fn all_but_slow() -> String {
    NAMES.join(",")
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_host_has_every_row_or_says_why_not() {
    let found = object(&["--driver", "host", "--only", &all_but_slow()]);
    check(&found, "host", NAMES);
    assert_eq!(
        row(&found, "warm_alloc_free_1GiB")["counts"]["driver_calls"],
        0.0
    );
    assert_eq!(
        row(&found, "drop_under_kernel")["counts"]["handed_on_early"],
        0.0
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_model_counts_virtual_time() {
    let found = object(&["--driver", "model", "--only", &all_but_slow()]);
    check(&found, "model", NAMES);
    // The calls of a commit are known, and so is their price.
    let one = row(&found, "commit_cold_1GiB");
    assert_eq!(one["counts"]["extents"], 1.0);
    assert!(
        one["note"].as_str().unwrap().contains("virtual time"),
        "{one}"
    );
    let costs = Costs::default();
    let curves = [
        &costs.reserve,
        &costs.create_warm,
        &costs.map,
        &costs.set_access,
    ];
    let at_once = curves.map(|curve| curve.at(1 << 30)).iter().sum::<f64>() * 1e3;
    assert!(
        (number(one, "baseline_p50_ns") - at_once).abs() < 1.0,
        "{one}"
    );
}

#[test]
fn the_calls_of_paged_caches_are_known() {
    let rows = NAMES.iter().filter(|name| name.starts_with("paged_"));
    let names: Vec<&str> = rows.copied().collect();
    let found = object(&["--driver", "model", "--only", &names.join(",")]);
    check(&found, "model", &names);
    assert_eq!(found["skipped"].as_object().unwrap().len(), 0);
    for (name, what, expected) in [
        ("paged_back_256", "driver_calls", 0.0),
        ("paged_release_256", "driver_calls", 0.0),
        ("paged_decode_step_256", "creates", 8.0),
        ("paged_decode_step_256", "maps", 8.0),
        ("paged_decode_step_256", "set_access", 8.0),
        ("paged_decode_step_256", "driver_calls", 24.0),
        ("paged_decode_step_256_ahead", "driver_calls", 0.0),
        ("paged_take_1GiB_by_32MiB", "extents", 32.0),
        ("paged_take_1GiB_by_32MiB", "maps", 32.0),
        ("paged_take_1GiB_by_2MiB", "extents", 512.0),
        ("paged_take_1GiB_by_2MiB", "maps", 512.0),
    ] {
        let counts = &row(&found, name)["counts"];
        assert_eq!(number(counts, what), expected, "{name}: {counts}");
    }
}

#[test]
#[ignore = "takes two minutes: run it when these rows change"]
fn very_many_blocks() {
    let found = object(&["--driver", "model", "--only", &SLOW.join(",")]);
    check(&found, "model", SLOW);
    assert_eq!(row(&found, SLOW[0])["counts"]["blocks"], 100_000.0);
}

#[test]
fn what_does_not_fit_is_left_out_with_the_figures() {
    let names = "commit_cold_1GiB,free_1GiB,take_back_16GiB";
    let found = object(&["--driver", "host", "--memory", "1GiB", "--only", names]);
    let here: Vec<_> = found["rows"].as_array().unwrap().iter().collect();
    let here: Vec<_> = here
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert!(here.contains(&"commit_cold_1GiB"), "{here:?}");
    for name in ["free_1GiB", "take_back_16GiB"] {
        let reason = found["skipped"][name].as_str().unwrap();
        assert!(reason.contains("GiB"), "{name}: {reason}");
    }
}

#[test]
fn people_get_a_table_and_reasons() {
    let arguments = [
        "--driver",
        "host",
        "--quick",
        "--memory",
        "4GiB",
        "--only",
        "free_1GiB,take_back_16GiB",
    ];
    let text = output(&arguments);
    assert!(text.starts_with("host memory on the host driver"), "{text}");
    assert!(text.contains("| free_1GiB"), "{text}");
    assert!(text.contains("\nLeft out\ntake_back_16GiB: "), "{text}");
    assert!(text.lines().all(|line| line.trim_end() == line), "{text:?}");
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    assert!(
        text.contains("baseline") && !text.contains("floor"),
        "{text}"
    );
}

#[test]
fn who_follows_a_run_gets_a_line_for_each_row() {
    let arguments = [
        "--driver",
        "model",
        "--quick",
        "--verbose",
        "--only",
        "free_1GiB",
    ];
    let assert = bench(&arguments).assert().success();
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(text.starts_with("free_1GiB: "), "{text}");
}

/// Prices that differ wherever the table can tell things apart.
fn odd_costs() -> Costs {
    let mut costs = Costs::default();
    costs.set_access_cold = Curve::new(&[(2.0, 44.0), (1024.0, 90.0)]);
    costs.busy = Curve::new(&[(1024.0, 0.0), (2048.0, 5_700.0), (8192.0, 16_000.0)]);
    costs.create_cold = Curve::new(&[(2.0, 11.5), (1024.0, 380.0), (8192.0, 2_400.0)]);
    costs.fill = Curve::new(&[(2.0, 5.0), (256.0, 70.0)]);
    costs.memory_mib = 4096.0;
    costs
}

#[test]
fn the_costs_of_the_model_are_measured_as_they_are_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (file, odd) = (folder.path().join("costs"), folder.path().join("odd"));
    let (path, odd) = (file.to_str().unwrap(), odd.to_str().unwrap());
    let known = odd_costs();
    fs::write(odd, known.to_string()).unwrap();
    object(&[
        "--driver",
        "model",
        "--costs",
        odd,
        "--only",
        "free_1GiB",
        "--save-costs",
        path,
    ]);
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.starts_with("# "), "{written}");
    assert!(written.contains("--save-costs"), "{written}");
    let found: Costs = written.parse().unwrap();
    assert!(
        found
            .about
            .starts_with("model GPU, driver model driver of cuvmm"),
        "{}",
        found.about
    );
    assert_eq!(
        found.memory_mib,
        143.0 * 1024.0,
        "what the driver has, not its table"
    );
    let near = |one: f64, other: f64| (one - other).abs() <= 0.002 + other * 1e-3;
    for mib in [2_u64, 8, 32, 128, 512, 1_024, 2_048, 8_192, 32_768] {
        for (name, found, known) in [
            ("reserve", &found.reserve, &known.reserve),
            ("address_free", &found.address_free, &known.address_free),
            ("create_warm", &found.create_warm, &known.create_warm),
            ("create_cold", &found.create_cold, &known.create_cold),
            ("release", &found.release, &known.release),
            ("map", &found.map, &known.map),
            ("unmap", &found.unmap, &known.unmap),
            ("set_access", &found.set_access, &known.set_access),
            (
                "set_access_cold",
                &found.set_access_cold,
                &known.set_access_cold,
            ),
            ("busy", &found.busy, &known.busy),
            (
                "set_access_peer",
                &found.set_access_peer,
                &known.set_access_peer,
            ),
            ("alloc", &found.alloc, &known.alloc),
            ("free", &found.free, &known.free),
        ] {
            let (found, known) = (found.at(mib << 20), known.at(mib << 20));
            assert!(
                near(found, known),
                "{name} of {mib} MiB: {found} for {known}"
            );
        }
    }
    for mib in [2, 32, 256] {
        for (name, found, known) in [
            ("host_copy", &found.host_copy, &known.host_copy),
            ("fill", &found.fill, &known.fill),
            ("device_copy", &found.device_copy, &known.device_copy),
        ] {
            let (found, known) = (found.at(mib << 20), known.at(mib << 20));
            assert!(
                near(found, known),
                "{name} of {mib} MiB: {found} for {known}"
            );
        }
    }
    for (name, found, known) in [
        ("launch", found.launch, known.launch),
        ("pool", found.pool, known.pool),
        ("memory_info", found.memory_info, known.memory_info),
        ("event_record", found.event_record, known.event_record),
        ("query", found.query, known.query),
        ("wait_event", found.wait_event, known.wait_event),
        ("synchronize", found.synchronize, known.synchronize),
        ("other", found.other, known.other),
    ] {
        assert!(near(found, known), "{name}: {found} for {known}");
    }

    // A driver that takes a millisecond to grant access.
    fs::write(&file, written + "\n").unwrap();
    let dear = fs::read_to_string(&file).unwrap();
    let dear = dear
        .lines()
        .map(|line| match line.strip_prefix("set_access ") {
            Some(_) => "set_access 2:1000\n".to_owned(),
            None => format!("{line}\n"),
        });
    fs::write(&file, dear.collect::<String>()).unwrap();
    let only = "commit_cold_2MiB";
    let found = object(&["--driver", "model", "--only", only, "--costs", path]);
    assert!(
        number(row(&found, only), "baseline_p50_ns") > 1e6,
        "{found}"
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn the_host_s_table_is_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("host.costs");
    let path = file.to_str().unwrap();
    let save = [
        "--driver", "host", "--memory", "256MiB", "--only", "metadata",
    ];
    output(&[&save[..], &["--quick", "--save-costs", path]].concat());
    let costs: Costs = fs::read_to_string(&file).unwrap().parse().unwrap();
    assert!(
        costs.about.starts_with("host memory, driver host driver"),
        "{}",
        costs.about
    );
    assert_eq!(costs.memory_mib, 256.0);
    assert!(costs.create_cold.at(2 << 20) > 0.0);
    assert!(
        costs.range().is_some(),
        "two mappings took as long: {costs}"
    );
    let only = "commit_cold_2MiB";
    let found = object(&["--driver", "model", "--only", only, "--costs", path]);
    assert!(number(row(&found, only), "baseline_p50_ns") > 0.0);
}

#[test]
fn wrong_usage_is_told_in_a_line() {
    let names = complaint(&["--driver", "model", "--only", "commit_cold"], 2);
    assert!(names.contains("\"commit_cold\""), "{names}");
    assert!(names.contains("commit_cold_1GiB"), "{names}");
    complaint(&["--driver", "abacus"], 2);
    complaint(&["--memory", "0"], 2);
    complaint(&["--pairs", "7"], 2);
}

#[test]
fn what_cannot_be_read_or_written_is_wrong_usage_and_what_is_not_there_a_failure() {
    let missing = complaint(&["--driver", "model", "--costs", "/nowhere/costs"], 2);
    assert!(missing.contains("/nowhere/costs"), "{missing}");
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let odd = complaint(
        &["--driver", "model", "--costs", manifest.to_str().unwrap()],
        2,
    );
    assert!(odd.contains("line 1"), "{odd}");
    let unwritable = complaint(&["--driver", "model", "--save-costs", "/nowhere/costs"], 2);
    assert!(unwritable.contains("/nowhere/costs"), "{unwritable}");
    let device = complaint(&["--driver", "model", "--device", "7"], 1);
    assert!(device.contains("device 7"), "{device}");
}
