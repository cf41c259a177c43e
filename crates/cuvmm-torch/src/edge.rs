//! The boundary between C and Rust: ends panics, prints messages, keeps each thread's last error,
//! exchanges texts, and knows which threads may call functions of the program.
//!
//! `unsafe` is used to read and write the texts of C.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char};
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::Duration;

use crate::error::Error;

static HOOK: Once = Once::new();

thread_local! {
    /// The text of this thread's last error, and its [status](status_of).
    static LAST: RefCell<(String, i32)> = const { RefCell::new((String::new(), 0)) };
    /// `true` while this thread is in a function of C, where it may hold locks of this library, or its
    /// caller some of PyTorch.
    static MAY_HOLD_LOCKS: Cell<bool> = const { Cell::new(false) };
}

/// A time in which a thread may hold locks, or does not. Before and after it is as it was.
pub(crate) struct Locks {
    before: bool,
}

impl Locks {
    fn may_be_held(may: bool) -> Self {
        let before = MAY_HOLD_LOCKS.replace(may);
        Self { before }
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        MAY_HOLD_LOCKS.set(self.before);
    }
}

/// Runs a request for memory during which functions of the program may be called on this thread: it
/// holds no lock.
pub(crate) fn calling_back<T>(request: impl FnOnce() -> T) -> T {
    let _locks = Locks::may_be_held(false);
    request()
}

/// Keeps functions of the program from being called on this thread until the result is dropped.
pub(crate) fn without_calling_back() -> Locks {
    Locks::may_be_held(true)
}

/// Returns `true` if this thread holds no lock: in [`calling_back`], and on threads of this library.
pub(crate) fn may_call_back() -> bool {
    !MAY_HOLD_LOCKS.get()
}

/// Runs the body of a C function. A panic is reported in one line, and the function returns
/// `otherwise`.
pub(crate) fn guard<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    // The shared library has a standard library of its own, so the hook sees no panic of others.
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            message(&format!("internal error: {info}"));
        }));
    });
    let _locks = without_calling_back();
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

/// Runs the body of a C function and returns 0, or keeps the error for [`last`] and returns -3 if
/// memory was short, -4 if a name is not published, -2 after a panic, else -1.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Error>) -> i32 {
    guard(-2, || match body() {
        Ok(()) => 0,
        Err(error) => {
            keep(&error);
            status_of(&error)
        }
    })
}

fn status_of(error: &Error) -> i32 {
    match error {
        error if error.is_out_of_memory() => -3,
        error if error.is_not_published() => -4,
        _ => -1,
    }
}

/// Prints a line on standard error, and keeps it as the thread's last error.
pub(crate) fn complain(error: &Error, text: &str) {
    set(text, status_of(error));
    message(text);
}

pub(crate) fn keep(error: &Error) {
    set(&error.to_string(), status_of(error));
}

fn set(text: &str, status: i32) {
    // A thread that ends has no last error any more.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            text.clone_into(&mut last.0);
            last.1 = status;
        }
    });
}

/// Returns the text and the status of the thread's last error, or an empty text and 0.
pub(crate) fn last() -> (String, i32) {
    LAST.try_with(|last| {
        last.try_borrow()
            .map(|last| last.clone())
            .unwrap_or_default()
    })
    .unwrap_or_default()
}

/// Prints one line on standard error. `eprintln!` would panic if standard error is closed, and take
/// a lock that a thread may have held at a fork.
pub(crate) fn message(text: &str) {
    let line = format!("cuvmm: {}\n", text.replace('\n', " "));
    let _ = rustix::io::write(std::io::stderr().as_fd(), line.as_bytes());
}

/// Writes a text and a zero byte into a buffer if they fit. Returns the bytes needed.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
pub(crate) unsafe fn write(mut text: Vec<u8>, buffer: *mut c_char, length: usize) -> usize {
    text.push(0);
    if !buffer.is_null() && text.len() <= length {
        // SAFETY: the caller passes at least this number of writable bytes, or null.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len()) };
    }
    text.len()
}

/// Returns the timeout of seconds, from 0 to infinity.
pub(crate) fn timeout(seconds: f64) -> Result<Duration, Error> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Error::Timeout(seconds));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Writes a value as JSON, like [`write`]. On failure returns 0 and keeps the error.
///
/// # Safety
/// The requirements of [`write`].
pub(crate) unsafe fn write_json(
    value: impl FnOnce() -> Result<serde_json::Value, Error>,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let text = guard(None, || match value() {
        Ok(value) => Some(value.to_string().into_bytes()),
        Err(error) => {
            keep(&error);
            None
        }
    });
    // SAFETY: the caller says so.
    text.map_or(0, |text| unsafe { write(text, buffer, length) })
}

/// Reads a text of C, `None` for null.
///
/// # Errors
/// The text is not UTF-8.
///
/// # Safety
/// `text` is null or ends with a zero byte, and is not changed while the result is used.
pub(crate) unsafe fn read<'a>(text: *const c_char) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a text that ends with a zero byte.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::NotText)
}

#[cfg(test)]
mod tests {
    use super::{guard, last, status, write};
    use crate::error::Error;

    #[test]
    fn a_panic_becomes_the_other_value() {
        assert_eq!(guard(0, || 7), 7);
        let panics = || -> i32 { panic!("on purpose, in a test") };
        assert_eq!(guard(3, panics), 3);
        assert_eq!(guard(4, || 5), 5);
    }

    #[test]
    fn the_last_error_is_the_threads() {
        let none = (String::new(), 0);
        assert_eq!(last(), none);
        assert_eq!(status(|| Ok(())), 0);
        assert_eq!(status(|| Err(Error::NegativeSize)), -1);
        assert_eq!(last(), (Error::NegativeSize.to_string(), -1));
        assert_eq!(std::thread::spawn(last).join().expect("ends"), none);
        assert_eq!(status(|| panic!("on purpose, in a test")), -2);
    }

    #[test]
    fn a_text_is_written_whole_or_not_at_all() {
        let mut buffer = [9; 4];
        let (place, text) = (buffer.as_mut_ptr(), b"abc".to_vec());
        // SAFETY: the buffer has at least the lengths that are passed.
        let needed = unsafe {
            (
                write(text.clone(), place, 3),
                write(text.clone(), std::ptr::null_mut(), 0),
            )
        };
        assert_eq!((needed, buffer), ((4, 4), [9; 4]));
        // SAFETY: the buffer has this length.
        let needed = unsafe { write(text, place, 4) };
        assert_eq!((needed, buffer.map(|byte| byte as u8)), (4, *b"abc\0"));
    }
}
