//! End-to-end tests of `cuvmm replay --layout paged`.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use super::replay::{cuvmm, failure, json, model, two_models};

/// Bytes of the memory of all models.
const MEMORY: u64 = 512 << 20;

fn played(driver: &str, options: &[&str], models: &[String]) -> Value {
    let common = ["--memory=512MiB", "--driver", driver];
    json(&[&common[..], options].concat(), models)
}

fn number(figures: &Value, key: &str) -> f64 {
    let number = figures[key].as_f64();
    number.unwrap_or_else(|| panic!("{key} in {figures}"))
}

#[test]
fn a_static_split_holds_its_memory_and_a_shared_pool_what_blocks_in_use_touch() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    let said = played("host", &["--layout=paged"], &models);
    let terms = &said["paged"];
    assert_eq!(
        (&terms["layout"], &terms["numbers"]),
        (&"block-major".into(), &"lowest".into())
    );
    assert_eq!(
        (&terms["block_bytes"], &terms["extent_bytes"]),
        (&(2 << 20).into(), &(16 << 20).into())
    );
    for policy in ["static", "elastic"] {
        let figures = &said["policies"][policy];
        assert_eq!(
            (&figures["requests"], &figures["completed"]),
            (&320.into(), &320.into())
        );
        // A stamp at each end of each block.
        assert!(number(figures, "verified_stamps") > 5_000.0);
        assert_eq!(figures["wrong_stamps"], 0);
        assert!(number(figures, "tokens_per_second") > 0.0);
        assert!(figures["held_peak_bytes"].as_u64() <= Some(MEMORY));
        assert!(number(figures, "held_mean_bytes") >= number(figures, "mean_bytes"));
        assert_eq!(
            (&figures["kept_mean_bytes"], &figures["evicted_blocks"]),
            (&0.into(), &0.into())
        );
    }
    let [fixed, shared] = ["static", "elastic"].map(|policy| &said["policies"][policy]);
    assert_eq!(fixed["held_mean_bytes"], MEMORY);
    assert_eq!(fixed["models"]["code"]["held_peak_bytes"], MEMORY / 2);
    assert!(number(shared, "held_by_live") < number(fixed, "held_by_live"));
    assert!(number(&said, "ttft_p99_gain") > 1.0);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn numbers_and_layouts_differ_in_the_memory_that_blocks_touch() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    let held = |options: &[&str]| {
        let said = played("model", &[&["--policy=elastic"], options].concat(), &models);
        assert_eq!(said["stamps"], false);
        number(&said["policies"]["elastic"], "held_by_live")
    };
    let lowest = held(&["--layout=paged"]);
    let queue = held(&["--layout=paged", "--numbers=fifo"]);
    let tensors = held(&["--layout=paged-layer-major"]);
    let small = held(&["--layout=paged", "--extent=2MiB"]);
    let reserve = held(&["--layout=paged", "--reserve=32MiB"]);
    // An extent of a block holds no more than the block.
    assert_eq!(small, 1.0);
    assert!(
        lowest < queue && lowest < tensors && lowest < reserve,
        "{lowest} {queue} {tensors} {reserve}"
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn kept_blocks_are_evicted_by_requests_that_need_their_memory() {
    let dir = TempDir::new().unwrap();
    let models = two_models(&dir);
    for layout in ["paged", "paged-layer-major"] {
        let layout = format!("--layout={layout}");
        let said = played("host", &[&layout, "--keep-prefixes"], &models);
        for policy in ["static", "elastic"] {
            let figures = &said["policies"][policy];
            assert_eq!(figures["completed"], 320, "{layout} {policy}");
            assert!(number(figures, "kept_mean_bytes") > 0.0);
            assert!(number(figures, "evicted_blocks") > 0.0);
            assert_eq!(figures["wrong_stamps"], 0);
        }
    }
}

/// Returns options for the first minutes of the public traces, until 18:21, which are not part of the
/// repository: they are in the folder `CUVMM_TRACES`, or beside the repository.
fn first_minutes(dir: &TempDir) -> Option<[String; 2]> {
    let beside = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../shared/traces"
    ));
    let folder = std::env::var_os("CUVMM_TRACES").map_or(beside, PathBuf::from);
    let first = |name: &str, file: &str| {
        let text = std::fs::read_to_string(folder.join(file)).ok()?;
        let mut lines = text.lines();
        let header = lines.next()?;
        let early = lines.filter(|line| *line < "2023-11-16 18:21");
        let kept: Vec<&str> = std::iter::once(header).chain(early).collect();
        assert!(kept.len() > 100, "{file} has few requests");
        let path = dir.path().join(file);
        std::fs::write(&path, kept.join("\n") + "\n").unwrap();
        Some(model(name, &path))
    };
    let conv = first("conv", "azure-conv-first-half.csv")?;
    Some([conv, first("code", "azure-code.csv")?])
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn of_the_azure_traces_little_is_held_beside_blocks_in_use() {
    let dir = TempDir::new().unwrap();
    let Some(models) = first_minutes(&dir) else {
        eprintln!("*** THE AZURE TRACES WERE NOT REPLAYED: they are not there");
        return;
    };
    for (layout, bound) in [("paged", 1.12), ("paged-layer-major", 1.40)] {
        let layout = format!("--layout={layout}");
        let options = [
            "--memory=8GiB",
            "--driver=model",
            "--policy=elastic",
            &layout,
        ];
        let figures = &json(&options, &models)["policies"]["elastic"];
        assert_eq!(figures["completed"], figures["requests"]);
        let held = number(figures, "held_by_live");
        assert!((1.0..=bound).contains(&held), "{layout}: {held}");
    }
}

#[test]
fn the_report_has_a_table_of_paged_caches() {
    let dir = TempDir::new().unwrap();
    let assert = cuvmm()
        .args([
            "replay",
            "--memory=512MiB",
            "--driver=model",
            "--layout=paged",
        ])
        .args(["--keep-prefixes", "--reserve=64MiB", "--load=0.5"])
        .args(two_models(&dir))
        .assert()
        .success();
    let said = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    for part in [
        "paged, block-major: blocks of 16 tokens, 2 MiB, in extents of 16 MiB, lowest number first",
        "\nPaged caches (",
        "held/live",
        "elastic is",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    assert!(said.contains("arriving 0.5 times as fast"), "{said}");
    for line in said.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused_by_name() {
    for (args, named) in [
        (
            &["--numbers=lowest"][..],
            "--numbers: only with --layout paged",
        ),
        (&["--keep-prefixes"], "--keep-prefixes: only with"),
        (&["--layout=paged", "--extent=3MiB"], "--extent: 3 MiB"),
        (
            &["--layout=paged", "--memory=16MiB"],
            "--memory: an even share is 8 MiB",
        ),
        (&["--layout=paged", "--reserve=4GiB"], "--reserve: 4 GiB"),
        (
            &["--layout=paged", "--numbers=fifo", "--reserve=1GiB"],
            "--reserve: needs",
        ),
        (
            &["--layout=paged", "--kv-bytes-per-token=100"],
            "--kv-bytes-per-token: 100",
        ),
        (&["--layout=pages"], "--layout"),
        (&["--load=0"], "--load"),
    ] {
        let (code, said) = failure(&[&["replay", "--driver=model"], args].concat());
        assert_eq!(code, 2, "{args:?}: {said}");
        assert!(
            said.starts_with("cuvmm: ") && said.contains(named),
            "{args:?}: {said}"
        );
    }
}
