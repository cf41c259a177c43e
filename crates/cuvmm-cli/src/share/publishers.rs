//! Who publishes what.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use cuvmm::error::{ChannelError, SubscribeError};
use cuvmm::share::{self, Listing, Subscriber};

use super::folder;

/// How long a publisher may take to answer before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(2);

/// A publisher that answers.
#[derive(Debug)]
pub(super) struct Publisher {
    pub(super) socket: PathBuf,
    pub(super) pid: u32,
    pub(super) publications: Vec<Listing>,
}

/// All that was found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) publishers: Vec<Publisher>,
    /// Sockets that dead publishers had left, and that are gone now.
    pub(super) swept: Vec<PathBuf>,
    /// Sockets at which somebody is and does not answer, and why.
    pub(super) silent: Vec<(PathBuf, String)>,
}

/// Asks every publisher of this user in the default folder, or the one at a socket.
///
/// # Errors
/// When the folder cannot be read, or the one socket leads to none.
pub(super) fn find(socket: Option<&Path>) -> anyhow::Result<Found> {
    let mut found = Found::default();
    let sockets = match socket {
        None => folder::sockets()?,
        Some(socket) => {
            // What is there is told, and that nothing is there too.
            if !sweep(socket, &mut found)? {
                let publisher = ask(socket).with_context(|| socket.display().to_string())?;
                found.publishers.push(publisher);
            }
            return Ok(found);
        }
    };
    for socket in sockets {
        let outcome = match sweep(&socket, &mut found) {
            Ok(true) => continue,
            Ok(false) => ask(&socket),
            Err(error) => Err(error),
        };
        match outcome {
            Ok(publisher) => found.publishers.push(publisher),
            Err(error) if has_gone(&error) => {}
            Err(error) => found.silent.push((socket, format!("{error:#}"))),
        }
    }
    Ok(found)
}

/// The only publisher of a name.
///
/// # Errors
/// When there is none, with what there is instead, or more than one, with all of them.
pub(super) fn of(name: &str, socket: Option<&Path>) -> anyhow::Result<Publisher> {
    let found = find(socket)?;
    let (mut those, others): (Vec<_>, Vec<_>) = found
        .publishers
        .into_iter()
        .partition(|publisher| publisher.publications.iter().any(|one| one.name == name));
    match (those.pop(), those.is_empty()) {
        (Some(publisher), true) => Ok(publisher),
        (Some(last), false) => {
            those.push(last);
            let all = those.iter().map(|publisher| {
                let socket = publisher.socket.display();
                format!("process {} at {socket}", publisher.pid)
            });
            let all = all.collect::<Vec<_>>().join(", ");
            Err(anyhow!(
                "{name:?} is published by {all}: choose one with --socket"
            ))
        }
        (None, _) => {
            let names = others.iter().flat_map(|publisher| &publisher.publications);
            let names: Vec<_> = names.map(|one| format!("{:?}", one.name)).collect();
            let what = match names.is_empty() {
                true => "nothing".to_owned(),
                false => names.join(", "),
            };
            let silent = found
                .silent
                .iter()
                .map(|(socket, why)| format!("; {} does not answer: {why}", socket.display()));
            let silent: String = silent.collect();
            Err(anyhow!("nobody publishes {name:?}, but {what}{silent}"))
        }
    }
}

/// Removes what a dead publisher has left at a path; whether there was something.
fn sweep(socket: &Path, found: &mut Found) -> anyhow::Result<bool> {
    let swept = share::sweep(socket)?;
    if swept {
        found.swept.push(socket.to_owned());
    }
    Ok(swept)
}

fn ask(socket: &Path) -> anyhow::Result<Publisher> {
    let mut subscriber = Subscriber::connect(socket)?;
    subscriber.channel().set_timeout(PATIENCE);
    Ok(Publisher {
        socket: socket.to_owned(),
        pid: subscriber.channel().peer().pid,
        publications: subscriber.list()?,
    })
}

/// Whether it ended while it was asked.
fn has_gone(error: &anyhow::Error) -> bool {
    let connecting = error.downcast_ref();
    let asking = error.downcast_ref();
    matches!(connecting, Some(ChannelError::NobodyThere { .. }))
        || matches!(asking, Some(SubscribeError::Channel(ChannelError::Closed)))
}
