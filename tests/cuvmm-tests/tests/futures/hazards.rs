//! Futures beside fences, captures, hooks, panics, and blocks that are dropped.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{RawWaker, RawWakerVTable, Wake, Waker};
use std::time::Duration;

use crate::common;
use crate::common::executor::{Task, block_on};
use crate::common::{D0, G, busy, mapped_pool, until};
use cuvmm::driver::CUresult;
use cuvmm::{Block, Contents, Mapper, Stream, Tenant};

/// Far longer than the mapper takes to serve a request.
const WHILE: Duration = Duration::from_secs(60);

/// Waits until the mapper has gone through the queue.
fn served(tenant: &Tenant) {
    assert!(block_on(tenant.allocate_async(u64::MAX >> 1)).is_err());
}

#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn pass(&self) {
        let open = self.0.lock().unwrap();
        let wait = self.1.wait_timeout_while(open, WHILE, |open| !*open);
        drop(wait.unwrap());
    }

    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

#[test]
fn one_that_waits_for_addresses_holds_up_none_of_its_size() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = common::limited(&rig, 4).address_limit(100 * G);
    let (_pool, tenant) = common::with_tenant(pool.mapper(&mapper).build().unwrap());
    let held = tenant.try_allocate(4 * G).unwrap();
    // A small block of large capacity, which keeps addresses in use.
    drop(held);
    let wide = tenant.block(G).capacity(40 * G).try_allocate().unwrap();
    let held = tenant.try_allocate(3 * G).unwrap();
    let head = Task::waiting(tenant.block(2 * G).capacity(60 * G).allocate_async());
    let second = Task::waiting(tenant.block(2 * G).allocate_async());
    served(&tenant);
    drop(held);
    let woken = second.is_woken(WHILE);
    assert!(woken && head.wakings() == 0);
    drop(wide);
}

#[test]
fn a_growth_that_waits_for_its_own_work_holds_up_none() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 16);
    let stream = Stream::new(&rig.device).unwrap();
    let mut block = tenant
        .block(4 * G)
        .capacity(8 * G)
        .zeroed(true)
        .try_allocate()
        .unwrap();
    block.record_use(&stream).unwrap();
    busy(&rig, &stream, &block, 7);
    block.record_use(&stream).unwrap();
    block.shrink_to(G).unwrap();
    let growth = Task::waiting(block.grow_to_async(2 * G));
    served(&tenant);
    let pending = growth.wakings() == 0;
    let plain = Task::waiting(tenant.allocate_async(2 * G));
    let woken = plain.is_woken(WHILE);
    rig.machine.release_stream(D0, stream.as_raw());
    assert!(pending);
    assert!(woken);
}

/// Returns a block of two granules in one extent, and a fork of it that has shrunk to one granule.
fn cut(tenant: &Tenant, stream: &Stream) -> (Block, Block) {
    let root = tenant.block(2 * G).capacity(8 * G).largest_extent(2 * G);
    let root = root.home_stream(stream).allocate().unwrap();
    let mut fork = root.fork(2 * G, 2 * G).unwrap();
    fork.shrink_to(G).unwrap();
    (root, fork)
}

#[test]
fn a_growth_over_a_cut_waits_until_the_stream_is_idle() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 64);
    let stream = Stream::new(&rig.device).unwrap();
    let (root, mut fork) = cut(&tenant, &stream);
    let raw = stream.as_raw();
    rig.machine.hold(D0, raw);
    let queue = || {
        let writes = vec![(root.address(), 64, 1)];
        let queued = rig.machine.queue_kernel(D0, raw, vec![], writes);
        queued.unwrap();
    };
    queue();
    let growth = Task::waiting(fork.grow_to_async(2 * G));
    for _ in 0..4 {
        served(&tenant);
        // Steady work: a kernel is always queued behind the running one.
        queue();
        rig.machine.step(D0, raw);
    }
    served(&tenant);
    let pending = growth.wakings() == 0;
    rig.machine.release_stream(D0, raw);
    assert!(pending);
    assert!(growth.is_woken(WHILE));
}

#[test]
fn a_growth_over_a_cut_waits_for_work_that_was_queued_while_it_waited() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 4);
    let stream = Stream::new(&rig.device).unwrap();
    let (_root, mut fork) = cut(&tenant, &stream);
    let other = Stream::new(&rig.device).unwrap();
    let held = tenant.allocate_on(&other, 2 * G).unwrap();
    let reads = vec![(fork.address(), G)];
    let growth = Task::waiting(fork.grow_to_async(2 * G));
    served(&tenant);
    let raw = stream.as_raw();
    rig.machine.hold(D0, raw);
    let queued = rig.machine.queue_kernel(D0, raw, reads, vec![]);
    queued.unwrap();
    // There is memory for it now.
    drop(held);
    served(&tenant);
    let pending = growth.wakings() == 0;
    rig.machine.release_stream(D0, raw);
    assert!(pending);
    assert!(growth.is_woken(WHILE));
    growth.finish().unwrap();
}

// I-154
#[test]
fn a_request_for_a_large_capacity_holds_up_none_that_reuses_memory_on_its_stream() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 8);
    let stream = Stream::new(&rig.device).unwrap();
    let _held = tenant.try_allocate(4 * G).unwrap();
    let block = tenant.allocate_on(&stream, 4 * G).unwrap();
    busy(&rig, &stream, &block, 7);
    let wide = tenant.block(2 * G).capacity(60 * G).home_stream(&stream);
    let head = Task::waiting(wide.allocate_async());
    drop(block);
    served(&tenant);
    assert_eq!((head.wakings(), pool.stats().pending_free), (0, 4 * G));
    let alike = tenant.block(4 * G).home_stream(&stream);
    let alike = Task::waiting(alike.allocate_async());
    let woken = alike.is_woken(WHILE / 6);
    rig.machine.release_stream(D0, stream.as_raw());
    assert!(woken);
}

#[test]
fn a_growth_over_memory_that_its_block_has_is_not_held_up_for_that() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 8);
    let stream = Stream::new(&rig.device).unwrap();
    let mut small = tenant.block(G).capacity(8 * G).try_allocate().unwrap();
    let mut block = tenant.block(4 * G).capacity(8 * G).try_allocate().unwrap();
    let held = tenant.try_allocate(2 * G).unwrap();
    block.record_use(&stream).unwrap();
    busy(&rig, &stream, &block, 7);
    block.record_use(&stream).unwrap();
    // The work may use what is behind the block now.
    block.shrink_to(G).unwrap();
    let head = Task::waiting(small.grow_to_async(3 * G));
    let other = Task::waiting(block.grow_to_async(5 * G));
    let woken = other.is_woken(WHILE / 6);
    let before = head.wakings();
    rig.machine.release_stream(D0, stream.as_raw());
    assert!(woken && before == 0);
    drop(held);
}

#[test]
fn a_growth_over_a_cut_holds_up_none_that_needs_less() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 12);
    let stream = Stream::new(&rig.device).unwrap();
    let root = tenant.block(8 * G).capacity(16 * G).largest_extent(8 * G);
    let root = root.home_stream(&stream).allocate().unwrap();
    let mut fork = root.fork(8 * G, 8 * G).unwrap();
    fork.shrink_to(6 * G).unwrap();
    // Its memory up to there has to be its own, of which there is too little.
    let growth = Task::waiting(fork.grow_to_async(7 * G));
    served(&tenant);
    assert_eq!(growth.wakings(), 0);
    let plain = Task::waiting(tenant.allocate_async(2 * G));
    let woken = plain.is_woken(WHILE / 6);
    assert!(woken && growth.wakings() == 0);
    drop((growth, root));
}

#[test]
fn news_are_told_beside_memory_that_became_pending() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = common::limited(&rig, 5).largest_extent(G);
    let pool = pool.mapper(&mapper).build().unwrap();
    let (me, other) = (
        pool.tenant("me").register().unwrap(),
        pool.tenant("other").register().unwrap(),
    );
    let (slow, quick) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    // Cached memory of another tenant, which has to be zeroed for this one.
    let cached = other.allocate_on(&slow, 2 * G).unwrap();
    let third = pool.tenant("third").register().unwrap();
    let pending = third.allocate_on(&quick, 2 * G).unwrap();
    busy(&rig, &quick, &pending, 7);
    drop((cached, pending));
    rig.machine.hold(D0, slow.as_raw());
    // Polls all fences, so that those already complete are no news.
    me.headroom().unwrap();
    let freed_count = Task::waiting(pool.freed());
    served(&me);
    let before = freed_count.wakings();
    let two = me.block(2 * G).home_stream(&slow).try_allocate_many(2);
    assert!(two.is_err(), "{:?}", pool.stats());
    // The mapper goes through the queue once more, and knows what is pending now.
    served(&me);
    until(&pool, "the mapper has gone through the queue", || {
        rig.device.mapper_calls().total() > 0
    });
    std::thread::sleep(Duration::from_millis(20));
    let after_attempt = freed_count.wakings();
    rig.machine.release_stream(D0, quick.as_raw());
    let woken = freed_count.is_woken(WHILE);
    rig.machine.release_stream(D0, slow.as_raw());
    assert_eq!((before, after_attempt), (0, 0), "not woken without news");
    assert!(woken);
}

#[test]
fn a_growth_that_was_leaked_grows_no_other_block() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 8, &mapper);
    let [tenant, other] = common::tenants(&pool);
    let held = other.try_allocate(7 * G).unwrap();
    let mut block = tenant.block(G).capacity(8 * G).try_allocate().unwrap();
    let growth = Task::waiting(block.grow_to_async(6 * G));
    std::mem::forget(growth);
    let size = block.size();
    let address = block.address();
    drop(block);
    let mut reused = tenant.block(G).capacity(8 * G).try_allocate().unwrap();
    assert_eq!(reused.address(), address, "setup");
    drop(held);
    served(&tenant);
    let in_use = tenant.stats().in_use;
    let regrow = reused.grow_to(2 * G);
    assert_eq!(
        (size, reused.size().min(G), in_use, regrow),
        (G, G, G, Ok(()))
    );
}

#[test]
fn what_a_hook_gives_is_for_the_first() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 8, &mapper);
    let gate = Arc::new(Gate::default());
    let cache = Arc::new(Mutex::new(Vec::new()));
    let (kept, gated) = (Arc::clone(&cache), Arc::clone(&gate));
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let giver = pool.tenant("giver").on_pressure(move |_| {
        match count.fetch_add(1, Ordering::SeqCst) {
            // In the turn of the first request: nothing. In the turn of the gated one: wait.
            0 => {}
            1 => gated.pass(),
            2 => drop(kept.lock().unwrap().pop()),
            _ => {}
        }
    });
    let giver = giver.register().unwrap();
    let (a, b, c, g) = (
        pool.tenant("a").register().unwrap(),
        pool.tenant("b").register().unwrap(),
        pool.tenant("c").register().unwrap(),
        pool.tenant("g").register().unwrap(),
    );
    cache
        .lock()
        .unwrap()
        .push(giver.try_allocate(4 * G).unwrap());
    cache
        .lock()
        .unwrap()
        .push(giver.try_allocate(4 * G).unwrap());
    let first = Task::waiting(a.allocate_async(4 * G));
    until(&pool, "asked", || calls.load(Ordering::SeqCst) == 1);
    let gated = Task::waiting(g.allocate_async(8 * G));
    until(&pool, "asked", || calls.load(Ordering::SeqCst) == 2);
    let asks = Task::waiting(b.allocate_async(6 * G));
    let last = Task::waiting(c.allocate_async(2 * G));
    gate.open();
    let woken = first.is_woken(WHILE);
    assert!(woken);
    drop((asks, last, gated, giver));
}

#[test]
fn a_lost_context_is_news() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let stream = Stream::new(&rig.device).unwrap();
    let held = tenant.try_allocate(4 * G).unwrap();
    let freed_count = Task::waiting(pool.freed());
    rig.machine
        .lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(stream.synchronize().is_err());
    let woken = freed_count.is_woken(WHILE);
    assert!(woken && freed_count.finish().is_err());
    assert!(block_on(pool.freed()).is_err());
    drop((held, tenant, stream));
}

#[test]
fn one_behind_others_is_told_that_it_can_never_be() {
    let rig = common::model();
    let (_mapper, _pool, tenant) = common::mapped(&rig, 8);
    let _held = tenant.try_allocate(8 * G).unwrap();
    let first = Task::waiting(tenant.allocate_async(2 * G));
    let second = Task::waiting(tenant.allocate_async(6 * G));
    served(&tenant);
    tenant.set_limit(4 * G).unwrap();
    let woken = second.is_woken(WHILE);
    assert!(woken && first.wakings() == 0);
}

#[test]
fn a_pool_is_closed_though_the_mapper_panics_meanwhile() {
    struct RegistrationOwner(Arc<Gate>);
    impl Drop for RegistrationOwner {
        fn drop(&mut self) {
            self.0.pass();
            panic!("a mistake in a keeper");
        }
    }
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 4, &mapper);
    let own = Stream::new(&rig.device).unwrap();
    let gate = Arc::new(Gate::default());
    let shelf = Arc::new(Mutex::new(None));
    let taken = Arc::clone(&shelf);
    let giver = pool
        .tenant("giver")
        .on_pressure(move |_| drop(taken.lock().unwrap().take()));
    let giver = giver.register().unwrap();
    let held = giver.try_allocate(4 * G).unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    // SAFETY: `own` outlives the stream.
    let stream = unsafe {
        Stream::from_raw(
            &rig.device,
            own.as_raw(),
            Arc::new(RegistrationOwner(Arc::clone(&gate))),
        )
    }
    .unwrap();
    let mut future = Task::new(tenant.block(2 * G).home_stream(&stream).allocate_async());
    drop(stream);
    let mut slot = shelf.lock().unwrap();
    assert!(future.poll().is_pending());
    *slot = Some(future);
    drop(slot);
    until(&pool, "dropped", || shelf.lock().unwrap().is_none());
    drop((held, giver, tenant));
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let closed = pool.close();
        send.send(closed.is_ok()).unwrap();
        std::mem::forget(closed);
    });
    std::thread::sleep(Duration::from_millis(200));
    gate.open();
    let closed = receive.recv_timeout(Duration::from_secs(60));
    assert!(closed.is_ok(), "the operation hangs");
    drop(mapper);
}

#[test]
fn one_that_waits_for_a_capture_holds_up_none_that_need_not() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let stream = Stream::new(&rig.device).unwrap();
    // Idle memory of the tenant itself, which cannot be zeroed during a capture.
    let held = tenant.allocate_on(&stream, 4 * G).unwrap();
    let guard = pool.capture_guard();
    let head = Task::waiting(
        tenant
            .block(4 * G)
            .home_stream(&stream)
            .zeroed(true)
            .allocate_async(),
    );
    let second = Task::waiting(tenant.block(4 * G).home_stream(&stream).allocate_async());
    served(&tenant);
    drop(held);
    let woken = second.is_woken(WHILE);
    let headed = head.wakings();
    drop(guard);
    assert!(woken && headed == 0);
}

#[test]
fn a_future_in_a_hook_does_not_wait() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 4, &mapper);
    let done = Arc::new(AtomicBool::new(false));
    let says = Arc::clone(&done);
    let spare = pool.tenant("spare").register().unwrap();
    let giver = pool.tenant("giver").on_pressure(move |_| {
        let ready = Task::new(spare.allocate_async(G)).poll().is_ready();
        says.store(ready, Ordering::SeqCst);
    });
    let giver = giver.register().unwrap();
    let held = giver.try_allocate(3 * G).unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let waiting = Task::waiting(tenant.allocate_async(2 * G));
    until(&pool, "asked", || done.load(Ordering::SeqCst));
    drop((waiting, held, giver));
}

#[test]
fn a_thread_that_panics_with_a_block_beside_those_who_wait_only_unwinds() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 4, &mapper);
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let asked = Arc::new(AtomicBool::new(false));
    let says = Arc::clone(&asked);
    let giver = pool.tenant("giver").on_pressure(move |_| {
        says.store(true, Ordering::SeqCst);
        let _ = gate.lock().unwrap().recv_timeout(Duration::from_secs(10));
    });
    let giver = giver.register().unwrap();
    let held = giver.try_allocate(2 * G).unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let gone = pool.tenant("gone").register().unwrap();
    let block = gone.try_allocate(2 * G).unwrap();
    gone.unregister();
    let waiting = Task::waiting(tenant.allocate_async(3 * G));
    until(&pool, "asked", || asked.load(Ordering::SeqCst));
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _held = block;
        panic!("a mistake in user code");
    }));
    assert!(panicked.is_err());
    open.send(()).unwrap();
    drop(held);
    waiting.finish().unwrap();
}

#[test]
fn what_a_panic_left_behind_is_not_done_in_a_poll() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let gone = pool.tenant("gone").register().unwrap();
    let block = gone.try_allocate(4 * G).unwrap();
    gone.unregister();
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _held = block;
        panic!("a mistake in user code");
    }));
    assert!(panicked.is_err());
    let before = common::calls_without_mapper(&rig.device, &pool);
    let mut waiting = Task::new(tenant.allocate_async(2 * G));
    let polled = waiting.poll();
    let after = common::calls_without_mapper(&rig.device, &pool);
    assert_eq!((before, polled.is_pending()), (after, true));
}

#[test]
fn a_hook_that_panics_with_a_block_ends_no_mapper() {
    let rig = common::model();
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, 4, &mapper);
    let shelf = Arc::new(Mutex::new(None));
    let taken = Arc::clone(&shelf);
    let giver = pool.tenant("giver").on_pressure(move |_| {
        let _block = taken.lock().unwrap().take();
        panic!("a mistake in a hook");
    });
    let giver = giver.register().unwrap();
    let held = giver.try_allocate(2 * G).unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let gone = pool.tenant("gone").register().unwrap();
    *shelf.lock().unwrap() = Some(gone.try_allocate(2 * G).unwrap());
    gone.unregister();
    let waiting = Task::waiting(tenant.allocate_async(3 * G));
    served(&tenant);
    drop(held);
    waiting.finish().unwrap();
}

#[test]
fn a_forked_child_is_told_that_it_has_no_sleeper() {
    let rig = common::model();
    let (_pool, tenant) = common::tenancy(&rig, 16);
    let block = tenant.try_allocate(9 * G).unwrap();
    let lease = block.lease();
    let mut sleeping = Task::waiting(
        tenant
            .blocks()
            .timeout(Duration::from_secs(60))
            .sleep_async(Contents::Discard),
    );
    // SAFETY: the child only uses what this test created, and leaves by `_exit` or a signal.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: `alarm` only makes the system end a child that hangs.
        unsafe { libc::alarm(20) };
        let ready = sleeping.poll().is_ready();
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(i32::from(!ready)) }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    drop(lease);
    drop(sleeping);
    assert_eq!(status, 0, "the child's future did not fail");
}

#[test]
fn a_waker_that_panics_ends_no_sleep() {
    struct Panics(AtomicUsize);
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
            panic!("a mistake in a waker");
        }
    }
    let rig = common::model();
    let (pool, tenant) = common::tenancy(&rig, 16);
    let _blocks: Vec<_> = (0..8)
        .map(|_| tenant.try_allocate(2 * G).unwrap())
        .collect();
    let panics = Arc::new(Panics(AtomicUsize::new(0)));
    let mut sleeping = Task::new(tenant.blocks().sleep_async(Contents::Discard));
    assert!(
        sleeping
            .poll_with(&Waker::from(Arc::clone(&panics)))
            .is_pending()
    );
    until(&pool, "woken", || panics.0.load(Ordering::SeqCst) > 0);
    let outcome = catch_unwind(AssertUnwindSafe(|| sleeping.finish()));
    assert!(matches!(&outcome, Ok(Ok(slept)) if slept.blocks == 8));
}

#[test]
fn a_waker_is_dropped_with_no_lock_held() {
    thread_local! {
        static ASKED: RefCell<Option<Tenant>> = const { RefCell::new(None) };
    }
    fn look(_: *const ()) {
        // Under the pool's lock this would deadlock.
        ASKED.with_borrow(|tenant| tenant.as_ref().map(Tenant::stats));
    }
    fn clone(_: *const ()) -> RawWaker {
        RawWaker::new(std::ptr::null(), &TABLE)
    }
    static TABLE: RawWakerVTable = RawWakerVTable::new(clone, look, look, look);
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let held = tenant.try_allocate(4 * G).unwrap();
    ASKED.set(Some(tenant.clone()));
    // SAFETY: the functions of the table use no data.
    let waker = unsafe { Waker::from_raw(clone(std::ptr::null())) };
    let mut future = Task::new(tenant.allocate_async(2 * G));
    // The waker is kept, then replaced, and finally dropped.
    assert!(future.poll_with(&waker).is_pending());
    assert!(future.poll_with(&waker).is_pending());
    drop(held);
    until(&pool, "granted", || tenant.stats().in_use == 2 * G);
    assert!(future.poll_with(&waker).is_ready());
    assert!(
        Task::new(tenant.allocate_async(0))
            .poll_with(&waker)
            .is_ready()
    );
    ASKED.set(None);
}
