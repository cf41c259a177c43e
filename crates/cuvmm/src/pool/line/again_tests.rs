//! Tests of hooks that are called again for a request that goes on waiting. The pool's time is the
//! test's, so each call is counted.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::futures::AllocateFuture;
use super::wait::after;
use super::wanted::Wanted;
use super::{HolderRequest, HolderWant, Needs, QueuedAttempt, Wait};
use crate::error::BlockError;
use crate::extents::Mapper;
use crate::extents::rig::{G, Rig, rig};
use crate::ledger::InLine;
use crate::own::Stream;
use crate::paged::{LayerGroup, PagedKv};
use crate::pool::core::Core;
use crate::pool::{Block, Limit, Pool, Tenant};
use crate::wanted::HOOKS_AGAIN;

type Waiting = Pin<Box<AllocateFuture>>;

const MOMENT: Duration = Duration::from_nanos(1);

/// Granules of the pool.
const ALL: u64 = 4;

/// A tenant that has the whole pool, and whose hook drops what it can evict by then.
struct World {
    // Fields in drop order.
    held: Option<Block>,
    evictable: Arc<Mutex<Option<Block>>>,
    calls: Arc<AtomicUsize>,
    passes: AtomicU64,
    asks: Tenant,
    keeper: Tenant,
    pool: Pool,
    _mapper: Option<Mapper>,
    rig: Rig,
}

impl World {
    fn new() -> Self {
        let rig = rig();
        let mapper = Mapper::start(&rig.device).unwrap();
        Self::with(rig, Some(mapper))
    }

    fn with(rig: Rig, mapper: Option<Mapper>) -> Self {
        let mut pool = Pool::builder(&rig.device).limit(Limit::Bytes(ALL * G));
        if let Some(mapper) = &mapper {
            pool = pool.mapper(mapper);
        }
        let pool = pool.build().unwrap();
        let (evictable, calls) = (Arc::<Mutex<Option<Block>>>::default(), Arc::default());
        let (evicts, counts) = (Arc::clone(&evictable), Arc::clone(&calls));
        let keeper = pool.tenant("keeper").on_pressure(move |pressure| {
            assert!(pressure.waits && pressure.bytes > 0);
            AtomicUsize::fetch_add(&counts, 1, Ordering::SeqCst);
            let evicted = evicts.lock().unwrap().take();
            drop(evicted);
        });
        let keeper = keeper.register().unwrap();
        let asks = pool.tenant("asks").register().unwrap();
        let world = Self {
            held: None,
            evictable,
            calls,
            passes: AtomicU64::new(0),
            asks,
            keeper,
            pool,
            _mapper: mapper,
            rig,
        };
        world.pass(Duration::ZERO);
        world
    }

    fn core(&self) -> &Core {
        self.asks.core()
    }

    /// Allocates all that is left to the keeper.
    fn fill(&mut self) {
        let left = self.keeper.headroom().unwrap().taking_back;
        self.held = Some(self.keeper.try_allocate(left).unwrap());
    }

    fn may_evict(&mut self) {
        *self.evictable.lock().unwrap() = self.held.take();
    }

    fn pass(&self, time: Duration) {
        pass(self.core(), time);
    }

    /// Returns how often the hook was called once the mapper has gone through the queue.
    fn calls(&self) -> usize {
        // No pool can grant it, so it is refused in its turn, for which no hook is called. The pass that
        // refused one of the same size would refuse this one too, before requests that came meanwhile.
        let size = (u64::MAX >> 1) - self.passes.fetch_add(1, Ordering::SeqCst) * G;
        assert!(block_on(self.asks.allocate_async(size)).is_err());
        self.calls.load(Ordering::SeqCst)
    }

    /// Makes a request that is granted when the hook has something: in the fourth round.
    fn is_granted_later<T>(&mut self, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        assert!(is_pending(request.as_mut()));
        assert_eq!(self.calls(), 1);
        for round in 2..=3 {
            self.pass(HOOKS_AGAIN - MOMENT);
            assert_eq!((self.calls(), self.calls()), (round - 1, round - 1));
            self.pass(MOMENT);
            assert_eq!((self.calls(), self.calls()), (round, round));
        }
        self.may_evict();
        assert_eq!(self.calls(), 3);
        self.pass(HOOKS_AGAIN);
        let granted = block_on(request);
        self.pass(HOOKS_AGAIN);
        assert_eq!(self.calls(), 4, "none after the grant");
        granted
    }
}

fn pass(core: &Core, time: Duration) {
    core.look(|state| state.memory.line.clock.pass(time));
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(future)
}

fn is_pending<T>(future: Pin<&mut impl Future<Output = T>>) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    future.poll(&mut context).is_pending()
}

// I-127
#[test]
fn memory_that_a_hook_has_later_serves_a_future_for_a_block() {
    let mut world = World::new();
    world.fill();
    let request = world.asks.allocate_async(G);
    drop(world.is_granted_later(request).unwrap());
}

#[test]
fn memory_that_a_hook_has_later_serves_a_growth() {
    let mut world = World::new();
    let mut block = world.asks.block(G).capacity(2 * G).allocate().unwrap();
    world.fill();
    let growth = block.grow_to_async(2 * G);
    world.is_granted_later(growth).unwrap();
    assert_eq!(block.size(), 2 * G);
}

#[test]
fn memory_that_a_hook_has_later_serves_blocks_of_a_paged_cache() {
    let mut world = World::new();
    let home = Stream::new(&world.rig.device).unwrap();
    let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
    let kv = PagedKv::builder(&world.asks, &home, 16).group(group);
    let kv = kv.extent(G).build().unwrap();
    world.fill();
    world.is_granted_later(kv.back_async(&[5])).unwrap();
    assert!(kv.is_backed(5).unwrap());
}

/// The attempts are played by the test: time passes in them.
#[test]
fn memory_that_a_hook_has_later_serves_a_thread_that_waits() {
    // No operation of another thread is in flight.
    let mut world = World::with(rig(), None);
    world.fill();
    let held = Mutex::new(world.held.take());
    let (core, tenant) = (world.core(), world.asks.id());
    let wanted = Wanted {
        size: G,
        capacity: G,
        ..Wanted::default()
    };
    let attempts = AtomicUsize::new(0);
    let calls = || world.calls.load(Ordering::SeqCst);
    let wait = Wait::Until(after(Duration::from_secs(600)));
    let granted = core.request(tenant, G, wait, |mut state| {
        // One before the hooks, one after them, and those of the wait.
        match attempts.fetch_add(1, Ordering::SeqCst) {
            0 => assert_eq!(calls(), 0),
            9 => {
                assert_eq!(calls(), 1);
                state.memory.line.clock.pass(HOOKS_AGAIN - MOMENT);
            }
            19 => {
                assert_eq!(calls(), 1, "not before the time");
                state.memory.line.clock.pass(MOMENT);
            }
            // Right after the hook, which had nothing.
            20 => assert_eq!(calls(), 2),
            29 => {
                assert_eq!(calls(), 2, "once in a round");
                *world.evictable.lock().unwrap() = held.lock().unwrap().take();
                state.memory.line.clock.pass(HOOKS_AGAIN);
            }
            30.. => assert_eq!(calls(), 3),
            _ => {}
        }
        Core::attempt_to_allocate(state, tenant, &wanted)
    });
    core.free(&granted.unwrap());
    assert_eq!(calls(), 3);
}

#[test]
fn no_hook_is_called_again_after_the_deadline() {
    let mut world = World::with(rig(), None);
    world.fill();
    let (core, tenant) = (world.core(), world.asks.id());
    let wanted = Wanted {
        size: G,
        capacity: G,
        ..Wanted::default()
    };
    let attempts = AtomicUsize::new(0);
    let deadline = after(Duration::from_millis(100));
    let refused = core.request(tenant, G, Wait::Until(deadline), |mut state| {
        // The first one behind a pause.
        if attempts.fetch_add(1, Ordering::SeqCst) == 3 {
            while Instant::now() < deadline {
                std::thread::yield_now();
            }
            state.memory.line.clock.pass(HOOKS_AGAIN);
        }
        Core::attempt_to_allocate(state, tenant, &wanted)
    });
    assert!(refused.is_err());
    assert_eq!(world.calls.load(Ordering::SeqCst), 1);
}

#[test]
fn no_hook_is_called_again_for_a_request_that_was_withdrawn() {
    let mut world = World::new();
    world.fill();
    let mut waiting = Box::pin(world.asks.allocate_async(G));
    assert!(is_pending(waiting.as_mut()));
    assert_eq!(world.calls(), 1);
    world.pass(HOOKS_AGAIN - MOMENT);
    assert_eq!(world.calls(), 1);
    drop(waiting);
    world.pass(HOOKS_AGAIN);
    assert_eq!(world.calls(), 1);
}

#[test]
fn a_round_ends_when_a_hook_withdraws_the_request() {
    let mut world = World::new();
    let waiting: Arc<Mutex<Option<Waiting>>> = Arc::default();
    let withdrawn = Arc::clone(&waiting);
    let rude = world.pool.tenant("rude").priority(-1);
    let rude = rude.on_pressure(move |_| {
        let request = withdrawn.lock().unwrap().take();
        drop(request);
    });
    let rude = rude.register().unwrap();
    let held = rude.try_allocate(G).unwrap();
    world.fill();
    let mut request = Box::pin(world.asks.allocate_async(2 * G));
    assert!(is_pending(request.as_mut()));
    assert_eq!(world.calls(), 1);
    *waiting.lock().unwrap() = Some(request);
    world.pass(HOOKS_AGAIN);
    assert_eq!(world.calls(), 1);
    assert!(waiting.lock().unwrap().is_none());
    drop((held, rude));
}

#[test]
fn a_hook_that_panics_is_called_again() {
    let mut world = World::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&calls);
    let hook = move |_: &super::Pressure| {
        let before = counts.fetch_add(1, Ordering::SeqCst);
        assert!(before > 0, "on purpose");
    };
    world.keeper.set_hook(Some(Arc::new(hook))).unwrap();
    world.fill();
    let mut waiting = pin!(world.asks.allocate_async(G));
    assert!(is_pending(waiting.as_mut()));
    for round in 1..=3 {
        world.calls();
        assert_eq!(calls.load(Ordering::SeqCst), round);
        world.pass(HOOKS_AGAIN);
    }
    world.held = None;
    drop(block_on(waiting).unwrap());
}

#[test]
fn each_request_has_rounds_of_its_own_and_of_requests_alike_the_first_has_them() {
    let mut world = World::new();
    let small = world.keeper.try_allocate(G).unwrap();
    world.fill();
    let other = world.pool.tenant("other").register().unwrap();
    let mut first = Box::pin(world.asks.allocate_async(G));
    let mut alike = Box::pin(world.asks.allocate_async(G));
    let mut larger = Box::pin(world.asks.allocate_async(2 * G));
    for request in [&mut first, &mut alike, &mut larger] {
        assert!(is_pending(request.as_mut()));
    }
    assert_eq!(world.calls(), 3, "each at first");
    world.pass(HOOKS_AGAIN / 2);
    let mut others = Box::pin(other.allocate_async(G));
    assert!(is_pending(others.as_mut()));
    assert_eq!(world.calls(), 4);
    world.pass(HOOKS_AGAIN / 2);
    assert_eq!(world.calls(), 5, "the first");
    world.pass(HOOKS_AGAIN / 2);
    assert_eq!(world.calls(), 6, "the other tenant's");
    // The next one alike was called for long ago.
    drop(first);
    assert_eq!(world.calls(), 7);
    // Requests are served while another one's hook gives nothing.
    drop(small);
    drop(block_on(alike).unwrap());
    drop(block_on(others).unwrap());
    let before = world.calls();
    world.pass(HOOKS_AGAIN);
    assert_eq!(world.calls(), before + 1, "the larger one goes on waiting");
    drop(larger);
}

// I-144
#[test]
fn the_mapper_does_its_other_work_between_two_hooks() {
    let rig = rig();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = || {
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        pool.mapper(&mapper).build().unwrap()
    };
    let (hooked, other) = (pool(), pool());
    // In the other pool a future waits for memory that the first hook gives up.
    let other = other.tenant("other").register().unwrap();
    let held = Arc::new(Mutex::new(Some(other.try_allocate(8 * G).unwrap())));
    let mut future = Box::pin(other.allocate_async(G));
    assert!(is_pending(future.as_mut()));
    let future = Arc::new(Mutex::new(Some(future)));
    let waits = Arc::new(Mutex::new(Vec::new()));
    let tenants: Vec<_> = (0..8)
        .map(|number| {
            let (held, future, waits) = (held.clone(), future.clone(), waits.clone());
            let tenant = hooked.tenant(format!("{number}")).priority(number);
            let tenant = tenant.on_pressure(move |_| {
                let given = held.lock().unwrap().take();
                drop(given);
                let mut future = future.lock().unwrap();
                let is_served = future.as_mut().is_some_and(|it| !is_pending(it.as_mut()));
                future.take_if(|_| is_served);
                waits.lock().unwrap().push(future.is_some());
            });
            let tenant = tenant.register().unwrap();
            let block = tenant.try_allocate(G).unwrap();
            (tenant, block)
        })
        .collect();
    let asks = hooked.tenant("asks").register().unwrap();
    let mut request = Box::pin(asks.allocate_async(G));
    assert!(is_pending(request.as_mut()));
    // Refused in its turn, which comes once the hooks of the request before it were called.
    assert!(block_on(asks.allocate_async(u64::MAX >> 1)).is_err());
    let waits = waits.lock().unwrap().clone();
    assert_eq!(waits.len(), 8, "each hook once");
    assert_eq!((waits.first(), waits.last()), (Some(&true), Some(&false)));
    drop((request, tenants));
}

/// The attempt of a holder that is refused, and whose lock is taken in attempts with some numbers.
struct Played {
    refused: BlockError,
    taken: &'static [usize],
    attempts: AtomicUsize,
    needs: Needs,
}

impl QueuedAttempt for Played {
    fn attempt(&self, _: Option<InLine>) -> Option<Result<(), BlockError>> {
        let attempt = self.attempts.fetch_add(1, Ordering::SeqCst);
        let is_taken = self.taken.contains(&attempt);
        (!is_taken).then(|| Err(self.refused.clone()))
    }

    fn needs(&self) -> &Needs {
        &self.needs
    }
}

// I-144
#[test]
fn a_round_goes_on_after_a_turn_in_which_the_holder_could_not_be_asked() {
    let mut world = World::new();
    let last = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&last);
    let other = world.pool.tenant("other").priority(1);
    let other = other.on_pressure(move |_| {
        AtomicUsize::fetch_add(&counts, 1, Ordering::SeqCst);
    });
    let other = other.register().unwrap();
    let held = other.try_allocate(G).unwrap();
    world.fill();
    let home = Stream::new(&world.rig.device).unwrap();
    let attempt = Played {
        refused: world.asks.try_allocate(G).unwrap_err(),
        // One before the first hook and one after it. Then several in vain.
        taken: &[2, 3, 4],
        attempts: AtomicUsize::new(0),
        needs: Needs::of(G),
    };
    let attempt = Arc::new(attempt);
    let want = HolderWant {
        home,
        attempt: attempt.clone(),
    };
    let mut request = HolderRequest::new(&world.asks);
    let context = Context::from_waker(Waker::noop());
    assert!(request.queue(&context, want).is_pending());
    while attempt.attempts.load(Ordering::SeqCst) < 10 {
        world.calls();
    }
    assert_eq!((world.calls(), last.load(Ordering::SeqCst)), (1, 1));
    drop((request, held));
}

/// The requests in front of the last.
const IN_FRONT: usize = 10;

// I-148
#[test]
fn requests_whose_slow_hooks_free_memory_do_not_keep_others_from_their_turns() {
    let mut world = World::new();
    let small = world.pool.tenant("small").register().unwrap();
    let kept = small.try_allocate(G).unwrap();
    world.fill();
    drop(kept);
    let calls = Arc::new(AtomicUsize::new(0));
    let (counts, core) = (Arc::clone(&calls), Arc::downgrade(world.asks.core()));
    let hook = move |_: &super::Pressure| {
        // It takes so long that the requests before are asked for again, and too little comes free.
        if counts.fetch_add(1, Ordering::SeqCst) < 500 {
            core.upgrade().iter().for_each(|it| pass(it, HOOKS_AGAIN));
            drop(small.try_allocate(G).unwrap());
        }
    };
    world.keeper.set_hook(Some(Arc::new(hook))).unwrap();
    let tenant = |number| world.pool.tenant(format!("{number}")).register().unwrap();
    let tenants: Vec<_> = (0..IN_FRONT).map(tenant).collect();
    let request = |it: &Tenant| Box::pin(it.allocate_async(2 * G));
    let mut requests: Vec<_> = tenants.iter().map(request).collect();
    for request in &mut requests {
        assert!(is_pending(request.as_mut()));
    }
    // Refused in its turn.
    assert!(block_on(world.asks.allocate_async(u64::MAX >> 1)).is_err());
    let calls = calls.load(Ordering::SeqCst);
    assert!((IN_FRONT..=3 * IN_FRONT).contains(&calls), "{calls}");
    drop((requests, tenants));
}
