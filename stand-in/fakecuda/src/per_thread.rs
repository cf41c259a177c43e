//! The functions whose default stream is the calling thread's own: `export` defines one beside each
//! function with a suffix.
//!
//! Each calls the usual function with a note that null means that stream. Copies and fills that
//! wait run in the order of the legacy default stream, which waits for more than needed.

use std::cell::Cell;

use cuvmm_sys::CUresult;

thread_local! {
    static MEANT: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if null names the thread's own stream in the current call.
pub(crate) fn is_meant() -> bool {
    MEANT.get()
}

/// Runs a call in which null names the thread's own stream.
pub(crate) fn meant(call: impl FnOnce() -> CUresult) -> CUresult {
    let before = MEANT.replace(true);
    // No exported function unwinds.
    let answer = call();
    MEANT.set(before);
    answer
}

/// Defines a function with a suffix in its name, if there is one, that calls the usual function.
macro_rules! per_thread {
    ([] $usual:ident $parameters:tt) => {};
    ([$suffix:ident] $usual:ident ($($parameter:ident: $type:ty),*)) => {
        const _: () = {
            #[unsafe(export_name = concat!(stringify!($usual), "_", stringify!($suffix)))]
            unsafe extern "C" fn own($($parameter: $type),*) -> cuvmm_sys::CUresult {
                // SAFETY: both functions have the same requirements.
                $crate::per_thread::meant(|| unsafe { $usual($($parameter),*) })
            }
        };
    };
}
pub(crate) use per_thread;
