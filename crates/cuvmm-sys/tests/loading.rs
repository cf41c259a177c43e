//! Loading without a driver: the errors for a missing library or function.

// Tests open libraries that they have built, which is unsafe.
#![allow(unsafe_code)]
// A helper that fails must fail the test.
#![allow(clippy::expect_used)]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;

use cuvmm_sys::{Api, CudaVersion, LoadError, SYMBOLS, Symbol};

/// Builds a shared library that exports `symbols` as functions returning 0.
fn library_with<'a>(folder: &Path, symbols: impl Iterator<Item = &'a Symbol>) -> PathBuf {
    let source = folder.join("library.c");
    let text: String = symbols
        .map(|symbol| format!("int {}(void) {{ return 0; }}\n", symbol.name))
        .collect();
    std::fs::write(&source, text).expect("a file in a temporary folder");
    let library = folder.join("libcuda-test.so");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    library
}

#[test]
fn a_missing_library_is_an_error_that_names_it() {
    // SAFETY: there is no such file.
    let error = unsafe { Api::load_from("/nowhere/libcuda.so.1") }.expect_err("not there");
    let LoadError::NotFound { tried } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(tried.len(), 1);
    assert_eq!(tried[0].library, Path::new("/nowhere/libcuda.so.1"));
    assert!(
        tried[0].reason.contains("No such file"),
        "{}",
        tried[0].reason
    );
    assert!(
        error.to_string().contains("/nowhere/libcuda.so.1"),
        "{error}"
    );
}

#[test]
fn without_a_driver_every_name_that_was_tried_is_listed() {
    match Api::load() {
        Ok(api) => println!("this machine has a driver: {}", api.library().display()),
        Err(LoadError::NotFound { tried }) => {
            let names: Vec<_> = tried
                .iter()
                .map(|attempt| attempt.library.clone())
                .collect();
            assert_eq!(
                names,
                [
                    "libcuda.so.1",
                    "/usr/lib/wsl/lib/libcuda.so.1",
                    "libcuda.so"
                ]
                .map(PathBuf::from),
            );
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_library_of_another_kind_is_refused_by_what_it_lacks() {
    // SAFETY: the C library is loaded already and has no function of CUDA's names.
    let error = unsafe { Api::load_from("libc.so.6") }.expect_err("not CUDA");
    let LoadError::MissingSymbol { library, missing } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(library, Path::new("libc.so.6"));
    // Of all missing functions, the required one introduced last is reported.
    assert_eq!(missing.since, CudaVersion::OLDEST_SUPPORTED);
    let text = error.to_string();
    assert!(
        text.contains(missing.symbol) && text.contains("10.2"),
        "{text}"
    );
}

#[test]
fn one_required_function_missing_is_named_with_its_version() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = library_with(
        folder.path(),
        SYMBOLS
            .iter()
            .filter(|symbol| symbol.name != "cuMemGetInfo_v2"),
    );
    // SAFETY: the library was made above and none of its functions is called.
    let error = unsafe { Api::load_from(&library) }.expect_err("incomplete");
    let LoadError::MissingSymbol { missing, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(missing.symbol, "cuMemGetInfo_v2");
    assert_eq!(missing.since, CudaVersion::new(3, 2));
}

#[test]
fn a_driver_of_the_oldest_supported_version_loads_and_says_what_it_lacks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = library_with(
        folder.path(),
        SYMBOLS
            .iter()
            .filter(|symbol| symbol.since <= CudaVersion::OLDEST_SUPPORTED),
    );
    // SAFETY: the library was made above and none of its functions is called.
    let api = unsafe { Api::load_from(&library) }.expect("complete for its age");
    assert_eq!(api.library(), library);

    assert!(api.cuMemPrefetchAsync.is_present());
    let error = api.cuMemPrefetchAsync_v2.get().expect_err("came later");
    assert_eq!(error.symbol, "cuMemPrefetchAsync_v2");
    assert_eq!(error.since, CudaVersion::new(12, 2));
    assert_eq!(
        error.to_string(),
        "this driver has no cuMemPrefetchAsync_v2, which CUDA 12.2 introduced"
    );

    let younger: Vec<_> = SYMBOLS
        .iter()
        .filter(|symbol| symbol.since > CudaVersion::OLDEST_SUPPORTED)
        .map(|symbol| symbol.name)
        .collect();
    let missing: Vec<_> = api.missing().iter().map(|missing| missing.symbol).collect();
    assert_eq!(missing, younger);
    assert!(format!("{api:?}").contains("cuMemDiscardBatchAsync"));
}

#[test]
fn each_field_gets_the_function_of_its_own_name() {
    // Each address identifies a line of the table. Nothing is called.
    let address_of = |name: &str| {
        SYMBOLS
            .iter()
            .position(|symbol| symbol.name == name)
            .and_then(|line| NonNull::new((0x1000 + line * 16) as *mut c_void))
    };
    // SAFETY: no function is called, so the addresses need not be valid.
    let api = unsafe { Api::from_symbols("a test", address_of) }.expect("complete");
    let at = |name: &str| address_of(name).expect("in the table").as_ptr() as usize;
    assert_eq!(api.cuInit as usize, at("cuInit"));
    assert_eq!(api.cuMemUnmap as usize, at("cuMemUnmap"));
    assert_eq!(
        api.cuLaunchKernel.get().expect("present") as usize,
        at("cuLaunchKernel")
    );
    assert!(api.missing().is_empty());
}

#[test]
fn the_table_is_sane() {
    let mut names: Vec<_> = SYMBOLS.iter().map(|symbol| symbol.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names.len(),
        SYMBOLS.len(),
        "a function stands in the table twice"
    );
    for symbol in SYMBOLS {
        assert!(symbol.name.starts_with("cu"), "{}", symbol.name);
        assert!(
            !symbol.required || symbol.since <= CudaVersion::OLDEST_SUPPORTED,
            "{} is required, yet came after the oldest supported version",
            symbol.name
        );
    }
}
