//! The library on a GPU, without PyTorch: contents, streams, figures, and what goes back to the
//! driver. `python/tests/gpu.py` checks it with PyTorch.
//!
//! `unsafe` is used to call the library's functions, and to fill and read what they allocate.
#![allow(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::ffi::c_void;
use std::io::Write as _;
use std::ptr::null_mut;
use std::sync::Arc;

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::{DeviceAddress, StreamHandle};
use cuvmm::{Device, Stream};
use cuvmm_torch::{cuvmm_free, cuvmm_malloc, cuvmm_record_stream, cuvmm_reset, cuvmm_stats};

const MIB: usize = 1 << 20;

/// Opens the GPU. Without one, returns `None` and says so.
fn device(test: &str) -> Option<Device> {
    let error = match CudaDriver::open() {
        Ok(driver) => return Some(Device::open(Arc::new(driver), 0).unwrap()),
        Err(error) => error,
    };
    if std::env::var_os("CUVMM_REQUIRE_GPU").is_some_and(|value| value == "1") {
        panic!("CUVMM_REQUIRE_GPU=1, and there is no GPU: {error}");
    }
    let said = writeln!(
        std::io::stderr(),
        "\n*** {test} DID NOT RUN: it needs a GPU. {error} ***"
    );
    drop(said);
    None
}

fn handle(stream: &Stream) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(stream.as_raw().0).unwrap())
}

fn allocate(size: usize, stream: &Stream) -> DeviceAddress {
    let size = isize::try_from(size).unwrap();
    // SAFETY: the stream is alive, and belongs to the primary context.
    let address = unsafe { cuvmm_malloc(size, 0, handle(stream)) };
    assert!(!address.is_null());
    DeviceAddress(address.addr() as u64)
}

fn pointer(address: DeviceAddress) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address.0).unwrap())
}

fn free(address: DeviceAddress, stream: &Stream) {
    // SAFETY: only work that is queued on the stream, or recorded, uses the memory.
    unsafe { cuvmm_free(pointer(address), 0, 0, handle(stream)) };
}

fn fill(device: &Device, at: DeviceAddress, byte: u8, size: usize, stream: StreamHandle) {
    let driver = device.driver();
    // SAFETY: the range is allocated, and is freed behind the fill.
    unsafe { driver.fill_async(device.ordinal(), at, byte, size as u64, stream) }.unwrap();
}

fn expect(device: &Device, at: DeviceAddress, byte: u8, size: usize) {
    let mut bytes = vec![!byte; size];
    // SAFETY: the range is allocated, and nothing writes it now.
    unsafe {
        device
            .driver()
            .copy_to_host(device.ordinal(), &mut bytes, at)
    }
    .unwrap();
    let wrong = bytes.iter().position(|&found| found != byte);
    assert_eq!(wrong, None, "of {size} bytes at {at:?}");
}

fn figure(name: &str) -> u64 {
    let mut text = vec![0_u8; 1 << 16];
    // SAFETY: the buffer has the length that is passed.
    let length = unsafe { cuvmm_stats(0, text.as_mut_ptr().cast(), text.len()) };
    let json: serde_json::Value = serde_json::from_slice(&text[..length - 1]).unwrap();
    json["heap"][name].as_u64().unwrap()
}

/// One test, because the library has one heap in a process.
#[test]
fn memory_on_a_gpu() {
    let Some(device) = device("memory_on_a_gpu") else {
        return;
    };
    let (legacy, home) = (Stream::legacy(&device), Stream::new(&device).unwrap());
    let other = Stream::new(&device).unwrap();
    let sizes = [1, 513, 4097, MIB + 1, 3 * MIB, 21 * MIB + 13, 130 * MIB];
    for stream in [&legacy, &home] {
        let made = sizes.map(|size| allocate(size, stream));
        for ((&at, size), byte) in made.iter().zip(sizes).zip(1..) {
            assert_eq!(at.0 % 512, 0);
            fill(&device, at, byte, size, stream.as_raw());
        }
        stream.synchronize().unwrap();
        for ((&at, size), byte) in made.iter().zip(sizes).zip(1..) {
            expect(&device, at, byte, size);
        }
        assert_eq!(figure("live"), sizes.iter().sum::<usize>() as u64);
        made.into_iter().for_each(|at| free(at, stream));
        assert_eq!(figure("allocations"), 0);
    }
    // Each round hands memory on to another stream, whose fill must come later.
    for round in 0..20 {
        let at = allocate(64 * MIB, &home);
        fill(&device, at, round, 64 * MIB, home.as_raw());
        // SAFETY: the address is allocated and the stream alive.
        unsafe { cuvmm_record_stream(pointer(at), handle(&other)) };
        fill(&device, at, round + 100, 64 * MIB, other.as_raw());
        free(at, &home);
        let next = allocate(64 * MIB, &home);
        fill(&device, next, round + 1, 64 * MIB, home.as_raw());
        home.synchronize().unwrap();
        other.synchronize().unwrap();
        expect(&device, next, round + 1, 64 * MIB);
        free(next, &home);
    }
    // SAFETY: null is allowed, and nothing is allocated there.
    unsafe { cuvmm_free(null_mut(), 0, 0, null_mut()) };
    device.synchronize().unwrap();
    cuvmm_reset();
    assert_eq!(figure("live"), 0);
    assert_eq!(figure("held"), 0);
}
