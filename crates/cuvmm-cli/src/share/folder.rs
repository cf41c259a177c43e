//! The folder with the sockets of this user's publishers, one for each process, and by default with
//! this user's ledgers.
//!
//! A user with write access to the folder could impersonate a publisher or a process of a ledger. The folder must therefore
//! belong to this user, and no other user may have access to it.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use cuvmm::share::LOCK_ENDING;
use rustix::process::geteuid;

use cuvmm_cli::terminal::shown;

/// The extension of a socket.
const SOCKET: &str = "sock";

/// Returns the path of the folder: `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID`.
pub(crate) fn path() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(&folder).join("cuvmm"),
        None => PathBuf::from(format!("/tmp/cuvmm-{}", geteuid().as_raw())),
    }
}

/// Returns the path of the folder if there is one.
///
/// # Errors
/// A folder that belongs to another user, or is accessible to other users.
pub(crate) fn existing() -> anyhow::Result<Option<PathBuf>> {
    let folder = path();
    match std::fs::symlink_metadata(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        _ => check(&folder).map(|()| Some(folder)),
    }
}

/// Returns the path of this process's socket in the folder. Creates the folder if it is missing.
///
/// # Errors
/// A folder that cannot be created, belongs to another user, or is accessible to other users.
pub(super) fn own_socket() -> anyhow::Result<PathBuf> {
    let folder = path();
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| shown(&folder));
        }
        _ => {}
    }
    check(&folder)?;
    Ok(folder.join(format!("{}.{SOCKET}", std::process::id())))
}

/// Returns the paths of all sockets in the folder, in the order of their names, including sockets
/// of which only the lock file is left. Returns none if there is no folder.
///
/// # Errors
/// A folder that cannot be read, belongs to another user, or is accessible to other users.
pub(super) fn sockets() -> anyhow::Result<BTreeSet<PathBuf>> {
    let Some(folder) = existing()? else {
        return Ok(BTreeSet::new());
    };
    let entries = std::fs::read_dir(&folder).with_context(|| shown(&folder))?;
    let mut sockets = BTreeSet::new();
    for entry in entries {
        let path = entry.with_context(|| shown(&folder))?.path();
        let lock = LOCK_ENDING.trim_start_matches('.');
        let path = match path.extension().is_some_and(|ending| ending == lock) {
            true => path.with_extension(""),
            false => path,
        };
        if path.extension().is_some_and(|ending| ending == SOCKET) {
            sockets.insert(path);
        }
    }
    Ok(sockets)
}

fn check(folder: &Path) -> anyhow::Result<()> {
    let shown = shown(folder);
    let found = std::fs::symlink_metadata(folder).with_context(|| shown.clone())?;
    ensure!(found.is_dir(), "{shown} is no folder");
    let own = geteuid().as_raw();
    ensure!(
        found.uid() == own,
        "{shown} belongs to user {}, and this is user {own}",
        found.uid()
    );
    let mode = found.mode() & 0o777;
    ensure!(
        mode & 0o077 == 0,
        "{shown} has mode {mode:04o}, but other users must not have access: use chmod 700"
    );
    Ok(())
}
