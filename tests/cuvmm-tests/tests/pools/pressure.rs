//! Pressure hooks: which are called, for how much memory, and how much a refusal says is available.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{D0, G, Rig, pool};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::error::{BlockError, MemoryError, PoolError, Shortage};
use cuvmm::pool::Pressure;
use cuvmm::{Block, Contents, Pool, Stream, Tenant};

/// A tenant whose hook gives up blocks, the last first, until it has given enough, and the calls of
/// that hook.
struct Giver {
    tenant: Tenant,
    blocks: Arc<Mutex<Vec<Block>>>,
    asked: Arc<Mutex<Vec<Pressure>>>,
}

impl Giver {
    fn new(pool: &Pool, name: &str, priority: i32, guarantee: u64) -> Self {
        let blocks = Arc::new(Mutex::new(Vec::<Block>::new()));
        let asked = Arc::new(Mutex::new(vec![]));
        let (gives, hears) = (Arc::clone(&blocks), Arc::clone(&asked));
        let builder = pool.tenant(name).priority(priority).guarantee(guarantee);
        let tenant = builder.on_pressure(move |pressure| {
            hears.lock().unwrap().push(pressure.clone());
            let (mut blocks, mut given) = (gives.lock().unwrap(), 0);
            while given < pressure.bytes.max(1) {
                let Some(block) = blocks.pop() else { return };
                given += block.size();
            }
        });
        let tenant = tenant.register().unwrap();
        Self {
            tenant,
            blocks,
            asked,
        }
    }

    /// Allocates memory in blocks of a granule.
    fn takes(&self, granules: u64) {
        let block = |_| self.tenant.try_allocate(G).unwrap();
        self.blocks.lock().unwrap().extend((0..granules).map(block));
    }

    /// Returns the granules requested by each call of the hook.
    fn was_asked(&self) -> Vec<u64> {
        let asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.iter().map(|pressure| pressure.bytes / G).collect()
    }
}

fn shortage(error: BlockError) -> Shortage {
    match error {
        BlockError::OutOfMemory(shortage) => *shortage,
        other => panic!("{other}"),
    }
}

on_both! {
    fn a_hook_is_asked_for_what_is_missing_now(rig) {
        let pool = pool(rig, 16);
        let (first, second) = (Giver::new(&pool, "first", 0, 0), Giver::new(&pool, "second", 1, 0));
        first.takes(6);
        second.takes(6);
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.block(2 * G).capacity(16 * G).try_allocate().unwrap();
        // Two granules are free; the block can also use the rest of its last granule, so one
        // granule is missing.
        block.shrink_to(2 * G - G / 2).unwrap();
        block.grow_to(5 * G - G / 2).unwrap();
        assert_eq!((first.was_asked(), second.was_asked()), (vec![1], vec![]));
        // The first tenant gives up all five of its granules, and the second is called for the
        // rest.
        block.grow_to(12 * G).unwrap();
        assert_eq!((first.was_asked(), second.was_asked()), (vec![7], vec![2]));
        assert_eq!(pool.stats().in_use, 16 * G);
        drop(block);
    }

    fn a_hook_is_replaced_and_removed(rig) {
        let pool = pool(rig, 8);
        let giver = Giver::new(&pool, "giver", 0, 0);
        let tenant = pool.tenant("a").register().unwrap();
        giver.takes(8);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (hears, gives) = (Arc::clone(&calls), Arc::clone(&giver.blocks));
        let hook = move |pressure: &Pressure| {
            hears.lock().unwrap().push(pressure.wanted_by.clone());
            drop(gives.lock().unwrap().pop());
        };
        giver.tenant.set_hook(Some(Arc::new(hook))).unwrap();
        // It is called for other tenants, and for the tenant itself.
        let one = tenant.allocate(G).unwrap();
        let other = giver.tenant.allocate(G).unwrap();
        assert_eq!(*calls.lock().unwrap(), ["a", "giver"]);
        assert!(giver.was_asked().is_empty(), "the hook was replaced");
        giver.tenant.set_hook(None).unwrap();
        assert_eq!(Arc::strong_count(&calls), 1, "the old hook is dropped");
        tenant.allocate(G).unwrap_err();
        giver.tenant.allocate(G).unwrap_err();
        assert_eq!(calls.lock().unwrap().len(), 2);
        giver.tenant.clone().unregister();
        let gone = giver.tenant.set_hook(None);
        assert!(matches!(gone, Err(PoolError::Unregistered { .. })), "{gone:?}");
        drop((one, other));
    }

    fn what_can_be_taken_back_is_not_asked_for(rig) {
        let pool = pool(rig, 16);
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(10);
        let idle = pool.tenant("idle").register().unwrap();
        drop(idle.try_allocate(4 * G).unwrap());
        let tenant = pool.tenant("a").register().unwrap();
        drop(tenant.allocate(9 * G).unwrap());
        assert_eq!(giver.was_asked(), [3]);
        assert_eq!(giver.tenant.stats().in_use, 7 * G);
        giver.blocks.lock().unwrap().clear();
    }

    fn no_hook_is_called_for_a_request_above_the_tenants_own_limit(rig) {
        let pool = pool(rig, 16);
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(12);
        let tenant = pool.tenant("a").limit(4 * G).register().unwrap();
        let block = tenant.allocate(3 * G).unwrap();
        // More than the tenant may ever have: a request without a timeout is refused at once too.
        let mut refused = tenant.block(5 * G).timeout(Duration::MAX).allocate();
        assert_eq!(shortage(refused.unwrap_err()).available, G);
        // More than the tenant may have now, which other tenants cannot change.
        refused = tenant.allocate(2 * G);
        assert_eq!(shortage(refused.unwrap_err()).available, G);
        assert_eq!(giver.was_asked(), [0; 0]);
        // The same if both bounds apply.
        giver.takes(1);
        assert!(tenant.allocate(2 * G).is_err());
        assert_eq!(giver.was_asked(), [0; 0]);
        drop((block, giver.blocks.lock().unwrap().pop()));
        // The tenant's own idle memory is within its limit.
        drop(tenant.allocate(4 * G).unwrap());
        assert_eq!(giver.was_asked(), [0; 0]);
        giver.blocks.lock().unwrap().clear();
    }

    fn no_hook_is_called_for_a_request_that_guarantees_rule_out(rig) {
        let pool = pool(rig, 16);
        let giver = Giver::new(&pool, "giver", 0, 4 * G);
        giver.takes(12);
        let tenant = pool.tenant("a").register().unwrap();
        // A guarantee may change while a request waits; a limit does not.
        let moment = Duration::from_millis(1);
        for (size, wait) in [(13, moment), (17, Duration::MAX), (1 << 20, Duration::MAX)] {
            let refused = tenant.block(size * G).timeout(wait).allocate();
            assert!(matches!(refused, Err(BlockError::OutOfMemory(_))), "{size}: {refused:?}");
            let many = tenant.block(G).timeout(wait).allocate_many(size as usize);
            assert!(many.is_err(), "{size}");
        }
        let mut block = tenant.block(4 * G).capacity(16 * G).timeout(moment)
            .allocate().unwrap();
        assert!(block.grow_to(13 * G).is_err());
        assert_eq!(giver.was_asked(), [0; 0]);
        block.grow_to(12 * G).unwrap();
        assert_eq!(giver.was_asked(), [8]);
        drop(block);
        giver.blocks.lock().unwrap().clear();
    }

    // I-48
    fn a_hook_is_called_only_where_its_tenant_can_give_something(rig) {
        let pool = pool(rig, 16);
        // A tenant that holds no more than its guarantee.
        let poor = Giver::new(&pool, "poor", 0, 4 * G);
        poor.takes(4);
        // Idle memory is reclaimed without calling the hook.
        let idle = Giver::new(&pool, "idle", 1, 0);
        idle.takes(2);
        idle.blocks.lock().unwrap().clear();
        let giver = Giver::new(&pool, "giver", 2, 0);
        giver.takes(4);
        let other = pool.tenant("other").register().unwrap();
        let kept = other.try_allocate(5 * G).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        drop(tenant.allocate(4 * G).unwrap());
        assert_eq!((poor.was_asked(), idle.was_asked()), (vec![], vec![]));
        assert_eq!(giver.was_asked(), [1]);
        // All that the hooks could give would not suffice.
        assert!(tenant.allocate(8 * G).is_err());
        assert_eq!(giver.was_asked(), [0; 0]);
        // For a request that waits, part of the memory is worth a call.
        std::thread::scope(|scope| {
            let asked = &giver.asked;
            scope.spawn(move || {
                while asked.lock().unwrap().is_empty() {
                    std::thread::yield_now();
                }
                drop(kept);
            });
            let got = tenant.block(8 * G).timeout(Duration::MAX).allocate().unwrap();
            assert_eq!(got.size(), 8 * G);
        });
        assert_eq!(poor.was_asked(), [0; 0]);
        poor.blocks.lock().unwrap().clear();
    }

    fn a_lack_of_mappings_or_addresses_says_so(rig) {
        let pool = common::limited(rig, 32).mapping_limit(4).address_limit(24 * G).build().unwrap();
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(3);
        let tenant = pool.tenant("a").register().unwrap();
        drop(tenant.allocate(6 * G).unwrap());
        let asked = std::mem::take(&mut *giver.asked.lock().unwrap());
        let lacks = |one: &Pressure| (one.bytes, one.mappings, one.addresses);
        assert_eq!(asked.iter().map(lacks).collect::<Vec<_>>(), [(0, 1, 0)]);
        // The hooks cannot free that number of addresses.
        assert!(matches!(
            tenant.block(G).capacity(31 * G).timeout(Duration::MAX).allocate(),
            Err(BlockError::OutOfAddresses { .. })
        ));
        assert_eq!(giver.was_asked(), [0; 0]);
        giver.blocks.lock().unwrap().clear();
    }

    fn a_capture_asks_nobody(rig) {
        let pool = pool(rig, 8);
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(2);
        let tenant = pool.tenant("a").register().unwrap();
        drop(tenant.try_allocate(6 * G).unwrap());
        let guard = pool.capture_guard();
        let other = pool.tenant("b").register().unwrap();
        assert!(matches!(other.allocate(4 * G), Err(BlockError::Capturing(_))));
        assert_eq!(giver.was_asked(), [0; 0]);
        drop(guard);
        drop(other.allocate(4 * G).unwrap());
        giver.blocks.lock().unwrap().clear();
    }

    fn ones_own_hook_is_asked_before_those_of_others(rig) {
        let pool = pool(rig, 12);
        let other = Giver::new(&pool, "other", -1, 0);
        other.takes(6);
        let cache = Arc::new(Mutex::new(Vec::<Block>::new()));
        let asked = Arc::new(Mutex::new(vec![]));
        let (gives, hears) = (Arc::clone(&cache), Arc::clone(&asked));
        let builder = pool.tenant("own").on_shortage(move |pressure| {
            hears.lock().unwrap().push((pressure.wanted_by.clone(), pressure.bytes / G));
            let mut blocks = gives.lock().unwrap();
            let left = blocks.len().saturating_sub((pressure.bytes / G) as usize);
            blocks.truncate(left);
        });
        let own = builder.register().unwrap();
        cache.lock().unwrap().extend((0..4).map(|_| own.try_allocate(G).unwrap()));
        let was_asked = || std::mem::take(&mut *asked.lock().unwrap());
        // The tenant's own hook gives enough.
        let first = own.allocate(5 * G).unwrap();
        assert_eq!(was_asked(), [("own".to_owned(), 3)]);
        assert!(other.was_asked().is_empty());
        // It has one granule left, and the other tenant gives the rest.
        let second = own.allocate(3 * G).unwrap();
        assert_eq!((was_asked(), other.was_asked()), (vec![("own".to_owned(), 3)], vec![2]));
        assert!(cache.lock().unwrap().is_empty());
        // A request beyond the limit calls no hook.
        assert!(own.allocate(13 * G).is_err());
        assert!(was_asked().is_empty() && other.was_asked().is_empty());
        drop((first, second));
    }

    fn only_ones_own_hook_is_asked_where_ones_own_limit_is_short(rig) {
        let pool = pool(rig, 12);
        let other = Giver::new(&pool, "other", 0, 0);
        other.takes(4);
        let cache = Arc::new(Mutex::new(Vec::<Block>::new()));
        let gives = Arc::clone(&cache);
        let asked = Arc::new(Mutex::new(vec![]));
        let hears = Arc::clone(&asked);
        let builder = pool.tenant("own").limit(4 * G).on_shortage(move |pressure| {
            hears.lock().unwrap().push(pressure.bytes / G);
            gives.lock().unwrap().pop();
        });
        let own = builder.register().unwrap();
        // The tenant holds no memory, so its hook is not called.
        assert!(own.allocate(5 * G).is_err());
        assert!(asked.lock().unwrap().is_empty());
        cache.lock().unwrap().push(own.try_allocate(3 * G).unwrap());
        let had = own.allocate(2 * G).unwrap();
        assert_eq!(*asked.lock().unwrap(), [1]);
        assert!(other.was_asked().is_empty());
        drop(had);
    }

    fn a_hook_is_told_whether_and_until_when_the_request_waits(rig) {
        let pool = pool(rig, 4);
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(4);
        let tenant = pool.tenant("a").register().unwrap();
        let terms = || {
            let asked = std::mem::take(&mut *giver.asked.lock().unwrap());
            asked.iter().map(|one| (one.waits, one.deadline)).collect::<Vec<_>>()
        };
        let held = tenant.allocate(G).unwrap();
        assert_eq!(terms(), [(false, None)]);
        let timeout = Duration::from_secs(600);
        let soonest = Instant::now() + timeout;
        drop((tenant.block(G).timeout(timeout).allocate().unwrap(), held));
        let terms = terms();
        assert!(matches!(terms[..], [(true, Some(deadline))] if deadline >= soonest), "{terms:?}");
        giver.blocks.lock().unwrap().clear();
    }

    // I-46
    fn try_calls_call_no_hook(rig) {
        let pool = pool(rig, 8);
        let giver = Giver::new(&pool, "giver", 0, 0);
        giver.takes(6);
        let (tenant, stream) = common::joined(rig, &pool);
        let of = || tenant.block(G).capacity(8 * G).home_stream(&stream);
        let mut block = of().try_allocate().unwrap();
        assert!(tenant.try_allocate(4 * G).is_err());
        assert!(of().try_allocate_many(3).is_err());
        assert!(block.try_grow_to(4 * G).is_err());
        assert_eq!(giver.was_asked(), [0; 0]);
        block.grow_to(4 * G).unwrap();
        assert_eq!(giver.was_asked(), [2]);
        // Work that still runs is not waited for either.
        rig.held_kernel(&stream, &[], &[(block.address(), G, 1)]);
        drop(block);
        let other = pool.tenant("b").register().unwrap();
        assert!(other.try_allocate(4 * G).is_err());
        rig.machine.release_all_streams(D0);
        drop(other.try_allocate(4 * G).unwrap());
        assert_eq!(giver.was_asked(), [0; 0]);
        giver.blocks.lock().unwrap().clear();
    }

    // I-47
    fn in_a_hook_nothing_waits_and_no_hook_is_called(rig) {
        let pool = pool(rig, 4);
        let calls = Arc::new(Mutex::new(vec![]));
        let tenants = Arc::new(Mutex::new(Vec::<Tenant>::new()));
        let hook = |name: &'static str| {
            let (calls, tenants) = (Arc::clone(&calls), Arc::clone(&tenants));
            move |_: &Pressure| {
                calls.lock().unwrap().push(name);
                let tenants = tenants.lock().unwrap().clone();
                for tenant in &tenants {
                    // Each hook would wait for the other, or for itself.
                    let wanted = tenant.block(4 * G).timeout(Duration::from_secs(600));
                    assert!(wanted.allocate().is_err());
                }
            }
        };
        let a = pool.tenant("a").on_shortage(hook("a")).register().unwrap();
        let b = pool.tenant("b").on_pressure(hook("b")).on_shortage(hook("b's own"));
        let b = b.register().unwrap();
        tenants.lock().unwrap().extend([a.clone(), b.clone()]);
        let (used, others) = (a.try_allocate(2 * G).unwrap(), b.try_allocate(2 * G).unwrap());
        assert!(a.allocate(2 * G).is_err());
        assert_eq!(*calls.lock().unwrap(), ["a", "b"]);
        // Outside the hook requests wait again.
        let waited = a.block(2 * G).timeout(Duration::from_millis(1)).allocate();
        assert!(waited.is_err());
        assert_eq!(*calls.lock().unwrap(), ["a", "b", "a", "b"]);
        tenants.lock().unwrap().clear();
        drop((used, others));
    }

    // I-86
    fn a_hook_that_puts_blocks_to_sleep_waits_for_no_slot_of_the_request(rig) {
        let pool = pool(rig, 8);
        let tenants = Arc::new(Mutex::new(None::<Tenant>));
        let of_hook = Arc::clone(&tenants);
        let tenant = pool.tenant("a").on_shortage(move |_| {
            let tenant = of_hook.lock().unwrap().clone().unwrap();
            tenant.blocks().sleep(Contents::Discard).unwrap();
        });
        let tenant = tenant.register().unwrap();
        *tenants.lock().unwrap() = Some(tenant.clone());
        let long = Duration::from_secs(600);
        let block = |granules| tenant.block(granules * G).capacity(8 * G).timeout(long);
        let (mut grows, other) = (block(4).allocate().unwrap(), block(2).allocate().unwrap());
        // The hook takes the block itself.
        let refused = grows.grow_to(8 * G).unwrap_err();
        assert!(matches!(refused, BlockError::Memory(MemoryError::Asleep(_))), "{refused}");
        assert!(grows.is_asleep() && other.is_asleep());
        tenant.blocks().wake().unwrap();
        assert!(grows.fork(4 * G, 8 * G).is_err());
        tenant.blocks().wake().unwrap();
        let served = block(8).allocate().unwrap();
        assert!(grows.is_asleep() && other.is_asleep());
        drop((served, grows, other));
        tenants.lock().unwrap().take();
    }

    fn what_is_stranded_is_not_shown_as_pending(rig) {
        let pool = pool(rig, 8);
        let stream = Stream::new(&rig.device).unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.block(8 * G).home_stream(&stream).allocate().unwrap();
        common::busy(rig, &stream, &block, 1);
        // One extent: the memory that the block gives up is stranded in it.
        block.shrink_to(3 * G).unwrap();
        let other = pool.tenant("b").register().unwrap();
        let refused = shortage(other.allocate(G).unwrap_err());
        assert_eq!((refused.stranded, refused.pending_free, refused.available), (5 * G, 0, 0));
        let text = refused.to_string();
        assert!(text.contains("stranded in extents in use  10 MiB"), "{text}");
        rig.machine.release_all_streams(D0);
        assert!(other.allocate(G).is_err());
        // The block itself can use it, but no other.
        block.grow_to(8 * G).unwrap();
        drop(block);
        drop(other.allocate(8 * G).unwrap());
    }
}

/// Returns `true` if exactly the memory that a refusal reports as available can be allocated.
fn holds<T>(
    refused: Result<T, BlockError>,
    mut again: impl FnMut(u64) -> Result<T, BlockError>,
) -> bool {
    let Err(BlockError::OutOfMemory(said)) = refused else {
        return false;
    };
    assert!(said.available < said.wanted, "{said}");
    let more = again(said.available + G);
    assert!(more.is_err(), "one granule more was available: {said}");
    if said.available > 0 {
        again(said.available).unwrap_or_else(|error| panic!("{error}, previously {said}"));
    }
    true
}

/// Lets all work go, even if a check fails, because closing the pool waits for it.
struct LetsGo<'a, B: Backing>(&'a Rig<B>);

impl<B: Backing> Drop for LetsGo<'_, B> {
    fn drop(&mut self) {
        self.0.machine.release_all_streams(D0);
    }
}

/// Runs a random program: tenants with guarantees and limits, and blocks that are shrunk, leased
/// and kept busy. Returns the number of refusals that were checked.
fn program(rig: &Rig<impl Backing>, seed: u64) -> u64 {
    let mut dice = fastrand::Rng::with_seed(seed);
    let pool = pool(rig, 48);
    let streams: Vec<Stream> = (0..3).map(|_| Stream::new(&rig.device).unwrap()).collect();
    let tenant = |index: u64| {
        let builder = pool.tenant(format!("{index}")).priority(dice.i32(0..2));
        let builder = builder.guarantee(dice.u64(0..8) * G);
        builder.limit(dice.u64(12..60) * G).register().unwrap()
    };
    let tenants: Vec<Tenant> = (0..3).map(tenant).collect();
    let (mut blocks, mut leases, mut looked) = (Vec::<Block>::new(), vec![], 0);
    let _lets_go = LetsGo(rig);
    for _ in 0..60 {
        let tenant = &tenants[dice.usize(..3)];
        let (size, at) = (1 + dice.u64(..16 * G), dice.usize(..blocks.len().max(1)));
        match dice.u8(..10) {
            0..=3 => {
                let builder = tenant.block(size).capacity(64 * G);
                let builder = match dice.usize(..4) {
                    3 => builder,
                    stream => builder.home_stream(&streams[stream]),
                };
                blocks.extend(builder.try_allocate().ok());
            }
            4 if !blocks.is_empty() => drop(blocks.swap_remove(at)),
            5 if !blocks.is_empty() => {
                let size = dice.u64(1..=blocks[at].size());
                blocks[at].shrink_to(size).unwrap();
            }
            6 if !blocks.is_empty() && leases.len() < 2 => leases.push(blocks[at].lease()),
            7 => {
                leases.pop();
                let stream = streams[dice.usize(..3)].as_raw();
                rig.machine.hold(D0, stream);
                rig.machine
                    .queue_kernel(D0, stream, vec![], vec![])
                    .unwrap();
            }
            8 => rig.machine.release_all_streams(D0),
            9 if !blocks.is_empty() => {
                let block = &mut blocks[at];
                let refused = block.try_grow_to(block.size() + size);
                let used = block.size().next_multiple_of(G);
                looked += u64::from(holds(refused, |more| block.try_grow_to(used + more)));
            }
            _ => {
                let refused = tenant.try_allocate(size + 8 * G);
                looked += u64::from(holds(refused.map(drop), |size| {
                    tenant.try_allocate(size).map(drop)
                }));
            }
        }
    }
    looked
}

#[test]
fn what_a_refusal_says_could_be_had_can_be_had_and_no_more() {
    let mut looked = 0;
    for seed in 0..200 {
        let rig = common::clean(common::model());
        looked += program(&rig, seed);
    }
    assert!(looked > 1_000, "only {looked} refusals");
}
