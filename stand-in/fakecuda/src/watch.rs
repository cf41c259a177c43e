//! Functions for tests that no driver has: they count live objects, hold streams back, lose
//! contexts, inject faults, and report on demand. `include/fakecuda.h` declares them for programs
//! that reach the stand-in through the loader.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::fs::File;
use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd as _;

use cuvmm_sys::{CUresult, CUstream};

use crate::contexts::current;
use crate::edge::{Outcome, answer, present, put};
use crate::ending;
use crate::settings;
use crate::state::{driver, state};
use crate::streams::stream_handle;
use crate::{calls, diagnosis::report::Report};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Writes the numbers of live reservations, physicals, mappings, allocations, streams, events and
/// queued pieces of work, and of devices whose primary context is retained.
///
/// # Safety
/// The pointer is null or valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_live(counts: *mut [u64; 8]) -> CUresult {
    answer(|| {
        let retained = state()?.references();
        let live = driver()?.live();
        let found = [
            live.reservations,
            live.physicals,
            live.mappings,
            live.allocations,
            live.streams,
            live.events,
            live.queued,
            retained.iter().filter(|count| **count > 0).count(),
        ];
        // SAFETY: C's promise (see `edge`).
        unsafe { put(counts, found.map(|count| count as u64)) }
    })
}

/// Holds back a stream of the current context, whose work is then queued, or releases it.
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

/// Holds back every stream of the current context's device, later ones included, or releases them.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_hold_all(held: bool) -> CUresult {
    answer(|| {
        let device = current()?;
        if held {
            driver()?.hold_all(device);
        } else {
            driver()?.release_all_streams(device);
        }
        Ok(())
    })
}

/// Runs the next piece of work of a held stream, or begins its function of the host. Returns
/// `NOT_READY` if there is none, or if it waits for work of another stream or for a function.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_step(stream: CUstream) -> CUresult {
    answer(|| match driver()?.step(current()?, stream_handle(stream)) {
        true => Ok(()),
        false => Err(CUresult::CUDA_ERROR_NOT_READY),
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

/// Adds faults, written as in `FAKECUDA_FAIL`, which count calls from now on. Null removes all
/// faults. Returns `INVALID_VALUE` for a text that is wrong.
///
/// # Safety
/// The pointer is null or points to a null-terminated string.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_fail(faults: *const c_char) -> CUresult {
    answer(|| {
        if faults.is_null() {
            return calls::disarm();
        }
        // SAFETY: the caller passes a null-terminated string.
        let text = unsafe { CStr::from_ptr(faults) }
            .to_str()
            .map_err(|_| INVALID)?;
        calls::arm(settings::parse_faults(text).map_err(|_| INVALID)?)
    })
}

/// Writes the number of calls that faults have failed.
///
/// # Safety
/// The pointer is null or valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_injected(count: *mut u64) -> CUresult {
    // SAFETY: C's promise (see `edge`).
    answer(|| unsafe { put(count, calls::injected()) })
}

/// Turns the diagnosis on or off. Objects made while it is off have no known place.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_watch(on: bool) -> CUresult {
    answer(|| {
        driver()?.watch(on);
        Ok(())
    })
}

/// Writes the number of findings so far, and of leaks if the process ended now.
///
/// # Safety
/// The pointer is null or valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_findings(count: *mut u64) -> CUresult {
    answer(|| {
        present(count)?;
        let report = ending::report(state()?);
        // SAFETY: C's promise (see `edge`).
        unsafe { put(count, report.findings.count()) }
    })
}

/// Forgets all findings, and excludes all live objects from later leaks.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_forget() -> CUresult {
    answer(|| {
        let state = state()?;
        state.driver.forget(&ending::living(state));
        Ok(())
    })
}

/// Writes a report of this moment to a descriptor, as text.
///
/// # Safety
/// The descriptor is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_report(fd: i32) -> CUresult {
    // SAFETY: the caller passes an open descriptor.
    answer(|| unsafe { write(fd, Report::text) })
}

/// Writes a report of this moment to a descriptor, as one line of JSON.
///
/// # Safety
/// The descriptor is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_report_json(fd: i32) -> CUresult {
    // SAFETY: the caller passes an open descriptor.
    answer(|| unsafe { write(fd, Report::json) })
}

/// # Safety
/// The descriptor is open.
unsafe fn write(fd: i32, form: fn(&Report) -> String) -> Outcome {
    if fd < 0 {
        return Err(INVALID);
    }
    let text = form(&ending::report(state()?));
    // SAFETY: the caller promises that the descriptor is open, and it is not closed here.
    let mut file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let written = file.write_all(text.as_bytes());
    written.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}
