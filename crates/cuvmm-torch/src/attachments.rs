//! Publications of other processes, attached for reading.
//!
//! Each request has a connection of its own: publishers close idle connections.
//!
//! Detaching waits for devices. An attachment keeps its number until devices can be waited for:
//! Python asks only once, when the last tensor is gone.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuvmm::Attachment;
use cuvmm::driver::Ordinal;
use cuvmm::error::ShareError;
use cuvmm::share::{Publication, Subscriber, Users};
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

struct Attached {
    publication: Publication,
    device: i32,
    path: PathBuf,
    users: Vec<u32>,
}

struct State {
    attached: Option<HashMap<u64, Arc<Attached>>>,
    /// The numbers of attachments to detach.
    leaving: BTreeSet<u64>,
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    attached: None,
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
    let path = match path {
        Some(path) => path,
        None => folder::publisher_of(&name)?,
    };
    let of = heaps::of(device)?;
    graphs::collect();
    let mut how = Attachment::builder(&of.device);
    for peer in of.peers() {
        how = how.also(peer);
    }
    if let Some(ledger) = of.ledger() {
        how = how.ledger(ledger);
    }
    let mut subscriber = connect(&path, &users)?;
    let publication = match subscriber.attach(&name, &how) {
        Err(ShareError::NoSuchDevice(uuid)) => Err(elsewhere(of, &name, uuid)),
        outcome => outcome.map_err(|error| Error::at(&path, error)),
    }?;
    let mut state = lock();
    state.count += 1;
    let number = state.count;
    let attached = state.attached.get_or_insert_default();
    attached.insert(
        number,
        Arc::new(Attached {
            publication,
            device,
            path,
            users,
        }),
    );
    Ok(number)
}

fn connect(path: &Path, users: &[u32]) -> Result<Subscriber, Error> {
    let admitted = users.iter().copied().fold(Users::own(), Users::and);
    Subscriber::connect_to(path, &admitted).map_err(|error| Error::at(path, error))
}

fn elsewhere(of: &DeviceHeap, name: &str, uuid: [u8; 16]) -> Error {
    let driver = of.device.driver();
    let count = driver.device_count().unwrap_or(0);
    let mut devices = (0..count).map(Ordinal);
    match devices.find(|&device| driver.device_uuid(device) == Ok(uuid)) {
        Some(Ordinal(device)) => Error::OtherDevice {
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
        let memory = attached.publication.memory();
        (memory.address().0, memory.size(), attached.device)
    });
    each.collect()
}

pub(crate) fn describe(number: u64) -> Result<Vec<u8>, Error> {
    let attached = attached(number)?;
    let Attached {
        publication,
        device,
        path,
        ..
    } = &*attached;
    let memory = publication.memory();
    let description = json!({
        "name": publication.name(),
        "version": publication.version(),
        "device": device,
        "path": path.to_string_lossy(),
        "address": memory.address().0,
        "size": memory.size(),
        "manifest": publication.manifest(),
    });
    Ok(serde_json::to_vec(&description)?)
}

/// Waits up to `wait` for another version than the attached one. Returns its number.
///
/// # Errors
/// The name is not published any more, or the publisher has ended.
pub(crate) fn newer(number: u64, wait: Duration) -> Result<Option<u64>, Error> {
    let attached = attached(number)?;
    let mut subscriber = connect(&attached.path, &attached.users)?;
    let newer = subscriber.wait_for_newer(&attached.publication, wait);
    let newer = newer.map_err(|error| Error::at(&attached.path, error));
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
        let Self {
            publication,
            device,
            path,
            users,
        } = self;
        publication.close().map_err(|refused| {
            let attached = Self {
                publication: refused.owner,
                device,
                path,
                users,
            };
            (attached, Error::StaysAttached(refused.reason))
        })
    }
}
