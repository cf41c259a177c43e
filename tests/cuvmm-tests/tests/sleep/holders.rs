//! Tests I-95, I-107, I-111 and I-126, for heaps and paged caches: their memory stays while work may use
//! it, their addresses stay, and kept contents return.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use crate::common::busy::while_the_device_works;
use crate::common::captures;
use crate::common::world::{Books, books};
use crate::common::{self, D0, G, Rig};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, DeviceAddress};
use cuvmm::error::{BlockError, MemoryError, SleepError};
use cuvmm::paged::{LayerGroup, Layout};
use cuvmm::sleep::{Blocks, Progress};
use cuvmm::{Allocation, Contents, Heap, HostStore, PagedKv, Pool, Stream, Tenant};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// A heap for graphs, of which some memory has two addresses.
    Graphs,
    Paged(Layout),
    /// A paged cache that sleeps after all work of the device.
    AfterAllWork,
}

const ALL: [Kind; 3] = [
    Kind::Graphs,
    Kind::Paged(Layout::BlockMajor),
    Kind::AfterAllWork,
];

/// The kinds that sleep only when all work of the device is complete.
const AFTER_ALL_WORK: [Kind; 2] = [Kind::Graphs, Kind::AfterAllWork];

enum Sleeper {
    Heap(Heap),
    Paged(PagedKv),
}

/// A heap or cache with memory in use.
pub(crate) struct Scene {
    // Fields in drop order.
    live: Vec<Allocation>,
    sleeper: Sleeper,
    pub(crate) tenant: Tenant,
    other: Tenant,
    pub(crate) store: HostStore,
    home: Stream,
    pub(crate) pool: Pool,
    /// The memory that work writes.
    memory: (DeviceAddress, u64),
    /// The addresses of each granule of it.
    shown: Vec<u64>,
}

impl Scene {
    fn new(rig: &Rig<impl Backing>, kind: Kind) -> Self {
        Self::of(rig, kind, 64, 10)
    }

    /// Creates the scene in a pool of some granules, with a store for some.
    pub(crate) fn of(rig: &Rig<impl Backing>, kind: Kind, granules: u64, kept: u64) -> Self {
        let (pool, [tenant, other], home) = common::pair(rig, granules);
        let store = HostStore::builder(&rig.device).pinned(kept * G);
        let mut scene = Self {
            live: vec![],
            sleeper: sleeper(&tenant, &home, kind),
            store: store.build().unwrap(),
            tenant,
            other,
            home,
            pool,
            memory: (DeviceAddress(0), G),
            shown: vec![],
        };
        match &scene.sleeper {
            Sleeper::Paged(kv) => {
                kv.back(&[0, 1, 7]).unwrap();
                scene.memory.0 = kv.view(0, 0, 0).unwrap().block(7).unwrap();
                scene.shown = vec![scene.memory.0.0];
            }
            Sleeper::Heap(heap) => {
                let allocate = |size| heap.allocate(size, 1, &scene.home).unwrap();
                scene.live = (0..8).map(|_| allocate(G)).collect();
                let freed = [6, 4, 2, 0].map(|index| scene.live.remove(index));
                scene.shown = freed.iter().map(|it| it.address().0).collect();
                drop(freed);
                let joined = allocate(4 * G);
                assert_eq!(heap.stats().stitches, 1);
                scene.memory = (joined.address(), 4 * G);
                let granules = (0..4).map(|index| joined.address().0 + index * G);
                scene.shown.extend(granules);
                scene.live.push(joined);
            }
        }
        scene.work(rig, &scene.home, 1);
        rig.machine.release_stream(D0, scene.home.as_raw());
        scene.home.synchronize().unwrap();
        scene
    }

    pub(crate) fn alone(&self) -> Blocks<'_> {
        match &self.sleeper {
            Sleeper::Heap(heap) => heap.alone(),
            Sleeper::Paged(kv) => kv.alone(),
        }
    }

    fn patient(&self) -> Blocks<'_> {
        self.alone().timeout(Duration::from_secs(600))
    }

    pub(crate) fn contents(&self, keeps: bool) -> Contents<'_> {
        match keeps {
            true => self.keep(),
            false => Contents::Discard,
        }
    }

    pub(crate) fn keep(&self) -> Contents<'_> {
        Contents::Keep(&self.store)
    }

    pub(crate) fn is_asleep(&self) -> bool {
        match &self.sleeper {
            Sleeper::Heap(heap) => heap.is_asleep(),
            Sleeper::Paged(kv) => kv.is_asleep(),
        }
    }

    /// Queues work, held back, that writes a byte to the memory.
    fn work(&self, rig: &Rig<impl Backing>, stream: &Stream, byte: u8) {
        let (at, size) = self.memory;
        rig.held_kernel(stream, &[], &[(at, size, byte)]);
    }

    /// Checks the bytes at each address of the memory.
    pub(crate) fn shows(&self, rig: &Rig<impl Backing>, byte: u8) {
        for &at in &self.shown {
            let seen = common::copy(rig, at).expect("nothing is mapped");
            rig.shows(seen, [byte; 4]);
        }
    }

    fn is_gone(&self, rig: &Rig<impl Backing>) {
        assert!(self.shown.iter().all(|&at| common::copy(rig, at).is_none()));
    }

    fn picture(&self) -> (Books, bool, u64) {
        (books(&self.pool), self.is_asleep(), self.store.free())
    }

    /// Lets another tenant write to all memory that is free, and checks that it sees nothing of this
    /// one.
    pub(crate) fn soil(&self, rig: &Rig<impl Backing>) {
        let size = self.other.headroom().unwrap().taking_back;
        let block = self.other.block(size).home_stream(&self.home);
        let block = block.allocate().unwrap();
        self.home.synchronize().unwrap();
        let granules = (0..size).step_by(G as usize);
        let seen = granules.map(|offset| common::copy(rig, block.address().0 + offset).unwrap());
        let seen: BTreeSet<_> = seen.collect();
        assert!(
            !rig.keeps_bytes() || seen.is_subset(&BTreeSet::from([[0; 4], [99; 4]])),
            "{seen:?}"
        );
        rig.kernel(&self.home, &[], &[(block.address(), size, 99)]);
        self.home.synchronize().unwrap();
    }
}

fn sleeper(tenant: &Tenant, home: &Stream, kind: Kind) -> Sleeper {
    if kind == Kind::Graphs {
        let heap = Heap::builder(tenant).for_graphs(true);
        return Sleeper::Heap(heap.build().unwrap());
    }
    let group = LayerGroup::new(2, 1).part(1, G as u32, 1);
    let kv = PagedKv::builder(tenant, home, 16)
        .group(group)
        .extent(2 * G);
    let kv = kv
        .layout(Layout::LayerMajor)
        .sleep_after_all_work(kind == Kind::AfterAllWork);
    Sleeper::Paged(kv.build().unwrap())
}

fn is_busy<T>(outcome: &Result<T, SleepError>) -> bool {
    use SleepError::{CacheBusy, HeapBusy};
    matches!(outcome, Err(HeapBusy { .. } | CacheBusy { .. }))
}

fn let_go(rig: &Rig<impl Backing>, stream: &Stream) {
    rig.machine.release_stream(D0, stream.as_raw());
    stream.synchronize().unwrap();
}

/// Waits for some driver calls, or until a thread has ended.
fn calls_go_on(rig: &Rig<impl Backing>, is_over: impl Fn() -> bool) {
    let calls = rig.device.calls().total();
    while rig.device.calls().total() < calls + 8 && !is_over() {
        std::thread::yield_now();
    }
}

on_both! {
    fn a_sleep_waits_for_work(rig) {
        for kind in ALL {
            let scene = Scene::new(rig, kind);
            scene.work(rig, &scene.home, 9);
            std::thread::scope(|scope| {
                let sleeping = scope.spawn(|| scene.patient().sleep(Contents::Discard).unwrap());
                rig.machine.release_stream(D0, scene.home.as_raw());
                let slept = sleeping.join().unwrap();
                assert_eq!(slept.heaps + slept.caches, 1);
            });
            scene.is_gone(rig);
        }
    }

    fn work_that_is_queued_after_the_copy_keeps_the_memory(rig) {
        for kind in ALL {
            let (scene, queued) = (Scene::new(rig, kind), Mutex::new(false));
            let before = scene.picture();
            let queue = |_: &Progress| {
                if !std::mem::replace(&mut *queued.lock().unwrap(), true) {
                    scene.work(rig, &scene.home, 9);
                }
                true
            };
            let slept = scene.alone().on_progress(&queue).sleep(scene.keep());
            assert!(is_busy(&slept), "{slept:?}");
            assert_eq!(scene.picture(), before);
            let_go(rig, &scene.home);
            scene.shows(rig, 9);
        }
    }

    fn nothing_sleeps_or_wakes_during_a_capture(rig) {
        let captured = |outcome: Option<SleepError>| {
            let refused = outcome.unwrap();
            assert!(matches!(refused, SleepError::Memory(MemoryError::Capturing)), "{refused}");
        };
        for kind in ALL {
            let scene = Scene::new(rig, kind);
            for _ in 0..2 {
                let guard = scene.pool.capture_guard();
                captures::begin(&rig.machine, &scene.home);
                captured(scene.alone().sleep(Contents::Discard).err());
                captures::end(&rig.machine, &scene.home);
                drop(guard);
                scene.alone().sleep(Contents::Discard).unwrap();
                let guard = scene.pool.capture_guard();
                captures::begin(&rig.machine, &scene.home);
                captured(scene.alone().wake().err());
                captures::end(&rig.machine, &scene.home);
                drop(guard);
                assert!(scene.is_asleep());
                scene.alone().wake().unwrap();
            }
        }
    }

    // I-95, I-111
    fn work_of_streams_that_no_call_has_named_keeps_the_memory(rig) {
        for kind in AFTER_ALL_WORK {
            let (scene, queued) = (Scene::new(rig, kind), Mutex::new(false));
            let foreign = Stream::new(&rig.device).unwrap();
            scene.work(rig, &foreign, 9);
            let before = scene.picture();
            let slept = scene.alone().sleep(Contents::Discard);
            assert!(is_busy(&slept), "{slept:?}");
            assert_eq!(scene.picture(), before);
            let_go(rig, &foreign);
            // Work that is queued during the copies.
            let queue = |_: &Progress| {
                let mut queued = queued.lock().unwrap();
                if !std::mem::replace(&mut *queued, true) {
                    scene.work(rig, &foreign, 8);
                }
                true
            };
            let slept = scene.alone().on_progress(&queue).sleep(scene.keep());
            assert!(is_busy(&slept), "{slept:?}");
            assert_eq!(scene.picture(), before);
            let_go(rig, &foreign);
            *queued.lock().unwrap() = false;
            std::thread::scope(|scope| {
                let patient = || scene.patient().on_progress(&queue).sleep(scene.keep());
                let sleeping = scope.spawn(patient);
                while !*queued.lock().unwrap() {
                    std::thread::yield_now();
                }
                rig.machine.release_stream(D0, foreign.as_raw());
                sleeping.join().unwrap().unwrap();
            });
            scene.alone().wake().unwrap();
            scene.shows(rig, 8);
        }
    }

    // I-95, I-111
    fn copies_of_other_memory_are_complete_before_the_memory_goes(rig) {
        for kind in AFTER_ALL_WORK {
            let scene = Scene::of(rig, kind, 64, 24);
            let second = sleeper(&scene.tenant, &scene.home, kind);
            let mapped = || rig.machine.live().mappings;
            let seen = Mutex::new(BTreeSet::new());
            let watch = |_: &Progress| {
                seen.lock().unwrap().insert(mapped());
                true
            };
            let mut further = vec![];
            let both = match &second {
                Sleeper::Heap(heap) => {
                    further.push(heap.allocate(4 * G, 1, &scene.home).unwrap());
                    scene.alone().heap(heap)
                }
                Sleeper::Paged(kv) => {
                    kv.back(&[0, 5, 10]).unwrap();
                    scene.alone().paged(kv)
                }
            };
            let before = mapped();
            let both = both.on_progress(&watch);
            let slept = both.sleep(scene.keep()).unwrap();
            assert_eq!(slept.heaps + slept.caches, 2);
            // The driver counts copies of one as work that may use the other.
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            assert_eq!(seen, BTreeSet::from([before]));
            assert!(mapped() < before);
            both.wake().unwrap();
            scene.shows(rig, 1);
        }
    }

    // I-111
    fn it_sleeps_also_where_only_a_wait_tells_that_the_device_is_idle(rig) {
        for kind in AFTER_ALL_WORK {
            let scene = Scene::new(rig, kind);
            let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
            rig.faults.arm(lacking);
            let slept = scene.alone().sleep(scene.keep());
            assert!(is_busy(&slept), "{slept:?}");
            scene.patient().sleep(scene.keep()).unwrap();
            scene.alone().wake().unwrap();
            rig.faults.disarm();
            scene.shows(rig, 1);
        }
    }

    // I-126
    fn a_device_that_always_works_keeps_nothing_awake(rig) {
        for kind in AFTER_ALL_WORK {
            let scene = Scene::new(rig, kind);
            while_the_device_works(rig, || scene.patient().sleep(scene.keep())).unwrap();
            scene.alone().wake().unwrap();
            scene.shows(rig, 1);
        }
    }

    // I-126
    fn work_on_its_own_streams_keeps_the_memory_also_if_it_was_queued_later(rig) {
        for kind in AFTER_ALL_WORK {
            let scene = Scene::new(rig, kind);
            let foreign = Stream::new(&rig.device).unwrap();
            scene.work(rig, &foreign, 7);
            let mapped = rig.machine.live().mappings;
            std::thread::scope(|scope| {
                let sleeping = scope.spawn(|| scene.patient().sleep(Contents::Discard).unwrap());
                // The sleep waits for the work of the stream that no call has named.
                calls_go_on(rig, || false);
                scene.work(rig, &scene.home, 7);
                rig.machine.release_stream(D0, foreign.as_raw());
                calls_go_on(rig, || sleeping.is_finished());
                let now = rig.machine.live().mappings;
                rig.machine.release_stream(D0, scene.home.as_raw());
                sleeping.join().unwrap();
                assert_eq!(now, mapped);
            });
            scene.alone().wake().unwrap();
        }
    }

    fn a_cancelled_sleep_or_wake_leaves_all_as_before(rig) {
        for kind in ALL {
            let scene = Scene::new(rig, kind);
            let (before, mapped) = (scene.picture(), rig.machine.snapshot());
            let stop = |_: &Progress| false;
            for contents in [scene.keep(), Contents::Discard] {
                let cancelled = scene.alone().on_progress(&stop).sleep(contents).unwrap_err();
                assert!(matches!(cancelled, SleepError::Cancelled), "{cancelled}");
                assert_eq!(scene.picture(), before);
                let prepared = scene.alone().prepare_sleep(contents).unwrap();
                assert!(scene.is_asleep() && is_busy(&scene.alone().wake()));
                assert_eq!(scene.pool.stats().committed, before.0.committed);
                scene.is_gone(rig);
                prepared.cancel().unwrap();
                assert_eq!(scene.picture(), before);
            }
            assert_eq!(rig.machine.snapshot(), mapped);
            scene.shows(rig, 1);
            let slept = scene.alone().sleep(scene.keep()).unwrap();
            scene.soil(rig);
            for _ in 0..2 {
                let cancelled = scene.alone().on_progress(&stop).wake().unwrap_err();
                assert!(matches!(cancelled, SleepError::Cancelled), "{cancelled}");
                let prepared = scene.alone().prepare_wake().unwrap();
                assert_eq!(scene.tenant.stats().committed, slept.kept);
                drop(prepared);
                let stats = scene.tenant.stats();
                assert_eq!((stats.committed, stats.asleep), (0, slept.kept));
                scene.is_gone(rig);
            }
            // The memory that had the bytes is scrubbed for the other tenant.
            scene.soil(rig);
            scene.alone().wake().unwrap();
            scene.shows(rig, 1);
        }
    }

    fn what_ends_asleep_leaves_nothing(rig) {
        for kind in ALL {
            for keeps in [true, false] {
                for step in 0..3 {
                    let scene = Scene::new(rig, kind);
                    let Scene { live, sleeper, tenant, store, .. } = scene;
                    let contents = if keeps { Contents::Keep(&store) } else { Contents::Discard };
                    let alone = match &sleeper {
                        Sleeper::Heap(heap) => heap.alone(),
                        Sleeper::Paged(kv) => kv.alone(),
                    };
                    let asleep = (step == 0).then(|| alone.prepare_sleep(contents).unwrap());
                    if step > 0 {
                        alone.sleep(contents).unwrap();
                    }
                    let waking = (step == 2).then(|| alone.prepare_wake().unwrap());
                    drop(alone);
                    // One that is moving goes with the end of the move.
                    drop(sleeper);
                    if let Some(asleep) = asleep {
                        asleep.finish();
                    }
                    drop(waking);
                    assert_eq!(tenant.stats().addresses > 0, !live.is_empty(), "{kind:?}");
                    drop(live);
                    let stats = tenant.stats();
                    assert_eq!((stats.addresses, stats.committed, stats.asleep), (0, 0, 0));
                    assert_eq!(store.free(), store.capacity());
                }
            }
        }
    }

    fn what_sleeps_when_its_tenant_ends_does_not_wake(rig) {
        for kind in ALL {
            let scene = Scene::new(rig, kind);
            scene.alone().sleep(scene.keep()).unwrap();
            scene.tenant.clone().unregister();
            let refused = scene.alone().wake().unwrap_err();
            let is_known = |cause: &BlockError| matches!(cause, BlockError::Unregistered(_));
            assert!(matches!(&refused, SleepError::Block { cause, .. } if is_known(cause)), "{refused}");
            assert!(scene.is_asleep() && scene.store.free() < scene.store.capacity());
            let Scene { live, sleeper, tenant, other, store, pool, .. } = scene;
            drop((sleeper, live));
            assert_eq!((store.free(), pool.stats().addresses), (store.capacity(), 0));
            drop((tenant, other));
            pool.close().unwrap();
        }
    }
}
