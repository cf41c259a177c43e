//! The counted program, built like a user's program.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::cargo::{self, Message};

/// Builds the program like a user's in release mode, and returns its path. The profile is `release`, or
/// `profiling` for the same with line tables.
pub(crate) fn build(profile: &str) -> Result<PathBuf> {
    let mut command = cargo::command();
    command.args(["build", "--profile", profile, "--package=counted"]);
    let messages = cargo::build(&mut command)?;
    let file = messages.into_iter().find_map(executable);
    file.context("cargo did not say where counted is")
}

/// Returns the program that a message of cargo names.
fn executable(message: Message) -> Option<PathBuf> {
    let counted = message.target?.name == "counted";
    message.executable.filter(|_| counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_cargo_says_it() {
        let said = |line: &str| executable(Message::parse(line).expect("as cargo says it"));
        let line = |name: &str, file: &str| {
            said(&format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"{name}"}},"executable":{file}}}"#
            ))
        };
        assert_eq!(
            line("counted", r#""/t/counted""#),
            Some("/t/counted".into())
        );
        assert_eq!(line("counted", "null"), None);
        assert_eq!(line("cuvmm", r#""/t/cuvmm""#), None);
        assert_eq!(said(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
