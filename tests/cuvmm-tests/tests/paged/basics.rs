//! Blocks that are backed and released, and the calls that are made for it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::books::books;
use crate::common::{self, D0, G, Rig, limited, model, pool, until};
use crate::on_both;
use crate::scene::{LAYOUTS, builder, extents_under, rows, stamp};
use cuvmm::driver::model::Backing;
use cuvmm::paged::{FreeNumbers, LayerGroup, Layout};
use cuvmm::{Contents, Ledger, PagedKv, Pool, Stream, Tenant};

fn scene(rig: &Rig<impl Backing>, granules: u64) -> (Pool, Tenant, Tenant, Stream) {
    let pool = pool(rig, granules);
    let [a, b] = common::tenants(&pool);
    (pool, a, b, Stream::new(&rig.device).unwrap())
}

on_both! {
    // I-98
    fn an_extent_is_backed_while_a_block_in_use_touches_it(rig) {
        for layout in LAYOUTS {
            let (pool, a, b, home) = scene(rig, 64);
            let kv = builder(&a, &home, 64, layout).build().unwrap();
            let mut used = BTreeSet::new();
            for numbers in [vec![0], vec![1, 2], vec![40, 3], vec![63]] {
                kv.back(&numbers).unwrap();
                used.extend(numbers);
                let known = extents_under(&kv, &used);
                assert_eq!(kv.stats().unwrap().committed, known, "{layout:?}");
                assert_eq!(books(rig, &pool).tenants[0].in_use, known);
            }
            // Work of the kernels that use the blocks is queued.
            rig.machine.hold(D0, home.as_raw());
            for &number in &used {
                stamp(rig, &home, &kv, number, 7);
            }
            for numbers in [vec![1], vec![0, 2, 40], vec![3, 63]] {
                kv.release(&numbers).unwrap();
                used.retain(|it| !numbers.contains(it));
                let stats = kv.stats().unwrap();
                assert_eq!(stats.committed, extents_under(&kv, &used));
                assert_eq!((stats.in_use as usize, stats.pinned), (used.len(), 0));
            }
            let held = kv.stats().unwrap().held;
            assert_eq!(books(rig, &pool).pending_free, held);
            let asked = 64 * G - held + G;
            assert!(b.try_allocate(asked).is_err(), "memory under queued work is not taken");
            rig.machine.release_stream(D0, home.as_raw());
            drop(b.try_allocate(asked).unwrap());
            assert!(kv.stats().unwrap().held < held);
            kv.purge().unwrap();
            assert_eq!(books(rig, &pool).tenants[0].committed, 0);
            drop(kv);
            books(rig, &pool);
        }
    }

    // I-99
    fn a_block_released_in_a_step_stays_until_the_steps_that_may_use_it_are_dropped(rig) {
        for layout in LAYOUTS {
            let (_pool, a, b, home) = scene(rig, 16);
            let kv = builder(&a, &home, 20, layout).build().unwrap();
            kv.back(&[0, 1, 2]).unwrap();
            let held = kv.stats().unwrap().committed;
            let first = kv.step();
            kv.release(&[0]).unwrap();
            let second = kv.step();
            kv.release(&[1, 2]).unwrap();
            let counts = |kv: &PagedKv| {
                let stats = kv.stats().unwrap();
                (stats.in_use, stats.leaving, stats.committed)
            };
            assert_eq!(counts(&kv), (0, 3, held));
            // The second step ends first: the first may still use what was released in it.
            drop(second);
            assert_eq!(counts(&kv), (0, 3, held));
            assert!(b.try_allocate(16 * G).is_err());
            // A number may be used again meanwhile.
            kv.back(&[2]).unwrap();
            rig.machine.hold(D0, home.as_raw());
            stamp(rig, &home, &kv, 0, 9);
            drop(first);
            let left = extents_under(&kv, &BTreeSet::from([2]));
            assert_eq!(counts(&kv), (1, 0, left));
            kv.release(&[2]).unwrap();
            assert!(b.try_allocate(16 * G).is_err(), "the launched kernel is not done");
            rig.machine.release_stream(D0, home.as_raw());
            drop(b.try_allocate(16 * G).unwrap());
            // Without a block, a step changes nothing.
            drop(kv.step());
            assert_eq!(counts(&kv), (0, 0, 0));
        }
    }

    fn memory_waits_for_recorded_streams_and_a_drop_waits_for_nothing(rig) {
        let (_pool, a, b, home) = scene(rig, 16);
        let other = Stream::new(&rig.device).unwrap();
        for drops in [false, true] {
            let kv = builder(&a, &home, 10, Layout::BlockMajor).build().unwrap();
            kv.record_use(&other).unwrap();
            kv.back(&[0, 1]).unwrap();
            rig.machine.hold(D0, other.as_raw());
            stamp(rig, &other, &kv, 1, 3);
            // The extent is emptied by a release that comes after the work on block 1.
            kv.release(&[1]).unwrap();
            kv.release(&[0]).unwrap();
            let kv = match drops {
                true => None,
                false => Some(kv),
            };
            assert!(b.try_allocate(16 * G).is_err());
            rig.machine.release_stream(D0, other.as_raw());
            drop(b.try_allocate(16 * G).unwrap());
            drop(kv);
        }
    }

    fn no_call_is_made_where_memory_is_there(rig) {
        for layout in LAYOUTS {
            let (pool, a, _, home) = scene(rig, 64);
            let kv = builder(&a, &home, 40, layout).pinned([39]).build().unwrap();
            kv.back(&[0, 2]).unwrap();
            rig.faults.forget();
            // Block 1 is in extents that the others touch.
            kv.back(&[1, 0]).unwrap();
            kv.release(&[1]).unwrap();
            kv.back(&[1, 1]).unwrap();
            kv.release(&[1, 1]).unwrap();
            kv.back(&[1]).unwrap();
            // Extents that were emptied and not taken meanwhile.
            kv.release(&[0, 1, 2]).unwrap();
            kv.back(&[1, 2]).unwrap();
            let step = kv.step();
            kv.release(&[1]).unwrap();
            drop(step);
            kv.stats().unwrap();
            assert_eq!(rig.faults.calls(), []);
            kv.reserve(7).unwrap();
            rig.faults.forget();
            kv.back(&[0, 1, 3, 4, 5, 6, 7]).unwrap();
            assert_eq!((rig.faults.calls(), kv.stats().unwrap().reserved), (vec![], 0));
            drop(kv);
            books(rig, &pool);
        }
    }

    fn a_reserve_is_under_the_lowest_numbers_and_is_used_up(rig) {
        for layout in LAYOUTS {
            let (_pool, a, b, home) = scene(rig, 64);
            let kv = builder(&a, &home, 40, layout).build().unwrap();
            let mut free = FreeNumbers::new(40).unwrap();
            let first = free.take_many(6).unwrap();
            kv.back(&first).unwrap();
            kv.reserve(20).unwrap();
            assert_eq!(kv.stats().unwrap().reserved, 20);
            // All other memory goes to the other tenant.
            let mut rest = Vec::new();
            while let Ok(block) = b.try_allocate(G) {
                rest.push(block);
            }
            // What becomes free is below the reserve, which moves there.
            kv.release(&[1, 4]).unwrap();
            free.give_back(4).unwrap();
            free.give_back(1).unwrap();
            assert_eq!(kv.stats().unwrap().reserved, 20);
            while let Ok(block) = b.try_allocate(G) {
                rest.push(block);
            }
            for _ in 0..20 {
                kv.try_back(&[free.take().unwrap()]).unwrap();
            }
            assert_eq!((kv.stats().unwrap().reserved, kv.stats().unwrap().in_use), (0, 24));
            assert!(!kv.can_allocate(16).unwrap());
            drop(rest);
            assert!(kv.can_allocate(16).unwrap());
            assert!(!kv.can_allocate(17).unwrap(), "there are no more numbers");
            // A reserve that is lowered gives its highest numbers up.
            kv.reserve(9).unwrap();
            let before = kv.stats().unwrap().committed;
            kv.reserve(16).unwrap();
            kv.reserve(9).unwrap();
            assert_eq!(kv.stats().unwrap().committed, before);
            kv.reserve(0).unwrap();
            assert_eq!(kv.stats().unwrap().reserved, 0);
        }
    }
}

#[test]
fn pinned_blocks_are_backed_from_the_start() {
    let rig = common::clean(model());
    let (_pool, a, _, home) = scene(&rig, 64);
    let kv = builder(&a, &home, 40, Layout::BlockMajor);
    let kv = kv.pinned([0]).pinned([38, 39]).build().unwrap();
    let stats = kv.stats().unwrap();
    let known = extents_under(&kv, &BTreeSet::from([0, 38, 39]));
    assert_eq!((stats.pinned, stats.in_use, stats.committed), (3, 0, known));
    assert!(kv.is_backed(38).unwrap() && !kv.is_backed(1).unwrap());
    kv.back(&[0, 1]).unwrap();
    assert_eq!(
        (kv.stats().unwrap().pinned, kv.stats().unwrap().in_use),
        (3, 1)
    );
    drop(kv);
}

#[test]
fn an_extent_is_one_mapping_and_its_last_one_is_no_larger_than_its_blocks() {
    let rig = model();
    let (_pool, a, _, home) = scene(&rig, 1024);
    let llama = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
    let kv = PagedKv::builder(&a, &home, 100).group(llama.clone());
    let kv = kv.extent(32 << 20).build().unwrap();
    assert_eq!((kv.block_bytes(), kv.extent()), (G, 16 * G));
    let all: Vec<u32> = (0..100).collect();
    kv.back(&all).unwrap();
    let stats = kv.stats().unwrap();
    // Six extents of 16 blocks, and one of four.
    assert_eq!((stats.mappings, stats.committed), (7, 100 * G));
    drop(kv);
    let kv = PagedKv::builder(&a, &home, 100)
        .group(llama)
        .layout(Layout::LayerMajor);
    let kv = kv.build().unwrap();
    kv.back(&[0]).unwrap();
    assert_eq!(kv.stats().unwrap().mappings, 64);
    kv.back(&(0..64).collect::<Vec<_>>()).unwrap();
    assert_eq!(kv.stats().unwrap().committed, 64 * G);
    assert!(kv.view(0, 5, 1).unwrap().is_contiguous());
}

#[test]
fn a_block_at_the_top_of_64_gib() {
    let rig = model();
    let (_pool, a, _, home) = scene(&rig, 64);
    let llama = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
    let blocks = (64_u64 << 30) / G + 1;
    let top = blocks as u32 - 1;
    for layout in LAYOUTS {
        let kv = PagedKv::builder(&a, &home, blocks as u32).group(llama.clone());
        let kv = kv.layout(layout).extent(G).build().unwrap();
        kv.back(&[top]).unwrap();
        let view = kv.view(0, 31, 1).unwrap();
        let last = view.block(top).unwrap();
        assert_eq!(
            last - view.address(),
            u64::from(top) * view.byte_strides()[0]
        );
        if layout != Layout::LayerMajor {
            assert_eq!(last - view.address(), 64 << 30);
        }
        let [block, token, ..] = view.byte_strides();
        let row = view.block(top).unwrap() + 15 * token;
        let queued = vec![(row, 2_048, 1)];
        assert!(row + 2_048 <= view.address() + blocks * block);
        rig.kernel(&home, &[], &queued);
        home.synchronize().unwrap();
        assert_eq!(view.block(top + 1), None);
    }
}

#[test]
fn a_cache_stays_awake_and_the_result_names_its_bytes() {
    let rig = model();
    let (_pool, a, _, home) = scene(&rig, 64);
    let block = a.allocate(2 * G).unwrap();
    let kv = builder(&a, &home, 10, Layout::TokenMajor).build().unwrap();
    kv.back(&[0]).unwrap();
    let slept = a.blocks().sleep(Contents::Discard).unwrap();
    assert_eq!((slept.given, slept.awake), (2 * G, 2 * G));
    assert_eq!(a.stats().committed, 2 * G);
    a.blocks().wake().unwrap();
    drop(block);
}

#[test]
fn what_is_reserved_is_charged_in_the_ledger() {
    let rig = model();
    let directory = tempfile::tempdir().unwrap();
    let ledger = Ledger::builder(&rig.device, directory.path()).limit(16 * G);
    let ledger = ledger.open().unwrap();
    let joined = || limited(&rig, 16).ledger(&ledger).build().unwrap();
    let (one, other) = (joined(), joined());
    let a = one.tenant("a").register().unwrap();
    let b = other.tenant("b").register().unwrap();
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 16, Layout::BlockMajor).build().unwrap();
    kv.reserve(8).unwrap(); // six granules
    assert_eq!(ledger.stats().processes[0].obtained, 6 * G);
    assert!(b.try_allocate(11 * G).is_err());
    let lowest: Vec<u32> = (0..8).collect();
    kv.try_back(&lowest).unwrap();
    assert_eq!(ledger.stats().processes[0].obtained, 6 * G);
}

#[test]
fn the_hint_counts_what_other_processes_have_idle_above_their_guarantees() {
    let rig = model();
    let directory = tempfile::tempdir().unwrap();
    let joined = |name: &str, guarantee: u64| {
        let ledger = Ledger::builder(&rig.device, directory.path()).limit(16 * G);
        let ledger = ledger.name(name).guarantee(guarantee).open().unwrap();
        let pool = limited(&rig, 16).ledger(&ledger).build().unwrap();
        (pool.tenant(name).register().unwrap(), pool, ledger)
    };
    let (theirs, ..) = joined("theirs", 4 * G);
    let (ours, pool, _ledger) = joined("ours", 0);
    let home = Stream::new(&rig.device).unwrap();
    // Extents of two granules, under 16 blocks of three quarters.
    let kv = builder(&ours, &home, 64, Layout::BlockMajor);
    let kv = kv.timeout(Duration::from_secs(120)).build().unwrap();
    let held = theirs.allocate(16 * G).unwrap();
    assert!(!kv.can_allocate(1).unwrap());
    drop(held);
    until(&pool, "the other process says what it has idle", || {
        kv.can_allocate(16).unwrap()
    });
    assert!(!kv.can_allocate(17).unwrap());
    let numbers: Vec<u32> = (0..16).collect();
    let refused = kv.try_back(&numbers).unwrap_err();
    assert!(refused.is_shortage(), "{refused}");
    kv.back(&numbers).unwrap();
    assert!(!kv.can_allocate(1).unwrap());
}

#[test]
fn limits_hold_and_can_be_lowered() {
    let rig = model();
    let (pool, a, _, home) = scene(&rig, 64);
    a.set_limit(6 * G).unwrap();
    let kv = builder(&a, &home, 64, Layout::BlockMajor).build().unwrap();
    kv.back(&[0, 1, 2, 3]).unwrap();
    let refused = kv.back(&(4..20).collect::<Vec<_>>()).unwrap_err();
    assert!(
        refused.is_shortage() && refused.is_out_of_memory(),
        "{refused}"
    );
    assert_eq!(refused.shortage().unwrap().tenant_limit, 6 * G);
    assert_eq!(kv.stats().unwrap().in_use, 4);
    kv.release(&[2, 3]).unwrap();
    a.set_limit(2 * G).unwrap();
    assert!(kv.back(&[2, 3]).is_err());
    assert_eq!(books(&rig, &pool).tenants[0].committed, 2 * G);
    kv.release(&[1]).unwrap();
    a.set_limit(u64::MAX).unwrap();
    kv.back(&[1, 2, 3]).unwrap();
    assert_eq!(rows(&kv, 3).len(), 8);
}
