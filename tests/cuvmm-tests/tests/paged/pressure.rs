//! Hooks and other threads: a cache gives blocks up while memory is short, and waits for memory.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::books::books;
use crate::common::{self, G, Rig, host, limited, model, pool};
use crate::scene::{LAYOUTS, builder, extents_under, group, rows, stamp, stamps};
use cuvmm::driver::model::Nothing;
use cuvmm::error::PagedKvError;
use cuvmm::paged::{LayerGroup, Layout};
use cuvmm::{Block, PagedKv, Pool, Stream};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn the_fewest_evictions_that_empty_an_extent() {
    let rig = model();
    let (_pool, a, home) = common::scene(&rig, 64);
    // Extents of two granules: blocks 0 to 2 touch the first, 2 to 5 the second, 5 to 7 the third,
    // and 8 to 10 the fourth.
    let kv = builder(&a, &home, 16, Layout::BlockMajor).pinned([15]);
    let kv = kv.build().unwrap();
    kv.back(&[0, 1, 3, 4, 5, 6, 8, 9]).unwrap();
    let choose = |bytes, evictable: &[u32]| {
        let chosen = kv.emptiest(bytes, evictable).unwrap();
        (chosen.numbers, chosen.bytes)
    };
    let all: Vec<u32> = (0..16).collect();
    assert_eq!(choose(1, &all), (vec![8, 9], 2 * G));
    assert_eq!(choose(2 * G + 1, &all), (vec![8, 9, 5, 6], 4 * G));
    // Block 5 is in the second extent too.
    let known = vec![8, 9, 5, 6, 0, 1, 3, 4];
    assert_eq!(choose(8 * G, &all), (known, 8 * G));
    assert_eq!(choose(u64::MAX, &all).1, 8 * G, "no pinned extent");
    assert_eq!(choose(1, &[0, 3, 4, 5, 9]), (vec![3, 4, 5], 2 * G));
    assert_eq!(choose(1, &[5, 2, 900]), (vec![], 0));
    assert_eq!(choose(0, &all), (vec![], 0));
    // A block that a step still uses keeps its extent.
    let step = kv.step();
    kv.release(&[6]).unwrap();
    assert_eq!(choose(1, &[5]), (vec![], 0));
    drop(step);
    assert_eq!(choose(1, &[5]), (vec![5], 2 * G));
    let (numbers, bytes) = choose(6 * G, &all);
    let before = kv.stats().unwrap().committed;
    kv.release(&numbers).unwrap();
    assert_eq!(kv.stats().unwrap().committed, before - bytes);
}

// I-100
#[test]
fn a_hook_evicts_blocks_for_another_tenant_and_for_the_cache_itself() {
    for layout in LAYOUTS {
        let rig = model();
        let pool = pool(&rig, 32);
        let evictable: Arc<Mutex<BTreeSet<u32>>> = Arc::default();
        let kv: Arc<OnceLock<PagedKv>> = Arc::default();
        let hook = |kv: &Arc<OnceLock<PagedKv>>| {
            let (kv, evictable) = (Arc::clone(kv), Arc::clone(&evictable));
            move |pressure: &cuvmm::pool::Pressure| {
                let Some(kv) = kv.get() else { return };
                let mut evictable = evictable.lock().unwrap();
                let may: Vec<u32> = evictable.iter().copied().collect();
                let chosen = kv.emptiest(pressure.bytes, &may).unwrap();
                kv.release(&chosen.numbers).unwrap();
                evictable.retain(|it| !chosen.numbers.contains(it));
            }
        };
        let server = pool.tenant("server");
        let server = server.on_pressure(hook(&kv)).on_shortage(hook(&kv));
        let server = server.register().unwrap();
        let other = pool.tenant("other").register().unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let built = builder(&server, &home, 40, layout).build().unwrap();
        assert!(kv.set(built).is_ok());
        let kv = kv.get().unwrap();
        let all: Vec<u32> = (0..40).collect();
        kv.back(&all).unwrap();
        assert!(other.try_allocate(4 * G).is_err());
        evictable.lock().unwrap().extend(20..40);
        let block = other.allocate(8 * G).unwrap();
        let left = kv.stats().unwrap().in_use;
        assert!((20..40).contains(&left), "{layout:?}: {left}");
        // The cache needs memory itself, and its own hook releases blocks within the call.
        let last = evictable.lock().unwrap().is_empty();
        assert!(!last);
        let grown = builder(&server, &home, 8, layout).build().unwrap();
        grown.back(&[0, 1]).unwrap();
        assert!(kv.stats().unwrap().in_use < left);
        let stats = books(&rig, &pool);
        assert_eq!(stats.tenants[1].in_use, 8 * G);
        drop(block);
    }
}

/// A cache with two blocks in each granule, of which blocks 0, 2 and 4 are in use, in a pool of four
/// granules. `hook` is called for its own shortages, with the missing bytes.
fn halves(
    rig: &Rig<Nothing>,
    hook: impl Fn(&PagedKv, u64) + Send + Sync + 'static,
) -> (Pool, Arc<OnceLock<PagedKv>>) {
    let pool = pool(rig, 4);
    let kv: Arc<OnceLock<PagedKv>> = Arc::default();
    let of = Arc::clone(&kv);
    let a = pool.tenant("a").on_shortage(move |pressure| {
        if let Some(kv) = of.get() {
            hook(kv, pressure.bytes);
        }
    });
    let a = a.register().unwrap();
    let home = Stream::new(&rig.device).unwrap();
    let group = LayerGroup::new(1, 1).part(1, (G / 2) as u32, 1);
    let built = PagedKv::builder(&a, &home, 16).group(group).extent(G);
    assert!(kv.set(built.build().unwrap()).is_ok());
    kv.get().unwrap().back(&[0, 2, 4]).unwrap();
    (pool, kv)
}

#[test]
fn hooks_and_the_error_are_told_what_a_request_lacks_by_then() {
    // The cache's own hook gives up the extents that the request needs too.
    let rig = model();
    let (pool, kv) = halves(&rig, |kv, bytes| {
        assert_eq!(bytes, G);
        kv.release(&[0, 2, 4]).unwrap();
    });
    let kv = kv.get().unwrap();
    let held: Arc<Mutex<Option<Block>>> = Arc::default();
    let (gives, asked) = (Arc::clone(&held), Arc::new(Mutex::new(Vec::new())));
    let told = Arc::clone(&asked);
    let b = pool.tenant("b").on_pressure(move |pressure| {
        told.lock().unwrap().push(pressure.bytes);
        drop(gives.lock().unwrap().take());
    });
    let b = b.register().unwrap();
    *held.lock().unwrap() = Some(b.allocate(G).unwrap());
    kv.back(&[1, 3, 5, 6]).unwrap();
    assert_eq!(
        (kv.stats().unwrap().in_use, &*asked.lock().unwrap()),
        (4, &vec![G])
    );

    // It takes the numbers that a reserve was to have.
    let rig = model();
    let (pool, kv) = halves(&rig, |kv, _| kv.back(&[1, 3, 5]).unwrap());
    let (kv, b) = (kv.get().unwrap(), pool.tenant("b").register().unwrap());
    let held = b.allocate(G).unwrap();
    let refused = kv.try_reserve(4).unwrap_err();
    assert_eq!(wanted(&refused), G);
    kv.tenant().set_limit(3 * G).unwrap();
    let refused = kv.reserve(4).unwrap_err();
    assert_eq!((wanted(&refused), kv.stats().unwrap().in_use), (2 * G, 6));
    drop(held);
}

/// Returns the bytes that a request that was refused for memory lacked.
fn wanted(refused: &PagedKvError) -> u64 {
    match refused {
        PagedKvError::Back { cause, .. } => cause.shortage().unwrap().wanted,
        other => panic!("{other}"),
    }
}

#[test]
fn no_hook_is_called_if_the_limit_can_never_hold_the_blocks() {
    let rig = model();
    let (_pool, kv) = halves(&rig, |_, _| panic!("a hook cannot help"));
    let kv = kv.get().unwrap();
    // They lack two extents, and have five then.
    let refused = kv.back(&[1, 3, 5, 6, 8]).unwrap_err();
    assert_eq!(wanted(&refused), 2 * G);
    let refused = kv.reserve(9).unwrap_err();
    assert_eq!(wanted(&refused), 3 * G);
    assert_eq!(
        (kv.stats().unwrap().in_use, kv.stats().unwrap().reserved),
        (3, 0)
    );
}

#[test]
fn backing_waits_for_blocks_that_another_thread_releases() {
    let rig = model();
    let pool = pool(&rig, 16);
    let (asks, asked) = mpsc::channel();
    let a = pool
        .tenant("a")
        .on_shortage(move |_| asks.send(()).unwrap());
    let a = a.register().unwrap();
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 64, Layout::BlockMajor)
        .timeout(LONG)
        .build()
        .unwrap();
    let first: Vec<u32> = (0..20).collect();
    kv.back(&first).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| kv.back(&[40, 41]));
        asked.recv().unwrap();
        // The thread that waits holds no lock of the cache.
        kv.release(&[3, 4, 5, 6, 7]).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert_eq!(kv.stats().unwrap().in_use, 17);
    assert!(kv.try_back(&first).unwrap_err().is_out_of_memory());
}

#[test]
fn one_thread_backs_and_releases_while_another_presses() {
    for layout in LAYOUTS {
        let rig = common::clean(host());
        let pool = limited(&rig, 24).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let home = Stream::new(&rig.device).unwrap();
        let kv = builder(&a, &home, 32, layout).pinned([31]).build().unwrap();
        stamp(&rig, &home, &kv, 31, 99);
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..200_u64 {
                    if let Ok(block) = b.try_allocate((turn % 9 + 4) * G) {
                        block.write(0, b"other").unwrap();
                    }
                }
            });
            let mut random = fastrand::Rng::with_seed(5);
            let mut used: Vec<u32> = Vec::new();
            for turn in 0..200 {
                let number = random.u32(0..31);
                let step = (turn % 3 == 0).then(|| kv.step());
                if used.contains(&number) {
                    assert_eq!(stamps(&rig, &kv, number), [number as u8 + 1; 16]);
                    kv.release(&[number]).unwrap();
                    used.retain(|&it| it != number);
                } else if kv.try_back(&[number]).is_ok() {
                    let found = stamps(&rig, &kv, number);
                    let own = |byte: &u8| [0, number as u8 + 1].contains(byte);
                    assert!(found.iter().all(own), "{found:?}");
                    stamp(&rig, &home, &kv, number, number as u8 + 1);
                    home.synchronize().unwrap();
                    used.push(number);
                }
                drop(step);
            }
            used.push(31);
            let used: BTreeSet<u32> = used.into_iter().collect();
            assert_eq!(kv.stats().unwrap().committed, extents_under(&kv, &used));
        });
        assert_eq!(stamps(&rig, &kv, 31), [99; 16]);
        books(&rig, &pool);
    }
}

#[test]
fn groups_of_different_shapes_share_blocks() {
    let rig = host();
    let (_pool, a, home) = common::scene(&rig, 16);
    let kv = builder(&a, &home, 8, Layout::BlockMajor);
    // Twice the tokens in half the layers.
    let rows = rows(&kv.build().unwrap(), 0).len();
    assert_eq!(rows, 8);
    let window = cuvmm::paged::LayerGroup::new(1, 4).keys_and_values(3, G as u32 / 128, 4);
    let kv = PagedKv::builder(&a, &home, 8).group(group()).group(window);
    let kv = kv.extent(2 * G).build().unwrap();
    kv.back(&[2]).unwrap();
    let view = kv.view(1, 0, 1).unwrap();
    let [_, tokens, heads, size] = view.shape();
    let bytes = vec![5; (tokens * heads * size * 4) as usize];
    kv.write(2, (1, 0, 1), &bytes).unwrap();
    // The second half of the block, in the other group the second layer.
    let mut read = vec![0; bytes.len() / 2];
    for part in 0..2 {
        kv.read(2, (0, 1, part), &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 5));
        kv.read(2, (0, 0, part), &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 0));
    }
}
