//! The wrapper that fails, delays and records calls.
//!
//! `unsafe` because the driver's methods are.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::model_support::*;
use cuvmm_driver::fault::{Fault, FaultDriver};
use cuvmm_driver::{CUresult, Call, DeviceMemory, Driver, DriverKind, PhysicalProps};
use cuvmm_model::model::{ModelDriver, ModelOptions};

fn wrapped() -> (Arc<ModelDriver>, FaultDriver) {
    let inner = Arc::new(model(ModelOptions::new()));
    let outer = FaultDriver::new(Arc::clone(&inner) as Arc<dyn Driver>);
    (inner, outer)
}

/// Makes one page usable, and undoes what was done if a step fails.
fn commit(d: &dyn Driver) -> cuvmm_driver::Result<()> {
    unsafe {
        let va = d.reserve(PAGE, 0, ANYWHERE, 0)?;
        let undo_reserve = |error| {
            let _ = d.free_reservation(va, PAGE);
            error
        };
        let handle = d
            .create(PAGE, &PhysicalProps::device(D0), 0)
            .map_err(undo_reserve)?;
        let undo_create = |error| {
            let _ = d.release(handle);
            undo_reserve(error)
        };
        d.map(va, PAGE, 0, handle, 0).map_err(undo_create)?;
        d.set_access(va, PAGE, &[rw(D0)]).map_err(|error| {
            let _ = d.unmap(va, PAGE);
            undo_create(error)
        })
    }
}

const STEPS: [Call; 4] = [
    Call::MemAddressReserve,
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
];

#[test]
fn every_call_failed_once() {
    for step in 0..4 {
        let (inner, d) = wrapped();
        d.arm(Fault::nth(step + 1, OUT_OF_MEMORY));
        let error = commit(&d).unwrap_err();
        assert_eq!(
            (error.call(), error.code()),
            (STEPS[step as usize], Some(OUT_OF_MEMORY))
        );
        assert!(inner.live().is_nothing(), "step {step}");
        assert_eq!(d.injected(), 1);
        assert_eq!(d.calls()[..=step as usize], STEPS[..=step as usize]);
        assert!(commit(&d).is_ok(), "once only");
    }
}

#[test]
fn a_roll_back_that_fails_too() {
    let (inner, d) = wrapped();
    d.arm(Fault::nth(4, OUT_OF_MEMORY));
    d.arm(Fault::from(5, UNKNOWN).only(&[Call::MemUnmap, Call::MemAddressFree]));
    assert_eq!(commit(&d).unwrap_err().code(), Some(OUT_OF_MEMORY));
    let live = inner.live();
    assert_eq!(
        (live.reservations, live.mappings, live.references),
        (1, 1, 0)
    );
    assert_eq!(d.injected(), 3);
    d.disarm();
    assert!(commit(&d).is_ok());
    assert_eq!(d.injected(), 3, "the record stays");
}

#[test]
fn kinds_counts_and_order() {
    let (inner, d) = wrapped();
    assert_eq!(d.kind(), DriverKind::Model);
    assert_eq!(d.device_memory(), DeviceMemory::Nothing);
    assert_eq!(d.total(), 0, "asking for the kind is no call");
    d.arm(Fault::nth(2, UNKNOWN).of(Call::MemGetInfo));
    d.arm(
        Fault::all(INVALID_VALUE)
            .of(Call::DeviceGetName)
            .of(Call::DeviceGetUuid),
    );
    d.arm(Fault::from(3, OUT_OF_MEMORY).of(Call::MemAddressReserve));
    assert_eq!(
        [(); 3].map(|()| code(d.memory_info(D0))),
        [SUCCESS, UNKNOWN, SUCCESS]
    );
    assert_eq!(code(d.device_name(D0)), INVALID_VALUE);
    assert_eq!(code(d.device_uuid(D0)), INVALID_VALUE);
    let reserved = [(); 4].map(|()| code(d.reserve(PAGE, 0, ANYWHERE, 0)));
    assert_eq!(reserved, [SUCCESS, SUCCESS, OUT_OF_MEMORY, OUT_OF_MEMORY]);
    assert_eq!(
        inner.live().reservations,
        2,
        "a failed call is not passed on"
    );
    assert_eq!(
        (d.count(Call::MemGetInfo), d.total(), d.injected()),
        (3, 9, 5)
    );
    d.forget();
    assert_eq!((d.calls().len(), d.total(), d.injected()), (0, 0, 0));
    assert_eq!(
        code(d.reserve(PAGE, 0, ANYWHERE, 0)),
        OUT_OF_MEMORY,
        "armed all the same"
    );
}

#[test]
fn counting_begins_when_armed_and_the_first_armed_wins() {
    let (_, d) = wrapped();
    let _ = d.memory_info(D0);
    d.arm(Fault::nth(1, UNKNOWN));
    d.arm(Fault::nth(1, INVALID_VALUE));
    d.arm(Fault::nth(0, OUT_OF_MEMORY));
    assert_eq!(code(d.memory_info(D0)), UNKNOWN);
    assert_eq!(code(d.memory_info(D0)), SUCCESS);
    assert_eq!(d.injected(), 1);
}

#[test]
fn delays_take_real_time() {
    let (_, d) = wrapped();
    let timed = || {
        let start = Instant::now();
        assert_eq!(code(d.memory_info(D0)), SUCCESS);
        start.elapsed()
    };
    d.arm(Fault::delay_nth(2, Duration::from_millis(20)));
    assert_eq!(code(d.memory_info(D0)), SUCCESS);
    assert!(timed() >= Duration::from_millis(20), "the second");
    d.disarm();
    d.arm(Fault::delay_all(Duration::from_micros(150)));
    assert!(timed() >= Duration::from_micros(150));
    d.arm(Fault::delay_all(Duration::from_millis(5)));
    d.arm(Fault::delay_all(Duration::from_millis(5)));
    assert!(timed() >= Duration::from_millis(10), "delays add up");
}

#[test]
fn all_is_passed_on() {
    let (inner, d) = wrapped();
    assert_eq!(d.device_uuid(D1), inner.device_uuid(D1));
    assert_eq!(d.version(), inner.version());
    assert_eq!(d.inner().kind(), DriverKind::Model);
    inner.lose_context(D0, CUresult::CUDA_ERROR_ASSERT);
    assert_eq!(code(d.context_synchronize(D0)), CUresult::CUDA_ERROR_ASSERT);
    assert_eq!(d.injected(), 0, "the driver's own failures are not counted");
    assert!(format!("{d:?}").contains("model"));
}
