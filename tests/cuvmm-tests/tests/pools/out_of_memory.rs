//! Every error type reports whether memory was short.
#![allow(clippy::unit_arg)]

use crate::common::{self, G, Rig, model_options, rig};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{ModelDriver, Nothing};
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{
    CowBuffer, DeviceVec, Error, Physical, Place, Pool, Region, Reservation, RingBuffer,
    SparseArray, Stream, UnifiedBuffer,
};

type Operation = fn(&Rig<Nothing>) -> Result<(), Error>;

/// Operations that take memory, mappings or addresses, with the call that is refused.
const OPERATIONS: [(Call, Operation); 11] = [
    (Call::MemAddressReserve, |rig| {
        Ok(drop(Reservation::new(&rig.device, G)?))
    }),
    (Call::MemAddressReserve, |rig| {
        Ok(drop(Region::reserve(&rig.device, G)?))
    }),
    (Call::MemCreate, |rig| {
        Ok(drop(Physical::new(&rig.device, G)?))
    }),
    (Call::MemMap, commit),
    (Call::MemSetAccess, commit),
    (Call::MemCreate, commit),
    (Call::MemCreate, |rig| {
        let stream = Stream::new(&rig.device)?;
        let mut vec = DeviceVec::<u32>::new(&rig.device, &stream, 1 << 20)?;
        Ok(vec.extend_from_slice(&[7; 3])?)
    }),
    (Call::MemCreate, |rig| {
        let stream = Stream::new(&rig.device)?;
        let mut array = SparseArray::<u32>::new(&rig.device, &stream, 1 << 20)?;
        array.commit(0..1)?;
        Ok(())
    }),
    (Call::MemCreate, |rig| {
        let stream = Stream::new(&rig.device)?;
        Ok(drop(RingBuffer::<u32>::new(&rig.device, &stream, 8)?))
    }),
    (Call::MemCreate, |rig| {
        let stream = Stream::new(&rig.device)?;
        Ok(drop(CowBuffer::<u32>::zeroed(&rig.device, &stream, 8)?))
    }),
    (Call::MemAllocManaged, |rig| {
        let stream = Stream::new(&rig.device)?;
        Ok(drop(UnifiedBuffer::<u32>::zeroed(&rig.device, &stream, 8)?))
    }),
];

fn commit(rig: &Rig<Nothing>) -> Result<(), Error> {
    let mut region = Region::reserve(&rig.device, 8 * G)?;
    Ok(region.commit(0..G)?)
}

#[test]
fn a_driver_that_has_no_more_is_out_of_memory_at_every_layer() {
    let rig = rig(ModelDriver::new(model_options()));
    for (index, (call, operation)) in OPERATIONS.into_iter().enumerate() {
        for (code, short) in [
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, true),
            (CUresult::CUDA_ERROR_INVALID_VALUE, false),
        ] {
            rig.faults.arm(Fault::all(code).of(call));
            let error = operation(&rig).unwrap_err();
            rig.faults.disarm();
            assert_eq!(
                error.is_out_of_memory(),
                short,
                "{index}, {call:?}: {error}"
            );
        }
        operation(&rig).unwrap();
    }
}

on_both! {
    fn the_option_of_the_host_drivers_memory_is_named_where_that_is_the_limit(rig) {
        let named = |error: &dyn std::fmt::Display| {
            error.to_string().contains("`HostOptions::capacity` sets the device's memory")
        };
        let of_host = rig.keeps_bytes();
        let total = rig.device.total_memory();
        let free = || rig.device.memory_info().unwrap().free;
        // By default a pool leaves some of the device's memory free.
        let (pool, tenant) = common::with_tenant(Pool::builder(&rig.device).build().unwrap());
        let refused = tenant.try_allocate(total).unwrap_err();
        assert_eq!((named(&refused), refused.shortage().unwrap().limit < total), (of_host, true));
        assert_eq!(named(refused.shortage().unwrap()), of_host);
        let refused = pool.tenant("b").guarantee(total).register().unwrap_err();
        assert_eq!(named(&refused), of_host, "{refused}");
        // A tenant that has reached its own limit would get nothing from a larger device.
        let limited = pool.tenant("limited").limit(4 * G).register().unwrap();
        let refused = limited.try_allocate(5 * G).unwrap_err();
        assert!(!named(&refused) && !named(refused.shortage().unwrap()), "{refused}");
        let most = pool.stats().limit;
        let wide = pool.tenant("wide").limit(most).register().unwrap();
        let held = tenant.try_allocate(most - 2 * G).unwrap();
        assert_eq!(named(&wide.try_allocate(3 * G).unwrap_err()), of_host);
        assert_eq!(named(&limited.try_allocate(3 * G).unwrap_err()), of_host);
        drop((held, limited, wide, tenant));
        pool.close().unwrap();
        // A limit of bytes is another option's.
        let (small, one) = common::tenancy(rig, 4);
        let refused = one.try_allocate(5 * G).unwrap_err();
        assert!(!named(&refused), "{refused}");
        assert!(!named(&small.tenant("b").guarantee(5 * G).register().unwrap_err()));
        // What the driver lacks below it is the device's.
        let _region = common::region(rig, total, total - 2 * G);
        let refused = one.try_allocate(4 * G).unwrap_err();
        assert!(matches!(refused, cuvmm::BlockError::DriverOutOfMemory { .. }), "{refused}");
        assert_eq!(named(&refused), of_host, "{refused}");
        assert_eq!(free(), 2 * G);
    }

    fn a_region_that_finds_no_memory_for_copies_says_how_much(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let total = rig.device.total_memory();
        let mut region = common::committed(Region::builder(&rig.device, 8 * G).largest_extent(2 * G), 8 * G);
        let fork = region.fork(&[]).unwrap();
        let mut rest = common::region(rig, total, total - 12 * G);
        let figures = |refused: MemoryError| {
            let MemoryError::OutOfMemory { ref shortage, .. } = refused else {
                panic!("{refused:?}");
            };
            assert!(refused.is_out_of_memory() && refused.call().is_some());
            assert_eq!(shortage.limit, total);
            let it = refused.shortage().unwrap();
            [it.wanted, it.available, it.tenant_held].map(|bytes| bytes / G)
        };
        // Of all copies, not of one extent.
        let refused = region.unshare(0..8 * G, &stream, &[]).unwrap_err();
        assert_eq!(figures(refused), [8, 4, 8]);
        drop(fork);
        let host = Place::HostNuma(0);
        region.relocate(0..8 * G, &host, &stream).unwrap();
        rest.commit(0..total - 6 * G).unwrap();
        let back = region.relocate(0..8 * G, &Place::from(&rig.device), &stream).unwrap_err();
        assert_eq!(figures(back), [8, 6, 8]);
        // The memory of another device has its own figures, and the host has none.
        let second = rig.second();
        let mut beside = Region::reserve(&second, 2 * total).unwrap();
        let refused = beside.commit(0..2 * total).unwrap_err();
        assert_eq!(figures(refused), [2 * total / G, total / G, 0]);
    }
}

#[test]
fn a_limit_that_is_reached_is_out_of_memory_and_a_mistake_is_not() {
    let rig = rig(ModelDriver::new(model_options()));
    let pool = common::pool(&rig, 4);
    let tenant = pool.tenant("one").register().unwrap();
    let short = tenant.allocate(5 * G).unwrap_err();
    assert!(short.is_shortage() && short.is_out_of_memory(), "{short}");
    assert!(Error::from(short).is_out_of_memory());
    let mistake = tenant.allocate(0).unwrap_err();
    assert!(!mistake.is_out_of_memory(), "{mistake}");

    let builder = Region::builder(&rig.device, 8 * G)
        .largest_extent(G)
        .mapping_limit(2);
    let mut region = builder.reserve().unwrap();
    let short = region.commit(0..3 * G).unwrap_err();
    assert!(short.is_out_of_memory(), "{short}");
    let mistake = region.commit(0..1).unwrap_err();
    assert!(!mistake.is_out_of_memory(), "{mistake}");
}
