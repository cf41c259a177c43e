//! Reports to PyTorch's profiler (`torch.profiler.profile(profile_memory=True)`), which PyTorch's own
//! allocator makes too: one for each allocation and for each end of one.
//!
//! The functions of `libc10.so` are found in the process, under their names in the Itanium C++ ABI,
//! which contain the types of their parameters.
//!
//! `unsafe` is used to call them.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::cxx;
use crate::heaps::DeviceHeap;

/// `c10::memoryProfilingEnabled()`.
const ENABLED: &CStr = c"_ZN3c1022memoryProfilingEnabledEv";
/// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`.
const REPORT: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";

/// `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

/// `c10::Device`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Place {
    kind: i8,
    index: i8,
}

#[derive(Clone, Copy)]
struct Functions {
    is_enabled: unsafe extern "C" fn() -> bool,
    report: unsafe extern "C" fn(*mut c_void, i64, usize, usize, Place),
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Finds the functions. Returns `false` if PyTorch is not in the process, or lacks one of them.
pub(crate) fn find() -> bool {
    let found = || {
        Some(Functions {
            is_enabled: cxx::function(ENABLED)?,
            report: cxx::function(REPORT)?,
        })
    };
    FUNCTIONS.get().is_some() || found().is_some_and(|it| FUNCTIONS.set(it).is_ok())
}

/// Returns `true` if a profiler of memory is active on this thread.
pub(crate) fn is_active() -> bool {
    // SAFETY: the function is what its name says. It reads state of the thread.
    FUNCTIONS
        .get()
        .is_some_and(|it| unsafe { (it.is_enabled)() })
}

/// Reports an allocation of `bytes`, or with a negative number the end of one. Called with no lock
/// held: the profiler takes some of its own.
pub(crate) fn report(of: &DeviceHeap, address: usize, bytes: i64) {
    let Some(functions) = FUNCTIONS.get() else {
        return;
    };
    let held = of.held();
    let allocated = of.table().figures.all.bytes.current;
    let whole = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let place = Place {
        kind: CUDA,
        index: i8::try_from(of.device.ordinal().0).unwrap_or(-1),
    };
    let address = ptr::without_provenance_mut(address);
    // SAFETY: the function is what its name says, and takes the address as a number.
    unsafe { (functions.report)(address, bytes, whole(allocated), whole(held), place) };
}
