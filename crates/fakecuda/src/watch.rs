//! Functions for tests that no driver has: counting live objects, holding streams back, losing
//! contexts.
//!
//! A program that reaches the stand-in through the loader has no other way to do this.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use cuvmm_sys::{CUresult, CUstream};

use crate::contexts::current;
use crate::edge::{answer, put};
use crate::state::{driver, state};
use crate::streams::stream_handle;

/// Writes the numbers of live reservations, physicals, mappings, allocations, streams, events and
/// queued pieces of work, and of devices whose primary context is retained.
///
/// # Safety
/// The pointer is null or valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_live(counts: *mut [u64; 8]) -> CUresult {
    answer(|| {
        let retained = &state()?.retained;
        let taken = |count: &&std::sync::atomic::AtomicU32| {
            count.load(std::sync::atomic::Ordering::Acquire) > 0
        };
        let live = driver()?.live();
        let found = [
            live.reservations,
            live.physicals,
            live.mappings,
            live.allocations,
            live.streams,
            live.events,
            live.queued,
            retained.iter().filter(taken).count(),
        ];
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(counts, found.map(|count| count as u64)) }
    })
}

/// Holds back a stream of the current context, or releases it. While it is held, its work is
/// queued.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_hold(stream: CUstream, held: bool) -> CUresult {
    answer(|| {
        let (device, stream) = (current()?, stream_handle(stream));
        if held {
            driver()?.hold(device, stream);
        } else {
            driver()?.release_stream(device, stream);
        }
        Ok(())
    })
}

/// Loses the current context, like a kernel that faults.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_lose() -> CUresult {
    answer(|| {
        let device = current()?;
        driver()?.lose_context(device, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        Ok(())
    })
}
