//! A process that has the memory of publications while their publishers end and begin again.
//!
//! The keeper opens the descriptors of a publication's memory and nothing more: it needs no device, no
//! context and no memory of the device. The memory lives as long as a descriptor of it is open.
//!
//! Keeps I-116.

use std::fmt;
use std::path::{Path, PathBuf};

use super::catalogue::Shared;
use super::holdings::Holdings;
use super::protocol::Listing;
use super::service::Service;
use super::taking::take;
use crate::error::{ChannelError, ShareError};
use crate::peer::Users;

/// Keeps publications of other processes after their publishers have ended, and serves them to
/// [`Subscriber`](super::Subscriber)s of this user.
///
/// A publisher gives a version to a keeper with [`Publisher::keep`](super::Publisher::keep). The keeper
/// has it until the name is given again, by this publisher or another one, the publisher withdraws it,
/// or it is [released](Self::release). It makes no driver call. Memory that belongs to a pool of a
/// [ledger](crate::ledger) stays charged to the slot of the process that created it, and the keeper is
/// shown as a process that has it, under the name `keeper`. When the keeper ends, in whatever way,
/// what it kept goes back to the driver unless another process has it attached.
///
/// A keeper has at most 4,096 names, and as many descriptors (one for each extent) as a quarter of the
/// files that it may open (`RLIMIT_NOFILE`).
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let shareable = cuvmm::driver::HandleTypes::POSIX_FD;
/// # let mut region = cuvmm::Region::builder(&device, 4 << 20).shareable(shareable).reserve()?;
/// # region.commit(0..region.size())?;
/// # let folder = tempfile::tempdir()?;
/// # let (at, socket) = (folder.path().join("keeper"), folder.path().join("publisher"));
/// use cuvmm::Attachment;
/// use cuvmm::share::{Keeper, Manifest, Publisher, Subscriber};
///
/// let keeper = Keeper::bind(&at, None)?; // in a process of its own
///
/// let publisher = Publisher::bind(&socket)?;
/// publisher.publish("model", Manifest::default(), region)?;
/// publisher.keep("model", &at)?;
/// drop(publisher); // or killed
///
/// let mut subscriber = Subscriber::connect(&at)?;
/// let model = subscriber.attach("model", &Attachment::builder(&device))?;
/// assert_eq!(model.version(), 1);
/// assert!(keeper.release("model")); // readers keep what they attached
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Keeper {
    service: Service,
}

impl Keeper {
    /// Listens at a path for publishers and readers of the same user. `ledgers` is the directory with
    /// the ledgers of the processes that publish, or the file of one of them; without it their memory counts as
    /// [foreign](crate::ledger) once they have ended. The keeper joins a ledger while it has memory of
    /// it.
    ///
    /// # Errors
    /// [`ChannelError`] if another process listens there, or the system refuses.
    pub fn bind(path: impl AsRef<Path>, ledgers: Option<PathBuf>) -> Result<Self, ChannelError> {
        let shared = Shared::with(Some(Holdings::new(ledgers)))?;
        let service = Service::start(path.as_ref(), Users::own(), shared)?;
        Ok(Self { service })
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.service.path()
    }

    /// Takes the newest version of a name from the publisher at a socket, without being asked by it, and
    /// returns the version. A keeper that was started again takes what publishers
    /// [want to be kept](super::Keeping::Wanted).
    ///
    /// Waits up to 10 seconds for the publisher.
    ///
    /// # Errors
    /// [`ShareError`] if the name is not published there or is published [in
    /// place](super::Publisher::publish_in_place), the publisher does not answer, its memory is given by
    /// fabric handles, its ledger cannot be joined, or there are too many names or
    /// descriptors. What was kept before is kept.
    pub fn take(&self, name: &str, socket: impl AsRef<Path>) -> Result<u64, ShareError> {
        let shared = &self.service.shared;
        match &shared.keeps {
            Some(holdings) if !self.service.is_forked() => {
                take(shared, holdings, name, socket.as_ref())
            }
            _ => Err(ShareError::NotFound(name.to_owned())),
        }
    }

    /// Drops what is kept under a name. Returns `true` if there was something.
    pub fn release(&self, name: &str) -> bool {
        !self.service.is_forked() && self.service.shared.release(name, None)
    }

    /// Returns all kept publications in the order of their names, or none in a forked child.
    #[must_use]
    pub fn list(&self) -> Vec<Listing> {
        self.service.list()
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("path", &self.path())
            .field("kept", &self.list())
            .finish()
    }
}
