//! Publication of named memory for other processes to read, version by version.
//!
//! A version is published in one step when it is finished: a reader attaches the version before or
//! this one, never a mixture. From then on this library does not write to it, and the owner's
//! devices may only read it, unless it was published in place. It lives until the last process that
//! holds it releases it.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::catalogue::{New, Shared};
use super::manifest::Manifest;
use super::offer::Offer;
use super::protocol::{Listing, MOST_NAME, text_of};
use super::seal::Publishable;
use super::service::Service;
use super::subscriber::Subscriber;
use super::system::failed;
use crate::error::{ChannelError, HandedBack, ShareError};
use crate::peer::Users;

/// How long the withdrawal of a name waits for the keeper that has it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Publishes memory under names, for other processes on this machine to read with a
/// [`Subscriber`](super::Subscriber).
///
/// A publisher serves as many readers at once as a quarter of the files that this process may open
/// (`RLIMIT_NOFILE`), at most 1,024, and gives each permitted user an equal share of them. Further
/// readers are refused with the reason. Readers that come while the process may open no more files
/// are refused after a second. A reader that sends no request is disconnected after a time (see
/// [`Subscriber`](super::Subscriber)).
///
/// Dropping the publisher ends its service; readers that attached memory keep it, and a
/// [`Keeper`](super::Keeper) serves further readers if the publication was [given](Self::keep) to it.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
/// # let mut region = cuvmm::Region::builder(&device, 4 << 20).shareable(shareable).reserve()?;
/// # region.commit(0..region.size())?;
/// use cuvmm::share::{Manifest, Publisher};
///
/// let socket = std::env::temp_dir().join(format!("publisher-{}", std::process::id()));
/// let publisher = Publisher::bind(&socket)?;
/// let version = publisher.publish("model", Manifest::default(), region)?;
/// assert_eq!(version, 1);
/// assert_eq!(publisher.list()[0].name, "model");
/// publisher.withdraw("model"); // readers keep what they attached
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Publisher {
    service: Service,
}

impl Publisher {
    /// Listens at a path for readers of the same user, on a thread of the publisher.
    ///
    /// # Errors
    /// [`ChannelError`] if another process listens there, or the system refuses.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::bind_for(path, Users::own())
    }

    /// Listens at a path for readers that belong to `users`, on a thread of the publisher.
    ///
    /// # Errors
    /// [`ChannelError`] if another process listens there, or the system refuses.
    pub fn bind_for(path: impl AsRef<Path>, users: Users) -> Result<Self, ChannelError> {
        let service = Service::start(path.as_ref(), users, Shared::new()?)?;
        Ok(Self { service })
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.service.path()
    }

    /// Publishes finished memory under a name and returns its version, which counts from 1 for each
    /// name. Readers that attach from now on get this version, and readers that wait for a newer
    /// one are woken.
    ///
    /// Waits for the devices that have access (`cuCtxSynchronize`), so that all writes are
    /// complete, and lowers their access to reading (`cuMemSetAccess` for each extent). The wait
    /// breaks every graph capture on these devices' contexts.
    ///
    /// # Errors
    /// [`HandedBack`] with the memory in it, unchanged except that it may count as exported. The
    /// call is refused while a capture is known: a [capture guard](crate::pool::CaptureGuard) for
    /// one of the devices lives, or a stream known to use the memory captures. While leases,
    /// registrations, tensors or slices of the memory live, the reason is
    /// [`MemoryError::Leased`](crate::error::MemoryError::Leased) or
    /// [`MemoryError::Registered`](crate::error::MemoryError::Registered): their holders may still
    /// write, and such a write would fault.
    pub fn publish<M: Publishable>(
        &self,
        name: &str,
        manifest: Manifest,
        mut memory: M,
    ) -> Result<u64, HandedBack<M, ShareError>> {
        match self.prepare(name, &manifest, &mut memory) {
            Ok((offer, text)) => {
                let published = New {
                    tensors: manifest.tensors.len() as u64,
                    manifest: text,
                    offer,
                    memory: Box::new(memory),
                    is_in_place: false,
                };
                Ok(self.service.shared.add(name, published))
            }
            Err(reason) => Err(HandedBack::new(memory, reason)),
        }
    }

    /// Checks a name before the memory is made: a name has 1 to 255 bytes and no control
    /// characters. Makes no driver call.
    ///
    /// # Errors
    /// [`ShareError::Name`] with the length of the name.
    pub fn check_name(name: &str) -> Result<(), ShareError> {
        if name.is_empty() || name.len() > MOST_NAME || name.chars().any(char::is_control) {
            return Err(ShareError::Name {
                length: name.len(),
                most: MOST_NAME,
            });
        }
        Ok(())
    }

    /// Publishes memory in place under a name and returns its version, which counts from 1 for each
    /// name. Unlike [`publish`](Self::publish), neither waits for work nor makes the memory
    /// read-only: the owner may go on writing, and a reader sees what is there when its kernel reads.
    /// Wait for the work that writes the contents before, and agree with the readers on a time for
    /// later writes.
    ///
    /// The publisher keeps the offer until the name is published again or withdrawn.
    ///
    /// # Errors
    /// [`ShareError`] for a wrong name, a manifest that does not match the memory, or if the driver
    /// makes no handle. Nothing is published then.
    pub fn publish_in_place(
        &self,
        name: &str,
        manifest: &Manifest,
        offer: Offer,
    ) -> Result<u64, ShareError> {
        Self::check_name(name)?;
        manifest.check_sizes()?;
        let text = Self::described(manifest, &offer)?;
        let published = New {
            tensors: manifest.tensors.len() as u64,
            manifest: text,
            offer,
            memory: Box::new(()),
            is_in_place: true,
        };
        Ok(self.service.shared.add(name, published))
    }

    fn prepare<M: Publishable>(
        &self,
        name: &str,
        manifest: &Manifest,
        memory: &mut M,
    ) -> Result<(Offer, Vec<u8>), ShareError> {
        Self::check_name(name)?;
        // Checked first, because offered memory counts as exported for good.
        manifest.check_sizes()?;
        memory.may_be_sealed()?;
        let offer = memory.offer()?;
        let text = Self::described(manifest, &offer)?;
        memory.seal()?;
        Ok((offer, text))
    }

    /// Serializes a manifest of offered memory, and checks that handles of the memory can be made.
    fn described(manifest: &Manifest, offer: &Offer) -> Result<Vec<u8>, ShareError> {
        manifest.check(&offer.description().runs())?;
        let text = text_of(manifest)?;
        // Makes a handle before any reader is promised one.
        drop(offer.batch(0..1)?);
        Ok(text)
    }

    /// Gives the newest version of a name to a [`Keeper`](super::Keeper), which serves it to readers after
    /// this publisher has ended. Returns the version. It replaces what the keeper has kept under the
    /// name. A version that is published later is kept only if this is called again; until then the
    /// keeper has the earlier one.
    ///
    /// The keeper connects to this publisher's [path](Self::path) as a reader does, so this waits for
    /// an exchange of at most 10 seconds. Calls `cuMemExportToShareableHandle` for each extent.
    ///
    /// # Errors
    /// [`ShareError`] if the name is not published or is published [in
    /// place](Self::publish_in_place), no keeper of this user listens at the path, or the keeper cannot
    /// keep the version. Nothing has changed then, except that the keeper may have the
    /// version if its answer was lost.
    pub fn keep(&self, name: &str, keeper: impl AsRef<Path>) -> Result<u64, ShareError> {
        let not_found = || ShareError::NotFound(name.to_owned());
        if self.service.is_forked() {
            return Err(not_found());
        }
        let shared = &self.service.shared;
        let absolute = |path: &Path| std::path::absolute(path).map_err(failed("getcwd"));
        let (own, keeper) = (absolute(self.path())?, absolute(keeper.as_ref())?);
        loop {
            let newest = shared.newest(name).ok_or_else(not_found)?;
            if newest.is_in_place {
                return Err(ShareError::InPlace(name.to_owned()));
            }
            let version = Subscriber::connect(&keeper)?.keep(name, own.clone())?;
            if version < newest.version() {
                let what = "a keeper that has an older version than the newest";
                return Err(ChannelError::Malformed(what).into());
            }
            if shared.note_kept(name, version, &keeper) {
                return Ok(version);
            }
            // Withdrawn meanwhile, and perhaps published again.
            release(&keeper, name, shared.id)?;
        }
    }

    /// Withdraws a name: no reader can attach it any more, from this publisher or from the keepers that
    /// it was [given](Self::keep) to. Returns `true` if the name was published.
    ///
    /// Waits up to 2 seconds for each keeper. A keeper that does not answer keeps the version until it is
    /// replaced or [dropped](super::Keeper::release).
    pub fn withdraw(&self, name: &str) -> bool {
        if self.service.is_forked() {
            return false;
        }
        let shared = &self.service.shared;
        let Some(keepers) = shared.withdraw(name) else {
            return false;
        };
        for keeper in keepers {
            let Err(error) = release(&keeper, name, shared.id) else {
                continue;
            };
            log!(warn, %error, name = name.to_owned(), keeper = %keeper.display(), "a keeper may still keep a withdrawn publication");
        }
        true
    }

    /// Returns all publications in the order of their names, or none in a forked child.
    #[must_use]
    pub fn list(&self) -> Vec<Listing> {
        self.service.list()
    }
}

/// Asks a keeper to drop what it keeps under a name of a publisher.
fn release(keeper: &Path, name: &str, publisher: u64) -> Result<bool, ShareError> {
    let mut subscriber = Subscriber::connect(keeper)?;
    subscriber.channel().set_timeout(PATIENCE);
    subscriber.release_of(name, Some(publisher))
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("path", &self.path())
            .field("published", &self.list())
            .finish_non_exhaustive()
    }
}
