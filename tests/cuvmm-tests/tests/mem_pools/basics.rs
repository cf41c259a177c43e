//! Memory pools of the driver: figures, maxima, the current pool, and memory in stream order.
//!
//! `unsafe` is used for the driver's own copies and for what other libraries would allocate.
#![allow(unsafe_code, clippy::unit_arg)]

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::common;
use crate::common::sweep::{sweep, text};
use crate::common::{D0, D1, Rig};
use crate::on_both;
use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::model::{Backing, ModelDriver};
use cuvmm::driver::{
    CUresult, Call, CaptureMode, CudaVersion, DeviceAddress, DeviceAttribute, Driver, HandleTypes,
    Location,
};
use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::own::{CloseRefusal, PoolReuse};
use cuvmm::{Access, AccessGrant, CallError, Device, MemPool, Place, PoolAllocation, Stream};

/// The size in which a pool obtains memory.
const STEP: u64 = 32 << 20;

fn keeping(rig: &Rig<impl Backing>, steps: u64) -> MemPool {
    let pool = MemPool::builder(&rig.device).maximum(steps * STEP);
    let pool = pool.create().unwrap();
    pool.set_release_threshold(u64::MAX).unwrap();
    pool
}

/// Returns used and reserved bytes and their peaks, in steps.
fn figures(pool: &MemPool) -> [u64; 4] {
    let stats = pool.stats().unwrap();
    [
        stats.used,
        stats.reserved,
        stats.used_peak,
        stats.reserved_peak,
    ]
    .map(|bytes| bytes / STEP)
}

fn fill(rig: &Rig<impl Backing>, stream: &Stream, memory: &PoolAllocation, byte: u8) {
    let (at, size) = (memory.address(), memory.size());
    // SAFETY: the memory is alive, and freed behind the work of the stream.
    unsafe { rig.machine.fill_async(D0, at, byte, size, stream.as_raw()) }.unwrap();
}

fn first(rig: &Rig<impl Backing>, memory: &PoolAllocation) -> u8 {
    let mut byte = [0];
    rig.machine.peek(D0, memory.address(), &mut byte).unwrap();
    byte[0]
}

/// Allocates as another library would, and frees at once.
fn another_library(rig: &Rig<impl Backing>, stream: &Stream, size: u64) -> Result<(), CUresult> {
    // SAFETY: the stream is alive, and nothing uses the memory.
    unsafe {
        let made = rig.machine.alloc_async(D0, size, stream.as_raw());
        let at = made.map_err(|error| error.code().unwrap())?;
        rig.machine.free_async(D0, at, stream.as_raw()).unwrap();
    }
    Ok(())
}

on_both! {
    fn memory_is_used_freed_and_used_again(rig) {
        let pool = keeping(rig, 4);
        let stream = Stream::new(&rig.device).unwrap();
        let memory = pool.allocate_on(&stream, 2 * STEP).unwrap();
        assert_eq!((memory.size(), memory.pool().as_raw()), (2 * STEP, pool.as_raw()));
        assert!(*memory.stream() == stream);
        fill(rig, &stream, &memory, 7);
        rig.shows(first(rig, &memory), 7);
        assert_eq!(figures(&pool), [2, 2, 2, 2]);
        drop(memory);
        assert_eq!(figures(&pool), [0, 2, 2, 2]);
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(figures(&pool), [1, 2, 2, 2], "the threshold keeps it");
        pool.reset_peaks().unwrap();
        pool.trim_to(0).unwrap();
        assert_eq!(figures(&pool), [1, 1, 1, 2]);
        memory.close().unwrap();
        stream.synchronize().unwrap();
        assert_eq!(rig.device.drop_failures(), 0);
    }

    fn the_maximum_is_the_maximum(rig) {
        let pool = keeping(rig, 4);
        assert_eq!(pool.maximum(), Some(4 * STEP));
        let stream = Stream::new(&rig.device).unwrap();
        let held = pool.allocate_on(&stream, 3 * STEP).unwrap();
        let error = pool.allocate_on(&stream, 2 * STEP).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(matches!(error, MemoryError::Create { size, .. } if size == 2 * STEP));
        assert_eq!(figures(&pool), [3, 3, 3, 3]);
        drop(held);
        drop(pool.allocate_on(&stream, 4 * STEP).unwrap());
    }

    fn arguments_that_cannot_be_reach_no_driver(rig) {
        let pool = keeping(rig, 4);
        let second = rig.second();
        let foreign = Stream::new(&second).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        rig.faults.forget();
        assert!(matches!(
            pool.allocate_on(&stream, 0),
            Err(MemoryError::Argument(ArgumentError::Zero { .. }))
        ));
        assert!(matches!(
            pool.allocate_on(&foreign, STEP),
            Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        assert!(matches!(
            pool.set_access(&[]),
            Err(MemoryError::Argument(ArgumentError::Zero { .. }))
        ));
        assert!(matches!(
            pool.set_access(&[AccessGrant::new(&rig.device, Access::Read)]),
            Err(MemoryError::Access { .. })
        ));
        assert!(matches!(
            MemPool::builder(&rig.device).on_host_numa(-1).create(),
            Err(MemoryError::Argument(ArgumentError::NoSuch { .. }))
        ));
        assert!(matches!(
            MemPool::builder(&rig.device).shareable(HandleTypes::WIN32).create(),
            Err(MemoryError::Argument(ArgumentError::HandleType { .. }))
        ));
        let other = common::model();
        let stranger = Stream::new(&other.device).unwrap();
        let strange = AccessGrant::new(&other.device, Access::Read);
        assert!(matches!(
            pool.set_access(&[strange]),
            Err(MemoryError::Argument(ArgumentError::WrongDriver { .. }))
        ));
        assert!(pool.access_of(&other.device).is_err());
        assert!(pool.allocate_on(&stranger, STEP).is_err());
        assert_eq!(rig.faults.calls(), vec![], "no driver call");
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        assert_eq!(memory.record_use(&stranger), Err(CallError::WrongDriver));
    }

    fn a_free_waits_for_every_stream_that_was_named(rig) {
        let pool = keeping(rig, 1);
        let (stream, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        rig.machine.hold(D0, stream.as_raw());
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        fill(rig, &stream, &memory, 1);
        memory.record_use(&stream).unwrap();
        memory.record_use(&other).unwrap();
        rig.faults.forget();
        memory.record_use(&other).unwrap();
        assert_eq!(rig.faults.calls(), vec![], "known");
        fill(rig, &other, &memory, 2);
        assert!(!other.is_done().unwrap(), "behind the allocating stream");
        rig.machine.hold(D0, other.as_raw());
        rig.machine.release_stream(D0, stream.as_raw());
        drop(memory);
        assert!(!stream.is_done().unwrap(), "the free waits for the other stream");
        assert_eq!(rig.machine.live().allocations, 1);
        // The next memory of the stream is the same, behind all of that.
        let next = pool.allocate_on(&stream, STEP).unwrap();
        fill(rig, &stream, &next, 3);
        rig.machine.release_stream(D0, other.as_raw());
        stream.synchronize().unwrap();
        rig.shows(first(rig, &next), 3);
        assert_eq!(figures(&pool), [1; 4]);
    }

    fn a_refused_close_keeps_every_stream_that_was_named(rig) {
        for captures in [false, true] {
            let pool = keeping(rig, 1);
            let [stream, one, two] = [(); 3].map(|()| Stream::new(&rig.device).unwrap());
            let memory = pool.allocate_on(&stream, STEP).unwrap();
            memory.record_use(&one).unwrap();
            memory.record_use(&two).unwrap();
            // SAFETY: the stream is alive, and the graph is destroyed.
            let begin = || unsafe { rig.machine.capture_begin(D0, one.as_raw(), CaptureMode::RELAXED) };
            match captures {
                true => begin().unwrap(),
                false => rig.faults.arm(Fault::from(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemFreeAsync)),
            }
            let refused = memory.close().unwrap_err();
            rig.faults.disarm();
            if captures {
                // SAFETY: the capture was begun above, and the graph is destroyed at once.
                unsafe {
                    let graph = rig.machine.capture_end(D0, one.as_raw()).unwrap();
                    rig.machine.graph_destroy(D0, graph).unwrap();
                }
            }
            for (other, byte) in [(&one, 1), (&two, 2)] {
                rig.machine.hold(D0, other.as_raw());
                fill(rig, other, &refused.owner, byte);
            }
            refused.owner.close().unwrap();
            // The next memory of the stream is the same, behind the work of both.
            let next = pool.allocate_on(&stream, STEP).unwrap();
            fill(rig, &stream, &next, 3);
            for other in [&one, &two] {
                assert!(!stream.is_done().unwrap(), "the free waits for both");
                rig.machine.release_stream(D0, other.as_raw());
            }
            stream.synchronize().unwrap();
            rig.shows(first(rig, &next), 3);
        }
    }

    fn the_guard_puts_the_old_pool_back(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let default = MemPool::default_of(&rig.device).unwrap();
        assert!(default.is_current().unwrap());
        let (one, two) = (keeping(rig, 1), keeping(rig, 2));
        {
            let guard = one.make_current().unwrap();
            assert!(one.is_current().unwrap());
            assert_eq!(guard.pool().as_raw(), one.as_raw());
            assert_eq!(another_library(rig, &stream, STEP), Ok(()));
            let more = another_library(rig, &stream, 2 * STEP);
            assert_eq!(more, Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY), "its maximum");
            assert!(matches!(two.make_current(), Err(MemoryError::CurrentPool { .. })));
            let inner = guard.replace(&two).unwrap();
            assert_eq!(another_library(rig, &stream, 2 * STEP), Ok(()));
            inner.close().unwrap();
            assert!(one.is_current().unwrap());
            let foreign = MemPool::new(&rig.second()).unwrap();
            assert!(matches!(
                guard.replace(&foreign),
                Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))
            ));
        }
        assert!(default.is_current().unwrap());
        // A pool that was made current by another library in between stays the current one.
        let guard = one.make_current().unwrap();
        // SAFETY: the pool is alive, and the default pool is set again below.
        unsafe { rig.machine.set_current_mem_pool(D0, two.as_raw()).unwrap() };
        drop(guard);
        assert!(two.is_current().unwrap());
        two.close().unwrap();
        assert!(default.is_current().unwrap(), "the end of the current pool");
        stream.synchronize().unwrap();
        default.close().unwrap();
        assert!(MemPool::default_of(&rig.device).unwrap().is_current().unwrap());
    }

    fn pools_of_host_memory_cannot_be_current(rig) {
        let pool = MemPool::builder(&rig.device).on_host().create().unwrap();
        assert_eq!(pool.location(), Location::HOST);
        assert!(matches!(pool.make_current(), Err(MemoryError::Elsewhere { .. })));
        let node = MemPool::builder(&rig.device).on_host_numa(1).create().unwrap();
        assert_eq!(node.access_of(Place::HostNuma(1)).unwrap(), Access::ReadWrite);
        assert_eq!(node.access_of(&rig.device).unwrap(), Access::None);
        let grant = AccessGrant::new(&rig.device, Access::ReadWrite);
        node.set_access(&[grant]).unwrap();
        assert_eq!(node.access_of(&rig.device).unwrap(), Access::ReadWrite);
        let stream = Stream::new(&rig.device).unwrap();
        let memory = node.allocate_on(&stream, 5).unwrap();
        fill(rig, &stream, &memory, 3);
        stream.synchronize().unwrap();
    }

    fn a_peer_needs_access(rig) {
        let pool = keeping(rig, 1);
        let peer = rig.second();
        let stream = Stream::new(&rig.device).unwrap();
        let theirs = Stream::new(&peer).unwrap();
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        let at = memory.address();
        // SAFETY: the memory is alive; without access the driver refuses.
        let fill = || unsafe { rig.machine.fill_async(D1, at, 9, STEP, theirs.as_raw()) };
        assert!(fill().is_err());
        assert_eq!(pool.access_of(&peer).unwrap(), Access::None);
        pool.set_access(&[AccessGrant::new(&peer, Access::ReadWrite)]).unwrap();
        assert_eq!(pool.access_of(&peer).unwrap(), Access::ReadWrite);
        memory.record_use(&theirs).unwrap();
        rig.machine.hold(D1, theirs.as_raw());
        fill().unwrap();
        drop(memory);
        assert!(!stream.is_done().unwrap(), "the free waits for the peer");
        rig.machine.release_stream(D1, theirs.as_raw());
        stream.synchronize().unwrap();
    }

    fn settings_are_kept(rig) {
        let pool = MemPool::builder(&rig.device).shareable(HandleTypes::POSIX_FD).create().unwrap();
        assert_eq!((pool.shareable(), pool.maximum()), (HandleTypes::POSIX_FD, None));
        assert_eq!(pool.release_threshold().unwrap(), 0);
        pool.set_release_threshold(STEP).unwrap();
        assert_eq!(pool.release_threshold().unwrap(), STEP);
        let all = PoolReuse { follow_events: true, opportunistic: true, internal_dependencies: true };
        assert_eq!(pool.reuse().unwrap(), all);
        let some = PoolReuse { opportunistic: false, ..all };
        pool.set_reuse(some).unwrap();
        assert_eq!(pool.reuse().unwrap(), some);
    }

    fn a_pool_in_use_cannot_be_closed(rig) {
        let pool = keeping(rig, 2);
        let stream = Stream::new(&rig.device).unwrap();
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        let refused = pool.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::InUse);
        let guard = refused.owner.make_current().unwrap();
        drop(memory);
        let refused = refused.owner.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::InUse);
        drop(guard);
        refused.owner.close().unwrap();
        assert_eq!((rig.machine.live().mem_pools, rig.device.kept_memory_pools()), (1, 1));
        stream.synchronize().unwrap();
    }

    // I-67
    fn a_pool_that_was_current_is_never_destroyed_and_serves_again(rig) {
        let destroyed = || rig.device.calls().count(Call::MemPoolDestroy);
        let stream = Stream::new(&rig.device).unwrap();
        let pool = MemPool::builder(&rig.device).maximum(2 * STEP).create().unwrap();
        pool.set_release_threshold(u64::MAX).unwrap();
        let handle = pool.as_raw();
        let guard = pool.make_current().unwrap();
        // What another library has allocated outlives the pool's owner.
        // SAFETY: the stream is alive, and the memory is freed below.
        let at = unsafe { rig.machine.alloc_async(D0, STEP, stream.as_raw()).unwrap() };
        drop(guard);
        drop(pool);
        assert_eq!((destroyed(), rig.device.kept_memory_pools()), (0, 1));
        let other = MemPool::builder(&rig.device).maximum(2 * STEP).create().unwrap();
        assert_ne!(other.as_raw(), handle, "it is not empty");
        drop(other);
        assert_eq!((destroyed(), rig.device.kept_memory_pools()), (1, 1));
        // SAFETY: it was allocated above.
        unsafe { rig.machine.free_async(D0, at, stream.as_raw()).unwrap() };
        stream.synchronize().unwrap();
        let larger = MemPool::builder(&rig.device).maximum(3 * STEP).create().unwrap();
        let again = MemPool::builder(&rig.device).maximum(2 * STEP).create().unwrap();
        assert_eq!((again.as_raw(), rig.device.kept_memory_pools()), (handle, 0));
        assert_eq!(again.release_threshold().unwrap(), 0);
        assert_eq!(again.stats().unwrap(), larger.stats().unwrap(), "as a new one");
        // One whose settings were changed is not used again.
        let all = again.reuse().unwrap();
        again.set_reuse(PoolReuse { opportunistic: false, ..all }).unwrap();
        again.close().unwrap();
        let next = MemPool::builder(&rig.device).maximum(2 * STEP).create().unwrap();
        assert_ne!(next.as_raw(), handle);
        assert_eq!(rig.device.kept_memory_pools(), 1);
    }

    fn a_pool_that_serves_again_has_no_access_of_others(rig) {
        let peer = rig.second();
        let create = || MemPool::builder(&rig.device).maximum(2 * STEP).create().unwrap();
        let end = |pool: MemPool| {
            pool.set_access(&[AccessGrant::new(&peer, Access::ReadWrite)]).unwrap();
            drop(pool.make_current().unwrap());
            drop(pool);
        };
        let pool = create();
        let handle = pool.as_raw();
        end(pool);
        assert_eq!(rig.device.kept_memory_pools(), 1);
        let again = create();
        assert_eq!((again.as_raw(), rig.device.kept_memory_pools()), (handle, 0));
        assert_eq!(again.access_of(&peer).unwrap(), Access::None);
        end(again);
        // One whose access the driver does not take back serves no more.
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::nth(1, code).of(Call::MemPoolSetAccess));
        let new = create();
        rig.faults.disarm();
        assert_ne!(new.as_raw(), handle);
        assert_eq!(new.access_of(&peer).unwrap(), Access::None);
        drop(new);
        assert_ne!(create().as_raw(), handle);
        assert_eq!(rig.device.kept_memory_pools(), 1);
    }

    fn a_capture_is_left_alone(rig) {
        let pool = keeping(rig, 2);
        let (stream, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let memory = pool.allocate_on(&stream, STEP).unwrap();
        let (raw, mode) = (stream.as_raw(), CaptureMode::RELAXED);
        // SAFETY: the stream is alive.
        unsafe { rig.machine.capture_begin(D0, raw, mode).unwrap() };
        assert!(matches!(pool.allocate_on(&stream, STEP), Err(MemoryError::Capturing)));
        assert_eq!(memory.record_use(&other), Err(CallError::InUse));
        let refused = memory.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::Call(CallError::InUse));
        // SAFETY: the stream is alive, and so is the graph until it is destroyed.
        unsafe {
            let graph = rig.machine.capture_end(D0, raw).unwrap();
            rig.machine.graph_destroy(D0, graph).unwrap();
        }
        refused.owner.close().unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn every_call_fails_once() {
    let calls = sweep(
        |_| Vec::<MemPool>::new(),
        |rig, made| {
            let pool = MemPool::builder(&rig.device).maximum(4 * STEP);
            Ok(made.push(text(pool.create())?))
        },
        |_| (),
    );
    assert_eq!(calls, 3);
    type World = (MemPool, Stream, Stream, Vec<PoolAllocation>);
    let world = |rig: &Rig<_>| -> World {
        let stream = || Stream::new(&rig.device).unwrap();
        (keeping(rig, 4), stream(), stream(), Vec::new())
    };
    let used = |world: &World| figures(&world.0)[0];
    let calls = sweep(
        world,
        |_, world| Ok(world.3.push(text(world.0.allocate_on(&world.1, STEP))?)),
        used,
    );
    assert_eq!(calls, 2);
    let allocated = |rig: &Rig<_>| {
        let mut world = world(rig);
        world.3.push(world.0.allocate_on(&world.1, STEP).unwrap());
        world
    };
    let calls = sweep(
        allocated,
        |_, world| text(world.3[0].record_use(&world.2)),
        used,
    );
    assert_eq!(calls, 9);
    let calls = sweep(
        |rig| {
            let world = allocated(rig);
            world.3[0].record_use(&world.2).unwrap();
            world
        },
        |_, world| {
            let memory = world.3.pop().unwrap();
            memory.close().map_err(|refused| {
                let reason = refused.reason.to_string();
                world.3.push(refused.owner);
                reason
            })
        },
        used,
    );
    assert_eq!(calls, 10);
    let calls = sweep(
        |rig| (keeping(rig, 4), Vec::new()),
        |_, (pool, guards)| Ok(guards.push(text(pool.make_current())?)),
        |(pool, _)| pool.is_current().unwrap(),
    );
    assert_eq!(calls, 3);
    let none = PoolReuse {
        follow_events: false,
        opportunistic: false,
        internal_dependencies: false,
    };
    let calls = sweep(
        |rig| keeping(rig, 4),
        |_, pool| text(pool.set_reuse(none)),
        |pool| pool.reuse().unwrap(),
    );
    assert_eq!(calls, 6);
}

#[test]
fn drops_that_fail_are_counted() {
    let rig = common::model();
    let pool = keeping(&rig, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let memory = pool.allocate_on(&stream, STEP).unwrap();
    let all = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
    rig.faults
        .arm(all.of(Call::MemFreeAsync).of(Call::MemPoolDestroy));
    drop(memory);
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (1, STEP));
    let guard = pool.make_current().unwrap();
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::DeviceSetMemPool));
    drop(guard);
    drop(pool);
    rig.faults.disarm();
    assert!(rig.device.drop_failures() >= 2);
    assert_eq!(rig.machine.live().allocations, 1);
}

/// A pool whose guard could not set the default pool again is still current when it ends. Another
/// thread makes a pool current between the calls of that end.
#[test]
fn the_end_of_a_pool_does_not_replace_what_another_thread_made_current() {
    let rig = common::host();
    let [ending, next] = [(); 2].map(|()| MemPool::new(&rig.device).unwrap());
    let guard = ending.make_current().unwrap();
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults
        .arm(Fault::nth(1, code).of(Call::DeviceSetMemPool));
    drop(guard);
    rig.faults.disarm();
    assert!(ending.is_current().unwrap());
    let (begin, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel();
    let (begin, ended) = (Mutex::new(Some(begin)), Mutex::new(ended));
    rig.faults.watch(Some(Arc::new(move |call| {
        let first = match call {
            Call::DeviceGetDefaultMemPool => begin.lock().unwrap().take(),
            _ => None,
        };
        if let Some(begin) = first {
            begin.send(()).unwrap();
            // A thread that does not wait is done within this time.
            let _ = ended
                .lock()
                .unwrap()
                .recv_timeout(Duration::from_millis(50));
        }
    })));
    let (machine, other) = (&rig.machine, &next);
    let guard = thread::scope(|scope| {
        let sets = scope.spawn(move || {
            begun.recv().unwrap();
            let default = machine.default_mem_pool(D0).unwrap();
            // As another library does.
            // SAFETY: a default pool is never destroyed.
            unsafe { machine.set_current_mem_pool(D0, default).unwrap() };
            let guard = other.make_current().unwrap();
            end.send(()).unwrap();
            guard
        });
        drop(ending);
        sets.join().unwrap()
    });
    rig.faults.watch(None);
    assert!(next.is_current().unwrap());
    drop(guard);
    assert!(
        MemPool::default_of(&rig.device)
            .unwrap()
            .is_current()
            .unwrap()
    );
}

#[test]
fn a_pool_ends_after_its_memory() {
    let rig = common::clean(common::model());
    let pool = keeping(&rig, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let memory = pool.allocate_on(&stream, STEP).unwrap();
    drop(pool);
    rig.faults.forget();
    drop(memory);
    let calls = rig.faults.calls();
    let at = |call| calls.iter().position(|made| *made == call).unwrap();
    assert!(
        at(Call::MemFreeAsync) < at(Call::MemPoolDestroy),
        "{calls:?}"
    );
}

#[test]
fn a_lost_context_is_silent() {
    let rig = common::model();
    let pool = keeping(&rig, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let memory = pool.allocate_on(&stream, STEP).unwrap();
    let guard = pool.make_current().unwrap();
    rig.machine
        .lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(stream.synchronize().is_err());
    drop(memory);
    drop(guard);
    assert!(matches!(pool.stats(), Err(CallError::ContextLost(_))));
    drop(pool);
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (0, 0));
}

/// Opens a device of a model with these options.
fn device_of(options: cuvmm::driver::model::ModelOptions) -> Device {
    let driver = FaultDriver::new(Arc::new(ModelDriver::new(options)));
    Device::open(Arc::new(driver), 0).unwrap()
}

#[test]
fn what_a_driver_lacks_is_named() {
    let of =
        |major, minor| device_of(common::model_options().version(CudaVersion::new(major, minor)));
    let old = of(11, 1);
    let error = MemPool::new(&old).unwrap_err();
    assert!(
        error.to_string().contains("introduced in CUDA 11.2"),
        "{error}"
    );
    let error = MemPool::default_of(&old).unwrap_err();
    assert!(
        error.to_string().contains("introduced in CUDA 11.2"),
        "{error}"
    );
    let middle = of(12, 1);
    drop(MemPool::new(&middle).unwrap());
    let error = MemPool::builder(&middle)
        .maximum(STEP)
        .create()
        .unwrap_err();
    assert!(matches!(error, MemoryError::NotSupported { .. }));
    assert!(error.to_string().contains("CUDA 12.2"), "{error}");
    let without = common::model_options().attribute(DeviceAttribute::MEMORY_POOLS, 0);
    let error = MemPool::new(&device_of(without)).unwrap_err();
    assert!(matches!(error, MemoryError::NotSupported { .. }), "{error}");
}

#[test]
fn addresses_are_those_of_the_driver() {
    let rig = common::model();
    let pool = keeping(&rig, 2);
    let stream = Stream::new(&rig.device).unwrap();
    let memory = pool.allocate_on(&stream, 100).unwrap();
    assert_ne!(memory.address(), DeviceAddress::NULL);
    assert!(format!("{memory:?} {pool:?}").contains("MemPool"));
}
