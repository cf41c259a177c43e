//! The real backend over the stand-in, used from many threads at once.
//!
//! `unsafe` is allowed here to load the stand-in and to make the calls of the trait, each on
//! objects that its own thread created.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;

use cuvmm_driver::cuda::CudaDriver;
use cuvmm_driver::{
    AccessDesc, AccessFlags, DeviceAddress, Driver, Location, Ordinal, PhysicalProps, StreamFlags,
};

#[path = "../testing/built.rs"]
mod built;

const GRANULE: u64 = 2 << 20;
const DEVICE: Ordinal = Ordinal(0);

/// Runs everything from reserve to free, with a byte specific to the thread that must still be
/// there.
fn once_around(driver: &CudaDriver, byte: u8) {
    let access = AccessDesc {
        location: Location::device(DEVICE),
        flags: AccessFlags::READ_WRITE,
    };
    let base = driver
        .reserve(2 * GRANULE, 0, DeviceAddress::NULL, 0)
        .unwrap();
    let stream = driver
        .stream_create(DEVICE, StreamFlags::NON_BLOCKING)
        .unwrap();
    let handle = driver
        .create(2 * GRANULE, &PhysicalProps::device(DEVICE), 0)
        .unwrap();
    let mut seen = [0; 64];
    // SAFETY: all objects were created above and are used by this thread alone, which waits for the
    // stream before it unmaps or frees anything.
    unsafe {
        driver.map(base, 2 * GRANULE, 0, handle, 0).unwrap();
        driver.set_access(base, 2 * GRANULE, &[access]).unwrap();
        driver.fill_async(DEVICE, base, byte, 64, stream).unwrap();
        driver.stream_synchronize(DEVICE, stream).unwrap();
        driver.copy_to_host(DEVICE, &mut seen, base).unwrap();
        driver.unmap(base, 2 * GRANULE).unwrap();
        driver.release(handle).unwrap();
        driver.free_reservation(base, 2 * GRANULE).unwrap();
        driver.stream_destroy(DEVICE, stream).unwrap();
    }
    assert_eq!(seen, [byte; 64]);
}

#[test]
fn eight_threads_do_not_meet() {
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    // SAFETY: the stand-in was just built from this workspace.
    let driver = unsafe { CudaDriver::open_library(library) }.unwrap();
    let before = driver.memory_info(DEVICE).unwrap();
    thread::scope(|scope| {
        for byte in 1..=8 {
            let driver = &driver;
            scope.spawn(move || {
                for _ in 0..50 {
                    once_around(driver, byte);
                }
            });
        }
    });
    assert_eq!(driver.memory_info(DEVICE).unwrap(), before);
}
