//! Finds this user's publishers by the names that they publish.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuvmm::error::{ChannelError, ShareError};
use cuvmm::share::{self, Keeping, Listing, Subscriber, UserFolder};
use rustix::io::Errno;

use crate::error::Error;

const PATIENCE: Duration = Duration::from_secs(2);

const MOST_NAMED: usize = 20;

fn path() -> PathBuf {
    UserFolder::path_in(std::env::var_os("XDG_RUNTIME_DIR").as_deref())
}

/// Returns the user's folder, and makes it if needed.
///
/// # Errors
/// Those of [`own_socket`].
pub(crate) fn own() -> Result<PathBuf, Error> {
    Ok(UserFolder::create(path())?.path().to_owned())
}

/// Returns the path of this process's socket. Makes its folder if needed.
///
/// # Errors
/// The folder cannot be made, belongs to another user, or is open to other users.
pub(crate) fn own_socket() -> Result<PathBuf, Error> {
    Ok(UserFolder::create(path())?.own_socket())
}

/// Returns the path of the socket of this user's keeper. Makes its folder if needed.
///
/// # Errors
/// Those of [`own_socket`].
pub(crate) fn keeper_socket() -> Result<PathBuf, Error> {
    Ok(UserFolder::create(path())?.keeper_socket())
}

/// Connects to the keeper at a socket.
///
/// # Errors
/// No keeper listens there.
pub(crate) fn keeper_at(socket: &Path) -> Result<Subscriber, Error> {
    Subscriber::connect(socket).map_err(|error| match error {
        ChannelError::NotListening(path) => Error::NoKeeper { path },
        error => Error::at(socket, error),
    })
}

/// Returns the names that running publishers have given to a keeper, with the publishers' sockets.
///
/// # Errors
/// The user's folder cannot be read.
pub(crate) fn wanted() -> Result<Vec<(PathBuf, String)>, Error> {
    let mut wanted = Vec::new();
    for socket in sockets()? {
        // A publisher that does not answer gives nothing.
        let listed = published_at(&socket).unwrap_or_default().into_iter();
        let given = listed.filter(|one| one.keeping == Keeping::Wanted);
        wanted.extend(given.map(|one| (socket.clone(), one.name)));
    }
    Ok(wanted)
}

/// Returns the socket of the publisher of a name, or of the keeper if all publishers of the name have
/// ended. Removes the sockets of dead publishers.
///
/// # Errors
/// No publisher (with the names that are published), or several.
pub(crate) fn publisher_of(name: &str) -> Result<PathBuf, Error> {
    let (mut those, mut others) = (Vec::new(), BTreeSet::new());
    let mut silent = String::new();
    let mut keepers = Vec::new();
    for socket in sockets()? {
        let listed = match published_at(&socket) {
            Ok(listed) => listed,
            Err(error) if lacks_descriptors(&error) => return Err(error),
            // A publisher that ends meanwhile publishes nothing.
            Err(error) if error.is_not_published() => continue,
            Err(error) => {
                silent += &format!("; {} does not answer: {error}", socket.display());
                continue;
            }
        };
        match listed.iter().find(|one| one.name == name) {
            Some(one) if one.keeping == Keeping::Kept => keepers.push(socket),
            Some(_) => those.push(socket),
            None => others.extend(listed.into_iter().map(|one| one.name)),
        }
    }
    if those.is_empty() {
        those = keepers;
    }
    if let (Some(only), true) = (those.pop(), those.is_empty()) {
        return Ok(only);
    }
    if those.is_empty() {
        let named: Vec<_> = others.iter().take(MOST_NAMED).collect();
        let instead = match others.len() - named.len() {
            0 if named.is_empty() && silent.is_empty() => {
                "no process of this user publishes anything".to_owned()
            }
            0 if named.is_empty() => "nothing is".to_owned(),
            0 => format!("published are {named:?}"),
            more => format!("published are {named:?} and {more} more"),
        };
        let (name, instead) = (name.to_owned(), instead + &silent);
        return Err(Error::NotPublished { name, instead });
    }
    Err(ambiguous(name))
}

fn ambiguous(name: &str) -> Error {
    let has = |socket: &PathBuf| {
        published_at(socket).is_ok_and(|listed| listed.iter().any(|one| one.name == name))
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

/// Returns the publications at a socket, or none if a dead publisher had left it.
fn published_at(socket: &Path) -> Result<Vec<Listing>, Error> {
    if share::sweep(socket)? {
        return Ok(Vec::new());
    }
    let mut subscriber = Subscriber::connect(socket)?;
    subscriber.channel().set_timeout(PATIENCE);
    Ok(subscriber.list()?.publications)
}

/// Returns `true` if a publisher could not be asked for lack of descriptors in this process.
fn lacks_descriptors(error: &Error) -> bool {
    let (Error::Channel(error) | Error::Share(ShareError::Channel(error))) = error else {
        return false;
    };
    match error {
        ChannelError::System { errno, .. } => *errno == Errno::MFILE,
        error => matches!(error, ChannelError::TooManyFiles),
    }
}

fn sockets() -> Result<BTreeSet<PathBuf>, Error> {
    Ok(match UserFolder::open(path())? {
        Some(folder) => folder.sockets()?,
        None => BTreeSet::new(),
    })
}
