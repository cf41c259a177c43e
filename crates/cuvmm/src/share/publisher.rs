//! Named memory that other processes read: whole editions, one after the other.
//!
//! An edition is published when it is finished, in one step: readers get the one before or this one,
//! never a part of each. From then on nothing of this library writes to it, and its owner's own devices
//! may only read. It lives until the last who has it lets go, in whichever process.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::catalogue::Shared;
use super::listener::Listener;
use super::manifest::Manifest;
use super::offer::Offer;
use super::peer::Users;
use super::protocol::{Listing, MOST_MANIFEST, MOST_NAME};
use super::readers::accept_all;
use super::seal::Publishable;
use super::system::failed;
use crate::error::{ChannelError, ManifestError, PublishError, PublishRefusal};
use crate::sync::thread::{self, JoinHandle};

/// Publishes memory under names, for other processes of this machine to read
/// ([`Subscriber`](super::Subscriber)).
///
/// When it is dropped nobody can attach any more; who has attached keeps what it has.
pub struct Publisher {
    shared: Arc<Shared>,
    listener: Arc<Listener>,
    thread: Option<JoinHandle<()>>,
    made_by: u32,
}

impl Publisher {
    /// Listens at a path for readers of the same user, on a thread of its own.
    ///
    /// # Errors
    /// [`ChannelError`] when another process listens there, or the system refuses.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::bind_for(path, Users::own())
    }

    /// The same for readers of these users.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_for(path: impl AsRef<Path>, users: Users) -> Result<Self, ChannelError> {
        let listener = Arc::new(Listener::bind_for(path, users)?);
        let shared = Arc::new(Shared::new()?);
        let (readers, accepts) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread = thread::Builder::new()
            .name("cuvmm-publisher".to_owned())
            .spawn(move || accept_all(&readers, &accepts))
            .map_err(failed("starting a thread"))?;
        Ok(Self {
            shared,
            listener,
            thread: Some(thread),
            made_by: std::process::id(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Publishes memory under a name, whole and finished: readers that attach from now on get this
    /// edition, and those that wait for a newer one are told. Returns its version, which counts from
    /// 1 for each name.
    ///
    /// Waits for the devices that have access (`cuCtxSynchronize`), so that all that was written is
    /// there, and lowers their right to reading (`cuMemSetAccess` for each extent).
    ///
    /// # Errors
    /// [`PublishError`] with the memory in it, as it was, save that it may count as exported.
    pub fn publish<M: Publishable>(
        &self,
        name: &str,
        manifest: Manifest,
        mut memory: M,
    ) -> Result<u64, PublishError<M>> {
        match self.prepare(name, &manifest, &mut memory) {
            Ok(offer) => {
                let memory = Box::new(memory);
                Ok(self.shared.add(name, manifest, offer, memory))
            }
            Err(reason) => Err(PublishError { memory, reason }),
        }
    }

    fn prepare<M: Publishable>(
        &self,
        name: &str,
        manifest: &Manifest,
        memory: &mut M,
    ) -> Result<Offer, PublishRefusal> {
        if name.is_empty() || name.len() > MOST_NAME || name.chars().any(char::is_control) {
            return Err(PublishRefusal::Name {
                length: name.len(),
                most: MOST_NAME,
            });
        }
        let offer = memory.offer()?;
        manifest.check(&offer.description().runs())?;
        // Nobody would read a larger one.
        let bytes = serde_json::to_vec(manifest).map_or(usize::MAX, |text| text.len());
        if bytes > MOST_MANIFEST {
            return Err(PublishRefusal::Manifest(ManifestError::TooLarge {
                bytes,
                most: MOST_MANIFEST,
            }));
        }
        // Asked for once before it is promised to anybody.
        drop(offer.batch(0..1)?);
        memory.seal()?;
        Ok(offer)
    }

    /// Lets nobody attach a name any more. Says whether there was such a name.
    pub fn withdraw(&self, name: &str) -> bool {
        self.shared.withdraw(name)
    }

    /// What is published.
    #[must_use]
    pub fn list(&self) -> Vec<Listing> {
        self.shared.list()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // A forked child has none of the threads.
        if self.made_by != std::process::id() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.ring();
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::error!("a publisher's thread ended by a panic");
        }
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("path", &self.path())
            .field("published", &self.list())
            .finish_non_exhaustive()
    }
}
