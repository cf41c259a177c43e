//! Libraries that keep memory for their users until the process ends, as caching allocators do.
//!
//! Such a library exports the function [`NAME`], which lists its users' memory. When the process
//! ends, that memory is a leak, and objects made by the library's own calls are none.
//!
//! `unsafe` is allowed here to find and call the function, and to collect its list.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use super::site::Site;
use crate::loaded::{self, Module};

const NAME: &CStr = c"fakecuda_lent";

/// A callback for the address, the bytes and the device of a user's memory.
type Visit = extern "C" fn(*mut c_void, u64, u64, i32);

/// A function that calls a callback, with its argument, for all memory of the library's users.
type List = extern "C" fn(Visit, *mut c_void);

pub(crate) struct Lent {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) device: i32,
    pub(crate) library: String,
}

/// For each library, by its base address, whether it keeps memory; and the memory of its users at
/// this moment.
pub(crate) struct Keepers {
    modules: BTreeMap<usize, bool>,
    pub(crate) lent: Vec<Lent>,
}

impl Keepers {
    /// Asks the libraries that made calls. The caller holds no lock, since the libraries take their
    /// own.
    pub(crate) fn among(sites: &[Arc<Site>]) -> Self {
        let mut found = Self {
            modules: BTreeMap::new(),
            lent: Vec::new(),
        };
        for module in sites.iter().filter_map(|site| site.caller()) {
            if let Entry::Vacant(place) = found.modules.entry(module.base) {
                let list = list_of(&module);
                place.insert(list.is_some());
                let lent = list.map(|list| asked(&module, list));
                found.lent.extend(lent.into_iter().flatten());
            }
        }
        found
    }

    /// Returns `true` if a library that keeps memory made the call at a site.
    pub(crate) fn made(&self, site: &Site) -> bool {
        let caller = site.caller();
        caller.is_some_and(|module| self.modules.get(&module.base) == Some(&true))
    }
}

fn list_of(module: &Module) -> Option<List> {
    let path = CString::new(module.path.as_str()).ok()?;
    // SAFETY: the module is loaded, so opening it once more runs no code.
    let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // The program itself has no path here.
    let place = if opened.is_null() {
        libc::RTLD_DEFAULT
    } else {
        opened
    };
    // SAFETY: the symbol is only looked up.
    let found = unsafe { libc::dlsym(place, NAME.as_ptr()) };
    if !opened.is_null() {
        // SAFETY: the module was opened above, and the program still has it open.
        unsafe { libc::dlclose(opened) };
    }
    // Symbols of the module's dependencies are found too.
    let own = !found.is_null() && loaded::of(found.addr())?.base == module.base;
    // SAFETY: the header says which type a function of this name has.
    own.then(|| unsafe { std::mem::transmute::<*mut c_void, List>(found) })
}

fn asked(module: &Module, list: List) -> Vec<Lent> {
    let mut found: Vec<(u64, u64, i32)> = Vec::new();
    list(visit, ptr::from_mut(&mut found).cast());
    let library = module.path.rsplit('/').next().unwrap_or_default();
    let lent = found.into_iter().map(|(address, size, device)| Lent {
        address,
        size,
        device,
        library: library.to_owned(),
    });
    lent.collect()
}

extern "C" fn visit(found: *mut c_void, address: u64, size: u64, device: i32) {
    // SAFETY: `asked` passes a list of this type, which nothing else uses during the call.
    let found = unsafe { &mut *found.cast::<Vec<(u64, u64, i32)>>() };
    found.push((address, size, device));
}
