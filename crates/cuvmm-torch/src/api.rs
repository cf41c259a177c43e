//! The functions of C beyond those that allocate: settings, figures, limits, pools of graphs.
//!
//! Functions that return an `int` return 0, or a negative number and keep the error for
//! [`cuvmm_last_error`]: -3 if memory was short, -4 if a name is not published. Functions that
//! write a text end it with a zero byte, write it only if it fits in `length` bytes, and return the
//! bytes needed, that byte included. Functions that write a device's figures return 0 if the device
//! has no heap yet, and in a forked child.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C
//! passes.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_double, c_int, c_void};
use std::ptr;

use cuvmm::driver::StreamHandle;

use crate::collecting::{self, Collector};
use crate::cxx::{Exception, Filter, StreamFilter};
use crate::edge::{self, complain, guard, status};
use crate::error::{Error, asked};
use crate::graphs;
use crate::settings::Configuration;
use crate::table::PoolId;
use crate::tags::host::Host;
use crate::{entered, fork, heaps, history, limits, live, stats, tags};

/// The function that throws if the pool is open already.
const BEGIN: &CStr = c"cuvmm_begin_allocate_to_pool";

/// Advice in errors for a lack of memory in a `MemPool`.
const ADVICE: &str = ". A MemPool keeps the memory of tensors that are gone until it is dropped, as \
    cuvmm.trim does. Tensors in reference cycles keep theirs until gc.collect()";

/// Sets how the heaps are made, before the first allocation. The README names the keys of the JSON
/// object; an unknown key is an error.
///
/// # Safety
/// `json` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_configure(json: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        heaps::configure(Configuration::parse(json)?)
    })
}

/// Writes the text of the calling thread's last error, or an empty text.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_last_error(buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: the caller says so.
    unsafe { text(Some(edge::last().0.into_bytes()), buffer, length) }
}

/// Returns the status of the calling thread's last error: -3 if memory was short, -4 if a name is
/// not published, -1 for another reason, 0 without an error.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_last_status() -> c_int {
    edge::last().1
}

/// Returns the library's version, a static text.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Sets the limit of a device to a fraction of its memory (`set_memory_fraction_fn`). Prints one
/// line on standard error if that fails.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_memory_fraction(fraction: c_double, device: c_int) {
    guard((), || {
        if let Err(error) = limits::set_fraction(fraction, device) {
            complain(&error, &format!("limit of device {device}: {error}"));
        }
    });
}

/// Returns the limit of a device as a fraction of its memory; a negative number if that fails.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_get_memory_fraction(device: c_int) -> c_double {
    guard(-1.0, || match limits::fraction(device) {
        Ok(fraction) => fraction,
        Err(error) => {
            edge::keep(&error);
            -1.0
        }
    })
}

/// Writes the bytes that can still be allocated on a device, and its limit.
///
/// # Safety
/// The addresses are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_mem_get_info(
    device: c_int,
    free: *mut u64,
    total: *mut u64,
) -> c_int {
    status(|| {
        if free.is_null() || total.is_null() {
            return Err(Error::Null);
        }
        let (bytes, limit) = limits::info(device)?;
        // SAFETY: the caller says so.
        unsafe {
            free.write(bytes);
            total.write(limit);
        }
        Ok(())
    })
}

/// Returns the first address of the allocation that contains an address, and writes its bytes
/// (`set_base_alloc_fn`). An address outside this library's allocations is returned unchanged, with
/// 0 bytes.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_base_alloc(address: *mut c_void, size: *mut usize) -> *mut c_void {
    guard(address, || {
        let (first, bytes) = match live::containing(address.addr()) {
            Some((first, bytes)) => (ptr::with_exposed_provenance_mut(first), bytes),
            None => (address, 0),
        };
        if !size.is_null() {
            // SAFETY: the caller says so.
            unsafe { size.write(bytes) };
        }
        first
    })
}

/// Returns the access that a device has at an address: 0 none, 1 reading, 3 reading and writing.
/// Negative where nothing is mapped, and in memory of `cudaMalloc`.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_access(address: *const c_void, device: c_int) -> c_int {
    guard(-2, || {
        if fork::is_child() {
            edge::keep(&Error::Forked);
            return -1;
        }
        heaps::access(address.addr() as u64, device).unwrap_or_else(|error| {
            edge::keep(&error);
            -1
        })
    })
}

/// Opens a pool (`set_begin_allocate_to_pool`): allocations for the streams that `filter` accepts
/// come from the pool's own heap. The pool gets one more user. Waits until no thread of this
/// library waits for a device, which would break the capture that follows.
///
/// Throws PyTorch's `c10::Error` if the pool is open already, as PyTorch's own allocator does: two
/// captures into one pool would take each other's memory. Without PyTorch in the process, prints
/// one line on standard error and keeps the error for [`cuvmm_last_error`]. A pool whose capture
/// has failed does not count as open.
///
/// # Safety
/// `filter` is null or a `std::function<bool(cudaStream_t)>`, as C++ passes it by value; the
/// function copies it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cuvmm_begin_allocate_to_pool(
    device: c_int,
    pool: PoolId,
    filter: *const StreamFilter,
) {
    let exception = guard(None, || {
        // SAFETY: the caller says so.
        let filter = unsafe { Filter::of(filter) };
        let outcome = graphs::begin(device, pool, filter);
        if let Err(error @ Error::Recording(..)) = &outcome
            && let Some(exception) = Exception::error(BEGIN, &error.to_string())
        {
            edge::keep(error);
            return Some(exception);
        }
        report(device, pool, outcome);
        None
    });
    if let Some(exception) = exception {
        // SAFETY: the exception is fresh. This frame has nothing to drop, and the callers are C++.
        unsafe { exception.throw() }
    }
}

/// Closes the pool that the last [`cuvmm_begin_allocate_to_pool`] opened, on this thread if this
/// thread opened it (`set_end_allocate_to_pool_fn`).
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_end_allocate_to_pool(device: c_int, pool: PoolId) {
    guard((), || report(device, pool, graphs::end(device, pool)));
}

/// Takes a user from a pool (`set_release_pool`). After the last one, waits for the work of the
/// device and frees the pool's memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_release_pool(device: c_int, pool: PoolId) {
    guard((), || report(device, pool, graphs::release(device, pool)));
}

fn report(device: c_int, pool: PoolId, outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        let PoolId(first, second) = pool;
        complain(
            &error,
            &format!("memory pool ({first}, {second}) of device {device}: {error}"),
        );
    }
}

/// Sets the collector: a function that frees memory which its program does not reach any more, such
/// as Python's garbage collector. [`cuvmm_malloc`](crate::cuvmm_malloc) calls it once for each
/// request that lacks memory, before the request fails. Null removes the collector and waits until
/// no other thread is within one; until another is set, functions passed to
/// [`cuvmm_collecting_malloc`](crate::cuvmm_collecting_malloc) are not called either.
///
/// The collector runs on the allocating thread, with no lock of this library held. It is not called
/// from within itself, for memory of pools and tags, while a graph may be captured, nor by
/// `cuvmm_try_malloc` and `cuvmm_tag_malloc`.
///
/// # Safety
/// Any thread may call the collector until it is replaced, and it unwinds into no caller. A thread
/// that holds a lock for which the collector waits must not pass null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_set_collector(collector: Option<Collector>) {
    guard((), || collecting::set(collector));
}

/// Writes a device's figures as one JSON object. Makes no driver call.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_stats(device: c_int, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: the caller says so.
    unsafe { text(guard(None, || stats::json(device)), buffer, length) }
}

/// Writes a device's figures under the names of `torch.cuda.memory_stats_as_nested_dict`, as one
/// JSON object.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_memory_stats(
    device: c_int,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    // SAFETY: the caller says so.
    unsafe { text(guard(None, || stats::memory(device)), buffer, length) }
}

/// Makes the current figures of a device its peaks.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_reset_peak_stats(device: c_int) {
    guard((), || stats::reset_peaks(device));
}

/// Sets a device's sums and counts to 0.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_reset_accumulated_stats(device: c_int) {
    guard((), || stats::reset_accumulated(device));
}

/// Writes a device's live allocations and the bytes that it holds as one JSON object.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_snapshot(
    device: c_int,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    // SAFETY: the caller says so.
    unsafe { text(guard(None, || stats::snapshot(device)), buffer, length) }
}

/// Writes a device's figures as a table for people.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_table(device: c_int, buffer: *mut c_char, length: usize) -> usize {
    let table = guard(None, || stats::table(device)).map(String::into_bytes);
    // SAFETY: the caller says so.
    unsafe { text(table, buffer, length) }
}

/// Enters a tag on the calling thread, until [`cuvmm_tag_leave`]. Code that may end out of order
/// uses [`cuvmm_tag_begin`].
///
/// # Safety
/// `name` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_tag_enter(name: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let name = unsafe { edge::read(name) }?.ok_or(Error::NotText)?;
        entered::enter(name)?;
        Ok(())
    })
}

/// Enters a tag on the calling thread, until [`cuvmm_tag_end`] of the token that it writes. An empty
/// name stands for no tag: until it ends, the thread's allocations are as they are outside of tags.
///
/// # Safety
/// `name` is null or ends with a zero byte. `token` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_tag_begin(name: *const c_char, token: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let name = unsafe { edge::read(name) }?.ok_or(Error::NotText)?;
        if token.is_null() {
            return Err(Error::Null);
        }
        let entered = entered::enter(name)?;
        // SAFETY: the caller says so.
        unsafe { token.write(entered) };
        Ok(())
    })
}

/// Ends the tag of a token, in any order and on any thread; other tags stay. Does nothing for a
/// token that has ended.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_tag_end(token: u64) {
    guard((), || entered::end(token));
}

/// Ends the calling thread's innermost tag, if any.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_tag_leave() {
    guard((), entered::leave);
}

/// Allocates a block of the tenant named after the calling thread's innermost tag, or `default`,
/// for `torch.cuda.MemPool`. Returns null for a size of 0, and after a failure, with one line on
/// standard error.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_tag_malloc(
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        // PyTorch may hold locks.
        let seen = history::begin(false);
        answered(
            size,
            device,
            tags::allocations::allocate(size, device, seen.as_ref()),
        )
    })
}

/// Returns the address of an allocation under a tag, or reports the failure.
pub(crate) fn answered(size: isize, device: c_int, outcome: Result<usize, Error>) -> *mut c_void {
    outcome.map_or_else(
        |error| {
            let advice = match error.is_out_of_memory() {
                true => ADVICE,
                false => "",
            };
            complain(
                &error,
                &format!(
                    "allocation of {} under a tag on device {device} failed: {error}{advice}",
                    asked(size)
                ),
            );
            ptr::null_mut()
        },
        ptr::with_exposed_provenance_mut,
    )
}

/// Frees memory of [`cuvmm_tag_malloc`], awake or asleep. It is reused when all work now queued on
/// the device is complete. Prints one line on standard error for an address that is not allocated.
///
/// # Safety
/// Work queued later does not use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_tag_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    guard((), || {
        // PyTorch may hold locks.
        let seen = history::begin_end(false);
        if let Err(error) = tags::allocations::free(address.addr(), seen.as_ref()) {
            complain(&error, &format!("free of {:#x}: {error}", address.addr()));
        }
    });
}

/// Puts tags to sleep, given by a JSON list of names, or `null` for all awake tags: their memory, also
/// that of [paged caches](crate::cuvmm_paged_new), goes back to the driver, and their addresses stay. Waits for all work of the device. Refused
/// while a graph is captured, also if the capture begins during the wait. With `keep` 0 the contents
/// are lost. With 1 they are copied to host memory, which is kept for the next sleep; with 2 it goes
/// back to the system after waking.
///
/// With 0 too, what [`cuvmm_keep`](crate::cuvmm_keep) has marked is copied, to host memory
/// that is kept.
///
/// An error (another `keep`, a tag that is asleep or unknown, work that does not end within 60 s, too
/// little host memory (-3), a refusal of the driver) changes nothing. If the driver then also refuses
/// to map a tag's memory again, that tag sleeps.
///
/// # Safety
/// `tags` is null or ends with a zero byte. No work queued later uses the memory before its tag is
/// woken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_sleep(tags: *const c_char, keep: c_int) -> c_int {
    // SAFETY: the caller says so.
    unsafe { cuvmm_sleep_within(tags, keep, tags::sleep::LONGEST.as_secs_f64()) }
}

/// Puts tags to sleep as [`cuvmm_sleep`] does, and waits for work at most some seconds in all, from 0
/// to infinity. Another number is an error.
///
/// # Safety
/// The requirements of [`cuvmm_sleep`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_sleep_within(
    tags: *const c_char,
    keep: c_int,
    seconds: c_double,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        tags::sleep::sleep(tags, Host::of(keep)?, edge::timeout(seconds)?)
    })
}

/// Takes the host memory that sleep with contents will need, for tags given by a JSON list of names,
/// or `null` for all awake tags. Sleep is then as fast as it can be. Refused while a graph is
/// captured.
///
/// An error (a tag that is asleep or unknown, too little host memory) takes nothing for that tag.
///
/// # Safety
/// `tags` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_host_prepare(tags: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        tags::host::prepare(tags)
    })
}

/// Gives host memory that has no contents back to the system, for tags given by a JSON list of
/// names, or `null` for all, and writes the bytes. Refused while a graph is captured. An error (an
/// unknown tag) changes nothing.
///
/// # Safety
/// `tags` is null or ends with a zero byte, and `bytes` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_host_release(tags: *const c_char, bytes: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        let given = tags::host::release(tags)?;
        if !bytes.is_null() {
            // SAFETY: the caller says so.
            unsafe { bytes.write(given) };
        }
        Ok(())
    })
}

/// Sets the most bytes of host memory for contents of sleeping tags, of all devices together. Memory
/// beyond it is kept until it is released. By default there is no limit but the system's.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_host_limit(bytes: u64) {
    guard((), || tags::host::set_limit(bytes));
}

/// Wakes tags, given by a JSON list of names, or `null` for all sleeping tags. They get memory at
/// their addresses again, with the contents if kept. Refused while a graph is captured, also if the
/// capture begins during a wait for memory.
///
/// An error (a tag that is awake or unknown, too little memory within 60 s (-3), a refusal of the
/// driver) changes nothing.
///
/// # Safety
/// `tags` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_wake(tags: *const c_char) -> c_int {
    // SAFETY: the caller says so.
    unsafe { cuvmm_wake_within(tags, tags::sleep::LONGEST.as_secs_f64()) }
}

/// Wakes tags as [`cuvmm_wake`] does, and waits for memory at most some seconds in all, from 0 to
/// infinity. Another number is an error.
///
/// # Safety
/// The requirements of [`cuvmm_wake`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_wake_within(tags: *const c_char, seconds: c_double) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let tags = unsafe { edge::read(tags) }?.unwrap_or("null");
        tags::sleep::wake(tags, edge::timeout(seconds)?)
    })
}

/// Puts tags to sleep and wakes others in their memory, so that their contents are copied in both
/// directions at once. Both are given by a JSON list of names; `null` is all awake tags, and all
/// sleeping ones. Contents are kept, with `keep` 1 or 2 as in `cuvmm_sleep`. Refused while a graph is
/// captured, also if the capture begins during a wait. Tags of several devices go in turn.
///
/// An error (another `keep`, a tag that is unknown or in the wrong state, work that does not end, too
/// little memory of the host or the device (-3), a refusal of the driver) changes nothing. If the
/// driver then also refuses to restore a tag's memory, that tag sleeps with its contents.
///
/// # Safety
/// Both texts are null or end with a zero byte. No work queued later uses the memory of the tags
/// that fall asleep before they are woken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_exchange(
    sleep: *const c_char,
    wake: *const c_char,
    keep: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let (sleep, wake) = unsafe { (edge::read(sleep)?, edge::read(wake)?) };
        let after = match keep {
            1 => Host::Keep,
            2 => Host::Release,
            _ => return Err(Error::Keep(keep)),
        };
        let (sleep, wake) = (sleep.unwrap_or("null"), wake.unwrap_or("null"));
        tags::exchange::exchange(sleep, wake, after)
    })
}

/// Writes the names of sleeping tags as a JSON list. Makes no driver call.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_asleep(buffer: *mut c_char, length: usize) -> usize {
    let names = guard(None, || serde_json::to_vec(&tags::asleep()).ok());
    // SAFETY: the caller says so.
    unsafe { text(names, buffer, length) }
}

/// Announces that the program is about to destroy a stream (`cuStreamDestroy`). With `wait` other
/// than 0 waits for its work. Memory used on the stream stays usable, and a later stream with its
/// handle is another stream.
///
/// Returns 0 if the stream has ended for this library, 1 without `wait` if its work is not
/// complete, and a negative number if it captures or its work has failed. Only 0 changes anything.
///
/// # Safety
/// `stream` is a stream. From now on no function of this library gets it, except to free memory
/// allocated for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_stream_end(stream: *mut c_void, wait: c_int) -> c_int {
    let mut is_busy = false;
    let status = status(|| {
        let handle = crate::handle(stream);
        is_busy = !heaps::end_stream(handle, wait != 0)?;
        if !is_busy {
            graphs::end_stream(StreamHandle(handle));
        }
        Ok(())
    });
    match is_busy {
        true => 1,
        false => status,
    }
}

/// Writes a text if any. Returns the bytes needed, or 0.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
unsafe fn text(text: Option<Vec<u8>>, buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: the caller says so.
    text.map_or(0, |text| unsafe { edge::write(text, buffer, length) })
}
