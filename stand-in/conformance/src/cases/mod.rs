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
    reserve::SIZE,
    reserve::ALIGNMENT,
    reserve::RESERVE_FLAGS,
    reserve::ADDRESS_SPACE,
    reserve::RESERVE_IS_FREE,
    hints::CASES,
    granularity::CASES,
    create::SIZE,
    create::CREATE_FLAGS,
    create::PLACE,
    create::TYPE,
    create::CREATE_HANDLE_TYPES,
    create::EXTRAS,
    create::ZERO,
    create::ACCOUNTING,
    map::WHOLE,
    map::ARGUMENTS,
    map::PLACE,
    map::OVERLAP,
    map::ALIAS,
    map::MAP_RELEASED,
    aliases::COPIED,
    aliases::BY_KERNELS,
    aliases::BY_PROGRAMMATIC,
    access::WHOLE,
    access::HOLES,
    access::ARGUMENTS,
    access::OTHERS,
    access::RIGHTS,
    unmap::WHOLE,
    unmap::HOLES,
    unmap::ARGUMENTS,
    free::WHOLE,
    free::MAPPED,
    lifetime::REFERENCES,
    lifetime::MAPPING,
    lifetime::RETAIN,
    lifetime::DESCRIPTOR,
    share::EXPORT,
    share::DESCRIPTOR,
    import::IMPORT,
    import::RIGHTS,
    ranges::RANGE,
    ranges::ATTRIBUTES,
    ranges::LEGACY,
    ranges::DMA_BUF,
    copies::RIGHTS,
    copies::ACROSS,
    copies::ASYNC,
    faults::CASES,
    waits::CASES,
    context::CASES,
    events::CASES,
    capture::MEMORY,
    capture::QUERIES,
    capture::REPLAY,
    capture_always::OF_CONTEXT,
    capture_always::OF_EVENTS,
    capture_unsafe::CASES,
    managed_capture::CASES,
    host_memory::RULE,
    host_memory::PINNED,
    host_memory::REGISTERED,
    seams::CASES,
    managed::ALLOC,
    managed::MOVES,
    advice::MOVES,
    advice::ADVICE,
    advice_ranges::CASES,
    plain::CASES,
    mem_pools::CREATE,
    mem_pools::ATTRIBUTES,
    mem_pools::CURRENT,
    mem_pool_order::KEEPS,
    mem_pool_order::ORDER,
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

/// Locations and grants of access.
mod places {
    use cuvmm_driver::{AccessDesc, AccessFlags, Location, LocationKind};

    pub(super) const NOWHERE: Location = place(LocationKind::INVALID, 0);

    /// The node of the host that the thread runs on.
    pub(super) const CURRENT_NODE: Location = place(LocationKind::HOST_NUMA_CURRENT, 0);

    pub(super) const fn place(kind: LocationKind, id: i32) -> Location {
        Location { kind, id }
    }

    /// Returns a grant of full access to a location.
    pub(super) const fn open_to(location: Location) -> AccessDesc {
        let flags = AccessFlags::READ_WRITE;
        AccessDesc { location, flags }
    }
}

/// Sizes with the names that case names use.
mod sizes {
    pub(super) const KIB: u64 = 1 << 10;
    pub(super) const MIB: u64 = 1 << 20;
    pub(super) const GIB: u64 = 1 << 30;
    pub(super) const TIB: u64 = 1 << 40;
}
