//! The functions of C for the history of allocations and for PyTorch's profiler.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C
//! passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::fork;
use crate::history::{self, Stacks};
use crate::interpreter::{self, Interpreter};

/// Records allocations and their ends from now on: the last `events` of all devices, and the stacks
/// of live allocations. With `stacks` 1 allocations have the stack of their thread's Python code, with 2
/// their ends too, with 0 none. Earlier events stay, unless `clear` is 1. Another number for `stacks`
/// is an error, which changes nothing.
///
/// A thread that does not have Python's lock waits for it, before it takes a lock of this library,
/// except where PyTorch may hold locks: there the event has no stack.
///
/// # Safety
/// `interpreter` is null, for no stacks, or points to functions of Python as the fields name them. All
/// calls pass the same ones. The program calls [`cuvmm_set_collector`](crate::cuvmm_set_collector)
/// with null before its interpreter ends, and then [`cuvmm_history_end`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_history_begin(
    events: u64,
    stacks: c_int,
    clear: c_int,
    interpreter: *const Interpreter,
) -> c_int {
    status(|| {
        fork::check()?;
        let stacks = match stacks {
            0 => Stacks::Nothing,
            1 => Stacks::Allocations,
            2 => Stacks::All,
            other => return Err(Error::Stacks(other)),
        };
        // SAFETY: the caller says so.
        if let Some(&functions) = unsafe { interpreter.as_ref() } {
            // SAFETY: the caller says so.
            unsafe { interpreter::set(functions) };
        }
        let most = usize::try_from(events).unwrap_or(usize::MAX);
        history::start(most, stacks, clear != 0);
        Ok(())
    })
}

/// Stops recording and forgets the history.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_history_end() {
    guard((), || {
        if !fork::is_child() {
            history::stop();
        }
    });
}

/// Writes the history of a device as one JSON object: `events`, lists of kind (`alloc`, `free`,
/// `free_asleep`, `sleep`, `wake`, `oom`), a list of five numbers, and a place in `stacks`, or null. The
/// numbers are the address (of an `oom`, the bytes free on the device), bytes, stream, bytes held
/// afterwards, and microseconds since 1970. `live` has lists of the address of a live allocation, of
/// any device, and a place in `stacks`; `stacks` has texts with a line for each frame,
/// innermost first, with line number, function and file between tabs. Returns 0 while nothing is
/// recorded.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_history(device: c_int, buffer: *mut c_char, length: usize) -> usize {
    let text = guard(None, || history::json(device));
    // SAFETY: the caller says so.
    text.map_or(0, |text| unsafe { edge::write(text, buffer, length) })
}

/// Reports allocations and their ends to PyTorch's profiler from now on, while it records memory on
/// the allocating thread. Returns 0, or 1 if this process has no PyTorch with such a profiler.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_profile() -> c_int {
    guard(1, || c_int::from(fork::is_child() || !history::profile()))
}
