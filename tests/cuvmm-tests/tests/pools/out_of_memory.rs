//! Every error type reports whether memory was short.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::unit_arg)]

use crate::common::{G, Rig, model_options, rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{ModelDriver, Nothing};
use cuvmm::driver::{CUresult, Call};
use cuvmm::{
    CowBuffer, DeviceVec, Error, Limit, Physical, Pool, Region, Reservation, RingBuffer,
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

#[test]
fn a_limit_that_is_reached_is_out_of_memory_and_a_mistake_is_not() {
    let rig = rig(ModelDriver::new(model_options()));
    let pool = Pool::builder(&rig.device)
        .limit(Limit::Bytes(4 * G))
        .build()
        .unwrap();
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
