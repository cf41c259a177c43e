//! Requests for blocks that wait in the pool's queue while other calls use the cache.

use std::future::Future as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::books::books;
use crate::common::executor::{Task, block_on};
use crate::common::sweep::{sweep_partly, text};
use crate::common::{self, G, Rig, calls_without_mapper, mapped_pool};
use crate::on_both;
use crate::scene::LAYOUTS;
use crate::sleep::{is_asleep, is_busy};
use cuvmm::driver::Call;
use cuvmm::driver::model::{Backing, Nothing};
use cuvmm::error::{BlockError, PagedKvError};
use cuvmm::paged::{BackFuture, LayerGroup, Layout};
use cuvmm::{Contents, Mapper, PagedKv, Pool, Stream, Tenant};

/// Far longer than the mapper takes to serve a request.
const WHILE: Duration = Duration::from_secs(120);

struct World {
    // Fields in drop order.
    kv: Option<PagedKv>,
    a: Tenant,
    b: Tenant,
    pool: Pool,
    mapper: Option<Mapper>,
}

/// A cache whose blocks are a granule each, beside another tenant.
fn world(rig: &Rig<impl Backing>, granules: u64) -> World {
    world_of(rig, granules, Layout::BlockMajor, G as u32)
}

fn world_of(rig: &Rig<impl Backing>, granules: u64, layout: Layout, block: u32) -> World {
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(rig, granules, &mapper);
    let [a, b] = common::tenants(&pool);
    let home = Stream::new(&rig.device).unwrap();
    let group = LayerGroup::new(1, 1).part(1, block, 1);
    let kv = PagedKv::builder(&a, &home, 16).group(group).layout(layout);
    World {
        kv: Some(kv.extent(G).build().unwrap()),
        a,
        b,
        pool,
        mapper: Some(mapper),
    }
}

impl World {
    fn kv(&self) -> &PagedKv {
        self.kv.as_ref().unwrap()
    }

    /// The granules that only requests have.
    fn only_granted(&self) -> u64 {
        self.kv().stats().unwrap().granted / G
    }

    /// The blocks in use, and the granules under them and under what requests were granted.
    fn in_use(&self) -> (Vec<u32>, u64) {
        let backed = (0..16).filter(|&it| self.kv().is_backed(it).unwrap());
        let stats = self.kv().stats().unwrap();
        let backed: Vec<u32> = backed.collect();
        assert_eq!(stats.in_use as usize, backed.len());
        (backed, stats.committed / G)
    }

    /// A request that has memory and has not taken it: other memory was short when it was made.
    fn granted(&self, numbers: &[u32]) -> Task<BackFuture> {
        let free = self.b.headroom().unwrap().taking_back;
        let held = self.b.try_allocate(free).unwrap();
        let waiting = Task::waiting(self.kv().back_async(numbers));
        drop(held);
        assert!(waiting.is_woken(WHILE));
        waiting
    }
}

/// Waits until the mapper has gone through the queue.
fn served(tenant: &Tenant) {
    // No pool can grant it, so it is refused in its turn.
    assert!(block_on(tenant.allocate_async(u64::MAX >> 1)).is_err());
}

fn cause(refused: Result<(), PagedKvError>) -> BlockError {
    match refused {
        Err(PagedKvError::Back { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

on_both! {
    fn a_request_waits_for_memory_and_its_blocks_are_in_use_when_it_is_polled(rig) {
        let world = world(rig, 4);
        world.kv().back(&[0]).unwrap();
        let held = world.b.try_allocate(3 * G).unwrap();
        let waiting = Task::waiting(world.kv().back_async(&[0, 5, 6, 5]));
        served(&world.b);
        assert_eq!((waiting.wakings(), world.in_use()), (0, (vec![0], 1)));
        drop(held);
        assert!(waiting.is_woken(WHILE));
        assert_eq!(world.in_use(), (vec![0], 3));
        let before = calls_without_mapper(&rig.device, &world.pool);
        waiting.finish().unwrap();
        assert_eq!(calls_without_mapper(&rig.device, &world.pool), before);
        assert_eq!(world.in_use(), (vec![0, 5, 6], 3));
        world.kv().release(&[0, 5, 6]).unwrap();
        assert_eq!(world.in_use(), (vec![], 0));
        assert_eq!(books(rig, &world.pool).in_use, 0);
    }

    fn a_request_that_needs_no_waiting_is_ready_at_once(rig) {
        // Two blocks share an extent.
        let world = world_of(rig, 4, Layout::BlockMajor, (G / 2) as u32);
        let kv = world.kv();
        let ready = |numbers: &[u32]| Task::new(kv.back_async(numbers)).poll().is_ready();
        assert!(ready(&[]) && ready(&[0]) && ready(&[0, 4]));
        let held = world.b.try_allocate(G).unwrap();
        let first = Task::waiting(world.b.allocate_async(2 * G));
        // There is memory, and an earlier request waits for more.
        let waiting = Task::waiting(kv.back_async(&[8]));
        assert!(ready(&[1, 5]) && !ready(&[1, 10]));
        waiting.finish().unwrap();
        drop((first, held));
        kv.release(&[0, 1]).unwrap();
        assert!(ready(&[0, 1]), "the memory was not taken");
    }

    fn a_pool_without_a_mapper_refuses_requests(rig) {
        let mut world = world(rig, 4);
        let (_without, tenant, home) = common::scene(rig, 4);
        let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
        let kv = PagedKv::builder(&tenant, &home, 16).group(group).build().unwrap();
        assert_eq!(cause(block_on(kv.back_async(&[0]))), BlockError::NoMapper);
        // One that waits hears that the mapper ends, and so does one that was granted nothing yet.
        let held = world.b.try_allocate(4 * G).unwrap();
        let waiting = Task::waiting(world.kv().back_async(&[0]));
        let World { kv, mapper, .. } = &mut world;
        mapper.take().unwrap().stop();
        assert_eq!(cause(waiting.finish()), BlockError::NoMapper);
        let kv = kv.as_ref().unwrap();
        assert_eq!(cause(block_on(kv.back_async(&[0]))), BlockError::NoMapper);
        drop(held);
        kv.back(&[0]).unwrap();
    }

    fn blocks_that_do_not_exist_and_more_than_the_limit_are_refused_at_once(rig) {
        let world = world(rig, 4);
        let held = world.b.try_allocate(4 * G).unwrap();
        let first = Task::waiting(world.kv().back_async(&[0]));
        for numbers in [&[16][..], &[0, 16]] {
            let refused = block_on(world.kv().back_async(numbers));
            assert!(matches!(refused, Err(PagedKvError::Argument(_))), "{refused:?}");
        }
        world.a.set_limit(2 * G).unwrap();
        let refused = block_on(world.kv().back_async(&[1, 2, 3])).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        world.a.set_limit(u64::MAX).unwrap();
        drop(held);
        first.finish().unwrap();
        assert_eq!(world.in_use(), (vec![0], 1));
    }

    fn more_than_the_limit_is_refused_whatever_of_it_is_in_use(rig) {
        // Two blocks share an extent.
        let world = world_of(rig, 4, Layout::BlockMajor, (G / 2) as u32);
        let kv = world.kv();
        let refused = |backed: PagedKvError| {
            assert!(backed.is_out_of_memory(), "{backed}");
        };
        kv.back(&[0, 2, 4]).unwrap();
        // It lacks two extents, and has five once it is granted.
        let mut task = Task::new(kv.back_async(&[1, 3, 5, 6, 8]));
        assert!(task.poll().is_pending());
        served(&world.b);
        refused(task.finish().unwrap_err());
        // Pinned blocks keep theirs.
        let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
        let pinned = PagedKv::builder(&world.a, kv.home_stream(), 16).group(group).extent(G);
        kv.release(&[0, 2, 4]).unwrap();
        let pinned = pinned.pinned([15]).build().unwrap();
        let mut task = Task::new(pinned.back_async(&[0, 1, 2, 3]));
        assert!(task.poll().is_pending());
        served(&world.b);
        refused(task.finish().unwrap_err());
        block_on(pinned.back_async(&[0, 1, 15])).unwrap();
    }

    fn a_request_asks_for_what_it_lacks_by_now(rig) {
        let world = world_of(rig, 4, Layout::BlockMajor, (G / 2) as u32);
        let kv = world.kv();
        kv.back(&[0, 2, 4]).unwrap();
        let held = world.b.try_allocate(G).unwrap();
        let waiting = Task::waiting(kv.back_async(&[1, 3, 5, 6]));
        kv.release(&[0, 2, 4]).unwrap();
        let more = world.b.block(3 * G).timeout(WHILE).allocate().unwrap();
        served(&world.b);
        assert_eq!(waiting.wakings(), 0);
        world.a.set_limit(3 * G).unwrap();
        let BlockError::OutOfMemory(shortage) = cause(waiting.finish()) else {
            panic!("not refused for memory")
        };
        assert_eq!(shortage.wanted, 4 * G);
        drop((held, more));
    }

    fn a_request_dropped_before_it_is_granted_is_withdrawn(rig) {
        let world = world(rig, 4);
        let held = world.b.try_allocate(4 * G).unwrap();
        let (first, second) = (
            Task::waiting(world.kv().back_async(&[0, 1])),
            Task::waiting(world.kv().back_async(&[2, 3])),
        );
        drop(first);
        drop(held);
        second.finish().unwrap();
        served(&world.b);
        assert_eq!(world.in_use(), (vec![2, 3], 2));
        // One that was never polled.
        drop(world.kv().back_async(&[7]));
        assert_eq!(world.in_use(), (vec![2, 3], 2));
    }

    // I-122
    fn memory_that_was_granted_and_not_taken_goes_with_the_request(rig) {
        let world = world(rig, 8);
        world.kv().back(&[0]).unwrap();
        let granted = world.granted(&[0, 5, 6, 6]);
        assert_eq!(world.in_use(), (vec![0], 3));
        assert_eq!(world.only_granted(), 2);
        // No other request gets it meanwhile.
        assert!(world.b.try_allocate(6 * G).is_err());
        world.b.try_allocate(5 * G).map(drop).unwrap();
        drop(granted);
        assert_eq!(world.in_use(), (vec![0], 1));
        assert_eq!(world.only_granted(), 0);
        world.b.try_allocate(7 * G).map(drop).unwrap();
        assert_eq!(books(rig, &world.pool).in_use, G);
    }

    // I-122
    fn a_request_that_was_answered_takes_its_blocks_in_the_next_poll(rig) {
        let mut world = world(rig, 4);
        let mut context = Context::from_waker(Waker::noop());
        let kv = world.kv();
        let [mut at_once, mut dropped, mut ends] = [[0, 1], [1, 2], [0, 3]].map(|it| Box::pin(kv.back_async(&it)));
        assert!(at_once.as_mut().poll_answered(&mut context).is_ready());
        assert!(dropped.as_mut().poll_answered(&mut context).is_ready());
        assert!(at_once.as_mut().poll_answered(&mut context).is_ready());
        assert_eq!(world.in_use(), (vec![], 3));
        assert!(is_busy(&kv.alone().sleep(Contents::Discard)));
        // The second one waits until the other is dropped.
        assert!(ends.as_mut().poll_answered(&mut context).is_ready());
        let mut waits = Box::pin(kv.back_async(&[4]));
        assert!(waits.as_mut().poll_answered(&mut context).is_pending());
        let mut refused = Box::pin(kv.back_async(&[16]));
        assert!(refused.as_mut().poll_answered(&mut context).is_ready());
        assert!(matches!(block_on(refused), Err(PagedKvError::Argument(_))));
        drop(dropped);
        block_on(waits).unwrap();
        assert_eq!(at_once.as_mut().poll(&mut context), Poll::Ready(Ok(())));
        assert!(at_once.as_mut().poll_answered(&mut context).is_pending());
        assert!(at_once.as_mut().poll(&mut context).is_pending());
        drop(at_once);
        assert_eq!(world.in_use(), (vec![0, 1, 4], 4));
        world.kv = None;
        assert!(ends.as_mut().poll_answered(&mut context).is_ready());
        assert_eq!(ends.as_mut().poll(&mut context), Poll::Ready(Err(PagedKvError::Ended)));
        assert!(ends.as_mut().poll(&mut context).is_pending());
    }

    // I-122
    fn a_request_has_its_blocks_whatever_is_backed_and_released_meanwhile(rig) {
        let world = world(rig, 8);
        let kv = world.kv();
        kv.back(&[0]).unwrap();
        // Backed by others, which stays so.
        let granted = world.granted(&[0, 5, 6]);
        kv.back(&[6]).unwrap();
        drop(granted);
        assert_eq!(world.in_use(), (vec![0, 6], 2));
        // Released by others: memory that was in use stays for the request.
        let granted = world.granted(&[0, 5, 6]);
        kv.release(&[0, 6]).unwrap();
        kv.back(&[5]).unwrap();
        kv.release(&[5]).unwrap();
        assert_eq!((world.in_use(), world.only_granted()), ((vec![], 3), 3));
        assert!(world.b.try_allocate(6 * G).is_err());
        granted.finish().unwrap();
        assert_eq!((world.in_use(), world.only_granted()), ((vec![0, 5, 6], 3), 0));
        kv.release(&[0, 5, 6]).unwrap();
        assert_eq!(world.in_use(), (vec![], 0));
        // Two requests for one block.
        let (first, second) = (world.granted(&[1, 2]), world.granted(&[2, 3]));
        assert_eq!((world.in_use(), world.only_granted()), ((vec![], 3), 3));
        drop(first);
        assert_eq!((world.in_use(), world.only_granted()), ((vec![], 2), 2));
        second.finish().unwrap();
        assert_eq!(world.in_use(), (vec![2, 3], 2));
    }

    fn blocks_that_are_backed_while_a_request_waits_are_not_waited_for(rig) {
        let world = world(rig, 4);
        let [one, two, _rest] = [1, 1, 2].map(|it| world.b.try_allocate(it * G).unwrap());
        let waiting = Task::waiting(world.kv().back_async(&[0, 1]));
        drop(one);
        world.kv().try_back(&[1]).unwrap();
        served(&world.b);
        assert_eq!(waiting.wakings(), 0);
        drop(two);
        waiting.finish().unwrap();
        assert_eq!(world.in_use(), (vec![0, 1], 2));
    }

    fn a_reserve_is_used_up_when_a_request_is_taken(rig) {
        let world = world(rig, 8);
        let kv = world.kv();
        kv.reserve(2).unwrap();
        let granted = world.granted(&[0, 5]);
        assert_eq!(kv.stats().unwrap().reserved, 2);
        granted.finish().unwrap();
        assert_eq!((kv.stats().unwrap().reserved, world.in_use()), (1, (vec![0, 5], 3)));
        // The reserve moves to lower blocks that a dropped request gives up.
        kv.release(&[0, 5]).unwrap();
        kv.back(&[0, 1, 2]).unwrap();
        kv.reserve(1).unwrap();
        let granted = world.granted(&[1, 7]);
        kv.release(&[1]).unwrap();
        drop(granted);
        assert_eq!((kv.stats().unwrap().reserved, world.in_use()), (1, (vec![0, 2], 3)));
        assert_eq!(world.b.try_allocate(5 * G).map(drop), Ok(()));
        kv.back(&[1]).unwrap();
        assert_eq!((kv.stats().unwrap().reserved, world.in_use()), (0, (vec![0, 1, 2], 3)));
    }

    fn a_cache_that_is_dropped_ends_its_requests(rig) {
        let mut world = world(rig, 4);
        let granted = world.granted(&[0, 1]);
        let held = world.b.try_allocate(2 * G).unwrap();
        let waiting = Task::waiting(world.kv().back_async(&[2]));
        let never_polled = world.kv().back_async(&[3]);
        world.kv = None;
        assert_eq!(waiting.finish(), Err(PagedKvError::Ended));
        assert_eq!(block_on(never_polled), Err(PagedKvError::Ended));
        assert_eq!(granted.finish(), Err(PagedKvError::Ended));
        drop(held);
        world.b.try_allocate(4 * G).map(drop).unwrap();
        assert_eq!(books(rig, &world.pool).in_use, 0);
    }

    fn a_request_that_waits_is_refused_in_sleep_and_one_with_memory_delays_it(rig) {
        let world = world(rig, 4);
        let kv = world.kv();
        kv.back(&[0]).unwrap();
        let granted = world.granted(&[1]);
        assert!(is_busy(&kv.alone().sleep(Contents::Discard)));
        granted.finish().unwrap();
        let held = world.b.try_allocate(2 * G).unwrap();
        let waiting = Task::waiting(kv.back_async(&[2]));
        kv.alone().sleep(Contents::Discard).unwrap();
        let refused = waiting.finish().unwrap_err();
        assert!(is_asleep(&refused), "{refused}");
        let refused = block_on(kv.back_async(&[0])).unwrap_err();
        assert!(is_asleep(&refused), "{refused}");
        kv.alone().wake().unwrap();
        assert_eq!(world.in_use(), (vec![0, 1], 2));
        drop(held);
        block_on(kv.back_async(&[2])).unwrap();
    }

    fn requests_of_a_tenant_that_has_left_are_refused(rig) {
        let World { kv, a, b, pool, mapper } = world(rig, 4);
        let kv = kv.unwrap();
        let held = b.try_allocate(4 * G).unwrap();
        let waiting = Task::waiting(kv.back_async(&[0]));
        a.unregister();
        assert!(matches!(cause(waiting.finish()), BlockError::Unregistered(_)));
        assert!(matches!(cause(block_on(kv.back_async(&[0]))), BlockError::Unregistered(_)));
        drop((held, kv, b, pool, mapper));
    }

    // I-100
    fn a_hook_may_release_blocks_of_the_cache(rig) {
        let world = world(rig, 4);
        let (kv, calls): (Arc<OnceLock<PagedKv>>, Arc<AtomicUsize>) = Default::default();
        let hook = {
            let (kv, calls) = (Arc::clone(&kv), Arc::clone(&calls));
            move |_: &cuvmm::pool::Pressure| {
                let kv = kv.get().unwrap();
                // A request in a hook waits for nothing.
                let mut nested = Task::new(kv.back_async(&[9, 10]));
                assert!(matches!(nested.poll(), Poll::Ready(Err(error)) if error.is_shortage()));
                if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                    kv.release(&[0, 1]).unwrap();
                }
            }
        };
        let server = world.pool.tenant("server").on_shortage(hook).register().unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
        let built = PagedKv::builder(&server, &home, 16).group(group).extent(G);
        assert!(kv.set(built.build().unwrap()).is_ok());
        let kv = kv.get().unwrap();
        kv.back(&[0, 1, 2, 3]).unwrap();
        block_on(kv.back_async(&[4])).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        let waiting = Task::waiting(kv.back_async(&[5, 6]));
        served(&world.b);
        served(&world.b);
        assert!(calls.load(Ordering::SeqCst) >= 2);
        assert_eq!(waiting.wakings(), 0);
        kv.release(&[2]).unwrap();
        waiting.finish().unwrap();
        server.set_hook(None).unwrap();
    }

    fn a_panic_of_a_hook_or_of_the_driver_leaves_the_request_waiting(rig) {
        let world = world(rig, 8);
        let panics = Arc::new(Mutex::new(1));
        let hook = {
            let panics = Arc::clone(&panics);
            move |_: &cuvmm::pool::Pressure| {
                let mut left = panics.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if *left > 0 {
                    *left -= 1;
                    drop(left);
                    panic!("a mistake in a hook");
                }
            }
        };
        world.a.set_hook(Some(Arc::new(hook))).unwrap();
        world.kv().back(&[0]).unwrap();
        let held = world.b.try_allocate(7 * G).unwrap();
        let waiting = Task::waiting(world.kv().back_async(&[1, 2]));
        crate::common::until(&world.pool, "the hook panics", || *panics.lock().unwrap() == 0);
        served(&world.b);
        assert_eq!(waiting.wakings(), 0);
        let fills = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&fills);
        rig.faults.watch(Some(Arc::new(move |call| {
            if call == Call::MemsetD8Async && seen.fetch_add(1, Ordering::SeqCst) == 0 {
                panic!("a mistake in the driver");
            }
        })));
        drop(held);
        waiting.finish().unwrap();
        rig.faults.watch(None);
        assert!(fills.load(Ordering::SeqCst) > 1, "the fill after the panic");
        assert_eq!(world.in_use(), (vec![0, 1, 2], 3));
        world.a.set_hook(None).unwrap();
    }
}

#[test]
fn every_driver_call_of_a_request_fails_once() {
    for layout in LAYOUTS {
        let full = |rig: &Rig<Nothing>| {
            let world = world_of(rig, 8, layout, G as u32);
            world.kv().back(&[0, 1]).unwrap();
            drop(world.b.allocate(3 * G).unwrap());
            world
        };
        // The first poll, and the mapper's attempts behind another request.
        let at_once = |_: &Rig<Nothing>, world: &mut World| {
            let backed = text(block_on(world.kv().back_async(&[2, 9, 11])));
            let known = match backed.is_ok() {
                true => (vec![0, 1, 2, 9, 11], 5),
                false => (vec![0, 1], 2),
            };
            assert_eq!(world.in_use(), known);
            backed
        };
        let waiting = |_: &Rig<Nothing>, world: &mut World| {
            let first = Task::waiting(world.b.allocate_async(8 * G));
            let backed = text(block_on(world.kv().back_async(&[2, 9, 11])));
            drop(first);
            let known = match backed.is_ok() {
                true => (vec![0, 1, 2, 9, 11], 5),
                false => (vec![0, 1], 2),
            };
            assert_eq!(world.in_use(), known);
            backed
        };
        let told = |world: &World| world.in_use();
        let calls = sweep_partly(full, at_once, told);
        assert!(calls >= 3, "{layout:?}: {calls}");
        let calls = sweep_partly(full, waiting, told);
        assert!(calls >= 3, "{layout:?}: {calls}");
    }
}
