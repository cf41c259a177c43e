//! The boundary between C and Rust: exporting functions, reading and writing through pointers.
//!
//! `unsafe` is allowed here because C passes pointers, which have to be trusted: each helper
//! rejects null and otherwise relies on C's promise, the driver API's requirement that a pointer is
//! null or valid for the data that a function reads or writes.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use cuvmm_driver::DriverError;
use cuvmm_sys::CUresult;

/// The result of an exported function before its conversion to a code.
pub(crate) type Outcome<T = ()> = Result<T, CUresult>;

/// Defines functions with C names and C signatures. A difference from the signature in the table of
/// `cuvmm-sys` does not compile. With a suffix, as in `cuEventRecord + ptsz`, also defines the function
/// for [`per_thread`](crate::per_thread).
macro_rules! export {
    ($(fn $name:ident $(+ $suffix:ident)? ($($parameter:ident: $type:ty),* $(,)?) $body:block)*) => {
        $crate::edge::export_also! { $(fn $name $(+ $suffix)? ($($parameter: $type),*) $body)* }

        $(const _: cuvmm_sys::functions::$name = $name;)*
    };
}
pub(crate) use export;

/// Defines functions with C names that the table of `cuvmm-sys` lacks: it has only functions that
/// the library calls.
macro_rules! export_also {
    ($(fn $name:ident $(+ $suffix:ident)? ($($parameter:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($parameter: $type),*) -> cuvmm_sys::CUresult {
            $crate::edge::answer(|| $crate::calls::around(stringify!($name), || $body))
        }

        $crate::per_thread::per_thread! { [$($suffix)?] $name ($($parameter: $type),*) }
    )*};
}
pub(crate) use export_also;

/// Returns the code of a result. A panic must not unwind into C: it becomes `UNKNOWN`.
pub(crate) fn answer(work: impl FnOnce() -> Outcome) -> CUresult {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

/// Returns the code of a driver's error. A call that the host driver lacks should not be exported.
pub(crate) fn code(error: DriverError) -> CUresult {
    error.code().unwrap_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

pub(crate) fn present<T>(pointer: *const T) -> Outcome {
    if pointer.is_null() {
        Err(INVALID)
    } else {
        Ok(())
    }
}

/// Writes a result. The pointer, which comes from any language, may be unaligned.
///
/// # Safety
/// The pointer is null or valid for writing a `T`.
pub(crate) unsafe fn put<T>(pointer: *mut T, value: T) -> Outcome {
    present(pointer)?;
    // SAFETY: the pointer is not null, so the caller promises that it is valid for writing.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}

/// # Safety
/// The pointer is null or valid for reading a `T`, and the value there is valid for the type.
pub(crate) unsafe fn take<T: Copy>(pointer: *const T) -> Outcome<T> {
    present(pointer)?;
    // SAFETY: the pointer is not null, so the caller promises that it is valid for reading.
    Ok(unsafe { pointer.read_unaligned() })
}

/// The longest array that is read. No program passes more values, so a larger count is wrong, and
/// the array is shorter.
pub(crate) const LONGEST: usize = 1 << 20;

/// Reads an array. A count above [`LONGEST`] is refused.
///
/// # Safety
/// The pointer is null or valid for reading `count` values of `T`.
pub(crate) unsafe fn take_all<T: Copy>(pointer: *const T, count: usize) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    present(pointer)?;
    if count > LONGEST {
        return Err(INVALID);
    }
    // SAFETY: the pointer is not null, so the caller promises that all of it is valid for reading.
    (0..count)
        .map(|index| unsafe { take(pointer.add(index)) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(answer(|| panic!("inside")), CUresult::CUDA_ERROR_UNKNOWN);
    }

    #[test]
    fn null_is_refused_and_nothing_is_touched() {
        // SAFETY: each of the three functions accepts null.
        unsafe {
            assert_eq!(put(std::ptr::null_mut::<u64>(), 1), Err(INVALID));
            assert_eq!(take(std::ptr::null::<u64>()), Err(INVALID));
            assert_eq!(take_all(std::ptr::null::<u64>(), 2), Err(INVALID));
            assert_eq!(take_all(std::ptr::null::<u64>(), 0), Ok(Vec::new()));
            for count in [LONGEST + 1, 1 << 40, usize::MAX] {
                assert_eq!(take_all(&1u64, count), Err(INVALID));
            }
        }
    }
}
