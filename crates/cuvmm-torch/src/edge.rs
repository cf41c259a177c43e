//! The boundary between C and Rust: panics end here, and messages go to standard error.

use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

static HOOK: Once = Once::new();

/// Runs the body of a C function. A panic in it is reported in one line, and the function returns
/// `otherwise`.
pub(crate) fn guard<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    // The shared library has a standard library of its own, so the hook sees no panic of others.
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            message(&format!("internal error: {info}"));
        }));
    });
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

/// Prints one line on standard error.
///
/// `eprintln!` panics if standard error is closed, and takes a lock that a thread may have held when
/// this process was forked.
pub(crate) fn message(text: &str) {
    let line = format!("cuvmm: {}\n", text.replace('\n', " "));
    let _ = rustix::io::write(std::io::stderr().as_fd(), line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::guard;

    #[test]
    fn a_panic_becomes_the_other_value() {
        assert_eq!(guard(0, || 7), 7);
        let panics = || -> i32 { panic!("on purpose, in a test") };
        assert_eq!(guard(3, panics), 3);
        assert_eq!(guard(4, || 5), 5);
    }
}
