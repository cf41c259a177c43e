//! The folder with the sockets of this user's publishers, one for each process, and by default with
//! this user's ledgers.
//!
//! A user with write access to the folder could impersonate a publisher or a process of a ledger.
//! So the folder must belong to this user, and no other user may have access to it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{DirBuilder, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::geteuid;

use super::lock::LOCK_ENDING;
use crate::descriptors::Why;
use crate::error::FolderError;
use crate::peer::is_own_user;

/// The extension of a socket.
const SOCKET: &str = "sock";

/// The folder in which programs of one user find each other: `$XDG_RUNTIME_DIR/cuvmm`, or
/// `/tmp/cuvmm-UID`. The command `cuvmm` and the Python package use it too.
///
/// A value proves that the folder belonged to this user when it was opened, and that no other user
/// had access to it.
#[derive(Clone, Debug)]
pub struct UserFolder(PathBuf);

impl UserFolder {
    /// Returns the path of the folder, which need not exist, for the value of `XDG_RUNTIME_DIR`.
    #[must_use]
    pub fn path_in(runtime: Option<&OsStr>) -> PathBuf {
        match runtime.filter(|folder| !folder.is_empty()) {
            Some(folder) => Path::new(folder).join("cuvmm"),
            None => PathBuf::from(format!("/tmp/cuvmm-{}", geteuid().as_raw())),
        }
    }

    /// Opens the folder at a path. Returns `None` if there is none.
    ///
    /// # Errors
    /// A folder that belongs to another user, or is open to other users.
    pub fn open(path: PathBuf) -> Result<Option<Self>, FolderError> {
        match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => checked(path, found).map(Some),
        }
    }

    /// Opens the folder at a path, and makes it if it is missing.
    ///
    /// # Errors
    /// A folder that cannot be made, belongs to another user, or is open to other users.
    pub fn create(path: PathBuf) -> Result<Self, FolderError> {
        let found = match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => std::fs::symlink_metadata(&path),
        };
        checked(path, found)
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path for the socket of this process's publisher.
    #[must_use]
    pub fn own_socket(&self) -> PathBuf {
        self.0.join(format!("{}.{SOCKET}", std::process::id()))
    }

    /// Returns the path for the socket of this user's keeper.
    #[must_use]
    pub fn keeper_socket(&self) -> PathBuf {
        self.0.join(format!("keeper.{SOCKET}"))
    }

    /// Returns the paths of all sockets in the folder, in the order of their names, including those
    /// with only the lock file left.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn sockets(&self) -> Result<BTreeSet<PathBuf>, FolderError> {
        let failed = |error| failed(&self.0, &error);
        let lock = LOCK_ENDING.trim_start_matches('.');
        let mut sockets = BTreeSet::new();
        for entry in std::fs::read_dir(&self.0).map_err(failed)? {
            let mut path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|ending| ending == lock) {
                path.set_extension("");
            }
            if path.extension().is_some_and(|ending| ending == SOCKET) {
                sockets.insert(path);
            }
        }
        Ok(sockets)
    }
}

fn checked(path: PathBuf, found: io::Result<Metadata>) -> Result<UserFolder, FolderError> {
    let found = found.map_err(|error| failed(&path, &error))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o777);
    let problem = if !found.is_dir() {
        "is no folder".to_owned()
    } else if !is_own_user(owner) {
        match geteuid().as_raw() {
            own if own == owner => format!(
                "belongs to the overflow user id {owner}, which users without an id in this \
                 namespace share: run as another user"
            ),
            own => format!("belongs to user {owner}, and this is user {own}"),
        }
    } else if mode & 0o077 != 0 {
        format!("has mode {mode:04o}, but other users must not have access: use chmod 700")
    } else {
        return Ok(UserFolder(path));
    };
    Err(FolderError { path, problem })
}

fn failed(path: &Path, error: &io::Error) -> FolderError {
    let why = match Errno::from_io_error(error) {
        Some(errno) => Why(errno).to_string(),
        None => error.to_string(),
    };
    FolderError {
        path: path.to_owned(),
        problem: format!("cannot be used: {why}"),
    }
}
