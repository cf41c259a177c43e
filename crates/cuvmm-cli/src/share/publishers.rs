//! Discovery of publishers and their publications.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::anyhow;
use cuvmm::error::{ChannelError, ShareError};
use cuvmm::share::{self, Keeping, Listing, Subscriber, UserFolder};

use cuvmm_command::terminal::{chain, safe, shown};

const PATIENCE: Duration = Duration::from_secs(2);

const MOST_ASKED: usize = 1024;

/// The most publications kept, of all publishers together.
const MOST_KEPT: usize = 4096;

#[derive(Debug)]
pub(super) struct Publisher {
    pub(super) socket: PathBuf,
    pub(super) pid: u32,
    pub(super) publications: Vec<Listing>,
    /// The number of further publications, which are not listed.
    pub(super) omitted: u64,
}

impl Publisher {
    /// Returns `true` if this is a keeper, whose name's publisher may have ended.
    fn keeps(&self, name: &str) -> bool {
        let mut named = self.publications.iter().filter(|one| one.name == name);
        named.any(|one| one.keeping == Keeping::Kept)
    }
}

#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) publishers: Vec<Publisher>,
    /// Sockets that dead publishers had left, now removed.
    pub(super) swept: Vec<PathBuf>,
    /// Sockets whose publisher does not answer, with the error.
    pub(super) silent: Vec<(PathBuf, String)>,
    /// The number of sockets that were not queried because there are too many.
    pub(super) unasked: usize,
}

impl Found {
    /// Adds a publisher, with as many of its publications as [`MOST_KEPT`] allows.
    fn add(&mut self, mut publisher: Publisher) {
        let kept = self.publishers.iter().map(|one| one.publications.len());
        let room = MOST_KEPT.saturating_sub(kept.sum());
        let cut = publisher.publications.len().saturating_sub(room);
        publisher.publications.truncate(room);
        publisher.omitted += cut as u64;
        self.publishers.push(publisher);
    }
}

/// Queries every publisher of this user in the default folder, or only the publisher at a socket.
///
/// # Errors
/// The folder cannot be read, or no publisher answers at the given socket.
pub(super) fn find(socket: Option<&Path>) -> anyhow::Result<Found> {
    let mut found = Found::default();
    let sockets = match socket {
        None => match UserFolder::open(super::folder())? {
            Some(folder) => folder.sockets()?,
            None => return Ok(found),
        },
        Some(socket) => {
            // A socket without a publisher is an error, unless a dead publisher had left it.
            if !sweep(socket, &mut found)? {
                let publisher = naming(socket, ask(socket))?;
                found.publishers.push(publisher);
            }
            return Ok(found);
        }
    };
    let mut asked = 0;
    for socket in sockets {
        let outcome = match sweep(&socket, &mut found) {
            Ok(true) => continue,
            Ok(false) if asked == MOST_ASKED => {
                found.unasked += 1;
                continue;
            }
            Ok(false) => ask(&socket),
            Err(error) => Err(error),
        };
        asked += 1;
        match outcome {
            Ok(publisher) => found.add(publisher),
            Err(error) if has_gone(&error) => {}
            Err(error) => found.silent.push((socket, chain(&error))),
        }
    }
    Ok(found)
}

/// Returns the publisher of a name, which must be the only one, or the keeper if all publishers of the
/// name have ended.
///
/// # Errors
/// No publisher, with the published names; or several publishers, with all of them.
pub(super) fn of(name: &str, socket: Option<&Path>) -> anyhow::Result<Publisher> {
    let found = find(socket)?;
    let (mut those, others): (Vec<_>, Vec<_>) = found
        .publishers
        .into_iter()
        .partition(|publisher| publisher.publications.iter().any(|one| one.name == name));
    if those.iter().any(|publisher| !publisher.keeps(name)) {
        those.retain(|publisher| !publisher.keeps(name));
    }
    match (those.pop(), those.is_empty()) {
        (Some(publisher), true) => Ok(publisher),
        (Some(last), false) => {
            those.push(last);
            let all = those.iter().map(|publisher| {
                let socket = shown(&publisher.socket);
                format!("process {} at {socket}", publisher.pid)
            });
            let all = all.collect::<Vec<_>>().join(", ");
            Err(anyhow!(
                "{name:?} is published by {all}: choose one with --socket"
            ))
        }
        (None, _) => {
            let omitted: u64 = others.iter().map(|publisher| publisher.omitted).sum();
            let cut = match (omitted, found.unasked) {
                (0, 0) => String::new(),
                (more, sockets) => {
                    format!("; {more} more were not looked at, nor {sockets} sockets")
                }
            };
            let names = others.iter().flat_map(|publisher| &publisher.publications);
            let names: Vec<_> = names.map(|one| format!("{:?}", one.name)).collect();
            let what = match names.is_empty() {
                true => "nothing is".to_owned(),
                false => format!("published are {}", names.join(", ")),
            };
            let silent = found
                .silent
                .iter()
                .map(|(socket, why)| format!("; {} does not answer: {why}", shown(socket)));
            let silent: String = silent.collect();
            Err(anyhow!("{name:?} is not published: {what}{silent}{cut}"))
        }
    }
}

/// Connects to the keeper at a socket.
///
/// # Errors
/// No keeper listens, and what runs one.
pub(super) fn keeper_at(socket: &Path) -> anyhow::Result<Subscriber> {
    let connected = Subscriber::connect(socket);
    if let Err(ChannelError::NotListening(socket)) = connected {
        let socket = shown(&socket);
        let what = format!("no keeper listens at {socket}: `cuvmm share keep` is one");
        return Err(anyhow!(what));
    }
    naming(socket, connected)
}

/// Adds the path of the socket to an error that lacks it. Some errors of the library contain it.
pub(super) fn naming<T, E: Into<anyhow::Error>>(
    socket: &Path,
    outcome: Result<T, E>,
) -> anyhow::Result<T> {
    let path = shown(socket);
    outcome.map_err(|error| {
        let error = error.into();
        match safe(&chain(&error)).contains(&path) {
            true => error,
            false => error.context(path),
        }
    })
}

/// Removes the files that a dead publisher has left at a path. Returns `true` if there were any.
fn sweep(socket: &Path, found: &mut Found) -> anyhow::Result<bool> {
    let swept = naming(socket, share::sweep(socket))?;
    if swept {
        found.swept.push(socket.to_owned());
    }
    Ok(swept)
}

fn ask(socket: &Path) -> anyhow::Result<Publisher> {
    let mut subscriber = Subscriber::connect(socket)?;
    subscriber.channel().set_timeout(PATIENCE);
    let listed = subscriber.list()?;
    Ok(Publisher {
        socket: socket.to_owned(),
        pid: subscriber.channel().peer().pid,
        omitted: listed.omitted(),
        publications: listed.publications,
    })
}

/// Returns `true` if the publisher ended while it was queried.
fn has_gone(error: &anyhow::Error) -> bool {
    let connecting = error.downcast_ref();
    let asking = error.downcast_ref();
    matches!(connecting, Some(ChannelError::NotListening { .. }))
        || matches!(asking, Some(ShareError::Channel(ChannelError::Closed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_of_all_publishers_is_bounded_and_the_rest_is_counted() {
        let listing = r#"{"name":"a","version":1,"held":1,"extents":1,"tensors":1}"#;
        let Ok(listing) = serde_json::from_str::<Listing>(listing) else {
            unreachable!("a listing");
        };
        let mut found = Found::default();
        for count in [MOST_KEPT - 2, 5, 3] {
            found.add(Publisher {
                socket: PathBuf::new(),
                pid: 1,
                publications: vec![listing.clone(); count],
                omitted: 10,
            });
        }
        let kept = found.publishers.iter().map(|one| one.publications.len());
        assert_eq!(kept.collect::<Vec<_>>(), [MOST_KEPT - 2, 2, 0]);
        let omitted = found.publishers.iter().map(|one| one.omitted);
        assert_eq!(omitted.collect::<Vec<_>>(), [10, 13, 13]);
    }
}
