//! A driver that panics while memory of a region is committed, withdrawn or replaced.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::panics::panics_at;
use crate::common::world::books;
use crate::common::{self, G, Rig, host, limited};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{Place, Region, Stream};

/// The granules of a region.
const COUNT: u64 = 8;

/// Writes its number, from 1, into each committed granule.
fn stamp(region: &mut Region, stream: &Stream) {
    for granule in 0..COUNT {
        let at = granule * G;
        if region.is_committed(at..at + G) {
            region.write(stream, at, &[granule as u8 + 1; 4]).unwrap();
        }
    }
}

/// Checks that all that is committed has memory, with its bytes or new, and that the rest is refused.
/// Returns the number of committed granules.
fn shows(region: &Region, stream: &Stream, is_new: fn(u64) -> bool) -> u64 {
    let mut committed = 0;
    for granule in 0..COUNT {
        let (at, mut seen) = (granule * G, [9; 4]);
        let read = region.read(stream, at, &mut seen);
        if region.is_committed(at..at + G) {
            committed += 1;
            read.unwrap();
            let new = is_new(granule) && seen == [0; 4];
            assert!(new || seen == [granule as u8 + 1; 4], "{granule}: {seen:?}");
        } else {
            let refused = matches!(read, Err(MemoryError::NotCommitted { .. }));
            assert!(refused, "{granule}: {read:?}");
        }
    }
    assert_eq!(region.committed(), committed * G);
    committed
}

/// Lets the driver panic in each call of `operate`, with `refuses` in one behind a refusal to unmap.
/// `prepare` makes the region.
fn each_call(
    refuses: bool,
    prepare: impl Fn(&Rig<HostMemory>, &Stream) -> Region,
    operate: impl Fn(&Rig<HostMemory>, &mut Region, &Stream),
    is_new: fn(u64) -> bool,
) {
    for nth in 1.. {
        assert!(nth < 200, "the operation never ends");
        let rig = host();
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = prepare(&rig, &stream);
        let before = region.committed();
        rig.faults.forget();
        if refuses {
            let fault = Fault::nth(5, CUresult::CUDA_ERROR_UNKNOWN);
            rig.faults.arm(fault.of(Call::MemUnmap));
        }
        let faults = std::sync::Arc::clone(&rig.faults);
        let counts = move |_| !refuses || faults.injected() > 0;
        let run = || operate(&rig, &mut region, &stream);
        let (outcome, panicked) = panics_at(&rig, nth, counts, run);
        rig.faults.disarm();
        assert_eq!(outcome.is_none(), panicked);
        stream.synchronize().unwrap();
        let committed = shows(&region, &stream, is_new) * G;
        // Extents of one granule are committed or pending.
        let extents: u64 = region.extents().iter().map(|it| it.size).sum();
        assert_eq!(extents, region.committed() + region.pending_free(), "{nth}");
        let lost = before.saturating_sub(committed);
        assert!(refuses || lost <= COUNT / 4 * G, "{nth}: {lost} lost");
        // Only addresses at which the driver panicked cannot be used.
        for granule in 0..COUNT {
            let at = granule * G;
            if let Err(error) = region.commit(at..at + G) {
                let known = matches!(
                    error,
                    MemoryError::Overlap { .. } | MemoryError::Quarantined { .. }
                );
                assert!(panicked && known, "{nth}: {error}");
            }
        }
        region.decommit(0..region.size().min(G)).unwrap_or(());
        drop(region);
        let live = rig.machine.live();
        let left = if panicked { 1 } else { 0 };
        assert!(refuses || live.mappings <= left, "{nth}: {live:?}");
        assert!(refuses || live.physicals <= left, "{nth}: {live:?}");
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
        if !panicked {
            return;
        }
    }
}

fn reserve(rig: &Rig<HostMemory>) -> Region {
    let builder = Region::builder(&rig.device, COUNT * G).largest_extent(G);
    builder.reserve().unwrap()
}

// I-130
#[test]
fn what_a_move_has_lost_is_committed_no_more() {
    let first: fn(&Rig<HostMemory>) -> Place = |rig| Place::from(&rig.device);
    let second: fn(&Rig<HostMemory>) -> Place = |rig| Place::from(&rig.second());
    let host: fn(&Rig<HostMemory>) -> Place = |_| Place::HostNuma(0);
    for (from, to) in [(first, host), (host, first), (first, second)] {
        for refuses in [false, true] {
            let prepare = |rig: &Rig<HostMemory>, stream: &Stream| {
                let mut region = reserve(rig);
                region.commit_at(0..COUNT * G, &from(rig)).unwrap();
                stamp(&mut region, stream);
                region
            };
            let operate = |rig: &Rig<HostMemory>, region: &mut Region, stream: &Stream| {
                drop(region.relocate(0..COUNT * G, &to(rig), stream));
            };
            each_call(refuses, prepare, operate, |_| false);
        }
    }
}

#[test]
fn what_a_commit_has_mapped_is_pending_or_committed() {
    let prepare = |rig: &Rig<HostMemory>, stream: &Stream| {
        let mut region = reserve(rig);
        region.commit(2 * G..4 * G).unwrap();
        stamp(&mut region, stream);
        region
    };
    let commit = |_: &Rig<HostMemory>, region: &mut Region, _: &Stream| {
        region.commit(0..6 * G).unwrap();
    };
    each_call(false, prepare, commit, |granule| !(2..4).contains(&granule));
    let purge = |_: &Rig<HostMemory>, region: &mut Region, _: &Stream| {
        region.decommit(2 * G..4 * G).unwrap();
        region.purge().unwrap();
    };
    each_call(false, prepare, purge, |_| true);
}

/// An operation on a region in a tenant, with extents of four granules and a fork of it.
type InTenant = fn(&mut Region, Option<Region>, &Stream) -> Result<(), MemoryError>;

// I-130
#[test]
fn a_tenant_is_charged_for_nothing_that_its_regions_lost() {
    let compact: InTenant = |region, _, stream| region.compact(stream).map(drop);
    let unshare: InTenant = |region, _fork, stream| {
        let all = 0..region.size();
        region.unshare(all, stream, &[]).map(drop)
    };
    let commit: InTenant = |region, _, _| region.commit(0..region.size());
    let purge: InTenant = |region, _, _| Ok(region.purge().map(drop)?);
    for (operate, forks) in [
        (compact, false),
        (unshare, true),
        (commit, false),
        (purge, false),
    ] {
        for nth in 1.. {
            assert!(nth < 200, "the operation never ends");
            let rig = host();
            let pool = limited(&rig, 32).build().unwrap();
            let [a, b] = common::tenants(&pool);
            let stream = Stream::new(&rig.device).unwrap();
            let region = a.region(COUNT * G).largest_extent(COUNT / 2 * G);
            let mut region = common::committed(region.home_stream(&stream), COUNT * G);
            stamp(&mut region, &stream);
            stream.synchronize().unwrap();
            if !forks {
                region.decommit(G..3 * G).unwrap();
                region.decommit(COUNT / 2 * G..COUNT * G).unwrap();
            }
            let fork = forks.then(|| region.fork(&[]).unwrap());
            // Memory that was used, for other extents.
            drop(b.allocate(6 * G).unwrap());
            let run = || operate(&mut region, fork, &stream);
            let (outcome, panicked) = panics_at(&rig, nth, |_| true, run);
            assert_eq!(outcome.is_none(), panicked, "{nth}");
            stream.synchronize().unwrap();
            shows(&region, &stream, |granule| granule > 0);
            books(&pool);
            drop(region);
            pool.trim(0).unwrap();
            let stats = pool.stats();
            assert_eq!(stats.free, 0, "{nth}: {stats:?}");
            // An extent whose unmapping panicked in a purge stays charged.
            let left = stats.committed + stats.quarantined;
            let most = if panicked { COUNT / 2 * G } else { 0 };
            assert!(left <= most, "{nth}: {stats:?}");
            drop(b.try_allocate(32 * G - left).unwrap());
            let hazards = rig.machine.take_hazards();
            assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
            if !panicked {
                break;
            }
        }
    }
}

/// The bytes of a region's zeros, in granules.
const ALIAS: u64 = 2;

// I-142
#[test]
fn a_panic_while_zeros_make_way_puts_the_others_back() {
    let range = 3 * G..6 * G;
    for removes in [true, false] {
        for nth in 1.. {
            assert!(nth < 200, "the operation never ends");
            let rig = host();
            let builder = Region::builder(&rig.device, COUNT * G).largest_extent(G);
            let mut region = builder.zero_extent(ALIAS * G).reserve().unwrap();
            region.back_with_zeros(0..COUNT * G).unwrap();
            let operate = || match removes {
                true => region.remove_zeros(range.clone()).map(drop),
                false => region.commit(range.clone()),
            };
            let (outcome, panicked) = panics_at(&rig, nth, |_| true, operate);
            assert_eq!(outcome.is_none(), panicked);
            if !panicked {
                break;
            }
            // Only at the addresses where the driver panicked there may be neither.
            let extents: u64 = region.extents().iter().map(|it| it.size).sum();
            let lacking = COUNT * G - extents - region.zero_backed();
            assert!(lacking <= ALIAS * G, "{nth}: {lacking}");
            // A mapping that may be left counts.
            let mappings = rig.machine.live().mappings as u64;
            assert!(
                !removes || mappings <= region.mappings(),
                "{nth}: {mappings}"
            );
            drop(region);
            assert!(rig.machine.live().mappings <= 1, "{nth}");
        }
    }
}

#[test]
fn what_a_purge_may_have_left_mapped_is_quarantined_once_and_charged_to_no_tenant() {
    for refuses in [false, true] {
        let rig = host();
        let pool = limited(&rig, 8).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let region = tenant.region(3 * G).largest_extent(G);
        let mut region = region.reserve().unwrap();
        region.commit(0..3 * G).unwrap();
        region.decommit(0..3 * G).unwrap();
        let (faults, seen) = (Arc::clone(&rig.faults), AtomicU64::new(0));
        let unmaps = move |call| {
            let unmaps = call == Call::MemUnmap;
            if unmaps && seen.fetch_add(1, Ordering::SeqCst) == 1 && refuses {
                faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
            }
            unmaps
        };
        let (_, panicked) = panics_at(&rig, 2, unmaps, || region.purge());
        assert!(panicked);
        rig.faults.disarm();
        let lost = u64::from(refuses);
        let told = || {
            pool.trim(8 * G).unwrap();
            let books = books(&pool);
            [books.committed, books.free, books.quarantined].map(|bytes| bytes / G)
        };
        assert_eq!(told(), [1, 2 - lost, lost]);
        region.purge().unwrap();
        assert_eq!(told(), [0, 3 - lost, lost]);
        // Its addresses stay out of use.
        assert_eq!(region.commit(G..2 * G).is_err(), refuses);
        drop((region, tenant));
        pool.trim(0).unwrap();
        let stats = pool.stats();
        assert!(stats.tenants.is_empty(), "{stats:?}");
        assert_eq!(
            (stats.committed, stats.free, stats.quarantined),
            (0, 0, lost * G)
        );
        assert_eq!(rig.machine.live().physical_bytes, lost * G);
        assert!(stats.mappings >= lost);
    }
}

// I-149
#[test]
fn memory_that_a_panic_may_have_left_mapped_by_a_fork_is_not_free() {
    let rig = host();
    let pool = limited(&rig, 8).build().unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let mut region = common::committed(tenant.region(2 * G).largest_extent(2 * G), 2 * G);
    let maps = |call| call == Call::MemMap;
    let (_, panicked) = panics_at(&rig, 1, maps, || region.fork(&[]));
    assert!(panicked);
    drop((region, tenant));
    pool.trim(0).unwrap();
    let stats = pool.stats();
    let has = stats.committed + stats.quarantined;
    assert_eq!((has, stats.free), (2 * G, 0), "{stats:?}");
    assert_eq!(rig.machine.live().physical_bytes, 2 * G);
}
