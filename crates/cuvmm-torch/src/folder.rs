//! The folder with the sockets of this user's publishers, one for each process, as the command
//! `cuvmm share` has them.
//!
//! A user with write access to the folder could impersonate a publisher. The folder must therefore
//! belong to this user, and no other user may have access to it.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuvmm::error::{ChannelError, ShareError};
use cuvmm::share::{self, LOCK_ENDING, Subscriber};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::error::Error;

/// The extension of a socket.
const SOCKET: &str = "sock";

/// How long one publisher may take to answer when all are asked.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most names that an error lists.
const MOST_NAMED: usize = 20;

/// Returns the path of the folder: `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID`.
fn path() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(&folder).join("cuvmm"),
        None => PathBuf::from(format!("/tmp/cuvmm-{}", geteuid().as_raw())),
    }
}

/// Returns the path of this process's socket. Makes the folder if it is missing.
///
/// # Errors
/// A folder that cannot be made, belongs to another user, or is open to other users.
pub(crate) fn own_socket() -> Result<PathBuf, Error> {
    let folder = path();
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(failed(&folder, error));
        }
        _ => check(&folder)?,
    }
    Ok(folder.join(format!("{}.{SOCKET}", std::process::id())))
}

/// Returns the socket of the publisher that publishes a name. Removes what dead publishers left.
///
/// # Errors
/// No publisher, with the names that are published, or several.
pub(crate) fn publisher_of(name: &str) -> Result<PathBuf, Error> {
    let (mut those, mut others) = (Vec::new(), BTreeSet::new());
    for socket in sockets()? {
        let names = match published_at(&socket) {
            Ok(names) => names,
            Err(error) if lacks_descriptors(&error) => return Err(error),
            // A publisher that ends meanwhile, or does not answer, publishes nothing.
            Err(_) => continue,
        };
        match names.iter().any(|one| one == name) {
            true => those.push(socket),
            false => others.extend(names),
        }
    }
    if let (Some(only), true) = (those.pop(), those.is_empty()) {
        return Ok(only);
    }
    if those.is_empty() {
        let named: Vec<_> = others.iter().take(MOST_NAMED).collect();
        let instead = match others.len() - named.len() {
            0 if named.is_empty() => "no process of this user publishes anything".to_owned(),
            0 => format!("published are {named:?}"),
            more => format!("published are {named:?} and {more} more"),
        };
        let name = name.to_owned();
        return Err(Error::NotPublished { name, instead });
    }
    Err(ambiguous(name))
}

/// Returns the error that lists all publishers of a name.
fn ambiguous(name: &str) -> Error {
    let has = |socket: &PathBuf| {
        published_at(socket).is_ok_and(|names| names.iter().any(|one| one == name))
    };
    let sockets = sockets().unwrap_or_default();
    let paths: Vec<_> = sockets
        .into_iter()
        .filter(has)
        .map(|path| path.display().to_string())
        .collect();
    Error::Ambiguous {
        name: name.to_owned(),
        paths: paths.join(", "),
    }
}

/// Returns the names that are published at a socket, or none if a dead publisher had left it.
fn published_at(socket: &Path) -> Result<Vec<String>, Error> {
    if share::sweep(socket)? {
        return Ok(Vec::new());
    }
    let mut subscriber = Subscriber::connect(socket)?;
    subscriber.channel().set_timeout(PATIENCE);
    let listed = subscriber.list()?.publications;
    Ok(listed.into_iter().map(|one| one.name).collect())
}

/// Returns `true` if a publisher could not be asked because this process may open no more descriptors.
fn lacks_descriptors(error: &Error) -> bool {
    let (Error::Channel(error) | Error::Share(ShareError::Channel(error))) = error else {
        return false;
    };
    match error {
        ChannelError::System { errno, .. } => *errno == Errno::MFILE,
        error => matches!(error, ChannelError::TooManyFiles),
    }
}

/// Returns the paths of all sockets in the folder, also of those of which only the lock is left.
fn sockets() -> Result<BTreeSet<PathBuf>, Error> {
    let folder = path();
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(|error| failed(&folder, error))?,
    };
    check(&folder)?;
    let lock = LOCK_ENDING.trim_start_matches('.');
    let mut sockets = BTreeSet::new();
    for entry in entries {
        let mut path = entry.map_err(|error| failed(&folder, error))?.path();
        if path.extension().is_some_and(|ending| ending == lock) {
            path.set_extension("");
        }
        if path.extension().is_some_and(|ending| ending == SOCKET) {
            sockets.insert(path);
        }
    }
    Ok(sockets)
}

fn check(folder: &Path) -> Result<(), Error> {
    let found = std::fs::symlink_metadata(folder).map_err(|error| failed(folder, error))?;
    let own = geteuid().as_raw();
    let problem = if !found.is_dir() {
        "is no folder".to_owned()
    } else if found.uid() != own {
        format!("belongs to user {}, and this is user {own}", found.uid())
    } else if found.mode() & 0o077 != 0 {
        "is open to other users: use chmod 700".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::Folder {
        path: folder.to_owned(),
        problem,
    })
}

fn failed(folder: &Path, error: io::Error) -> Error {
    if let Some(errno @ Errno::MFILE) = Errno::from_io_error(&error) {
        let call = "open";
        return ChannelError::System { call, errno }.into();
    }
    Error::Folder {
        path: folder.to_owned(),
        problem: format!("cannot be used: {error}"),
    }
}
