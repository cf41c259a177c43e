//! The reader's side of a publication.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use bytemuck::Pod;

use super::attachment::{Attachment, AttachmentBuilder};
use super::channel::Channel;
use super::manifest::{Manifest, Tensor};
use super::peer::Users;
use super::protocol::{Listings, MOST_LISTING, MOST_NAME, MOST_REPLY, Reply, Request};
use crate::error::{ChannelError, ShareError};
use crate::view::View;

/// A connection to a [`Publisher`](super::Publisher).
///
/// The publisher closes a connection over which nothing was asked for 10 minutes, and a new one over
/// which nothing is asked within 10 seconds. [Waiting](Self::wait_for_newer) is asking.
#[derive(Debug)]
pub struct Subscriber {
    channel: Channel,
}

/// One version of published memory, attached. It stays as it is when a newer one is published, and
/// when its publisher goes.
#[derive(Debug)]
pub struct Publication {
    name: String,
    version: u64,
    publisher: u64,
    manifest: Manifest,
    memory: Attachment,
}

impl Subscriber {
    /// Connects to a publisher of the same user.
    ///
    /// # Errors
    /// [`ChannelError`] when there is none, or it is another user's.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Ok(Self::over(Channel::connect(path)?))
    }

    /// The same where the publisher may be one of these users.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_to(path: impl AsRef<Path>, users: &Users) -> Result<Self, ChannelError> {
        Ok(Self::over(Channel::connect_to(path, users)?))
    }

    /// Reads from a publisher over a channel that there is.
    #[must_use]
    pub const fn over(channel: Channel) -> Self {
        Self { channel }
    }

    /// The connection, to look at its peer or set its timeout.
    pub const fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// Lists the publications, at most 4,096 of them, and says how many there are.
    ///
    /// # Errors
    /// [`ShareError`] when the publisher does not answer.
    pub fn list(&mut self) -> Result<Listings, ShareError> {
        let deadline = self.channel.deadline();
        self.channel.tell(&Request::List, deadline)?;
        match self.channel.hear(MOST_LISTING, deadline)? {
            Reply::Publications(publications) => Ok(Listings {
                all: publications.len() as u64,
                publications,
            }),
            Reply::FirstPublications(listings) => Ok(listings),
            _ => Err(self.unexpected()),
        }
    }

    /// Attaches the newest version of a name.
    ///
    /// # Errors
    /// [`ShareError`] when there is none, or it cannot be attached as it is wanted. Nothing of it
    /// is held then.
    pub fn attach(
        &mut self,
        name: &str,
        how: &AttachmentBuilder<'_>,
    ) -> Result<Publication, ShareError> {
        let deadline = self.channel.deadline();
        let name = name.to_owned();
        // Nothing has such a name, and a request could not hold every one.
        if name.len() > MOST_NAME {
            return Err(ShareError::NotFound { name });
        }
        let request = Request::Attach { name: name.clone() };
        self.channel.tell(&request, deadline)?;
        let (publisher, version, manifest) = match self.channel.hear(MOST_REPLY, deadline)? {
            Reply::Published {
                publisher,
                version,
                manifest,
            } => (publisher, version, manifest),
            Reply::NotPublished => return Err(ShareError::NotFound { name }),
            _ => return Err(self.unexpected()),
        };
        let memory = self.channel.take_before(how, deadline)?;
        manifest.check(memory.runs())?;
        Ok(Publication {
            name,
            version,
            publisher,
            manifest,
            memory,
        })
    }

    /// Waits until there is another version than this one, for so long, and returns its version;
    /// nothing if none came.
    ///
    /// # Errors
    /// [`ShareError`] when the name is not published any more, or the publisher has gone.
    pub fn wait_for_newer(
        &mut self,
        than: &Publication,
        timeout: Duration,
    ) -> Result<Option<u64>, ShareError> {
        let name = than.name.clone();
        let request = Request::Watch {
            name: name.clone(),
            publisher: than.publisher,
            version: than.version,
            millis: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        };
        let deadline = self.channel.deadline();
        self.channel.tell(&request, deadline)?;
        let deadline = self.channel.deadline_after(timeout);
        match self.channel.hear(MOST_REPLY, deadline)? {
            Reply::Newest(version) => Ok(version),
            Reply::NotPublished => Err(ShareError::NotFound { name }),
            _ => Err(self.unexpected()),
        }
    }

    fn unexpected(&mut self) -> ShareError {
        ShareError::Channel(self.channel.malformed("not an answer to what was asked"))
    }
}

impl Publication {
    /// The name that it is published under.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its version, which counts from 1 for each name of a publisher.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// What lies where.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The memory.
    #[must_use]
    pub const fn memory(&self) -> &Attachment {
        &self.memory
    }

    /// The memory alone.
    #[must_use]
    pub fn into_memory(self) -> Attachment {
        self.memory
    }

    /// The elements of a tensor, for a kernel to read.
    ///
    /// # Errors
    /// [`ShareError`] when there is no such tensor, or its bytes are no whole elements of that type.
    pub fn view<T: Pod>(&self, tensor: &str) -> Result<View<'_, T>, ShareError> {
        let found: Option<Range<u64>> = self.manifest.tensor(tensor).map(Tensor::range);
        match found {
            Some(range) => self.memory.view_of(range),
            None => Err(ShareError::NotFound {
                name: tensor.to_owned(),
            }),
        }
    }
}
