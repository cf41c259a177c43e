//! The memory that the program has, for reports of the stand-in for libcuda, `fakecuda`: what this library
//! keeps until the process ends is no leak.
//!
//! `unsafe` is used to export the function by which `fakecuda` asks. A real driver has none that does.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crate::edge::guard;
use crate::{attachments, fork, heaps, live, tags};

/// Calls a function for all allocations that are alive and for all memory that is attached, with the
/// address, the bytes and the device of each, and with the argument that is passed for it.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_lent(
    visit: extern "C" fn(*mut c_void, u64, u64, c_int),
    visitor: *mut c_void,
) {
    guard((), || {
        if fork::is_child() {
            return;
        }
        let mut memory = attachments::memory();
        for (device, of) in heaps::all() {
            let device = c_int::try_from(device).unwrap_or(c_int::MAX);
            let entries = tags::with_entries(of, |tagged, _| {
                let all = [live::entries(of), tagged.awake, tagged.asleep];
                all.into_iter().flatten().collect::<Vec<_>>()
            });
            let entries = entries.into_iter();
            memory.extend(entries.map(|it| (it.address as u64, it.requested, device)));
        }
        for (address, size, device) in memory {
            visit(visitor, address, size, device);
        }
    });
}
