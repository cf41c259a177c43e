//! The stand-in before `cuInit`, and where `cuInit` fails.
//!
//! `unsafe` is allowed here to call the C functions of the stand-in with pointers to locals, and to
//! set the environment variables that it reads.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ptr::null_mut;

use cuvmm_sys::{Api, CUmemAllocationProp, CUmemLocation, CUmemLocationType, CUresult};

#[path = "../testing/built.rs"]
mod built;

const NOT_INITIALIZED: CUresult = CUresult::CUDA_ERROR_NOT_INITIALIZED;

fn loaded() -> (Api, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    // SAFETY: the stand-in was just built from this workspace.
    let api = unsafe { Api::load_from(library) }.unwrap();
    (api, directory)
}

/// One test, because environment variables belong to the whole process.
#[test]
fn nothing_but_the_version_is_answered_before_init() {
    let (api, _directory) = loaded();
    let device = CUmemLocation {
        kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    let props = CUmemAllocationProp::pinned(device);
    let (mut version, mut address, mut handle, mut context) = (0, 0, 0, null_mut());
    // SAFETY: all pointers are to locals or null.
    let answers = unsafe {
        [
            (
                "reserve",
                (api.cuMemAddressReserve)(&mut address, 2 << 20, 0, 0, 0),
            ),
            (
                "reserve to null",
                (api.cuMemAddressReserve)(null_mut(), 0, 0, 0, 0),
            ),
            ("create", (api.cuMemCreate)(&mut handle, 2 << 20, &props, 0)),
            ("map", (api.cuMemMap)(0, 0, 0, 0, 0)),
            (
                "set_access",
                (api.cuMemSetAccess)(0, 0, std::ptr::null(), 0),
            ),
            ("unmap", (api.cuMemUnmap)(0, 0)),
            ("release", (api.cuMemRelease)(0)),
            ("free", (api.cuMemAddressFree)(0, 0)),
            ("count", (api.cuDeviceGetCount)(&mut version)),
            ("retain", (api.cuDevicePrimaryCtxRetain)(&mut context, 0)),
            ("current", (api.cuCtxGetCurrent)(&mut context)),
            ("synchronize", (api.cuCtxSynchronize)()),
        ]
    };
    for (call, answer) in answers {
        assert_eq!(answer, NOT_INITIALIZED, "{call}");
    }
    // SAFETY: the result is written to a local.
    unsafe {
        assert_eq!(
            (api.cuDriverGetVersion)(&mut version),
            CUresult::CUDA_SUCCESS
        );
        assert!(version >= 12_000, "{version}");
        assert_eq!((api.cuInit)(1), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!((api.cuMemUnmap)(0, 0), NOT_INITIALIZED);
        assert_eq!((api.cuInit)(0), CUresult::CUDA_SUCCESS);
        assert_eq!((api.cuMemUnmap)(0, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    }

    // A second copy is a separate library with its own state.
    let (empty, _directory) = loaded();
    let mut count = 0;
    // SAFETY: this test is the only one in its process, so no other thread reads the environment
    // now.
    unsafe { std::env::set_var("FAKECUDA_DEVICES", "0") };
    // SAFETY: the result is written to a local.
    unsafe {
        assert_eq!((empty.cuInit)(0), CUresult::CUDA_ERROR_NO_DEVICE);
        assert_eq!((empty.cuInit)(0), CUresult::CUDA_ERROR_NO_DEVICE);
        assert_eq!((empty.cuDeviceGetCount)(&mut count), NOT_INITIALIZED);
    }

    let (three, _directory) = loaded();
    let (mut bytes, mut name) = (0, [0u8; 8]);
    // SAFETY: this test is the only one in its process, so no other thread reads the environment
    // now.
    unsafe {
        std::env::set_var("FAKECUDA_DEVICES", "3");
        std::env::set_var("FAKECUDA_CAPACITY", (1 << 30).to_string());
        std::env::set_var("FAKECUDA_NAME", "a longer name than fits");
    }
    // SAFETY: the results are written to locals of the stated sizes.
    unsafe {
        assert_eq!((three.cuInit)(0), CUresult::CUDA_SUCCESS);
        assert_eq!((three.cuDeviceGetCount)(&mut count), CUresult::CUDA_SUCCESS);
        assert_eq!(
            (three.cuDeviceTotalMem_v2)(&mut bytes, 2),
            CUresult::CUDA_SUCCESS
        );
        let named = (three.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as i32, 1);
        assert_eq!(named, CUresult::CUDA_SUCCESS);
        let beyond = (three.cuDeviceTotalMem_v2)(&mut bytes, 3);
        assert_eq!(beyond, CUresult::CUDA_ERROR_INVALID_DEVICE);
    }
    assert_eq!((count, bytes), (3, 1 << 30));
    assert_eq!(&name, b"a longe\0");
}
