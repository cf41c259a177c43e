//! Other processes of an example. Each runs the same program with the socket's path in its
//! environment.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

const SOCKET: &str = "CUVMM_EXAMPLE_SOCKET";

/// Returns the socket to connect to, or `None` in the first process.
pub(crate) fn socket() -> Option<PathBuf> {
    env::var_os(SOCKET).map(PathBuf::from)
}

/// Returns a command that runs this program again and connects it to `socket`.
///
/// If the example runs as the test `test`, the arguments select that test. The example itself
/// ignores its arguments.
///
/// # Errors
/// Fails if the path of this program is unknown.
pub(crate) fn again(test: &str, socket: &Path) -> Result<Command, Box<dyn Error>> {
    let mut command = Command::new(env::current_exe()?);
    command
        .args([test, "--exact", "--nocapture"])
        .env(SOCKET, socket);
    Ok(command)
}

/// Waits until a process has ended.
///
/// # Errors
/// Fails if the process did not end successfully.
pub(crate) fn ended(process: &mut Child) -> Result<(), Box<dyn Error>> {
    let status = process.wait()?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("process {}: {status}", process.id()).into()),
    }
}
