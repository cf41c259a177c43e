//! Stacks of Python code, taken by functions of Python's C interface whose addresses the Python
//! package passes. This library is not linked with Python.
//!
//! A stack is taken without running Python code: no signal handler runs meanwhile, and no finalizer,
//! because Python's collector is off. Python's lock is waited for only where the caller says that no
//! lock is held, and never once the interpreter ends (I-115).
//!
//! `unsafe` is used to call these functions.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::collecting;

/// An object of Python.
type Object = *mut c_void;

/// Functions of Python's C interface, in the order in which the Python package passes them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Interpreter {
    /// `PyThreadState_GetUnchecked`, in older versions `_PyThreadState_UncheckedGet`.
    current: unsafe extern "C" fn() -> Object,
    /// `PyGILState_GetThisThreadState`.
    own: unsafe extern "C" fn() -> Object,
    /// `PyGILState_Ensure`.
    lock: unsafe extern "C" fn() -> c_int,
    /// `PyGILState_Release`.
    unlock: unsafe extern "C" fn(c_int),
    /// `PyGC_Disable`, which returns 1 if the collector was on.
    collector_off: unsafe extern "C" fn() -> c_int,
    /// `PyGC_Enable`.
    collector_on: unsafe extern "C" fn() -> c_int,
    /// `PyErr_Fetch`.
    take_error: unsafe extern "C" fn(*mut Object, *mut Object, *mut Object),
    /// `PyErr_Restore`.
    put_error: unsafe extern "C" fn(Object, Object, Object),
    /// `PyEval_GetFrame`, whose result is borrowed.
    frame: unsafe extern "C" fn() -> Object,
    /// `PyFrame_GetBack`.
    back: unsafe extern "C" fn(Object) -> Object,
    /// `PyFrame_GetCode`.
    code: unsafe extern "C" fn(Object) -> Object,
    /// `PyFrame_GetLineNumber`.
    line: unsafe extern "C" fn(Object) -> c_int,
    /// `PyObject_GetAttrString`.
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
    /// `PyUnicode_AsUTF8`, whose result lives as long as the object.
    text: unsafe extern "C" fn(Object) -> *const c_char,
    /// `Py_IncRef`.
    retain: unsafe extern "C" fn(Object),
    /// `Py_DecRef`, which ignores null.
    drop: unsafe extern "C" fn(Object),
}

/// The process has one interpreter, whose functions stay.
static INTERPRETER: OnceLock<Interpreter> = OnceLock::new();

/// The largest number of frames of a stack.
const DEEPEST: usize = 256;

/// Sets the functions. A second call changes nothing.
///
/// # Safety
/// The functions are those that the fields name, and stay callable.
pub(crate) unsafe fn set(functions: Interpreter) {
    let _ = INTERPRETER.set(functions);
}

/// Returns the stack of this thread's Python code, innermost frame first: a line for each frame,
/// with its line number, function and file between tabs.
///
/// Returns `None` on a thread that runs no Python code. If the thread does not have Python's lock,
/// waits for it if `may_wait`, else returns `None` too: the thread may then hold no lock of this
/// library or of PyTorch.
pub(crate) fn stack(may_wait: bool) -> Option<String> {
    let python = INTERPRETER.get()?;
    // SAFETY: both functions may be called on any thread at any time.
    let (current, own) = unsafe { ((python.current)(), (python.own)()) };
    if own.is_null() {
        return None;
    }
    let mut found = None;
    // In some versions `current` is the state of any thread that has the lock.
    if current == own {
        // SAFETY: this thread has the lock.
        found = unsafe { python.stack() };
    } else if may_wait {
        // I-115: never once the interpreter ends, which waits for this.
        collecting::within(|| {
            // SAFETY: the interpreter has not ended, and the lock is given back.
            found = unsafe {
                let state = (python.lock)();
                let found = python.stack();
                (python.unlock)(state);
                found
            };
        });
    }
    found
}

impl Interpreter {
    /// # Safety
    /// This thread has Python's lock.
    unsafe fn stack(&self) -> Option<String> {
        let (mut kind, mut value, mut trace) = (null_mut(), null_mut(), null_mut());
        let mut text = String::new();
        // SAFETY: this thread has the lock. Errors of the calls below are dropped when the error
        // from before is put back. All results that are not borrowed are dropped once.
        unsafe {
            let was_on = (self.collector_off)();
            (self.take_error)(&mut kind, &mut value, &mut trace);
            let mut frame = (self.frame)();
            if !frame.is_null() {
                (self.retain)(frame);
            }
            for _ in 0..DEEPEST {
                if frame.is_null() {
                    break;
                }
                self.describe(frame, &mut text);
                let back = (self.back)(frame);
                (self.drop)(frame);
                frame = back;
            }
            (self.drop)(frame);
            (self.put_error)(kind, value, trace);
            if was_on != 0 {
                (self.collector_on)();
            }
        }
        (!text.is_empty()).then_some(text)
    }

    /// Appends a line for a frame.
    ///
    /// # Safety
    /// This thread has Python's lock, and `frame` is a frame.
    unsafe fn describe(&self, frame: Object, text: &mut String) {
        // SAFETY: the caller says so. The code lives until it is dropped at the end.
        unsafe {
            let code = (self.code)(frame);
            let line = (self.line)(frame);
            let _ = write!(text, "{line}");
            for name in [c"co_name", c"co_filename"] {
                text.push('\t');
                self.append(code, name, text);
            }
            text.push('\n');
            (self.drop)(code);
        }
    }

    /// Appends a text attribute of an object, or `?`, without tabs and line ends.
    ///
    /// # Safety
    /// This thread has Python's lock, and `object` is an object.
    unsafe fn append(&self, object: Object, name: &CStr, text: &mut String) {
        // SAFETY: the caller says so. The bytes live as long as the value, and are copied.
        unsafe {
            let value = (self.attribute)(object, name.as_ptr());
            let bytes = match value.is_null() {
                true => std::ptr::null(),
                false => (self.text)(value),
            };
            let found = match bytes.is_null() {
                true => "?".into(),
                false => CStr::from_ptr(bytes).to_string_lossy(),
            };
            let plain = found
                .chars()
                .map(|it| if it.is_control() { ' ' } else { it });
            text.extend(plain);
            (self.drop)(value);
        }
    }
}
