//! The code for the real driver, run with a library built by the test: opening, contexts, and
//! functions that an old driver lacks. No GPU is needed or used.

// The library is built here, so the behavior of its functions is known.
#![allow(unsafe_code)]
// A helper that fails must fail the test.
#![allow(clippy::expect_used)]

use std::cell::RefCell;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use cuvmm_driver::cuda::{CudaDriver, OpenError};
use cuvmm_driver::sys::{Api, CUcontext, SYMBOLS};
use cuvmm_driver::{
    CUresult, Call, CudaVersion, DeviceAddress, DeviceMemory, Driver, DriverError, Location,
    Ordinal, StreamHandle,
};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The functions of the library that do more than return 0: two devices whose primary contexts are
/// the addresses 0x100 and 0x101, and a stack of contexts for each thread.
const BODY: &str = r"
    static _Thread_local void *stack[8];
    static _Thread_local int depth;
    int retained[2], pushes;
    static void *top(void) { return depth ? stack[depth - 1] : 0; }
    int cuInit(unsigned f) { return INIT; }
    int cuDriverGetVersion(int *v) { *v = 10020; return 0; }
    int cuDeviceGetCount(int *n) { *n = 2; return 0; }
    int cuDeviceGet(int *d, int n) { if (n < 0 || n > 1) return 101; *d = n; return 0; }
    int cuDevicePrimaryCtxRetain(void **c, int d) {
        retained[d]++; *c = (void *)(0x100ul + d); return 0;
    }
    int cuDevicePrimaryCtxRelease(int d) { retained[d]--; return d ? 201 : 0; }
    int cuCtxGetCurrent(void **c) { *c = top(); return 0; }
    int cuCtxSetCurrent(void *c) { if (!depth) depth = 1; stack[depth - 1] = c; return 0; }
    int cuCtxGetDevice(int *d) { *d = (int)((unsigned long)top() & 15); return 0; }
    int cuCtxPushCurrent_v2(void *c) { stack[depth++] = c; pushes++; return 0; }
    int cuCtxPopCurrent_v2(void **c) { *c = top(); depth--; return 0; }
    int cuMemGetInfo_v2(unsigned long *f, unsigned long *t) {
        *f = (unsigned long)top(); *t = pushes; return 0;
    }
    int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *a = retained[d]; return 0; }
    int cuStreamQuery(void *s) { return s ? 600 : 0; }
    int cuMemPrefetchAsync(unsigned long p, unsigned long n, int d, void *s) { return 1000 + d; }
";

/// Builds the library of a CUDA 10.2 driver whose `cuInit` returns `init`.
fn library(name: &str, init: i32) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join(format!("{name}.c"));
    let library = folder.join(format!("lib{name}.so"));
    let rest: String = SYMBOLS
        .iter()
        .filter(|symbol| symbol.since <= CudaVersion::OLDEST_SUPPORTED)
        .filter(|symbol| !BODY.contains(&format!("int {}(", symbol.name)))
        .map(|symbol| format!("int {}(void) {{ return 0; }}\n", symbol.name))
        .collect();
    std::fs::write(&source, format!("#define INIT {init}\n{BODY}\n{rest}"))
        .expect("a file in the folder for tests");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    library
}

fn open(name: &str, init: i32) -> Result<CudaDriver, OpenError> {
    static SUBSCRIBED: Once = Once::new();
    SUBSCRIBED.call_once(|| tracing::subscriber::set_global_default(Log).expect("the only one"));
    // SAFETY: the functions that the tests call behave like CUDA's.
    unsafe { CudaDriver::open_library(library(name, init)) }
}

/// Returns the number of references to a device's primary context, as counted by the library.
fn retained(api: &Api, device: i32) -> i32 {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the results are written to locals.
    let code = unsafe { (api.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) };
    assert!(code.is_success());
    active
}

fn current(api: &Api) -> CUcontext {
    let mut context = ptr::null_mut();
    // SAFETY: the result is written to a local.
    let code = unsafe { (api.cuCtxGetCurrent)(&mut context) };
    assert!(code.is_success());
    context
}

const FIRST: Ordinal = Ordinal(0);
const SECOND: Ordinal = Ordinal(1);

#[test]
fn a_stub_is_refused_by_name() {
    let error = open("stub", 34).expect_err("a stub");
    assert!(matches!(error, OpenError::Stub { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("stub") && text.contains("libstub.so"),
        "{text}"
    );
    assert!(!error.is_no_device());
}

#[test]
fn a_driver_without_a_device_says_so() {
    let error = open("nodevice", 100).expect_err("no device");
    assert!(error.is_no_device());
    let text = error.to_string();
    assert!(
        text.contains("cuInit returned CUDA_ERROR_NO_DEVICE"),
        "{text}"
    );
}

#[test]
fn primary_contexts_are_taken_once_each_and_given_back() {
    let driver = open("primary", 0).expect("opens");
    assert_eq!(driver.device_memory(), DeviceMemory::Device);
    // A second table for the same library, to check its state from outside.
    // SAFETY: the functions that the tests call behave like CUDA's.
    let api = unsafe { Api::load_from(driver.api().library()) }.expect("loads");
    assert_eq!(
        (retained(&api, 0), retained(&api, 1)),
        (0, 0),
        "retained before the first use"
    );

    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    driver.memory_info(SECOND).expect("answers");
                }
            });
        }
    });
    assert_eq!((retained(&api, 0), retained(&api, 1)), (0, 1));

    // The library's release of the second device's context fails after it has released it.
    drop(driver);
    assert_eq!((retained(&api, 0), retained(&api, 1)), (0, 0));
    let logged = LOGGED.take();
    assert!(
        logged.contains("cuDevicePrimaryCtxRelease returned CUDA_ERROR_INVALID_CONTEXT"),
        "{logged}"
    );
}

thread_local! {
    /// The fields of the events that this thread has logged.
    static LOGGED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The subscriber of all threads. One that a test set for itself could miss an event that another
/// test's thread logs from the same line for the first time.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut |field: &Field, value: &dyn Debug| {
            LOGGED.with_borrow_mut(|logged| logged.push_str(&format!("{field}: {value:?}\n")));
        });
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn the_thread_finds_its_context_as_it_left_it() {
    let driver = open("current", 0).expect("opens");
    assert!(current(driver.api()).is_null());
    let info = driver.memory_info(FIRST).expect("answers");
    assert_eq!(
        info.free, 0x100,
        "the device's context was current in the call"
    );
    assert!(current(driver.api()).is_null());

    // A context that is current already is not pushed again.
    let pushed = driver.memory_info(FIRST).expect("answers").total;
    let context = driver.context(FIRST).expect("there");
    // SAFETY: it is a context of this library.
    let code = unsafe { (driver.api().cuCtxSetCurrent)(context) };
    assert!(code.is_success());
    assert_eq!(driver.memory_info(FIRST).expect("answers").total, pushed);
    assert_eq!(driver.memory_info(SECOND).expect("answers").free, 0x101);
    assert_eq!(current(driver.api()), context);
}

#[test]
fn a_failing_call_restores_the_context_too() {
    let driver = open("failing", 0).expect("opens");
    let location = Location::device(Ordinal(7));
    // SAFETY: the library's function dereferences nothing.
    let error =
        unsafe { driver.prefetch(FIRST, DeviceAddress::NULL, 1, location, StreamHandle::NULL) }
            .expect_err("answers a code");
    assert_eq!(
        error,
        DriverError::new(Call::MemPrefetchAsync, CUresult(1007))
    );
    assert!(current(driver.api()).is_null());
}

#[test]
fn an_ordinal_without_a_device_is_the_drivers_to_refuse() {
    let driver = open("ordinal", 0).expect("opens");
    for ordinal in [-1, 2, 99] {
        let error = driver
            .memory_info(Ordinal(ordinal))
            .expect_err("no such device");
        assert_eq!(error.code(), Some(CUresult::CUDA_ERROR_INVALID_DEVICE));
        let error = driver
            .total_memory(Ordinal(ordinal))
            .expect_err("no such device");
        assert_eq!(
            error,
            DriverError::new(Call::DeviceTotalMem, CUresult::CUDA_ERROR_INVALID_DEVICE)
        );
    }
}

#[test]
fn not_ready_is_an_answer() {
    let driver = open("query", 0).expect("opens");
    // SAFETY: the library's function uses the handle as a number only.
    let (idle, busy) = unsafe {
        (
            driver.stream_query(FIRST, StreamHandle::NULL),
            driver.stream_query(FIRST, StreamHandle(8)),
        )
    };
    assert_eq!((idle, busy), (Ok(true), Ok(false)));
}

#[test]
fn what_an_old_driver_lacks_is_named() {
    let driver = open("old", 0).expect("opens");
    assert_eq!(driver.version(), Ok(CudaVersion::new(10, 2)));
    assert_eq!(
        driver.retain(DeviceAddress(0x1000)),
        Err(DriverError::MissingSymbol {
            call: Call::MemRetainAllocationHandle,
            symbol: "cuMemRetainAllocationHandle",
            since: CudaVersion::new(11, 0),
        })
    );
    // The first version of the prefetch supports devices and the host, so it is used for them.
    let prefetch = |location| {
        // SAFETY: the library's function dereferences nothing.
        unsafe { driver.prefetch(FIRST, DeviceAddress::NULL, 1, location, StreamHandle::NULL) }
            .expect_err("answers a code or is missing")
    };
    assert_eq!(
        prefetch(Location::HOST),
        DriverError::new(Call::MemPrefetchAsync, CUresult(999))
    );
    assert!(matches!(
        prefetch(Location::host_numa(0)),
        DriverError::MissingSymbol {
            symbol: "cuMemPrefetchAsync_v2",
            ..
        }
    ));
}

#[test]
fn a_borrowed_context_is_used_and_not_released() {
    struct Owner(Arc<AtomicBool>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    let gone = Arc::new(AtomicBool::new(false));
    let driver = open("borrowed", 0).expect("opens");
    // SAFETY: the functions that the tests call behave like CUDA's.
    let api = unsafe { Api::load_from(driver.api().library()) }.expect("loads");
    driver
        .memory_info(FIRST)
        .expect("takes the primary context");
    assert_eq!(retained(&api, 0), 1);

    let foreign = ptr::without_provenance_mut(0xabc0);
    let keep_alive = Arc::new(Owner(Arc::clone(&gone)));
    // SAFETY: the library never dereferences a context.
    let driver = unsafe { driver.with_context(FIRST, foreign, keep_alive) }.expect("a device");
    assert_eq!(
        retained(&api, 0),
        0,
        "the primary context is not needed any more"
    );
    assert_eq!(driver.memory_info(FIRST).expect("answers").free, 0xabc0);
    assert_eq!(driver.memory_info(SECOND).expect("answers").free, 0x101);
    assert!(!gone.load(Ordering::SeqCst));

    drop(driver);
    assert!(gone.load(Ordering::SeqCst));
    assert_eq!((retained(&api, 0), retained(&api, 1)), (0, 0));

    let driver = open("nothing_to_borrow", 0).expect("opens");
    // SAFETY: the library never dereferences a context.
    let error = unsafe { driver.with_context(Ordinal(5), foreign, Arc::new(())) };
    assert!(error.is_err());
}

#[test]
fn a_current_context_says_of_which_device_it_is() {
    let path = library("adopted", 0);
    // SAFETY: the functions that the tests call behave like CUDA's.
    let api = unsafe { Api::load_from(&path) }.expect("loads");
    let adopt = |context: CUcontext| {
        // SAFETY: the functions that the tests call behave like CUDA's, and the library never
        // dereferences a context.
        unsafe {
            let driver = CudaDriver::open_library(&path).expect("opens");
            driver.with_current_context(context, Arc::new(()))
        }
    };
    let foreign: CUcontext = ptr::without_provenance_mut(0xabc1);
    let refused = adopt(foreign).expect_err("nothing is current");
    assert!(
        matches!(
            refused,
            OpenError::NotCurrent {
                context: 0xabc1,
                current: 0,
                ..
            }
        ),
        "{refused:?}"
    );

    // SAFETY: the library never dereferences a context.
    let code = unsafe { (api.cuCtxSetCurrent)(foreign) };
    assert!(code.is_success());
    let other = ptr::without_provenance_mut(0xabc0);
    let refused = adopt(other).expect_err("another is current");
    assert!(refused.to_string().contains("0xabc1"), "{refused}");

    let (driver, device) = adopt(foreign).expect("current");
    assert_eq!(device, SECOND);
    assert_eq!(driver.memory_info(SECOND).expect("answers").free, 0xabc1);
    assert_eq!((retained(&api, 0), retained(&api, 1)), (0, 0));

    // A context of a device that the driver does not count.
    let lost: CUcontext = ptr::without_provenance_mut(0xabc7);
    // SAFETY: the library never dereferences a context.
    let code = unsafe { (api.cuCtxSetCurrent)(lost) };
    assert!(code.is_success());
    let refused = adopt(lost).expect_err("there is no device 7");
    assert!(matches!(refused, OpenError::Refused { error, .. }
            if error == DriverError::new(Call::CtxGetDevice, CUresult::CUDA_ERROR_INVALID_DEVICE)),);
}
