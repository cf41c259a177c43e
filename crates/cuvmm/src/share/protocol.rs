//! The messages between a publisher and its readers.

use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::channel::Channel;
use super::frame::Kind;
use super::manifest::Manifest;
use super::wait::Deadline;
use crate::error::{ArgumentError, ChannelError};

/// In bytes.
pub(super) const MOST_REQUEST: usize = 4096;

/// In bytes: a manifest of some hundred thousand tensors.
pub(super) const MOST_REPLY: usize = 64 << 20;

/// The most publications in one reply.
pub(super) const MOST_LISTED: usize = 4096;

/// In bytes: names, each byte of which may be escaped, and figures.
pub(super) const MOST_LISTING: usize = MOST_LISTED * (2 * MOST_NAME + 288);

/// In bytes; leaves space for the rest of the reply.
const MOST_MANIFEST: usize = MOST_REPLY - 4096;

/// In bytes.
pub(super) const MOST_NAME: usize = 255;

/// How long a publisher waits until a refused reader has room for the reason.
const AT_ONCE: Duration = Duration::from_millis(1);

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    List,
    /// Attaches the newest version of a name.
    Attach {
        name: String,
    },
    /// Waits up to `millis` for a newer version than this one.
    Watch {
        name: String,
        publisher: u64,
        version: u64,
        millis: u64,
    },
    /// Asks a keeper to keep the newest version of a name, which the publisher at a socket has.
    Keep {
        name: String,
        socket: PathBuf,
    },
    /// Asks a keeper to drop what it keeps under a name, of one publisher or of any.
    Release {
        name: String,
        publisher: Option<u64>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Publications(Vec<Listing>),
    /// The first publications, where there are more than one reply holds.
    FirstPublications(Listings),
    /// The memory follows. Sent by [`Channel::send_published`].
    Published {
        publisher: u64,
        version: u64,
        /// True if the owner may write to the memory, and uses it further when it is withdrawn.
        #[serde(default)]
        in_place: bool,
        manifest: Manifest,
    },
    /// The newest version, if it differs from the reader's.
    Newest(Option<u64>),
    NotPublished,
    /// The keeper has this version.
    Kept(u64),
    /// `true` if the keeper kept something under the name.
    Released(bool),
    /// The publisher cannot answer, for this reason. May come before the request.
    Refused(String),
}

/// A published name and its newest version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listing {
    /// The name.
    pub name: String,
    /// The newest version.
    pub version: u64,
    /// The bytes of memory that the version holds.
    pub held: u64,
    /// The number of extents.
    pub extents: u64,
    /// The number of tensors.
    pub tensors: u64,
    /// Who has the version, and for how long.
    #[serde(default)]
    pub keeping: Keeping,
}

/// Who has a published version, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Keeping {
    /// A publisher, with which the publication ends.
    #[default]
    No,
    /// A publisher, which has [given](super::Publisher::keep) the version to a keeper.
    Wanted,
    /// A keeper. Readers attach from the publisher while it runs, and from the keeper afterwards.
    Kept,
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

/// Serializes a manifest, once for all readers, which would refuse a larger one.
///
/// # Errors
/// [`ArgumentError`] with the most bytes.
pub(super) fn text_of(manifest: &Manifest) -> Result<Vec<u8>, ArgumentError> {
    let (what, most) = ("bytes of a manifest", MOST_MANIFEST as u64);
    let text = serde_json::to_vec(manifest).map_err(|_| ArgumentError::TooLarge {
        what,
        value: u64::MAX,
        most,
    })?;
    ArgumentError::at_most(what, text.len() as u64, most)?;
    Ok(text)
}

impl Channel {
    /// Sends a [`Reply::Published`] with a serialized manifest, so that readers share one copy of
    /// it.
    pub(super) fn send_published(
        &mut self,
        (publisher, version): (u64, u64),
        in_place: bool,
        manifest: &[u8],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let head = format!(
            r#"{{"Published":{{"publisher":{publisher},"version":{version},"in_place":{in_place},"manifest":"#
        );
        let parts = [head.as_bytes(), manifest, b"}}"];
        self.send_message(Kind::Text, &parts, deadline)
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

    /// Sends a reader the reason why the publisher cannot answer, if that is possible at once.
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
