//! Building the stand-in library for tests, under the name that a loader looks for.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `fakecuda` and copies it to `libcuda.so.1` in a directory.
///
/// Cargo does not build a library of this kind for tests, so the tests run cargo, with the profile
/// in which it has built the library's dependencies for tests. A build that is up to date takes a
/// moment.
pub(crate) fn fakecuda_in(directory: &Path) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let mut build = Command::new(cargo);
    build
        .args(["build", "--quiet", "--package", "fakecuda", "--lib"])
        .args(["--profile", "test"])
        .args(["--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = build.output().expect("cargo can be started");
    assert!(
        output.status.success(),
        "fakecuda was not built:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let library = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(library_in)
        .next_back()
        .expect("cargo names the library that it built");
    let place = directory.join("libcuda.so.1");
    std::fs::copy(&library, &place).expect("the library can be copied");
    place
}

/// Returns the library that a line of cargo's messages names.
fn library_in(line: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["target"]["name"] != "fakecuda" {
        return None;
    }
    let files = message["filenames"].as_array()?;
    files
        .iter()
        .filter_map(serde_json::Value::as_str)
        .find(|file| file.ends_with(".so"))
        .map(PathBuf::from)
}
