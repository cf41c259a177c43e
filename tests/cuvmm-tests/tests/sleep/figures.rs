//! Figures and limits of sleep and wake: progress, timeouts, memory released to the driver, and the
//! store's allocations.

use std::sync::Mutex;
use std::time::Duration;

use crate::common::books::books;
use crate::common::{G, MIB, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call, Location};
use cuvmm::error::{BlockError, MemoryError, SleepError};
use cuvmm::sleep::Progress;
use cuvmm::{Block, Contents, HostStore};

on_both! {
    fn a_deadline_that_is_as_good_as_never_is_waited_for(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(10 * G).unwrap();
        let patient = tenant.blocks().timeout(Duration::MAX);
        std::thread::scope(|scope| {
            let lease = block.lease();
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                drop(lease);
            });
            assert_eq!(patient.sleep(Contents::Discard).unwrap().blocks, 1);
        });
        let other = pool.tenant("other").register().unwrap();
        let theirs = other.allocate(10 * G).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                drop(theirs);
            });
            assert_eq!(patient.wake().unwrap().blocks, 1);
        });
    }

    fn one_event_covers_all_blocks_without_a_stream(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks: Vec<Block> = (0..32).map(|_| tenant.allocate(G).unwrap()).collect();
        let before = pool.stats().calls;
        tenant.blocks().release(true).sleep(Contents::Discard).unwrap();
        let calls = pool.stats().calls.since(&before);
        assert_eq!(calls.count(Call::EventCreate), 1);
        assert_eq!((calls.count(Call::MemUnmap), calls.count(Call::MemRelease)), (32, 32));
        assert!(calls.total() <= 64 + 6, "{calls:?}");
        assert!(blocks.iter().all(Block::is_asleep));
    }

    fn whoever_watches_hears_how_far_it_is(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let sizes = [9 * G, 10 * G - 5, 8 * G];
        let blocks = sizes.map(|size| tenant.allocate(size).unwrap());
        let store = HostStore::builder(&rig.device).pinned(27 * G).build().unwrap();
        let told = Mutex::new(vec![]);
        let watch = |progress: &Progress| {
            assert_eq!(progress.total, 27 * G - 5);
            told.lock().unwrap().push(progress.done);
            true
        };
        let watched = tenant.blocks().on_progress(&watch);
        // Differences between successive reports.
        let steps = || -> Vec<u64> {
            let told = std::mem::take(&mut *told.lock().unwrap());
            assert_eq!(told.last(), Some(&(27 * G - 5)));
            let before = [0].into_iter().chain(told.iter().copied());
            before.zip(&told).map(|(before, now)| now - before).collect()
        };
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            let kept = matches!(contents, Contents::Keep(_));
            let right = |mut steps: Vec<u64>| {
                steps.sort_unstable();
                match kept {
                    true => assert!(steps.iter().all(|step| (1..=16 * MIB).contains(step)), "{steps:?}"),
                    // Block by block.
                    false => assert_eq!(steps, [8 * G, 9 * G, 10 * G - 5]),
                }
            };
            watched.sleep(contents).unwrap();
            right(steps());
            watched.wake().unwrap();
            right(steps());
        }
        drop(blocks);
    }

    fn only_what_slept_goes_to_the_driver(rig) {
        let pool = pool(rig, 64);
        let [tenant, other] = ["model", "other"].map(|name| pool.tenant(name).register().unwrap());
        let theirs = other.allocate(4 * G).unwrap();
        other.blocks().sleep(Contents::Discard).unwrap();
        assert_eq!(books(rig, &pool).free, 4 * G);
        let weights = tenant.block(8 * G).tag("weights").allocate().unwrap();
        let rest = tenant.allocate(G).unwrap();
        drop(tenant.allocate(3 * G).unwrap());
        // The memory that it took from the free list was there already.
        let held = rig.machine.live().physical_bytes;
        let of_weights = tenant.blocks().tag("weights").release(true);
        assert_eq!(of_weights.sleep(Contents::Discard).unwrap().given, 8 * G);
        assert_eq!(rig.machine.live().physical_bytes, held - 8 * G);
        let free_list = books(rig, &pool).free;
        let slept = tenant.blocks().release(true).sleep(Contents::Discard).unwrap();
        assert_eq!((slept.blocks, slept.given), (1, 4 * G));
        let stats = books(rig, &pool);
        assert_eq!((stats.committed, stats.free), (0, free_list));
        drop((weights, rest, theirs));
    }

    fn a_driver_without_memory_is_told_of_with_all_that_was_to_wake(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [6 * G, 4 * G - 1].map(|size| tenant.allocate(size).unwrap());
        let store = HostStore::builder(&rig.device).pinned(10 * G).build().unwrap();
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            tenant.blocks().release(true).sleep(contents).unwrap();
            let free = store.free();
            let before = rig.machine.snapshot();
            // Part of the memory can be created.
            rig.faults.forget();
            let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            rig.faults.arm(Fault::from(2, code).of(Call::MemCreate));
            let refused = tenant.blocks().wake();
            rig.faults.disarm();
            assert!(matches!(
                refused,
                Err(SleepError::Block { bytes, cause: BlockError::DriverOutOfMemory { .. } })
                    if bytes == 10 * G
            ), "{refused:?}");
            assert!(blocks.iter().all(Block::is_asleep));
            assert_eq!((store.free(), rig.machine.snapshot().mappings), (free, before.mappings));
            let stats = books(rig, &pool);
            assert_eq!((stats.committed, stats.asleep), (0, 10 * G));
            assert_eq!(tenant.blocks().wake().unwrap().mapped, 10 * G);
        }
    }

    fn what_a_block_held_that_cannot_stay_awake_comes_back(rig) {
        let pool = pool(rig, 64);
        let tenant = pool.tenant("model").register().unwrap();
        let blocks = [4 * G, 8 * G - 9].map(|size| tenant.allocate(size).unwrap());
        for block in &blocks {
            let bytes: Vec<u8> = (0..block.size()).map(|at| (at / 911) as u8).collect();
            block.write(0, &bytes).unwrap();
        }
        let store = HostStore::builder(&rig.device).pinned(12 * G).build().unwrap();
        // The second block's only extent cannot be unmapped, and the first block's cannot be put
        // back, in both attempts.
        rig.faults.forget();
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(2, code).of(Call::MemUnmap));
        for nth in [1, 2] {
            rig.faults.arm(Fault::nth(nth, code).of(Call::MemMap));
        }
        let outcome = tenant.blocks().sleep(Contents::Keep(&store)).unwrap_err();
        rig.faults.disarm();
        let SleepError::Stayed { blocks: stayed, bytes, cause } = outcome else { panic!("{outcome}") };
        assert!(matches!(*cause, SleepError::Memory(MemoryError::Call(_))), "{cause}");
        let asleep: Vec<&Block> = blocks.iter().filter(|block| block.is_asleep()).collect();
        assert_eq!((stayed, asleep.len(), bytes), (1, 1, asleep[0].size()));
        assert_eq!(store.free(), 12 * G - asleep[0].size().next_multiple_of(G));
        assert_eq!(tenant.blocks().wake().unwrap().restored, bytes);
        for block in &blocks {
            let mut bytes = vec![1; block.size() as usize];
            block.read(0, &mut bytes).unwrap();
            let right = bytes.iter().enumerate().all(|(at, &byte)| byte == (at / 911) as u8);
            assert!(right || !rig.keeps_bytes());
        }
        assert_eq!(store.free(), 12 * G);
    }

    fn a_store_is_what_was_asked_for(rig) {
        let live = || {
            let live = rig.machine.live();
            (live.registered, live.streams)
        };
        let of = || HostStore::builder(&rig.device);
        let before = live();
        // Pinned memory of up to 64 MiB is one registration, and so is the staging area of ordinary
        // memory, of which each stream has at least one part.
        for (builder, capacity, pinned, streams) in [
            (of().pinned(7 * G), 7 * G, 1, None),
            (of().ordinary(5 * G - 1).staging(1), 5 * G, 1, Some(1)),
            (of().ordinary(G + 1).staging(3 * G).pinned(1), 3 * G, 2, Some(3)),
        ] {
            let store = builder.build().unwrap();
            assert_eq!(store.device(), &rig.device);
            assert_eq!((store.capacity(), store.free()), (capacity, capacity));
            let has = live();
            assert_eq!(has.0 - before.0, pinned);
            assert!(streams.is_none_or(|streams| has.1 - before.1 == streams), "{has:?}");
            // The store works, however small its arena is.
            let pool = pool(rig, 16);
            let tenant = pool.tenant("model").register().unwrap();
            let block = tenant.allocate(capacity - 3).unwrap();
            let bytes: Vec<u8> = (0..capacity - 3).map(|at| (at / 911) as u8).collect();
            block.write(0, &bytes).unwrap();
            tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
            assert_eq!(store.free(), 0);
            tenant.blocks().wake().unwrap();
            let mut seen = vec![1; bytes.len()];
            block.read(0, &mut seen).unwrap();
            assert!(!rig.keeps_bytes() || seen == bytes);
            drop((block, tenant, pool));
            // The store lives as long as a clone does.
            let clone = store.clone();
            drop(store);
            assert_eq!((clone.free(), live().0), (capacity, has.0));
            drop(clone);
            assert_eq!(live(), before);
        }
    }

    fn a_store_that_cannot_be_had_leaves_nothing(rig) {
        let builder = HostStore::builder(&rig.device).pinned(3 * G).ordinary(G).staging(G);
        // The first registration only shows whether the driver registers memory.
        for (call, nth) in [(Call::MemHostRegister, 2), (Call::MemHostRegister, 3), (Call::StreamCreate, 1)] {
            rig.faults.forget();
            rig.faults.arm(Fault::nth(nth, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(call));
            let refused = builder.build();
            rig.faults.disarm();
            match refused.unwrap_err() {
                MemoryError::Create { size, location: Location::HOST, .. } => {
                    assert_eq!((call, size), (Call::MemHostRegister, if nth == 2 { G } else { 3 * G }));
                }
                MemoryError::Call(_) => assert_eq!(call, Call::StreamCreate),
                other => panic!("{other}"),
            }
            assert!(rig.machine.live().is_nothing());
        }
        drop(builder.build().unwrap());
    }
}
