//! Memory that the program has, for reports of `fakecuda`, the stand-in for libcuda: it is no leak,
//! though this library keeps it until the process ends.
//!
//! `unsafe` is used to export the function, which only `fakecuda` calls.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crate::edge::guard;
use crate::paged::caches;
use crate::{attachments, fork, heaps, tags};

/// Calls `visit` with `visitor` and the address, bytes and device of each live allocation, attachment
/// and paged cache.
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
            let entries = tags::figures::with_entries(of, |tagged, table| {
                let (awake, asleep) = table.entries();
                let all = [awake, asleep, tagged.awake, tagged.asleep];
                all.into_iter().flatten().collect::<Vec<_>>()
            });
            let paged = caches::memory(of).into_iter();
            memory.extend(paged.map(|(address, bytes)| (address, bytes, device)));
            let entries = entries.into_iter();
            memory.extend(entries.map(|it| (it.address as u64, it.requested, device)));
        }
        for (address, size, device) in memory {
            visit(visitor, address, size, device);
        }
    });
}
