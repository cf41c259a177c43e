//! The control of a library that this process loaded, and where there is none.
//!
//! `unsafe` is allowed here to call the driver's functions with pointers to locals.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::c_void;
use std::ptr::null_mut;

use fakecuda_control::{Control, Live, Refused};
use libloading::Library;

#[path = "../../fakecuda/testing/built.rs"]
mod built;

/// The driver's functions that the test calls.
struct Driver(Library);

impl Driver {
    fn find<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers give the types of the driver's functions.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap()
    }

    /// Retains the primary context of device 0 and makes it current.
    fn enter(&self) {
        let mut context = null_mut::<c_void>();
        // SAFETY: the types are the functions', and the pointer is to a local.
        unsafe {
            let init = self.find::<unsafe extern "C" fn(u32) -> i32>("cuInit");
            assert_eq!(init(0), 0);
            let retain = self.find::<unsafe extern "C" fn(*mut *mut c_void, i32) -> i32>(
                "cuDevicePrimaryCtxRetain",
            );
            assert_eq!(retain(&raw mut context, 0), 0);
            let set = self.find::<unsafe extern "C" fn(*mut c_void) -> i32>("cuCtxSetCurrent");
            assert_eq!(set(context), 0);
        }
    }

    fn allocate(&self) -> (i32, u64) {
        let mut address = 0;
        // SAFETY: the type is the function's, and the pointer is to a local.
        let code = unsafe {
            self.find::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2")(
                &raw mut address,
                64,
            )
        };
        (code, address)
    }

    fn fill(&self, address: u64) {
        let fill = "cuMemsetD8Async";
        // SAFETY: the type is the function's, and the memory lives until the test ends.
        let code = unsafe {
            self.find::<unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> i32>(fill)(
                address,
                1,
                64,
                null_mut(),
            )
        };
        assert_eq!(code, 0);
    }
}

#[test]
fn a_test_controls_the_library_that_the_process_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = built::fakecuda_in(folder.path());
    // SAFETY: the stand-in was just built from this workspace.
    let driver = Driver(unsafe { Library::new(&path) }.unwrap());
    let control = Control::open(&path).unwrap();
    let early = control.live().unwrap_err();
    let function = "fakecuda_live";
    assert_eq!(early, Refused { function, code: 3 });
    assert_eq!(
        early.to_string(),
        "fakecuda_live returned the driver's code 3"
    );
    driver.enter();
    control.watch(true).unwrap();

    control.fail("cuMemAlloc:2,cuMemFree:1").unwrap();
    let (code, address) = driver.allocate();
    assert_eq!((code, driver.allocate().0), (0, 2));
    assert_eq!(control.injected().unwrap(), 1);
    control.disarm().unwrap();
    assert_eq!(control.fail("cuMemAlloc").unwrap_err().code, 1);
    assert_eq!(control.fail("cuMemAlloc:1\0").unwrap_err().code, 1);

    for all in [false, true] {
        let held = match all {
            false => control.hold(0).unwrap(),
            true => control.hold_all().unwrap(),
        };
        driver.fill(address);
        driver.fill(address);
        assert_eq!(control.live().unwrap().queued, 2);
        assert!(control.step(0).unwrap());
        assert_eq!(control.live().unwrap().queued, 1);
        drop(held);
        assert_eq!(control.live().unwrap().queued, 0);
    }
    assert!(!control.step(0).unwrap());

    let live = control.live().unwrap();
    assert_eq!((live.allocations, live.contexts, live.mappings), (1, 1, 0));
    assert_ne!(live, Live::default());
    assert_eq!(control.findings().unwrap(), 1);
    let text = control.report().unwrap();
    assert!(
        text.contains("leaked: allocation 0x") && text.contains("64 B"),
        "{text}"
    );
    let json: serde_json::Value = serde_json::from_str(&control.report_json().unwrap()).unwrap();
    assert_eq!(json["findings"][0]["object"], "allocation");
    control.forget().unwrap();
    assert_eq!(control.findings().unwrap(), 0);
    control.lose_context().unwrap();
    assert_eq!(driver.allocate().0, 700);
}

#[test]
fn another_library_has_no_control() {
    assert!(Control::open("libc.so.6").is_none());
    assert!(Control::open("/no/such/library.so").is_none());
}
