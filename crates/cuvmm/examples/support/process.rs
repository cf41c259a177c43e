//! The other processes of an example: the same program again, told by its environment where to connect.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

const SOCKET: &str = "CUVMM_EXAMPLE_SOCKET";

/// Where this process is to connect; nothing for the first one.
pub(crate) fn socket() -> Option<PathBuf> {
    env::var_os(SOCKET).map(PathBuf::from)
}

/// The same program, to connect to a socket. Where the example runs as a test, it is this one; on its
/// own it reads no arguments.
///
/// # Errors
/// When the system does not tell which program this is.
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
/// When it did not end well.
pub(crate) fn ended(process: &mut Child) -> Result<(), Box<dyn Error>> {
    let status = process.wait()?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("process {}: {status}", process.id()).into()),
    }
}
