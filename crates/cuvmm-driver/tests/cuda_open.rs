//! Opening the real driver: the errors where there is none, and what it exports where there is a GPU.
//! The cases of `stand-in/conformance` make its calls.

// A library is opened by its path.
#![allow(unsafe_code)]
// A helper that fails must fail the test.
#![allow(clippy::expect_used, clippy::panic)]

use std::io::Write as _;
use std::path::Path;

use cuvmm_driver::cuda::{CudaDriver, OpenError};
use cuvmm_driver::sys::LoadError;
use cuvmm_driver::{Driver, DriverKind};

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

/// Without a GPU this is reported on the terminal even if the test harness captures output.
/// `CUVMM_REQUIRE_GPU=1` makes it a failure.
#[test]
fn the_driver_exports_all_that_its_version_promises() {
    let driver = match CudaDriver::open() {
        Ok(driver) => driver,
        Err(error) if std::env::var_os("CUVMM_REQUIRE_GPU").is_some_and(|value| value == "1") => {
            panic!("CUVMM_REQUIRE_GPU=1, and there is no GPU: {error}");
        }
        Err(error) => {
            let said = "the_driver_exports_all_that_its_version_promises DID NOT RUN";
            drop(writeln!(
                std::io::stderr(),
                "\n*** {said}: it needs a GPU. {error} ***"
            ));
            return;
        }
    };
    let version = driver.version().expect("a version");
    for missing in driver.api().missing() {
        assert!(missing.since > version, "CUDA {version}: {missing}");
    }
}
