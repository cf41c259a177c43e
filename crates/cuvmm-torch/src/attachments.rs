//! Publications of other processes, attached for reading.
//!
//! Each request has a connection of its own: publishers close those that are idle.

use std::collections::HashMap;
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
use crate::heaps::{self, DeviceHeap};
use crate::{folder, fork};

/// The JSON that `cuvmm_attach` takes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    name: String,
    /// Where the publisher listens. `None` to search the usual folder.
    path: Option<PathBuf>,
    /// Other users that the publisher may be of, by their numbers.
    #[serde(default)]
    users: Vec<u32>,
    device: i32,
}

/// A publication that is attached.
struct Attached {
    publication: Publication,
    device: i32,
    path: PathBuf,
    users: Vec<u32>,
}

struct State {
    attached: Option<HashMap<u64, Arc<Attached>>>,
    /// How many were ever attached.
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    attached: None,
    count: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Attaches the newest version of a name. Returns a number for it.
///
/// # Errors
/// Nothing stays attached then.
pub(crate) fn attach(json: &str) -> Result<u64, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
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

/// Returns the error for memory that is on another device than is named.
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
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let found = lock()
        .attached
        .get_or_insert_default()
        .get(&number)
        .cloned();
    found.ok_or(Error::NotAttached(number))
}

/// Describes what is attached under a number as JSON.
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

/// Waits up to `wait` for another version than is attached under a number. Returns its version.
///
/// # Errors
/// The name is not published any more, or the publisher has ended.
pub(crate) fn newer(number: u64, wait: Duration) -> Result<Option<u64>, Error> {
    let attached = attached(number)?;
    let mut subscriber = connect(&attached.path, &attached.users)?;
    let newer = subscriber.wait_for_newer(&attached.publication, wait);
    newer.map_err(|error| Error::at(&attached.path, error))
}

/// Detaches what is attached under a number. Waits for the work of all devices that have access.
pub(crate) fn detach(number: u64) -> Result<(), Error> {
    if fork::is_child() {
        return Ok(());
    }
    let gone = lock().attached.get_or_insert_default().remove(&number);
    // Dropped without the lock.
    gone.map(drop).ok_or(Error::NotAttached(number))
}
