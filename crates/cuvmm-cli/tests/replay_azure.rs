//! Acceptance test: both Azure traces with 8 GiB on the host driver within two minutes on two
//! cores, no request lost, and elastic's p99 time to first token at least 1.5 times better than
//! static's.
//!
//! The test runs only in release builds:
//! `cargo test --release -p cuvmm-cli --test replay_azure -- --nocapture`. The traces are not part
//! of the repository; if they are missing, the test prints that and passes.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Instant;

use assert_cmd::Command;
use serde_json::Value;

const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/traces");

/// The file and the number of requests of each trace.
const CONV: (&str, u64) = ("azure-conv-first-half.csv", 9_683);
const CODE: (&str, u64) = ("azure-code.csv", 8_819);

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "two minutes are promised for release builds: use --release"
)]
fn both_azure_traces_fit_in_eight_gibibytes_better_together() {
    let files = [CONV.0, CODE.0].map(|file| Path::new(TRACES).join(file));
    if let Some(missing) = files.iter().find(|file| !file.is_file()) {
        eprintln!(
            "SKIPPED: the Azure traces were NOT replayed, {} is missing",
            missing.display()
        );
        return;
    }
    let begin = Instant::now();
    let output = Command::cargo_bin("cuvmm")
        .unwrap()
        .args([
            "replay", "--memory", "8GiB", "--policy", "both", "--driver", "host", "--json",
        ])
        .arg(format!("--model=conv={}", files[0].display()))
        .arg(format!("--model=code={}", files[1].display()))
        .output()
        .unwrap();
    let took = begin.elapsed();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    for policy in ["static", "elastic"] {
        let figures = &said["policies"][policy];
        assert_eq!(figures["requests"], CONV.1 + CODE.1);
        assert_eq!(
            figures["completed"],
            CONV.1 + CODE.1,
            "none is larger than its share"
        );
        assert_eq!(figures["models"]["conv"]["requests"], CONV.1);
        assert_eq!(figures["models"]["code"]["requests"], CODE.1);
        assert!(figures["peak_bytes"].as_u64() <= Some(8 << 30));
        assert_eq!(figures["wrong_stamps"], 0);
        assert!(figures["verified_stamps"].as_u64() > Some(4_000_000));
    }
    let p99 = |policy: &str| said["policies"][policy]["ttft_p99_ms"].as_f64().unwrap();
    let gain = p99("static") / p99("elastic");
    eprintln!("elastic's p99 is {gain:.2} times better than static's; {took:.1?}");
    assert!(gain >= 1.5, "{gain:.2}");
}
