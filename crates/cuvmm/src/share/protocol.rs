//! What a publisher and those who read from it say to each other.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::channel::Channel;
use super::frame::Kind;
use super::manifest::Manifest;
use super::wait::Deadline;
use crate::error::ChannelError;

/// The most bytes of a request.
pub(super) const MOST_REQUEST: usize = 4096;

/// The most bytes of what answers one: a manifest of some hundred thousand tensors.
pub(super) const MOST_REPLY: usize = 64 << 20;

/// The most publications in one answer.
pub(super) const MOST_LISTED: usize = 4096;

/// The most bytes of such an answer: names, each byte of which may be escaped, and figures.
pub(super) const MOST_LISTING: usize = MOST_LISTED * (2 * MOST_NAME + 256);

/// The most bytes of a manifest, with room for what is around it.
pub(super) const MOST_MANIFEST: usize = MOST_REPLY - 4096;

/// The most bytes of a publication's name.
pub(super) const MOST_NAME: usize = 255;

/// What a reader asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// What is there.
    List,
    /// The newest version of a name.
    Attach { name: String },
    /// To be told when there is a newer version than this, for so long.
    Watch {
        name: String,
        publisher: u64,
        version: u64,
        millis: u64,
    },
}

/// What a publisher answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Publications(Vec<Listing>),
    /// The first of more than one answer holds.
    FirstPublications(Listings),
    /// The memory comes next. Sent by [`Channel::tell_published`].
    Published {
        publisher: u64,
        version: u64,
        manifest: Manifest,
    },
    /// The newest version, if it is another one.
    Newest(Option<u64>),
    /// There is nothing of that name.
    NotPublished,
}

/// Something published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listing {
    /// Its name.
    pub name: String,
    /// Its newest version.
    pub version: u64,
    /// Bytes of memory that it holds.
    pub held: u64,
    /// In how many extents.
    pub extents: u64,
    /// How many tensors are in it.
    pub tensors: u64,
}

/// What a publisher has published, or the first of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listings {
    /// The publications in the order of their names, at most 4,096.
    pub publications: Vec<Listing>,
    /// How many there are.
    pub all: u64,
}

impl Listings {
    /// Returns how many publications the listing leaves out.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.all.saturating_sub(self.publications.len() as u64)
    }
}

impl From<Listings> for Reply {
    fn from(listings: Listings) -> Self {
        match listings.left_out() {
            0 => Self::Publications(listings.publications),
            _ => Self::FirstPublications(listings),
        }
    }
}

impl Channel {
    /// Answers with a version whose manifest is there as it travels, so that no reader costs another
    /// copy of it.
    pub(super) fn tell_published(
        &mut self,
        publisher: u64,
        version: u64,
        manifest: &[u8],
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let head =
            format!(r#"{{"Published":{{"publisher":{publisher},"version":{version},"manifest":"#);
        self.send(Kind::Text, &[head.as_bytes(), manifest, b"}}"], deadline)
    }

    pub(super) fn tell<T: Serialize>(
        &mut self,
        what: &T,
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let text = serde_json::to_vec(what).map_err(|_| ChannelError::Malformed {
            what: "not to be written down",
        })?;
        self.send(Kind::Text, &[&text], deadline)
    }

    pub(super) fn hear<T: DeserializeOwned>(
        &mut self,
        most: usize,
        deadline: Deadline,
    ) -> Result<T, ChannelError> {
        let message = self.receive(&[Kind::Text], most, deadline)?;
        serde_json::from_slice(&message.body)
            .map_err(|_| self.malformed("not what is said in a publication's protocol"))
    }
}
