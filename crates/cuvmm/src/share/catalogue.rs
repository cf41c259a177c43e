//! What a publisher has published, as its readers see it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use super::bell::Bell;
use super::manifest::Manifest;
use super::offer::Offer;
use super::protocol::Listing;
use crate::error::ChannelError;
use crate::sync::{Mutex, MutexGuard};

/// One finished edition. It keeps the memory.
pub(super) struct Edition {
    pub(super) version: u64,
    pub(super) manifest: Manifest,
    pub(super) offer: Offer,
    /// Dropped after the offer.
    _memory: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct Catalogue {
    newest: BTreeMap<String, Arc<Edition>>,
    /// The last version of each name that there ever was.
    versions: BTreeMap<String, u64>,
    /// Rung when anything is published or withdrawn: one for each reader that waits.
    bells: BTreeMap<u64, Arc<Bell>>,
    /// How many bells there ever were.
    hung: u64,
}

/// What a publisher and the threads of its readers share.
pub(super) struct Shared {
    /// Tells this publisher from others, and from one before it at the same path.
    pub(super) id: u64,
    catalogue: Mutex<Catalogue>,
    /// Rung once it is over.
    pub(super) stop: Arc<Bell>,
}

impl Catalogue {
    fn ring(&self) {
        self.bells.values().for_each(|bell| bell.ring());
    }
}

impl Shared {
    pub(super) fn new() -> Result<Self, ChannelError> {
        Ok(Self {
            id: new_id(),
            catalogue: Mutex::new(Catalogue::default()),
            stop: Arc::new(Bell::new()?),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an edition the newest of its name, and returns its version.
    pub(super) fn add(
        &self,
        name: &str,
        manifest: Manifest,
        offer: Offer,
        memory: Box<dyn Send + Sync>,
    ) -> u64 {
        let mut catalogue = self.lock();
        let last = catalogue.versions.entry(name.to_owned()).or_default();
        *last += 1;
        let version = *last;
        let edition = Arc::new(Edition {
            version,
            manifest,
            offer,
            _memory: memory,
        });
        let before = catalogue.newest.insert(name.to_owned(), edition);
        catalogue.ring();
        drop(catalogue);
        // Its memory may go with it, which waits for the device.
        drop(before);
        version
    }

    /// Takes a name away. Says whether there was one.
    pub(super) fn withdraw(&self, name: &str) -> bool {
        let gone = {
            let mut catalogue = self.lock();
            catalogue.ring();
            catalogue.newest.remove(name)
        };
        gone.is_some()
    }

    pub(super) fn newest(&self, name: &str) -> Option<Arc<Edition>> {
        self.lock().newest.get(name).cloned()
    }

    pub(super) fn list(&self) -> Vec<Listing> {
        let catalogue = self.lock();
        let entries = catalogue.newest.iter().map(|(name, edition)| {
            let description = edition.offer.description();
            Listing {
                name: name.clone(),
                version: edition.version,
                held: description.held(),
                extents: description.extents().len() as u64,
                tensors: edition.manifest.tensors.len() as u64,
            }
        });
        entries.collect()
    }
}

/// A bell that hangs for as long as somebody waits for it.
pub(super) struct Hung<'a> {
    shared: &'a Shared,
    number: u64,
    pub(super) bell: Arc<Bell>,
}

impl<'a> Hung<'a> {
    pub(super) fn in_reach_of(shared: &'a Shared) -> Result<Self, ChannelError> {
        let bell = Arc::new(Bell::new()?);
        let mut catalogue = shared.lock();
        catalogue.hung += 1;
        let number = catalogue.hung;
        catalogue.bells.insert(number, Arc::clone(&bell));
        Ok(Self {
            shared,
            number,
            bell,
        })
    }
}

impl Drop for Hung<'_> {
    fn drop(&mut self) {
        self.shared.lock().bells.remove(&self.number);
    }
}

/// A number that no other publisher of this machine has, now or soon.
fn new_id() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos() as u64);
    nanos ^ u64::from(std::process::id()).rotate_left(40)
}
