//! PyTorch's memory from a heap of cuvmm.
//!
//! `libcuvmm_torch.so` has the C functions that `torch.cuda.memory.CUDAPluggableAllocator` takes.
//! It is not linked with PyTorch and builds without it. The package's README describes its use and
//! its environment variables.
//!
//! Each device has one [heap](cuvmm::Heap), in its primary context, which is PyTorch's too. The
//! device's first allocation makes it; it is never dropped.
//!
//! `sharing`, `api` and this file have the functions of C.
//!
//! `unsafe` is allowed here to export functions under their C names.
#![allow(unsafe_code)]

mod api;
mod asked;
mod attachments;
mod blocks;
mod capsules;
mod captures;
mod collecting;
mod copies;
mod cxx;
mod edge;
mod entered;
mod error;
mod exit;
mod extents;
mod figures;
mod folder;
mod fork;
mod graph_tags;
mod graphs;
mod groups;
mod guards;
mod heaps;
mod history;
mod interpreter;
mod keepers;
mod keeping;
mod kept;
mod lent;
mod limits;
mod live;
mod observers;
mod offers;
mod paged;
mod profiler;
mod publications;
mod recording;
mod settings;
mod shareable;
mod sharing;
mod stats;
mod table;
mod tags;
mod waits;

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use self::cxx::Exception;
use self::edge::{complain, guard};
use self::error::Error;
use self::graphs::Route;

pub use self::api::*;
pub use self::capsules::*;
pub use self::copies::*;
pub use self::extents::*;
pub use self::graph_tags::*;
pub use self::groups::*;
pub use self::keepers::*;
pub use self::keeping::*;
pub use self::kept::*;
pub use self::lent::*;
pub use self::observers::cuvmm_set_observer;
pub use self::paged::*;
pub use self::recording::*;
pub use self::sharing::*;
pub use self::waits::*;

/// The function that PyTorch's exceptions name.
const MALLOC: &CStr = c"cuvmm_malloc";

/// The outcome of an allocation, with nothing to drop, so that exceptions can pass it.
#[derive(Clone, Copy)]
enum Outcome {
    Address(*mut c_void),
    Throw(Exception),
}

/// Allocates `size` bytes on a device for work on a stream (`alloc_fn`).
///
/// The address is a multiple of 512. Returns null for a size of 0. On a thread under a tag the
/// memory is a block of the tag, which can sleep, unless an open pool of graphs takes the request:
/// then it is the pool's, or, if the tag was entered after the pool was opened, the tag's memory for
/// captures, which sleeps too.
///
/// If memory is short outside of pools and tags, [collects garbage](cuvmm_set_collector) once and
/// tries again, if a collector is set.
///
/// If memory is still short, throws PyTorch's `c10::OutOfMemoryError`. Other failures (such as the
/// per-thread default stream, or a panic) throw its `c10::Error`. Without PyTorch in the process,
/// and in a forked child of a process that has used this library, prints one line on standard error
/// and returns null.
///
/// # Safety
/// `stream` is a stream of the device's primary context, and stays one until [`cuvmm_stream_end`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cuvmm_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // The filters called there may throw, so the call is not within `guard`.
    let route = graphs::route(device, stream);
    let outcome = guard(None, || Some(allocated(size, device, stream, route)));
    match outcome.unwrap_or_else(panicked) {
        Outcome::Address(address) => address,
        // SAFETY: the exception is fresh. This frame has nothing to drop, and the callers are C++.
        Outcome::Throw(exception) => unsafe { exception.throw() },
    }
}

/// Returns the outcome of an allocation that has panicked: PyTorch would use null as an address.
#[cold]
fn panicked() -> Outcome {
    let text = "an allocation failed: an internal error of cuvmm, which standard error shows";
    let exception = guard(None, || Exception::error(MALLOC, text));
    exception.map_or(Outcome::Address(ptr::null_mut()), Outcome::Throw)
}

fn allocated(size: isize, device: c_int, stream: *mut c_void, route: Option<Route>) -> Outcome {
    let pool = route.map(|route| route.pool(device));
    // I-115: before any lock. Outside of pools PyTorch holds none.
    let seen = history::begin(pool.is_none());
    let seen = seen.as_ref();
    let stream = handle(stream);
    let attempt = || match pool {
        None if entered::is_entered() => {
            tags::allocations::allocate(size, device, seen).map_err(Box::new)
        }
        None => edge::calling_back(|| live::allocate(size, device, stream, pool, seen)),
        Some(_) => live::allocate(size, device, stream, pool, seen),
    };
    // No lock is held here: another thread may have to free memory before it lets the collector
    // run.
    let outcome = match attempt() {
        Err(error) if pool.is_none() && collecting::helps(&error) => {
            attempt().map_err(|it| (it, ""))
        }
        outcome => outcome.map_err(|it| (it, collecting::ADVICE)),
    };
    match outcome {
        Ok(address) => Outcome::Address(ptr::with_exposed_provenance_mut(address)),
        Err((error, advice)) => {
            if let Some(seen) = seen.filter(|_| error.is_out_of_memory()) {
                seen.failed(device, u64::try_from(size).unwrap_or_default(), stream);
            }
            failed(size, device, &error, advice)
        }
    }
}

/// Allocates memory outside of pools and tags, for callers that are not C++. Unlike
/// [`cuvmm_malloc`] never throws, but returns null and keeps the error for [`cuvmm_last_error`].
///
/// # Safety
/// The requirements of [`cuvmm_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_try_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    tried(size, device, stream, |_| false)
}

/// Allocates memory like [`cuvmm_try_malloc`]. If memory is short, calls `collector` once and tries
/// again. The collector frees memory which its program does not reach any more; it runs on this
/// thread with no lock of this library held, but not from within itself, nor while a graph may be
/// captured.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`]. The collector unwinds into no caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_collecting_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
    collector: collecting::Collector,
) -> *mut c_void {
    tried(size, device, stream, |error| {
        collecting::collects(error, Some(collector))
    })
}

/// Allocates memory, tries again if `helps`, or keeps the error.
fn tried(
    size: isize,
    device: c_int,
    stream: *mut c_void,
    helps: impl FnOnce(&Error) -> bool,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        let (stream, seen) = (handle(stream), history::begin(true));
        let seen = seen.as_ref();
        let attempt = || edge::calling_back(|| live::allocate(size, device, stream, None, seen));
        let outcome = attempt().or_else(|error| match helps(&error) {
            true => attempt(),
            false => Err(error),
        });
        match outcome {
            Ok(address) => ptr::with_exposed_provenance_mut(address),
            Err(error) => {
                heaps::note_failure(device);
                if let Some(seen) = seen.filter(|_| error.is_out_of_memory()) {
                    seen.failed(device, u64::try_from(size).unwrap_or_default(), stream);
                }
                edge::keep(&error);
                ptr::null_mut()
            }
        }
    })
}

/// Reports a failed allocation, with advice if memory was short.
#[cold]
fn failed(size: isize, device: c_int, error: &Error, advice: &str) -> Outcome {
    heaps::note_failure(device);
    edge::keep(error);
    let bytes = u64::try_from(size);
    if error.is_out_of_memory() {
        observers::notify(device, bytes.unwrap_or_default());
    }
    let advice = if error.is_out_of_memory() { advice } else { "" };
    let exception = if error.is_out_of_memory() {
        let begins = stats::out_of_memory(device, bytes.unwrap_or_default());
        let table = stats::table(device).unwrap_or_default();
        Exception::out_of_memory(MALLOC, &format!("{begins} cuvmm: {error}{advice}\n{table}"))
    } else {
        None
    };
    let size = error::asked(size);
    let text = format!("allocation of {size} on device {device} failed: {error}{advice}");
    // A forked child does as little as possible.
    let exception = exception.or_else(|| match error {
        Error::Forked => None,
        _ => Exception::error(MALLOC, &text),
    });
    if let Some(exception) = exception {
        return Outcome::Throw(exception);
    }
    complain(error, &text);
    Outcome::Address(ptr::null_mut())
}

/// Frees an allocation in the order of its home stream and its recorded streams (`free_fn`).
/// `stream` counts as a recorded stream.
///
/// Finds the allocation by its address, sooner if it is of `device`; the size is ignored. Prints
/// one line on standard error for an address that is not allocated. Does nothing for null and in a
/// forked child.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`]. Only work already queued on these streams still uses the
/// memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_free(
    address: *mut c_void,
    _size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    guard((), || {
        let address = address.addr();
        let seen = history::begin_end(true);
        let seen = seen.as_ref();
        let freed = live::free(address, device, handle(stream), seen);
        let freed =
            freed.unwrap_or_else(|| tags::allocations::free(address, seen).map_err(Box::new));
        if let Err(error) = freed {
            not_freed(address, &error);
        }
    });
}

#[cold]
fn not_freed(address: usize, error: &Error) {
    let text = match error {
        Error::NotAllocated => format!("free of {address:#x}: {error}"),
        error => format!("free of {address:#x}: {error}; the memory is not reused"),
    };
    complain(error, &text);
}

/// Records that work of another stream uses an allocation (`set_record_stream_fn`).
///
/// Does nothing for null, in a forked child, and for memory of other libraries, which PyTorch
/// passes too. If the use cannot be recorded, prints one line on standard error, and the memory is
/// never reused.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_record_stream(address: *mut c_void, stream: *mut c_void) {
    guard((), || {
        if let Err(error) = live::record(address.addr(), handle(stream)) {
            let address = address.addr();
            complain(
                &error,
                &format!(
                    "use of {address:#x} by another stream: {error}; the memory is not reused"
                ),
            );
        }
    });
}

/// Records a use like [`cuvmm_record_stream`]. On failure returns a negative number and changes
/// nothing; the stream must not use the memory then.
///
/// # Safety
/// The requirements of [`cuvmm_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_try_record_stream(
    address: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    edge::status(|| live::try_record(address.addr(), handle(stream)))
}

/// Gives free memory of all heaps whose work is complete back to the driver (`set_reset_fn`;
/// PyTorch's `empty_cache`). Closes pools that this thread opened for captures that have failed.
/// Waits for the GPU only to end what was put off during a capture: released pools, withdrawn
/// versions, and attachments. During a capture, memory whose work must be asked for stays.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_reset() {
    guard((), || {
        if fork::is_child() {
            return;
        }
        graphs::close();
        graphs::collect();
        for (device, heap) in heaps::all() {
            if let Err(error) = heap.trim().map_err(Error::from) {
                complain(&error, &format!("trim of device {device}: {error}"));
            }
        }
    });
}

fn handle(stream: *mut c_void) -> u64 {
    stream.addr() as u64
}
