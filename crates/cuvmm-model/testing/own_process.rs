//! Running one test of a test program in a process of its own.

use std::process::Command;

/// Returns a command that runs one test of this program, ignored or not, and prints what it prints.
pub(crate) fn only(test: &str) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", test, "--include-ignored", "--nocapture"]);
    command
}
