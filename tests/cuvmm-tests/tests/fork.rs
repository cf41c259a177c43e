//! A forked child: every call is an error and every drop does nothing.
#![allow(unsafe_code)]

mod common;

use std::fmt::Debug;
use std::task::Poll;
use std::time::Duration;

use common::executor::Task;
use common::{D0, G};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{Call, HandleTypes};
use cuvmm::error::{
    BlockError, ContainerError, DeviceError, GroupError, MemoryError, PagedKvError, PoolError,
    SleepError,
};
use cuvmm::own::PoolReuse;
use cuvmm::paged::LayerGroup;
use cuvmm::{
    Access, AccessGrant, Block, CallError, Contents, CurrentTenantMemPool, Device, Group,
    HostStore, Limit, Mapper, MemPool, PagedKv, Physical, Pool, PoolAllocation, Stream, Tenant,
    TenantMemPool, UnifiedBuffer,
};

#[test]
fn a_forked_child_owns_nothing() {
    let rig = common::clean(common::model());
    let physical = Physical::new(&rig.device, G).unwrap();
    let mut region = common::region(&rig, 4 * G, G);
    let (pool, tenant) = common::tenancy(&rig, 8);
    let block = tenant.try_allocate(G).unwrap();
    let lease = block.lease();
    let mut lent = common::committed(tenant.region(4 * G).largest_extent(G), 3 * G);
    lent.decommit(0..G).unwrap();
    let registered = (region.register(0..G).unwrap(), block.register().unwrap());
    let gone = common::region(&rig, G, G);
    let left = gone.register(0..G).unwrap();
    drop(gone);
    let stream = Stream::new(&rig.device).unwrap();
    let buffer = UnifiedBuffer::<u32>::zeroed(&rig.device, &stream, 100).unwrap();
    assert_eq!(buffer.host().unwrap().len(), 100);
    let access = buffer.device_read(&stream).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let group = Group::join(directory.path(), "a", 1, None).unwrap();
    let layers = LayerGroup::new(1, 1).part(1, G as u32, 1);
    let paged = PagedKv::builder(&tenant, &stream, 4)
        .group(layers)
        .extent(G);
    let paged = paged.build().unwrap();
    paged.back(&[0, 1]).unwrap();
    let step = paged.step();
    let mut request = Task::new(paged.back_async(&[2]));
    rig.faults.forget();
    // SAFETY: the child only uses what this test created, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |error: &CallError| matches!(error, CallError::Forked { .. });
        let mut right = matches!(
            Physical::new(&rig.device, G),
            Err(MemoryError::Create { cause, .. }) if forked(&cause)
        );
        right &= matches!(tenant.try_allocate(2 * G), Err(error) if match &error {
            BlockError::Memory(MemoryError::Call(cause) | MemoryError::Range { cause, .. }) => forked(cause),
            _ => false,
        });
        right &= matches!(lent.commit(0..G), Err(MemoryError::Call(cause)) if forked(&cause));
        right &= matches!(lent.purge(), Err(cause) if forked(&cause));
        for region in [&mut lent, &mut region] {
            right &=
                matches!(region.compact(&stream), Err(MemoryError::Call(cause)) if forked(&cause));
        }
        right &= lent.decommit(G..2 * G).is_ok() && lent.held() == 2 * G;
        right &= matches!(
            paged.back(&[2]),
            Err(PagedKvError::Back { cause, .. }) if refused::<()>(Err(cause.clone()))
        );
        right &= matches!(
            request.poll(),
            Poll::Ready(Err(PagedKvError::Back { cause, .. })) if refused::<()>(Err(cause.clone()))
        );
        right &= matches!(
            paged.release(&[0]),
            Err(PagedKvError::Memory(MemoryError::Call(cause))) if forked(&cause)
        );
        right &= matches!(
            paged.alone().sleep(Contents::Discard),
            Err(SleepError::Memory(MemoryError::Call(cause))) if forked(&cause)
        );
        right &= matches!(
            paged.alone().wake(),
            Err(SleepError::Memory(MemoryError::Call(cause))) if forked(&cause)
        );
        right &= !paged.is_asleep();
        right &= paged.stats().is_err() && paged.view(0, 0, 0).is_some();
        drop(paged.step());
        // There is no work to wait for, but the pages are not the child's.
        right &= matches!(buffer.host(), Err(ContainerError::Memory(MemoryError::Call(cause))) if forked(&cause));
        right &= matches!(region.register(0..G), Err(MemoryError::Call(cause)) if forked(&cause));
        right &= matches!(block.register(), Err(MemoryError::Call(cause)) if forked(&cause));
        right &= matches!(
            block.read(0, &mut [0]),
            Err(MemoryError::Call(cause)) if forked(&cause)
        );
        right &= matches!(group.enter("a", Duration::ZERO), Err(GroupError::Call(cause)) if forked(&cause));
        drop((access, group));
        drop(step);
        drop((request, paged, buffer, stream));
        drop((
            left, registered, lent, lease, block, tenant, pool, region, physical,
        ));
        right &= rig.faults.total() == 0 && rig.device.drop_failures() == 0;
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(i32::from(!right)) }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's checks");
    assert_eq!(rig.faults.total(), 0);
    // The child has not left the group in its parent's name.
    let other = Group::join(directory.path(), "a", 1, None);
    assert!(matches!(other, Err(GroupError::Taken { rank: None, .. })));
    group.enter("a", Duration::ZERO).unwrap().ready().unwrap();
    drop(access);
    drop(step);
    drop((request, paged, buffer, stream));
}

/// Runs `work` in a forked child, which the system ends if it hangs, and returns what `work` returned.
fn in_child(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only uses what its test created, and leaves by `_exit` or a signal.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: `alarm` only makes the system end a child that hangs.
        unsafe { libc::alarm(20) };
        let status = work();
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(status) }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status & 0x7f, 0, "the child hangs, or a signal ended it");
    status >> 8
}

/// A child that is forked in an operation of a group does not decide it.
#[test]
fn a_forked_child_has_no_vote() {
    let directory = tempfile::tempdir().unwrap();
    let groups = ["a", "b"].map(|name| Group::join(directory.path(), name, 1, None).unwrap());
    let entered = groups
        .each_ref()
        .map(|group| group.enter("sleep", Duration::ZERO).unwrap());
    // SAFETY: the child only uses what this test created, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let [first, second] = entered;
        let mut right = matches!(first.ready(), Err(GroupError::Call(cause)) if forked(&cause));
        right &= matches!(second.fail("no"), GroupError::Call(cause) if forked(&cause));
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(i32::from(!right)) }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's checks");
    for entered in entered {
        assert!(entered.is_open());
        entered.ready().unwrap();
    }
}

/// The objects in the test of a held lock.
struct Held {
    pool: Pool,
    tenant: Tenant,
    other: Tenant,
    stream: Stream,
    store: HostStore,
    block: Block,
    /// In a stream cache once it is dropped.
    _cached: Block,
    asleep: Block,
}

const fn forked(error: &CallError) -> bool {
    matches!(error, CallError::Forked { .. })
}

fn refused<T>(outcome: Result<T, BlockError>) -> bool {
    matches!(outcome, Err(BlockError::Memory(MemoryError::Call(error))) if forked(&error))
}

/// Returns every public operation that takes a pool's lock, with a check of its result.
fn ways() -> Vec<fn(&mut Held) -> bool> {
    vec![
        |it| refused(it.tenant.try_allocate(G)),
        |it| refused(it.tenant.allocate(G)),
        |it| refused(it.tenant.block(G).timeout(Duration::MAX).allocate()),
        |it| refused(it.tenant.allocate_on(&it.stream, G)),
        |it| refused(it.tenant.block(G).try_allocate_many(3)),
        |it| refused(it.tenant.block(G).allocate_many(3)),
        |it| refused(it.tenant.block(G).try_allocate_adjacent(3)),
        |it| refused(it.tenant.block(G).allocate_adjacent(3)),
        |it| refused(it.block.try_grow_to(3 * G)),
        |it| refused(it.block.grow_to(3 * G)),
        |it| {
            let grown = it.tenant.grow_all(&mut [(&mut it.block, 3 * G)]);
            matches!(grown, Err(BlockError::Refused { cause, .. }) if refused::<()>(Err(*cause.clone())))
        },
        |it| {
            let grown = it.tenant.try_grow_all(&mut [(&mut it.block, 3 * G)]);
            matches!(grown, Err(BlockError::Refused { cause, .. }) if refused::<()>(Err(*cause.clone())))
        },
        |it| refused(it.block.shrink_to(G)),
        |it| refused(it.block.fork(G, G)),
        |it| refused(it.block.try_fork(G, G)),
        |it| it.block.write(0, b"x").is_err() && it.block.read(0, &mut [0; 1]).is_err(),
        |it| matches!(it.block.record_use(&it.stream), Err(error) if forked(&error)),
        |it| {
            it.block.record_use_anywhere();
            it.block.streams().is_none() && it.block.extents().is_empty()
        },
        |it| {
            let lease = it.block.lease();
            let used = lease.record_use(&it.stream);
            lease.record_use_anywhere();
            let seen = (lease.streams().is_none(), lease.extents().is_empty());
            drop(lease.clone());
            matches!(used, Err(error) if forked(&error)) && seen == (true, true)
        },
        |it| it.block.register().is_err(),
        |it| {
            let exported = it.block.export(HandleTypes::POSIX_FD);
            matches!(exported, Err(MemoryError::Call(error)) if forked(&error))
        },
        |it| !it.asleep.is_asleep(),
        |it| {
            let read = it.asleep.read_kept(0, &mut [0]);
            matches!(read, Err(SleepError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| matches!(it.tenant.headroom(), Err(error) if forked(&error)),
        |it| it.tenant.stats().committed == 0 && it.tenant.stats().blocks == 0,
        |it| {
            let stats = it.pool.stats();
            (stats.limit, stats.committed, stats.tenants.len()) == (64 * G, 0, 0)
        },
        |it| matches!(it.pool.trim(0), Err(error) if forked(&error)),
        |it| refused(it.pool.compact(|_| true)),
        |it| {
            drop(it.pool.capture_guard());
            true
        },
        |it| {
            let tenant = it.pool.tenant("new").register();
            matches!(tenant, Err(PoolError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| {
            let pool = Pool::builder(it.pool.device()).build();
            matches!(pool, Err(PoolError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| {
            let mapper = Mapper::start(it.pool.device());
            matches!(mapper, Err(DeviceError::Call(error)) if forked(&error))
        },
        |it| it.pool.clone().close().is_err(),
        |it| (it.store.free(), it.store.capacity(), it.store.shrink_to(0)) == (0, 0, 0),
        |it| {
            let taken = it.store.reserve(8 * G);
            matches!(taken, Err(SleepError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| {
            let slept = it.other.blocks().sleep(Contents::Keep(&it.store));
            matches!(slept, Err(SleepError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| {
            let slept = it.other.blocks().sleep(Contents::Discard);
            matches!(slept, Err(SleepError::Memory(MemoryError::Call(error))) if forked(&error))
        },
        |it| {
            let woken = it.other.blocks().wake();
            matches!(woken, Err(SleepError::Memory(MemoryError::Call(error))) if forked(&error))
                || matches!(it.other.blocks().wake(), Err(SleepError::Block { cause, .. })
                    if refused::<()>(Err(cause.clone())))
        },
        |it| {
            it.pool.device().on_drop_failure(None);
            true
        },
        |it| {
            it.tenant.clone().unregister();
            true
        },
        |it| {
            HostStore::builder(it.pool.device())
                .ordinary(G)
                .build()
                .is_err()
        },
    ]
}

// I-44
#[test]
fn a_child_that_is_forked_while_a_thread_has_the_pools_lock_hangs_nowhere() {
    let rig = common::clean(common::model());
    let pool = common::limited(&rig, 64)
        .shareable(HandleTypes::POSIX_FD)
        .build()
        .unwrap();
    let [tenant, other] = common::tenants(&pool);
    let stream = Stream::new(&rig.device).unwrap();
    let store = HostStore::builder(&rig.device)
        .pinned(4 * G)
        .limit(64 * G)
        .build()
        .unwrap();
    let asleep = other.allocate(G).unwrap();
    other.blocks().sleep(Contents::Keep(&store)).unwrap();
    let block = tenant.block(2 * G).capacity(4 * G).home_stream(&stream);
    // Memory whose fence a reclaim polls, under the pool's lock.
    let busy = tenant.allocate_on(&stream, G).unwrap();
    let kernel = vec![(busy.address(), G, 1)];
    rig.held_kernel(&stream, &[], &kernel);
    let third = tenant.clone();
    let mut held = Some(Held {
        block: block.allocate().unwrap(),
        _cached: tenant.allocate_on(&stream, G).unwrap(),
        pool,
        tenant,
        other,
        stream,
        store,
        asleep,
    });
    drop(busy);
    let ways = ways();
    rig.faults.forget();
    let polls = [Call::StreamQuery, Call::EventQuery, Call::EventRecord];
    for call in polls {
        let slow = Fault::delay_all(Duration::from_secs(3));
        rig.faults.arm(slow.of(call));
    }
    std::thread::scope(|scope| {
        let polling = scope.spawn(move || third.try_allocate(64 * G).unwrap_err());
        while polls.iter().all(|&call| rig.faults.count(call) == 0) {
            assert!(!polling.is_finished(), "nothing was polled");
            std::thread::yield_now();
        }
        let status = in_child(|| {
            let mut own = held.take().unwrap();
            let wrong = ways.iter().position(|way| !way(&mut own));
            drop(own);
            wrong.map_or(0, |index| i32::try_from(index).unwrap_or(98) + 1)
        });
        assert_eq!(
            status, 0,
            "the number of the failed operation, counted from 1"
        );
    });
    rig.faults.disarm();
    rig.machine.release_all_streams(D0);
}

/// A driver call about a stream is made under the lock of its events.
#[test]
fn a_child_that_is_forked_while_a_thread_asks_for_a_fence_hangs_nowhere() {
    let rig = common::clean(common::model());
    let stream = Stream::new(&rig.device).unwrap();
    let mut regions = [(); 2].map(|()| {
        let mut region = common::region(&rig, G, G);
        let streams = std::slice::from_ref(&stream);
        region.decommit_after(0..G, streams).unwrap();
        region
    });
    rig.faults.forget();
    let slow = Fault::delay_all(Duration::from_secs(3));
    rig.faults.arm(slow.of(Call::StreamQuery));
    let [ours, theirs] = &mut regions;
    std::thread::scope(|scope| {
        scope.spawn(move || assert_eq!(theirs.purge().unwrap().given_back, G));
        while rig.faults.count(Call::StreamQuery) == 0 {
            std::thread::yield_now();
        }
        let status = in_child(|| {
            let right = matches!(ours.purge(), Err(error) if forked(&error));
            i32::from(!right)
        });
        assert_eq!(status, 0, "the child hangs, or its result is wrong");
    });
    rig.faults.disarm();
}

/// A store takes memory while no lock of a pool is held.
#[test]
fn a_child_that_is_forked_while_a_store_grows_has_none_of_it() {
    let rig = common::clean(common::model());
    let builder = HostStore::builder(&rig.device);
    let store = builder.pinned(G).limit(64 * G).build().unwrap();
    rig.faults.forget();
    let slow = Fault::delay_all(Duration::from_secs(1));
    rig.faults.arm(slow.of(Call::MemHostRegister));
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| store.reserve(8 * G));
        while rig.faults.count(Call::MemHostRegister) == 0 {
            std::thread::yield_now();
        }
        let status = in_child(|| {
            let seen = (store.free(), store.capacity(), store.shrink_to(0));
            let ended = rig.faults.count(Call::MemHostUnregister);
            let right = seen == (0, 0, 0) && store.reserve(1).is_err() && ended == 0;
            i32::from(!right)
        });
        assert_eq!(status, 0, "the child hangs, or its result is wrong");
        growing.join().unwrap().unwrap();
    });
    rig.faults.disarm();
    assert_eq!((store.capacity(), store.free()), (8 * G, 8 * G));
    drop(store);
    assert_eq!(rig.machine.live().registered, 0);
}

/// Memory pools of the driver, and what was allocated from them.
struct Pools {
    device: Device,
    tenant: Tenant,
    memory: TenantMemPool,
    current: Option<CurrentTenantMemPool>,
    pool: MemPool,
    allocations: Vec<PoolAllocation>,
    stream: Stream,
    other: Stream,
}

fn is_forked<T>(outcome: Result<T, impl Debug>) -> bool {
    matches!(outcome, Err(error) if format!("{error:?}").contains("Forked"))
}

const ALL: PoolReuse = PoolReuse {
    follow_events: true,
    opportunistic: true,
    internal_dependencies: true,
};

/// Returns every public operation on memory pools of the driver, with a check of its result.
fn ways_of_pools() -> Vec<fn(&mut Pools) -> bool> {
    vec![
        |it| is_forked(MemPool::new(&it.device)),
        |it| is_forked(MemPool::default_of(&it.device)),
        |it| is_forked(MemPool::current_of(&it.device)),
        |it| is_forked(it.pool.is_current()),
        |it| is_forked(it.pool.make_current()),
        |it| is_forked(it.pool.stats()),
        |it| is_forked(it.pool.reset_peaks()),
        |it| is_forked(it.pool.release_threshold()),
        |it| is_forked(it.pool.set_release_threshold(0)),
        |it| is_forked(it.pool.reuse()),
        |it| is_forked(it.pool.set_reuse(ALL)),
        |it| is_forked(it.pool.trim_to(0)),
        |it| {
            let grant = AccessGrant::new(&it.device, Access::ReadWrite);
            is_forked(it.pool.set_access(&[grant]))
        },
        |it| is_forked(it.pool.access_of(&it.device)),
        |it| is_forked(it.pool.allocate_on(&it.stream, G)),
        |it| {
            let at = it.allocations[0].address();
            // SAFETY: it is refused.
            is_forked(unsafe { it.pool.borrow(&it.stream, at, G) })
        },
        |it| is_forked(it.pool.export(HandleTypes::POSIX_FD)),
        |it| it.pool.held_elsewhere() == 0,
        |it| it.device.kept_memory_pools() == 0,
        |it| is_forked(it.allocations[0].read(&it.stream, 0, &mut [0])),
        |it| is_forked(it.allocations[0].write(&it.stream, 0, &[0])),
        |it| is_forked(it.allocations[0].record_use(&it.other)),
        |it| is_forked(it.allocations[0].export()),
        |it| !it.allocations[0].is_held(),
        |it| is_forked(it.allocations.pop().unwrap().close()),
        |it| is_forked(it.tenant.memory_pool(G).build()),
        |it| is_forked(it.memory.reserve(G)),
        |it| is_forked(it.memory.try_reserve(G)),
        |it| is_forked(it.memory.grow_to(G)),
        |it| is_forked(it.memory.shrink_to(0)),
        |it| is_forked(it.memory.trim()),
        |it| is_forked(it.memory.stats()),
        |it| is_forked(it.memory.allocate_on(&it.stream, G)),
        |it| is_forked(it.memory.make_current()),
        |it| is_forked(it.memory.is_current()),
        |it| is_forked(it.current.take().unwrap().close()),
    ]
}

#[test]
fn a_child_that_is_forked_during_an_exchange_has_no_memory_pools_and_hangs_nowhere() {
    const STEP: u64 = 32 << 20;
    let rig = common::model();
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(16 * STEP));
    let (_pool, tenant) = common::with_tenant(pool.build().unwrap());
    let memory = tenant.memory_pool(2 * STEP).build().unwrap();
    let theirs = memory.clone();
    let shareable = MemPool::builder(&rig.device).shareable(HandleTypes::POSIX_FD);
    let shareable = shareable.create().unwrap();
    let [stream, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let mut held = Some(Pools {
        device: rig.device.clone(),
        tenant,
        current: Some(memory.make_current().unwrap()),
        allocations: vec![
            shareable.allocate_on(&stream, G).unwrap(),
            memory.allocate_on(&stream, STEP).unwrap(),
        ],
        memory,
        pool: shareable,
        stream,
        other,
    });
    let ways = ways_of_pools();
    rig.faults.forget();
    let slow = Fault::delay_all(Duration::from_secs(3));
    rig.faults.arm(slow.of(Call::MemPoolCreate));
    std::thread::scope(|scope| {
        let grows = scope.spawn(move || theirs.reserve(4 * STEP));
        while rig.faults.count(Call::MemPoolCreate) == 0 {
            std::thread::yield_now();
        }
        let status = in_child(|| {
            let calls = rig.faults.total();
            let mut own = held.take().unwrap();
            let mut wrong = ways.iter().position(|way| !way(&mut own));
            drop(own);
            if rig.faults.total() != calls || rig.device.drop_failures() > 0 {
                wrong = wrong.or(Some(97));
            }
            wrong.map_or(0, |index| i32::try_from(index).unwrap_or(98) + 1)
        });
        assert_eq!(
            status, 0,
            "the number of the failed operation, counted from 1"
        );
        grows.join().unwrap().unwrap();
    });
    rig.faults.disarm();
    let held = held.take().unwrap();
    assert!(held.memory.is_current().unwrap());
    assert_eq!(held.memory.stats().unwrap().maximum, 5 * STEP);
}
