//! Tags for graphs: memory that captured graphs use, and that sleeps with a tag.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C
//! passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use crate::api::answered;
use crate::edge::{self, guard, status};
use crate::entered;
use crate::error::Error;
use crate::{history, shareable, tags};

/// Enters a tag for graphs on the calling thread, until
/// [`cuvmm_tag_end`](crate::cuvmm_tag_end) of the token that it writes. Pools that the thread opens
/// meanwhile for the first time have their memory in the tag, and sleep and wake with it. With
/// `keep` 1 their contents are kept however the tag sleeps. With 0 they never are: each graph must
/// write what it reads.
///
/// An error is another `keep`, a name that is not UTF-8, a shareable tag, or a null address.
///
/// # Safety
/// `name` is null or ends with a zero byte. `token` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_graphs_begin(
    name: *const c_char,
    keep: c_int,
    token: *mut u64,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let name = unsafe { edge::read(name) }?.ok_or(Error::NotText)?;
        if token.is_null() {
            return Err(Error::Null);
        }
        let keeps = match keep {
            0 => false,
            1 => true,
            other => return Err(Error::Keep(other)),
        };
        shareable::refuse_graphs(name)?;
        let entered = entered::enter_graphs(name, keeps)?;
        // SAFETY: the caller says so.
        unsafe { token.write(entered) };
        Ok(())
    })
}

/// Allocates a block for graphs, for `torch.cuda.MemPool`: in the calling thread's innermost tag for
/// graphs, else in the one that any thread entered last, else in `default`. Returns null for a size
/// of 0, and after a failure, with one line on standard error.
/// [`cuvmm_tag_free`](crate::cuvmm_tag_free) frees the memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_graph_malloc(
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        // PyTorch may hold locks.
        let seen = history::begin(false);
        let outcome = tags::allocations::allocate_for_graphs(size, device, seen.as_ref());
        answered(size, device, outcome)
    })
}
