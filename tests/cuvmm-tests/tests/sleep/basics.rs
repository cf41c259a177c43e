//! Sleeping blocks: their memory is available to other tenants, their addresses stay, and kept
//! contents return.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::books::books;
use crate::common::{D0, G, Rig, mapped_pool, shareable};
use crate::on_both;
use cuvmm::driver::HandleTypes;
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, BlockError, MemoryError, ShareError, SleepError};
use cuvmm::sleep::{Progress, Slept, Woken};
use cuvmm::{Block, Contents, Device, HostStore, Mapper, Offer, Stream, Tenant};

fn store(device: &Device, granules: u64) -> HostStore {
    let builder = HostStore::builder(device).pinned(granules * G);
    builder.build().unwrap()
}

/// Returns bytes that differ in each granule and depend on where they were written.
fn pattern(size: u64, seed: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size as usize + 997);
    for part in 0..size.div_ceil(997) {
        let byte = part.wrapping_mul(31) as u8 ^ seed;
        bytes.resize(bytes.len() + 997, byte);
    }
    bytes.truncate(size as usize);
    bytes
}

fn write(block: &Block, seed: u8) {
    block.write(0, &pattern(block.size(), seed)).unwrap();
}

fn shows(rig: &Rig<impl Backing>, block: &Block, seed: u8) {
    let mut bytes = vec![0; block.size() as usize];
    block.read(0, &mut bytes).unwrap();
    if rig.keeps_bytes() {
        assert!(
            bytes == pattern(block.size(), seed),
            "the bytes differ from those kept"
        );
    }
}

fn sleeps(tenant: &Tenant, contents: Contents<'_>) -> Slept {
    tenant.blocks().sleep(contents).unwrap()
}

on_both! {
    fn what_could_not_be_scrubbed_for_waking_is_scrubbed_for_the_next(rig) {
        let pool = common::pool(rig, 16);
        let (tenant, other) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = cuvmm::Stream::new(&rig.device).unwrap();
        let sleeper = tenant.block(8 * common::G).home_stream(&stream).allocate().unwrap();
        tenant.blocks().release(true).sleep(cuvmm::Contents::Discard).unwrap();
        let secret = other.block(8 * common::G).home_stream(&stream).allocate().unwrap();
        secret.write(0, b"secret!!").unwrap();
        drop(secret);
        stream.synchronize().unwrap();
        drop(other);
        rig.faults.forget();
        let fault = cuvmm::driver::fault::Fault::all(cuvmm::driver::CUresult::CUDA_ERROR_UNKNOWN);
        rig.faults.arm(fault.of(cuvmm::driver::Call::MemsetD8Async));
        assert!(tenant.blocks().wake().is_err());
        rig.faults.disarm();
        assert!(sleeper.is_asleep());
        let next = tenant.block(8 * common::G).home_stream(&stream).allocate().unwrap();
        let mut bytes = [1; 8];
        next.read(0, &mut bytes).unwrap();
        assert!(bytes == [0; 8] || !rig.keeps_bytes(), "{bytes:?}");
    }

    fn memory_goes_and_comes_back_at_the_same_addresses(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [3 * G, 5 * G + 17].map(|size| tenant.allocate(size).unwrap());
        let addresses = blocks.each_ref().map(Block::address);
        let slept = sleeps(&tenant, Contents::Discard);
        assert_eq!((slept.blocks, slept.given, slept.kept), (2, 9 * G, 0));
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.mappings, stats.free), (0, 0, 9 * G));
        assert_eq!((stats.asleep, tenant.stats().blocks), (9 * G, 2));
        assert!(blocks.iter().all(Block::is_asleep));
        // Sleeping twice has no further effect.
        assert_eq!(sleeps(&tenant, Contents::Discard), Slept::default());
        // The memory is available to other tenants.
        let other = pool.tenant("other").register().unwrap();
        let theirs = other.allocate(30 * G).unwrap();
        drop(theirs);
        let woken = tenant.blocks().wake().unwrap();
        assert_eq!((woken.blocks, woken.mapped, woken.restored), (2, 9 * G, 0));
        assert_eq!(blocks.each_ref().map(Block::address), addresses);
        let stats = books(rig, &pool);
        assert_eq!((stats.in_use, stats.padding, stats.asleep), (8 * G + 17, G - 17, 0));
        for (seed, block) in (1..).zip(&blocks) {
            assert!(!block.is_asleep());
            // The other tenant's data is not visible.
            let mut bytes = vec![1; block.size() as usize];
            block.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0));
            write(block, seed);
            shows(rig, block, seed);
        }
        assert_eq!(tenant.blocks().wake().unwrap(), Woken::default());
    }

    // I-50
    fn a_sleeping_block_is_charged_to_no_tenant(rig) {
        let pool = common::pool(rig, 8);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(5 * G).unwrap();
        assert_eq!(tenant.stats().committed, 5 * G);
        sleeps(&tenant, Contents::Discard);
        let other = pool.tenant("other").register().unwrap();
        let theirs = other.allocate(8 * G).unwrap();
        let charged = || (tenant.stats().committed, other.stats().committed);
        assert_eq!(charged(), (0, 8 * G));
        assert!(tenant.blocks().wake().is_err());
        assert_eq!(charged(), (0, 8 * G));
        drop(theirs);
        tenant.blocks().wake().unwrap();
        assert_eq!(charged().0, 5 * G);
        drop(block);
    }

    fn what_is_kept_comes_back(rig) {
        let pool = common::pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let sizes = [11 * G + 5, 100, 3 * G, G];
        let blocks = sizes.map(|size| tenant.allocate(size).unwrap());
        for (seed, block) in (1..).zip(&blocks) {
            write(block, seed);
        }
        let pinned = store(&rig.device, 17);
        let ordinary = HostStore::builder(&rig.device).ordinary(17 * G).staging(5 * G);
        let mixed = HostStore::builder(&rig.device).ordinary(10 * G).pinned(7 * G);
        for store in [pinned, ordinary.build().unwrap(), mixed.build().unwrap()] {
            assert_eq!((store.capacity(), store.free()), (17 * G, 17 * G));
            let slept = sleeps(&tenant, Contents::Keep(&store));
            let bytes: u64 = sizes.iter().sum();
            assert_eq!((slept.blocks, slept.given, slept.kept), (4, 17 * G, bytes));
            assert_eq!(store.free(), 0);
            assert_eq!(books(rig, &pool).committed, 0);
            // Another tenant overwrites the memory.
            let other = pool.tenant("other").register().unwrap();
            write(&other.allocate(40 * G).unwrap(), 0xEE);
            let woken = tenant.blocks().wake().unwrap();
            assert_eq!((woken.blocks, woken.mapped, woken.restored), (4, 17 * G, bytes));
            assert_eq!(store.free(), 17 * G);
            for (seed, block) in (1..).zip(&blocks) {
                shows(rig, block, seed);
            }
            drop(other);
            books(rig, &pool);
        }
    }

    fn blocks_sleep_by_tag(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let block = |tag: &'static str| tenant.block(4 * G).tag(tag).allocate().unwrap();
        let (weights, cache, state) = (block("weights"), block("cache"), block("state"));
        let plain = tenant.allocate(G).unwrap();
        let store = store(&rig.device, 8);
        for (seed, block) in (1..).zip([&weights, &cache, &state, &plain]) {
            write(block, seed);
        }
        // Cached memory stays if not all blocks are put to sleep.
        drop(tenant.allocate(2 * G).unwrap());
        let chosen = tenant.blocks().tag("weights").tag("state");
        assert_eq!(chosen.sleep(Contents::Keep(&store)).unwrap().blocks, 2);
        let discarded = tenant.blocks().tag("cache").sleep(Contents::Discard).unwrap();
        assert_eq!((discarded.blocks, discarded.given), (1, 4 * G));
        assert_eq!(tenant.blocks().tag("nothing").sleep(Contents::Discard).unwrap().blocks, 0);
        let stats = tenant.stats();
        assert_eq!((stats.in_use, stats.asleep), (G, 12 * G));
        assert_eq!(stats.cached + stats.pending_free, 2 * G);
        assert_eq!((stats.tags["weights"], stats.tags["cache"]), (0, 0));
        shows(rig, &plain, 4);
        // The blocks wake one after the other.
        assert_eq!(tenant.blocks().tag("weights").wake().unwrap().restored, 4 * G);
        shows(rig, &weights, 1);
        assert!(cache.is_asleep() && state.is_asleep());
        // Without tags all other blocks are put to sleep, and cached memory is released.
        let all = sleeps(&tenant, Contents::Discard);
        assert_eq!((all.blocks, all.given), (2, 7 * G));
        assert_eq!(books(rig, &pool).committed, 0);
        assert_eq!(tenant.blocks().wake().unwrap().blocks, 4);
        shows(rig, &state, 3);
        assert_eq!(store.free(), 8 * G);
    }

    fn whoever_uses_a_block_keeps_it_awake(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let idle = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&stream, 4 * G - 1).unwrap();
        let other = tenant.allocate_on(&idle, G).unwrap();
        write(&other, 7);
        let store = store(&rig.device, 8);
        let lease = block.lease();
        let before = (books(rig, &pool).committed, rig.machine.snapshot());
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            let refused = tenant.blocks().sleep(contents);
            assert!(matches!(refused, Err(SleepError::Leased { blocks: 1, bytes }) if bytes == 4 * G - 1));
        }
        drop(lease);
        rig.held_kernel(&stream, &[], &[(block.address(), block.size(), 9)]);
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            let refused = tenant.blocks().sleep(contents);
            assert!(matches!(refused, Err(SleepError::Busy { blocks: 1, bytes }) if bytes == 4 * G - 1));
        }
        assert_eq!((books(rig, &pool).committed, rig.machine.snapshot()), before);
        assert_eq!(store.free(), 8 * G);
        shows(rig, &other, 7);
        // With a timeout the call waits for the work.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rig.machine.release_stream(D0, stream.as_raw());
            });
            let patient = tenant.blocks().timeout(Duration::from_secs(60));
            assert_eq!(patient.sleep(Contents::Keep(&store)).unwrap().blocks, 2);
        });
        tenant.blocks().wake().unwrap();
        if rig.keeps_bytes() {
            let mut bytes = [0; 3];
            block.read(4 * G - 4, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 3], "the kernel ran before the copy");
        }
        // It waits for a lease too.
        std::thread::scope(|scope| {
            let lease = block.lease();
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                drop(lease);
            });
            let patient = tenant.blocks().timeout(Duration::from_secs(60));
            assert_eq!(patient.sleep(Contents::Discard).unwrap().blocks, 2);
        });
    }

    // I-52
    fn waking_that_does_not_fit_leaves_all_asleep(rig) {
        let pool = common::pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [6 * G, 4 * G].map(|size| tenant.allocate(size).unwrap());
        write(&blocks[0], 1);
        write(&blocks[1], 2);
        let store = store(&rig.device, 10);
        sleeps(&tenant, Contents::Keep(&store));
        let other = pool.tenant("other").register().unwrap();
        let theirs = other.allocate(9 * G).unwrap();
        let before = rig.machine.snapshot();
        match tenant.blocks().wake() {
            Err(SleepError::Block { bytes, cause: BlockError::OutOfMemory(shortage) }) => {
                assert_eq!((bytes, shortage.wanted, shortage.available), (10 * G, 10 * G, 7 * G));
                assert_eq!(shortage.holders, [("other".to_string(), 9 * G)]);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.machine.snapshot(), before);
        let stats = books(rig, &pool);
        assert_eq!((stats.asleep, stats.committed), (10 * G, 9 * G));
        assert_eq!((stats.refusals, store.free()), (1, 0));
        // A waiting call succeeds when the other tenant is done.
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                drop(theirs);
            });
            let patient = tenant.blocks().timeout(Duration::from_secs(60));
            assert_eq!(patient.wake().unwrap().blocks, 2);
        });
        shows(rig, &blocks[0], 1);
        shows(rig, &blocks[1], 2);
    }

    fn a_guarantee_is_kept_for_who_sleeps(rig) {
        let pool = common::pool(rig, 16);
        let tenant = pool.tenant("model").guarantee(6 * G).register().unwrap();
        let block = tenant.allocate(10 * G).unwrap();
        sleeps(&tenant, Contents::Discard);
        let other = pool.tenant("other").register().unwrap();
        assert!(other.try_allocate(11 * G).is_err());
        let theirs = other.try_allocate(10 * G).unwrap();
        assert!(tenant.blocks().wake().is_err());
        assert!(block.is_asleep());
        drop(theirs);
        tenant.blocks().wake().unwrap();
    }

    fn a_sleeping_block_does_nothing_but_go(rig) {
        let pool = shareable(rig, 32).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = tenant.block(3 * G).capacity(9 * G).home_stream(&stream).allocate().unwrap();
        write(&block, 1);
        let store = store(&rig.device, 3);
        sleeps(&tenant, Contents::Keep(&store));
        let asleep = rig.machine.snapshot();
        assert!(matches!(
            block.grow_to(4 * G),
            Err(BlockError::Memory(MemoryError::Asleep(size))) if size == 3 * G
        ));
        assert!(matches!(block.try_grow_to(3 * G), Err(BlockError::Memory(MemoryError::Asleep { .. }))));
        assert!(matches!(block.shrink_to(G), Err(BlockError::Memory(MemoryError::Asleep { .. }))));
        assert!(matches!(block.read(0, &mut [0; 4]), Err(MemoryError::Asleep { .. })));
        assert!(matches!(block.write(0, &[0; 4]), Err(MemoryError::Asleep { .. })));
        assert!(matches!(
            block.export(HandleTypes::POSIX_FD),
            Err(MemoryError::Asleep(size)) if size == 3 * G
        ));
        assert!(matches!(Offer::block(&block), Err(ShareError::Memory(MemoryError::Asleep { .. }))));
        assert_eq!(rig.machine.snapshot(), asleep);
        // A lease taken while the block sleeps does not prevent waking.
        let lease = block.lease();
        tenant.blocks().wake().unwrap();
        drop(lease);
        shows(rig, &block, 1);
        block.grow_to(4 * G).unwrap();
        block.shrink_to(2 * G).unwrap();
        shows(rig, &block, 1);
        // Dropping a sleeping block frees its kept contents, and does not cache it for another
        // block.
        sleeps(&tenant, Contents::Keep(&store));
        assert_eq!(store.free(), G);
        drop(block);
        assert_eq!(store.free(), 3 * G);
        let next = tenant.block(2 * G).capacity(9 * G).home_stream(&stream).allocate().unwrap();
        assert!(!next.is_asleep());
        write(&next, 2);
        shows(rig, &next, 2);
        assert_eq!(books(rig, &pool).asleep, 0);
        // Then blocks are cached by stream again.
        drop(next);
        let calls = pool.calls().total();
        drop(tenant.block(2 * G).capacity(9 * G).home_stream(&stream).allocate().unwrap());
        assert_eq!(pool.calls().total(), calls);
    }

    fn exported_blocks_stay_awake(rig) {
        let pool = shareable(rig, 32).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(3 * G).unwrap();
        let other = tenant.allocate(G).unwrap();
        // Also while the export has a lease, whose end is not waited for.
        for exported in [Some(block.export(HandleTypes::POSIX_FD).unwrap()), None] {
            let refused = tenant.blocks().sleep(Contents::Discard);
            assert!(matches!(refused, Err(SleepError::Exported { blocks: 1, bytes: b }) if b == 3 * G));
            assert!(!other.is_asleep());
            drop(exported);
        }
    }

    fn what_the_store_cannot_keep_stays_awake(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [3 * G, 4 * G + 1].map(|size| tenant.allocate(size).unwrap());
        write(&blocks[1], 3);
        let small = store(&rig.device, 7);
        let before = rig.machine.snapshot();
        let full = tenant.blocks().sleep(Contents::Keep(&small));
        match full {
            Err(SleepError::StoreFull { wanted, free, capacity }) => {
                assert_eq!((wanted, free, capacity), (7 * G + 1, 7 * G, 7 * G));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!((rig.machine.snapshot(), small.free()), (before, 7 * G));
        let second = rig.second();
        let wrong = store(&second, 8);
        let refused = tenant.blocks().sleep(Contents::Keep(&wrong));
        assert!(matches!(refused, Err(SleepError::Argument(ArgumentError::WrongDevice { .. }))));
        // A clone is the same store. Contents kept in it outlive both handles.
        let large = store(&rig.device, 8);
        sleeps(&tenant, Contents::Keep(&large.clone()));
        drop(large);
        tenant.blocks().wake().unwrap();
        shows(rig, &blocks[1], 3);
    }

    fn a_store_needs_memory(rig) {
        let builder = HostStore::builder(&rig.device);
        assert!(matches!(builder.build(), Err(MemoryError::Argument(ArgumentError::Zero { .. }))));
        let huge = builder.pinned(u64::MAX).build();
        assert!(matches!(huge, Err(MemoryError::Argument(ArgumentError::Overflow { value: u64::MAX, .. }))));
        let huge = builder.ordinary(1 << 62).build();
        assert!(matches!(huge, Err(MemoryError::HostOutOfMemory { wanted, available })
            if wanted == 1 << 62 && available < wanted));
        let one = builder.pinned(1).build().unwrap();
        assert_eq!(one.capacity(), G, "whole parts");
    }

    // I-53
    fn cancelled_half_way_all_is_as_before(rig) {
        let pool = common::pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [9 * G, 10 * G, 8 * G].map(|size| tenant.allocate(size).unwrap());
        for (seed, block) in (1..).zip(&blocks) {
            write(block, seed);
        }
        let store = store(&rig.device, 27);
        let awake = (books(rig, &pool).committed, rig.machine.snapshot());
        let stop_at = AtomicU64::new(0);
        let watch = |progress: &cuvmm::sleep::Progress| {
            assert!(progress.done > 0 && progress.done <= progress.total);
            assert_eq!(progress.total, 27 * G);
            progress.done < stop_at.load(Ordering::Relaxed)
        };
        let watched = tenant.blocks().on_progress(&watch);
        for part in [1, 9 * G + 1, 20 * G] {
            stop_at.store(part, Ordering::Relaxed);
            for contents in [Contents::Discard, Contents::Keep(&store)] {
                let cancelled = watched.sleep(contents);
                assert!(matches!(cancelled, Err(SleepError::Cancelled)));
                assert_eq!((books(rig, &pool).committed, rig.machine.snapshot()), awake);
                assert_eq!(store.free(), 27 * G);
                for (seed, block) in (1..).zip(&blocks) {
                    assert!(!block.is_asleep());
                    shows(rig, block, seed);
                }
            }
        }
        sleeps(&tenant, Contents::Keep(&store));
        let asleep = (books(rig, &pool).committed, rig.machine.snapshot());
        for part in [1, 9 * G + 1, 20 * G] {
            stop_at.store(part, Ordering::Relaxed);
            assert!(matches!(watched.wake(), Err(SleepError::Cancelled)));
            assert_eq!((books(rig, &pool).committed, rig.machine.snapshot()), asleep);
            assert!(blocks.iter().all(Block::is_asleep));
        }
        tenant.blocks().wake().unwrap();
        for (seed, block) in (1..).zip(&blocks) {
            shows(rig, block, seed);
        }
        // A callback that panics midway does no harm either.
        let panics = |_: &cuvmm::sleep::Progress| -> bool { panic!("a mistake in a callback") };
        let watched = tenant.blocks().on_progress(&panics);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            watched.sleep(Contents::Keep(&store))
        }));
        assert!(panicked.is_err());
        assert_eq!(books(rig, &pool).asleep, 0);
        shows(rig, &blocks[2], 3);
        assert_eq!(store.free(), 27 * G);
        // The same holds while blocks wake: their contents stay kept.
        sleeps(&tenant, Contents::Keep(&store));
        for part in [1, 9 * G + 1, 20 * G] {
            let panics = |progress: &cuvmm::sleep::Progress| -> bool {
                assert!(progress.done < part, "a mistake in a callback");
                true
            };
            let watched = tenant.blocks().on_progress(&panics);
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| watched.wake()));
            assert!(panicked.is_err());
            assert_eq!((books(rig, &pool).committed, rig.machine.snapshot()), asleep);
        }
        assert_eq!(tenant.blocks().wake().unwrap().restored, 27 * G);
        for (seed, block) in (1..).zip(&blocks) {
            shows(rig, block, seed);
        }
        assert_eq!(store.free(), 27 * G);
    }

    fn zeros_are_owed_after_a_sleep_too(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let zeroed = tenant.block(G + 100).capacity(8 * G).zeroed(true).home_stream(&stream);
        let mut block = zeroed.allocate().unwrap();
        write(&block, 1);
        let soil = |granules: u64| write(&tenant.allocate(granules * G).unwrap(), 0xFF);
        sleeps(&tenant, Contents::Discard);
        soil(30);
        tenant.blocks().wake().unwrap();
        let mut bytes = vec![1; (G + 100) as usize];
        block.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
        // The kept contents are back. The memory that the block grows by is zero, in its last
        // granule as well.
        write(&block, 2);
        let store = store(&rig.device, 2);
        sleeps(&tenant, Contents::Keep(&store));
        soil(30);
        tenant.blocks().wake().unwrap();
        shows(rig, &block, 2);
        block.grow_to(5 * G).unwrap();
        let mut bytes = vec![1; (4 * G - 100) as usize];
        block.read(G + 100, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    fn memory_can_go_to_the_driver(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(8 * G).unwrap();
        drop(tenant.allocate(3 * G).unwrap());
        let slept = tenant.blocks().release(true).sleep(Contents::Discard).unwrap();
        assert_eq!(slept.given, 11 * G);
        assert_eq!(rig.machine.live().physical_bytes, 0);
        assert_eq!(books(rig, &pool).free, 0);
        tenant.blocks().wake().unwrap();
        assert_eq!(books(rig, &pool).in_use, 8 * G);
        drop(block);
    }

    fn a_mapper_puts_nothing_under_a_sleeper(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 64, &mapper);
        let tenant = pool.tenant("model").register().unwrap();
        let mut block = tenant.block(G).capacity(48 * G).allocate().unwrap();
        for size in 2..20 {
            block.grow_to(size * G).unwrap();
        }
        let slept = tenant.blocks().timeout(Duration::from_secs(60)).sleep(Contents::Discard);
        assert_eq!(slept.unwrap().blocks, 1);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(books(rig, &pool).committed, 0);
        tenant.blocks().wake().unwrap();
        for size in 20..40 {
            block.grow_to(size * G).unwrap();
        }
        drop((block, tenant, pool));
        mapper.stop();
    }

    fn a_draining_tenant_sleeps_but_does_not_wake(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let twin = tenant.clone();
        let block = tenant.allocate(3 * G).unwrap();
        tenant.unregister();
        sleeps(&twin, Contents::Discard);
        assert!(matches!(
            twin.blocks().wake(),
            Err(SleepError::Block { cause: BlockError::Unregistered { .. }, .. })
        ));
        assert_eq!(books(rig, &pool).committed, 0);
        drop(block);
        assert!(pool.stats().tenants.is_empty());
    }

    fn nothing_sleeps_while_a_guard_lives(rig) {
        let pool = common::pool(rig, 32);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(3 * G).unwrap();
        let guard = pool.capture_guard();
        assert!(matches!(
            tenant.blocks().sleep(Contents::Discard),
            Err(SleepError::Memory(MemoryError::Capturing))
        ));
        drop(guard);
        sleeps(&tenant, Contents::Discard);
        let guard = pool.capture_guard();
        assert!(matches!(tenant.blocks().wake(), Err(SleepError::Memory(MemoryError::Capturing))));
        drop(guard);
        tenant.blocks().wake().unwrap();
        drop(block);
    }
}

on_both! {
    fn what_a_wake_that_failed_had_copied_reaches_nobody_else(rig) {
        let pool = common::pool(rig, 8);
        let [model, other] = ["model", "other"].map(|name| pool.tenant(name).register().unwrap());
        let store = store(&rig.device, 8);
        let block = model.block(4 * G).largest_extent(G).allocate().unwrap();
        write(&block, 7);
        sleeps(&model, Contents::Keep(&store));
        // The block wakes in memory of the other tenant, which would get it back unscrubbed.
        let theirs = other.block(8 * G).largest_extent(G).allocate().unwrap();
        theirs.write(0, &vec![9; 8 * G as usize]).unwrap();
        drop(theirs);
        rig.device.synchronize().unwrap();
        // Waking is canceled after part of the memory has been copied.
        let watch = |progress: &Progress| progress.done == 0;
        model.blocks().on_progress(&watch).wake().unwrap_err();
        assert!(block.is_asleep());
        let theirs = other.block(8 * G).largest_extent(G).allocate().unwrap();
        let mut bytes = vec![0; 8 * G as usize];
        theirs.read(0, &mut bytes).unwrap();
        let models = pattern(4 * G, 7);
        if rig.keeps_bytes() {
            let shown = bytes.chunks(G as usize).any(|here| {
                models.chunks(G as usize).any(|kept| kept[1000..2000] == here[1000..2000])
            });
            assert!(!shown, "another tenant can read the model's kept contents");
        }
        drop(theirs);
        model.blocks().wake().unwrap();
        shows(rig, &block, 7);
        drop(block);
        books(rig, &pool);
    }
}
