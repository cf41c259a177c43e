//! Opening the real driver: the errors where there is none, and its calls where there is a GPU.

// GPU tests map memory and launch kernels.
#![allow(unsafe_code)]
// A helper that fails must fail the test.
#![allow(clippy::expect_used, clippy::panic)]

use std::ffi::c_void;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::cuda::{CudaDriver, OpenError};
use cuvmm_driver::sys::{CUfunction, CUmodule, CUresult, CUstream, LoadError};
use cuvmm_driver::{
    AccessDesc, AccessFlags, Advice, CaptureMode, CaptureStatus, DeviceAddress, DeviceAttribute,
    Driver, DriverKind, EventFlags, Exported, GranularityKind, HandleTypes, ImportSource, Location,
    Ordinal, PhysicalProps, PointerAttribute, RangeAttribute, StreamFlags, StreamHandle,
};

const DEVICE: Ordinal = Ordinal(0);

/// Returns the driver, or `None` where there is no GPU.
///
/// That is then reported on the terminal even if the test harness captures output.
/// `CUVMM_REQUIRE_GPU=1` makes it a failure.
fn gpu(test: &str) -> Option<(CudaDriver, MutexGuard<'static, ()>)> {
    // The tests share the device's primary context, in which a capture of one test would make the
    // wait of another fail.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let error = match CudaDriver::open() {
        Ok(driver) => return Some((driver, turn)),
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

fn ok(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

#[test]
fn without_a_library_the_error_says_what_was_tried() {
    // SAFETY: there is no such file.
    let error = unsafe { CudaDriver::open_library("/nowhere/libcuda.so.1") }
        .expect_err("there is no such file");
    let OpenError::Load(LoadError::NotFound { tried }) = &error else {
        panic!("{error:?}");
    };
    assert_eq!(tried.len(), 1);
    assert_eq!(tried[0].library, Path::new("/nowhere/libcuda.so.1"));
    assert!(
        error.to_string().contains("/nowhere/libcuda.so.1"),
        "{error}"
    );
}

#[test]
fn without_a_driver_every_candidate_is_named() {
    match CudaDriver::open() {
        Ok(driver) => assert_eq!(driver.kind(), DriverKind::Cuda),
        Err(OpenError::Load(error)) => {
            let (names, reasons) = (error.to_string(), format!("{error:#}"));
            let tried = "tried libcuda.so.1, /usr/lib/wsl/lib/libcuda.so.1, libcuda.so";
            assert!(names.ends_with(tried), "{names}");
            for name in [
                "libcuda.so.1:",
                "/usr/lib/wsl/lib/libcuda.so.1:",
                "libcuda.so:",
            ] {
                assert!(reasons.contains(name), "{reasons}");
            }
        }
        Err(other) => println!("a driver is installed and sees no GPU: {other}"),
    }
}

#[test]
fn mapped_memory_is_filled_and_read_back() {
    let Some((driver, _turn)) = gpu("mapped_memory_is_filled_and_read_back") else {
        return;
    };
    let name = driver.device_name(DEVICE).expect("a name");
    let version = driver.version().expect("a version");
    println!(
        "{name}, CUDA {version}, uuid {:02x?}",
        driver.device_uuid(DEVICE)
    );

    let props = PhysicalProps::device(DEVICE);
    let granule = driver
        .allocation_granularity(&props, GranularityKind::MINIMUM)
        .expect("a granularity");
    let size = 2 * granule;
    let before = driver.memory_info(DEVICE).expect("figures");
    assert_eq!(before.total, driver.total_memory(DEVICE).expect("a figure"));

    let address = driver
        .reserve(size, 0, DeviceAddress::NULL, 0)
        .expect("addresses");
    let mut bytes = vec![0xeeu8; size as usize];
    // SAFETY: the handles and addresses belong to this test, and each is released once, after the
    // copies that use it have returned.
    unsafe {
        let handle = driver.create(size, &props, 0).expect("memory");
        driver.map(address, size, 0, handle, 0).expect("a mapping");
        let access = AccessDesc {
            location: Location::device(DEVICE),
            flags: AccessFlags::READ_WRITE,
        };
        driver.set_access(address, size, &[access]).expect("access");
        assert_eq!(
            driver.get_access(address, Location::device(DEVICE)),
            Ok(AccessFlags::READ_WRITE)
        );
        assert_eq!(driver.physical_props(handle), Ok(props));
        assert_eq!(driver.retain(address), Ok(handle));
        driver.release(handle).expect("the second reference");

        driver
            .copy_to_host(DEVICE, &mut bytes, address)
            .expect("a copy");
        assert!(
            bytes.iter().all(|byte| *byte == 0),
            "fresh memory reads as zero"
        );

        let half = DeviceAddress(address.0 + granule);
        driver.fill(DEVICE, half, 0x5a, granule).expect("a fill");
        driver
            .copy_to_device(DEVICE, address, b"cuvmm")
            .expect("a copy");
        driver
            .copy_to_host(DEVICE, &mut bytes, address)
            .expect("a copy");
        let (low, high) = bytes.split_at(granule as usize);
        assert_eq!(&low[..6], b"cuvmm\0");
        assert!(high.iter().all(|byte| *byte == 0x5a));

        driver.unmap(address, size).expect("unmapped");
        driver.release(handle).expect("released");
        driver.free_reservation(address, size).expect("freed");
    }
    let after = driver
        .reserve(size, 0, DeviceAddress::NULL, 0)
        .expect("addresses");
    // SAFETY: the reservation was made in the line above, and nothing is mapped in it.
    unsafe { driver.free_reservation(after, size) }.expect("freed");
}

#[test]
fn the_driver_exports_all_that_its_version_promises() {
    let Some((driver, _turn)) = gpu("the_driver_exports_all_that_its_version_promises") else {
        return;
    };
    let version = driver.version().expect("a version");
    for missing in driver.api().missing() {
        assert!(missing.since > version, "CUDA {version}: {missing}");
    }
}

#[test]
fn memory_passes_through_a_descriptor() {
    let Some((driver, _turn)) = gpu("memory_passes_through_a_descriptor") else {
        return;
    };
    let mut props = PhysicalProps::device(DEVICE);
    props.handle_types = HandleTypes::POSIX_FD;
    let size = driver
        .allocation_granularity(&props, GranularityKind::MINIMUM)
        .expect("a granularity");
    let access = AccessDesc {
        location: Location::device(DEVICE),
        flags: AccessFlags::READ_WRITE,
    };
    let address = driver
        .reserve(2 * size, 0, DeviceAddress::NULL, 0)
        .expect("addresses");
    let other = DeviceAddress(address.0 + size);
    // SAFETY: the handles and addresses belong to this test, and each is released once, after the
    // copies that use it have returned.
    unsafe {
        let handle = driver.create(size, &props, 0).expect("memory");
        let exported = driver
            .export(handle, HandleTypes::POSIX_FD, 0)
            .expect("exported");
        let Exported::Fd(fd) = exported else {
            panic!("{exported:?}");
        };
        let source = ImportSource::Fd(fd.as_raw_fd());
        let imported = driver
            .import(source, HandleTypes::POSIX_FD)
            .expect("imported");
        assert!(
            driver
                .import(ImportSource::Fd(-1), HandleTypes::POSIX_FD)
                .is_err(),
            "-1 is no descriptor"
        );
        driver.map(address, size, 0, handle, 0).expect("a mapping");
        driver.map(other, size, 0, imported, 0).expect("a mapping");
        driver
            .set_access(address, 2 * size, &[access])
            .expect("access");

        driver
            .copy_to_device(DEVICE, address, b"twice")
            .expect("a copy");
        let mut bytes = [0; 5];
        driver
            .copy_to_host(DEVICE, &mut bytes, other)
            .expect("a copy");
        assert_eq!(&bytes, b"twice");

        assert_eq!(driver.address_range(DEVICE, other), Ok((other, size)));
        let kind = driver.pointer_attribute(DEVICE, other, PointerAttribute::MEMORY_TYPE);
        assert_eq!(kind, Ok(2));
        if driver.device_attribute(DEVICE, DeviceAttribute::DMA_BUF) == Ok(1) {
            drop(driver.dma_buf(DEVICE, address, size).expect("a dma-buf"));
        }
        assert!(
            driver.ipc_mem_handle(DEVICE, address).is_err(),
            "mappings have none"
        );

        driver.unmap(address, 2 * size).expect("unmapped");
        driver.release(handle).expect("released");
        driver.release(imported).expect("released");
        driver.free_reservation(address, 2 * size).expect("freed");
    }
}

#[test]
fn a_captured_fill_runs_when_its_graph_is_launched() {
    let Some((driver, _turn)) = gpu("a_captured_fill_runs_when_its_graph_is_launched") else {
        return;
    };
    let address = driver.alloc(DEVICE, 4096).expect("memory");
    let stream = driver
        .stream_create(DEVICE, StreamFlags::NON_BLOCKING)
        .expect("a stream");
    // SAFETY: every object belongs to this test and is released once, after the work.
    unsafe {
        driver.fill(DEVICE, address, 0, 4096).expect("a fill");
        driver.context_synchronize(DEVICE).expect("done");
        driver
            .capture_begin(DEVICE, stream, CaptureMode::RELAXED)
            .expect("begun");
        assert_eq!(
            driver.capture_status(DEVICE, stream),
            Ok(CaptureStatus::ACTIVE)
        );
        driver
            .fill_async(DEVICE, address, 7, 4096, stream)
            .expect("a fill");
        let graph = driver.capture_end(DEVICE, stream).expect("ended");
        assert_eq!(
            driver.capture_status(DEVICE, stream),
            Ok(CaptureStatus::NONE)
        );

        let mut bytes = [1; 4096];
        driver
            .copy_to_host(DEVICE, &mut bytes, address)
            .expect("a copy");
        assert_eq!(bytes, [0; 4096], "it ran while it was captured");
        let executable = driver
            .graph_instantiate(DEVICE, graph)
            .expect("instantiated");
        driver.graph_destroy(DEVICE, graph).expect("destroyed");
        driver
            .graph_launch(DEVICE, executable, stream)
            .expect("launched");
        driver.stream_synchronize(DEVICE, stream).expect("done");
        driver
            .copy_to_host(DEVICE, &mut bytes, address)
            .expect("a copy");
        assert_eq!(bytes, [7; 4096]);

        driver
            .graph_exec_destroy(DEVICE, executable)
            .expect("destroyed");
        driver.stream_destroy(DEVICE, stream).expect("destroyed");
        driver.free(DEVICE, address).expect("freed");
    }
    let mode = driver
        .exchange_capture_mode(CaptureMode::RELAXED)
        .expect("a mode");
    assert_eq!(driver.exchange_capture_mode(mode), Ok(CaptureMode::RELAXED));
}

#[test]
fn the_drivers_own_allocators_answer() {
    const SIZE: u64 = 2 << 20;
    let Some((driver, _turn)) = gpu("the_drivers_own_allocators_answer") else {
        return;
    };
    let stream = driver
        .stream_create(DEVICE, StreamFlags::NON_BLOCKING)
        .expect("a stream");
    let pinned = driver.host_alloc(DEVICE, SIZE, 1).expect("pinned memory");
    // SAFETY: every object belongs to this test and is released once, after the work.
    unsafe {
        pinned.write_bytes(3, SIZE as usize);
        let pooled = driver
            .alloc_async(DEVICE, SIZE, stream)
            .expect("memory of a pool");
        driver
            .copy_to_device_async(DEVICE, pooled, pinned, SIZE, stream)
            .expect("a copy");
        driver
            .fill_async(DEVICE, pooled, 4, 1, stream)
            .expect("a fill");
        driver
            .copy_to_host_async(DEVICE, pinned, pooled, SIZE, stream)
            .expect("a copy");
        driver.free_async(DEVICE, pooled, stream).expect("freed");
        driver.stream_synchronize(DEVICE, stream).expect("done");
        assert_eq!([*pinned, *pinned.add(1)], [4, 3]);
        driver.host_free(DEVICE, pinned).expect("freed");

        let managed = driver
            .managed_alloc(DEVICE, SIZE, 1)
            .expect("managed memory");
        let there = Location::device(DEVICE);
        if driver.device_attribute(DEVICE, DeviceAttribute::CONCURRENT_MANAGED_ACCESS) == Ok(1) {
            let advice = Advice::SET_PREFERRED_LOCATION;
            driver
                .advise(DEVICE, managed, SIZE, advice, there)
                .expect("advised");
            let asked = RangeAttribute::PREFERRED_LOCATION;
            assert_eq!(driver.range_attribute(DEVICE, managed, SIZE, asked), Ok(0));
            let advice = Advice::SET_ACCESSED_BY;
            driver
                .advise(DEVICE, managed, SIZE, advice, Location::HOST)
                .expect("advised");
            let users = driver.range_accessed_by(DEVICE, managed, SIZE);
            assert_eq!(users, Ok(vec![Location::HOST]));
            for place in [there, Location::HOST, there] {
                driver
                    .prefetch(DEVICE, managed, SIZE, place, stream)
                    .expect("queued");
            }
            driver.stream_synchronize(DEVICE, stream).expect("done");
            let asked = RangeAttribute::LAST_PREFETCH_LOCATION;
            assert_eq!(driver.range_attribute(DEVICE, managed, SIZE, asked), Ok(0));
        }
        driver.free(DEVICE, managed).expect("freed");
        driver.stream_destroy(DEVICE, stream).expect("destroyed");
    }
}

/// A kernel that runs for a given number of nanoseconds on one thread.
const SPIN: &str = "
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %limit, %start, %now;
    .reg .pred %more;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %more, %now, %limit;
    @%more bra AGAIN;
    ret;
}
\0";

/// The kernel, loaded into the device's context. Loading leaves the context current on this thread.
struct Spin<'a> {
    driver: &'a CudaDriver,
    module: CUmodule,
    function: CUfunction,
}

impl<'a> Spin<'a> {
    fn load(driver: &'a CudaDriver) -> Self {
        let api = driver.api();
        let context = driver.context(DEVICE).expect("a context");
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the results are written to locals, and the texts are null-terminated.
        unsafe {
            ok((api.cuCtxSetCurrent)(context));
            let load = api.cuModuleLoadData.get().expect("every driver has it");
            ok(load(&mut module, SPIN.as_ptr().cast()));
            let find = api.cuModuleGetFunction.get().expect("every driver has it");
            ok(find(&mut function, module, c"spin".as_ptr()));
        }
        let spin = Self {
            driver,
            module,
            function,
        };
        // The first launch of a function loads it, which may wait for the whole context.
        spin.run(StreamHandle::NULL, Duration::ZERO);
        driver.context_synchronize(DEVICE).expect("done");
        spin
    }

    fn run(&self, stream: StreamHandle, time: Duration) {
        let mut nanoseconds = time.as_nanos() as u64;
        let mut parameters = [ptr::from_mut(&mut nanoseconds).cast::<c_void>()];
        let launch = self
            .driver
            .api()
            .cuLaunchKernel
            .get()
            .expect("every driver has it");
        // SAFETY: the function takes one 64-bit number, which is read before the call returns.
        ok(unsafe {
            launch(
                self.function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream.0 as CUstream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        });
    }
}

impl Drop for Spin<'_> {
    fn drop(&mut self) {
        let unload = self
            .driver
            .api()
            .cuModuleUnload
            .get()
            .expect("every driver has it");
        // SAFETY: the tests wait for their kernels before they drop this.
        ok(unsafe { unload(self.module) });
    }
}

#[test]
fn an_event_recorded_on_the_context_covers_streams_that_block_nobody() {
    let test = "an_event_recorded_on_the_context_covers_streams_that_block_nobody";
    let Some((driver, _turn)) = gpu(test) else {
        return;
    };
    if !driver.api().cuCtxRecordEvent.is_present() {
        println!("this driver is older than CUDA 12.5 and has no cuCtxRecordEvent");
        return;
    }
    let spin = Spin::load(&driver);
    let stream = driver
        .stream_create(DEVICE, StreamFlags::NON_BLOCKING)
        .expect("a stream");
    let event = driver
        .event_create(DEVICE, EventFlags::DISABLE_TIMING)
        .expect("an event");
    let time = Duration::from_millis(300);
    // SAFETY: stream and event belong to this test and are destroyed once, after the work.
    unsafe {
        let start = Instant::now();
        spin.run(stream, time);
        driver
            .context_record_event(DEVICE, event)
            .expect("recorded");
        assert_eq!(
            driver.event_query(DEVICE, event),
            Ok(false),
            "the kernel still runs"
        );
        assert_eq!(driver.stream_query(DEVICE, stream), Ok(false));
        assert!(start.elapsed() < time, "the record waited for the kernel");
        driver.event_synchronize(DEVICE, event).expect("waited");
        assert!(
            start.elapsed() >= time.mul_f64(0.9),
            "the event did not wait for the kernel"
        );
        assert_eq!(driver.event_query(DEVICE, event), Ok(true));
        assert_eq!(driver.stream_query(DEVICE, stream), Ok(true));

        // Work that is queued later is not covered.
        driver
            .context_record_event(DEVICE, event)
            .expect("recorded");
        spin.run(stream, time);
        driver.event_synchronize(DEVICE, event).expect("waited");
        assert_eq!(driver.stream_query(DEVICE, stream), Ok(false));
        driver.stream_synchronize(DEVICE, stream).expect("done");

        driver.event_destroy(DEVICE, event).expect("destroyed");
        driver.stream_destroy(DEVICE, stream).expect("destroyed");
    }
}
