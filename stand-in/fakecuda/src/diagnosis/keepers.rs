//! Libraries that keep memory for their users until the process ends, as caching allocators do.
//!
//! Such a library exports the function [`NAME`], which lists what its users have. That is a leak when the
//! process ends, and what the library's own calls have made is none.
//!
//! `unsafe` is allowed here to find and call the function, and to collect what it lists.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use super::site::Site;
use crate::loaded::{self, Module};

/// The name of the function that lists memory.
const NAME: &CStr = c"fakecuda_lent";

/// Takes the address, the bytes and the device of memory that a user has.
type Visit = extern "C" fn(*mut c_void, u64, u64, i32);

/// Calls a function, with an argument for it, for all memory that the library's users have.
type List = extern "C" fn(Visit, *mut c_void);

/// Memory that a user of a library has.
pub(crate) struct Lent {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) device: i32,
    /// The name of the library's file.
    pub(crate) library: String,
}

/// Which libraries keep memory, by the first address of each, and what their users have at this moment.
pub(crate) struct Keepers {
    modules: BTreeMap<usize, bool>,
    pub(crate) lent: Vec<Lent>,
}

impl Keepers {
    /// Asks the libraries that made calls. The caller holds no lock, since the libraries take their own.
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

    /// Returns `true` if the call at a site was made by a library that keeps memory.
    pub(crate) fn made(&self, site: &Site) -> bool {
        let caller = site.caller();
        caller.is_some_and(|module| self.modules.get(&module.base) == Some(&true))
    }
}

/// Returns the function of a module that lists memory.
fn list_of(module: &Module) -> Option<List> {
    let path = CString::new(module.path.as_str()).ok()?;
    // SAFETY: a module that is loaded is opened once more, so no code of it runs.
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
        // SAFETY: it was opened above, and the program has it open still.
        unsafe { libc::dlclose(opened) };
    }
    // Symbols of the libraries that the module needs are found too.
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
