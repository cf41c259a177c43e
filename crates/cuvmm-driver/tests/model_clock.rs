//! The virtual clock: what calls cost, and that nothing else does.
//!
//! `unsafe` because the calls are.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::time::Duration;

use cuvmm_driver::model::{Backing, Costs, Curve, Machine, ModelDriver, ModelOptions};
use cuvmm_driver::{Driver, PhysicalProps};
use model_support::*;

/// Virtual microseconds that something takes.
fn cost<B: Backing>(d: &Machine<B>, act: impl FnOnce()) -> f64 {
    let before = d.clock();
    act();
    (d.clock() - before).as_secs_f64() * 1e6
}

#[track_caller]
fn near(measured: f64, expected: f64) {
    assert!(
        (measured - expected).abs() <= expected * 0.35,
        "{measured} us, not {expected}"
    );
}

/// Makes, maps, opens and takes away 8 GiB in pieces; the costs of set_access and of all.
fn eight_gib(piece: u64) -> (f64, f64) {
    let d = ModelDriver::default();
    let (whole, pieces) = (8 * GIB, 8 * GIB / piece);
    let va = d.reserve(whole, 0, ANYWHERE, 0).unwrap();
    let mut access = 0.0;
    let all = cost(&d, || {
        let handles: Vec<_> = (0..pieces)
            .map(|_| d.create(piece, &PhysicalProps::device(D0), 0).unwrap())
            .collect();
        unsafe {
            for (&handle, index) in handles.iter().zip(0..) {
                d.map(at(va, index * piece), piece, 0, handle, 0).unwrap();
            }
            access = cost(&d, || d.set_access(va, whole, &[rw(D0)]).unwrap());
            d.unmap(va, whole).unwrap();
            for handle in handles {
                d.release(handle).unwrap();
            }
        }
    });
    (access, all)
}

#[test]
fn the_measured_tables_come_out() {
    let (access, all) = eight_gib(PAGE);
    near(access, 94_969.0);
    near(all, 38_750.0 + 4_137.0 + 94_969.0 + 67_795.0 + 40_841.0);
    near(eight_gib(128 * MIB).0, 1_510.0);
    near(eight_gib(512 * MIB).0, 596.0);
    assert!(
        all > 25.0 * eight_gib(512 * MIB).1,
        "fewer, larger mappings are the lever"
    );
}

#[test]
fn what_was_released_lately_is_cheap_to_create() {
    let d = ModelDriver::default();
    let create = |size| {
        let mut handle = None;
        let took = cost(&d, || {
            handle = d.create(size, &PhysicalProps::device(D0), 0).ok()
        });
        (took, handle.unwrap())
    };
    let release = |handle| unsafe { d.release(handle) }.unwrap();
    let (cold, handle) = create(8 * GIB);
    near(cold, 2_400.0);
    release(handle);
    let (warm, handle) = create(8 * GIB);
    near(warm, 43.0);
    let (other, second) = create(8 * GIB);
    near(other, 2_400.0);
    release(handle);
    release(second);
    near(create(GIB).0, 380.0);
    d.advance(Duration::from_millis(299));
    let (still_warm, handle) = create(8 * GIB);
    near(still_warm, 43.0);
    release(handle);
    d.advance(Duration::from_millis(300));
    near(create(8 * GIB).0, 2_400.0);
}

#[test]
fn peers_are_dear() {
    let d = model(ModelOptions::new());
    let r = range(&d, 1, 1);
    near(
        cost(&d, || {
            unsafe { d.set_access(r.at, PAGE, &[rw(D0)]) }.unwrap()
        }),
        23.0,
    );
    near(
        cost(&d, || {
            unsafe { d.set_access(r.at, PAGE, &[rw(D0), rw(D1)]) }.unwrap()
        }),
        861.0,
    );
    near(
        cost(&d, || {
            unsafe { d.set_access(r.at, PAGE, &[none(D1)]) }.unwrap()
        }),
        23.0,
    );
}

#[test]
fn a_call_that_fails_is_not_charged_by_size() {
    let d = model(ModelOptions::new());
    let r = range(&d, 1, 1);
    let took = cost(&d, || unsafe {
        assert_eq!(code(d.map(r.at, PAGE, 0, r.handles[0], 0)), INVALID_VALUE);
        assert_eq!(
            code(d.create(1 << 40, &PhysicalProps::device(D0), 0)),
            OUT_OF_MEMORY
        );
        assert_eq!(code(d.set_access(r.at, 0, &[])), INVALID_VALUE);
    });
    assert!(took < 0.001, "{took}");
}

#[test]
fn costs_can_be_told() {
    let mut costs = Costs::free_of_charge();
    costs.map = Curve::flat(5.0);
    let d = ModelDriver::new(ModelOptions::new().costs(costs));
    let r = range(&d, 3, 3);
    assert_eq!(d.clock(), Duration::from_micros(15));
    d.advance(Duration::from_secs(1));
    r.end(&d);
    assert_eq!(d.clock(), Duration::from_micros(1_000_015));
    let other = ModelDriver::default();
    let _ = other.memory_info(D0);
    assert_eq!(
        other.clock(),
        Duration::from_micros(3),
        "a clock for each driver"
    );
}
