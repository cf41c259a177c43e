//! Keepers in this process, which have publications after their publishers have ended. They make no
//! driver call.
//!
//! `unsafe` is used to export the functions under their C names, and for the texts and results of C.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm::share::Keeper;

use crate::edge::{self, complain, guard, status};
use crate::error::Error;
use crate::{folder, fork, heaps};

struct State {
    keepers: BTreeMap<u64, Keeper>,
    /// The token of the last keeper. None is used twice.
    last: u64,
}

static STATE: Mutex<State> = Mutex::new(State {
    keepers: BTreeMap::new(),
    last: 0,
});

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps publications at a socket, or at that of this user's keeper for null, until
/// [`cuvmm_keeper_end`]: see [`cuvmm::share::Keeper`]. `ledgers` is the directory with the ledgers of the
/// processes that publish, or the file of one of them; null for that of [`cuvmm_configure`](crate::cuvmm_configure), else the user's
/// folder. Takes what running publishers had given to a keeper before. Writes a token.
///
/// # Safety
/// The texts are null or end with a zero byte, and `token` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_keeper_begin(
    path: *const c_char,
    ledgers: *const c_char,
    token: *mut u64,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let (path, ledgers) = unsafe { (edge::read(path)?, edge::read(ledgers)?) };
        // SAFETY: the caller says so.
        let token = unsafe { token.as_mut() }.ok_or(Error::Null)?;
        *token = begin(path.map(Into::into), ledgers.map(Into::into))?;
        Ok(())
    })
}

fn begin(path: Option<PathBuf>, ledgers: Option<PathBuf>) -> Result<u64, Error> {
    fork::check()?;
    fork::watch();
    let path = path.map_or_else(folder::keeper_socket, Ok)?;
    let ledgers = match ledgers.or_else(heaps::configured_ledger) {
        Some(directory) => directory,
        None => folder::own()?,
    };
    let keeper = Keeper::bind(&path, Some(ledgers)).map_err(|error| Error::at(&path, error))?;
    for (socket, name) in folder::wanted()? {
        if let Err(error) = keeper.take(&name, &socket) {
            let error = Error::at(&socket, error);
            complain(&error, &format!("{name:?} is not kept: {error}"));
        }
    }
    let mut state = lock();
    state.last += 1;
    let token = state.last;
    state.keepers.insert(token, keeper);
    Ok(token)
}

/// Ends a keeper. What only it had goes back to the driver. Does nothing if it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_keeper_end(token: u64) {
    guard((), || {
        // A forked child may find the lock held.
        if !fork::is_child() {
            let ended = lock().keepers.remove(&token);
            drop(ended);
        }
    });
}

/// Drops what the keeper at a socket has under a name, or this user's keeper for null. Returns 0, or 1 if
/// it has no such name.
///
/// # Safety
/// The texts are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_keeper_drop(name: *const c_char, keeper: *const c_char) -> c_int {
    let mut was_kept = true;
    let status = status(|| {
        // SAFETY: the caller says so.
        let (name, keeper) = unsafe { (edge::read(name)?, edge::read(keeper)?) };
        fork::check()?;
        let keeper = keeper.map(PathBuf::from);
        let keeper = keeper.map_or_else(folder::keeper_socket, Ok)?;
        was_kept = folder::keeper_at(&keeper)?
            .release(name.ok_or(Error::NotText)?)
            .map_err(|error| Error::at(&keeper, error))?;
        Ok(())
    });
    match was_kept {
        true => status,
        false => 1,
    }
}
