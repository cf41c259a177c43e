//! Registered memory: the registration lists exactly its extents, they do not change, and they stay
//! mapped after the region or block is gone.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common;
use crate::common::{D0, G, Rig, nth_of};
use crate::on_both;
use cuvmm::driver::model::{Backing, ModelDriver};
use cuvmm::driver::{CUresult, Call, DeviceAttribute, Driver, HandleTypes, Location};
use cuvmm::error::{ArgumentError, ContainerError, MemoryError, PoolError};
use cuvmm::own::CloseRefusal;
use cuvmm::{
    Access, DeviceVec, Hardened, Layout, Physical, Place, Pool, Region, Registration, Stream,
};

/// Returns offsets and sizes of extents in granules.
fn sizes(registration: &Registration) -> Vec<(u64, u64)> {
    registration
        .extents()
        .iter()
        .map(|extent| (extent.offset / G, extent.size / G))
        .collect()
}

/// Returns the range of the refused change, the start of the first registration, and the number of
/// registrations.
#[track_caller]
fn figures(error: MemoryError) -> [u64; 4] {
    match error {
        MemoryError::Registered {
            range,
            first,
            registrations,
        } => [range.start / G, range.end / G, first / G, registrations],
        other => panic!("{other}"),
    }
}

/// Writes to memory as a kernel does. The write loses the context if the memory is not mapped.
fn touch(rig: &Rig<impl Backing>, stream: &Stream, registration: &Registration) {
    let writes: Vec<_> = registration
        .extents()
        .iter()
        .map(|extent| (extent.address, extent.size, 7))
        .collect();
    rig.kernel(stream, &[], &writes);
}

fn intact(rig: &Rig<impl Backing>) -> bool {
    rig.device.synchronize().is_ok()
}

on_both! {
    fn a_registration_is_the_exact_list_of_whole_extents(rig) {
        let mut region = Region::builder(&rig.device, 64 * G).largest_extent(4 * G).reserve().unwrap();
        region.commit(2 * G..13 * G).unwrap();
        rig.faults.forget();
        let all = region.register(2 * G..13 * G).unwrap();
        assert_eq!(sizes(&all), [(2, 4), (6, 4), (10, 2), (12, 1)]);
        assert_eq!(all.extents(), region.extents());
        assert_eq!((all.range(), all.size()), (2 * G..13 * G, 11 * G));
        assert_eq!(all.address().0, region.address().0 + 2 * G);
        // Extents that are cut count as a whole.
        let part = region.register(5 * G..7 * G).unwrap();
        assert_eq!(sizes(&part), [(2, 4), (6, 4)]);
        assert_eq!((part.range(), region.registrations()), (2 * G..10 * G, 2));
        let same = part.clone();
        assert_eq!(region.registrations(), 2, "a clone is the same registration");
        drop(part);
        assert_eq!(region.registrations(), 2);
        drop(same);
        assert_eq!(region.registrations(), 1);
        // Memory committed later is not part of it.
        region.commit(13 * G..14 * G).unwrap();
        assert_eq!(all.extents().len(), 4);
        drop(all);
        assert_eq!(region.registrations(), 0);
        region.close().unwrap();
    }

    fn only_committed_ranges_are_registered(rig) {
        let mut region = common::region(rig, 16 * G, 4 * G);
        region.commit(5 * G..6 * G).unwrap();
        region.back_with_zeros(8 * G..10 * G).unwrap();
        region.commit(12 * G..13 * G).unwrap();
        region.decommit(12 * G..13 * G).unwrap();
        rig.faults.forget();
        for (range, why) in [(0..6 * G, "a hole"), (8 * G..9 * G, "zeros"), (12 * G..13 * G, "pending frees")] {
            let (from, to) = (range.start, range.end);
            assert!(matches!(
                region.register(range),
                Err(MemoryError::NotCommitted(bytes)) if bytes == (from..to)
            ), "{why}");
        }
        let wrong = |range| match region.register(range) {
            Err(MemoryError::Argument(error)) => error,
            other => panic!("{other:?}"),
        };
        assert!(matches!(wrong(G..G), ArgumentError::Empty { .. }));
        assert!(matches!(wrong(0..G + 1), ArgumentError::MisalignedRange { .. }));
        assert!(matches!(wrong(0..17 * G), ArgumentError::OutOfRange { .. }));
        assert_eq!((region.registrations(), rig.faults.total()), (0, 0));
        region.close().unwrap();
    }

    // I-63
    fn nothing_that_is_registered_changes(rig) {
        let (second, stream) = (rig.second(), Stream::new(&rig.device).unwrap());
        let mut region = common::committed(Region::builder(&rig.device, 64 * G)
            .largest_extent(4 * G)
            .open_to(&second, Access::ReadWrite), 16 * G);
        let registration = region.register(6 * G..10 * G).unwrap();
        let another = region.register(9 * G..10 * G).unwrap();
        let before = rig.machine.snapshot();
        rig.faults.forget();
        assert_eq!(figures(region.decommit(0..16 * G).unwrap_err()), [0, 16, 4, 2]);
        assert_eq!(figures(region.decommit_after(11 * G..13 * G, &[]).unwrap_err()), [11, 13, 4, 2]);
        assert_eq!(figures(region.decommit(3 * G..5 * G).unwrap_err()), [3, 5, 4, 1]);
        let host = Place::HostNuma(0);
        let moved = region.relocate(4 * G..8 * G, &host, &stream);
        assert_eq!(figures(moved.unwrap_err()), [4, 8, 4, 1]);
        assert_eq!(figures(region.fork(&[]).unwrap_err()), [0, 64, 4, 2]);
        assert!(matches!(region.revoke(&second), Err(MemoryError::Registered { .. })));
        assert!(matches!(region.revoke_blocking(&second), Err(MemoryError::Registered { .. })));
        let refused = region.close().unwrap_err();
        assert!(matches!(refused.reason, CloseRefusal::InUse));
        region = refused.owner;
        assert_eq!(rig.faults.total(), 0, "no driver call");
        assert_eq!(rig.machine.snapshot(), before);
        assert_eq!((region.committed(), region.pending_free()), (16 * G, 0));

        // The rest of the region can change.
        region.commit(20 * G..22 * G).unwrap();
        region.decommit_after(12 * G..16 * G, &[]).unwrap();
        region.decommit_after(0..4 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 8 * G);
        region.relocate(20 * G..22 * G, &host, &stream).unwrap();
        region.alias(4 * G..8 * G, 32 * G).unwrap();
        region.decommit_after(32 * G..36 * G, &[]).unwrap();
        region.purge().unwrap();
        region.write(&stream, 7 * G, b"still").unwrap();
        touch(rig, &stream, &registration);
        assert!(intact(rig));

        registration.close().unwrap();
        assert_eq!(refused_by(&mut region), [4, 12, 8, 1], "the other registration");
        drop(another);
        region.decommit(4 * G..12 * G).unwrap();
        region.revoke(&second).unwrap();
        region.close().unwrap();
    }

    fn what_is_shared_is_not_copied_under_a_registration(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 4 * G);
        let mut fork = region.fork(&[]).unwrap();
        let registration = region.register(0..2 * G).unwrap();
        rig.faults.forget();
        let own = region.unshare(0..4 * G, &stream, &[]);
        assert_eq!(figures(own.unwrap_err()), [0, 2, 0, 1]);
        assert_eq!(rig.faults.total(), 0);
        assert!(region.is_read_only(2 * G..4 * G), "no part is unshared");
        assert_eq!(
            region.unshare(2 * G..4 * G, &stream, &[]).unwrap(), 2 * G,
            "memory that is not registered"
        );
        // The other region unshares by a copy, and this one may write to its memory again.
        assert_eq!(fork.unshare(0..4 * G, &stream, &[]).unwrap(), 2 * G);
        assert_eq!(region.unshare(0..4 * G, &stream, &[]).unwrap(), 0);
        assert!(!region.is_read_only(0..4 * G));
        touch(rig, &stream, &registration);
        assert!(intact(rig));
    }

    fn what_is_registered_outlives_the_region(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::committed(Region::builder(&rig.device, 32 * G).largest_extent(2 * G), 16 * G);
        region.back_with_zeros(20 * G..24 * G).unwrap();
        let one = region.register(2 * G..6 * G).unwrap();
        let two = region.register(4 * G..8 * G).unwrap();
        drop(region);
        let live = rig.machine.live();
        assert_eq!((live.mappings, live.physical_bytes), (3, 6 * G), "the rest was released");
        assert_eq!(live.reservations, 1, "the addresses stay reserved");

        rig.machine.hold(D0, stream.as_raw());
        touch(rig, &stream, &one);
        rig.faults.forget();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(one));
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(rig.machine.live().mappings, 3, "the release waits for the work");
            rig.machine.release_stream(D0, stream.as_raw());
        });
        assert_eq!(rig.faults.count(Call::CtxSynchronize), 1);
        assert_eq!(rig.faults.count(Call::MemUnmap), 1, "extents of the other registration stay");
        assert!(intact(rig));
        assert_eq!(rig.machine.live().mappings, 2);
        touch(rig, &stream, &two);
        drop(two);
        assert!(intact(rig));
        let live = rig.machine.live();
        assert_eq!((live.mappings, live.physical_bytes, live.reservations), (0, 0, 0));
    }

    fn region_and_registrations_may_go_at_once(rig) {
        for _ in 0..50 {
            let region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(G), 8 * G);
            let (one, two) = (region.register(0..6 * G).unwrap(), region.register(2 * G..8 * G).unwrap());
            std::thread::scope(|scope| {
                scope.spawn(|| drop(one));
                scope.spawn(|| drop(region));
                scope.spawn(|| drop(two));
            });
            assert!(rig.machine.live().is_nothing());
        }
    }

    fn a_registration_that_ends_first_leaves_all_to_the_region(rig) {
        let region = common::region(rig, 8 * G, 4 * G);
        let registration = region.register(0..4 * G).unwrap();
        rig.faults.forget();
        drop(registration);
        assert_eq!(rig.faults.total(), 0);
        assert_eq!((region.committed(), rig.machine.live().mappings), (4 * G, 1));
    }

    fn closing_one_says_what_could_not_be_given_back(rig) {
        let refused = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
        for call in [Call::CtxSynchronize, Call::MemUnmap] {
            let region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 4 * G);
            let registration = region.register(0..4 * G).unwrap();
            let clone = registration.clone();
            drop(region);
            let in_use = registration.close().unwrap_err();
            assert!(matches!(in_use.reason, CloseRefusal::InUse));
            drop(clone);
            // An unmapping is attempted twice.
            for nth in [1, 2] {
                rig.faults.arm(nth_of(nth, refused, &[call]));
            }
            let failed = in_use.owner.close().unwrap_err();
            rig.faults.disarm();
            assert!(matches!(failed.reason, CloseRefusal::Call(_)), "{call:?}");
            assert_eq!(rig.machine.live().mappings, 2, "{call:?}");
            failed.owner.close().unwrap();
            assert_eq!(rig.machine.live().mappings, 0);
        }
    }

    fn a_blocks_registration_keeps_what_lies_behind_its_end(rig) {
        let pool = common::limited(rig, 16)
            .largest_extent(G)
            .build()
            .unwrap();
        let (a, b) = (pool.tenant("a").register().unwrap(), pool.tenant("b").register().unwrap());
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = a.block(8 * G).capacity(16 * G).home_stream(&stream).try_allocate().unwrap();
        block.shrink_to(3 * G).unwrap();
        let registration = block.register().unwrap();
        assert_eq!(registration.extents(), block.extents());
        assert_eq!(sizes(&registration).len(), 8, "extents behind its end too");
        assert_eq!((registration.range(), registration.address()), (0..8 * G, block.address()));
        let mapped = || rig.machine.live().mappings;

        // Reclaim, trim, compaction, and the end of the block and of its tenant.
        assert!(b.try_allocate(9 * G).is_err());
        assert_eq!(pool.trim(0).unwrap(), 0);
        let done = pool.compact(|_| true).unwrap();
        assert_eq!((done.copied, done.in_use > 0 || done.steps == 0), (0, true));
        assert_eq!(mapped(), 8);
        block.try_grow_to(10 * G).unwrap();
        assert_eq!(registration.extents().len(), 8, "memory added by growth is not registered");
        block.shrink_to(G).unwrap();
        touch(rig, &stream, &registration);
        drop(block);
        drop(a);
        assert!(b.try_allocate(9 * G).is_err());
        assert_eq!(pool.trim(0).unwrap(), 0);
        touch(rig, &stream, &registration);
        assert!(intact(rig));
        assert!(pool.stats().leased >= 8 * G, "{:#?}", pool.stats());

        let clone = registration.clone();
        drop(registration);
        assert!(b.try_allocate(9 * G).is_err());
        clone.close().unwrap();
        drop(b.try_allocate(16 * G).unwrap());
    }

    fn work_on_other_streams_is_recorded_on_the_registration(rig) {
        let (pool, tenant) = common::tenancy(rig, 8);
        let (home, other) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.device).unwrap());
        let block = tenant.block(8 * G).home_stream(&home).try_allocate().unwrap();
        let registration = block.register().unwrap();
        drop(block);
        rig.machine.hold(D0, other.as_raw());
        touch(rig, &other, &registration);
        registration.record_use(&other).unwrap();
        drop(registration);
        assert_eq!(pool.trim(0).unwrap(), 0, "the other stream's work is pending");
        rig.machine.release_stream(D0, other.as_raw());
        assert_eq!(pool.trim(0).unwrap(), 8 * G);
        // A region records no streams: its owner names them. A stream of another driver is refused.
        let region = common::region(rig, G, G);
        let registration = region.register(0..G).unwrap();
        registration.record_use(&other).unwrap();
        let strangers = common::model();
        let strange = Stream::new(&strangers.device).unwrap();
        assert!(registration.record_use(&strange).is_err());
    }

    fn a_hardened_pool_respects_it_too(rig) {
        let pool = common::limited(rig, 16)
            .hardened(Hardened::default())
            .build()
            .unwrap();
        let (tenant, stream) = common::joined(rig, &pool);
        let mut block = tenant.block(8 * G).home_stream(&stream).try_allocate().unwrap();
        let registration = block.register().unwrap();
        block.shrink_to(G).unwrap();
        drop(block);
        drop(tenant.block(G).home_stream(&stream).try_allocate().unwrap());
        touch(rig, &stream, &registration);
        assert!(intact(rig));
        drop(registration);
        drop(tenant.block(16 * G).home_stream(&stream).try_allocate().unwrap());
    }

    fn a_vector_leaves_what_is_registered(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut vector = DeviceVec::<u64>::new(&rig.device, &stream, 64 * G as usize).unwrap();
        assert!(matches!(
            vector.register(),
            Err(ContainerError::Argument(ArgumentError::Empty { .. }))
        ));
        let per_granule = G as usize / 8;
        vector.reserve(4 * per_granule).unwrap();
        let registration = vector.register().unwrap();
        assert_eq!(registration.address(), vector.address());
        let registered = registration.size();
        vector.reserve(20 * per_granule).unwrap();
        assert!(vector.held() > registered);
        vector.shrink_to_fit().unwrap();
        assert_eq!(vector.held(), registered);
        assert_eq!(vector.capacity() as u64, registered / 8);
        drop(registration);
        assert_eq!(vector.shrink_to_fit().unwrap(), registered);
        assert_eq!((vector.held(), vector.capacity()), (0, 0));
    }

    fn a_dma_buf_is_of_whole_pages_of_what_is_registered(rig) {
        let page = rustix::param::page_size() as u64;
        let mut region = Region::builder(&rig.device, 16 * G).largest_extent(2 * G).reserve().unwrap();
        region.commit(2 * G..8 * G).unwrap();
        let registration = region.register(2 * G..6 * G).unwrap();
        rig.faults.forget();
        let refused = |range| registration.dma_buf(range).unwrap_err();
        assert!(matches!(refused(3 * G..3 * G), MemoryError::Argument(ArgumentError::Empty { .. })));
        assert!(matches!(
            refused(3 * G..3 * G + 1),
            MemoryError::Argument(ArgumentError::Misaligned { value, multiple, .. })
                if (value, multiple) == (3 * G + 1, page)
        ));
        for range in [0..3 * G, G..3 * G, 5 * G..7 * G, 5 * G..!(page - 1)] {
            let registered = 2 * G..6 * G;
            let expected = MemoryError::NotRegistered { range: range.clone(), registered };
            assert_eq!(refused(range), expected);
        }
        assert_eq!(rig.faults.total(), 0);

        assert!(!registration.is_exported());
        let two = registration.dma_buf(3 * G..5 * G).unwrap();
        assert!(registration.is_exported());
        let (others, same) = (region.register(6 * G..8 * G), region.register(4 * G..5 * G));
        assert!(!others.unwrap().is_exported() && same.unwrap().is_exported());
        assert_eq!(rig.faults.count(Call::MemGetHandleForAddressRange), 1);
        assert_eq!(two.range(), 3 * G..5 * G);
        let file = std::fs::File::from(two.as_fd().try_clone_to_owned().unwrap());
        assert_eq!(file.metadata().unwrap().len(), 2 * G);
        let one_page = registration.dma_buf(2 * G + page..2 * G + 2 * page).unwrap();
        drop(one_page);

        // A dma-buf keeps the memory mapped, as the registration does.
        assert!(matches!(registration.close().unwrap_err().reason, CloseRefusal::InUse));
        assert!(matches!(region.decommit(2 * G..4 * G), Err(MemoryError::Registered { .. })));
        drop(region);
        let (descriptor, registration) = two.into_parts();
        assert_eq!(rig.machine.live().mappings, 2);
        drop(registration);
        assert_eq!(rig.machine.live().mappings, 0);
        drop(descriptor);
    }

    fn a_dma_buf_is_of_one_place(rig) {
        let second = rig.second();
        let places = [Place::from(&rig.device), Place::from(&second)];
        let layout = Layout::round_robin(places, 2 * G);
        let region = common::committed(Region::builder(&rig.device, 8 * G).layout(layout), 4 * G);
        let registration = region.register(0..4 * G).unwrap();
        assert!(matches!(
            registration.dma_buf(G..3 * G),
            Err(MemoryError::Elsewhere { offset, found, wanted: Location { id: 0, .. } })
                if offset == 2 * G && found == second.location()
        ));
        let refused = CUresult::CUDA_ERROR_NOT_SUPPORTED;
        rig.faults.arm(nth_of(1, refused, &[Call::MemGetHandleForAddressRange]));
        assert!(matches!(
            registration.dma_buf(0..2 * G),
            Err(MemoryError::Range { offset: 0, size, .. }) if size == 2 * G
        ));
        rig.faults.disarm();
        assert!(!registration.is_exported(), "a refusal changes nothing");
        drop(registration.dma_buf(0..2 * G).unwrap());
        registration.close().unwrap();
    }

    fn what_nccl_asks_for_is_asked_for(rig) {
        let physical = Physical::builder(&rig.device, G).for_nccl().unwrap().create().unwrap();
        let props = physical.props().unwrap();
        assert_eq!(props.handle_types, HandleTypes::POSIX_FD, "no fabric handles, though promised");
        assert!(props.rdma_capable);
        physical.export(HandleTypes::POSIX_FD).unwrap();

        let region = common::committed(Region::builder(&rig.device, 4 * G).for_nccl().unwrap(), G);
        let pool = common::limited(rig, 4);
        let (_pool, tenant) = common::with_tenant(pool.for_nccl().unwrap().build().unwrap());
        let block = tenant.try_allocate(G).unwrap();
        let asked = cuvmm::driver::PointerAttribute::ALLOWED_HANDLE_TYPES;
        for address in [region.address(), block.address()] {
            let types = rig.machine.pointer_attribute(D0, address, asked).unwrap();
            assert_eq!(types, u64::from(HandleTypes::POSIX_FD.bits()));
        }
        let refused = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        rig.faults.arm(nth_of(1, refused, &[Call::MemCreate]));
        assert!(Region::builder(&rig.device, G).for_nccl().is_err());
        rig.faults.disarm();
    }
}

fn refused_by(region: &mut Region) -> [u64; 4] {
    figures(region.decommit(4 * G..12 * G).unwrap_err())
}

#[test]
fn memory_for_rdma_is_refused_where_the_device_has_none() {
    let without = DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM;
    let rig = common::clean(common::rig(ModelDriver::new(
        common::model_options().attribute(without, 0).fabric(true),
    )));
    let physical = Physical::builder(&rig.device, G).rdma_capable(true);
    let region = Region::builder(&rig.device, G).rdma_capable(true);
    let pool = Pool::builder(&rig.device).rdma_capable(true);
    let refusals = [
        physical.create().map(drop).map_err(PoolError::Memory),
        region.reserve().map(drop).map_err(PoolError::Memory),
        pool.build().map(drop),
    ];
    for refused in refusals {
        assert!(matches!(
            refused,
            Err(PoolError::Memory(MemoryError::NotSupported { device, what }))
                if device == rig.device.location() && what.contains("RDMA")
        ));
    }
    assert_eq!(rig.faults.count(Call::MemCreate), 0);
    assert_eq!(
        rig.faults.count(Call::DeviceGetAttribute),
        1,
        "the attribute is queried once"
    );
    // NCCL accepts what the device supports.
    let physical = Physical::builder(&rig.device, G)
        .for_nccl()
        .unwrap()
        .create()
        .unwrap();
    let props = physical.props().unwrap();
    let types = HandleTypes::POSIX_FD | HandleTypes::FABRIC;
    assert_eq!((props.handle_types, props.rdma_capable), (types, false));
}

#[test]
fn a_drop_that_fails_is_told_of() {
    let rig = common::model();
    let region = common::region(&rig, 8 * G, 4 * G);
    let registration = region.register(0..4 * G).unwrap();
    drop(region);
    let told = Arc::new(Mutex::new(vec![]));
    let hook = Arc::clone(&told);
    rig.device.on_drop_failure(Some(Arc::new(move |failure| {
        hook.lock().unwrap().push((failure.what, failure.bytes));
    })));
    let refused = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    // The unmapping is attempted twice.
    for nth in [1, 2] {
        rig.faults.arm(nth_of(nth, refused, &[Call::MemUnmap]));
    }
    drop(registration);
    rig.faults.disarm();
    assert_eq!(*told.lock().unwrap(), [("registration", 4 * G)]);
    // The memory stays mapped: only its owner knew that no work uses it.
    assert_eq!(
        (rig.device.leaked(), rig.machine.live().mappings),
        (4 * G, 1)
    );
}
