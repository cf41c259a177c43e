//! Running cargo and other programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

pub(crate) fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// Returns a command that runs the current cargo in the workspace.
pub(crate) fn command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}

/// Runs a command.
///
/// # Errors
/// The command cannot be started, or fails.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

/// Runs a command, and returns what it prints.
///
/// # Errors
/// The command cannot be started, or fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{command:?} failed: {} {said}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A message of cargo, with the file that it built if it is about one.
#[derive(Debug, Deserialize)]
pub(crate) struct Message {
    pub(crate) reason: String,
    pub(crate) package_id: Option<String>,
    pub(crate) target: Option<Target>,
    #[serde(default)]
    pub(crate) profile: Profile,
    pub(crate) executable: Option<PathBuf>,
    #[serde(default)]
    pub(crate) filenames: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) kind: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Profile {
    pub(crate) test: bool,
}

impl Message {
    pub(crate) fn parse(line: &str) -> Result<Self> {
        serde_json::from_str(line).with_context(|| format!("cargo said {line}"))
    }
}

/// Runs a command that builds, and returns cargo's messages.
pub(crate) fn build(command: &mut Command) -> Result<Vec<Message>> {
    let command = command.arg("--message-format=json-render-diagnostics");
    let said = output(command.stderr(Stdio::inherit()))?;
    said.lines().map(Message::parse).collect()
}

/// Reads a text file.
///
/// # Errors
/// The file cannot be read; the error names its path.
pub(crate) fn text(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}
