//! Stores that grow as contents come, and give memory back.

use std::sync::Mutex;

use crate::common::world::books;
use crate::common::{G, MIB, Rig, host, pool};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{MemoryError, SleepError};
use cuvmm::{Block, Contents, HostStore, Pool, Tenant};

const REFUSED: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;

/// The size in which a store takes memory.
const PIECE: u64 = 64 * MIB;

fn growing<B: Backing>(rig: &Rig<B>, limit: u64) -> HostStore {
    HostStore::builder(&rig.device)
        .limit(limit)
        .build()
        .unwrap()
}

/// A tenant with blocks of these sizes, whose bytes tell where they are.
fn blocks<B: Backing>(rig: &Rig<B>, sizes: &[u64]) -> (Pool, Tenant, Vec<Block>) {
    let pool = pool(rig, 128);
    let tenant = pool.tenant("model").register().unwrap();
    let blocks = sizes.iter().enumerate().map(|(index, &size)| {
        let block = tenant.allocate(size).unwrap();
        block.write(0, &contents(index, size)).unwrap();
        block
    });
    let blocks = blocks.collect();
    (pool, tenant, blocks)
}

fn contents(index: usize, size: u64) -> Vec<u8> {
    let bytes = 0..size as usize;
    bytes.map(|at| (at / 4093 + 31 * index) as u8).collect()
}

fn assert_contents<B: Backing>(rig: &Rig<B>, blocks: &[Block]) {
    for (index, block) in blocks.iter().enumerate() {
        let mut seen = vec![0; block.size() as usize];
        block.read(0, &mut seen).unwrap();
        assert!(
            !rig.keeps_bytes() || seen == contents(index, block.size()),
            "block {index}"
        );
    }
}

on_both! {
    fn a_store_grows_as_contents_come(rig) {
        let sizes = [3 * G, 40 * G + 1, 5 * G];
        let (_pool, tenant, blocks) = blocks(rig, &sizes);
        let store = growing(rig, 100 * G);
        assert_eq!((store.capacity(), store.free(), store.limit()), (0, 0, 100 * G));
        assert_eq!(rig.machine.live().registered, 0, "what showed that memory is registered");

        let slept = tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        assert_eq!(slept.kept, 48 * G + 1);
        assert_eq!((store.capacity(), store.free()), (49 * G, 0));
        assert_eq!(rig.machine.live().registered, 2, "64 MiB, and the rest");
        assert_eq!(store.shrink_to(0), 0, "all of it has contents");

        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
        assert_eq!((store.capacity(), store.free()), (49 * G, 49 * G));

        // The next sleep takes what is there, and no more.
        let calls = rig.device.calls();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
        let calls = rig.device.calls().since(&calls);
        assert_eq!(calls.count(Call::MemHostRegister), 0);

        assert_eq!(store.shrink_to(49 * G), 0);
        let given = store.shrink_to(48 * G);
        assert!([17 * G, 32 * G].contains(&given), "one piece: {given}");
        assert_eq!(store.capacity(), 49 * G - given);
        assert_eq!(store.shrink_to(0), 49 * G - given);
        assert_eq!((store.capacity(), store.free()), (0, 0));
        assert_eq!(rig.machine.live().registered, 0);
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
    }

    fn memory_is_taken_beyond_what_is_free(rig) {
        let (_pool, tenant, blocks) = blocks(rig, &[G, 6 * G]);
        let store = HostStore::builder(&rig.device).pinned(2 * G).limit(9 * G).build().unwrap();
        assert_eq!((store.capacity(), store.limit()), (2 * G, 9 * G));
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        assert_eq!((store.capacity(), store.free()), (7 * G, 0));
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
        // A limit below what the store is built with is that.
        let store = HostStore::builder(&rig.device).pinned(2 * G).limit(G).build().unwrap();
        assert_eq!((store.capacity(), store.limit()), (2 * G, 2 * G));
    }

    fn the_limit_is_kept(rig) {
        let (pool, tenant, blocks) = blocks(rig, &[3 * G, 4 * G]);
        let store = growing(rig, 6 * G);
        let before = books(&pool);
        match tenant.blocks().sleep(Contents::Keep(&store)).unwrap_err() {
            SleepError::StoreFull { wanted, free, capacity } => {
                assert_eq!((wanted, free, capacity), (7 * G, 6 * G, 6 * G));
            }
            other => panic!("{other}"),
        }
        assert_eq!((store.capacity(), rig.machine.live().registered), (0, 0));
        assert_eq!(books(&pool), before);
        match store.reserve(6 * G + 1).unwrap_err() {
            SleepError::StoreFull { wanted, free, capacity } => {
                assert_eq!((wanted, free, capacity), (6 * G + 1, 6 * G, 6 * G));
            }
            other => panic!("{other}"),
        }
        assert!(matches!(store.reserve(u64::MAX), Err(SleepError::StoreFull { .. })));
        assert_eq!(store.capacity(), 0);
        assert_contents(rig, &blocks);
    }

    fn memory_is_taken_in_advance(rig) {
        let store = growing(rig, 64 * G);
        store.reserve(0).unwrap();
        assert_eq!(store.capacity(), 0);
        store.reserve(3 * G - 1).unwrap();
        assert_eq!((store.capacity(), store.free()), (3 * G, 3 * G));
        store.reserve(2 * G).unwrap();
        assert_eq!(store.capacity(), 3 * G, "as much is free");
        store.reserve(40 * G).unwrap();
        assert_eq!((store.capacity(), store.free()), (40 * G, 40 * G));
        let (_pool, tenant, blocks) = blocks(rig, &[40 * G]);
        let calls = rig.device.calls();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        let calls = rig.device.calls().since(&calls);
        assert_eq!(calls.count(Call::MemHostRegister), 0);
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
    }

    // I-89
    fn memory_that_cannot_be_pinned_leaves_all_awake(rig) {
        let (pool, tenant, blocks) = blocks(rig, &[G, PIECE + G, G]);
        let store = growing(rig, 128 * G);
        store.reserve(G).unwrap();
        let before = (books(&pool), rig.machine.live());
        // The first piece is pinned, and contents are copied to it; the second one is not.
        for nth in [1, 2] {
            rig.faults.arm(Fault::nth(nth, REFUSED).of(Call::MemHostRegister));
            let calls = rig.device.calls();
            let refused = tenant.blocks().sleep(Contents::Keep(&store)).unwrap_err();
            rig.faults.disarm();
            assert!(matches!(refused, SleepError::Memory(MemoryError::Create { .. })), "{refused}");
            let calls = rig.device.calls().since(&calls);
            assert_eq!(calls.count(Call::MemUnmap), 0, "no block was emptied");
            assert!(!blocks.iter().any(Block::is_asleep));
            assert_contents(rig, &blocks);
            assert_eq!((store.capacity(), store.free()), (G, G));
            assert_eq!((books(&pool), rig.machine.live()), before);

            rig.faults.arm(Fault::nth(nth, REFUSED).of(Call::MemHostRegister));
            assert!(store.reserve(PIECE + 4 * G).is_err());
            rig.faults.disarm();
            assert_eq!((store.capacity(), store.free()), (G, G));
        }
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
    }

    fn whoever_watches_can_cancel_while_a_store_grows(rig) {
        let (pool, tenant, blocks) = blocks(rig, &[PIECE, PIECE]);
        let store = growing(rig, 128 * G);
        let before = books(&pool);
        let told = Mutex::new(0);
        let watch = |progress: &cuvmm::sleep::Progress| {
            assert_eq!(progress.total, 2 * PIECE);
            *told.lock().unwrap() += 1;
            false
        };
        let cancelled = tenant.blocks().on_progress(&watch).sleep(Contents::Keep(&store));
        assert!(matches!(cancelled, Err(SleepError::Cancelled)), "{cancelled:?}");
        assert_eq!(*told.lock().unwrap(), 1, "nothing is told after that");
        assert_contents(rig, &blocks);
        assert_eq!((books(&pool), store.capacity()), (before, 0));
        assert_eq!(rig.machine.live().registered, 0);
    }

    fn a_driver_that_registers_nothing_allocates(rig) {
        let unsupported = CUresult::CUDA_ERROR_NOT_SUPPORTED;
        let (_pool, tenant, blocks) = blocks(rig, &[3 * G, 4 * G]);
        rig.faults.arm(Fault::from(1, unsupported).of(Call::MemHostRegister));
        let allocations = rig.machine.live().allocations;
        let store = growing(rig, 16 * G);
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        let live = rig.machine.live();
        assert_eq!((live.registered, live.allocations - allocations), (0, 1));
        assert_eq!((store.capacity(), store.free()), (7 * G, 0));
        tenant.blocks().wake().unwrap();
        assert_contents(rig, &blocks);
        assert_eq!(store.shrink_to(0), 7 * G);
        assert_eq!(rig.machine.live().allocations, allocations);

        rig.faults.disarm();
        rig.faults.arm(Fault::nth(1, REFUSED).of(Call::MemHostAlloc));
        let refused = tenant.blocks().sleep(Contents::Keep(&store)).unwrap_err();
        assert!(matches!(refused, SleepError::Memory(MemoryError::Create { .. })), "{refused}");
        rig.faults.disarm();
        assert_eq!(store.capacity(), 0);
        assert_contents(rig, &blocks);
    }

    fn a_piece_with_contents_is_not_given_back(rig) {
        let (_pool, tenant, _blocks) = blocks(rig, &[G]);
        let store = growing(rig, 128 * G);
        store.reserve(PIECE).unwrap();
        store.reserve(PIECE + 2 * G).unwrap();
        assert_eq!(rig.machine.live().registered, 2);
        // The block takes a part of the piece that came last.
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        assert_eq!(store.shrink_to(0), PIECE);
        assert_eq!((store.capacity(), store.free()), (2 * G, G));
        tenant.blocks().wake().unwrap();
        assert_eq!(store.shrink_to(0), 2 * G);
    }
}

#[test]
fn memory_that_the_driver_keeps_registered_stays() {
    let rig = host();
    let store = growing(&rig, 16 * G);
    store.reserve(2 * G).unwrap();
    rig.faults
        .arm(Fault::nth(1, REFUSED).of(Call::MemHostUnregister));
    assert_eq!(store.shrink_to(0), 2 * G);
    rig.faults.disarm();
    assert_eq!(rig.device.drop_failures(), 1);
    assert_eq!(rig.machine.live().registered, 1);
    // No later memory is where the driver still has that.
    store.reserve(16 * G).unwrap();
    assert_eq!(rig.machine.live().registered, 2);
}
