//! A driver that panics in each call of each operation on a pool's memory, once alone, once behind the call,
//! whose answer is lost, once with all later calls that change page tables refused, and once in the
//! roll-back of a refusal. The operation can be made again. All memory that may be lost stays charged or
//! quarantined, and nothing else: the pool then lends the rest, within its limit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::books::figures;
use crate::common::panics::panics;
use crate::common::{self, G, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::kv::{Layout, Shape};
use cuvmm::paged::LayerGroup;
use cuvmm::{
    Allocation, Block, Contents, Exchange, Group, Growth, Heap, HostStore, KvCache, Offer, PagedKv,
    Pool, Region, Stream, Tenant,
};

const LIMIT: u64 = 40 * G;

/// The calls that are refused after a panic.
const CHANGES: [Call; 6] = [
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::MemRelease,
    Call::MemAddressFree,
];

struct Scene {
    stream: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
    rig: Rig<Nothing>,
}

impl Scene {
    fn new() -> Self {
        let rig = common::model();
        let pool = common::shareable(&rig, LIMIT / G);
        let pool = pool.largest_extent(4 * G).growth(Growth::Exact);
        let pool = pool.build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        Self {
            stream,
            a,
            b,
            pool,
            rig,
        }
    }

    /// Allocates a block of the first tenant, with an extent for each granule.
    fn pieces(&self, granules: u64) -> Block {
        let block = self.a.block(G).capacity(16 * G).home_stream(&self.stream);
        let mut block = block.try_allocate().unwrap();
        for granule in 2..=granules {
            block.try_grow_to(granule * G).unwrap();
        }
        block
    }

    /// Leaves memory of the second tenant cached, which others are to have zeroed.
    fn used(&self, granules: u64) {
        let block = self.b.block(granules * G).home_stream(&self.stream);
        drop(block.allocate().unwrap());
    }
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Alone,
    /// The call is carried out, and its answer is lost.
    Answered,
    /// All later calls of [`CHANGES`] are refused.
    Refusing,
    /// The first call of this number is refused, and the panic comes behind it.
    Behind(u64),
}

/// Runs an operation in which the driver panics in the nth call. Returns `false` if it did not, and
/// adds what is wrong afterwards to `problems`.
fn run<T>(
    (name, mode, nth): (&str, Mode, u64),
    prepare: &impl Fn(&Scene) -> T,
    operate: &impl Fn(&Scene, &mut T),
    problems: &mut Vec<String>,
) -> bool {
    let scene = Scene::new();
    let mut things = prepare(&scene);
    let faults = &scene.rig.faults;
    faults.forget();
    if let Mode::Behind(number) = mode {
        faults.arm(Fault::nth(number, CUresult::CUDA_ERROR_UNKNOWN));
    }
    let what = Arc::new(AtomicU64::new(u64::MAX));
    let (told, injected, seen) = (Arc::clone(&what), Arc::clone(faults), AtomicU64::new(0));
    let counts = move |call: Call| {
        if matches!(mode, Mode::Behind(_)) && injected.injected() == 0 {
            return false;
        }
        if seen.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            told.store(call as u64, Ordering::SeqCst);
            if matches!(mode, Mode::Refusing) {
                injected.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).only(&CHANGES));
            }
        }
        true
    };
    let run = || operate(&scene, &mut things);
    let when = (nth, matches!(mode, Mode::Answered));
    let (outcome, panicked) = panics(&scene.rig, when, counts, run);
    faults.disarm();
    let all = Call::ALL.iter();
    let call = all
        .copied()
        .find(|&it| it as u64 == what.load(Ordering::SeqCst));
    let mut wrong = Wrong::default();
    let is_told = outcome.is_none() == panicked;
    wrong.unless(is_told, || "the panic was swallowed".to_owned());
    let again = catch_unwind(AssertUnwindSafe(|| operate(&scene, &mut things)));
    wrong.unless(again.is_ok(), || "the next operation panics".to_owned());
    ends(scene, things, panicked, &mut wrong);
    let told = wrong.0.into_iter();
    problems.extend(told.map(|it| format!("{name}, {mode:?}, panic {nth} in {call:?}: {it}")));
    panicked
}

#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn unless(&mut self, is: bool, says: impl FnOnce() -> String) {
        if !is {
            self.0.push(says());
        }
    }
}

/// Checks that the pool can be used and ends, and what it and the driver have after an operation.
fn ends<T>(scene: Scene, things: T, panicked: bool, wrong: &mut Wrong) {
    scene.rig.device.synchronize().unwrap();
    covers(&scene, "at once", wrong);
    drop(things);
    scene.pool.trim(0).unwrap();
    covers(&scene, "after trim", wrong);
    let stats = scene.pool.stats();
    let free = stats.free / G;
    wrong.unless(free == 0, || {
        format!("{free} granules are free and nowhere")
    });
    let lost = stats.committed + stats.quarantined;
    wrong.unless(panicked || lost == 0, || {
        format!("{} granules are lost", lost / G)
    });
    if lost < LIMIT {
        let rest = scene.b.try_allocate(LIMIT - lost);
        wrong.unless(rest.is_ok(), || {
            format!("the rest is not there: {stats:#?}")
        });
        covers(&scene, "full", wrong);
    }
    let Scene {
        stream,
        a,
        b,
        pool,
        rig,
    } = scene;
    drop((stream, a, b, pool));
    let left = rig.machine.live().physical_bytes;
    wrong.unless(left <= lost, || format!("{left} bytes left of {lost} lost"));
    let hazards = rig.machine.take_hazards();
    wrong.unless(hazards.is_empty(), || format!("{hazards:?}"));
}

/// Checks that all that the driver has is counted, and within the limit.
fn covers(scene: &Scene, when: &str, wrong: &mut Wrong) {
    let (stats, live) = (figures(&scene.pool), scene.rig.machine.live());
    let taken = stats.committed + stats.quarantined;
    let (counted, has) = (taken + stats.free, live.physical_bytes);
    wrong.unless(counted >= has, || {
        format!("{when}: {has} bytes, {counted} counted")
    });
    let is_within = taken <= LIMIT && has <= LIMIT;
    wrong.unless(is_within, || format!("{when}: {taken} taken, {has} there"));
    let mappings = (stats.mappings, live.mappings as u64);
    wrong.unless(mappings.0 >= mappings.1, || {
        format!("{when}: mappings {mappings:?}")
    });
    let addresses = (stats.addresses, live.reserved_bytes);
    wrong.unless(addresses.0 >= addresses.1, || {
        format!("{when}: addresses {addresses:?}")
    });
}

/// The problems that were found. The drop of this value fails the test if there is one.
#[derive(Default)]
struct Found(Vec<String>);

impl Drop for Found {
    fn drop(&mut self) {
        let (count, shown) = (self.0.len(), self.0.iter().take(60));
        let shown: Vec<&str> = shown.map(String::as_str).collect();
        let passes = count == 0 || std::thread::panicking();
        assert!(passes, "{count} problems:\n{}", shown.join("\n"));
    }
}

impl Found {
    /// Lets the driver panic in each call of an operation, in all modes.
    fn each_call<T>(
        &mut self,
        name: &str,
        prepare: impl Fn(&Scene) -> T,
        operate: impl Fn(&Scene, &mut T),
    ) {
        let calls = {
            let scene = Scene::new();
            let mut things = prepare(&scene);
            scene.rig.faults.forget();
            operate(&scene, &mut things);
            scene.rig.faults.total()
        };
        assert!(calls > 0, "{name} makes no call");
        let behind = (1..=calls).map(Mode::Behind);
        let modes = [Mode::Alone, Mode::Answered, Mode::Refusing];
        for mode in modes.into_iter().chain(behind) {
            let panics = |nth| run((name, mode, nth), &prepare, &operate, &mut self.0);
            assert!(!(1..500).all(panics), "{name} never ends");
        }
    }
}

#[test]
fn blocks() {
    let mut found = Found::default();
    found.each_call(
        "a cold allocation",
        |scene| scene.used(6),
        |scene, _| {
            drop(
                scene
                    .a
                    .block(36 * G)
                    .home_stream(&scene.stream)
                    .try_allocate(),
            );
        },
    );
    found.each_call(
        "several blocks",
        |scene| scene.used(6),
        |scene, _| {
            drop(scene.a.block(3 * G).try_allocate_many(3));
            drop(scene.a.block(3 * G).try_allocate_adjacent(3));
        },
    );
    found.each_call(
        "growth",
        |scene| (scene.used(30), scene.pieces(2), scene.pieces(1)),
        |scene, (_, one, other)| {
            drop(scene.a.try_grow_all(&mut [(one, 9 * G), (other, 5 * G)]));
        },
    );
    found.each_call(
        "a shrink",
        |scene| scene.pieces(6),
        |scene, block| {
            drop(block.shrink_to(G));
            scene.pool.trim(0).ok();
        },
    );
    found.each_call(
        "the end of blocks",
        |scene| vec![scene.pieces(6), scene.pieces(5)],
        |scene, blocks| {
            blocks.clear();
            scene.pool.trim(0).ok();
        },
    );
}

#[test]
fn forks() {
    let mut found = Found::default();
    found.each_call(
        "a fork",
        |scene| scene.pieces(6),
        |_, block| drop(block.try_fork(4 * G + 7, 6 * G)),
    );
    let forked = |scene: &Scene| {
        scene.used(8);
        let block = scene
            .a
            .block(8 * G)
            .capacity(16 * G)
            .home_stream(&scene.stream);
        let block = block.try_allocate().unwrap();
        let fork = block.try_fork(6 * G + 7, 12 * G).unwrap();
        (block, fork)
    };

    found.each_call("the end of a fork", forked, |scene, (block, fork)| {
        drop(fork.shrink_to(G));
        drop(block.shrink_to(G));
        scene.pool.trim(0).ok();
    });
    found.each_call(
        "compacting a prefix",
        |scene| scene.pieces(8),
        |_, block| drop(block.compact_prefix(8 * G)),
    );
}

// I-141
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn compaction() {
    let mut found = Found::default();
    found.each_call(
        "small extents",
        |scene| scene.pieces(9),
        |scene, _| drop(scene.pool.compact(|_| true)),
    );
    let shrunk = |scene: &Scene| {
        scene.used(5);
        let block = scene.a.block(8 * G).home_stream(&scene.stream);
        let mut block = block.movable(true).try_allocate().unwrap();
        block.shrink_to(2 * G + 7).unwrap();
        block
    };
    found.each_call("a cut", shrunk, |scene, _| {
        drop(scene.pool.compact(|_| true))
    });
    found.each_call("a cut for a request", shrunk, |scene, _| {
        drop(scene.b.try_allocate(37 * G))
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn heaps() {
    let mut found = Found::default();
    let heap = |scene: &Scene| {
        scene.used(6);
        Heap::builder(&scene.a).build().unwrap()
    };
    found.each_call("a heap's first allocation", heap, |scene, heap| {
        drop(heap.allocate(7 * G, 1, &scene.stream));
    });
    let in_pieces = move |scene: &Scene| {
        let heap = heap(scene);
        let allocate = |_| heap.allocate(2 * G, 1, &scene.stream).unwrap();
        let mut live: Vec<Allocation> = (0..6).map(allocate).collect();
        live.drain(4..).for_each(drop);
        drop(live.remove(0));
        drop(live.remove(1));
        scene.stream.synchronize().unwrap();
        (live, heap)
    };
    found.each_call("stitching", in_pieces, |scene, (_, heap)| {
        drop(heap.allocate(11 * G, 1, &scene.stream));
    });
    found.each_call("a trim", in_pieces, |_, (_, heap)| {
        heap.trim().ok();
    });
    found.each_call("a reclaim from a heap", in_pieces, |scene, _| {
        drop(scene.b.try_allocate(35 * G))
    });
    let some = |scene: &Scene| Some(in_pieces(scene));
    found.each_call("the end of a heap", some, |scene, pieces| {
        drop(pieces.take());
        scene.pool.trim(0).ok();
    });
    let sleeps = move |scene: &Scene| (in_pieces(scene), store(scene));
    found.each_call("a heap's sleep", sleeps, |scene, ((_, heap), store)| {
        drop(scene.a.blocks().heap(heap).sleep(Contents::Keep(store)));
    });
    let asleep = move |scene: &Scene| {
        let ((live, heap), store) = sleeps(scene);
        scene
            .a
            .blocks()
            .heap(&heap)
            .sleep(Contents::Keep(&store))
            .unwrap();
        ((live, heap), store)
    };
    found.each_call("a heap's wake", asleep, |scene, ((_, heap), _)| {
        drop(scene.a.blocks().heap(heap).wake());
    });
}

fn store(scene: &Scene) -> HostStore {
    let store = HostStore::builder(&scene.rig.device).pinned(20 * G);
    store.build().unwrap()
}

/// Makes a region of eight granules, all committed, in extents of four, and has other memory used.
fn region(scene: &Scene) -> Region {
    let region = scene.a.region(8 * G).largest_extent(4 * G);
    let mut region = region.home_stream(&scene.stream).reserve().unwrap();
    region.commit(0..8 * G).unwrap();
    scene.used(6);
    region
}

// I-150
#[test]
fn regions() {
    let mut found = Found::default();
    let holes = |scene: &Scene| {
        let mut region = region(scene);
        region.decommit(G..3 * G).unwrap();
        region.decommit(4 * G..8 * G).unwrap();
        region
    };
    let empty = |scene: &Scene| {
        scene.used(6);
        let region = scene.a.region(8 * G).largest_extent(4 * G);
        region.home_stream(&scene.stream).reserve().unwrap()
    };
    found.each_call("a commit", empty, |_, region| drop(region.commit(0..8 * G)));
    found.each_call("a purge", holes, |_, region| {
        region.purge().ok();
    });
    found.each_call("a reclaim from a region", holes, |scene, _| {
        drop(scene.b.try_allocate(36 * G))
    });
    found.each_call("a region's compaction", holes, |scene, region| {
        drop(region.compact(&scene.stream));
    });
    found.each_call("a region's fork", region, |_, region| {
        drop(region.fork(&[]))
    });
    let forked = |scene: &Scene| {
        let mut region = region(scene);
        let fork = region.fork(&[]).unwrap();
        (region, fork)
    };
    found.each_call("a region's unsharing", forked, |scene, (region, _)| {
        drop(region.unshare(0..8 * G, &scene.stream, &[]));
    });
    let some = |scene: &Scene| Some(forked(scene));
    found.each_call("the end of a region", some, |scene, regions| {
        drop(regions.take());
        scene.pool.trim(0).ok();
    });
    found.each_call("the purge of a fork", forked, |_, (region, fork)| {
        drop(region.decommit(0..8 * G));
        drop(fork.decommit(0..4 * G));
        fork.purge().ok();
    });
    found.each_call("an alias", holes, |_, region| {
        drop(region.alias(0..G, 4 * G));
        region.purge().ok();
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn sleeping() {
    let mut found = Found::default();
    let awake = |scene: &Scene| {
        scene.used(6);
        (
            scene.pieces(3),
            scene.a.allocate(4 * G).unwrap(),
            store(scene),
        )
    };
    found.each_call("a sleep", awake, |scene, (_, _, store)| {
        drop(scene.a.blocks().sleep(Contents::Keep(store)));
    });
    found.each_call("a sleep without contents", awake, |scene, _| {
        drop(scene.a.blocks().release(true).sleep(Contents::Discard));
    });
    let asleep = move |scene: &Scene| {
        let world = awake(scene);
        scene.a.blocks().sleep(Contents::Keep(&world.2)).unwrap();
        world
    };
    found.each_call("a wake", asleep, |scene, _| drop(scene.a.blocks().wake()));
    let some = move |scene: &Scene| Some(asleep(scene));
    found.each_call("the end of blocks that sleep", some, |_, blocks| {
        drop(blocks.take());
    });
}

// I-147
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn exchanges() {
    let mut found = Found::default();
    let two = |scene: &Scene| {
        let store = store(scene);
        let new = [4, 3].map(|size| scene.b.allocate(size * G).unwrap());
        scene.b.blocks().sleep(Contents::Keep(&store)).unwrap();
        let old = [5, 1].map(|size| scene.a.allocate(size * G).unwrap());
        (old, new, store)
    };
    found.each_call("an exchange", two, |scene, (_, _, store)| {
        let exchange = Exchange::new().sleep(scene.a.blocks(), Contents::Keep(store));
        drop(exchange.wake(scene.b.blocks()).run());
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn groups() {
    let mut found = Found::default();
    let long = std::time::Duration::from_secs(600);
    let awake = |scene: &Scene| {
        let directory = tempfile::tempdir().unwrap();
        let group = Group::join(directory.path(), "g", 1, Some(0)).unwrap();
        (scene.pieces(3), store(scene), group, directory)
    };
    found.each_call("a group's sleep", awake, |scene, (_, store, group, _)| {
        drop(group.sleep(&scene.a.blocks(), Contents::Keep(store), long));
    });
    let asleep = |scene: &Scene| {
        let world = awake(scene);
        scene.a.blocks().sleep(Contents::Keep(&world.1)).unwrap();
        world
    };
    found.each_call("a group's wake", asleep, |scene, (_, _, group, _)| {
        drop(group.wake(&scene.a.blocks(), long));
    });
}

#[test]
fn sequences() {
    let mut found = Found::default();
    const SHAPE: Shape = Shape {
        layers: 2,
        kv_heads: 2,
        head_size: 2048,
        element_bytes: 4,
        max_tokens: 400,
        max_sequences: 6,
    };
    for layout in [Layout::TokenMajor, Layout::LayerMajor] {
        let cache = |scene: &Scene| {
            scene.used(6);
            let builder = KvCache::builder(&scene.a, &scene.stream, SHAPE);
            let mut cache = builder.layout(layout).build().unwrap();
            let sequence = cache.try_create(40).unwrap();
            (cache, sequence)
        };
        found.each_call("a sequence", cache, |_, (cache, _)| {
            drop(cache.try_create(70))
        });
        found.each_call("an append", cache, |_, (cache, one)| {
            drop(cache.try_append(&[(*one, 90)]))
        });

        found.each_call("the end of a sequence", cache, |scene, (cache, one)| {
            drop(cache.truncate(*one, 1));
            drop(cache.free(*one));
            scene.pool.trim(0).ok();
        });
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn paged_caches() {
    let mut found = Found::default();
    let cache = |scene: &Scene| {
        scene.used(6);
        let group = LayerGroup::new(2, 2).keys_and_values(3, (G / 128) as u32, 4);
        let builder = PagedKv::builder(&scene.a, &scene.stream, 12).group(group);
        let cache = builder.extent(2 * G).build().unwrap();
        cache.back(&[0, 1, 2]).unwrap();
        (cache, store(scene))
    };
    found.each_call("blocks", cache, |_, (cache, _)| {
        drop(cache.try_back(&[4, 9, 11]))
    });
    found.each_call("a reserve", cache, |_, (cache, _)| {
        drop(cache.try_reserve(6))
    });
    found.each_call("the end of blocks", cache, |_, (cache, _)| {
        drop(cache.release(&[0, 2]));
        cache.purge().ok();
    });
    found.each_call("a paged cache's sleep", cache, |scene, (cache, store)| {
        drop(scene.a.blocks().paged(cache).sleep(Contents::Keep(store)));
    });
    let asleep = |scene: &Scene| {
        let (cache, store) = cache(scene);
        scene
            .a
            .blocks()
            .paged(&cache)
            .sleep(Contents::Keep(&store))
            .unwrap();
        (cache, store)
    };
    found.each_call("a paged cache's wake", asleep, |scene, (cache, _)| {
        drop(scene.a.blocks().paged(cache).wake());
    });
}

#[test]
fn exports() {
    let mut found = Found::default();
    let block = |scene: &Scene| scene.pieces(3);
    found.each_call("an export", block, |scene, block| {
        drop(Offer::block(block).and_then(|offer| offer.parcel()));
        drop(block.shrink_to(G));
        scene.pool.trim(0).ok();
    });
}
