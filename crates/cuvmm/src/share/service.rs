//! The socket of a publisher or a keeper, and the thread that serves its readers.

use std::path::Path;
use std::sync::Arc;

use super::catalogue::Shared;
use super::listener::Listener;
use super::protocol::Listing;
use super::readers::{Bounds, accept_all};
use super::system::failed;
use crate::descriptors::Spare;
use crate::error::ChannelError;
use crate::peer::Users;
use crate::sync::thread::{self, JoinHandle};

/// Serves readers until it is dropped.
pub(super) struct Service {
    pub(super) shared: Arc<Shared>,
    listener: Arc<Listener>,
    thread: Option<JoinHandle<()>>,
    made_by: u32,
}

impl Service {
    pub(super) fn start(path: &Path, users: Users, shared: Shared) -> Result<Self, ChannelError> {
        let listener = Arc::new(Listener::bind_for(path, users)?);
        let shared = Arc::new(shared);
        let (readers, accepts, spare) = (Arc::clone(&shared), Arc::clone(&listener), Spare::new());
        let thread = thread::Builder::new()
            .name("cuvmm-publisher".to_owned())
            .spawn(move || accept_all(&readers, (&accepts, spare), Bounds::USUAL))
            .map_err(failed("starting a thread"))?;
        Ok(Self {
            shared,
            listener,
            thread: Some(thread),
            made_by: std::process::id(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Returns all publications in the order of their names, or none in a forked child.
    pub(super) fn list(&self) -> Vec<Listing> {
        match self.is_forked() {
            false => self.shared.list(usize::MAX).publications,
            true => Vec::new(),
        }
    }

    /// Returns `true` in a forked child, where another thread of the parent may have held the lock
    /// during the fork.
    pub(super) fn is_forked(&self) -> bool {
        self.made_by != std::process::id()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A forked child has none of the threads.
        if self.is_forked() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            log!(error, "a publisher's thread ended by a panic");
        }
    }
}
