//! Where the sockets of this user's publishers lie: one for each process.
//!
//! A user who may write to the folder could pass a process off as a publisher, so the folder must
//! belong to this user and be closed to all others.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use cuvmm::share::LOCK_ENDING;
use rustix::process::geteuid;

use cuvmm_cli::terminal::shown;

/// How the name of a socket ends.
const SOCKET: &str = "sock";

/// `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID`.
fn path() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(&folder).join("cuvmm"),
        None => PathBuf::from(format!("/tmp/cuvmm-{}", geteuid().as_raw())),
    }
}

/// The socket of this process, in the folder, which is made if it is not there.
///
/// # Errors
/// When the folder cannot be made, or others may write to it.
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

/// Every socket in the folder, in the order of their names, and every place of one of which a lock is
/// left. Where there is no folder there is none.
///
/// # Errors
/// When the folder cannot be read, or others may write to it.
pub(super) fn sockets() -> anyhow::Result<BTreeSet<PathBuf>> {
    let folder = path();
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.with_context(|| shown(&folder))?,
    };
    check(&folder)?;
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
        "{shown} has mode {mode:04o}, and others may have no right to it: chmod 700"
    );
    Ok(())
}
