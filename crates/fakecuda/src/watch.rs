//! For tests, and in no driver: what is still alive, streams that are held back, contexts that are lost.
//!
//! A program that reaches the stand-in by the loader has no other way to ask.
//!
//! `unsafe` is allowed here to export functions (see `state`).
#![allow(unsafe_code)]

use cuvmm_sys::{CUresult, CUstream};

use crate::contexts::current;
use crate::edge::{answer, put};
use crate::state::{driver, state};
use crate::streams::stream_handle;

/// Writes how many there are of: reservations, physicals, mappings, allocations, streams, events,
/// pieces of work that wait, and devices whose primary context is retained.
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
        // SAFETY: the caller passes a place for the answer, or null.
        unsafe { put(counts, found.map(|count| count as u64)) }
    })
}

/// Holds a stream of the current context back, or lets it go: meanwhile its work waits.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_hold(stream: CUstream, held: bool) -> CUresult {
    answer(|| {
        let (device, stream) = (current()?, stream_handle(stream));
        if held {
            driver()?.hold(device, stream);
        } else {
            driver()?.let_go(device, stream);
        }
        Ok(())
    })
}

/// Loses the current context, as a kernel that faults does.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_lose() -> CUresult {
    answer(|| {
        let device = current()?;
        driver()?.lose_context(device, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        Ok(())
    })
}
