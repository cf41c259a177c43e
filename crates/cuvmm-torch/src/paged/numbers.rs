//! Block numbers, as C passes them.
//!
//! `unsafe` is used to read them.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use crate::error::Error;

/// Reads block numbers.
///
/// # Errors
/// Null with a count, integers of another width, or one that no block can have.
///
/// # Safety
/// `numbers` is null, or valid for reading `count` integers of `width` bytes.
pub(super) unsafe fn read(
    numbers: *const c_void,
    count: usize,
    width: c_int,
) -> Result<Vec<u32>, Error> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if numbers.is_null() {
        return Err(Error::Null);
    }
    let read: fn(*const c_void, usize) -> i64 = match width {
        // SAFETY: the index is below `count`, and nothing is assumed of the alignment.
        4 => |numbers, at| unsafe { numbers.cast::<i32>().add(at).read_unaligned() }.into(),
        // SAFETY: the index is below `count`.
        8 => |numbers, at| unsafe { numbers.cast::<i64>().add(at).read_unaligned() },
        _ => return Err(Error::NumberWidth(width)),
    };
    let numbers = (0..count).map(|at| read(numbers, at));
    let number = |number: i64| match i32::try_from(number) {
        Ok(known) if known >= 0 => Ok(known.unsigned_abs()),
        _ => Err(Error::BlockNumber(number)),
    };
    numbers.map(number).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn of<T>(numbers: &[T]) -> Result<Vec<u32>, Error> {
        let width = c_int::try_from(size_of::<T>()).unwrap();
        // SAFETY: the slice has these numbers.
        unsafe { read(numbers.as_ptr().cast(), numbers.len(), width) }
    }

    #[test]
    fn integers_of_both_widths_are_read() {
        assert_eq!(of(&[3_i32, 0, i32::MAX]).unwrap(), [3, 0, (1 << 31) - 1]);
        assert_eq!(of(&[3_i64, 0, 7]).unwrap(), [3, 0, 7]);
        let bytes = [0_u8, 9, 0, 0, 0, 5, 0, 0, 0];
        // SAFETY: two numbers of 4 bytes are behind the first byte.
        let unaligned = unsafe { read(bytes[1..].as_ptr().cast(), 2, 4) };
        assert_eq!(unaligned.unwrap(), [9, 5]);
    }

    #[test]
    fn what_is_no_number_is_refused() {
        assert!(matches!(of(&[1_i32, -1]), Err(Error::BlockNumber(-1))));
        let large = 1_i64 << 31;
        assert!(matches!(of(&[large]), Err(Error::BlockNumber(it)) if it == large));
        assert!(matches!(of(&[1_i16]), Err(Error::NumberWidth(2))));
        // SAFETY: null is not read.
        let null = unsafe { read(std::ptr::null(), 1, 4) };
        assert!(matches!(null, Err(Error::Null)));
        // SAFETY: nothing is read.
        let none = unsafe { read(std::ptr::null(), 0, 3) };
        assert!(none.unwrap().is_empty());
    }
}
