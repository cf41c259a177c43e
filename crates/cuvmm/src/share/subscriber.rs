//! The reader's side of a publication.

use std::any::type_name;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytemuck::Pod;

use super::arriving::Arriving;
use super::attachment::{Attachment, AttachmentBuilder};
use super::channel::Channel;
use super::manifest::Manifest;
use super::protocol::{Listings, MOST_LISTING, MOST_NAME, MOST_REPLY, Reply, Request};
use super::wait::Deadline;
use super::wire::Description;
use crate::error::{ChannelError, ShareError};
use crate::own::CloseError;
use crate::peer::Users;
use crate::view::View;

/// A connection to a [`Publisher`](super::Publisher) or a [`Keeper`](super::Keeper).
///
/// The publisher closes a new connection that sends no request within 10 seconds, and any
/// connection that sends none for 10 minutes. [Waiting](Self::wait_for_newer) is a request. A
/// publisher that has too many readers or may open no more file descriptors says so in
/// [`ShareError::Refused`].
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
/// # let mut region = cuvmm::Region::builder(&device, 4 << 20).shareable(shareable).reserve()?;
/// # region.commit(0..region.size())?;
/// # let socket = std::env::temp_dir().join(format!("subscriber-{}", std::process::id()));
/// # let publisher = cuvmm::share::Publisher::bind(&socket)?;
/// # publisher.publish("model", cuvmm::share::Manifest::default(), region)?;
/// use std::time::Duration;
/// use cuvmm::Attachment;
/// use cuvmm::share::Subscriber;
///
/// // Another process publishes "model" at `socket`.
/// let mut subscriber = Subscriber::connect(&socket)?;
/// let model = subscriber.attach("model", &Attachment::builder(&device))?;
/// println!("version {}, {} bytes", model.version(), model.memory().held());
/// let newer = subscriber.wait_for_newer(&model, Duration::from_millis(1))?;
/// assert_eq!(newer, None); // it is still the newest version
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Subscriber {
    channel: Channel,
}

/// A version that was received, with its publisher.
pub(super) struct Fetched<T> {
    pub(super) publisher: u64,
    pub(super) version: u64,
    pub(super) is_in_place: bool,
    pub(super) manifest: Manifest,
    pub(super) memory: T,
}

/// One attached version of published memory. It does not change when a newer version is published
/// or the publisher ends.
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
    /// [`ChannelError`] if no publisher listens at the path, or it belongs to another user.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Ok(Self::from_channel(Channel::connect(path)?))
    }

    /// Connects to a publisher that belongs to one of `users`.
    ///
    /// # Errors
    /// [`ChannelError`] if no publisher listens at the path, or it belongs to another user.
    pub fn connect_to(path: impl AsRef<Path>, users: &Users) -> Result<Self, ChannelError> {
        Ok(Self::from_channel(Channel::connect_to(path, users)?))
    }

    /// Creates a subscriber that uses an existing channel.
    #[must_use]
    #[doc(alias = "over")]
    pub const fn from_channel(channel: Channel) -> Self {
        Self { channel }
    }

    /// Returns the channel, for example to inspect the peer or to set the timeout.
    pub const fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// Lists the publications, at most 4,096 of them, with their total number.
    ///
    /// # Errors
    /// [`ShareError`] if the publisher does not answer.
    pub fn list(&mut self) -> Result<Listings, ShareError> {
        let deadline = self.channel.deadline();
        match self.ask(&Request::List, deadline, (MOST_LISTING, deadline))? {
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
    /// [`ShareError`] if the name is not published, or the memory cannot be attached as `how` says.
    /// Nothing stays imported or mapped then.
    pub fn attach(
        &mut self,
        name: &str,
        how: &AttachmentBuilder<'_>,
    ) -> Result<Publication, ShareError> {
        let agree = |description: &Description| how.agree(description);
        let found = self.fetch(name, agree, Attachment::runs)?;
        Ok(Publication {
            name: name.to_owned(),
            version: found.version,
            publisher: found.publisher,
            manifest: found.manifest,
            memory: found.memory,
        })
    }

    /// Receives the newest version of a name. `agree` checks the description before a handle is
    /// requested, and `runs` returns the ranges that have memory, for the manifest to be checked.
    pub(super) fn fetch<A: Arriving>(
        &mut self,
        name: &str,
        agree: impl FnOnce(&Description) -> Result<A, ShareError>,
        runs: impl FnOnce(&A::Whole) -> &[Range<u64>],
    ) -> Result<Fetched<A::Whole>, ShareError> {
        let deadline = self.channel.deadline();
        let name = name.to_owned();
        // No publication has such a name, and a request may be too short to hold it.
        if name.len() > MOST_NAME {
            return Err(ShareError::NotFound(name));
        }
        let request = Request::Attach { name: name.clone() };
        let reply = self.ask(&request, deadline, (MOST_REPLY, deadline))?;
        let (publisher, version, is_in_place, manifest) = match reply {
            Reply::Published {
                publisher,
                version,
                in_place,
                manifest,
            } => (publisher, version, in_place, manifest),
            Reply::NotPublished => return Err(ShareError::NotFound(name)),
            _ => return Err(self.unexpected()),
        };
        let memory = self.channel.receive_as(agree, deadline)?;
        if let Err(error) = manifest.check(runs(&memory)) {
            A::discard(memory);
            return Err(error.into());
        }
        Ok(Fetched {
            publisher,
            version,
            is_in_place,
            manifest,
            memory,
        })
    }

    /// Asks a keeper to keep what the publisher at a socket has under a name. Returns the version.
    pub(super) fn keep(&mut self, name: &str, socket: PathBuf) -> Result<u64, ShareError> {
        let name = name.to_owned();
        let deadline = self.channel.deadline();
        let request = Request::Keep { name, socket };
        match self.ask(&request, deadline, (MOST_REPLY, deadline))? {
            Reply::Kept(version) => Ok(version),
            _ => Err(self.unexpected()),
        }
    }

    /// Asks a [`Keeper`](super::Keeper) to drop what it keeps under a name. Returns `true` if it kept
    /// such a publication. Processes that have attached it keep its memory.
    ///
    /// # Errors
    /// [`ShareError::Refused`] if this is a connection to a publisher, and [`ShareError`] if the keeper
    /// does not answer.
    pub fn release(&mut self, name: &str) -> Result<bool, ShareError> {
        self.release_of(name, None)
    }

    /// Asks a keeper to drop what it keeps under a name, of one publisher or of any.
    pub(super) fn release_of(
        &mut self,
        name: &str,
        publisher: Option<u64>,
    ) -> Result<bool, ShareError> {
        if name.len() > MOST_NAME {
            return Ok(false);
        }
        let name = name.to_owned();
        let deadline = self.channel.deadline();
        let request = Request::Release { name, publisher };
        match self.ask(&request, deadline, (MOST_REPLY, deadline))? {
            Reply::Released(kept) => Ok(kept),
            _ => Err(self.unexpected()),
        }
    }

    /// Waits up to `timeout` for another version than `than`, and returns its number, or `None` if
    /// none was published.
    ///
    /// # Errors
    /// [`ShareError::NotFound`] if the name is not published any more, [`ShareError::Channel`] with
    /// [`ChannelError::Closed`](crate::error::ChannelError::Closed) if the publisher has ended.
    #[doc(alias = "newer")]
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
        let until = self.channel.deadline_after(timeout);
        match self.ask(&request, deadline, (MOST_REPLY, until))? {
            Reply::Newest(version) => Ok(version),
            Reply::NotPublished => Err(ShareError::NotFound(name)),
            _ => Err(self.unexpected()),
        }
    }

    /// Sends a request, and returns the reply: at most `most` bytes, which come in time.
    fn ask(
        &mut self,
        request: &Request,
        deadline: Deadline,
        (most, until): (usize, Deadline),
    ) -> Result<Reply, ShareError> {
        match self.channel.tell(request, deadline) {
            // A publisher that refuses a reader says so before it reads the request.
            Ok(()) | Err(ChannelError::Closed) => {}
            Err(error) => return Err(error.into()),
        }
        match self.channel.hear(most, until)? {
            Reply::Refused(why) => Err(ShareError::Refused(why)),
            reply => Ok(reply),
        }
    }

    fn unexpected(&mut self) -> ShareError {
        ShareError::Channel(self.channel.malformed("not a reply to the request"))
    }
}

impl Publication {
    /// Returns the name of the publication.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the version, which counts from 1 for each name of a publisher.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the manifest: where each tensor is.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the attached memory.
    #[must_use]
    pub const fn memory(&self) -> &Attachment {
        &self.memory
    }

    /// Returns the attached memory and drops the rest.
    #[must_use]
    pub fn into_memory(self) -> Attachment {
        self.memory
    }

    /// Waits for the devices that have access, and unmaps the memory. On failure returns the
    /// publication with the extents that could not be unmapped.
    ///
    /// # Errors
    /// [`CloseError`] with the publication in it.
    #[expect(
        clippy::result_large_err,
        reason = "the publication itself is handed back"
    )]
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let Self {
            name,
            version,
            publisher,
            manifest,
            memory,
        } = self;
        memory.close().map_err(|refused| CloseError {
            owner: Self {
                name,
                version,
                publisher,
                manifest,
                memory: refused.owner,
            },
            reason: refused.reason,
        })
    }

    /// Returns a view of the elements of a tensor, for a kernel to read.
    ///
    /// # Errors
    /// [`ShareError`] if there is no such tensor, its bytes are not whole elements of type `T`, or
    /// the manifest names another type. Types are compared for Rust's numbers and the types of
    /// safetensors; an unsigned number may hold the bits of any type of its width, and `u8` any
    /// bytes.
    pub fn view<T: Pod>(&self, tensor: &str) -> Result<View<'_, T>, ShareError> {
        let found = self.manifest.tensor(tensor);
        let found = found.ok_or_else(|| ShareError::NotFound(tensor.to_owned()))?;
        if !found.may_hold::<T>() {
            return Err(ShareError::ElementType {
                tensor: tensor.to_owned(),
                dtype: found.dtype.clone(),
                wanted: type_name::<T>(),
            });
        }
        self.memory.view_of(found.range())
    }
}
