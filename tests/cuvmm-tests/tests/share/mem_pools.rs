//! Allocations of memory pools given to other processes: what arrives, in which order it is freed,
//! and the errors.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::common;
use crate::common::{Clean, D0, G, MIB};
use crate::share_support;
use crate::share_support::{alone, ended, fork, leaves_nothing_open, open_files};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{CUresult, Call, DeviceAddress, Driver, HandleTypes, Location};
use cuvmm::error::{ArgumentError, ChannelError, DescriptionError, MemoryError, ShareError};
use cuvmm::own::{CloseRefusal, ImportedAllocation, ImportedPool};
use cuvmm::share::{AllocationDescription, AllocationOffer, AllocationParcel, PoolImporter};
use cuvmm::{
    Access, Attachment, CallError, Channel, Device, DropFailure, MemPool, Offer, Physical,
    PoolAllocation, Stream,
};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// A process with a shareable pool, and another one. Each has a driver of its own.
struct Two {
    taker: Clean<HostMemory>,
    giver: Clean<HostMemory>,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Two {
    fn new() -> Self {
        Self {
            taker: common::clean(common::host()),
            giver: common::clean(common::host()),
            _alone: None,
        }
    }

    /// Two processes beside no other test.
    fn alone() -> Self {
        let _alone = Some(alone());
        Self {
            _alone,
            ..Self::new()
        }
    }

    fn pool(&self) -> MemPool {
        let pool = MemPool::builder(&self.giver.device).shareable(FD);
        pool.create().unwrap()
    }

    fn stream(&self) -> Stream {
        Stream::new(&self.giver.device).unwrap()
    }

    fn importer(&self) -> PoolImporter {
        importer(&self.taker.device)
    }
}

fn importer(device: &Device) -> PoolImporter {
    PoolImporter::new(device, &Stream::new(device).unwrap()).unwrap()
}

type Taken = Result<Vec<ImportedAllocation>, ShareError>;

/// Sends on one thread and receives on another.
fn exchange(offer: &AllocationOffer, importer: &PoolImporter) -> (Result<(), ShareError>, Taken) {
    let (mut one, mut other) = Channel::pair().unwrap();
    thread::scope(|scope| {
        let given = scope.spawn(|| one.send_allocations(offer));
        let taken = other.recv_allocations(importer);
        (given.join().unwrap(), taken)
    })
}

fn give(offer: &AllocationOffer, importer: &PoolImporter) -> Vec<ImportedAllocation> {
    let (given, taken) = exchange(offer, importer);
    given.unwrap();
    taken.unwrap()
}

/// Gives one allocation.
fn give_one(memory: &PoolAllocation, importer: &PoolImporter) -> ImportedAllocation {
    give(&AllocationOffer::new(memory).unwrap(), importer).remove(0)
}

fn read(memory: &ImportedAllocation, offset: u64) -> u8 {
    let mut byte = [0];
    memory.read(memory.stream(), offset, &mut byte).unwrap();
    byte[0]
}

#[test]
fn bytes_arrive_and_go_back() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let memory = pool.allocate_on(&stream, 3 * MIB).unwrap();
        memory.write(&stream, 2 * MIB, &[7; 16]).unwrap();
        let importer = two.importer().read_write();
        let offer = AllocationOffer::new(&memory).unwrap().read_write();
        let taken = give(&offer, &importer).remove(0);
        assert_eq!((taken.size(), taken.access()), (3 * MIB, Access::ReadWrite));
        assert_eq!(read(&taken, 2 * MIB), 7);
        taken.write(taken.stream(), 5, b"answer").unwrap();
        let mut answer = [0; 6];
        memory.read(&stream, 5, &mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        assert!(memory.is_held() && offer.is_held());
        drop((taken, importer));
        assert!(!memory.is_held());
        offer.wait_until_returned(Duration::ZERO).unwrap();
        drop(offer);
        memory.close().unwrap();
        pool.close().unwrap();
    });
}

// I-64
/// The taker frees first, also if the giver drops first.
#[test]
fn the_giver_frees_after_the_taker() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        let importer = two.importer();
        let taken = give_one(&memory, &importer);
        let used = pool.stats().unwrap().used;
        assert!(used > 0);
        let kept = memory.close().unwrap_err();
        assert_eq!(kept.reason, CloseRefusal::InUse);
        drop(kept);
        assert_eq!(pool.held_elsewhere(), MIB);
        // Another allocation does not free it either.
        drop(pool.allocate_on(&stream, MIB).unwrap());
        assert_eq!(pool.stats().unwrap().used, used);
        taken.close().unwrap();
        assert_eq!(pool.stats().unwrap().used, used);
        drop(pool.allocate_on(&stream, MIB).unwrap());
        stream.synchronize().unwrap();
        assert_eq!(pool.stats().unwrap().used, 0);
        assert_eq!(pool.held_elsewhere(), 0);
    });
}

/// Before an allocation fails, everything that was returned is freed.
#[test]
fn returned_memory_is_found_when_it_is_needed() {
    let two = Two::alone();
    let pool = MemPool::builder(&two.giver.device).shareable(FD);
    let pool = pool.maximum(16 * 32 * MIB).create().unwrap();
    let stream = two.stream();
    let importer = two.importer();
    let mut taken: Vec<_> = (0..16)
        .map(|_| give_one(&pool.allocate_on(&stream, 32 * MIB).unwrap(), &importer))
        .collect();
    let error = pool.allocate_on(&stream, 32 * MIB).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(taken.swap_remove(9));
    drop(pool.allocate_on(&stream, 32 * MIB).unwrap());
    assert_eq!(pool.held_elsewhere(), 15 * 32 * MIB);
    // Without need a few are looked at each time, and in the end all.
    taken.clear();
    for _ in 0..4 {
        drop(pool.allocate_on(&stream, 1).unwrap());
    }
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
}

#[test]
fn a_pool_whose_memory_is_held_is_not_closed() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let taken = give_one(&memory, &importer);
    drop(memory);
    let refused = pool.close().unwrap_err();
    assert_eq!(refused.reason, CloseRefusal::InUse);
    drop(taken);
    refused.owner.close().unwrap();
}

/// Memory that is still held when the pool ends stays allocated, and the taker goes on.
#[test]
fn memory_that_outlives_its_pool_is_counted() {
    let two = Two::alone();
    two.giver.leaves();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    memory.write(&stream, 0, &[9]).unwrap();
    let taken = give_one(&memory, &importer);
    drop((memory, pool));
    let device = &two.giver.device;
    assert_eq!((device.drop_failures(), device.leaked()), (1, MIB));
    assert_eq!(read(&taken, 0), 9);
}

/// A kernel of the taker runs: its free waits for it, and the giver's for that.
#[test]
fn the_takers_work_is_waited_for() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let taken = give_one(&memory, &importer);
    let other = Stream::new(&two.taker.device).unwrap();
    taken.record_use(&other).unwrap();
    let machine = &two.taker.machine;
    machine.hold_until_awaited(D0, other.as_raw());
    let writes = vec![(taken.address(), 64, 5)];
    let queued = machine.queue_kernel(D0, other.as_raw(), vec![], writes);
    queued.unwrap();
    drop(memory);
    assert_eq!(pool.held_elsewhere(), MIB);
    drop(taken);
    assert!(other.is_done().unwrap(), "the drop has waited");
    assert_eq!(pool.held_elsewhere(), 0);
}

/// A refused close forgets no stream: the next one waits for later work of all of them.
#[test]
fn what_the_taker_could_not_close_keeps_its_streams() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let taken = give_one(&memory, &importer);
    let others = [(); 2].map(|()| Stream::new(&two.taker.device).unwrap());
    for other in &others {
        taken.record_use(other).unwrap();
    }
    two.taker
        .faults
        .arm(Fault::from(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemFreeAsync));
    let refused = taken.close().unwrap_err();
    two.taker.faults.disarm();
    let machine = &two.taker.machine;
    for other in &others {
        machine.hold_until_awaited(D0, other.as_raw());
        let writes = vec![(refused.owner.address(), 64, 5)];
        let queued = machine.queue_kernel(D0, other.as_raw(), vec![], writes);
        queued.unwrap();
    }
    drop(memory);
    refused.owner.close().unwrap();
    for other in &others {
        assert!(other.is_done().unwrap(), "it was waited for");
    }
    assert_eq!(pool.held_elsewhere(), 0);
}

/// The giver's work is complete when the memory arrives.
#[test]
fn the_givers_work_is_waited_for() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let machine = &two.giver.machine;
    machine.hold_until_awaited(D0, stream.as_raw());
    let writes = vec![(memory.address(), 64, 5)];
    let queued = machine.queue_kernel(D0, stream.as_raw(), vec![], writes);
    queued.unwrap();
    let taken = give_one(&memory, &importer);
    assert_eq!(read(&taken, 63), 5);
}

#[test]
fn several_allocations_and_parts() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let importer = two.importer();
        let memory: Vec<_> = (1..=5)
            .map(|number| {
                let memory = pool.allocate_on(&stream, number * 1000).unwrap();
                let bytes = vec![number as u8; number as usize * 1000];
                memory.write(&stream, 0, &bytes).unwrap();
                memory
            })
            .collect();
        let mut offer = AllocationOffer::part(&memory[0], 500..700).unwrap();
        for memory in &memory[1..] {
            offer = offer.and(memory).unwrap();
        }
        let mut taken = give(&offer, &importer);
        let sizes: Vec<_> = taken.iter().map(ImportedAllocation::size).collect();
        assert_eq!(sizes, [200, 2000, 3000, 4000, 5000]);
        for (taken, number) in taken.iter().zip(1..) {
            assert_eq!(read(taken, taken.size() - 1), number);
            assert_eq!(taken.pool().as_raw(), taken.pool().as_raw());
            let mut bytes = vec![0; taken.size() as usize + 1];
            let error = taken.read(taken.stream(), 0, &mut bytes).unwrap_err();
            assert!(matches!(error, MemoryError::Argument(_)), "{error}");
        }
        // One is enough to keep them all.
        let last = taken.pop().unwrap();
        drop(taken);
        assert!(memory.iter().all(PoolAllocation::is_held));
        drop(last);
        assert!(!memory.iter().any(PoolAllocation::is_held));
    });
}

/// Each pool is imported once, and destroyed after the last allocation.
#[test]
fn a_pool_is_imported_once() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let other = two.pool();
    let importer = two.importer();
    let count = || two.taker.machine.live().mem_pools;
    let (one, two_, three) = (
        pool.allocate_on(&stream, MIB).unwrap(),
        pool.allocate_on(&stream, MIB).unwrap(),
        other.allocate_on(&stream, MIB).unwrap(),
    );
    let first = give_one(&one, &importer);
    assert_eq!(count(), 1);
    let second = give_one(&two_, &importer);
    assert_eq!(count(), 1);
    assert_eq!(first.pool().as_raw(), second.pool().as_raw());
    let third = give_one(&three, &importer);
    assert_eq!(count(), 2);
    // The same allocation a second time, while it is there and after it was freed.
    let allocations = || two.taker.machine.live().allocations;
    let before = allocations();
    let again = give_one(&one, &importer);
    assert_eq!((count(), allocations()), (2, before));
    assert_eq!(again.address(), first.address());
    drop(first);
    assert_eq!(allocations(), before);
    assert!(one.is_held());
    assert_eq!(read(&again, 0), 0);
    drop(again);
    assert_eq!(allocations(), before - 1);
    assert!(!one.is_held());
    let again = give_one(&one, &importer);
    assert_eq!(count(), 2);
    drop((again, second));
    assert_eq!(count(), 1);
    drop(third);
    assert_eq!(count(), 0);
}

/// Handles of a device that were opened separately have nothing in common: each imports the pool, and
/// frees what it has imported.
#[test]
fn handles_that_were_opened_separately_import_a_pool_each() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let driver: Arc<dyn Driver> = two.taker.faults.clone();
    let separate = Device::open(driver, 0).unwrap();
    assert!(separate.is_same(&two.taker.device));
    let first = give_one(&memory, &two.importer());
    let second = give_one(&memory, &importer(&separate));
    assert_eq!(two.taker.machine.live().mem_pools, 2);
    drop(first);
    assert_eq!(two.taker.machine.live().mem_pools, 1);
    assert!(memory.is_held());
    assert_eq!(read(&second, 0), 0);
    drop(second);
    assert!(!memory.is_held());
}

#[test]
fn a_parcel_for_another_transport() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let importer = two.importer();
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        memory.write(&stream, 0, &[3]).unwrap();
        let parcel = AllocationOffer::new(&memory).unwrap().parcel().unwrap();
        assert!(memory.is_held(), "a parcel holds it");
        let (description, [pool_fd, held]) = parcel.into_parts();
        let again = |fd: &OwnedFd| fd.try_clone().unwrap();
        let copies = [again(&pool_fd), again(&held)];
        let open = |handles: [OwnedFd; 2]| {
            let parcel = AllocationParcel::from_bytes(&description.to_bytes(), handles).unwrap();
            importer.open(parcel).unwrap().remove(0)
        };
        let first = open([pool_fd, held]);
        assert_eq!(read(&first, 0), 3);
        drop(first);
        assert!(memory.is_held(), "the other copy is there");
        let second = open(copies);
        assert_eq!(read(&second, 0), 3);
        drop(second);
        assert!(!memory.is_held());
        drop(AllocationOffer::new(&memory).unwrap().parcel().unwrap());
        assert!(!memory.is_held());
    });
}

/// Memory that another library allocates from a pool of ours.
#[test]
fn borrowed_memory() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let (device, machine) = (&two.giver.device, &two.giver.machine);
    let _guard = pool.make_current().unwrap();
    // SAFETY: the stream is alive, and the memory is freed once below.
    let allocate = |size| unsafe { machine.alloc_async(D0, size, stream.as_raw()) };
    let at = allocate(2 * MIB).unwrap();
    // SAFETY: the memory is freed after the last use.
    let borrow =
        |pool: &MemPool, at: u64, size| unsafe { pool.borrow(&stream, DeviceAddress(at), size) };
    let memory = borrow(&pool, at.0, MIB).unwrap();
    memory.write(&stream, 0, &[4]).unwrap();
    let taken = give_one(&memory, &importer);
    assert_eq!(read(&taken, 0), 4);
    let offer = AllocationOffer::new(&memory).unwrap();
    let waited = offer.wait_until_returned(Duration::from_millis(1));
    let late = matches!(
        waited,
        Err(ShareError::Channel(ChannelError::TimedOut { .. }))
    );
    assert!(late, "{waited:?}");
    drop(taken);
    offer.wait_until_returned(Duration::ZERO).unwrap();
    drop((offer, memory));
    assert_eq!(device.drop_failures(), 0);
    let bad = borrow(&pool, at.0 + 256, MIB).unwrap_err();
    assert!(
        matches!(bad, MemoryError::Argument(ArgumentError::OutOfRange { .. })),
        "{bad}"
    );
    let bad = borrow(&pool, at.0, 2 * MIB + 1).unwrap_err();
    assert!(
        matches!(bad, MemoryError::Argument(ArgumentError::OutOfRange { .. })),
        "{bad}"
    );
    assert!(borrow(&pool, at.0, 0).is_err());
    let other = two.pool();
    for (pool, at) in [(&other, at.0), (&pool, 64), (&pool, u64::MAX)] {
        let bad = borrow(pool, at, MIB).unwrap_err();
        assert_eq!(bad, MemoryError::NotOfPool(at));
    }
    // SAFETY: the pool outlives the wrapper.
    let wrapped = unsafe { MemPool::from_raw(device, pool.as_raw()) };
    let memory = borrow(&wrapped, at.0, 2 * MIB).unwrap();
    let taken = give_one(&memory, &importer);
    assert_eq!(read(&taken, 0), 4);
    drop((taken, memory, wrapped));
    // SAFETY: the memory was allocated above and is freed once.
    unsafe { machine.free_async(D0, at, stream.as_raw()).unwrap() };
}

#[test]
fn pools_that_cannot_be_shared() {
    let two = Two::alone();
    let stream = two.stream();
    let device = &two.giver.device;
    let default = MemPool::default_of(device).unwrap();
    let plain = MemPool::new(device).unwrap();
    for (pool, of_device) in [(&default, true), (&plain, false)] {
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        let ShareError::Memory(error) = AllocationOffer::new(&memory).unwrap_err() else {
            panic!("another error");
        };
        let empty = HandleTypes::empty();
        let right = matches!(
            error,
            MemoryError::NotShareable { handle_type: FD, shareable, .. } if shareable == empty
        );
        assert!(right, "{error:?}");
        assert_eq!(pool.export(FD).unwrap_err(), error);
        let said = error.to_string();
        assert_eq!(said.contains("default memory pool"), of_device, "{said}");
        assert!(said.contains("make it current"), "{said}");
        assert!(memory.export().is_err());
    }
    // SAFETY: a default pool is never destroyed.
    let unknown = unsafe { MemPool::from_raw(device, default.as_raw()) };
    let memory = unknown.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let (given, taken) = exchange(&offer, &two.importer());
    let error = given.unwrap_err();
    assert!(
        matches!(error, ShareError::Memory(MemoryError::Export { .. })),
        "{error}"
    );
    assert!(matches!(taken, Err(ShareError::Refused(reason)) if reason == error.to_string()));
    assert!(!memory.is_held());
    let host = MemPool::builder(device)
        .on_host_numa(0)
        .shareable(FD)
        .create();
    if let Ok(host) = host {
        let memory = host.allocate_on(&stream, MIB).unwrap();
        let error = AllocationOffer::new(&memory).unwrap_err();
        let location = Location::host_numa(0);
        assert!(matches!(error, ShareError::Unnameable(at) if at == location));
    }
}

#[test]
fn offers_that_are_wrong() {
    let two = Two::alone();
    let (pool, other, stream) = (two.pool(), two.pool(), two.stream());
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let foreign = other.allocate_on(&stream, MIB).unwrap();
    let offer = || AllocationOffer::new(&memory).unwrap();
    let error = offer().and(&foreign).unwrap_err();
    assert!(matches!(error, ShareError::SeveralPools), "{error}");
    #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
    for range in [
        0..0,
        5..4,
        0..MIB + 1,
        MIB..MIB + 1,
        u64::MAX..1,
        0..u64::MAX,
    ] {
        let error = offer().and_part(&memory, range).unwrap_err();
        assert!(matches!(error, ShareError::Argument(_)), "{error}");
    }
    let mut full = offer();
    for _ in 1..4096 {
        full = full.and_part(&memory, 0..1).unwrap();
    }
    let error = full.and(&memory).unwrap_err();
    assert!(
        matches!(error, ShareError::Argument(ArgumentError::TooLarge { .. })),
        "{error}"
    );
    // A stream that captures.
    stream_captures(&two, &stream, || {
        let (given, taken) = exchange(&offer(), &two.importer());
        let capturing = |error| matches!(error, ShareError::Memory(MemoryError::Capturing));
        assert!(capturing(given.unwrap_err()));
        assert!(
            matches!(taken, Err(ShareError::Refused { .. })),
            "{taken:?}"
        );
        assert!(capturing(offer().parcel().unwrap_err()));
        assert!(!memory.is_held());
    });
}

fn stream_captures(two: &Two, stream: &Stream, work: impl FnOnce()) {
    use cuvmm::driver::CaptureMode;
    let machine = &two.giver.machine;
    // SAFETY: the stream is alive, and the graph is destroyed.
    unsafe {
        let begun = machine.capture_begin(D0, stream.as_raw(), CaptureMode::RELAXED);
        begun.unwrap();
        work();
        let graph = machine.capture_end(D0, stream.as_raw()).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
    }
}

#[test]
fn takers_that_cannot_take() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    // For writing what is given for reading.
    let (given, taken) = exchange(&offer, &two.importer().read_write());
    assert!(matches!(given, Err(ShareError::Refused { .. })));
    assert!(matches!(
        taken,
        Err(ShareError::Memory(MemoryError::ReadOnly { .. }))
    ));
    // On another device.
    let second = two.taker.second();
    let (given, taken) = exchange(&offer, &importer(&second));
    assert!(matches!(given, Err(ShareError::Refused { .. })));
    let uuid = two.giver.device.uuid();
    assert!(matches!(taken, Err(ShareError::NoSuchDevice(found)) if found == uuid));
    let other = Stream::new(&second).unwrap();
    assert!(PoolImporter::new(&two.taker.device, &other).is_err());
    assert!(!memory.is_held());
    // Writing what was given for reading.
    let taken = give_one(&memory, &two.importer());
    let error = taken.write(taken.stream(), 0, &[0]).unwrap_err();
    assert!(matches!(error, MemoryError::ReadOnly { .. }), "{error}");
    assert_eq!(taken.record_use(&stream), Err(CallError::WrongDriver));
}

/// Each kind of memory has its own call, and the error names it.
#[test]
fn the_wrong_call() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        let (mut one, mut other) = Channel::pair().unwrap();
        let taken = thread::scope(|scope| {
            scope.spawn(|| one.send_allocations(&AllocationOffer::new(&memory).unwrap()));
            other.recv(&Attachment::builder(&two.taker.device))
        });
        let said = taken.unwrap_err().to_string();
        assert!(said.contains("recv_allocations"), "{said}");
        assert!(!memory.is_held());
        let physical = Physical::builder(&two.giver.device, G).shareable(FD);
        let physical = physical.create().unwrap();
        let (mut one, mut other) = Channel::pair().unwrap();
        let taken = thread::scope(|scope| {
            scope.spawn(|| one.send(&Offer::physical(&physical).unwrap()));
            other.recv_allocations(&two.importer())
        });
        let error = taken.unwrap_err();
        let kind = matches!(
            error,
            ShareError::Description(DescriptionError::Kind { .. })
        );
        assert!(kind, "{error}");
    });
}

/// A child that takes the memory and is killed, or ends, or lets go.
#[test]
fn a_taker_that_ends_returns_the_memory() {
    let _alone = alone();
    for way in 0..3 {
        let (mut giver, mut taker) = Channel::pair().unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let child = fork(|| {
            use std::io::Write as _;
            let device = common::host().device;
            let taken = taker
                .recv_allocations(&importer(&device))
                .unwrap()
                .remove(0);
            assert_eq!(read(&taken, 0), 8);
            match way {
                0 => drop(taken),
                1 => std::mem::forget(taken),
                _ => {
                    writer.write_all(b"x").unwrap();
                    loop {
                        thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        });
        drop(taker);
        let rig = common::clean(common::host());
        let pool = MemPool::builder(&rig.device)
            .shareable(FD)
            .create()
            .unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        memory.write(&stream, 0, &[8]).unwrap();
        let offer = AllocationOffer::new(&memory).unwrap();
        giver.send_allocations(&offer).unwrap();
        if way == 2 {
            use std::io::Read as _;
            reader.read_exact(&mut [0]).unwrap();
            assert!(memory.is_held());
            // SAFETY: the process is a child of this one that has not been waited for.
            assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        }
        let code = ended(child, Duration::from_secs(60));
        assert_eq!(code, Some(if way == 2 { -1 } else { 0 }));
        offer.wait_until_returned(Duration::from_secs(60)).unwrap();
        drop(offer);
        memory.close().unwrap();
    }
}

/// A giver that ends: the taker's calls say so, and it frees what it has.
#[test]
fn a_giver_that_ends_is_noticed() {
    let _alone = alone();
    let (mut giver, mut taker) = Channel::pair().unwrap();
    let child = fork(|| {
        let device = common::host().device;
        let pool = MemPool::builder(&device).shareable(FD).create().unwrap();
        let stream = Stream::new(&device).unwrap();
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        memory.write(&stream, 0, &[6]).unwrap();
        let offer = AllocationOffer::new(&memory).unwrap();
        giver.send_allocations(&offer).unwrap();
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    });
    drop(giver);
    let rig = common::clean(common::host());
    let importer = importer(&rig.device);
    let taken = taker.recv_allocations(&importer).unwrap().remove(0);
    assert_eq!(read(&taken, 0), 6);
    taken.check_giver().unwrap();
    // SAFETY: the process is a child of this one that has not been waited for.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    assert_eq!(ended(child, Duration::from_secs(60)), Some(-1));
    assert_eq!(taken.check_giver(), Err(MemoryError::GiverGone));
    let error = taken.read(taken.stream(), 0, &mut [0]).unwrap_err();
    assert_eq!(error, MemoryError::GiverGone);
    taken.close().unwrap();
}

/// A parcel whose giver has gone is refused before its handle is used.
#[test]
fn a_parcel_of_a_giver_that_is_gone() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let memory = pool.allocate_on(&stream, MIB).unwrap();
        let parcel = AllocationOffer::new(&memory).unwrap().parcel().unwrap();
        let (description, [pool_fd, _held]) = parcel.into_parts();
        let (one, other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        drop(one);
        let bytes = description.to_bytes();
        let parcel = AllocationParcel::from_bytes(&bytes, [pool_fd, other]).unwrap();
        let error = two.importer().open(parcel).unwrap_err();
        assert!(
            matches!(error, ShareError::Memory(MemoryError::GiverGone)),
            "{error}"
        );
        drop(_held);
    });
}

/// By hand, without this library's transports.
#[test]
fn pools_and_allocations_by_hand() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    memory.write(&stream, 0, &[2]).unwrap();
    let handle = pool.export(FD).unwrap();
    assert!(pool.export(HandleTypes::empty()).is_err());
    let ticket = memory.export().unwrap();
    let here = Stream::new(&two.taker.device).unwrap();
    let imported = ImportedPool::import(&two.taker.device, &handle).unwrap();
    // SAFETY: the memory is freed after it, and was allocated before.
    let taken = unsafe { imported.import_allocation(&here, ticket, MIB) }.unwrap();
    assert_eq!(read(&taken, 0), 2);
    // SAFETY: nothing is imported.
    let error = unsafe { imported.import_allocation(&here, ticket, 64 * MIB) }.unwrap_err();
    assert!(
        matches!(
            error,
            MemoryError::Argument(ArgumentError::OutOfRange { .. })
        ),
        "{error}"
    );
    // SAFETY: nothing is imported.
    let error = unsafe { imported.import_allocation(&stream, ticket, MIB) }.unwrap_err();
    assert!(matches!(error, MemoryError::Argument(_)), "{error}");
    let other = two.pool().allocate_on(&stream, MIB).unwrap();
    // SAFETY: nothing is imported.
    let error = unsafe { imported.import_allocation(&here, other.export().unwrap(), MIB) };
    let error = error.unwrap_err();
    assert!(
        matches!(error, MemoryError::ImportPointer { .. }),
        "{error}"
    );
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let error = ImportedPool::import(&two.taker.device, &cuvmm::driver::Exported::Fd(null));
    let error = error.unwrap_err();
    assert!(matches!(error, MemoryError::ImportPool { .. }), "{error}");
    taken.close().unwrap();
}

/// Several threads of the taker import, read and drop the same allocations, while the giver drops
/// and allocates.
#[test]
fn many_threads() {
    leaves_nothing_open(|| {
        let two = Two::new();
        let (pool, stream) = (two.pool(), two.stream());
        let importer = two.importer();
        for round in 0..20 {
            let memory: Vec<_> = (0..3)
                .map(|number| {
                    let memory = pool.allocate_on(&stream, MIB).unwrap();
                    memory.write(&stream, 0, &[round * 3 + number; 8]).unwrap();
                    memory
                })
                .collect();
            let parcels: Vec<Vec<_>> = (0..4)
                .map(|_| {
                    let offers = memory.iter().map(AllocationOffer::new);
                    offers
                        .map(|offer| offer.unwrap().parcel().unwrap())
                        .collect()
                })
                .collect();
            thread::scope(|scope| {
                for parcels in parcels {
                    let importer = &importer;
                    scope.spawn(move || {
                        for (parcel, number) in parcels.into_iter().zip(0..) {
                            let taken = importer.open(parcel).unwrap().remove(0);
                            assert_eq!(read(&taken, 7), round * 3 + number);
                        }
                    });
                }
                drop(memory);
                // Memory that is held is not given out again.
                for _ in 0..10 {
                    let other = pool.allocate_on(&stream, MIB).unwrap();
                    other.write(&stream, 0, &[255; 8]).unwrap();
                }
            });
            assert_eq!(pool.held_elsewhere(), 0);
        }
        stream.synchronize().unwrap();
        assert_eq!(pool.stats().unwrap().used, 0);
        assert_eq!(two.taker.machine.live().mem_pools, 0);
    });
}

/// A description is read back as it was written.
#[test]
fn a_description_there_and_back() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::part(&memory, 4..8).unwrap().and(&memory);
    let parcel = offer.unwrap().read_write().parcel().unwrap();
    let description = parcel.description();
    assert_eq!(description.len(), 2);
    let bytes = description.to_bytes();
    let again = AllocationDescription::from_bytes(&bytes).unwrap();
    assert_eq!(again.to_bytes(), bytes);
    assert_eq!(again.sizes().collect::<Vec<_>>(), [4, MIB]);
    assert_eq!(again.access(), Access::ReadWrite);
    assert_eq!(again.device_uuid(), two.giver.device.uuid());
}

/// Memory that stays is given again and again. What is over leaves no descriptor.
#[test]
fn memory_that_is_given_many_times() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let before = open_files().len();
    for _ in 0..100 {
        drop(importer.open(offer.parcel().unwrap()).unwrap());
        drop(give(&offer, &importer));
        assert!(open_files().len() < before + 8);
    }
}

/// A pool that goes by several wrappers of its giver and several importers is imported once, and so
/// is its memory.
#[test]
fn a_pool_with_several_owners_is_imported_once() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importers = [two.importer(), two.importer()];
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let first = give_one(&memory, &importers[0]);
    // SAFETY: the pool and the memory outlive the wrappers.
    let borrowed = unsafe {
        let wrapped = MemPool::from_raw(&two.giver.device, pool.as_raw());
        wrapped.borrow(&stream, memory.address(), MIB).unwrap()
    };
    for importer in &importers {
        let again = give_one(&borrowed, importer);
        assert_eq!(again.address(), first.address());
        assert_eq!(two.taker.machine.live().mem_pools, 1);
    }
}

/// One of two imports of an allocation is dropped while their stream captures, which goes on.
#[test]
fn a_drop_during_a_capture() {
    use cuvmm::driver::CaptureMode;
    let two = Two::alone();
    two.giver.leaves();
    two.taker.leaves();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let (one, other) = (give_one(&memory, &importer), give_one(&memory, &importer));
    let here = one.stream().clone();
    let (device, machine) = (&two.taker.device, &two.taker.machine);
    // SAFETY: the stream is alive, and the graph is destroyed.
    unsafe {
        machine
            .capture_begin(D0, here.as_raw(), CaptureMode::RELAXED)
            .unwrap();
        drop(one);
        let refused = other.close().unwrap_err();
        assert_eq!(refused.reason, CloseRefusal::Call(CallError::InUse));
        let graph = machine.capture_end(D0, here.as_raw()).unwrap();
        machine.graph_destroy(D0, graph).unwrap();
        assert_eq!((device.drop_failures(), device.leaked()), (1, MIB));
        assert_eq!(read(&refused.owner, 0), 0);
        drop(refused);
    }
    // The end of the other use frees nothing.
    let live = machine.live();
    assert_eq!((live.allocations, live.mem_pools), (1, 1));
    assert_eq!((device.drop_failures(), device.leaked()), (1, MIB));
    // The giver was told of one end.
    assert!(memory.is_held());
}

/// Memory cannot be received on a stream that captures, nor beside another import whose stream does.
/// The capture goes on, nothing stays imported, and the giver knows that.
#[test]
fn a_taker_whose_stream_captures() {
    use cuvmm::driver::CaptureMode;
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let here = Stream::new(&two.taker.device).unwrap();
    let importers = [
        PoolImporter::new(&two.taker.device, &here).unwrap(),
        two.importer(),
    ];
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    for first in [None, Some(&importers[0])] {
        let first = first.map(|importer| give_one(&memory, importer));
        let machine = &two.taker.machine;
        // SAFETY: the stream is alive, and the graph is destroyed.
        unsafe {
            machine
                .capture_begin(D0, here.as_raw(), CaptureMode::GLOBAL)
                .unwrap();
            let importer = &importers[usize::from(first.is_some())];
            let (given, taken) = exchange(&offer, importer);
            assert!(matches!(given, Err(ShareError::Refused(_))), "{given:?}");
            assert!(taken.is_err());
            let graph = machine.capture_end(D0, here.as_raw()).unwrap();
            machine.graph_destroy(D0, graph).unwrap();
        }
        drop(first);
        assert_eq!(two.taker.device.drop_failures(), 0);
        assert!(!memory.is_held());
    }
    drop(give_one(&memory, &importers[0]));
}

/// While a drop waits for the GPU, other memory is imported and dropped, and so is the pool.
#[test]
fn a_drop_that_waits_holds_up_no_other() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let (importer, second) = (two.importer(), two.importer());
    let memory = [(); 2].map(|()| pool.allocate_on(&stream, MIB).unwrap());
    let other_pool = two.pool();
    let elsewhere = other_pool.allocate_on(&stream, MIB).unwrap();
    let taken = give_one(&memory[0], &importer);
    let here = taken.stream().clone();
    let machine = &two.taker.machine;
    machine.hold(D0, here.as_raw());
    let writes = vec![(taken.address(), 64, 5)];
    machine
        .queue_kernel(D0, here.as_raw(), vec![], writes)
        .unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(move || drop(taken));
        let freed = || two.taker.device.calls().count(Call::MemFreeAsync) > 0;
        while !freed() && !waits.is_finished() {
            thread::yield_now();
        }
        for memory in [&memory[1], &elsewhere] {
            drop(give_one(memory, &second));
        }
        // The memory itself is imported again when it is free, which is not awaited for ever.
        let (mut one, mut other) = Channel::pair().unwrap();
        other.set_timeout(Duration::from_millis(400));
        let offer = AllocationOffer::new(&memory[0]).unwrap();
        let given = scope.spawn(move || one.send_allocations(&offer));
        let refused = other.recv_allocations(&second).unwrap_err();
        let in_use = MemoryError::ImportPointer(CallError::InUse);
        assert_eq!(refused.to_string(), ShareError::from(in_use).to_string());
        let told = given.join().unwrap();
        assert!(matches!(told, Err(ShareError::Refused { .. })), "{told:?}");
        assert!(memory[0].is_held() && !waits.is_finished());
        machine.release_stream(D0, here.as_raw());
    });
    assert!(!memory[0].is_held());
    drop(give_one(&memory[0], &second));
    drop((memory, elsewhere, pool, other_pool, stream, here));
}

/// A hook for failed drops may use the memory whose event could not be destroyed.
#[test]
fn a_hook_that_uses_the_memory() {
    let two = Two::alone();
    two.taker.leaves();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let taken = Arc::new(give_one(&memory, &importer));
    let [one, other] = [(); 2].map(|()| Stream::new(&two.taker.device).unwrap());
    let used = Arc::clone(&taken);
    let hook = Arc::new(move |_: &DropFailure| used.record_use(&other).unwrap());
    two.taker.device.on_drop_failure(Some(hook));
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    two.taker
        .faults
        .arm(Fault::nth(1, code).of(Call::EventDestroy));
    taken.record_use(&one).unwrap();
    two.taker.faults.disarm();
    assert_eq!(two.taker.device.drop_failures(), 1);
    two.taker.device.on_drop_failure(None);
    drop(taken);
    assert!(!memory.is_held());
}

/// A child that is forked while another thread has the memory's streams locked does not wait for
/// that thread.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_child_that_is_forked_during_a_call() {
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let other = two.stream();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let faults = &two.giver.faults;
    let slow = Fault::delay_all(Duration::from_secs(2));
    faults.arm(slow.of(Call::EventCreate));
    let before = faults.count(Call::EventCreate);
    let child = thread::scope(|scope| {
        let uses = scope.spawn(|| memory.record_use(&other).unwrap());
        while faults.count(Call::EventCreate) == before {
            thread::yield_now();
        }
        let child = fork(|| {
            assert!(offer.parcel().is_err());
            assert!(!memory.is_held());
            share_support::drop_in_child(&offer);
            share_support::drop_in_child(&memory);
        });
        uses.join().unwrap();
        child
    });
    assert_eq!(ended(child, Duration::from_secs(20)), Some(0));
}

/// An imported allocation belongs to the parent: a forked child can neither use nor free
/// it, and its drops tell the giver nothing.
#[test]
fn a_forked_child_has_nothing_imported() {
    fn is_forked<T>(outcome: Result<T, impl Debug>) -> bool {
        matches!(outcome, Err(error) if format!("{error:?}").contains("Forked"))
    }
    let two = Two::alone();
    let (pool, stream) = (two.pool(), two.stream());
    let importer = two.importer();
    let memory = pool.allocate_on(&stream, MIB).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let taken = give_one(&memory, &importer);
    let other = Stream::new(&two.taker.device).unwrap();
    let handle = pool.export(FD).unwrap();
    let ticket = memory.export().unwrap();
    let parcel = offer.parcel().unwrap();
    let calls = || (two.giver.faults.total(), two.taker.faults.total());
    let child = fork(|| {
        let before = calls();
        assert!(is_forked(importer.open(parcel)));
        assert!(is_forked(ImportedPool::import(&two.taker.device, &handle)));
        // SAFETY: it is refused.
        assert!(is_forked(unsafe {
            taken.pool().import_allocation(&other, ticket, MIB)
        }));
        assert!(is_forked(taken.check_giver()));
        assert!(is_forked(taken.record_use(&other)));
        assert!(is_forked(taken.read(&other, 0, &mut [0])));
        assert!(is_forked(taken.write(&other, 0, &[0])));
        assert_eq!((taken.size(), taken.access()), (MIB, Access::Read));
        // SAFETY: the child ends without using or dropping the value again.
        let copy = unsafe { std::ptr::read(&raw const taken) };
        assert!(is_forked(copy.close()));
        share_support::drop_in_child(taken.pool());
        share_support::drop_in_child(&importer);
        assert!(offer.parcel().is_err());
        share_support::drop_in_child(&offer);
        assert_eq!(calls(), before);
        assert_eq!(two.taker.device.drop_failures(), 0);
    });
    assert_eq!(ended(child, Duration::from_secs(20)), Some(0));
    assert!(memory.is_held());
    assert_eq!(read(&taken, 0), 0);
    drop(taken);
    drop(offer);
    assert!(!memory.is_held());
}
