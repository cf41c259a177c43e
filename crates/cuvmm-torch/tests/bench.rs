//! The sequences of the comparison in Python are those of `cuvmm heap --churn`, and `pools.py` runs
//! over the stand-in for libcuda.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../stand-in/fakecuda/testing/built.rs"]
mod built;

use std::path::Path;
use std::process::Command;

/// For each law and two seeds: the operations and the peak of live bytes, which
/// `cuvmm heap --churn LAW --seed N --json` prints, and a checksum of the operations of the law's Rust
/// code.
const LAWS: [(&str, u64, u64, u64, u64); 8] = [
    (
        "uniform",
        0,
        7872,
        34_359_677_952,
        2_228_602_584_448_560_733,
    ),
    (
        "growing",
        0,
        7937,
        34_359_720_960,
        4_343_679_630_778_071_203,
    ),
    ("small", 0, 78_551, 4_294_967_296, 4_938_968_057_147_071_046),
    (
        "sequences",
        0,
        7646,
        51_539_607_552,
        17_840_299_581_422_345_331,
    ),
    ("uniform", 7, 7868, 34_359_726_080, 310_427_812_207_899_856),
    (
        "growing",
        7,
        7935,
        34_359_669_248,
        8_983_427_167_461_964_928,
    ),
    (
        "small",
        7,
        78_747,
        4_294_967_296,
        15_463_879_497_766_093_325,
    ),
    (
        "sequences",
        7,
        7665,
        51_539_509_248,
        6_668_233_555_355_020_746,
    ),
];

fn dry_run(seed: u64) -> Option<serde_json::Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/compare.py");
    let mut python = Command::new("python3");
    python
        .arg("-B")
        .arg(script)
        .args(["--dry-run", "--seed", &seed.to_string()]);
    let output = match python.output() {
        Ok(output) => output,
        Err(error) => {
            println!("the sequences were not compared: python3 cannot be started: {error}");
            return None;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_laws_are_those_of_the_command() {
    for seed in [0, 7] {
        let Some(found) = dry_run(seed) else {
            return;
        };
        for (law, _, operations, live, checksum) in LAWS.iter().filter(|law| law.1 == seed) {
            let expected = serde_json::json!({
                "operations": operations,
                "peak_live_bytes": live,
                "checksum": checksum,
            });
            assert_eq!(found[law], expected, "{law} {seed}");
        }
        assert!(found["moving"]["operations"].as_u64() > Some(4000));
    }
}

/// Two processes share memory by the calls of libcuda alone.
#[test]
fn memory_pools_are_shared_by_plain_calls() {
    let folder = tempfile::tempdir().unwrap();
    built::fakecuda_in(folder.path());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/pools.py");
    let mut python = Command::new("python3");
    python
        .arg("-B")
        .arg(script)
        .arg("--without-torch")
        .env("LD_LIBRARY_PATH", folder.path());
    let output = match python.output() {
        Ok(output) => output,
        Err(error) => {
            println!("no memory was shared: python3 cannot be started: {error}");
            return;
        }
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complained}");
    assert!(said.contains("all as documented"), "{said}");
}
