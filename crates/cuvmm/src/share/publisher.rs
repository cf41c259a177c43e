//! Named memory that other processes read: whole editions, one after the other.
//!
//! An edition is published when it is finished, in one step: readers get the one before or this one,
//! never a part of each. From then on nothing of this library writes to it, and its owner's own devices
//! may only read. It lives until the last who has it lets go, in whichever process.
//!
//! A thread accepts connections, and each connection has one more.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::retry_on_intr;

use super::channel::{Channel, Woken, system};
use super::listener::Listener;
use super::manifest::Manifest;
use super::offer::Offer;
use super::peer::Users;
use super::protocol::{Listing, MOST_MANIFEST, MOST_NAME, MOST_REQUEST, Reply, Request};
use super::seal::Publishable;
use super::wait::{Deadline, wait_for};
use crate::error::{ChannelError, GiveError, ManifestError, PublishError, PublishRefusal};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, MutexGuard};

/// How many readers may be connected at once.
const MOST_READERS: usize = 1024;

/// How long is waited where the system has no room for another connection.
const AGAIN: Duration = Duration::from_millis(50);

/// One finished edition. It keeps the memory.
struct Edition {
    version: u64,
    manifest: Manifest,
    offer: Offer,
    /// Dropped after the offer.
    _memory: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct Catalogue {
    newest: BTreeMap<String, Arc<Edition>>,
    /// The last version of each name that there ever was.
    versions: BTreeMap<String, u64>,
    /// Rung when anything is published or withdrawn: one for each reader that waits.
    bells: BTreeMap<u64, Arc<OwnedFd>>,
    /// How many bells there ever were.
    hung: u64,
}

struct Shared {
    /// Tells this publisher from others, and from one before it at the same path.
    id: u64,
    catalogue: Mutex<Catalogue>,
    /// Readable once it is over.
    stop: Arc<OwnedFd>,
}

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
        let shared = Arc::new(Shared {
            id: new_id(),
            catalogue: Mutex::new(Catalogue::default()),
            stop: Arc::new(bell()?),
        });
        let (readers, accepts) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread = thread::Builder::new()
            .name("cuvmm-publisher".to_owned())
            .spawn(move || accept_all(&readers, &accepts))
            .map_err(|error| {
                let code = error.raw_os_error().unwrap_or_default();
                system("starting a thread")(rustix::io::Errno::from_raw_os_error(code))
            })?;
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
    /// [`PublishError`] with the memory in it, as it was.
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
        let gone = {
            let mut catalogue = self.shared.lock();
            catalogue.ring();
            catalogue.newest.remove(name)
        };
        gone.is_some()
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
        ring(&self.shared.stop);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::error!("a publisher's thread ended by a panic");
        }
    }
}

impl Catalogue {
    fn ring(&self) {
        for bell in self.bells.values() {
            ring(bell);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn add(
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

    fn newest(&self, name: &str) -> Option<Arc<Edition>> {
        self.lock().newest.get(name).cloned()
    }

    fn list(&self) -> Vec<Listing> {
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

/// Accepts readers until it is over, and then waits for the threads that serve them.
fn accept_all(shared: &Arc<Shared>, listener: &Listener) {
    let mut serving: Vec<JoinHandle<()>> = vec![];
    let wanted = [
        (shared.stop.as_fd(), PollFlags::IN),
        (listener.as_fd(), PollFlags::IN),
    ];
    loop {
        match wait_for(&wanted, None) {
            Ok(ready) if ready.contains(&0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "a publisher cannot wait for readers any more");
                break;
            }
        }
        serving.retain(|thread| !thread.is_finished());
        let accepted = listener.accept_now();
        let spawned = accepted.and_then(|channel| {
            let Some(channel) = channel else {
                return Ok(None);
            };
            let most = serving.len();
            if most >= MOST_READERS {
                tracing::warn!(most, "a reader was turned away: there are so many");
                return Ok(None);
            }
            let channel = channel.until(Arc::clone(&shared.stop));
            let shared = Arc::clone(shared);
            thread::Builder::new()
                .name("cuvmm-reader".to_owned())
                .spawn(move || serve(&shared, channel))
                .map(Some)
                .map_err(|_| ChannelError::Busy { most })
        });
        match spawned {
            Ok(thread) => serving.extend(thread),
            Err(ChannelError::NotAllowed { pid, uid }) => {
                tracing::warn!(pid, uid, "a reader was turned away");
            }
            Err(error) => {
                tracing::warn!(%error, "a reader was not served");
                // There may be no descriptors left, and then the next would fail at once.
                let pause = Deadline::after(AGAIN);
                drop(wait_for(&wanted[..1], Some(pause)));
            }
        }
    }
    for thread in serving {
        if thread.join().is_err() {
            tracing::error!("a reader's thread ended by a panic");
        }
    }
}

/// Answers one reader until it goes, does something wrong, or it is over.
fn serve(shared: &Shared, mut channel: Channel) {
    let peer = channel.peer();
    loop {
        match channel.wait_beside(shared.stop.as_fd()) {
            Ok(Woken::Peer) => {}
            Ok(Woken::Other) => return,
            Err(error) => {
                tracing::warn!(%error, pid = peer.pid, "a reader cannot be waited for");
                return;
            }
        }
        match answer(shared, &mut channel) {
            Ok(()) => {}
            Err(ChannelError::Closed) => return,
            Err(error) => {
                tracing::warn!(%error, pid = peer.pid, "a reader was let go");
                return;
            }
        }
    }
}

fn answer(shared: &Shared, channel: &mut Channel) -> Result<(), ChannelError> {
    let deadline = channel.deadline();
    match channel.hear(MOST_REQUEST, deadline)? {
        Request::List => channel.tell(&Reply::Publications(shared.list()), deadline),
        Request::Attach { name } => {
            let Some(edition) = shared.newest(&name) else {
                return channel.tell(&Reply::NotPublished, deadline);
            };
            let reply = Reply::Edition {
                publisher: shared.id,
                version: edition.version,
                manifest: edition.manifest.clone(),
            };
            channel.tell(&reply, deadline)?;
            match channel.give_before(&edition.offer, deadline) {
                Ok(()) => Ok(()),
                Err(GiveError::Channel(error)) => Err(error),
                Err(error) => {
                    tracing::warn!(%error, name, "a reader did not get what it asked for");
                    Ok(())
                }
            }
        }
        Request::Watch {
            name,
            publisher,
            version,
            millis,
        } => {
            let seen = (publisher == shared.id).then_some(version);
            let newest = watch(shared, channel, &name, seen, Duration::from_millis(millis))?;
            let deadline = channel.deadline();
            channel.tell(&newest, deadline)
        }
    }
}

/// Waits until a name has another edition than the one seen, for so long; or until the reader says
/// something else, or it is over.
fn watch(
    shared: &Shared,
    channel: &Channel,
    name: &str,
    seen: Option<u64>,
    time: Duration,
) -> Result<Reply, ChannelError> {
    let deadline = Deadline::after(time);
    let bell = Bell::hang(shared)?;
    let wanted = [
        (bell.fd.as_fd(), PollFlags::IN),
        (channel.as_fd(), PollFlags::IN),
        (shared.stop.as_fd(), PollFlags::IN),
    ];
    loop {
        let newest = match shared.newest(name) {
            Some(edition) => edition.version,
            None => return Ok(Reply::NotPublished),
        };
        if seen != Some(newest) {
            return Ok(Reply::Newest(Some(newest)));
        }
        match wait_for(&wanted, Some(deadline)) {
            Ok(ready) if ready == [0] => silence(&bell.fd),
            Ok(ready) if ready.contains(&2) => return Err(ChannelError::Closed),
            Ok(_) | Err(ChannelError::TimedOut { .. }) => return Ok(Reply::Newest(None)),
            Err(error) => return Err(error),
        }
    }
}

/// A bell that hangs for as long as somebody waits for it.
struct Bell<'a> {
    shared: &'a Shared,
    number: u64,
    fd: Arc<OwnedFd>,
}

impl<'a> Bell<'a> {
    fn hang(shared: &'a Shared) -> Result<Self, ChannelError> {
        let fd = Arc::new(bell()?);
        let mut catalogue = shared.lock();
        catalogue.hung += 1;
        let number = catalogue.hung;
        catalogue.bells.insert(number, Arc::clone(&fd));
        Ok(Self { shared, number, fd })
    }
}

impl Drop for Bell<'_> {
    fn drop(&mut self) {
        self.shared.lock().bells.remove(&self.number);
    }
}

fn bell() -> Result<OwnedFd, ChannelError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(system("eventfd"))
}

fn ring(bell: &OwnedFd) {
    // One that is full rings already.
    let _ = retry_on_intr(|| rustix::io::write(bell, &1u64.to_ne_bytes()));
}

fn silence(bell: &OwnedFd) {
    // One that is empty is silent already.
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

/// A number that no other publisher of this machine has, now or soon.
fn new_id() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos() as u64);
    nanos ^ u64::from(std::process::id()).rotate_left(40)
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("path", &self.path())
            .field("published", &self.list())
            .finish_non_exhaustive()
    }
}
