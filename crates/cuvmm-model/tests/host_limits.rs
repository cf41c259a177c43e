//! The system's limit on memory areas. There is one test only, because it uses all areas.
//!
//! `unsafe` because the driver's methods are.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::fs;

use cuvmm_driver::{CUresult, Driver};
use cuvmm_model::host::HostOptions;
use model_support::*;

fn areas() -> usize {
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn running_out_of_areas_changes_nothing() {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: u64 = limit.trim().parse().unwrap();
    if limit > 1 << 20 {
        eprintln!("NOT RUN: this system has {limit} areas a process, too many to use up");
        return;
    }
    let d = host(HostOptions::new());
    let handle = page(&d);
    let size = 2 * (limit + 10) * PAGE;
    let va = d.reserve(size, 0, ANYWHERE, 0).unwrap();

    // With a hole after each, every mapping takes two areas.
    let mut mapped = 0;
    let refused = loop {
        let here = at(va, 2 * mapped * PAGE);
        match unsafe { d.map(here, PAGE, 0, handle, 0) } {
            Ok(()) => mapped += 1,
            Err(error) => break error.code(),
        }
        assert!(mapped <= limit, "the limit never came");
    };
    assert_eq!(refused, Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert!(mapped > limit / 2 - 2_500, "{mapped} mappings with holes");
    assert!(
        areas() < limit as usize - 1_000,
        "some are left for the rest of the process"
    );
    let before = d.snapshot();
    let areas_before = areas();
    for _ in 0..3 {
        let here = at(va, 2 * mapped * PAGE);
        assert_eq!(
            code(unsafe { d.map(here, PAGE, 0, handle, 0) }),
            OUT_OF_MEMORY
        );
    }
    assert_eq!(d.snapshot(), before);
    assert_eq!(areas(), areas_before);
    drop(std::thread::spawn(|| vec![1_u8; 32 << 20]).join().unwrap());

    unsafe {
        // Changing access and unmapping need no areas. Holes that close free areas.
        for index in 0..mapped {
            d.set_access(at(va, 2 * index * PAGE), PAGE, &[rw(D0)])
                .unwrap();
        }
        d.fill(D0, at(va, 2 * (mapped - 1) * PAGE), 3, PAGE)
            .unwrap();
        assert_eq!(first_byte(&d, va), 3, "all are the one physical");
        for index in (0..mapped).step_by(2) {
            d.unmap(at(va, 2 * index * PAGE), PAGE).unwrap();
        }
        assert_eq!(d.live().mappings as u64, mapped / 2);
        d.unmap(va, size).unwrap();

        // Adjacent mappings take one area each.
        let mut mapped = 0;
        while d.map(at(va, mapped * PAGE), PAGE, 0, handle, 0).is_ok() {
            mapped += 1;
        }
        assert!(mapped > limit - 4_000, "{mapped} mappings side by side");
        d.unmap(va, size).unwrap();
        d.map(va, PAGE, 0, handle, 0).unwrap();
        d.unmap(va, PAGE).unwrap();
        d.free_reservation(va, size).unwrap();
        d.release(handle).unwrap();
    }
    assert!(d.live().is_nothing());

    // Reservations share the system's areas by the thousands.
    let before = areas();
    let reservations: Vec<_> = (0..2 * limit)
        .map(|_| d.reserve(PAGE, 0, ANYWHERE, 0).unwrap())
        .collect();
    assert!(areas() < before + 10, "{} areas", areas());
    for address in reservations {
        unsafe { d.free_reservation(address, PAGE) }.unwrap();
    }
    assert!(d.live().is_nothing());
}
