//! Publications: tensors that other processes may attach under a name, copied or in place.
//!
//! PyTorch's own memory cannot be shared, so copies have a pool beside the heap's, which leaves room
//! for it under the device's limit. Memory of shareable tags and heaps can be published as it lies: it
//! stays charged to its owner, and is kept in place while it is published.
//!
//! `unsafe` is used to copy from the addresses that C passes.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{slice, thread};

use cuvmm::driver::{DeviceAddress, StreamHandle};
use cuvmm::error::{ChannelError, ShareError};
use cuvmm::share::{Manifest, Users};
use cuvmm::{Block, CallError, Publisher};
use serde::Deserialize;

use crate::edge::complain;
use crate::error::Error;
use crate::graphs::{self, Waiting};
use crate::heaps::{self, DeviceHeap};
use crate::{exit, folder, fork, limits, offers};

/// The timeout of a request to other processes of a ledger for memory.
const NEIGHBOURS: Duration = Duration::from_secs(2);

/// The number of looks, and the pause between them, for readers to detach an ended version.
const LOOKS: u32 = 100;
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    name: String,
    /// The publisher's socket. `None` for this process's socket in the usual folder.
    path: Option<PathBuf>,
    /// User ids, besides this user's, that may attach.
    #[serde(default)]
    users: Vec<u32>,
    device: i32,
    size: u64,
    manifest: Manifest,
    parts: Vec<Part>,
    /// Set to publish the parts, one for each tensor, as they lie.
    #[serde(default)]
    in_place: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    address: u64,
    offset: u64,
    size: u64,
    is_host: bool,
}

struct Open {
    publisher: Publisher,
    users: Vec<u32>,
    /// The names that were published in place.
    in_place: BTreeSet<String>,
}

/// The publishers of this process, by the path of the socket. A publisher outlives its names, so
/// that its version numbers go on.
static PUBLISHERS: Mutex<Option<BTreeMap<PathBuf, Open>>> = Mutex::new(None);

/// Publishes bytes under a name. Returns the version.
///
/// # Errors
/// On any error, such as while a graph is captured, nothing is published.
///
/// # Safety
/// The addresses of the parts are valid for reading their sizes, on the device or the host as they
/// say, and nothing writes there meanwhile.
pub(crate) unsafe fn publish(json: &str) -> Result<u64, Error> {
    fork::check()?;
    let request: Request = serde_json::from_str(json)?;
    graphs::collect();
    let leave = graphs::waiting().ok_or(Error::Capturing)?;
    Publisher::check_name(&request.name)?;
    request.check()?;
    let of = heaps::of(request.device)?;
    let path = match &request.path {
        Some(path) => path.clone(),
        None => folder::own_socket()?,
    };
    let mut publishers = PUBLISHERS.lock().unwrap_or_else(PoisonError::into_inner);
    let publishers = publishers.get_or_insert_default();
    listen(publishers, &path, &request.users)?;
    let open = publishers.get_mut(&path).ok_or(Error::Null)?;
    let (name, is_in_place) = (request.name.clone(), request.in_place);
    let outcome = match is_in_place {
        true => in_place(&open.publisher, of, request),
        // SAFETY: the caller says so.
        false => unsafe { copied(&open.publisher, of, request) },
    };
    match (&outcome, is_in_place) {
        (Ok(_), true) => drop(open.in_place.insert(name)),
        (Ok(_), false) => drop(open.in_place.remove(&name)),
        (Err(_), _) => {}
    }
    end(publishers, &leave);
    outcome
}

/// Publishes a copy of all parts.
///
/// # Safety
/// The requirements of [`publish`].
unsafe fn copied(publisher: &Publisher, of: &DeviceHeap, request: Request) -> Result<u64, Error> {
    // A publication of empty tensors has memory too: its manifest comes with a handle.
    let size = request.size.max(1);
    let promise = limits::make_room(of, size, true)?;
    // SAFETY: the caller says so.
    let outcome = unsafe { filled(of, size, &request) }.and_then(|block| {
        let Request { name, manifest, .. } = request;
        let published = publisher.publish(&name, manifest, block);
        published.map_err(|refused| Error::Share(refused.reason))
    });
    drop(promise);
    outcome
}

/// Publishes the parts as they lie. Waits for all work of the device first, which may write them.
fn in_place(publisher: &Publisher, of: &DeviceHeap, request: Request) -> Result<u64, Error> {
    let Request {
        name,
        mut manifest,
        parts,
        ..
    } = request;
    let used = parts.iter().filter(|part| part.size > 0);
    let used: Vec<(u64, u64)> = used.map(|part| (part.address, part.size)).collect();
    let offer = offers::several(&used)?;
    for (tensor, part) in manifest.tensors.iter_mut().zip(&parts) {
        let offset = || offer.offset_of(DeviceAddress(part.address), part.size);
        tensor.offset = match part.size {
            0 => 0,
            _ => offset().ok_or(Error::NotInPlace(part.address))?,
        };
        tensor.size = part.size;
    }
    of.synchronize()?;
    Ok(publisher.publish_in_place(&name, &manifest, offer)?)
}

impl Request {
    fn check(&self) -> Result<(), Error> {
        if self.in_place {
            return self.check_in_place();
        }
        let problem = |part: &Part| match part.offset.checked_add(part.size) {
            Some(end) if end > self.size => Some("it ends after the publication"),
            None => Some("it ends after the publication"),
            _ if part.size > 0 && part.address == 0 => Some("it has no address"),
            _ => None,
        };
        let mut found = self.parts.iter().map(problem).enumerate();
        match found.find_map(|(index, problem)| Some((index, problem?))) {
            Some((index, problem)) => Err(Error::Part { index, problem }),
            None => Ok(()),
        }
    }
}

impl Request {
    fn check_in_place(&self) -> Result<(), Error> {
        let (parts, tensors) = (self.parts.len(), self.manifest.tensors.len());
        let mut found = self.parts.iter().enumerate();
        let host = found.find(|(_, part)| part.is_host);
        let (index, problem) = match host {
            Some((index, _)) => (index, "it is in host memory"),
            None if parts != tensors => (parts.min(tensors), "there is one for each tensor"),
            None => return Ok(()),
        };
        Err(Error::Part { index, problem })
    }
}

/// Makes a publisher at a path unless this process has one there.
fn listen(
    publishers: &mut BTreeMap<PathBuf, Open>,
    path: &Path,
    users: &[u32],
) -> Result<(), Error> {
    match publishers.get(path) {
        Some(open) if open.users == users => return Ok(()),
        Some(_) => {
            let path = path.to_owned();
            return Err(Error::OtherUsers { path });
        }
        None => {}
    }
    let admitted = users.iter().copied().fold(Users::own(), Users::and);
    let publisher = Publisher::bind_for(path, admitted);
    let publisher = publisher.map_err(|error| Error::at(path, error))?;
    // Otherwise the socket's file stays until another process looks for publications.
    if publishers.is_empty() && exit::watch() {
        exit::at_end(close);
    }
    let users = users.to_vec();
    let open = Open {
        publisher,
        users,
        in_place: BTreeSet::new(),
    };
    publishers.insert(path.to_owned(), open);
    Ok(())
}

/// Allocates `size` bytes for a publication, and copies all parts into them.
///
/// # Safety
/// The requirements of [`publish`].
unsafe fn filled(of: &DeviceHeap, size: u64, request: &Request) -> Result<Block, Error> {
    let block = of.publishing()?.1.block(size);
    let block = block.timeout(NEIGHBOURS).allocate()?;
    // Work of any stream may still be writing the parts.
    of.synchronize()?;
    let (driver, ordinal) = (of.device.driver(), of.device.ordinal());
    for part in request.parts.iter().filter(|part| part.size > 0) {
        if part.is_host {
            let size = usize::try_from(part.size).unwrap_or(usize::MAX);
            let first = usize::try_from(part.address).unwrap_or(usize::MAX);
            let first = std::ptr::with_exposed_provenance(first);
            // SAFETY: the caller says that the bytes are readable and not written meanwhile.
            block.write(part.offset, unsafe { slice::from_raw_parts(first, size) })?;
            continue;
        }
        let to = DeviceAddress(block.address().0 + part.offset);
        let from = DeviceAddress(part.address);
        // SAFETY: the part lies within the block, which only this function knows, and the bytes are
        // there by the caller's promise. Both stay until all work is complete, which is waited for.
        unsafe { driver.copy_on_device_async(ordinal, to, from, part.size, StreamHandle::LEGACY) }
            .map_err(CallError::from)?;
    }
    of.synchronize()?;
    Ok(block)
}

/// Gives the newest version of a name to the keeper at a socket, or to this user's. Returns the version.
///
/// # Errors
/// This process does not publish the name at the path, or the keeper cannot keep it.
pub(crate) fn keep(
    name: &str,
    path: Option<PathBuf>,
    keeper: Option<PathBuf>,
) -> Result<u64, Error> {
    fork::check()?;
    let path = path.map_or_else(folder::own_socket, Ok)?;
    let keeper = keeper.map_or_else(folder::keeper_socket, Ok)?;
    let mut publishers = PUBLISHERS.lock().unwrap_or_else(PoisonError::into_inner);
    let open = publishers.get_or_insert_default().get(&path);
    let listed = open.map(|open| (open, open.publisher.list()));
    match listed {
        Some((open, listed)) if listed.iter().any(|one| one.name == name) => {
            let kept = open.publisher.keep(name, &keeper);
            kept.map_err(|cause| match cause {
                ShareError::Channel(ChannelError::NotListening(path)) => Error::NoKeeper { path },
                cause => Error::Keeper {
                    path: keeper,
                    cause,
                },
            })
        }
        _ => Err(not_published(name, &path)),
    }
}

fn not_published(name: &str, path: &Path) -> Error {
    Error::NotPublished {
        name: name.to_owned(),
        instead: format!("this process has no such name at {}", path.display()),
    }
}

/// Withdraws a name. Processes that have attached it keep its memory.
///
/// # Errors
/// This process does not publish the name at the path.
pub(crate) fn withdraw(name: &str, path: Option<PathBuf>) -> Result<(), Error> {
    fork::check()?;
    let path = match path {
        Some(path) => path,
        None => folder::own_socket()?,
    };
    let mut publishers = PUBLISHERS.lock().unwrap_or_else(PoisonError::into_inner);
    let publishers = publishers.get_or_insert_default();
    let open = publishers.get_mut(&path);
    if !open.is_some_and(|open| open.withdraw(name)) {
        return Err(not_published(name, &path));
    }
    match graphs::waiting() {
        Some(leave) => end(publishers, &leave),
        None => graphs::put_off(end_later),
    }
    Ok(())
}

/// Releases the memory of ended versions when a graph is no longer captured.
fn end_later(leave: &Waiting) {
    // Does not wait for the lock: its holder may wait long for memory.
    match PUBLISHERS.try_lock().as_deref() {
        Ok(publishers) => publishers.iter().for_each(|it| end(it, leave)),
        Err(_) => graphs::put_off(end_later),
    }
}

/// Releases the memory of ended versions, and raises the limits of the heaps by as much. Waits for
/// the devices, and for a moment for readers that were attaching such a version.
fn end(publishers: &BTreeMap<PathBuf, Open>, _leave: &Waiting) {
    let listed: u64 = publishers.values().map(Open::copied).sum();
    for (_, of) in heaps::all() {
        let _ = of.synchronize();
    }
    for _ in 0..LOOKS {
        let mut held = 0;
        for (device, of) in heaps::all() {
            // A heap that is short of memory tries again.
            if let Err(error) = limits::settle(of) {
                complain(&error, &format!("limit of device {device}: {error}"));
            }
            held += of.published();
        }
        if held <= listed {
            break;
        }
        thread::sleep(LOOK);
    }
}

impl Open {
    fn withdraw(&mut self, name: &str) -> bool {
        self.in_place.remove(name);
        self.publisher.withdraw(name)
    }

    /// Returns the bytes of all copies that are published.
    fn copied(&self) -> u64 {
        let listed = self.publisher.list().into_iter();
        let copies = listed.filter(|one| !self.in_place.contains(&one.name));
        copies.map(|one| one.held).sum()
    }
}

fn close() {
    let publishers = PUBLISHERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    drop(publishers);
}
