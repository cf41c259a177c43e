//! Named memory that other processes read: whole versions, one after the other.
//!
//! A version is published when it is finished, in one step: readers get the one before or this one,
//! never a part of each. From then on nothing of this library writes to it, and its owner's own devices
//! may only read. It lives until the last who has it lets go, in whichever process.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::catalogue::{New, Shared};
use super::listener::Listener;
use super::manifest::Manifest;
use super::offer::Offer;
use super::peer::Users;
use super::protocol::{Listing, MOST_MANIFEST, MOST_NAME};
use super::readers::{Bounds, accept_all};
use super::seal::Publishable;
use super::system::failed;
use crate::error::{ArgumentError, ChannelError, HandedBack, ShareError};
use crate::sync::thread::{self, JoinHandle};

/// Publishes memory under names, for other processes of this machine to read
/// ([`Subscriber`](super::Subscriber)).
///
/// It serves as many readers at once as a quarter of the files that this process may open
/// (`RLIMIT_NOFILE`), at most 1,024, and each user who is let in an equal share of them; further
/// readers are turned away. A reader that asks for nothing is let go after a time
/// ([`Subscriber`](super::Subscriber)).
///
/// When it is dropped, readers cannot attach any more, and those that have attached keep what they have.
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
            .spawn(move || accept_all(&readers, &accepts, Bounds::USUAL))
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
    /// version, and those that wait for a newer one are told. Returns its version, which counts from
    /// 1 for each name.
    ///
    /// Waits for the devices that have access (`cuCtxSynchronize`), so that all that was written is
    /// there, and lowers their access to reading (`cuMemSetAccess` for each extent).
    ///
    /// # Errors
    /// [`HandedBack`] with the memory in it, as it was, save that it may count as exported. While
    /// leases, registrations, tensors or slices of the memory live, the reason is
    /// [`MemoryError::Leased`](crate::error::MemoryError::Leased) or
    /// [`MemoryError::Registered`](crate::error::MemoryError::Registered): they may write where writing
    /// would fault.
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
                };
                Ok(self.shared.add(name, published))
            }
            Err(reason) => Err(HandedBack::new(memory, reason)),
        }
    }

    /// Checks whether something can be published under a name, before it is made: a name has from 1 to
    /// 255 bytes and no control characters. Makes no driver call.
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

    fn prepare<M: Publishable>(
        &self,
        name: &str,
        manifest: &Manifest,
        memory: &mut M,
    ) -> Result<(Offer, Vec<u8>), ShareError> {
        Self::check_name(name)?;
        // What is offered counts as exported for good, so this is asked first.
        memory.may_be_sealed()?;
        let offer = memory.offer()?;
        manifest.check(&offer.description().runs())?;
        // Written down once for all readers, none of which would read a larger one.
        let text = serde_json::to_vec(manifest);
        let bytes = text.as_ref().map_or(usize::MAX, Vec::len);
        let (Ok(text), ..=MOST_MANIFEST) = (text, bytes) else {
            let (what, most) = ("bytes of a manifest", MOST_MANIFEST as u64);
            return Err(ArgumentError::TooLarge {
                what,
                value: bytes as u64,
                most,
            }
            .into());
        };
        // Asked for once before it is promised to anybody.
        drop(offer.batch(0..1)?);
        memory.seal()?;
        Ok((offer, text))
    }

    /// Lets nobody attach a name any more. Says whether there was such a name.
    pub fn withdraw(&self, name: &str) -> bool {
        !self.is_forked() && self.shared.withdraw(name)
    }

    /// Returns all that is published, in the order of the names; nothing in a forked child.
    #[must_use]
    pub fn list(&self) -> Vec<Listing> {
        match self.is_forked() {
            false => self.shared.list(usize::MAX).publications,
            true => Vec::new(),
        }
    }

    /// Whether another thread may have had the lock when this process was forked.
    fn is_forked(&self) -> bool {
        self.made_by != std::process::id()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // A forked child has none of the threads.
        if self.is_forked() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.wake();
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
