//! The ends of Python's DLPack capsules and tensors.
//!
//! A library may end a tensor on any thread, and a capsule while an exception is raised, as NumPy
//! does with a device's capsule. Python code cannot run then, so these functions set the exception
//! aside while they release the tensor's owner.
//!
//! This library is not linked with Python: it looks up Python's functions in the process.
//!
//! `unsafe` is used to call these functions, and to read DLPack's structures.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, null_mut};
use std::sync::OnceLock;

use crate::cxx;

/// `DLTensor`. Nothing reads it.
type Tensor = [u64; 6];

/// `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Managed {
    tensor: Tensor,
    context: Object,
    deleter: Option<unsafe extern "C-unwind" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedVersioned {
    version: [u32; 2],
    context: Object,
    deleter: Option<unsafe extern "C-unwind" fn(*mut ManagedVersioned)>,
}

type Object = *mut c_void;

/// Python's functions. They unwind a thread that calls them while the interpreter ends.
#[derive(Clone, Copy)]
struct Python {
    is_initialized: unsafe extern "C-unwind" fn() -> c_int,
    ensure: unsafe extern "C-unwind" fn() -> c_int,
    release: unsafe extern "C-unwind" fn(c_int),
    fetch: unsafe extern "C-unwind" fn(*mut Object, *mut Object, *mut Object),
    restore: unsafe extern "C-unwind" fn(Object, Object, Object),
    decrease: unsafe extern "C-unwind" fn(Object),
    is_valid: unsafe extern "C-unwind" fn(Object, *const c_char) -> c_int,
    pointer: unsafe extern "C-unwind" fn(Object, *const c_char) -> *mut c_void,
}

impl Python {
    fn get() -> Option<Self> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        *PYTHON.get_or_init(|| {
            Some(Self {
                is_initialized: cxx::function(c"Py_IsInitialized")?,
                ensure: cxx::function(c"PyGILState_Ensure")?,
                release: cxx::function(c"PyGILState_Release")?,
                fetch: cxx::function(c"PyErr_Fetch")?,
                restore: cxx::function(c"PyErr_Restore")?,
                decrease: cxx::function(c"Py_DecRef")?,
                is_valid: cxx::function(c"PyCapsule_IsValid")?,
                pointer: cxx::function(c"PyCapsule_GetPointer")?,
            })
        })
    }

    /// # Safety
    /// The caller owns the reference.
    unsafe fn end(self, object: Object) {
        let (mut kind, mut value, mut trace) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the functions are Python's, and the results are written to locals.
        unsafe {
            // A finalized interpreter has no objects any more.
            if (self.is_initialized)() == 0 {
                return;
            }
            let state = (self.ensure)();
            (self.fetch)(&mut kind, &mut value, &mut trace);
            (self.decrease)(object);
            (self.restore)(kind, value, trace);
            (self.release)(state);
        }
    }

    /// Returns the tensor in a capsule of this name, or null.
    unsafe fn taken<T>(self, capsule: Object, name: &CStr) -> *mut T {
        // SAFETY: the caller passes a capsule, whose pointer has this type under this name.
        unsafe {
            match (self.is_valid)(capsule, name.as_ptr()) {
                0 => null_mut(),
                _ => (self.pointer)(capsule, name.as_ptr()).cast(),
            }
        }
    }
}

/// Ends a `DLManagedTensor` (`deleter`): gives up the reference to the object in its `manager_ctx`.
///
/// # Safety
/// `tensor` is null or such a tensor, which owns the reference.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cuvmm_dlpack_delete(tensor: *mut Managed) {
    if let (Some(python), false) = (Python::get(), tensor.is_null()) {
        // SAFETY: the caller says so.
        unsafe { python.end(ptr::read(&raw const (*tensor).context)) };
    }
}

/// Ends a `DLManagedTensorVersioned`, like [`cuvmm_dlpack_delete`].
///
/// # Safety
/// `tensor` is null or such a tensor, which owns the reference.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cuvmm_dlpack_delete_versioned(tensor: *mut ManagedVersioned) {
    if let (Some(python), false) = (Python::get(), tensor.is_null()) {
        // SAFETY: the caller says so.
        unsafe { python.end(ptr::read(&raw const (*tensor).context)) };
    }
}

/// Ends a capsule of Python (`PyCapsule_Destructor`), and the tensor in it unless a library has
/// taken it and so renamed the capsule.
///
/// # Safety
/// `capsule` is a capsule of Python, and the thread holds Python's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cuvmm_dlpack_destroy(capsule: Object) {
    let Some(python) = Python::get() else {
        return;
    };
    // SAFETY: the names are DLPack's, and each stands for one structure.
    unsafe {
        let older: *mut Managed = python.taken(capsule, c"dltensor");
        let newer: *mut ManagedVersioned = python.taken(capsule, c"dltensor_versioned");
        if let Some(deleter) = older.as_ref().and_then(|tensor| tensor.deleter) {
            deleter(older);
        }
        if let Some(deleter) = newer.as_ref().and_then(|tensor| tensor.deleter) {
            deleter(newer);
        }
    }
}
