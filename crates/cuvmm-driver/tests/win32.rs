//! Win32 handles of exported memory, on a stand-in for `nvcuda.dll` that `cargo xtask windows` places in
//! the system's folder. Memory is an event there, which an import sets.
//!
//! `unsafe` is allowed here because the driver's methods and the system's calls are unsafe.
#![cfg(windows)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

use std::os::windows::io::{AsRawHandle as _, OwnedHandle};

use cuvmm_driver::cuda::CudaDriver;
use cuvmm_driver::{
    CUresult, DeviceAddress, Driver, Exported, GranularityKind, HandleTypes, MemPoolProps, Ordinal,
    PhysicalHandle, PhysicalProps,
};
use windows_sys::Win32::Foundation::{GetHandleInformation, HANDLE_FLAG_INHERIT, WAIT_OBJECT_0};
use windows_sys::Win32::System::Threading::WaitForSingleObject;

const DEVICE: Ordinal = Ordinal(0);
const SIZE: u64 = 2 << 20;

/// Opens the stand-in by the library's name; `None` outside `cargo xtask windows`.
fn stand_in(test: &str) -> Option<CudaDriver> {
    if std::env::var_os("CUVMM_TEST_NVCUDA").is_none() {
        println!("DID NOT RUN: {test} needs the stand-in of `cargo xtask windows`");
        return None;
    }
    Some(CudaDriver::open().unwrap())
}

fn shareable() -> PhysicalProps {
    PhysicalProps {
        handle_types: HandleTypes::WIN32,
        ..PhysicalProps::device(DEVICE)
    }
}

fn exported(driver: &CudaDriver, physical: PhysicalHandle) -> OwnedHandle {
    // SAFETY: the handle has been created and not released.
    let exported = unsafe { driver.export(physical, HandleTypes::WIN32, 0) }.unwrap();
    let Exported::Win32(handle) = exported else {
        panic!("{exported:?}");
    };
    handle
}

/// Tells if an import has set the event.
fn was_imported(handle: &OwnedHandle) -> bool {
    // SAFETY: the handle is open.
    unsafe { WaitForSingleObject(handle.as_raw_handle(), 0) == WAIT_OBJECT_0 }
}

#[test]
fn the_library_is_found_by_its_name() {
    let Some(driver) = stand_in("the_library_is_found_by_its_name") else {
        return;
    };
    assert_eq!(driver.api().library().to_str(), Some("nvcuda.dll"));
    assert_eq!(driver.device_count(), Ok(1));
}

#[test]
fn memory_that_is_shareable_has_security_attributes_and_other_memory_none() {
    let test = "memory_that_is_shareable_has_security_attributes_and_other_memory_none";
    let Some(driver) = stand_in(test) else {
        return;
    };
    // The stand-in refuses wrong attributes: missing ones, ones for other memory, and any for everyone.
    for props in [shareable(), PhysicalProps::device(DEVICE)] {
        let granule = driver.allocation_granularity(&props, GranularityKind::MINIMUM);
        assert_eq!(granule, Ok(SIZE));
        let physical = driver.create(SIZE, &props, 0).unwrap();
        // SAFETY: the handle is released once.
        unsafe { driver.release(physical) }.unwrap();
    }
    for handle_types in [HandleTypes::WIN32, HandleTypes::empty()] {
        let props = MemPoolProps {
            handle_types,
            ..MemPoolProps::device(DEVICE)
        };
        assert!(driver.mem_pool_create(DEVICE, &props).is_ok());
    }
}

#[test]
fn a_handle_is_exported_and_imported_by_value() {
    let Some(driver) = stand_in("a_handle_is_exported_and_imported_by_value") else {
        return;
    };
    let [one, other] = [(); 2].map(|()| driver.create(SIZE, &shareable(), 0).unwrap());
    let [handle, bystander] = [one, other].map(|physical| exported(&driver, physical));
    let mut flags = u32::MAX;
    // SAFETY: the handle is open, and the result is written to a local.
    unsafe { GetHandleInformation(handle.as_raw_handle(), &mut flags) };
    assert_eq!(flags & HANDLE_FLAG_INHERIT, 0, "child processes inherit it");

    let again = exported(&driver, one);
    let given = Exported::from(again);
    // SAFETY: the handles are open during the calls, and each physical is released once.
    unsafe {
        let imported = driver
            .import(given.as_source(), HandleTypes::WIN32)
            .unwrap();
        drop(given);
        assert!(was_imported(&handle) && !was_imported(&bystander));
        for physical in [imported, one, other] {
            driver.release(physical).unwrap();
        }
    }
    assert!(was_imported(&handle), "the handle keeps the object");
}

#[test]
fn handles_that_nothing_closes_are_refused_with_the_call() {
    let Some(driver) = stand_in("handles_that_nothing_closes_are_refused_with_the_call") else {
        return;
    };
    let not_supported = Some(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let physical = driver.create(SIZE, &shareable(), 0).unwrap();
    // SAFETY: the physical is released once, and the stand-in maps nothing.
    unsafe {
        let exported = driver.export(physical, HandleTypes::WIN32_KMT, 0);
        assert_eq!(exported.unwrap_err().code(), not_supported);
        let buffer = driver.dma_buf(DEVICE, DeviceAddress(SIZE), SIZE);
        assert_eq!(buffer.unwrap_err().code(), not_supported);
        driver.release(physical).unwrap();
    }
}
