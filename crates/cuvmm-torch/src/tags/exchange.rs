//! Exchange of tags: some fall asleep while others wake in their memory.

use std::sync::PoisonError;

use cuvmm::{Contents, Exchange, HostStore, SleepError};

use super::host::Host;
use super::members::Members;
use super::moving::{MOVING, Moving};
use super::sleep::{LONGEST, fates, give_up_cached};
use super::{chosen, host, lock, names, refused, shared};
use crate::error::Error;
use crate::{fork, graphs};

/// Puts tags to sleep and wakes others, as `cuvmm_exchange` describes.
///
/// # Errors
/// The errors of sleep and wake. All tags are as before, except that a tag sleeps if the driver
/// refuses to restore its memory.
pub(crate) fn exchange(sleep: &str, wake: &str, after: Host) -> Result<(), Error> {
    fork::check()?;
    let (sleep, wake) = (names(sleep)?, names(wake)?);
    // Leave is not kept during the wait for work: the pools' guards end the wait when a capture
    // begins.
    drop(graphs::waiting().ok_or(Error::Capturing)?);
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let sleep = chosen(sleep.as_deref(), false)?;
    let wake = chosen(wake.as_deref(), true)?;
    let all = [sleep.as_slice(), wake.as_slice()].concat();
    shared::refuse(&all)?;
    let moving = Moving::begin(&all);
    exchange_chosen(&sleep, &wake, after)?;
    sleep.iter().for_each(|&index| give_up_cached(index));
    moving.end(|at| at < sleep.len());
    host::give_back_after(&wake);
    Ok(())
}

fn exchange_chosen(sleep: &[usize], wake: &[usize], after: Host) -> Result<(), Error> {
    let Some(&named) = sleep.iter().chain(wake).next() else {
        return Ok(());
    };
    for &index in sleep {
        let mut state = lock();
        state.tags[index].host = after;
        state.blocks.get_or_insert_default().tell_marks(index)?;
    }
    let needed = |index: &usize| host::needed(*index, true);
    let stores = sleep.iter().map(|index| host::store(*index, needed(index)));
    let stores: Vec<HostStore> = stores.collect::<Result<_, _>>()?;
    let mut exchanged = run(sleep, wake, &stores);
    drop(stores);
    if exchanged.as_ref().is_err_and(host::is_unpinned) {
        let stores = sleep.iter();
        let stores = stores.map(|index| host::pageable(*index, needed(index)));
        exchanged = run(sleep, wake, &stores.collect::<Result<Vec<_>, _>>()?);
    }
    exchanged.map_err(|cause| refused(named, cause))
}

/// Tags with memory of graphs go in turn, because some of it may be lost. What is marked is kept.
fn run(sleep: &[usize], wake: &[usize], stores: &[HostStore]) -> Result<(), SleepError> {
    let [falling, waking] = [sleep, wake].map(|chosen| {
        let each = chosen.iter().map(|&index| Members::of(index));
        each.collect::<Vec<Members>>()
    });
    let mut exchange = Exchange::new();
    for ((&index, members), store) in sleep.iter().zip(&falling).zip(stores) {
        let state = lock();
        let has_graphs = state.tags[index].has_graphs;
        let is_marked = state.marked(index).next().is_some();
        drop(state);
        let (kept, lost) = fates(has_graphs, true);
        let selected = |fate: &[&'static str], keeps: bool| {
            members.selected(fate, keeps, keeps).timeout(LONGEST)
        };
        exchange = exchange.sleep(selected(kept, true), Contents::Keep(store));
        if has_graphs || members.heaps.iter().any(|it| !it.keeps) {
            let contents = match is_marked {
                true => Contents::KeepMarked(store),
                false => Contents::Discard,
            };
            exchange = exchange.sleep(selected(lost, false), contents);
        }
    }
    for members in &waking {
        exchange = exchange.wake(members.all().timeout(LONGEST));
    }
    exchange.run().map(drop)
}
