//! The cases, in files by call or subject.

mod access;
mod advice;
mod advice_ranges;
mod aliases;
mod capture;
mod capture_always;
mod capture_unsafe;
mod context;
mod copies;
mod create;
mod events;
mod faults;
mod free;
mod granularity;
mod hints;
mod host_memory;
mod import;
mod lifetime;
mod limits;
mod managed;
mod managed_capture;
mod map;
mod mem_pool_order;
mod mem_pool_parts;
mod mem_pool_share;
mod mem_pools;
mod peer;
mod plain;
mod ranges;
mod reserve;
mod seams;
mod share;
mod unmap;
mod waits;

use crate::Case;

const GROUPS: &[&[Case]] = &[
    reserve::CASES,
    hints::CASES,
    granularity::CASES,
    create::CASES,
    map::CASES,
    aliases::CASES,
    access::CASES,
    unmap::CASES,
    free::CASES,
    lifetime::CASES,
    share::CASES,
    import::CASES,
    ranges::CASES,
    copies::CASES,
    faults::CASES,
    waits::CASES,
    context::CASES,
    events::CASES,
    capture::CASES,
    capture_always::OF_CONTEXT,
    capture_always::OF_EVENTS,
    capture_unsafe::CASES,
    managed_capture::CASES,
    host_memory::CASES,
    seams::CASES,
    managed::CASES,
    advice::CASES,
    advice_ranges::CASES,
    plain::CASES,
    mem_pools::CASES,
    mem_pool_order::CASES,
    mem_pool_share::CASES,
    mem_pool_parts::CASES,
    limits::CASES,
    peer::CASES,
];

/// Returns every case, in the order in which they are run.
pub fn all() -> impl Iterator<Item = &'static Case> {
    GROUPS.iter().copied().flatten()
}

/// Returns the case with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Case> {
    all().find(|case| case.name() == name)
}

/// Sizes with the names that case names use.
mod sizes {
    pub(super) const KIB: u64 = 1 << 10;
    pub(super) const MIB: u64 = 1 << 20;
    pub(super) const GIB: u64 = 1 << 30;
    pub(super) const TIB: u64 = 1 << 40;
}
