//! The publications of a publisher, shared with the threads of its readers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use super::holdings::Holdings;
use super::log_limit::LogLimit;
use super::offer::Offer;
use super::protocol::{Keeping, Listing, Listings, MOST_LISTED};
use super::waker::Waker;
use crate::error::{ArgumentError, ChannelError};
use crate::sync::{Mutex, MutexGuard};

pub(super) struct New {
    pub(super) tensors: u64,
    /// Serialized.
    pub(super) manifest: Vec<u8>,
    pub(super) offer: Offer,
    pub(super) memory: Box<dyn Send + Sync>,
    /// True if its owner may write to it.
    pub(super) is_in_place: bool,
}

/// A finished version, which owns its memory. Everything sent to all readers is serialized once.
pub(super) struct Published {
    listing: Listing,
    /// The publisher that has published the version, which has ended if this is a keeper's.
    pub(super) publisher: u64,
    /// Serialized.
    pub(super) manifest: Vec<u8>,
    /// The description of the offer, serialized.
    pub(super) description: Vec<u8>,
    pub(super) offer: Offer,
    pub(super) is_in_place: bool,
    /// Dropped after the offer.
    _memory: Box<dyn Send + Sync>,
}

impl Published {
    fn new(name: &str, (publisher, version): (u64, u64), keeping: Keeping, new: New) -> Self {
        let described = new.offer.description();
        Self {
            listing: Listing {
                name: name.to_owned(),
                version,
                held: described.held(),
                extents: described.extents().len() as u64,
                tensors: new.tensors,
                keeping,
            },
            publisher,
            manifest: new.manifest,
            description: described.to_bytes(),
            offer: new.offer,
            is_in_place: new.is_in_place,
            _memory: new.memory,
        }
    }

    pub(super) const fn version(&self) -> u64 {
        self.listing.version
    }
}

#[derive(Default)]
struct Catalogue {
    newest: BTreeMap<String, Arc<Published>>,
    /// The versions of every name ever published.
    versions: BTreeMap<String, Versions>,
    /// The versions of each name that keepers have, by their sockets.
    kept: BTreeMap<String, BTreeMap<PathBuf, u64>>,
    /// The wakers of waiting readers, woken by each change of a publication.
    wakers: BTreeMap<u64, Arc<Waker>>,
    /// Counts registered wakers.
    hung: u64,
}

/// The numbers of the last version of a name, and of the last one that was withdrawn with those before it.
#[derive(Clone, Copy, Debug, Default)]
struct Versions {
    last: u64,
    withdrawn: u64,
}

pub(super) struct Shared {
    /// Distinguishes this publisher from others, and from an earlier one at the same path.
    pub(super) id: u64,
    catalogue: Mutex<Catalogue>,
    /// The memory of a keeper; `None` for a publisher.
    pub(super) keeps: Option<Holdings>,
    /// Woken when the publisher is dropped.
    pub(super) stop: Arc<Waker>,
    /// Limits log lines about readers' errors, whose rate the readers determine.
    pub(super) log: LogLimit,
}

impl Catalogue {
    fn wake(&self) {
        self.wakers.values().for_each(|waker| waker.wake());
    }
}

impl Shared {
    pub(super) fn new() -> Result<Self, ChannelError> {
        Self::with(None)
    }

    pub(super) fn with(keeps: Option<Holdings>) -> Result<Self, ChannelError> {
        Ok(Self {
            keeps,
            id: new_id(),
            catalogue: Mutex::new(Catalogue::default()),
            stop: Arc::new(Waker::new()?),
            log: LogLimit::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the newest version of a name, and returns its number.
    pub(super) fn add(&self, name: &str, new: New) -> u64 {
        let mut catalogue = self.lock();
        let versions = catalogue.versions.entry(name.to_owned()).or_default();
        versions.last += 1;
        let version = versions.last;
        let published = Published::new(name, (self.id, version), Keeping::No, new);
        let before = catalogue
            .newest
            .insert(name.to_owned(), Arc::new(published));
        catalogue.wake();
        drop(catalogue);
        // This may drop the old version's memory, which waits for the device.
        drop(before);
        version
    }

    /// Keeps a version of a publisher under a name, instead of what is kept under that name. An older
    /// version of the same publisher changes nothing.
    ///
    /// # Errors
    /// [`ArgumentError`] if the handles are more than `most` together, or the names too many.
    pub(super) fn keep(
        &self,
        name: &str,
        (publisher, version): (u64, u64),
        new: New,
        most: u64,
    ) -> Result<(), ArgumentError> {
        let published = Published::new(name, (publisher, version), Keeping::Kept, new);
        let mut catalogue = self.lock();
        let before = catalogue.newest.get(name);
        if before.is_some_and(|it| it.publisher == publisher && it.version() >= version) {
            return Ok(());
        }
        let others = catalogue.newest.iter().filter(|(known, _)| *known != name);
        let extents = others.map(|(_, it)| it.listing.extents);
        let (names, extents) = extents.fold((1, published.listing.extents), |sum, it| {
            (sum.0 + 1, sum.1 + it)
        });
        ArgumentError::at_most("names that are kept", names, MOST_LISTED as u64)?;
        ArgumentError::at_most("descriptors of kept publications", extents, most)?;
        let before = catalogue
            .newest
            .insert(name.to_owned(), Arc::new(published));
        catalogue.wake();
        drop(catalogue);
        drop(before);
        Ok(())
    }

    /// Notes that a keeper has a version of this publisher. Returns `false` if the version was withdrawn
    /// meanwhile.
    pub(super) fn note_kept(&self, name: &str, version: u64, keeper: &Path) -> bool {
        let mut catalogue = self.lock();
        let versions = catalogue.versions.get(name).copied().unwrap_or_default();
        if version <= versions.withdrawn {
            return false;
        }
        let kept = catalogue.kept.entry(name.to_owned()).or_default();
        let noted = kept.entry(keeper.to_owned()).or_default();
        *noted = version.max(*noted);
        true
    }

    /// Withdraws a name. Returns the sockets of the keepers that have a version of it, or `None` if the
    /// name was not published.
    pub(super) fn withdraw(&self, name: &str) -> Option<Vec<PathBuf>> {
        let (gone, kept) = {
            let mut catalogue = self.lock();
            catalogue.wake();
            let gone = catalogue.newest.remove(name)?;
            if let Some(versions) = catalogue.versions.get_mut(name) {
                versions.withdrawn = versions.last;
            }
            (gone, catalogue.kept.remove(name))
        };
        drop(gone);
        Some(kept.unwrap_or_default().into_keys().collect())
    }

    /// Drops what a keeper keeps under a name, of one publisher or of any. Returns `true` if it kept
    /// such a version.
    pub(super) fn release(&self, name: &str, publisher: Option<u64>) -> bool {
        let gone = {
            let mut catalogue = self.lock();
            let is_meant = catalogue
                .newest
                .get(name)
                .is_some_and(|kept| publisher.is_none_or(|publisher| publisher == kept.publisher));
            catalogue.wake();
            is_meant.then(|| catalogue.newest.remove(name))
        };
        gone.is_some()
    }

    pub(super) fn newest(&self, name: &str) -> Option<Arc<Published>> {
        self.lock().newest.get(name).cloned()
    }

    pub(super) fn list(&self, most: usize) -> Listings {
        let catalogue = self.lock();
        let first = catalogue.newest.iter().take(most);
        let listings = first.map(|(name, published)| {
            let mut listing = published.listing.clone();
            let mut kept = catalogue.kept.get(name).into_iter().flatten();
            if kept.any(|(_, version)| *version == listing.version) {
                listing.keeping = Keeping::Wanted;
            }
            listing
        });
        Listings {
            publications: listings.collect(),
            all: catalogue.newest.len() as u64,
        }
    }
}

/// A waker that is registered while a reader waits.
pub(super) struct WakerGuard<'a> {
    shared: &'a Shared,
    number: u64,
    pub(super) waker: Arc<Waker>,
}

impl<'a> WakerGuard<'a> {
    pub(super) fn in_reach_of(shared: &'a Shared) -> Result<Self, ChannelError> {
        let waker = Arc::new(Waker::new()?);
        let mut catalogue = shared.lock();
        catalogue.hung += 1;
        let number = catalogue.hung;
        catalogue.wakers.insert(number, Arc::clone(&waker));
        Ok(Self {
            shared,
            number,
            waker,
        })
    }
}

impl Drop for WakerGuard<'_> {
    fn drop(&mut self) {
        self.shared.lock().wakers.remove(&self.number);
    }
}

/// Returns a number that no other publisher on this machine has, now or soon.
fn new_id() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos() as u64);
    nanos ^ u64::from(std::process::id()).rotate_left(40)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::HandleTypes;
    use cuvmm_model::model::{ModelDriver, ModelOptions};

    use super::*;
    use crate::Device;
    use crate::own::Physical;
    use crate::share::protocol::{MOST_LISTING, MOST_NAME, Reply};

    fn new(physical: &Physical, tensors: u64) -> New {
        New {
            tensors,
            manifest: vec![],
            offer: Offer::physical(physical).unwrap(),
            memory: Box::new(()),
            is_in_place: false,
        }
    }

    fn physical() -> Physical {
        let driver = Arc::new(ModelDriver::new(ModelOptions::new()));
        let device = Device::open(driver, 0).unwrap();
        let physical = Physical::builder(&device, device.granularity());
        physical.shareable(HandleTypes::POSIX_FD).create().unwrap()
    }

    #[test]
    fn keepers_of_a_withdrawn_name_are_known_and_an_older_note_replaces_no_newer_one() {
        let (physical, shared) = (physical(), Shared::new().unwrap());
        let [one, other] = ["one", "other"].map(Path::new);
        let is_kept = || shared.list(1).publications[0].keeping == Keeping::Wanted;
        assert_eq!(shared.add("model", new(&physical, 0)), 1);
        assert_eq!(shared.add("model", new(&physical, 0)), 2);
        assert!(shared.note_kept("model", 2, one));
        assert!(shared.note_kept("model", 1, one) && is_kept());
        assert!(shared.note_kept("model", 1, other) && is_kept());
        let kept = vec![one.to_owned(), other.to_owned()];
        assert_eq!(shared.withdraw("model"), Some(kept));
        assert_eq!(shared.withdraw("model"), None);
        // Neither is there when the name is published again.
        assert!(!shared.note_kept("model", 2, one));
        assert_eq!(shared.add("model", new(&physical, 0)), 3);
        assert!(!shared.note_kept("model", 2, one) && !is_kept());
        assert!(shared.note_kept("model", 3, other) && is_kept());
        assert_eq!(shared.withdraw("model"), Some(vec![other.to_owned()]));
    }

    #[test]
    fn a_listing_is_cut_where_it_would_be_too_large_and_says_so() {
        let (physical, shared) = (physical(), Shared::new().unwrap());
        for number in 0..=MOST_LISTED {
            // Each byte of the name is escaped.
            let number = format!("{number:05}");
            let name = "\"".repeat(MOST_NAME - number.len()) + &number;
            assert_eq!(shared.add(&name, new(&physical, u64::MAX)), 1);
        }
        let listed = shared.list(MOST_LISTED);
        assert_eq!(
            (listed.publications.len(), listed.omitted()),
            (MOST_LISTED, 1)
        );
        let reply = Reply::from(listed.clone());
        let bytes = serde_json::to_vec(&reply).unwrap();
        assert!(bytes.len() <= MOST_LISTING, "{} bytes", bytes.len());
        let heard = serde_json::from_slice(&bytes).unwrap();
        assert!(matches!(heard, Reply::FirstPublications(all) if all == listed));
        assert_eq!(shared.withdraw(&listed.publications[0].name), Some(vec![]));
        let listed = shared.list(MOST_LISTED);
        assert_eq!(
            (listed.publications.len(), listed.omitted()),
            (MOST_LISTED, 0)
        );
        assert!(matches!(Reply::from(listed), Reply::Publications(_)));
    }
}
