//! The publishers of this user, found by the names that they publish.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuvmm::share::{self, Subscriber, UserFolder};

use crate::error::Error;

/// How long one publisher may take to answer when all are asked.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most names that an error lists.
const MOST_NAMED: usize = 20;

/// Returns the socket of the publisher that publishes a name. Removes what dead publishers left.
///
/// # Errors
/// No publisher, with the names that are published, or several.
pub(crate) fn publisher_of(name: &str) -> Result<PathBuf, Error> {
    let (mut those, mut others) = (Vec::new(), BTreeSet::new());
    for socket in sockets()? {
        // A publisher that ends meanwhile, or does not answer, publishes nothing.
        let Ok(names) = published_at(&socket) else {
            continue;
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

/// Returns the paths of all sockets in the folder, or none if there is no folder.
fn sockets() -> Result<BTreeSet<PathBuf>, Error> {
    Ok(match UserFolder::open()? {
        Some(folder) => folder.sockets()?,
        None => BTreeSet::new(),
    })
}
