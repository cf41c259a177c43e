//! The reasons why a process waits: older requests, and the processes that have memory.

use std::collections::BTreeMap;
use std::time::Duration;

use super::givers::Offer;
use super::layout::{Layout, Slot};
use super::seen::Seen;

/// The reason why a process waits. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct WaitStats {
    /// The bytes that the process's requests lack.
    pub lacks: u64,
    /// How long the oldest request had waited when it last tried.
    pub waited: Duration,
    /// The slots of the processes whose requests are older, the oldest first. Until these are
    /// served, the process is charged beyond its guarantee only for blocks that grow, and for new
    /// blocks that leave these requests waiting for nothing but memory that was charged before.
    pub behind: Vec<usize>,
    /// The processes that are charged more than their guarantees, in the order in which they are
    /// asked for memory.
    pub holders: Vec<HolderStats>,
}

/// A process that has memory which another one could get. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct HolderStats {
    /// The slot of the process.
    pub slot: usize,
    /// The process's charge above its guarantee: the most that it releases.
    pub above: u64,
    /// The part of `above` that the process could release without waiting, as it last found.
    pub idle: u64,
}

/// Returns the reasons of all live processes that wait, by slot.
pub(super) fn all(layout: &Layout, alive: &[usize], seen: &mut Seen) -> BTreeMap<usize, WaitStats> {
    let mut ticket = |index| seen.waiting_ticket(layout, index);
    let waiting = alive.iter();
    let waiting =
        waiting.filter_map(|&index| Some((ticket(index), index, layout.slots.get(index)?)));
    let mut waiting: Vec<(u64, usize, &Slot)> = waiting.filter(|it| it.0 != 0).collect();
    waiting.sort_by_key(|&(ticket, index, _)| (ticket, index));
    let offers = alive.iter();
    let offers = offers.filter_map(|&index| Offer::of(layout, index));
    let mut offers: Vec<Offer> = offers.filter(|offer| offer.above > 0).collect();
    offers.sort_by_key(Offer::order);
    let bytes = |granules: u64| granules.saturating_mul(layout.header.granule.load());
    let holder = |offer: &Offer| HolderStats {
        slot: offer.index,
        above: bytes(offer.above),
        idle: bytes(offer.idle),
    };
    let mut behind = Vec::new();
    let reasons = waiting.into_iter().map(|(_, index, slot)| {
        let others = offers.iter().filter(|offer| offer.index != index);
        let waits = WaitStats {
            lacks: bytes(slot.want.load()),
            waited: Duration::from_nanos(slot.waited.load()),
            behind: behind.clone(),
            holders: others.map(holder).collect(),
        };
        behind.push(index);
        (index, waits)
    });
    reasons.collect()
}
