//! Memory of other processes, attached: publications, for reading, and blocks that a process gave.
//!
//! Each request has a connection of its own: publishers close idle connections.
//!
//! Detaching waits for devices. An attachment keeps its number until devices can be waited for:
//! Python asks only once, when the last tensor is gone.
//!
//! A block that was given several times is mapped once, and each time has a number and a socket. The
//! giver reuses the memory when it is told on that socket: after the wait, and after the memory was
//! unmapped if the number was the last (I-106).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cuvmm::Attachment;
use cuvmm::driver::Exported;
use cuvmm::error::ShareError;
use cuvmm::share::{AttachmentBuilder, Origin, Parcel, Publication, Subscriber, Users};
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use serde::Deserialize;
use serde_json::json;

use crate::error::Error;
use crate::graphs::{self, Waiting};
use crate::heaps::{self, DeviceHeap};
use crate::{folder, fork};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    name: String,
    /// The publisher's socket. `None` to search the usual folder.
    path: Option<PathBuf>,
    /// User ids, besides this user's, that the publisher may have.
    #[serde(default)]
    users: Vec<u32>,
    device: i32,
}

/// A block that a process gives.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GivenRequest {
    /// The giver's name for the block. The same name is the same memory.
    key: String,
    /// The device as the giver counts.
    device: i32,
    /// The bytes that are used, from an offset in the block on.
    offset: u64,
    size: u64,
    read_only: bool,
    /// The giver's description in hexadecimal digits. `None` to ask if the block is mapped.
    description: Option<String>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a publication is handed back by value where it cannot be closed"
)]
enum Memory {
    Published {
        publication: Publication,
        path: PathBuf,
        users: Vec<u32>,
    },
    Given {
        memory: Arc<Attachment>,
        giver: OwnedFd,
    },
}

/// How often a name is looked for whose publisher ends before it can be attached.
const LOOKS: u32 = 3;

/// The word for a giver when this process has let go of the memory. A socket that closes without it is
/// that of a process whose work may still run.
const LET_GO: &[u8] = b"L";

struct Attached {
    memory: Memory,
    device: i32,
}

/// The giver's name for a block, and `true` if it is mapped for reading only.
type Key = (String, bool);

/// A block that is mapped as long as an attachment holds it.
struct Mapped {
    device: i32,
    addresses: Range<u64>,
    memory: Weak<Attachment>,
}

struct State {
    attached: Option<HashMap<u64, Arc<Attached>>>,
    /// The blocks that were given.
    mapped: BTreeMap<Key, Mapped>,
    /// The numbers of attachments to detach.
    leaving: BTreeSet<u64>,
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    attached: None,
    mapped: BTreeMap::new(),
    leaving: BTreeSet::new(),
    count: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Attaches the newest version of a name. Returns the attachment's number.
///
/// # Errors
/// On any error nothing stays attached.
pub(crate) fn attach(json: &str) -> Result<u64, Error> {
    fork::check()?;
    let Request {
        name,
        path,
        users,
        device,
    } = serde_json::from_str(json)?;
    let mut looks = 1;
    let (publication, path) = loop {
        let found = match &path {
            Some(path) => path.clone(),
            None => folder::publisher_of(&name)?,
        };
        let of = heaps::of(device)?;
        graphs::collect();
        match published(&name, &found, &users, of) {
            // The publisher has ended since it was found. A keeper may have the name.
            Err(error) if path.is_none() && error.is_not_published() && looks < LOOKS => looks += 1,
            outcome => break (outcome?, found),
        }
    };
    let memory = Memory::Published {
        publication,
        path,
        users,
    };
    Ok(lock().add(Attached { memory, device }))
}

/// Attaches the newest version of a name from the publisher at a socket.
fn published(
    name: &str,
    path: &Path,
    users: &[u32],
    of: &DeviceHeap,
) -> Result<Publication, Error> {
    match connect(path, users)?.attach(name, &how(of)) {
        Err(ShareError::NoSuchDevice(uuid)) => Err(elsewhere(name, uuid)),
        outcome => outcome.map_err(|error| Error::at(path, error)),
    }
}

fn how(of: &DeviceHeap) -> AttachmentBuilder<'_> {
    let how = Attachment::builder(&of.device);
    let how = of.peers().iter().fold(how, AttachmentBuilder::also);
    match of.ledger() {
        Some(ledger) => how.ledger(ledger),
        None => how,
    }
}

/// Attaches a block that a process gives, mapped already or by its description and handles. Returns
/// the attachment's number, or `None` if the block is not mapped and there is no description.
///
/// # Errors
/// On any error nothing stays attached.
pub(crate) fn receive(
    json: &str,
    handles: Vec<Exported>,
    giver: OwnedFd,
) -> Result<Option<u64>, Error> {
    fork::check()?;
    let request: GivenRequest = serde_json::from_str(json)?;
    graphs::collect();
    let key = (request.key.clone(), request.read_only);
    let known = lock().known(&key);
    let (device, memory) = match (known, &request.description) {
        (Some(known), _) => known,
        (None, None) => return Ok(None),
        (None, Some(digits)) => {
            let parcel = Parcel::from_bytes(&bytes(digits)?, handles).map_err(ShareError::from)?;
            let (device, memory) = map(&request, &parcel)?;
            // A second mapping is unmapped after the lock is left.
            let memory = Arc::new(memory);
            lock().mapped_once(key, device, &memory)
        }
    };
    // Before the caller gets a number: it would use addresses without memory.
    let GivenRequest { offset, size, .. } = request;
    if memory
        .view_of::<u8>(offset..offset.saturating_add(size))
        .is_err()
    {
        let block = memory.size();
        return Err(Error::OutsideOfBlock {
            offset,
            bytes: size,
            block,
        });
    }
    let memory = Memory::Given { memory, giver };
    Ok(Some(lock().add(Attached { memory, device })))
}

/// Maps a block on the device that it is on, which may have another number here.
fn map(request: &GivenRequest, parcel: &Parcel) -> Result<(i32, Attachment), Error> {
    let mut extents = parcel.description().extents().iter();
    let origin = extents.find_map(|extent| match extent.origin {
        Origin::Device(uuid) => Some(uuid),
        Origin::HostNuma(_) => None,
    });
    // The giver's number is that of another device where the processes see different devices.
    let device = match origin {
        Some(uuid) => heaps::number_of(uuid)?.ok_or(ShareError::NoSuchDevice(uuid))?,
        None => request.device,
    };
    let how = how(heaps::of(device)?);
    let memory = match request.read_only {
        true => how.open(parcel),
        false => how.read_write().open(parcel),
    };
    Ok((device, memory?))
}

/// Reads bytes from hexadecimal digits.
fn bytes(digits: &str) -> Result<Vec<u8>, Error> {
    let pairs = digits.as_bytes().chunks(2);
    let read = pairs.map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok());
    let read: Option<Vec<u8>> = read.collect();
    read.ok_or(Error::NotText)
}

/// Returns `true` if an address lies in a block that a process gave.
pub(crate) fn is_given(address: u64) -> bool {
    let state = lock();
    let mut mapped = state.mapped.values();
    mapped.any(|it| it.addresses.contains(&address) && it.memory.strong_count() > 0)
}

/// Returns `true` if an address lies in memory of another process that is attached.
pub(crate) fn has(address: u64) -> bool {
    let contains = |(first, size, _): &(u64, u64, i32)| {
        address.checked_sub(*first).is_some_and(|at| at < *size)
    };
    memory().iter().any(contains)
}

fn connect(path: &Path, users: &[u32]) -> Result<Subscriber, Error> {
    let admitted = users.iter().copied().fold(Users::own(), Users::and);
    Subscriber::connect_to(path, &admitted).map_err(|error| Error::at(path, error))
}

fn elsewhere(name: &str, uuid: [u8; 16]) -> Error {
    match heaps::number_of(uuid).ok().flatten() {
        Some(device) => Error::OtherDevice {
            name: name.to_owned(),
            device,
        },
        None => ShareError::NoSuchDevice(uuid).into(),
    }
}

fn attached(number: u64) -> Result<Arc<Attached>, Error> {
    fork::check()?;
    let found = lock()
        .attached
        .get_or_insert_default()
        .get(&number)
        .cloned();
    found.ok_or(Error::NotAttached(number))
}

/// Returns the address, the bytes and the device of all attached memory.
pub(crate) fn memory() -> Vec<(u64, u64, i32)> {
    let state = lock();
    let attached = state.attached.iter().flatten();
    let attached = attached.filter(|(number, _)| !state.leaving.contains(number));
    let each = attached.map(|(_, attached)| {
        let memory = attached.memory.attachment();
        (memory.address().0, memory.size(), attached.device)
    });
    // A block that was given several times has several numbers.
    let each: BTreeSet<_> = each.collect();
    each.into_iter().collect()
}

pub(crate) fn describe(number: u64) -> Result<Vec<u8>, Error> {
    let attached = attached(number)?;
    let memory = attached.memory.attachment();
    let mut description = json!({
        "device": attached.device,
        "address": memory.address().0,
        "size": memory.size(),
    });
    if let Memory::Published {
        publication, path, ..
    } = &attached.memory
    {
        description["name"] = publication.name().into();
        description["version"] = publication.version().into();
        description["path"] = path.to_string_lossy().into();
        description["manifest"] = serde_json::to_value(publication.manifest())?;
    }
    Ok(serde_json::to_vec(&description)?)
}

/// Waits up to `wait` for another version than the attached one. Returns its number.
///
/// # Errors
/// The name is not published any more, or the publisher has ended.
pub(crate) fn newer(number: u64, wait: Duration) -> Result<Option<u64>, Error> {
    let attached = attached(number)?;
    let Memory::Published {
        publication,
        path,
        users,
    } = &attached.memory
    else {
        return Err(Error::NotAttached(number));
    };
    let mut subscriber = connect(path, users)?;
    let newer = subscriber.wait_for_newer(publication, wait);
    let newer = newer.map_err(|error| Error::at(path, error));
    drop(attached);
    // Another thread may have detached the attachment meanwhile.
    graphs::collect();
    newer
}

/// Detaches a publication. Waits for the work of all devices that have access.
///
/// # Errors
/// A graph is captured, or a device cannot be waited for. [`graphs::collect`] detaches the
/// attachment later.
pub(crate) fn detach(number: u64) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    detach_later(number)?;
    let leave = graphs::waiting().ok_or(Error::Capturing)?;
    detach_one(number, &leave)
}

/// Has [`graphs::collect`] detach a publication.
pub(crate) fn detach_later(number: u64) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let mut state = lock();
    if !state.attached.get_or_insert_default().contains_key(&number) {
        return Err(Error::NotAttached(number));
    }
    state.leaving.insert(number);
    drop(state);
    graphs::put_off(detach_all);
    Ok(())
}

fn detach_all(leave: &Waiting) {
    let leaving = lock().leaving.clone();
    for number in leaving {
        // A failure puts the attachment off again. The caller of `detach` got its error.
        let _ = detach_one(number, leave);
    }
}

/// Detaches one publication. Puts it off on failure, and while another thread waits for a newer
/// version.
fn detach_one(number: u64, _leave: &Waiting) -> Result<(), Error> {
    let mut state = lock();
    let removed = state.attached.get_or_insert_default().remove(&number);
    // Another thread may have detached it.
    let Some(removed) = removed else {
        return Ok(());
    };
    let (left, outcome) = match Arc::try_unwrap(removed) {
        Err(used) => (Some(used), Ok(())),
        Ok(attached) => {
            // The lock is not held while devices are waited for.
            drop(state);
            let closed = attached.close();
            state = lock();
            match closed {
                Ok(()) => (None, Ok(())),
                Err((attached, error)) => (Some(Arc::new(attached)), Err(error)),
            }
        }
    };
    match left {
        None => {
            state.leaving.remove(&number);
        }
        Some(left) => {
            state.attached.get_or_insert_default().insert(number, left);
            drop(state);
            graphs::put_off(detach_all);
        }
    }
    outcome
}

impl Attached {
    /// Unmaps the attachment. Hands it back on failure.
    #[expect(
        clippy::result_large_err,
        reason = "the attachment itself is handed back"
    )]
    fn close(self) -> Result<(), (Self, Error)> {
        let Self { memory, device } = self;
        match memory {
            Memory::Published {
                publication,
                path,
                users,
            } => publication.close().map_err(|refused| {
                let memory = Memory::Published {
                    publication: refused.owner,
                    path,
                    users,
                };
                let attached = Self { memory, device };
                (attached, Error::StaysAttached(refused.reason))
            }),
            Memory::Given { memory, giver } => {
                let waited = heaps::of(device).and_then(|of| Ok(of.synchronize()?));
                if let Err(error) = waited {
                    let memory = Memory::Given { memory, giver };
                    return Err((Self { memory, device }, error));
                }
                drop(memory);
                // I-106: no work of this process uses the memory from here on. A giver that is gone
                // needs no word. A copy of the socket in a forked child does not keep it open.
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = send(&giver, LET_GO, flags);
                let _ = shutdown(&giver, Shutdown::Both);
                Ok(())
            }
        }
    }
}

impl Memory {
    fn attachment(&self) -> &Attachment {
        match self {
            Self::Published { publication, .. } => publication.memory(),
            Self::Given { memory, .. } => memory,
        }
    }
}

impl State {
    /// Returns a block that is mapped, and its device.
    fn known(&self, key: &Key) -> Option<(i32, Arc<Attachment>)> {
        let known = self.mapped.get(key)?;
        Some((known.device, known.memory.upgrade()?))
    }

    /// Notes a block that was mapped. Returns the one to use, which is that of another thread if it
    /// was faster.
    fn mapped_once(
        &mut self,
        key: Key,
        device: i32,
        memory: &Arc<Attachment>,
    ) -> (i32, Arc<Attachment>) {
        if let Some(known) = self.known(&key) {
            return known;
        }
        let first = memory.address().0;
        let mapped = Mapped {
            device,
            addresses: first..first.saturating_add(memory.size()),
            memory: Arc::downgrade(memory),
        };
        self.mapped.retain(|_, it| it.memory.strong_count() > 0);
        self.mapped.insert(key, mapped);
        (device, Arc::clone(memory))
    }

    /// Notes an attachment, and returns its number.
    fn add(&mut self, attached: Attached) -> u64 {
        self.count += 1;
        let all = self.attached.get_or_insert_default();
        all.insert(self.count, Arc::new(attached));
        self.count
    }
}
