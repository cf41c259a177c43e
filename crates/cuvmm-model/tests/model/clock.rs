//! The virtual clock: calls advance it by their costs, and nothing else does.
//!
//! `unsafe` because the driver's methods are.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use crate::model_support::*;
use cuvmm_driver::{
    AccessDesc, Call, Driver, EventFlags, PhysicalHandle, PhysicalProps, StreamFlags,
};
use cuvmm_model::model::{Backing, Costs, Curve, Machine, ModelDriver, ModelOptions};

/// Returns the virtual microseconds that `act` takes.
fn cost<B: Backing>(d: &Machine<B>, act: impl FnOnce()) -> f64 {
    let before = d.clock();
    act();
    (d.clock() - before).as_secs_f64() * 1e6
}

#[track_caller]
fn near(measured: f64, expected: f64) {
    assert!(
        (measured - expected).abs() <= 0.01 + expected * 1e-6,
        "{measured} us, not {expected}"
    );
}

/// Returns a table of a few round figures, so that the expected values do not depend on
/// measurements.
fn costs() -> Costs {
    let mut costs = Costs::free_of_charge();
    costs.reserve = Curve::flat(1.0);
    costs.create_warm = Curve::new(&[(2.0, 10.0), (8192.0, 50.0)]);
    costs.create_cold = Curve::new(&[(2.0, 20.0), (8192.0, 2_000.0)]);
    costs.release = Curve::new(&[(2.0, 5.0), (8192.0, 4_000.0)]);
    costs.map = Curve::flat(2.0);
    costs.unmap = Curve::new(&[(2.0, 15.0), (512.0, 20.0)]);
    costs.set_access = Curve::new(&[(2.0, 25.0), (512.0, 40.0)]);
    costs.set_access_cold = Curve::new(&[(2.0, 30.0), (512.0, 60.0)]);
    costs.set_access_peer = Curve::flat(800.0);
    costs
}

fn with(costs: Costs) -> ModelDriver {
    ModelDriver::new(ModelOptions::new().costs(costs))
}

fn create(d: &ModelDriver, size: u64) -> (f64, PhysicalHandle) {
    let mut handle = None;
    let took = cost(d, || {
        handle = d.create(size, &PhysicalProps::device(D0), 0).ok()
    });
    (took, handle.unwrap())
}

fn release(d: &ModelDriver, handle: PhysicalHandle) -> f64 {
    cost(d, || unsafe { d.release(handle) }.unwrap())
}

/// Creates, maps, opens and removes 8 GiB in pieces, and returns the costs of `set_access` and of
/// all calls.
fn eight_gib(costs: Costs, piece: u64) -> (f64, f64) {
    let d = with(costs);
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
fn every_mapping_is_charged_by_its_size() {
    let (access, all) = eight_gib(costs(), PAGE);
    near(access, 4_096.0 * 30.0);
    near(all, 4_096.0 * (20.0 + 2.0 + 30.0 + 15.0 + 5.0));
    let (access, all) = eight_gib(costs(), 512 * MIB);
    near(access, 16.0 * 60.0);
    let size = 512 * MIB;
    let (create, release) = (costs().create_cold.at(size), costs().release.at(size));
    near(all, 16.0 * (create + 2.0 + 60.0 + 20.0 + release));
}

#[test]
fn fewer_larger_mappings_are_the_lever_that_was_measured() {
    let (pages, large) = (
        eight_gib(Costs::default(), PAGE),
        eight_gib(Costs::default(), 512 * MIB),
    );
    assert!(pages.0 > 100.0 * large.0, "{pages:?} {large:?}");
    assert!(pages.1 > 25.0 * large.1, "{pages:?} {large:?}");
}

#[test]
fn what_was_released_lately_is_cheap_to_create() {
    let d = with(costs());
    let (cold, handle) = create(&d, 8 * GIB);
    near(cold, 2_000.0);
    near(release(&d, handle), 4_000.0);
    let (warm, handle) = create(&d, 8 * GIB);
    near(warm, 50.0);
    let (other, second) = create(&d, 8 * GIB);
    near(other, 2_000.0);
    release(&d, handle);
    release(&d, second);
    near(create(&d, GIB).0, costs().create_cold.at(GIB));
    d.advance(Duration::from_millis(299));
    let (still_warm, handle) = create(&d, 8 * GIB);
    near(still_warm, 50.0);
    release(&d, handle);
    d.advance(Duration::from_millis(300));
    near(create(&d, 8 * GIB).0, 2_000.0);
}

#[test]
fn a_create_waits_for_what_was_released_before_it() {
    let mut costs = costs();
    costs.busy = Curve::new(&[(1_024.0, 0.0), (2_048.0, 6_000.0), (4_096.0, 7_000.0)]);
    let d = with(costs);
    let many = |count: usize| (0..count).map(|_| create(&d, GIB).1).collect::<Vec<_>>();
    let warm = Curve::new(&[(2.0, 10.0), (8192.0, 50.0)]).at(GIB);
    for handle in many(1) {
        release(&d, handle);
    }
    let (one, handle) = create(&d, GIB);
    near(one, warm);
    let handles = [many(1), vec![handle]].concat();
    for handle in handles {
        release(&d, handle);
    }
    // The memory of the first create is available, that of the second is not yet.
    near(create(&d, GIB).0, warm);
    let (next, handle) = create(&d, GIB);
    near(next, 6_000.0);
    release(&d, handle);
    // Releases are consecutive if no create is between them; time that passes counts.
    let handles = many(4);
    for handle in handles {
        release(&d, handle);
    }
    d.advance(Duration::from_micros(2_500));
    let four: f64 = (0..4).map(|_| create(&d, GIB).0).sum();
    near(four, 7_000.0 - 2_500.0 + warm);
    for handle in many(2) {
        release(&d, handle);
    }
    d.advance(Duration::from_millis(300));
    let (cold, handle) = create(&d, PAGE);
    near(cold, 20.0);
    release(&d, handle);
    near(create(&d, PAGE).0, 10.0);
}

#[test]
fn memory_is_opened_cold_once() {
    let d = with(costs());
    let va = d.reserve(2 * PAGE, 0, ANYWHERE, 0).unwrap();
    let handle = page(&d);
    unsafe {
        d.map(va, PAGE, 0, handle, 0).unwrap();
        d.map(at(va, PAGE), PAGE, 0, handle, 0).unwrap();
    }
    let set = |place, access| {
        cost(&d, || {
            unsafe { d.set_access(place, PAGE, &[access]) }.unwrap()
        })
    };
    near(set(va, none(D0)), 25.0);
    near(set(va, rw(D0)), 30.0);
    near(set(va, rw(D0)), 25.0);
    near(set(at(va, PAGE), rw(D0)), 25.0);
    // Memory that was created warm costs the warm price at its first access.
    unsafe {
        d.unmap(va, 2 * PAGE).unwrap();
        d.release(handle).unwrap();
        let handle = page(&d);
        d.map(va, PAGE, 0, handle, 0).unwrap();
    }
    near(set(va, rw(D0)), 25.0);
}

#[test]
fn peers_are_dear() {
    let d = model(ModelOptions::new().costs(costs()));
    let r = range(&d, 1, 1);
    let set =
        |access: &[AccessDesc]| cost(&d, || unsafe { d.set_access(r.at, PAGE, access) }.unwrap());
    near(set(&[rw(D0)]), 25.0);
    near(set(&[rw(D0), rw(D1)]), 825.0);
    near(set(&[none(D1)]), 25.0);
}

#[test]
fn who_waits_for_work_spends_its_time() {
    let mut costs = Costs::free_of_charge();
    costs.launch = 3.0;
    costs.fill = Curve::flat(100.0);
    costs.device_copy = Curve::flat(40.0);
    costs.host_copy = Curve::flat(500.0);
    let d = with(costs);
    let r = range(&d, 2, 2);
    let streams = [0; 2].map(|_| d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap());
    let [first, second] = streams;
    let second_page = at(r.at, PAGE);
    unsafe {
        near(
            cost(&d, || d.fill_async(D0, r.at, 1, PAGE, first).unwrap()),
            3.0,
        );
        near(
            cost(&d, || {
                d.copy_on_device_async(D0, second_page, r.at, PAGE, first)
                    .unwrap()
            }),
            3.0,
        );
        assert_eq!(
            d.stream_query(D0, first),
            Ok(true),
            "a query does not look at the time"
        );
        // The fill began at once and the copy after it; three microseconds of it have passed.
        near(
            cost(&d, || d.stream_synchronize(D0, first).unwrap()),
            140.0 - 3.0,
        );
        near(cost(&d, || d.stream_synchronize(D0, first).unwrap()), 0.0);

        // An event carries the time to another stream, and to a call that waits for the event.
        let event = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
        d.fill_async(D0, r.at, 2, PAGE, first).unwrap();
        d.event_record(D0, event, first).unwrap();
        d.stream_wait_event(D0, second, event).unwrap();
        d.fill_async(D0, second_page, 2, PAGE, second).unwrap();
        near(
            cost(&d, || d.event_synchronize(D0, event).unwrap()),
            100.0 - 3.0,
        );
        near(cost(&d, || d.context_synchronize(D0).unwrap()), 100.0);

        let mut bytes = [0; 64];
        near(
            cost(&d, || d.copy_to_host(D0, &mut bytes, r.at).unwrap()),
            500.0,
        );
        d.event_destroy(D0, event).unwrap();
        for stream in streams {
            d.stream_destroy(D0, stream).unwrap();
        }
    }
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
    assert_eq!(d.spent(Call::MemMap), Duration::from_micros(15));
    assert_eq!(d.spent(Call::MemCreate), Duration::ZERO);
    d.advance(Duration::from_secs(1));
    r.end(&d);
    assert_eq!(d.clock(), Duration::from_micros(1_000_015));
    let other = ModelDriver::default();
    let _ = other.memory_info(D0);
    let memory_info = Duration::try_from_secs_f64(Costs::default().memory_info / 1e6);
    assert_eq!(Ok(other.clock()), memory_info, "a clock for each driver");
}
