//! Loaded files: the file of a code address, and this library.
//!
//! `unsafe` is allowed here to ask the dynamic linker.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;

#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) base: usize,
    pub(crate) path: String,
}

pub(crate) fn own() -> usize {
    let here: fn() -> usize = own;
    here as usize
}

pub(crate) fn of(address: usize) -> Option<Module> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    let pointer = std::ptr::without_provenance(address);
    // SAFETY: the address is only looked up, and the result is written to a local.
    let known = unsafe { libc::dladdr(pointer, found.as_mut_ptr()) } != 0;
    // SAFETY: a structure of zeros is a valid one, and the call may have filled it.
    let found = unsafe { found.assume_init() };
    if !known || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the dynamic linker returned a name, which lives as long as the module is loaded.
    let path = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(Module {
        base: found.dli_fbase.addr(),
        path: path.to_string_lossy().into_owned(),
    })
}

/// Keeps this library loaded until the process ends, so that its last function does not run when a
/// program closes the library.
pub(crate) fn stay() {
    let Some(module) = of(own()) else { return };
    let Ok(path) = CString::new(module.path) else {
        return;
    };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: the library is loaded already, so no code of it runs.
    unsafe { libc::dlopen(path.as_ptr(), flags) };
}
