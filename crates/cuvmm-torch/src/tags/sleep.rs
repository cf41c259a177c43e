//! Sleep and wake of tags. All tags of a call are prepared before the first one sleeps or wakes, so
//! that an error leaves all as they were.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use cuvmm::sleep::PreparedSleep;
use cuvmm::{Contents, HostStore, SleepError};

use super::host::Host;
use super::members::Members;
use super::moving::{MOVING, Moving};
use super::{KEPT, PLAIN, WRITTEN, chosen, host, lock, names, refused, shared};
use crate::error::Error;
use crate::{fork, graphs};

/// The default timeout of sleeping for work that may use the memory, and of waking for memory.
pub(crate) const LONGEST: Duration = Duration::from_secs(60);

/// Puts tags to sleep, as `cuvmm_sleep` describes.
///
/// # Errors
/// Invalid JSON, an unknown or sleeping tag, work that does not end, too little host memory, or a
/// refusal of the driver. All tags are as before, except that a tag sleeps if the driver refuses to
/// map its memory again.
pub(crate) fn sleep(json: &str, keep: Option<Host>, wait: Duration) -> Result<(), Error> {
    sleep_if(json, keep, wait, &mut || Ok(()))
}

/// Puts tags to sleep if `agreed` returns `Ok`, which is called when all that can fail is done.
pub(crate) fn sleep_if(
    json: &str,
    keep: Option<Host>,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    fork::check()?;
    sleep_as(names(json)?.as_deref(), |_| keep, wait, agreed)
}

/// Puts tags to sleep, each as its value says, as `cuvmm_sleep_each` describes.
///
/// # Errors
/// A value that is no `keep`, and the errors of [`sleep`].
pub(crate) fn sleep_each(json: &str) -> Result<(), Error> {
    fork::check()?;
    let each: BTreeMap<String, i32> = serde_json::from_str(json)?;
    let each = each
        .into_iter()
        .map(|(name, keep)| Ok((name, Host::of(keep)?)));
    let each = each.collect::<Result<BTreeMap<_, _>, Error>>()?;
    let names: Vec<String> = each.keys().cloned().collect();
    let keep = |name: &str| each.get(name).copied().flatten();
    sleep_as(Some(&names), keep, LONGEST, &mut || Ok(()))
}

fn sleep_as(
    names: Option<&[String]>,
    keep: impl Fn(&str) -> Option<Host>,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let until = Instant::now().checked_add(wait);
    // Leave is not kept during the wait for work: the pools' guards end the wait when a capture
    // begins.
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = chosen(names, false)?;
    shared::refuse_sent(&chosen)?;
    let moving = Moving::begin(&chosen);
    let mut prepared = Vec::new();
    let outcome: Result<(), Error> = chosen.iter().try_for_each(|&index| {
        let name = lock().tags[index].name.clone();
        prepared.push(prepare_sleep(index, keep(&name), until)?);
        Ok(())
    });
    if let Err(error) = outcome.and_then(|()| agreed()) {
        let cancelled = chosen.iter().zip(prepared);
        return Err(
            cancelled.fold(error, |cause, (&index, one)| match cancel(one) {
                Ok(()) => cause,
                Err(stayed) => Error::Stayed {
                    stayed: Box::new(refused(index, stayed)),
                    cause: Box::new(cause),
                },
            }),
        );
    }
    for one in prepared.into_iter().flatten() {
        one.finish();
    }
    for &index in &chosen {
        give_up_cached(index);
    }
    shared::settle(&chosen);
    moving.end(|_| true);
    Ok(())
}

/// Wakes tags, as `cuvmm_wake` describes.
///
/// # Errors
/// Invalid JSON, an unknown or awake tag, too little memory, or a refusal of the driver. All tags
/// are as before.
pub(crate) fn wake(json: &str, wait: Duration) -> Result<(), Error> {
    wake_if(json, wait, &mut || Ok(()))
}

/// Wakes tags if `agreed` returns `Ok`, which is called when all that can fail is done.
pub(crate) fn wake_if(
    json: &str,
    wait: Duration,
    agreed: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    fork::check()?;
    let (names, until) = (names(json)?, Instant::now().checked_add(wait));
    // Leave is not kept during the wait for memory: the pools' guards end the wait when a capture
    // begins.
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let chosen = chosen(names.as_deref(), true)?;
    let _rooms = shared::rooms(&chosen)?;
    let moving = Moving::begin(&chosen);
    let prepared = chosen.iter().map(|&index| {
        let members = Members::of(index);
        let prepared = members.all().timeout(left(until)).prepare_wake();
        prepared.map_err(|cause| refused(index, cause))
    });
    // Memory that was prepared is taken away again after an error.
    let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
    agreed()?;
    for one in prepared {
        one.finish();
    }
    moving.end(|_| false);
    host::give_back_after(&chosen);
    Ok(())
}

/// Does every step of putting a tag to sleep that can fail: for the memory whose contents are kept,
/// and for the rest, of which only what is marked is kept.
fn prepare_sleep(
    index: usize,
    keep: Option<Host>,
    until: Option<Instant>,
) -> Result<Vec<PreparedSleep>, Error> {
    let members = Members::of(index);
    let mut state = lock();
    if let Some(after) = keep {
        state.tags[index].host = after;
    }
    state.blocks.get_or_insert_default().tell_marks(index)?;
    let has_graphs = state.tags[index].has_graphs;
    let marked = host::parts(state.marked(index));
    drop(state);
    let (kept, lost) = fates(has_graphs, keep.is_some());
    // Contents of paged caches are kept or lost with those of blocks that are no memory of graphs.
    let selected = |fate: &[&str], keeps: bool| {
        let blocks = members.selected(fate, keeps, keeps == keep.is_some());
        blocks.timeout(left(until))
    };
    let keeps = keep.is_some() || has_graphs || members.heaps.iter().any(|it| it.keeps);
    let prepare = |store: Option<&HostStore>| {
        let mut prepared = Vec::new();
        if let Some(store) = store.filter(|_| keeps) {
            prepared.push(selected(kept, true).prepare_sleep(Contents::Keep(store))?);
        }
        let contents = match store {
            Some(store) if marked > 0 => Contents::KeepMarked(store),
            _ => Contents::Discard,
        };
        match selected(lost, false).prepare_sleep(contents) {
            Ok(one) => prepared.push(one),
            Err(cause) => return Err(cancel(prepared).err().unwrap_or(cause)),
        }
        Ok(prepared)
    };
    let needed = host::needed(index, keep.is_some()) + marked;
    let store = match keeps || marked > 0 {
        true => Some(host::store(index, needed)?),
        false => None,
    };
    let mut prepared = prepare(store.as_ref());
    drop(store);
    if prepared.as_ref().is_err_and(host::is_unpinned) {
        prepared = prepare(Some(&host::pageable(index, needed)?));
    }
    prepared.map_err(|cause| refused(index, cause))
}

/// Returns the tags of a tenant's blocks whose contents are kept, and of those whose contents are lost,
/// if the contents of what is no memory of graphs are kept, or lost. No tag stands for all blocks.
pub(super) const fn fates(
    has_graphs: bool,
    keeps: bool,
) -> (&'static [&'static str], &'static [&'static str]) {
    match (has_graphs, keeps) {
        // Without blocks of graphs all have one fate.
        (false, true) => (&[], &[WRITTEN]),
        (false, false) => (&[KEPT], &[]),
        (true, true) => (&[PLAIN, KEPT], &[WRITTEN]),
        (true, false) => (&[KEPT], &[PLAIN, WRITTEN]),
    }
}

/// Ends what was prepared, with all as before.
///
/// # Errors
/// Some memory stays asleep.
fn cancel(prepared: Vec<PreparedSleep>) -> Result<(), SleepError> {
    let mut outcome = Ok(());
    for one in prepared {
        outcome = outcome.and(one.cancel());
    }
    outcome
}

/// Gives the cached memory of a tag up whose blocks sleep.
pub(super) fn give_up_cached(index: usize) {
    let (tenant, has_graphs) = {
        let state = lock();
        let tag = &state.tags[index];
        (tag.tenant.clone(), tag.has_graphs)
    };
    if has_graphs {
        // If a capture has begun meanwhile, the memory stays cached.
        let _ = tenant.blocks().release(true).sleep(Contents::Discard);
    }
}

/// Returns the time that is left until an instant; without one, as good as forever.
fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::MAX, |until| {
        until.saturating_duration_since(Instant::now())
    })
}
