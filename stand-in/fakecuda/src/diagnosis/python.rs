//! The lines of a Python program, by the interpreter in the process, if there is one.
//!
//! The functions of Python's C interface since 3.9 are found by name. A thread that the interpreter
//! does not know, and an interpreter that is ending, are left alone.
//!
//! `unsafe` is allowed here to call those functions, with the interpreter's lock held. Every
//! reference that they return is given back.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The most lines kept of one site.
const DEPTH: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Line {
    pub(crate) file: String,
    pub(crate) line: i32,
    pub(crate) function: String,
}

type Object = *mut c_void;

struct Interpreter {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: Option<unsafe extern "C" fn() -> c_int>,
    thread: unsafe extern "C" fn() -> *mut c_void,
    ensure: unsafe extern "C" fn() -> c_int,
    release: unsafe extern "C" fn(c_int),
    frame: unsafe extern "C" fn(*mut c_void) -> Object,
    back: unsafe extern "C" fn(Object) -> Object,
    code: unsafe extern "C" fn(Object) -> Object,
    line: unsafe extern "C" fn(Object) -> c_int,
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
    text: unsafe extern "C" fn(Object) -> *const c_char,
    clear: unsafe extern "C" fn(),
    decref: unsafe extern "C" fn(Object),
}

// Calls the function in the first argument. An interpreter that ends makes each thread that waits
// for its lock exit, which unwinds the thread's stack. An unwinding through a frame of Rust would
// abort the process. This frame has no unwinding information, so it counts as the end of the stack,
// and the thread exits here.
core::arch::global_asm!(
    ".hidden fakecuda_last_frame",
    ".globl fakecuda_last_frame",
    ".type fakecuda_last_frame, @function",
    "fakecuda_last_frame:",
    "sub rsp, 8",
    "call rdi",
    "add rsp, 8",
    "ret",
    ".size fakecuda_last_frame, . - fakecuda_last_frame",
);

unsafe extern "C" {
    fn fakecuda_last_frame(function: unsafe extern "C" fn() -> c_int) -> c_int;
}

/// Finds a function by name.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
unsafe fn find<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: the name is null-terminated.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: the caller promises that the type is that of a pointer to this function.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

impl Interpreter {
    fn find() -> Option<Self> {
        // SAFETY: the types are those of Python's headers.
        unsafe {
            Some(Self {
                is_initialized: find(c"Py_IsInitialized")?,
                is_finalizing: find(c"Py_IsFinalizing").or_else(|| find(c"_Py_IsFinalizing")),
                thread: find(c"PyGILState_GetThisThreadState")?,
                ensure: find(c"PyGILState_Ensure")?,
                release: find(c"PyGILState_Release")?,
                frame: find(c"PyThreadState_GetFrame")?,
                back: find(c"PyFrame_GetBack")?,
                code: find(c"PyFrame_GetCode")?,
                line: find(c"PyFrame_GetLineNumber")?,
                attribute: find(c"PyObject_GetAttrString")?,
                text: find(c"PyUnicode_AsUTF8")?,
                clear: find(c"PyErr_Clear")?,
                decref: find(c"Py_DecRef")?,
            })
        }
    }

    /// Returns an attribute of a code object as text.
    ///
    /// # Safety
    /// The interpreter's lock is held, and the object is one of its own.
    unsafe fn text_of(&self, code: Object, name: &CStr) -> String {
        // SAFETY: the caller promises a live object and the lock.
        unsafe {
            let value = (self.attribute)(code, name.as_ptr());
            if value.is_null() {
                (self.clear)();
                return String::new();
            }
            let text = (self.text)(value);
            let found = match text.is_null() {
                true => {
                    (self.clear)();
                    String::new()
                }
                false => CStr::from_ptr(text).to_string_lossy().into_owned(),
            };
            (self.decref)(value);
            found
        }
    }

    /// Returns a thread's lines.
    ///
    /// # Safety
    /// The interpreter's lock is held, and the state is the calling thread's.
    unsafe fn lines(&self, thread: *mut c_void) -> Vec<Line> {
        let mut lines = Vec::new();
        // SAFETY: the caller promises the lock and the state; frames and codes are new references,
        // which are given back.
        unsafe {
            let mut frame = (self.frame)(thread);
            while !frame.is_null() {
                if lines.len() < DEPTH {
                    let code = (self.code)(frame);
                    lines.push(Line {
                        file: self.text_of(code, c"co_filename"),
                        line: (self.line)(frame),
                        function: self.text_of(code, c"co_name"),
                    });
                    (self.decref)(code);
                }
                let outer = (self.back)(frame);
                (self.decref)(frame);
                frame = outer;
            }
        }
        lines
    }
}

/// Returns this thread's lines, the innermost first, or none outside of Python.
///
/// The calling thread must hold no lock that a thread with the interpreter's lock may wait for.
pub(crate) fn lines() -> Vec<Line> {
    static INTERPRETER: OnceLock<Option<Interpreter>> = OnceLock::new();
    let Some(python) = INTERPRETER.get_or_init(Interpreter::find) else {
        return Vec::new();
    };
    // SAFETY: these two functions may be called at any time.
    let lives = unsafe { (python.is_initialized)() != 0 }
        && !python
            .is_finalizing
            .is_some_and(|ask| unsafe { ask() != 0 });
    if !lives {
        return Vec::new();
    }
    // SAFETY: the interpreter lives. A thread that it knows may take its lock, held or not, and
    // gives it back in the same state.
    unsafe {
        let thread = (python.thread)();
        if thread.is_null() {
            return Vec::new();
        }
        // The thread may exit here, and holds nothing that another thread needs.
        let state = fakecuda_last_frame(python.ensure);
        let lines = python.lines(thread);
        (python.release)(state);
        lines
    }
}
