//! Calls that only C can make: null pointers, and threads without a current context.
//!
//! `unsafe` is allowed here to call the C functions of the stand-in, each with pointers to locals
//! or with null, which is what is tested.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ptr::{null, null_mut};

use cuvmm_sys::{
    Api, CU_DEVICE_CPU, CU_DEVICE_INVALID, CUcontext, CUmem_advise, CUmem_range_attribute,
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemLocation, CUmemLocationType,
    CUpointer_attribute, CUresult, functions,
};

#[path = "../testing/built.rs"]
mod built;

const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const INVALID_CONTEXT: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;

const GRANULE: usize = 2 << 20;
const DEVICE: CUmemLocation = CUmemLocation {
    kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
    id: 0,
};
const FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const MINIMUM: CUmemAllocationGranularity_flags =
    CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;

/// Loads a separate copy of the stand-in and initializes it. No context is current.
fn loaded() -> (Api, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    // SAFETY: the stand-in was just built from this workspace.
    let api = unsafe { Api::load_from(library) }.unwrap();
    // SAFETY: `cuInit` takes no pointers.
    assert_eq!(unsafe { (api.cuInit)(0) }, OK);
    (api, directory)
}

/// Loads a separate copy of the stand-in, with the primary context of device 0 current.
fn entered() -> (Api, tempfile::TempDir) {
    let (api, directory) = loaded();
    let mut context: CUcontext = null_mut();
    // SAFETY: the result is written to a local; the context is retained for the rest of the
    // process.
    unsafe {
        assert_eq!((api.cuDevicePrimaryCtxRetain)(&mut context, 0), OK);
        assert_eq!((api.cuCtxSetCurrent)(context), OK);
    }
    (api, directory)
}

#[test]
fn the_rows_that_were_measured_with_null() {
    let (api, _directory) = loaded();
    let props = CUmemAllocationProp::pinned(DEVICE);
    let (mut granularity, mut handle) = (0, 0);
    // SAFETY: null is what is tested; all other pointers are to locals.
    let rows = unsafe {
        [
            (
                "reserve.null_out",
                (api.cuMemAddressReserve)(null_mut(), GRANULE, 0, 0, 0),
            ),
            (
                "granularity.null",
                (api.cuMemGetAllocationGranularity)(null_mut(), &props, MINIMUM),
            ),
            (
                "granularity.null_prop",
                (api.cuMemGetAllocationGranularity)(&mut granularity, null(), MINIMUM),
            ),
            (
                "create.null_out",
                (api.cuMemCreate)(null_mut(), GRANULE, &props, 0),
            ),
            (
                "create.null_prop",
                (api.cuMemCreate)(&mut handle, GRANULE, null(), 0),
            ),
            ("set_access.null_desc", {
                let mut address = 0;
                assert_eq!(
                    (api.cuMemAddressReserve)(&mut address, GRANULE, 0, 0, 0),
                    OK
                );
                assert_eq!((api.cuMemCreate)(&mut handle, GRANULE, &props, 0), OK);
                assert_eq!((api.cuMemMap)(address, GRANULE, 0, handle, 0), OK);
                (api.cuMemSetAccess)(address, GRANULE, null(), 1)
            }),
        ]
    };
    for (row, answer) in rows {
        assert_eq!(answer, INVALID_VALUE, "{row}");
    }
}

#[test]
fn a_refused_null_takes_nothing() {
    let (api, _directory) = entered();
    let props = CUmemAllocationProp::pinned(DEVICE);
    let (mut free, mut total, mut after) = (0, 0, 0);
    // SAFETY: null is what is tested; all other pointers are to locals.
    unsafe {
        assert_eq!((api.cuMemGetInfo_v2)(&mut free, &mut total), OK);
        assert_eq!(
            (api.cuMemCreate)(null_mut(), GRANULE, &props, 0),
            INVALID_VALUE
        );
        assert_eq!(
            (api.cuMemAlloc_v2.get().unwrap())(null_mut(), GRANULE),
            INVALID_VALUE
        );
        assert_eq!((api.cuMemGetInfo_v2)(&mut after, &mut total), OK);
    }
    assert_eq!(free, after);
}

#[test]
fn null_is_refused_wherever_a_result_goes() {
    let (api, _directory) = entered();
    let handle_types = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: null is what is tested; nothing is written.
    let answers = unsafe {
        [
            ("version", (api.cuDriverGetVersion)(null_mut())),
            ("count", (api.cuDeviceGetCount)(null_mut())),
            ("device", (api.cuDeviceGet)(null_mut(), 0)),
            ("name", (api.cuDeviceGetName)(null_mut(), 10, 0)),
            ("total", (api.cuDeviceTotalMem_v2)(null_mut(), 0)),
            ("peer", (api.cuDeviceCanAccessPeer)(null_mut(), 0, 0)),
            ("context", (api.cuDevicePrimaryCtxRetain)(null_mut(), 0)),
            ("current", (api.cuCtxGetCurrent)(null_mut())),
            ("info", (api.cuMemGetInfo_v2)(null_mut(), null_mut())),
            ("access", (api.cuMemGetAccess)(null_mut(), &DEVICE, 0)),
            (
                "export",
                (api.cuMemExportToShareableHandle)(null_mut(), 1, FD, 0),
            ),
            (
                "import",
                (api.cuMemImportFromShareableHandle)(null_mut(), null_mut(), FD),
            ),
            (
                "props",
                (api.cuMemGetAllocationPropertiesFromHandle)(null_mut(), 1),
            ),
            ("to the device", (api.cuMemcpyHtoD_v2)(0, null(), 4)),
            ("to the host", (api.cuMemcpyDtoH_v2)(null_mut(), 0, 4)),
            ("stream", (api.cuStreamCreate.get().unwrap())(null_mut(), 0)),
            ("event", (api.cuEventCreate.get().unwrap())(null_mut(), 0)),
            (
                "pool",
                (api.cuMemPoolCreate.get().unwrap())(null_mut(), null()),
            ),
            (
                "default pool",
                (api.cuDeviceGetDefaultMemPool.get().unwrap())(null_mut(), 0),
            ),
            (
                "pool's memory",
                (api.cuMemAllocFromPoolAsync.get().unwrap())(
                    null_mut(),
                    GRANULE,
                    null_mut(),
                    null_mut(),
                ),
            ),
            (
                "pointer of a pool",
                (api.cuMemPoolExportPointer.get().unwrap())(null_mut(), 0),
            ),
            ("attribute", {
                let ask: functions::cuPointerGetAttribute =
                    api.cuPointerGetAttribute.get().unwrap();
                ask(null_mut(), handle_types, 0)
            }),
        ]
    };
    for (row, answer) in answers {
        assert_eq!(answer, INVALID_VALUE, "{row}");
    }
}

#[test]
fn who_accesses_a_range_fills_an_array_of_any_length() {
    let (api, _directory) = entered();
    let ask = api.cuMemRangeGetAttribute.get().unwrap();
    let advise = api.cuMemAdvise.get().unwrap();
    let by = CUmem_range_attribute::CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY;
    let used = CUmem_advise::CU_MEM_ADVISE_SET_ACCESSED_BY;
    let mut address = 0;
    let mut users = [7; 4];
    let place = users.as_mut_ptr().cast();
    // SAFETY: the array is at least as long as stated; the memory is freed here.
    unsafe {
        assert_eq!(
            (api.cuMemAllocManaged.get().unwrap())(&mut address, GRANULE, 1),
            OK
        );
        for user in [0, CU_DEVICE_CPU] {
            assert_eq!(advise(address, GRANULE, used, user), OK);
        }
        for bytes in [0, 3, 6] {
            assert_eq!(ask(place, bytes, by, address, GRANULE), INVALID_VALUE);
        }
        assert_eq!(ask(null_mut(), 4, by, address, GRANULE), INVALID_VALUE);
        assert_eq!(users, [7; 4]);
        assert_eq!(ask(place, 12, by, address, GRANULE), OK);
        users[..2].sort_unstable();
        assert_eq!(users, [CU_DEVICE_CPU, 0, CU_DEVICE_INVALID, 7]);
        users = [7; 4];
        assert_eq!(ask(users.as_mut_ptr().cast(), 4, by, address, GRANULE), OK);
        assert!(users[0] != 7 && users[1..] == [7; 3], "{users:?}");
        assert_eq!((api.cuMemFree_v2.get().unwrap())(address), OK);
    }
}

#[test]
fn a_batch_with_no_arrays_or_impossible_counts_and_sizes_is_refused() {
    let (api, _directory) = entered();
    let alloc = api.cuMemAllocManaged.get().unwrap();
    let prefetch = api.cuMemPrefetchBatchAsync.get().unwrap();
    let discard = api.cuMemDiscardBatchAsync.get().unwrap();
    let (mut address, mut stream) = (0, null_mut());
    // SAFETY: the arrays have one value each, or are null, or have a count that is refused first.
    unsafe {
        assert_eq!(alloc(&mut address, GRANULE, 1), OK);
        assert_eq!((api.cuStreamCreate.get().unwrap())(&mut stream, 1), OK);
        let (mut place, mut start) = (DEVICE, 0);
        for (size, count, expected) in [
            (GRANULE, 1, OK),
            (GRANULE + 1, 1, INVALID_VALUE),
            (usize::MAX, 1, INVALID_VALUE),
            (GRANULE, usize::MAX, INVALID_VALUE),
        ] {
            let (mut at, mut size) = (address, size);
            let (at, size, to) = (&raw mut at, &raw mut size, &raw mut place);
            assert_eq!(
                prefetch(at, size, count, to, &mut start, 1, 0, stream),
                expected
            );
            assert_eq!(discard(at, size, count, 0, stream), expected);
            for (at, size, to, from) in [
                (null_mut(), size, to, &raw mut start),
                (at, null_mut(), to, &raw mut start),
                (at, size, null_mut(), &raw mut start),
                (at, size, to, null_mut()),
            ] {
                let code = prefetch(at, size, count, to, from, 1, 0, stream);
                assert_eq!(code, INVALID_VALUE);
            }
        }
        assert_eq!((api.cuStreamDestroy_v2.get().unwrap())(stream), OK);
        assert_eq!((api.cuMemFree_v2.get().unwrap())(address), OK);
    }
}

#[test]
fn without_a_context_only_virtual_memory_calls_succeed() {
    let (api, _directory) = loaded();
    let props = CUmemAllocationProp::pinned(DEVICE);
    let access = CUmemAccessDesc {
        location: DEVICE,
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let (mut address, mut handle, mut free, mut total) = (0, 0, 0, 0);
    let (mut stream, mut event, mut context) = (null_mut(), null_mut(), null_mut());
    // SAFETY: all pointers are to locals, and every object made here is released here.
    unsafe {
        assert_eq!((api.cuCtxGetCurrent)(&mut context), OK);
        assert!(context.is_null());
        assert_eq!(
            (api.cuMemAddressReserve)(&mut address, GRANULE, 0, 0, 0),
            OK
        );
        assert_eq!((api.cuMemCreate)(&mut handle, GRANULE, &props, 0), OK);
        assert_eq!((api.cuMemMap)(address, GRANULE, 0, handle, 0), OK);
        assert_eq!((api.cuMemSetAccess)(address, GRANULE, &access, 1), OK);
        assert_eq!(
            (api.cuMemGetInfo_v2)(&mut free, &mut total),
            INVALID_CONTEXT
        );
        assert_eq!(
            (api.cuMemsetD8_v2.get().unwrap())(address, 1, 4),
            INVALID_CONTEXT
        );
        assert_eq!(
            (api.cuMemcpyDtoD_v2)(address, address + 8, 4),
            INVALID_CONTEXT
        );
        assert_eq!(
            (api.cuStreamCreate.get().unwrap())(&mut stream, 0),
            INVALID_CONTEXT
        );
        assert_eq!(
            (api.cuEventCreate.get().unwrap())(&mut event, 0),
            INVALID_CONTEXT
        );
        assert_eq!((api.cuCtxSynchronize)(), INVALID_CONTEXT);
        assert_eq!((api.cuCtxPopCurrent_v2)(&mut context), INVALID_CONTEXT);
        assert_eq!((api.cuMemUnmap)(address, GRANULE), OK);
        assert_eq!((api.cuMemRelease)(handle), OK);
        assert_eq!((api.cuMemAddressFree)(address, GRANULE), OK);
    }
}

#[test]
fn a_stream_names_its_context() {
    let (api, _directory) = loaded();
    let ask = api.cuStreamGetCtx.get().unwrap();
    let (mut context, mut found, mut stream) = (null_mut(), null_mut(), null_mut());
    // SAFETY: all pointers are to locals or null, and the stream is destroyed here.
    unsafe {
        assert_eq!((api.cuDevicePrimaryCtxRetain)(&mut context, 0), OK);
        assert_eq!(ask(null_mut(), &mut found), INVALID_CONTEXT);
        assert_eq!((api.cuCtxPushCurrent_v2)(context), OK);
        assert_eq!((api.cuStreamCreate.get().unwrap())(&mut stream, 1), OK);
        for stream in [stream, null_mut()] {
            found = null_mut();
            assert_eq!(ask(stream, &mut found), OK);
            assert_eq!(found, context);
        }
        assert_eq!(ask(stream, null_mut()), INVALID_VALUE);
        assert_eq!((api.cuStreamDestroy_v2.get().unwrap())(stream), OK);
        let gone = ask(stream, &mut found);
        assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!((api.cuCtxPopCurrent_v2)(null_mut()), OK);
        assert_eq!((api.cuDevicePrimaryCtxRelease)(0), OK);
    }
}

#[test]
fn codes_have_names_that_stay() {
    let (api, _directory) = loaded();
    let name = |code: CUresult| {
        let mut text = null();
        // SAFETY: the result is written to a local; a name is null-terminated and is never freed.
        unsafe {
            let answer = (api.cuGetErrorName.get().unwrap())(code, &mut text);
            let told = (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_str().unwrap());
            (answer, told)
        }
    };
    assert_eq!(name(OK), (OK, Some("CUDA_SUCCESS")));
    assert_eq!(
        name(INVALID_CONTEXT),
        (OK, Some("CUDA_ERROR_INVALID_CONTEXT"))
    );
    assert_eq!(name(CUresult(12_345)), (INVALID_VALUE, None));
    // SAFETY: null is what is tested.
    let answer = unsafe { (api.cuGetErrorString.get().unwrap())(OK, null_mut()) };
    assert_eq!(answer, INVALID_VALUE);
}
