//! Waiting for memory as a future: granted in order, refused if waiting cannot help, and undone if
//! the future is dropped.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use crate::common;
use crate::common::books::{books, figures};
use crate::common::executor::{Task, block_on};
use crate::common::{D0, G, busy, calls_without_mapper, mapped_pool, nth_of, until};
use crate::on_both;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, BlockError, CallError, MemoryError};
use cuvmm::{Block, Contents, Limit, Mapper, Stream, Tenant};

/// Far longer than the mapper takes to serve a request.
const WHILE: Duration = Duration::from_secs(120);
/// Long enough for a wrong wake-up to happen.
const MOMENT: Duration = Duration::from_millis(20);

/// Waits until the mapper has gone through the queue.
fn served(tenant: &Tenant) {
    // No pool can grant it, so it is refused in its turn.
    let impossible = tenant.allocate_async(u64::MAX >> 1);
    assert!(block_on(impossible).is_err());
}

on_both! {
    fn an_allocation_waits_until_memory_comes_free(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let first = block_on(tenant.allocate_async(3 * G)).unwrap();
        assert_eq!((first.size(), tenant.stats().in_use), (3 * G, 3 * G));
        let waiting = Task::waiting(tenant.allocate_async(2 * G));
        served(&tenant);
        assert_eq!(
            (waiting.wakings(), pool.stats().refusals), (0, 1),
            "the refusal of the other request"
        );
        drop(first);
        let second = waiting.finish().unwrap();
        second.write(0, &[7; 64]).unwrap();
        assert_eq!(books(rig, &pool).in_use, 2 * G);
    }

    fn a_poll_makes_no_driver_call(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let mut before = calls_without_mapper(&rig.device, &pool);
        let mut block = block_on(tenant.block(2 * G).capacity(4 * G).allocate_async()).unwrap();
        block_on(block.grow_to_async(3 * G)).unwrap();
        let other = block_on(tenant.block(G).home_stream(&stream).allocate_async()).unwrap();
        assert_eq!(calls_without_mapper(&rig.device, &pool), before);
        drop(other);
        before = calls_without_mapper(&rig.device, &pool);
        let apart = rig.device.mapper_calls().total();
        // The first poll gets a cached block of the home stream, and growth within a block's own
        // memory.
        let mut cached = Task::new(tenant.block(G).home_stream(&stream).allocate_async());
        let Poll::Ready(Ok(other)) = cached.poll() else {
            panic!("the future had to wait");
        };
        block.shrink_to(2 * G + 1).unwrap();
        assert!(matches!(Task::new(block.grow_to_async(3 * G)).poll(), Poll::Ready(Ok(()))));
        assert_eq!(calls_without_mapper(&rig.device, &pool), before);
        assert_eq!(rig.device.mapper_calls().total(), apart);
        drop((cached, other, block, tenant));
        pool.close().unwrap();
    }

    fn without_a_mapper_a_future_is_an_error_that_says_so(rig) {
        let (bare, tenant) = common::tenancy(rig, 4);
        let mut block = tenant.block(G).capacity(2 * G).try_allocate().unwrap();
        assert_eq!(block_on(tenant.allocate_async(G)).unwrap_err(), BlockError::NoMapper);
        assert_eq!(block_on(block.grow_to_async(2 * G)).unwrap_err(), BlockError::NoMapper);
        assert_eq!(block_on(bare.freed()).unwrap_err(), BlockError::NoMapper);
        assert!(BlockError::NoMapper.to_string().contains("mapper"));
        assert_eq!(block.size(), G);
    }

    fn those_who_wait_hear_that_the_mapper_ends(rig) {
        let (mapper, pool, tenant) = common::mapped(rig, 4);
        let mut block = tenant.block(2 * G).capacity(8 * G).try_allocate().unwrap();
        let _other = tenant.try_allocate(2 * G).unwrap();
        let allocation = Task::waiting(tenant.allocate_async(2 * G));
        let growth = Task::waiting(block.grow_to_async(4 * G));
        let freed_count = Task::waiting(pool.freed());
        mapper.stop();
        assert_eq!(allocation.finish().unwrap_err(), BlockError::NoMapper);
        assert_eq!(growth.finish().unwrap_err(), BlockError::NoMapper);
        assert_eq!(freed_count.finish().unwrap_err(), BlockError::NoMapper);
        assert_eq!(block.size(), 2 * G);
        assert_eq!(block_on(tenant.allocate_async(2 * G)).unwrap_err(), BlockError::NoMapper);
    }

    fn who_came_first_is_served_first(rig) {
        let (_mapper, _pool, one) = common::mapped(rig, 8);
        let mut held: Vec<Block> = (0..8).map(|_| one.try_allocate(G).unwrap()).collect();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..8 {
            let (future, order) = (one.allocate_async(G), Arc::clone(&order));
            waiting.push(Some(Task::waiting(async move {
                let block = future.await.unwrap();
                order.lock().unwrap().push(number);
                block
            })));
        }
        let mut kept = Vec::new();
        for number in 0..8 {
            held.pop();
            let first = waiting[number].take().unwrap();
            assert!(first.is_woken(WHILE), "{number} comes next");
            kept.push(first.finish());
            served(&one);
            let woken = waiting.iter().flatten().filter(|task| task.wakings() > 0).count();
            assert_eq!(woken, 0, "after {number}");
        }
        assert_eq!(*order.lock().unwrap(), (0..8).collect::<Vec<_>>());
        drop(kept);
    }

    fn one_that_does_not_fit_holds_up_none_that_does(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 8);
        let other = pool.tenant("b").limit(2 * G).register().unwrap();
        let mut held: Vec<Block> = (0..8).map(|_| tenant.try_allocate(G).unwrap()).collect();
        let large = Task::waiting(tenant.allocate_async(4 * G));
        let larger = Task::waiting(tenant.allocate_async(5 * G));
        let small = Task::waiting(tenant.allocate_async(2 * G));
        let others = Task::waiting(other.allocate_async(G));
        held.truncate(7);
        let others = others.finish().unwrap();
        held.truncate(5);
        let small = small.finish().unwrap();
        served(&tenant);
        assert_eq!((large.wakings(), larger.wakings()), (0, 0));
        drop(small);
        held.truncate(3);
        let large = large.finish().unwrap();
        served(&tenant);
        assert_eq!(larger.wakings(), 0);
        drop((large, others, held));
        assert_eq!(larger.finish().unwrap().size(), 5 * G);
    }

    fn a_request_that_is_dropped_leaves_nothing(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let mut block = tenant.block(2 * G).capacity(4 * G).try_allocate().unwrap();
        let other = tenant.try_allocate(2 * G).unwrap();
        block.write(0, &[5; 16]).unwrap();
        drop(tenant.allocate_async(G));
        drop(Task::waiting(tenant.allocate_async(G)));
        drop(Task::waiting(block.grow_to_async(3 * G)));
        drop(Task::waiting(pool.freed()));
        drop(other);
        served(&tenant);
        let stats = books(rig, &pool);
        assert_eq!((stats.in_use, stats.tenants[0].blocks, block.size()), (2 * G, 1, 2 * G));
        // Granted, and dropped before it was polled again.
        let granted = Task::waiting(tenant.allocate_async(G));
        assert!(granted.is_woken(WHILE));
        assert_eq!(tenant.stats().in_use, 3 * G);
        drop(granted);
        let granted = Task::waiting(block.grow_to_async(4 * G));
        assert!(granted.is_woken(WHILE));
        assert_eq!(tenant.stats().in_use, 4 * G);
        drop(granted);
        assert_eq!((tenant.stats().in_use, block.size()), (2 * G, 2 * G));
        let mut bytes = [0; 16];
        block.read(0, &mut bytes).unwrap();
        assert!(bytes == [5; 16] || !rig.keeps_bytes());
        // A block that is dropped while its growth waits.
        let mut gone = tenant.block(2 * G).capacity(4 * G).try_allocate().unwrap();
        drop(Task::waiting(gone.grow_to_async(4 * G)));
        drop(gone);
        let stats = books(rig, &pool);
        assert_eq!((stats.in_use, stats.tenants[0].blocks), (2 * G, 1));
    }

    fn a_range_waits_for_no_memory_and_is_one_again_when_its_growth_is_dropped(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let other = tenant.try_allocate(4 * G).unwrap();
        let mut range = block_on(tenant.block(0).capacity(8 * G).allocate_async()).unwrap();
        // Nothing waits for memory, also behind a request that does.
        let waiting = Task::waiting(tenant.allocate_async(G));
        let second = block_on(tenant.block(0).capacity(8 * G).allocate_async()).unwrap();
        drop(waiting);
        drop(Task::waiting(range.grow_to_async(G)));
        drop(other);
        let granted = Task::waiting(range.grow_to_async(2 * G));
        assert!(granted.is_woken(WHILE));
        assert_eq!(tenant.stats().in_use, 2 * G);
        drop(granted);
        assert_eq!((tenant.stats().in_use, range.size(), second.size()), (0, 0, 0));
        block_on(range.grow_to_async(G)).unwrap();
        assert_eq!(books(rig, &pool).in_use, G);
    }

    fn what_no_waiting_can_serve_is_refused_at_once(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 4, &mapper);
        let tenant = pool.tenant("a").limit(3 * G).register().unwrap();
        let refused = block_on(tenant.allocate_async(4 * G)).unwrap_err();
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert_eq!((shortage.wanted, shortage.tenant_limit), (4 * G, 3 * G));
        assert_eq!(pool.stats().refusals, 1);
        let zero = block_on(tenant.allocate_async(0)).unwrap_err();
        assert!(matches!(zero, BlockError::Argument(ArgumentError::Zero { .. })), "{zero}");
        let mut block = tenant.block(2 * G).capacity(3 * G).try_allocate().unwrap();
        let beyond = block_on(block.grow_to_async(4 * G)).unwrap_err();
        assert!(matches!(beyond, BlockError::Argument(ArgumentError::TooLarge { .. })), "{beyond}");
        let smaller = block_on(block.grow_to_async(G)).unwrap_err();
        assert!(matches!(smaller, BlockError::Argument(ArgumentError::TooSmall { .. })), "{smaller}");
        tenant.blocks().sleep(Contents::Discard).unwrap();
        let asleep = block_on(block.grow_to_async(3 * G)).unwrap_err();
        assert!(matches!(asleep, BlockError::Memory(MemoryError::Asleep { .. })), "{asleep}");
        assert_eq!(block.size(), 2 * G);
    }

    fn a_tenant_that_goes_and_a_limit_that_rises_are_heard_of(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 4, &mapper);
        let tenant = pool.tenant("a").limit(3 * G).register().unwrap();
        let keeper = pool.tenant("b").register().unwrap();
        let held = keeper.try_allocate(4 * G).unwrap();
        let waiting = Task::waiting(tenant.allocate_async(2 * G));
        let theirs = Task::waiting(keeper.allocate_async(2 * G));
        tenant.unregister();
        let gone = waiting.finish().unwrap_err();
        assert!(matches!(gone, BlockError::Unregistered { .. }), "{gone}");
        pool.set_limit(Limit::Bytes(6 * G)).unwrap();
        drop((theirs.finish().unwrap(), held));
    }

    fn hooks_are_called_on_the_mappers_thread(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 4, &mapper);
        let cache = Arc::new(Mutex::new(Vec::new()));
        let (kept, calls) = (Arc::clone(&cache), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&calls);
        let here = std::thread::current().id();
        let one = pool.tenant("a").on_pressure(move |pressure| {
            assert_ne!(std::thread::current().id(), here);
            assert!(pressure.waits && pressure.deadline.is_none() && pressure.bytes > 0);
            count.fetch_add(1, Ordering::SeqCst);
            drop(kept.lock().unwrap().pop());
        });
        let one = one.register().unwrap();
        let two = pool.tenant("b").register().unwrap();
        for _ in 0..2 {
            cache.lock().unwrap().push(one.try_allocate(2 * G).unwrap());
        }
        let small = block_on(two.allocate_async(2 * G)).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        // One hook's memory is not enough: the request waits.
        cache.lock().unwrap().insert(0, small);
        let waiting = Task::waiting(two.allocate_async(4 * G));
        served(&two);
        until(&pool, "asked", || calls.load(Ordering::SeqCst) >= 2);
        served(&two);
        assert_eq!(waiting.wakings(), 0);
        cache.lock().unwrap().clear();
        waiting.finish().unwrap();
    }

    fn memory_that_a_hook_frees_for_the_last_request_goes_to_the_first(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 2, &mapper);
        let cache = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&cache);
        let (called, calls) = mpsc::channel();
        // Each call of the hook is told whether to free the cache.
        let (order, orders) = mpsc::channel();
        let orders = Mutex::new(orders);
        let keeper = pool.tenant("keeper").on_pressure(move |_| {
            called.send(()).unwrap();
            if orders.lock().unwrap().recv_timeout(WHILE).unwrap() {
                kept.lock().unwrap().clear();
            }
        });
        let keeper = keeper.register().unwrap();
        cache.lock().unwrap().push(keeper.try_allocate(G).unwrap());
        let tenant = pool.tenant("a").register().unwrap();
        let held = tenant.try_allocate(G).unwrap();
        let wait = || {
            let task = Task::waiting(tenant.allocate_async(G));
            calls.recv_timeout(WHILE).unwrap();
            task
        };
        let first = wait();
        order.send(false).unwrap();
        let second = wait();
        order.send(false).unwrap();
        // The mapper's thread stays in the hook while another request is made and memory is freed for
        // the first one. In the pass that serves it hooks are called for the last one.
        let third = wait();
        let last = Task::waiting(tenant.allocate_async(G));
        drop(held);
        order.send(false).unwrap();
        order.send(true).unwrap();
        let (first, second) = (first.finish().unwrap(), second.finish().unwrap());
        assert_eq!((third.wakings(), last.wakings()), (0, 0));
        drop((first, second));
        drop((third.finish().unwrap(), last.finish().unwrap()));
    }

    fn what_panics_on_the_mappers_thread_ends_neither_it_nor_the_waiting(rig) {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("a mistake in a waker");
            }
        }
        let mapper = Mapper::start(&rig.device).unwrap();
        let pool = mapped_pool(rig, 4, &mapper);
        let one = pool.tenant("a").on_pressure(|_| panic!("a mistake in a hook"));
        let one = one.register().unwrap();
        let two = pool.tenant("b").register().unwrap();
        let held = one.try_allocate(4 * G).unwrap();
        let waiting = Task::waiting(two.allocate_async(2 * G));
        let mut loud = Task::new(two.allocate_async(2 * G));
        assert!(loud.poll_with(&Waker::from(Arc::new(Panics))).is_pending());
        served(&one);
        drop(held);
        let first = waiting.finish().unwrap();
        until(&pool, "granted", || two.stats().in_use == 4 * G);
        let Poll::Ready(second) = loud.poll() else {
            panic!("the request was granted");
        };
        drop((first, second.unwrap()));
        drop(block_on(two.allocate_async(3 * G)).unwrap());
    }

    fn a_waker_may_use_the_pool_and_drop_futures(rig) {
        type Shelf = Mutex<Vec<Task<cuvmm::pool::futures::AllocateFuture>>>;
        struct Uses(Tenant, Arc<Shelf>, AtomicU64);
        impl Wake for Uses {
            fn wake(self: Arc<Self>) {
                self.1.lock().unwrap().clear();
                // A blocking allocation in a hook would wait for itself.
                let refused = self.0.block(4 * G).timeout(WHILE).allocate();
                assert!(refused.unwrap_err().is_shortage());
                drop(self.0.allocate(G).unwrap());
                self.2.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let held = tenant.try_allocate(4 * G).unwrap();
        let others = Arc::new(Mutex::new(Vec::new()));
        let uses = Arc::new(Uses(tenant.clone(), Arc::clone(&others), AtomicU64::new(0)));
        let mut first = Task::new(tenant.allocate_async(2 * G));
        assert!(first.poll_with(&Waker::from(Arc::clone(&uses))).is_pending());
        for _ in 0..3 {
            others.lock().unwrap().push(Task::waiting(tenant.allocate_async(2 * G)));
        }
        drop(held);
        until(&pool, "woken", || uses.2.load(Ordering::SeqCst) == 1);
        let Poll::Ready(first) = first.poll() else {
            panic!("the request was granted");
        };
        assert_eq!(figures(&pool).in_use, 2 * G);
        drop(first.unwrap());
    }

    fn memory_is_granted_when_the_work_on_it_has_passed(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&stream, 3 * G).unwrap();
        busy(rig, &stream, &block, 7);
        drop(block);
        let waiting = Task::waiting(tenant.allocate_async(2 * G));
        let freed_count = Task::waiting(pool.freed());
        served(&tenant);
        assert!(!waiting.is_woken(MOMENT) && !freed_count.is_woken(MOMENT));
        // Its own stream gets the memory at once, ordered behind that work, although other requests
        // came before.
        let ours = block_on(tenant.block(3 * G).home_stream(&stream).allocate_async()).unwrap();
        drop(ours);
        rig.machine.release_stream(D0, stream.as_raw());
        waiting.finish().unwrap();
        freed_count.finish().unwrap();
    }

    fn news_come_of_what_others_free_and_of_no_attempt(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 8);
        let mut held: Vec<Block> = (0..4).map(|_| tenant.try_allocate(2 * G).unwrap()).collect();
        let mut freed = Some(Task::waiting(pool.freed()));
        let waits = Task::waiting(tenant.allocate_async(8 * G));
        let refused = tenant.try_allocate(4 * G).unwrap_err();
        assert!(refused.is_shortage());
        served(&tenant);
        assert!(!freed.as_ref().unwrap().is_woken(MOMENT), "no memory became free");
        drop(waits);
        let mut attempts = 0;
        let block = loop {
            let listens = freed.take().unwrap_or_else(|| Task::waiting(pool.freed()));
            match tenant.try_allocate(4 * G) {
                Ok(block) => break block,
                Err(_) => attempts += 1,
            }
            held.pop();
            listens.finish().unwrap();
        };
        assert_eq!(attempts, 2);
        drop((block, held));
    }

    fn a_capture_is_waited_for(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        drop(tenant.try_allocate(4 * G).unwrap());
        let guard = pool.capture_guard();
        let waiting = Task::waiting(tenant.block(2 * G).zeroed(true).allocate_async());
        served(&tenant);
        assert!(!waiting.is_woken(MOMENT));
        drop(guard);
        drop(waiting.finish().unwrap());
    }

    fn a_failure_of_the_driver_is_the_answer(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 8);
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemMap]));
        let failed = block_on(tenant.allocate_async(2 * G)).unwrap_err();
        assert!(!failed.is_shortage(), "{failed}");
        let mut block = block_on(tenant.block(2 * G).capacity(8 * G).allocate_async()).unwrap();
        rig.faults.arm(nth_of(1, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemSetAccess]));
        block_on(block.grow_to_async(6 * G)).unwrap_err();
        assert_eq!((block.size(), books(rig, &pool).in_use), (2 * G, 2 * G));
        block_on(block.grow_to_async(6 * G)).unwrap();
    }

    fn a_pool_with_futures_is_not_closed(rig) {
        let (_mapper, pool, tenant) = common::mapped(rig, 4);
        let held = tenant.try_allocate(4 * G).unwrap();
        let waiting = Task::waiting(tenant.allocate_async(2 * G));
        let refused = pool.close().unwrap_err();
        let pool = refused.owner;
        drop(held);
        drop(waiting.finish().unwrap());
        let freed_count = pool.freed();
        let refused = pool.close().unwrap_err();
        drop((freed_count, tenant));
        refused.owner.close().unwrap();
    }
}

#[test]
fn a_lost_context_is_told_to_all_who_wait() {
    let rig = common::model();
    let (mapper, pool, tenant) = common::mapped(&rig, 4);
    let stream = Stream::new(&rig.device).unwrap();
    let held = tenant.try_allocate(4 * G).unwrap();
    let waiting = (0..3).map(|_| Task::waiting(tenant.allocate_async(G)));
    let waiting: Vec<_> = waiting.collect();
    rig.machine
        .lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(stream.synchronize().is_err());
    for one in waiting {
        let lost = one.finish().unwrap_err();
        let says_so = matches!(
            lost,
            BlockError::Memory(MemoryError::Call(CallError::ContextLost(_)))
        );
        assert!(says_so, "{lost}");
    }
    drop((held, tenant, stream));
    pool.close().unwrap();
    drop(mapper);
}

#[test]
fn futures_can_be_sent_and_outlive_what_made_them() {
    fn sends<T: Send + 'static>(future: T) -> T {
        future
    }
    let rig = common::clean(common::host());
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let block = block_on(sends(tenant.block(G).tag("t").allocate_async())).unwrap();
    let freed_count = sends(pool.freed());
    drop(pool);
    let waiting = sends(tenant.allocate_async(4 * G));
    drop(tenant);
    drop(block);
    assert!(matches!(
        block_on(waiting),
        Err(BlockError::Unregistered { .. })
    ));
    drop(freed_count);
}

#[test]
fn many_of_one_stream_are_served_one_after_the_other() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 1);
    let stream = Stream::new(&rig.device).unwrap();
    let mut block = tenant.allocate_on(&stream, G).unwrap();
    let waiting =
        (0..200).map(|_| Task::waiting(tenant.block(G).home_stream(&stream).allocate_async()));
    for task in waiting.collect::<Vec<_>>() {
        drop(block);
        block = task.finish().unwrap();
    }
    assert_eq!(figures(&pool).in_use, G);
    drop((block, tenant, stream));
    pool.close().unwrap();
}

#[test]
fn a_forked_child_is_told_so_and_hangs_nowhere() {
    let rig = common::model();
    let (_mapper, pool, tenant) = common::mapped(&rig, 4);
    let mut grows = tenant.block(G).capacity(4 * G).try_allocate().unwrap();
    let held = tenant.try_allocate(3 * G).unwrap();
    let mut waiting = Some(Task::waiting(tenant.allocate_async(2 * G)));
    let mut growing = Some(Task::waiting(grows.grow_to_async(2 * G)));
    let mut freed_count = Some(Task::waiting(pool.freed()));
    // SAFETY: the child only uses what this test created, and leaves by `_exit` or a signal.
    #[allow(unsafe_code)]
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: `alarm` only makes the system end a child that hangs.
        #[allow(unsafe_code)]
        unsafe {
            libc::alarm(20)
        };
        let is_forked = |error: &BlockError| {
            matches!(
                error,
                BlockError::Memory(MemoryError::Call(CallError::Forked { .. }))
            )
        };
        let mut told = matches!(
            waiting.as_mut().unwrap().poll(),
            Poll::Ready(Err(error)) if is_forked(&error)
        );
        told &= matches!(
            Task::new(tenant.allocate_async(G)).poll(),
            Poll::Ready(Err(error)) if is_forked(&error)
        );
        told &= matches!(
            Task::new(pool.freed()).poll(),
            Poll::Ready(Err(error)) if is_forked(&error)
        );
        drop((waiting.take(), growing.take(), freed_count.take()));
        // SAFETY: ends the child without running any code of the parent's exit.
        #[allow(unsafe_code)]
        unsafe {
            libc::_exit(i32::from(!told))
        }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    #[allow(unsafe_code)]
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(
        (waited, status),
        (child, 0),
        "the child hangs, or its futures do not fail"
    );
    // The parent's futures continue.
    drop(held);
    growing.take().unwrap().finish().unwrap();
    freed_count.take().unwrap().finish().unwrap();
    drop(waiting.take().unwrap().finish().unwrap());
    drop(growing);
    assert_eq!(grows.size(), 2 * G);
}
