//! Regions and containers in a tenant: charged, bound by limits and guarantees, reclaimed from, and
//! never where memory is in use.

use std::slice::from_ref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::books::{balanced, books};
use crate::common::{self, D0, G, Rig, host, limited, model, nothing_left, pool};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{Call, DeviceAddress, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, ContainerError, MemoryError};
use cuvmm::sparse::BrickShape;
use cuvmm::{
    Access, Contents, CowBuffer, DeviceVec, Hardened, Heap, Layout, Place, Pool, Region,
    RingBuffer, SparseArray, SparseGrid, Stream, Tenant,
};

/// Elements of a granule.
const PER_GRANULE: usize = G as usize / 4;

fn tenant(pool: &Pool, name: &str) -> Tenant {
    pool.tenant(name).register().unwrap()
}

fn stream(rig: &Rig<impl Backing>) -> Stream {
    Stream::new(&rig.device).unwrap()
}

/// Queues a kernel that writes to bytes of a region, and holds it back.
fn busy(rig: &Rig<impl Backing>, stream: &Stream, region: &Region, bytes: u64) {
    rig.held_kernel(stream, &[], &[(region.address(), bytes, 7)]);
}

fn is_short(error: &MemoryError) -> bool {
    matches!(error, MemoryError::Pool(cause) if matches!(**cause, BlockError::OutOfMemory(_)))
}

#[test]
fn containers_are_charged_beside_heaps_and_blocks() {
    charged(host());
    charged(model());
}

fn charged(rig: Rig<impl Backing>) {
    let pool = pool(&rig, 64);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let home = stream(&rig);
    let region = a.region(16 * G).largest_extent(G).home_stream(&home);
    let mut region = region.reserve().unwrap();
    let growing = a.region(32 * G).home_stream(&home).reserve().unwrap();
    let mut vector = DeviceVec::<u32>::from_region(growing, &home).unwrap();
    let array = SparseArray::<u32>::builder(&rig.device, &home, 64 * PER_GRANULE);
    let mut array = array.tile_bytes(G).in_tenant(&a).reserve().unwrap();
    let heap = Heap::builder(&b).build().unwrap();
    let block = b.allocate(3 * G).unwrap();
    let memory = heap.allocate(5 * G, 512, &home).unwrap();

    region.commit(0..4 * G).unwrap();
    vector.resize(3 * PER_GRANULE, 1).unwrap();
    array.commit(0..2 * PER_GRANULE).unwrap();
    let stats = books(&rig, &pool);
    let containers = region.held() + vector.held() + array.held();
    assert_eq!(stats.tenants[0].committed, containers);
    assert_eq!(a.stats().in_use, containers);
    assert_eq!(b.stats().in_use, 8 * G);

    region.decommit_after(0..2 * G, from_ref(&home)).unwrap();
    array.decommit(0..PER_GRANULE).unwrap();
    vector.clear();
    vector.shrink_to_fit().unwrap();
    let stats = books(&rig, &pool);
    assert_eq!(stats.tenants[0].committed, region.held() + array.held());
    assert_eq!(region.purge().unwrap().given_back, 2 * G);
    assert_eq!((region.held(), a.stats().committed), (2 * G, 3 * G));
    drop((region, vector, array));
    assert_eq!(a.stats().committed, 0);
    drop((block, memory, heap));
    books(&rig, &pool);
    drop((a, b, pool, home));
    nothing_left(rig);
}

#[test]
fn the_limits_of_pool_and_tenant_and_the_guarantees_of_others_hold() {
    let rig = model();
    let pool = pool(&rig, 8);
    let a = pool.tenant("a").limit(6 * G).register().unwrap();
    let b = pool.tenant("b").guarantee(4 * G).register().unwrap();
    let mut region = a.region(16 * G).largest_extent(G).reserve().unwrap();
    let refused = region.commit(0..5 * G).unwrap_err();
    assert!(
        is_short(&refused) && refused.is_out_of_memory(),
        "{refused}"
    );
    let shortage = refused.shortage().unwrap();
    assert_eq!(
        (shortage.wanted, shortage.guaranteed_to_others),
        (5 * G, 4 * G)
    );
    b.set_guarantee(0).unwrap();
    assert!(is_short(&region.commit(0..7 * G).unwrap_err()));
    assert_eq!(region.held(), 0);
    region.commit(0..6 * G).unwrap();
    assert!(
        b.try_allocate(3 * G).is_err(),
        "committed memory is never taken"
    );
    // What is withdrawn is reclaimed.
    region.decommit_after(2 * G..6 * G, &[]).unwrap();
    let block = b.try_allocate(6 * G).unwrap();
    assert_eq!(books(&rig, &pool).committed, 8 * G);
    assert!(is_short(&region.commit(0..6 * G).unwrap_err()));
    assert_eq!(region.committed(), 2 * G);
    drop(block);
    region.commit(0..6 * G).unwrap();
    drop(region);
    assert_eq!(a.stats().committed, 0);
}

// I-77
#[test]
fn what_another_tenant_wrote_reads_as_zero() {
    let rig = host();
    let pool = pool(&rig, 8);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let home = stream(&rig);
    for given in [Some(&home), None] {
        let mut region = match given {
            Some(home) => a.region(8 * G).home_stream(home).reserve().unwrap(),
            None => a.region(8 * G).reserve().unwrap(),
        };
        let block = b.allocate(8 * G).unwrap();
        for at in 0..8 {
            block.write(at * G, b"secret").unwrap();
        }
        drop(block);
        region.commit(0..8 * G).unwrap();
        for at in 0..8 {
            let mut bytes = [1; 6];
            region.read(&home, at * G, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 6]);
            region.write(&home, at * G, b"region").unwrap();
        }
        // Given away meanwhile, it comes back as zeros too.
        region.decommit_after(0..8 * G, from_ref(&home)).unwrap();
        drop(b.allocate(8 * G).unwrap());
        region.commit(0..8 * G).unwrap();
        let mut bytes = [1; 6];
        region.read(&home, 3 * G, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        region.write(&home, 3 * G, b"region").unwrap();
        drop(region);
        let block = b.allocate(8 * G).unwrap();
        block.read(3 * G, &mut bytes).unwrap();
        assert_eq!(
            bytes, [0; 6],
            "nor does another tenant see the region's bytes"
        );
    }
}

// I-76
#[test]
fn memory_under_queued_work_is_pending_and_a_drop_does_not_wait() {
    let rig = model();
    let pool = pool(&rig, 8);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let (home, work) = (stream(&rig), stream(&rig));
    let region = || common::committed(a.region(8 * G).home_stream(&home), 6 * G);
    let withdrawn = |mut region: Region| {
        region.decommit_after(0..6 * G, from_ref(&work)).unwrap();
        assert_eq!(region.pending_free(), 6 * G);
        assert_eq!(region.purge().unwrap().given_back, 0);
        Some(region)
    };
    let dropped = |region: Region| {
        drop(region);
        None
    };
    let ends: [&dyn Fn(Region) -> Option<Region>; 2] = [&withdrawn, &dropped];
    for end in ends {
        let region = region();
        busy(&rig, &work, &region, 6 * G);
        let region = end(region);
        assert_eq!(a.stats().pending_free, 6 * G);
        assert_eq!(
            b.try_allocate(3 * G)
                .unwrap_err()
                .shortage()
                .unwrap()
                .pending_free,
            6 * G
        );
        balanced(&rig, &pool);
        rig.machine.release_stream(D0, work.as_raw());
        drop(b.try_allocate(8 * G).unwrap());
        assert_eq!(a.stats().committed, 0);
        drop(region);
        books(&rig, &pool);
    }
}

#[test]
fn a_vectors_spare_capacity_is_never_taken_and_slack_needs_no_reclaim() {
    let rig = model();
    let pool = pool(&rig, 16);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let home = stream(&rig);
    let mut vector =
        DeviceVec::<u32>::from_region(a.region(64 * G).reserve().unwrap(), &home).unwrap();
    vector.reserve(4 * PER_GRANULE).unwrap();
    vector.reserve(5 * PER_GRANULE).unwrap();
    assert_eq!(vector.held(), 8 * G, "doubled");
    assert!(b.try_allocate(9 * G).is_err());
    drop(b.try_allocate(8 * G).unwrap());
    // Twice as much would take the memory that b has cached.
    vector.reserve(9 * PER_GRANULE).unwrap();
    assert_eq!(vector.held(), 9 * G);
    assert!(b.stats().cached < 8 * G);
    vector.shrink_to_fit().unwrap();
    assert_eq!(a.stats().committed, 0);
}

#[test]
fn revived_memory_is_taken_back_and_need_not_be_complete() {
    let rig = model();
    let pool = pool(&rig, 8);
    let a = tenant(&pool, "a");
    let work = stream(&rig);
    let mut region = common::committed(a.region(8 * G).largest_extent(2 * G), 8 * G);
    busy(&rig, &work, &region, 8 * G);
    region.decommit_after(0..8 * G, from_ref(&work)).unwrap();
    let before = rig.faults.total();
    region.commit(G..3 * G).unwrap();
    assert_eq!(rig.faults.total(), before, "two extents are mapped still");
    let stats = balanced(&rig, &pool);
    assert_eq!((stats.in_use, stats.pending_free), (4 * G, 4 * G));
    region.decommit_after(G..3 * G, &[]).unwrap();
    assert_eq!(
        region.purge().unwrap().given_back,
        0,
        "the kernel still uses them"
    );
    rig.machine.release_stream(D0, work.as_raw());
    assert_eq!(region.purge().unwrap().given_back, 8 * G);
    assert_eq!(region.mappings(), 0);
}

#[test]
fn what_the_pool_cannot_give_is_refused_by_the_builder() {
    let rig = model();
    let pool = pool(&rig, 8);
    let a = tenant(&pool, "a");
    let second = rig.second();
    let hardened = limited(&rig, 8)
        .hardened(Hardened::default())
        .build()
        .unwrap();
    let hard = tenant(&hardened, "hard");
    let refused = |outcome: Result<Region, MemoryError>| outcome.unwrap_err();
    let elsewhere = Region::builder(&second, G).in_tenant(&a).reserve();
    assert_eq!(
        refused(elsewhere),
        ArgumentError::WrongDevice("the tenant").into()
    );
    assert_eq!(
        refused(hard.region(G).reserve()),
        ArgumentError::HardenedPool.into()
    );
    let host = Layout::on(Place::HostNuma(0));
    let shareable = HandleTypes::POSIX_FD;
    for builder in [
        a.region(G).layout(host),
        a.region(G).shareable(shareable),
        a.region(G).rdma_capable(true),
    ] {
        assert!(matches!(
            refused(builder.reserve()),
            MemoryError::InTenant(_)
        ));
    }
    let stream = stream(&rig);
    let mut region = common::committed(a.region(4 * G), G);
    let here = Place::from(&rig.device);
    for refused in [
        region.commit_at(G..2 * G, &here).unwrap_err(),
        region.relocate(0..G, &here, &stream).unwrap_err(),
        region.back_with_zeros(0..4 * G).unwrap_err(),
    ] {
        assert!(matches!(refused, MemoryError::InTenant(_)), "{refused}");
    }
    drop(region);
    assert_eq!(books(&rig, &pool).addresses, 0);
    // A pool of exportable memory lends exportable memory.
    let exports = limited(&rig, 8).shareable(shareable).build().unwrap();
    let region = common::committed(tenant(&exports, "a").region(G), G);
    assert_eq!(region.export(0..G, shareable).unwrap().len(), 1);
}

#[test]
fn after_its_tenant_is_unregistered_a_container_does_not_grow() {
    let rig = common::clean(model());
    let pool = pool(&rig, 8);
    let a = tenant(&pool, "a");
    let mut region = common::committed(a.region(8 * G).largest_extent(G), 4 * G);
    a.clone().unregister();
    let refused = region.commit(0..5 * G).unwrap_err();
    assert!(
        matches!(&refused, MemoryError::Pool(it) if matches!(**it, BlockError::Unregistered(_))),
        "{refused}"
    );
    assert_eq!(a.stats().in_use, 4 * G);
    region.decommit_after(0..G, &[]).unwrap();
    region.commit(0..G).unwrap_err();
    drop(pool);
    assert_eq!(a.stats().in_use, 3 * G);
}

#[test]
fn memory_that_forks_and_aliases_show_is_charged_once() {
    let rig = host();
    let pool = pool(&rig, 16);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let home = stream(&rig);
    let region = a.region(8 * G).largest_extent(G).home_stream(&home);
    let mut region = common::committed(region, 4 * G);
    region.write(&home, 0, b"one").unwrap();
    let mut fork = region.fork(from_ref(&home)).unwrap();
    assert_eq!((a.stats().committed, a.stats().mappings), (4 * G, 8));
    fork.unshare(0..G, &home, &[]).unwrap();
    fork.write(&home, 0, b"two").unwrap();
    assert_eq!(
        (a.stats().committed, books(&rig, &pool).mappings),
        (5 * G, 8)
    );
    // What the fork still shows is not free.
    region.decommit_after(0..4 * G, from_ref(&home)).unwrap();
    b.try_allocate(13 * G).unwrap_err();
    assert_eq!(a.stats().in_use, 4 * G);
    assert_eq!(region.purge().unwrap().given_back, G);
    assert_eq!(
        (a.stats().committed, books(&rig, &pool).mappings),
        (4 * G, 4)
    );
    let mut bytes = [0; 3];
    fork.read(&home, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"two");
    // The fork is the only one that has the memory.
    fork.unshare(0..4 * G, &home, &[]).unwrap();
    fork.alias(0..2 * G, 6 * G).unwrap();
    assert_eq!(
        (a.stats().committed, books(&rig, &pool).mappings),
        (4 * G, 6)
    );
    fork.decommit_after(0..2 * G, from_ref(&home)).unwrap();
    assert_eq!((fork.held(), a.stats().in_use), (4 * G, 4 * G));
    assert!(b.try_allocate(13 * G).is_err());
    fork.decommit_after(6 * G..8 * G, from_ref(&home)).unwrap();
    assert_eq!(a.stats().in_use, 2 * G);
    drop(b.try_allocate(14 * G).unwrap());
    assert_eq!(books(&rig, &pool).tenants[0].committed, 2 * G);
    drop(region);
    assert_eq!(fork.committed(), 2 * G);
    drop(fork);
    assert_eq!(books(&rig, &pool).tenants[0].committed, 0);
}

#[test]
fn what_a_fork_shows_is_not_revived_but_given_up_first() {
    let rig = host();
    let pool = pool(&rig, 16);
    let a = tenant(&pool, "a");
    let home = stream(&rig);
    let mut region = common::committed(a.region(4 * G).home_stream(&home), 4 * G);
    region.write(&home, 0, b"shown").unwrap();
    let fork = region.fork(from_ref(&home)).unwrap();
    region.decommit_after(0..4 * G, from_ref(&home)).unwrap();
    region.commit(0..4 * G).unwrap();
    region.write(&home, 0, b"other").unwrap();
    let mut bytes = [0; 5];
    fork.read(&home, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"shown");
    assert_eq!(books(&rig, &pool).committed, 8 * G);
}

#[test]
fn registered_memory_stays_charged_until_the_registration_ends() {
    let rig = model();
    let pool = pool(&rig, 8);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let work = stream(&rig);
    let mut region = common::committed(a.region(8 * G).largest_extent(G), 4 * G);
    let registration = region.register(0..2 * G).unwrap();
    assert!(region.decommit(0..2 * G).is_err());
    busy(&rig, &work, &region, G);
    drop(region);
    rig.machine.release_stream(D0, work.as_raw());
    drop(b.try_allocate(6 * G).unwrap());
    assert_eq!(
        (a.stats().in_use, balanced(&rig, &pool).tenants[0].mappings),
        (2 * G, 2)
    );
    drop(registration);
    assert_eq!(a.stats().committed, 0);
    assert_eq!(books(&rig, &pool).tenants[0].addresses, 0);
}

#[test]
fn a_guest_has_access_to_memory_that_was_withdrawn_too() {
    let rig = host();
    let pool = pool(&rig, 8);
    let a = tenant(&pool, "a");
    let second = rig.second();
    let mut region = common::committed(a.region(4 * G).largest_extent(G), 4 * G);
    region.decommit(0..2 * G).unwrap();
    region.grant(&second, Access::Read).unwrap();
    region.commit(0..2 * G).unwrap();
    let theirs = Stream::new(&second).unwrap();
    region.read(&theirs, 0, &mut [0]).unwrap();
    region.revoke(&second).unwrap();
    assert_eq!(books(&rig, &pool).tenants[0].in_use, 4 * G);
    region.close().unwrap();
    assert_eq!(books(&rig, &pool).tenants[0].committed, 0);
}

#[test]
fn a_commit_in_a_capture_takes_memory_that_needs_no_clearing() {
    let rig = model();
    let pool = pool(&rig, 8);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    drop(b.allocate(4 * G).unwrap());
    pool.trim(4 * G).unwrap();
    let mut region = a.region(8 * G).largest_extent(G).reserve().unwrap();
    let guard = pool.capture_guard();
    region.commit(0..4 * G).unwrap();
    let before = rig.faults.total();
    region.decommit(0..G).unwrap();
    assert_eq!(
        (region.purge().unwrap().given_back, rig.faults.total()),
        (0, before)
    );
    let refused = region.commit(0..8 * G).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(region.committed(), 3 * G);
    drop(guard);
    region.commit(0..8 * G).unwrap();
    books(&rig, &pool);
}

#[test]
fn containers_stay_awake_and_the_result_names_their_bytes() {
    let rig = model();
    let pool = pool(&rig, 8);
    let a = tenant(&pool, "a");
    let block = a.allocate(2 * G).unwrap();
    let _region = common::committed(a.region(4 * G), 3 * G);
    let slept = a.blocks().sleep(Contents::Discard).unwrap();
    assert_eq!((slept.given, slept.awake), (2 * G, 3 * G));
    assert_eq!(a.stats().committed, 3 * G);
    a.blocks().wake().unwrap();
    drop(block);
}

#[test]
fn every_container_can_be_built_in_a_tenant() {
    let rig = host();
    let pool = pool(&rig, 64);
    let a = tenant(&pool, "a");
    let home = stream(&rig);
    let region = |granules: u64| a.region(granules * G).home_stream(&home).reserve().unwrap();
    let mut ring = RingBuffer::<u32>::from_region(region(8), &home).unwrap();
    assert_eq!(
        (ring.capacity(), a.stats().committed),
        (4 * PER_GRANULE, 4 * G)
    );
    ring.extend_from_slice(&[1, 2, 3]).unwrap();
    let mut now = CowBuffer::<u32>::from_region(region(2), &home, 2 * PER_GRANULE).unwrap();
    now.write(0, &[4]).unwrap();
    let then = now.snapshot().unwrap();
    assert_eq!(a.stats().committed, 6 * G);
    now.write(0, &[5]).unwrap();
    assert_eq!((now.get(0).unwrap(), then.get(0).unwrap()), (5, 4));
    let again = now.snapshot().unwrap();
    let peak = a.stats().peak;
    drop((then, again));
    now.write(PER_GRANULE, &[6]).unwrap();
    let stats = a.stats();
    assert_eq!((stats.peak, now.shared()), (peak, 0), "nothing was copied");
    let bricks = BrickShape::new([4 * PER_GRANULE], [PER_GRANULE]).unwrap();
    let grid = SparseGrid::<u32, 1>::builder(&rig.device, &home, bricks);
    let mut grid = grid.in_tenant(&a).reserve().unwrap();
    grid.commit_brick([2]).unwrap();
    grid.decommit_brick([2]).unwrap();
    grid.commit_brick([1]).unwrap();
    books(&rig, &pool);
    assert!(matches!(
        CowBuffer::<u32>::from_region(region(1), &home, 2 * PER_GRANULE),
        Err(ContainerError::Argument(_))
    ));
    drop((ring, now, grid));
    assert_eq!(books(&rig, &pool).tenants[0].committed, 0);
}

#[test]
fn a_commit_waits_for_memory_of_others() {
    let rig = model();
    let pool = pool(&rig, 4);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let long = Duration::from_secs(60);
    let mut region = a.region(4 * G).timeout(long).reserve().unwrap();
    let block = b.allocate(4 * G).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| region.commit(0..2 * G));
        thread::sleep(Duration::from_millis(20));
        drop(block);
        waits.join().unwrap().unwrap();
    });
    assert_eq!(region.committed(), 2 * G);
}

#[test]
fn a_commit_that_waits_has_nothing_out_that_another_waits_for() {
    let rig = model();
    let pool = pool(&rig, 8);
    let tenants = ["a", "b"].map(|name| tenant(&pool, name));
    let regions = tenants.each_ref().map(|tenant| {
        let region = tenant.region(8 * G).largest_extent(G);
        let mut region = common::committed(region.timeout(Duration::from_secs(60)), 4 * G);
        region.decommit_after(0..4 * G, &[]).unwrap();
        region
    });
    thread::scope(|scope| {
        for mut region in regions {
            scope.spawn(move || {
                for _ in 0..20 {
                    region.commit(0..8 * G).unwrap();
                    region.decommit_after(0..8 * G, &[]).unwrap();
                }
            });
        }
    });
    assert_eq!(pool.stats().committed, 0);
}

#[test]
fn a_commit_waits_for_the_end_of_a_removal() {
    let rig = model();
    let pool = pool(&rig, 8);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let mut region = common::committed(a.region(8 * G), 4 * G);
    region.decommit_after(0..4 * G, &[]).unwrap();
    let slow = Fault::delay_nth(1, Duration::from_millis(200));
    rig.faults.arm(slow.of(Call::MemUnmap));
    thread::scope(|scope| {
        let taken = scope.spawn(|| b.try_allocate(5 * G));
        thread::sleep(Duration::from_millis(50));
        region.commit(0..2 * G).unwrap();
        assert_eq!(taken.join().unwrap().unwrap().size(), 5 * G);
    });
    assert_eq!((region.held(), a.stats().committed), (2 * G, 2 * G));
    books(&rig, &pool);
}

#[test]
fn a_thread_grows_withdraws_and_drops_while_another_presses() {
    let rig = host();
    let pool = pool(&rig, 24);
    let (a, b) = (tenant(&pool, "a"), tenant(&pool, "b"));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let home = stream(&rig);
            let mut random = fastrand::Rng::with_seed(11);
            for _ in 0..12 {
                let region = a.region(16 * G).largest_extent(2 * G).home_stream(&home);
                let mut region = region.reserve().unwrap();
                for _ in 0..20 {
                    let start = random.u64(0..16);
                    let range = start * G..random.u64(start..16) * G + G;
                    if region.commit(range.clone()).is_ok() {
                        let at = DeviceAddress(region.address().0 + range.start);
                        rig.kernel(&home, &[], &[(at, G, 3)]);
                    }
                    let gone = region.committed_in(range).collect::<Vec<_>>();
                    for part in gone {
                        match random.u8(0..4) {
                            0 => region.decommit(part).unwrap(),
                            1 => region.decommit_after(part, from_ref(&home)).unwrap(),
                            _ => {}
                        }
                    }
                    if random.u8(0..8) == 0 {
                        region.purge().unwrap();
                    }
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
        scope.spawn(|| {
            let mut size = 0;
            while !ended.load(Ordering::SeqCst) {
                size = size % 24 + 1;
                drop(b.try_allocate(size * G));
            }
        });
    });
    assert_eq!(books(&rig, &pool).tenants[0].committed, 0);
}

#[test]
fn forks_made_and_dropped_in_turn_hold_no_mappings() {
    let rig = model();
    let pool = limited(&rig, 16).mapping_limit(24).build().unwrap();
    let a = tenant(&pool, "a");
    let mut region = common::committed(a.region(8 * G).largest_extent(G), 6 * G);
    // Withdrawn memory of a region that lives stays for it.
    region.decommit_after(4 * G..6 * G, &[]).unwrap();
    for _ in 0..9 {
        drop(region.fork(&[]).unwrap());
    }
    assert_eq!(region.held(), 6 * G);
    assert!(books(&rig, &pool).mappings <= 10);
}
