//! Groups of processes whose tags sleep and wake in all of them or in none.
//!
//! `unsafe` is used to export the functions under their C names, and for the texts and results of C.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm::Group;
use cuvmm::ledger::GroupRequest;
use serde::Deserialize;

use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::tags;
use crate::tags::host::Host;
use crate::{asked, folder, fork, heaps};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// `None` for the directory of the ledger, or the user's usual one.
    directory: Option<PathBuf>,
    name: String,
    ranks: u32,
    /// `None` for the first rank that is free.
    rank: Option<u32>,
}

struct State {
    groups: BTreeMap<u64, Arc<Group>>,
    count: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    groups: BTreeMap::new(),
    count: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn join(json: &str) -> Result<u64, Error> {
    fork::check()?;
    fork::watch();
    let Request {
        directory,
        name,
        ranks,
        rank,
    } = serde_json::from_str(json)?;
    let directory = match directory.or_else(heaps::configured_ledger) {
        Some(directory) => directory,
        None => folder::own()?,
    };
    let group = Arc::new(Group::join(directory, &name, ranks, rank)?);
    asked::set(answer);
    let mut state = lock();
    state.count += 1;
    let token = state.count;
    state.groups.insert(token, group);
    Ok(token)
}

fn find(token: u64) -> Result<Arc<Group>, Error> {
    fork::check()?;
    let group = lock().groups.get(&token).cloned();
    group.ok_or(Error::NoGroup(token))
}

/// Does what another program asks of a group.
fn answer(request: &GroupRequest) -> Result<(), String> {
    let group = only(&request.group)?;
    let tags = match request.tags.is_empty() {
        true => "null".to_owned(),
        false => serde_json::to_string(&request.tags).map_err(|error| error.to_string())?,
    };
    let done = match request.wake {
        true => wake(&group, &tags, request.timeout),
        false => sleep(&group, &tags, Some(Host::Keep), request.timeout),
    };
    done.map_err(|error| error.to_string())
}

/// Returns the only group of a name that this process has joined, or the reason why there is none.
fn only(name: &str) -> Result<Arc<Group>, String> {
    let state = lock();
    let groups = state.groups.values().filter(|it| it.name() == name);
    let by_path: BTreeMap<&Path, &Arc<Group>> = groups.map(|it| (it.path(), it)).collect();
    let mut found = by_path.values();
    match (found.next(), found.next()) {
        (None, _) => Err(format!("the process is in no group named {name:?}")),
        (Some(&only), None) => Ok(Arc::clone(only)),
        _ => {
            let paths = by_path.keys();
            Err(format!(
                "the process is in several groups named {name:?}: {paths:?}"
            ))
        }
    }
}

fn sleep(group: &Group, tags: &str, keep: Option<Host>, timeout: Duration) -> Result<(), Error> {
    let treated = if keep.is_some() { "keep" } else { "discard" };
    let operation = format!("sleep {} {treated}", named(tags));
    together(group, &operation, timeout, |wait, agreed| {
        tags::sleep::sleep_if(tags, keep, wait, agreed)
    })
}

fn wake(group: &Group, tags: &str, timeout: Duration) -> Result<(), Error> {
    let operation = format!("wake {}", named(tags));
    together(group, &operation, timeout, |wait, agreed| {
        tags::sleep::wake_if(tags, wait, agreed)
    })
}

/// Moves tags when all ranks have begun to. `act` gets what is left of the timeout, and calls the
/// function that it gets when all that can fail is done, and undoes it after an error.
fn together(
    group: &Group,
    operation: &str,
    timeout: Duration,
    act: impl FnOnce(Duration, &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error>,
) -> Result<(), Error> {
    let begun = Instant::now();
    let mut entered = Some(group.enter(operation, timeout)?);
    let left = timeout.saturating_sub(begun.elapsed());
    let moved = act(left, &mut || match entered.take() {
        Some(entered) => Ok(entered.ready()?),
        None => Ok(()),
    });
    if let (Err(error), Some(entered)) = (&moved, entered) {
        // This rank's own error says more to its program.
        let _ = entered.fail(error);
    }
    moved
}

/// Returns the names of tags as a text that is the same in all ranks.
fn named(json: &str) -> String {
    match serde_json::from_str::<Option<Vec<String>>>(json) {
        Ok(Some(mut names)) => {
            names.sort_unstable();
            names.dedup();
            // Names may contain anything, so they are quoted.
            serde_json::json!(names).to_string()
        }
        Ok(None) => "all tags".to_owned(),
        // The rank's own part fails then, with the reason.
        Err(_) => json.to_owned(),
    }
}

/// Joins a group, and writes its token.
///
/// The keys of the JSON object: `name`; `ranks`, how many processes it has; `rank`, this process's
/// from 0, or null for the first one that is free; and `directory`, which all ranks share, or null
/// for that of the ledger, or else the user's usual one (`$XDG_RUNTIME_DIR/cuvmm`, or
/// `/tmp/cuvmm-UID`). Waits for no other rank, and makes no driver call. An error (another number of
/// ranks, a rank that is taken) changes nothing.
///
/// # Safety
/// `json` is null or ends with a zero byte, and `token` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_group_join(json: *const c_char, token: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        // SAFETY: the caller says so.
        let token = unsafe { token.as_mut() }.ok_or(Error::Null)?;
        *token = join(json)?;
        Ok(())
    })
}

/// Writes a group's `name`, `rank`, `ranks` and `path` as JSON. On failure returns 0 and keeps the
/// error.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_group(token: u64, buffer: *mut c_char, length: usize) -> usize {
    let describe = |group: &Group| {
        let (rank, ranks) = (group.rank(), group.ranks());
        serde_json::json!({
            "name": group.name(), "rank": rank, "ranks": ranks, "path": group.path(),
        })
    };
    // SAFETY: the caller says so.
    unsafe { edge::write_json(|| Ok(describe(&*find(token)?)), buffer, length) }
}

/// Puts tags to sleep in all ranks of a group, or in none, as [`cuvmm_sleep`](crate::cuvmm_sleep)
/// does in one. Every rank calls this, with the same tags and contents kept or not. Waits for the
/// others and for this rank's work at most for the timeout in all, in milliseconds.
///
/// An error of this rank is that of `cuvmm_sleep`. If another rank fails, has ended, or does not call
/// this in time, the error names it and its reason, and all tags of all ranks are as before.
///
/// # Safety
/// The requirements of [`cuvmm_sleep`](crate::cuvmm_sleep).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_group_sleep(
    token: u64,
    tags: *const c_char,
    keep: c_int,
    timeout: u64,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        let timeout = Duration::from_millis(timeout);
        sleep(&*find(token)?, tags, Host::of(keep)?, timeout)
    })
}

/// Wakes tags in all ranks of a group, or in none, as [`cuvmm_wake`](crate::cuvmm_wake) does in one.
/// Every rank calls this, with the same tags. Waits for the others and for memory at most for the
/// timeout in all, in milliseconds. Errors are as in [`cuvmm_group_sleep`].
///
/// # Safety
/// `tags` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_group_wake(token: u64, tags: *const c_char, timeout: u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        wake(&*find(token)?, tags, Duration::from_millis(timeout))
    })
}

/// Leaves a group, after an operation of it that runs on another thread. Does nothing for a group
/// that was left before, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_group_leave(token: u64) {
    guard((), || {
        if !fork::is_child() {
            let left = lock().groups.remove(&token);
            drop(left);
        }
    });
}
