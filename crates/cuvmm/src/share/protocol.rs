//! The messages between a publisher and its readers.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::channel::Channel;
use super::frame::Kind;
use super::manifest::Manifest;
use super::wait::Deadline;
use crate::error::ChannelError;

/// The largest request in bytes.
pub(super) const MOST_REQUEST: usize = 4096;

/// The largest reply in bytes: a manifest of some hundred thousand tensors.
pub(super) const MOST_REPLY: usize = 64 << 20;

/// The most publications in one reply.
pub(super) const MOST_LISTED: usize = 4096;

/// The largest reply to a listing in bytes: names, each byte of which may be escaped, and figures.
pub(super) const MOST_LISTING: usize = MOST_LISTED * (2 * MOST_NAME + 256);

/// The largest manifest in bytes, which leaves space for the rest of the reply.
pub(super) const MOST_MANIFEST: usize = MOST_REPLY - 4096;

/// The longest name of a publication in bytes.
pub(super) const MOST_NAME: usize = 255;

/// How long a publisher waits until a reader that it refuses has room for the reason.
const AT_ONCE: Duration = Duration::from_millis(1);

/// A reader's request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Lists the publications.
    List,
    /// Attaches the newest version of a name.
    Attach { name: String },
    /// Waits up to `millis` for a newer version than this one.
    Watch {
        name: String,
        publisher: u64,
        version: u64,
        millis: u64,
    },
}

/// A publisher's reply.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Publications(Vec<Listing>),
    /// The first publications, where there are more than one reply holds.
    FirstPublications(Listings),
    /// The memory follows. Sent by [`Channel::send_published`].
    Published {
        publisher: u64,
        version: u64,
        manifest: Manifest,
    },
    /// The newest version, if it differs from the reader's.
    Newest(Option<u64>),
    /// There is no publication with that name.
    NotPublished,
    /// The publisher cannot answer, for this reason. May come before the request.
    Refused(String),
}

/// A published name and its newest version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listing {
    /// Its name.
    pub name: String,
    /// Its newest version.
    pub version: u64,
    /// The bytes of memory that it holds.
    pub held: u64,
    /// The number of its extents.
    pub extents: u64,
    /// The number of its tensors.
    pub tensors: u64,
}

/// The publications of a publisher, or the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listings {
    /// The publications in the order of their names, at most 4,096.
    pub publications: Vec<Listing>,
    /// The number of all publications.
    pub all: u64,
}

impl Listings {
    /// Returns how many publications the listing leaves out.
    #[must_use]
    pub fn omitted(&self) -> u64 {
        self.all.saturating_sub(self.publications.len() as u64)
    }
}

impl From<Listings> for Reply {
    fn from(listings: Listings) -> Self {
        match listings.omitted() {
            0 => Self::Publications(listings.publications),
            _ => Self::FirstPublications(listings),
        }
    }
}

impl Channel {
    /// Sends a [`Reply::Published`] whose manifest is already serialized, so that readers share one
    /// copy of it.
    pub(super) fn send_published(
        &mut self,
        publisher: u64,
        version: u64,
        manifest: &[u8],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let head =
            format!(r#"{{"Published":{{"publisher":{publisher},"version":{version},"manifest":"#);
        self.send_message(Kind::Text, &[head.as_bytes(), manifest, b"}}"], deadline)
    }

    pub(super) fn tell<T: Serialize>(
        &mut self,
        what: &T,
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let text =
            serde_json::to_vec(what).map_err(|_| ChannelError::Malformed("not serializable"))?;
        self.send_message(Kind::Text, &[&text], deadline)
    }

    /// Tells a reader that the publisher cannot answer it, if it can be told at once.
    pub(super) fn turn_away(&mut self, why: &ChannelError) {
        let pid = std::process::id();
        let reply = Reply::Refused(format!("process {pid} cannot answer: {why}"));
        if let Err(error) = self.tell(&reply, Deadline::after(AT_ONCE)) {
            log!(debug, %error, "a reader was not told why it was refused");
        }
    }

    pub(super) fn hear<T: DeserializeOwned>(
        &mut self,
        most: usize,
        deadline: Deadline,
    ) -> Result<T, ChannelError> {
        let message = self.receive(&[Kind::Text], most, deadline)?;
        serde_json::from_slice(&message.body)
            .map_err(|_| self.malformed("not valid in the protocol of publications"))
    }
}
