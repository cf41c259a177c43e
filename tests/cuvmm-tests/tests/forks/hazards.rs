//! Forks of blocks beside other events: a driver that refuses to undo, a fence that completes, or a
//! sleep that is canceled, during another call.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::books::{balanced, books};
use crate::common::{self, D0, G, Rig, busy, model_options, pool, rig};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, ModelDriver};
use cuvmm::driver::{CUresult, Call, CudaVersion};
use cuvmm::error::{BlockError, MemoryError, SleepError};
use cuvmm::sleep::Progress;
use cuvmm::{Block, Contents, Stream, Tenant};

const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// Allocates a block for forking, with extents of two granules.
fn allocate(tenant: &Tenant, stream: &Stream, tag: &str, size: u64) -> Block {
    let builder = tenant.block(size).capacity(32 * G).largest_extent(2 * G);
    builder.home_stream(stream).tag(tag).allocate().unwrap()
}

fn shows(rig: &Rig<impl Backing>, block: &Block, at: u64, byte: u8) {
    let mut bytes = [0; 32];
    block.read(at, &mut bytes).unwrap();
    assert!(
        !rig.keeps_bytes() || bytes == [byte; 32],
        "{bytes:?} at {at:#x}"
    );
}

on_both! {
    fn what_cannot_be_put_back_under_one_is_the_others_still(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let root = allocate(&tenant, &stream, "kv", 5 * G);
        for (at, byte) in [(0, 7), (2 * G, 8)] {
            root.write(at, &[byte; 32]).unwrap();
        }
        let fork = root.fork(4 * G, 4 * G).unwrap();
        // When the root's memory is put back, its first extent is mapped, cannot be given access,
        // and stays mapped.
        let watch = |_: &Progress| {
            for (nth, call) in [(1, Call::MemSetAccess), (1, Call::MemUnmap), (2, Call::MemUnmap)] {
                rig.faults.arm(Fault::nth(nth, UNKNOWN).of(call));
            }
            false
        };
        let refused = tenant.blocks().on_progress(&watch).sleep(Contents::Discard);
        rig.faults.disarm();
        assert!(matches!(
            refused,
            Err(SleepError::Stayed { blocks: 1, bytes, .. }) if bytes == 5 * G
        ), "{refused:?}");
        assert!(root.is_asleep() && !fork.is_asleep());
        // The memory behind it that the fork shares is not in the free list.
        let stats = balanced(rig, &pool);
        assert_eq!((stats.committed, stats.in_use, stats.free), (4 * G, 4 * G, G));
        let other = allocate(&tenant, &stream, "other", 2 * G);
        other.write(0, &[9; 32]).unwrap();
        shows(rig, &fork, 0, 7);
        shows(rig, &fork, 2 * G, 8);
        balanced(rig, &pool);
    }

    fn what_a_lease_names_after_its_fork_has_shrunk_is_waited_for(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let [home, named] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let root = tenant.block(2 * G).largest_extent(G).home_stream(&home).allocate().unwrap();
        for anywhere in [false, true] {
            let mut fork = root.fork(2 * G, 2 * G).unwrap();
            let (lease, address) = (fork.lease(), fork.address());
            fork.shrink_to(G).unwrap();
            rig.held_kernel(&named, &[(address, 2 * G)], &[]);
            match anywhere {
                true => lease.record_use_anywhere(),
                false => lease.record_use(&named).unwrap(),
            }
            drop(lease);
            pool.trim(0).unwrap();
            assert_eq!(pool.stats().mappings, 4, "no memory is unmapped under the kernel");
            rig.machine.release_stream(D0, named.as_raw());
            pool.trim(0).unwrap();
            assert_eq!(pool.stats().mappings, 3);
            drop(fork);
        }
        rig.device.synchronize().unwrap();
        balanced(rig, &pool);
    }

    fn who_is_alone_half_way_may_write_what_it_has_grown_over(rig) {
        let pool = pool(rig, 3);
        let [tenant, idle] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let root = allocate(&tenant, &stream, "kv", 2 * G);
        root.write(0, &[7; 32]).unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        drop(allocate(&idle, &stream, "kv", G));
        // The root still shares the extent when the fork starts to unshare it, and no longer does
        // when there is memory for the copy.
        for nth in [1, 2] {
            rig.faults.arm(Fault::nth(nth, UNKNOWN).of(Call::MemUnmap));
        }
        drop(root);
        fork.try_grow_to(2 * G).unwrap();
        assert_eq!(rig.faults.injected(), 2);
        rig.faults.disarm();
        assert_eq!((fork.read_only(), books(rig, &pool).committed), (0, 2 * G));
        fork.write(0, &[8; 32]).unwrap();
        fork.write(G, &[9; 32]).unwrap();
        // The device may write to it too.
        rig.kernel(&stream, &[], &[(fork.address(), 2 * G, 5)]);
        shows(rig, &fork, 0, 5);
    }

    fn a_block_whose_sleep_is_called_off_has_not_grown_over_what_it_shares(rig) {
        let (pool, tenant, stream) = common::scene(rig, 12);
        let [mut one, mut two] = ["falls", "stays"].map(|tag| {
            let root = allocate(&tenant, &stream, tag, 2 * G);
            let mut fork = root.fork(2 * G, 2 * G).unwrap();
            fork.shrink_to(G).unwrap();
            (root, fork)
        });
        // Another tenant has all remaining memory. Its pressure hook first has the sleep canceled.
        let (call_off, called_off) = mpsc::channel();
        let (awake, is_awake) = mpsc::channel::<()>();
        let (falling, falls) = mpsc::channel();
        let theirs: Arc<Mutex<Option<Block>>> = Arc::default();
        let is_awake = Mutex::new(is_awake);
        let (called, held) = (call_off.clone(), Arc::clone(&theirs));
        let hook = move |_: &cuvmm::pool::Pressure| {
            if let Some(block) = held.lock().unwrap().take() {
                called.send(()).unwrap();
                is_awake.lock().unwrap().recv().unwrap();
                drop(block);
            }
        };
        let other = pool.tenant("b").on_pressure(hook).register().unwrap();
        *theirs.lock().unwrap() = Some(allocate(&other, &stream, "kv", 8 * G));
        std::thread::scope(|scope| {
            let tenant = &tenant;
            scope.spawn(move || {
                let called_off = Mutex::new(called_off);
                let watch = |_: &Progress| {
                    falling.send(()).unwrap();
                    called_off.lock().unwrap().recv().unwrap();
                    false
                };
                let blocks = tenant.blocks().tag("falls");
                let slept = blocks.on_progress(&watch).sleep(Contents::Discard);
                assert!(matches!(slept, Err(SleepError::Cancelled)), "{slept:?}");
                awake.send(()).unwrap();
            });
            falls.recv().unwrap();
            let refused = tenant.grow_all(&mut [(&mut one.1, 2 * G), (&mut two.1, 2 * G)]);
            call_off.send(()).unwrap();
            assert!(matches!(
                refused,
                Err(BlockError::Refused { index: 0, size, ref cause })
                    if size == 2 * G && matches!(**cause, BlockError::Memory(MemoryError::Asleep(G)))
            ), "{refused:?}");
        });
        drop(theirs.lock().unwrap().take());
        assert_eq!((one.1.size(), one.1.read_only()), (G, G));
        one.1.grow_to(2 * G).unwrap();
        one.1.write(G, &[1; 32]).unwrap();
        books(rig, &pool);
    }

    fn work_that_was_queued_since_it_shrank_keeps_what_it_shares_in_place(rig) {
        let (_pool, tenant, stream) = common::scene(rig, 16);
        let root = allocate(&tenant, &stream, "kv", 2 * G);
        root.write(0, &[7; 32]).unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        // The work queued so far is known to be complete.
        let lease = fork.lease();
        let refused = fork.try_grow_to(2 * G);
        assert!(matches!(refused, Err(BlockError::SharedInUse { .. })), "{refused:?}");
        drop(lease);
        rig.held_kernel(&stream, &[(fork.address(), G)], &[]);
        let before = rig.machine.snapshot();
        let refused = fork.try_grow_to(2 * G);
        assert!(matches!(
            refused,
            Err(BlockError::SharedInUse { offset, bytes, others: 1 }) if (offset, bytes) == (G, G)
        ), "{refused:?}");
        assert_eq!(rig.machine.snapshot(), before);
        rig.machine.release_stream(D0, stream.as_raw());
        fork.try_grow_to(2 * G).unwrap();
        rig.device.synchronize().unwrap();
        shows(rig, &fork, 0, 7);
    }

    fn work_that_a_pressure_hook_queues_keeps_what_it_reads_in_place(rig) {
        let (pool, tenant, stream) = common::scene(rig, 4);
        let root = allocate(&tenant, &stream, "kv", 2 * G);
        root.write(0, &[7; 32]).unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        let theirs: Arc<Mutex<Option<Block>>> = Arc::default();
        let (held, machine) = (Arc::clone(&theirs), Arc::clone(&rig.machine));
        let (raw, reads) = (stream.as_raw(), vec![(fork.address(), G)]);
        let hook = move |_: &cuvmm::pool::Pressure| {
            drop(held.lock().unwrap().take());
            machine.hold(D0, raw);
            machine.queue_kernel(D0, raw, reads.clone(), vec![]).unwrap();
        };
        let giver = pool.tenant("b").on_pressure(hook).register().unwrap();
        let other = Stream::new(&rig.device).unwrap();
        *theirs.lock().unwrap() = Some(giver.allocate_on(&other, 2 * G).unwrap());
        let refused = fork.grow_to(2 * G);
        assert!(matches!(refused, Err(BlockError::SharedInUse { others: 1, .. })), "{refused:?}");
        assert_eq!((fork.size(), books(rig, &pool).shared), (G, 2 * G));
        rig.machine.release_stream(D0, stream.as_raw());
        fork.grow_to(2 * G).unwrap();
        shows(rig, &fork, 0, 7);
        shows(rig, &root, 0, 7);
    }

    fn work_that_is_queued_during_an_attempt_keeps_what_it_reads_in_place(rig) {
        // At the unmapping of another tenant's idle memory, and at the creation of memory.
        for (call, idle) in [(Call::MemUnmap, 2), (Call::MemCreate, 0)] {
            let pool = pool(rig, 4);
            let [tenant, other] = common::tenants(&pool);
            let stream = Stream::new(&rig.device).unwrap();
            let builder = tenant.block(2 * G).capacity(8 * G).largest_extent(2 * G);
            // It ends long before the held work does.
            let builder = builder.timeout(Duration::from_millis(20));
            let root = builder.home_stream(&stream).allocate().unwrap();
            root.write(0, &[7; 32]).unwrap();
            let mut fork = root.fork(2 * G, 2 * G).unwrap();
            fork.shrink_to(G).unwrap();
            if idle > 0 {
                let theirs = Stream::new(&rig.device).unwrap();
                drop(allocate(&other, &theirs, "kv", idle * G));
            }
            let (raw, reads) = (stream.as_raw(), vec![(fork.address(), G)]);
            let (machine, launched) = (Arc::clone(&rig.machine), Arc::new(AtomicBool::new(false)));
            let done = Arc::clone(&launched);
            rig.faults.watch(Some(Arc::new(move |here| {
                if here == call && !done.swap(true, Ordering::SeqCst) {
                    machine.hold(D0, raw);
                    machine.queue_kernel(D0, raw, reads.clone(), vec![]).unwrap();
                }
            })));
            let refused = fork.grow_to(2 * G);
            rig.faults.watch(None);
            assert!(launched.load(Ordering::SeqCst));
            assert!(matches!(refused, Err(BlockError::SharedInUse { others: 1, .. })), "{refused:?}");
            assert_eq!((fork.size(), books(rig, &pool).shared), (G, 2 * G));
            rig.machine.release_stream(D0, stream.as_raw());
            fork.grow_to(2 * G).unwrap();
            shows(rig, &fork, 0, 7);
            shows(rig, &root, 0, 7);
            drop((root, fork));
            pool.trim(0).unwrap();
            balanced(rig, &pool);
        }
    }

    fn several_blocks_of_one_stream_are_unshared_in_one_attempt(rig) {
        let (pool, tenant, stream) = common::scene(rig, 16);
        let roots = [7, 8].map(|byte| {
            let root = allocate(&tenant, &stream, "kv", 2 * G);
            root.write(0, &[byte; 32]).unwrap();
            root
        });
        let [mut one, mut two] = roots.each_ref().map(|root| {
            let mut fork = root.fork(2 * G, 2 * G).unwrap();
            fork.shrink_to(G).unwrap();
            fork
        });
        // The copy for the first block runs until its event is queried.
        let (raw, machine) = (stream.as_raw(), Arc::clone(&rig.machine));
        rig.faults.watch(Some(Arc::new(move |call| match call {
            Call::MemcpyDtoDAsync => machine.hold(D0, raw),
            Call::EventQuery => machine.release_stream(D0, raw),
            _ => {}
        })));
        tenant.try_grow_all(&mut [(&mut one, 2 * G), (&mut two, 2 * G)]).unwrap();
        rig.faults.watch(None);
        rig.machine.release_stream(D0, raw);
        for (fork, byte) in [(&one, 7), (&two, 8)] {
            assert_eq!(fork.read_only(), 0);
            shows(rig, fork, 0, byte);
        }
        books(rig, &pool);
    }

    fn what_is_copied_from_one_that_is_gone_stays_until_it_has_been(rig) {
        let (pool, tenant) = common::tenancy(rig, 16);
        let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let root = allocate(&tenant, &home, "kv", 2 * G);
        root.write(0, &[7; 32]).unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        root.record_use(&other).unwrap();
        busy(rig, &other, &root, 8);
        drop(root);
        // The copy waits in its stream, and the work that kept the root's memory is complete.
        rig.machine.hold(D0, home.as_raw());
        fork.try_grow_to(2 * G).unwrap();
        rig.machine.release_stream(D0, other.as_raw());
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).pending_free, 2 * G);
        rig.machine.release_stream(D0, home.as_raw());
        rig.device.synchronize().unwrap();
        shows(rig, &fork, 0, 8);
        pool.trim(0).unwrap();
        assert_eq!(books(rig, &pool).committed, 2 * G);
    }

    fn what_nobody_uses_any_more_is_told_of_as_limbo(rig) {
        let pool = pool(rig, 4);
        let [tenant, other] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let root = allocate(&tenant, &stream, "kv", 4 * G);
        let fork = root.fork(4 * G, 4 * G).unwrap();
        busy(rig, &stream, &root, 1);
        drop((root, fork));
        assert_eq!(books(rig, &pool).pending_free, 4 * G);
        let refused = other.block(G).try_allocate();
        let Err(BlockError::OutOfMemory(shortage)) = refused else { panic!("{refused:?}") };
        assert_eq!((shortage.pending_free, shortage.available), (4 * G, 0));
        // During the capture the fence cannot be polled.
        let guard = pool.capture_guard();
        let refused = other.block(G).try_allocate();
        assert!(matches!(refused, Err(BlockError::Capturing(_))), "{refused:?}");
        drop(guard);
        rig.machine.release_stream(D0, stream.as_raw());
        drop(other.block(G).try_allocate().unwrap());
    }
}

#[test]
fn before_cuda_12_5_a_block_without_a_home_stream_waits_for_the_device() {
    let rig = rig(ModelDriver::new(
        model_options().version(CudaVersion::new(12, 4)),
    ));
    let (pool, tenant) = common::tenancy(&rig, 16);
    let builder = tenant.block(2 * G).capacity(8 * G).largest_extent(2 * G);
    let root = builder.timeout(Duration::from_secs(60)).allocate().unwrap();
    let mut fork = root.fork(2 * G, 2 * G).unwrap();
    fork.shrink_to(G).unwrap();
    let refused = fork.try_grow_to(2 * G);
    assert!(
        matches!(refused, Err(BlockError::SharedInUse { .. })),
        "{refused:?}"
    );
    let stream = Stream::new(&rig.device).unwrap();
    rig.machine.hold_until_awaited(D0, stream.as_raw());
    rig.kernel(&stream, &[(fork.address(), G)], &[]);
    fork.grow_to(2 * G).unwrap();
    assert_eq!((fork.size(), fork.read_only()), (2 * G, 0));
    books(&rig, &pool);
}

#[test]
fn a_kernel_launched_while_the_device_is_waited_for_keeps_what_it_reads() {
    for nth in 1..=4 {
        let rig = rig(ModelDriver::new(
            model_options().version(CudaVersion::new(12, 4)),
        ));
        let (_pool, tenant, stream) = common::scene(&rig, 16);
        let builder = tenant.block(2 * G).capacity(8 * G).largest_extent(2 * G);
        let builder = builder.timeout(Duration::from_secs(60));
        let root = builder.home_stream(&stream).allocate().unwrap();
        let mut fork = root.fork(2 * G, 2 * G).unwrap();
        fork.shrink_to(G).unwrap();
        // Only a synchronization shows that the work of unknown streams is complete.
        fork.record_use_anywhere();
        let (machine, at, address) = (Arc::clone(&rig.machine), stream.clone(), fork.address());
        let (waits, later) = (AtomicU64::new(0), AtomicU64::new(0));
        rig.faults.watch(Some(Arc::new(move |call| {
            if call == Call::CtxSynchronize {
                waits.fetch_add(1, Ordering::SeqCst);
            } else if waits.load(Ordering::SeqCst) >= nth {
                match later.fetch_add(1, Ordering::SeqCst) {
                    0 => {
                        machine.hold(D0, at.as_raw());
                        let reads = vec![(address, G)];
                        machine
                            .queue_kernel(D0, at.as_raw(), reads, vec![])
                            .unwrap();
                    }
                    60 => machine.release_stream(D0, at.as_raw()),
                    _ => {}
                }
            }
        })));
        fork.grow_to(2 * G).unwrap();
        rig.faults.watch(None);
        rig.machine.release_all_streams(D0);
    }
}
