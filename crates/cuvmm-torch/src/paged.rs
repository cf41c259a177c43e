//! Paged caches of keys and values: see [`cuvmm::paged`].
//!
//! A cache is known to C by its number. It lives until [`cuvmm_paged_end`]. Its memory is in the tag of
//! its name, and sleeps and wakes with that.
//!
//! Block numbers are passed as an array of signed integers of 4 or 8 bytes, not necessarily aligned.
//!
//! `unsafe` is used to export the functions under their C names, and for the texts, numbers and results
//! of C.
#![allow(unsafe_code)]

mod build;
pub(crate) mod caches;
mod numbers;
mod pressure;
mod requests;

use std::ffi::{c_char, c_int, c_void};

use serde_json::json;

use self::caches::{Cache, Turn, find};
use self::pressure::OnPressure;
use crate::collecting::{self, Collector};
use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::tags;

/// Makes a paged cache, and writes its number.
///
/// The keys of the JSON object: `device`; `stream`, the handle of the home stream; `name`, the tag that
/// the memory is in, which other caches and allocations may share; `blocks`, the number of block numbers; `groups`, a
/// list of groups of layers, each with `layers`, `tokens` and `parts`, a list of
/// `[heads, elements, bytes of an element]`; and, where they are not null, `layout` (`block-major`,
/// `token-major` or `layer-major`), `extent` in bytes, `pinned`, a list of block numbers,
/// `precommit`, the number of blocks for which memory is mapped ahead of use, and `timeout`,
/// the seconds that [`cuvmm_paged_back`] and [`cuvmm_paged_reserve`] wait for memory in use.
///
/// Reserves addresses and backs the pinned blocks, as
/// [`PagedKvBuilder::build`](cuvmm::paged::PagedKvBuilder::build) does. An error (a shape that cannot be,
/// a tag that sleeps or is shareable, the name of the heap's tenant, too little memory (-3)) makes no
/// cache.
///
/// # Safety
/// `json` is null or ends with a zero byte, and `token` is null or valid for writing. The stream is one
/// of the device's primary context, and stays one until [`cuvmm_stream_end`](crate::cuvmm_stream_end).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_new(json: *const c_char, token: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        // SAFETY: the caller says so.
        let token = unsafe { token.as_mut() }.ok_or(Error::Null)?;
        *token = edge::calling_back(|| build::build(json))?;
        Ok(())
    })
}

/// Ends a cache. Its memory and addresses are free once the work of its streams is complete, which
/// nothing waits for. Does nothing for a cache that has ended, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_end(token: u64) {
    guard((), || {
        if let Some((of, tag)) = caches::end(token) {
            tags::paged::ended_cache(of, &tag);
        }
    });
}

/// Writes a cache's `block_bytes` and `extent` as JSON. On failure returns 0 and keeps the error.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged(token: u64, buffer: *mut c_char, length: usize) -> usize {
    let describe = |cache: &Cache| {
        let kv = cache.kv();
        let (block_bytes, extent) = (kv.block_bytes(), kv.extent());
        Ok(json!({ "block_bytes": block_bytes, "extent": extent }))
    };
    // SAFETY: the caller says so.
    unsafe { edge::write_json(|| describe(&*find(token)?), buffer, length) }
}

/// Writes the `address`, the `shape` and the `strides` in elements of one part of a layer,
/// `[block, token, head, element]`, as JSON. On failure returns 0 and keeps the error.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_view(
    token: u64,
    group: u32,
    layer: u32,
    part: u32,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let describe = |cache: &Cache| {
        let view = cache.kv().view(group as usize, layer, part as usize);
        let view = view.ok_or(Error::NoPart { group, layer, part })?;
        let (address, shape, strides) = (view.address().0, view.shape(), view.strides());
        Ok(json!({ "address": address, "shape": shape, "strides": strides }))
    };
    // SAFETY: the caller says so.
    unsafe { edge::write_json(|| describe(&*find(token)?), buffer, length) }
}

/// Writes a cache's figures ([`PagedStats`](cuvmm::paged::PagedStats)) as JSON. Makes no driver call. On
/// failure returns 0 and keeps the error.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_stats(
    token: u64,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let figures = |cache: &Cache| Ok(serde_json::to_value(cache.kv().stats()?)?);
    // SAFETY: the caller says so.
    unsafe { edge::write_json(|| figures(&*find(token)?), buffer, length) }
}

/// Backs blocks with memory, all or none. Makes no driver call where the memory is there. If memory is
/// short, calls functions of [`cuvmm_paged_on_pressure`], gives free memory of the heap back, and waits
/// for work or up to the cache's timeout; then calls `collector`, if it is not null, as
/// [`cuvmm_collecting_malloc`](crate::cuvmm_collecting_malloc) does, and tries once more without a
/// timeout. Too little memory is -3.
///
/// # Safety
/// `numbers` has `count` integers of `width` bytes. The collector unwinds into no caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_back(
    token: u64,
    numbers: *const c_void,
    count: usize,
    width: c_int,
    collector: Option<Collector>,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let numbers = unsafe { numbers::read(numbers, count, width) }?;
        let cache = find(token)?;
        requested(collector, |turn| cache.back(&numbers, turn))
    })
}

/// Backs blocks like [`cuvmm_paged_back`] if that needs no waiting: with memory that is free or idle in
/// the process, or charged to no process of the ledger. Calls no function, collects no garbage, and waits
/// for no work. Returns 1 if the blocks have memory, 0 if memory is short, and a negative number after an
/// error. No block has changed then.
///
/// # Safety
/// `numbers` has `count` integers of `width` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_try_back(
    token: u64,
    numbers: *const c_void,
    count: usize,
    width: c_int,
) -> c_int {
    answer(|| {
        // SAFETY: the caller says so.
        let numbers = unsafe { numbers::read(numbers, count, width) }?;
        find(token)?.try_back(&numbers)
    })
}

/// Requests blocks, and writes the request's number. The request waits in line for memory, also behind
/// requests of other processes of the ledger, while its caller goes on: a thread of this library makes
/// the attempts, and calls functions of [`cuvmm_paged_on_pressure`] at the first. Collects no garbage, and
/// the cache's timeout has no effect. The first attempt is made here, with the calls of
/// [`cuvmm_paged_try_back`], unless an earlier request waits.
///
/// Blocks are in use, all of them, when [`cuvmm_paged_request_take`] has returned 1. Memory that was
/// granted before, also at once, is the request's. The request lives until [`cuvmm_paged_request_end`],
/// which gives that memory back, or withdraws the request. An error that can be told at once (a block that
/// does not exist, a cache that sleeps) is the request's outcome.
///
/// # Safety
/// `numbers` has `count` integers of `width` bytes, and `request` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_request(
    token: u64,
    numbers: *const c_void,
    count: usize,
    width: c_int,
    request: *mut u64,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let numbers = unsafe { numbers::read(numbers, count, width) }?;
        // SAFETY: the caller says so.
        let request = unsafe { request.as_mut() }.ok_or(Error::Null)?;
        *request = requests::begin(token, &numbers)?;
        Ok(())
    })
}

/// Returns 1 if a request was granted or refused, 0 while it waits, and a negative number after an error.
/// Takes no lock of a pool or a cache, and makes no driver call.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_request_done(request: u64) -> c_int {
    answer(|| requests::is_done(request))
}

/// Waits until a request is granted or refused, or ended by another thread, at most some seconds, from 0
/// to infinity. Returns 1 if it was, 0 if it still waits, and a negative number after an error. Takes
/// nothing. Refuses to wait within a function of [`cuvmm_paged_on_pressure`] or a collector, for which the
/// request may wait.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_request_wait(request: u64, seconds: f64) -> c_int {
    answer(|| {
        let timeout = edge::timeout(seconds)?;
        requests::wait(request, timeout)
    })
}

/// Takes the blocks of a request. Returns 1 if they are in use now, 0 if it still waits, and a negative
/// number if it was refused, -3 for too little memory. Another call has the same outcome.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_request_take(request: u64) -> c_int {
    answer(|| requests::take(request))
}

/// Ends a request: withdraws it, or gives back the memory that it was granted. Blocks that it took, or
/// that other calls backed, stay in use. Returns 1 if it took its blocks, else 0. Does nothing for a
/// request that has ended, and in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_request_end(request: u64) -> c_int {
    guard(0, || c_int::from(requests::end(request)))
}

/// Reserves memory for exactly `count` blocks, the lowest that are not in use, with the steps of
/// [`cuvmm_paged_back`]. 0 gives the reserve up.
///
/// # Safety
/// The collector unwinds into no caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_reserve(
    token: u64,
    count: u32,
    collector: Option<Collector>,
) -> c_int {
    status(|| {
        let cache = find(token)?;
        requested(collector, |turn| cache.reserve(count, turn))
    })
}

/// Makes a request during which functions of the program may be called, and a second one, which does not
/// wait again, if garbage was collected after the first.
fn requested(
    collector: Option<Collector>,
    request: impl Fn(Turn) -> Result<(), Error>,
) -> Result<(), Error> {
    match edge::calling_back(|| request(Turn::First)) {
        Err(error) if collector.is_some() && collecting::collects(&error, collector) => {
            edge::calling_back(|| request(Turn::AfterCollecting))
        }
        outcome => outcome,
    }
}

/// Runs the body of a C function that answers a question. Returns 1 for yes, 0 for no, and a negative
/// number after an error.
fn answer(body: impl FnOnce() -> Result<bool, Error>) -> c_int {
    let mut yes = false;
    let status = status(|| {
        yes = body()?;
        Ok(())
    });
    match status {
        0 => c_int::from(yes),
        failed => failed,
    }
}

/// Gives up blocks in use, all or none. Their memory goes behind the work that is queued by now, or at
/// the end of the steps that have begun. Makes no driver call.
///
/// # Safety
/// `numbers` has `count` integers of `width` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_release(
    token: u64,
    numbers: *const c_void,
    count: usize,
    width: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let numbers = unsafe { numbers::read(numbers, count, width) }?;
        find(token)?.release(&numbers)
    })
}

/// Begins a step, and writes its number: blocks that are released before it ends keep their memory
/// until then.
///
/// # Safety
/// `step` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_step_begin(token: u64, step: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let step = unsafe { step.as_mut() }.ok_or(Error::Null)?;
        *step = caches::begin_step(token)?;
        Ok(())
    })
}

/// Ends a step, once its kernels are queued. Does nothing for a step or a cache that has ended, and in a
/// forked child.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_step_end(token: u64, step: u64) {
    guard((), || caches::end_step(token, step));
}

/// Returns 1 if `count` more blocks can have memory now, 0 if not, and a negative number after an error.
/// A hint: another tenant or process may be faster.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_paged_can_allocate(token: u64, count: u32) -> c_int {
    answer(|| Ok(find(token)?.kv().can_allocate(count)?))
}

/// Chooses blocks among `numbers` whose release empties extents of at least `bytes` bytes, or fewer if
/// there are no more, and writes them to `chosen`. Writes to `found` the number of blocks, and the bytes
/// that come free with them.
///
/// # Safety
/// `numbers` has `count` integers of `width` bytes, `chosen` is valid for writing `count` numbers, and
/// `found` is null or valid for writing two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_emptiest(
    token: u64,
    bytes: u64,
    numbers: *const c_void,
    count: usize,
    width: c_int,
    chosen: *mut u32,
    found: *mut [u64; 2],
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let numbers = unsafe { numbers::read(numbers, count, width) }?;
        // SAFETY: the caller says so.
        let found = unsafe { found.as_mut() }.ok_or(Error::Null)?;
        if chosen.is_null() && count > 0 {
            return Err(Error::Null);
        }
        let evictions = find(token)?.kv().emptiest(bytes, &numbers)?;
        // Each is among the given ones, and none is named twice.
        for (at, number) in evictions.numbers.iter().take(count).enumerate() {
            // SAFETY: there is room for `count` numbers.
            unsafe { chosen.add(at).write_unaligned(*number) };
        }
        *found = [evictions.numbers.len() as u64, evictions.bytes];
        Ok(())
    })
}

/// Records that kernels on another stream use blocks, now and later.
///
/// # Safety
/// The stream is one of the device's primary context, and stays one until
/// [`cuvmm_stream_end`](crate::cuvmm_stream_end).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_record(token: u64, stream: *mut c_void) -> c_int {
    status(|| find(token)?.record(crate::handle(stream)))
}

/// Gives the pool the memory that no block in use touches and whose work is complete, and writes its
/// bytes.
///
/// # Safety
/// `bytes` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_purge(token: u64, bytes: *mut u64) -> c_int {
    status(|| {
        let purged = find(token)?.kv().purge()?;
        if !bytes.is_null() {
            // SAFETY: the caller says so.
            unsafe { bytes.write(purged.given_back) };
        }
        Ok(())
    })
}

/// Sets the function that is called with the cache's number and the missing bytes when a request lacks
/// memory that releasing blocks of the cache could give: a request of this process, also of another
/// cache, or of another process of the ledger. Null removes it; a call that has begun goes on.
///
/// It runs on the requesting thread or a thread of this library, with no lock of this library held. It
/// may call functions of this library; those that need memory wait for none and call no further function.
/// It is not called from within itself or a [collector](crate::cuvmm_set_collector), after
/// `cuvmm_set_collector(NULL)`, while a graph may be captured, nor for requests within tags, pools of
/// graphs, sleep and waking: PyTorch or this library has a lock there.
///
/// # Safety
/// Any thread may call the function at any time from now on, and it unwinds into no caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_paged_on_pressure(
    token: u64,
    function: Option<OnPressure>,
) -> c_int {
    status(|| find(token)?.set_hook(function))
}
