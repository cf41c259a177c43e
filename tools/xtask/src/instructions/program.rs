//! The counted program, built like a user's program.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::cargo;

/// Builds the program in release mode and returns its path.
pub(crate) fn build() -> Result<PathBuf> {
    let output = cargo::command()
        .args(["build", "--release", "--package=counted"])
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo")?;
    ensure!(output.status.success(), "building counted failed");
    let said = String::from_utf8_lossy(&output.stdout);
    let file = said.lines().find_map(executable);
    file.context("cargo did not say where counted is")
}

/// Returns the program that a line of cargo's messages names.
fn executable(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let counted = message.pointer("/target/name")? == "counted";
    let file = message.get("executable")?.as_str()?;
    counted.then(|| file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_cargo_says_it() {
        let line = |name: &str, file: &str| {
            let line = format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"{name}"}},"executable":{file}}}"#
            );
            executable(&line)
        };
        assert_eq!(
            line("counted", r#""/t/counted""#),
            Some("/t/counted".into())
        );
        assert_eq!(line("counted", "null"), None);
        assert_eq!(line("cuvmm", r#""/t/cuvmm""#), None);
        assert_eq!(
            executable(r#"{"reason":"build-finished","success":true}"#),
            None
        );
    }
}
