//! C++: PyTorch's exceptions, and functions that PyTorch passes.
//!
//! This library is not linked with PyTorch. When memory is short, it looks up the parts of
//! `c10::OutOfMemoryError` in the process, under their names in the Itanium C++ ABI. A
//! constructor's name contains its parameters' types, so a constructor that is found takes the
//! arguments passed here. The exception's size is not in its name; it gets more space than any
//! version needs.
//!
//! `std::string` and `std::function` are laid out as in libstdc++ since GCC 5.
//!
//! `unsafe` is used to find these functions, to call them, and to build their arguments.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{offset_of, transmute_copy};
use std::ptr;

/// The bytes for an exception. PyTorch 2.11 needs fewer than 200.
const SIZE: usize = 1024;

/// The libraries that have the parts, or whose dependencies have them.
const LIBRARIES: [&CStr; 2] = [c"libc10_cuda.so", c"libc10.so"];

const TYPE: &CStr = c"_ZTIN3c1016OutOfMemoryErrorE";
const VTABLE: &CStr = c"_ZTVN3c1016OutOfMemoryErrorE";
/// `c10::Error::Error(c10::SourceLocation, std::string)`.
const CONSTRUCT: &CStr =
    c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
/// `c10::detail::torchCheckFail(char const*, char const*, unsigned, char const*)`.
const CHECK_FAIL: &CStr = c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_";

const FILE: &CStr = c"cuvmm";

type Destroy = unsafe extern "C" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, Option<Destroy>) -> !;
type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;
type Construct = unsafe extern "C" fn(*mut c_void, SourceLocation, *mut CxxString);

/// An exception ready to be thrown. If it is not thrown, its memory leaks.
#[derive(Clone, Copy)]
pub(crate) enum Exception {
    /// `c10::OutOfMemoryError`, which Python gets as `torch.cuda.OutOfMemoryError`.
    OutOfMemory {
        object: *mut c_void,
        typeinfo: *const c_void,
        destroy: Option<Destroy>,
        throw: Throw,
    },
    /// `c10::Error`, which Python gets as `RuntimeError`. The text is never freed.
    Error {
        fail: CheckFail,
        function: &'static CStr,
        text: *const c_char,
    },
}

impl Exception {
    /// Makes an exception for a lack of memory in a function of C. Returns `None` without PyTorch.
    pub(crate) fn out_of_memory(function: &'static CStr, text: &str) -> Option<Self> {
        match Parts::find() {
            Some(parts) => Some(parts.exception(function, &text.replace('\0', " "))),
            None => Self::error(function, text),
        }
    }

    /// Makes an exception for another failure. Returns `None` without PyTorch.
    pub(crate) fn error(function: &'static CStr, text: &str) -> Option<Self> {
        let fail: CheckFail = self::function(CHECK_FAIL)?;
        let text = CString::new(text.replace('\0', " ")).ok()?.into_raw();
        Some(Self::Error {
            fail,
            function,
            text,
        })
    }

    /// Throws the exception.
    ///
    /// # Safety
    /// The exception was not thrown before. All callers up to C++ may be unwound.
    pub(crate) unsafe fn throw(self) -> ! {
        match self {
            Self::OutOfMemory {
                object,
                typeinfo,
                destroy,
                throw,
            } => {
                // SAFETY: the object is constructed, and has this type and destructor.
                unsafe { throw(object, typeinfo, destroy) }
            }
            Self::Error {
                fail,
                function,
                text,
            } => {
                // SAFETY: all texts end with a zero byte and are never freed.
                unsafe { fail(function.as_ptr(), FILE.as_ptr(), 0, text) }
            }
        }
    }
}

struct Parts {
    typeinfo: *const c_void,
    vtable: *const c_void,
    construct: Construct,
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    throw: Throw,
    new: unsafe extern "C" fn(usize) -> *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void),
}

impl Parts {
    fn find() -> Option<Self> {
        Some(Self {
            typeinfo: symbol(TYPE)?,
            vtable: symbol(VTABLE)?,
            construct: function(CONSTRUCT)?,
            allocate: function(c"__cxa_allocate_exception")?,
            throw: function(c"__cxa_throw")?,
            new: function(c"_Znwm")?,
            delete: function(c"_ZdlPv")?,
        })
    }

    fn exception(&self, function: &CStr, text: &str) -> Exception {
        let source = SourceLocation {
            function: function.as_ptr(),
            file: FILE.as_ptr(),
            line: 0,
        };
        // SAFETY: the functions are what their names say. The space is zeroed, and large enough for
        // the base, whose constructor takes these arguments. The class adds only a vtable to its
        // base: two words, then its functions, the destructor first.
        unsafe {
            let object = (self.allocate)(SIZE);
            ptr::write_bytes(object.cast::<u8>(), 0, SIZE);
            let mut string = CxxString::new(self.new, text);
            (self.construct)(object, source, &mut string);
            string.end(self.delete);
            let functions = self.vtable.cast::<*const c_void>().add(2);
            object.cast::<*const *const c_void>().write(functions);
            let destroy = functions.cast::<Option<Destroy>>().read();
            Exception::OutOfMemory {
                object,
                typeinfo: self.typeinfo,
                destroy,
                throw: self.throw,
            }
        }
    }
}

#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::string`. A short string holds its bytes inside. Strings made here are never short, and can
/// be moved until they are passed.
#[repr(C)]
struct CxxString {
    bytes: *mut u8,
    length: usize,
    /// The bytes of a short string, else the capacity and unused space.
    local: [usize; 2],
}

impl CxxString {
    const SHORT: usize = 15;

    unsafe fn new(new: unsafe extern "C" fn(usize) -> *mut c_void, text: &str) -> Self {
        let capacity = text.len().max(Self::SHORT + 1);
        // SAFETY: the space has a byte for the zero at the end.
        let bytes = unsafe {
            let bytes = new(capacity + 1).cast::<u8>();
            ptr::copy_nonoverlapping(text.as_ptr(), bytes, text.len());
            bytes.add(text.len()).write(0);
            bytes
        };
        Self {
            bytes,
            length: text.len(),
            local: [capacity, 0],
        }
    }

    /// Frees the bytes that remain after a call with the string, which must not have been moved
    /// since.
    unsafe fn end(&mut self, delete: unsafe extern "C" fn(*mut c_void)) {
        let local = ptr::from_mut(self).cast::<u8>();
        // A string that C++ has moved from is short.
        if self.bytes != local.wrapping_add(offset_of!(Self, local)) {
            // SAFETY: `operator new` allocated the bytes, and nothing else has them.
            unsafe { delete(self.bytes.cast()) };
        }
    }
}

/// `std::function<bool(cudaStream_t)>`, as C++ passes it.
#[repr(C)]
#[derive(Debug)]
pub struct StreamFilter {
    functor: [usize; 2],
    manage: Option<Manage>,
    invoke: Option<Invoke>,
}

type Manage = unsafe extern "C-unwind" fn(*mut [usize; 2], *const [usize; 2], c_int) -> bool;
type Invoke = unsafe extern "C-unwind" fn(*const [usize; 2], *const *mut c_void) -> bool;

/// Operations of a `std::function`'s manager.
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// A copy of a function that accepts streams.
pub(crate) struct Filter(StreamFilter);

// SAFETY: PyTorch calls such functions from all threads, under a lock as here.
unsafe impl Send for Filter {}

impl Filter {
    /// # Safety
    /// `filter` is null or such a function.
    pub(crate) unsafe fn of(filter: *const StreamFilter) -> Self {
        // SAFETY: the caller says so.
        let Some(filter) = (unsafe { filter.as_ref() }) else {
            return Self(StreamFilter {
                functor: [0; 2],
                manage: None,
                invoke: None,
            });
        };
        let mut functor = [0; 2];
        if let Some(manage) = filter.manage {
            // SAFETY: the manager is the function's own.
            unsafe { manage(&mut functor, &filter.functor, CLONE) };
        }
        Self(StreamFilter {
            functor,
            manage: filter.manage,
            invoke: filter.invoke,
        })
    }

    /// Returns `true` if the function accepts a stream; an empty function accepts all. The function
    /// may throw without any loss.
    pub(crate) fn accepts(&self, stream: *mut c_void) -> bool {
        match (self.0.manage, self.0.invoke) {
            // SAFETY: the function is alive, and takes its argument by reference.
            (Some(_), Some(invoke)) => unsafe { invoke(&self.0.functor, &stream) },
            _ => true,
        }
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if let Some(manage) = self.0.manage {
            // SAFETY: the copy is the manager's own, and is not used any more.
            unsafe { manage(&mut self.0.functor, ptr::null(), DESTROY) };
        }
    }
}

/// Finds a function of a type that the caller names.
pub(crate) fn function<F: Copy>(name: &CStr) -> Option<F> {
    let found = symbol(name)?;
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: the callers name the type of the function, and its address is not null.
    Some(unsafe { transmute_copy(&found) })
}

/// Finds a symbol in PyTorch's libraries and their dependencies, else in the whole process.
fn symbol(name: &CStr) -> Option<*const c_void> {
    let loaded = |library: &&CStr| {
        // SAFETY: nothing new is loaded. The handle is kept for ever, as are the libraries.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(handle)
    };
    let handles = LIBRARIES.iter().filter_map(loaded);
    let found = |handle| {
        // SAFETY: the handle is one, and the name ends with a zero byte.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!found.is_null()).then_some(found.cast_const())
    };
    handles.chain([libc::RTLD_DEFAULT]).find_map(found)
}
