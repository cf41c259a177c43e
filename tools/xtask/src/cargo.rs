//! Running cargo: the root of the workspace, and the command to start it there.

use std::path::Path;
use std::process::Command;

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
