//! What is wrong with a value that a caller gave.

use std::ops::Range;

/// What is wrong with a value that a caller gave. Nothing has been done, and nothing has changed.
///
/// `what` names the value, with its unit where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// A size, a count or a name is zero or empty.
    #[error("{what}: there must be at least one")]
    Zero {
        /// The value.
        what: &'static str,
    },
    /// The value is smaller than it may be.
    #[error("{what}: {value} is less than {least}")]
    TooSmall {
        /// The value.
        what: &'static str,
        /// What was given.
        value: u64,
        /// The least that is possible.
        least: u64,
    },
    /// The value is larger than it may be.
    #[error("{what}: {value} is more than {most}")]
    TooLarge {
        /// The value.
        what: &'static str,
        /// What was given.
        value: u64,
        /// The most that is possible.
        most: u64,
    },
    /// The value is so large that 64 bits do not hold it once it is rounded up or multiplied.
    #[error("{what}: {value} is more than can be counted")]
    Uncountable {
        /// The value.
        what: &'static str,
        /// What was given.
        value: u64,
    },
    /// The value is not a multiple of what it must be: of the granularity, of an element's size, of
    /// an alignment.
    #[error("{what}: {value} is not a multiple of {multiple}")]
    Misaligned {
        /// The value.
        what: &'static str,
        /// What was given.
        value: u64,
        /// What it must be a multiple of.
        multiple: u64,
    },
    /// The value is not a power of two.
    #[error("{what}: {value} is not a power of two")]
    NotPowerOfTwo {
        /// The value.
        what: &'static str,
        /// What was given.
        value: u64,
    },
    /// A range is empty or runs backwards.
    #[error("{what} {start}..{end}: the range is empty")]
    Empty {
        /// What is counted: bytes, elements, tokens.
        what: &'static str,
        /// The first.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A range ends beyond what there is.
    #[error("{what} {start}..{end}: there are {len}")]
    OutOfRange {
        /// What is counted: bytes, elements, tokens.
        what: &'static str,
        /// The first.
        start: u64,
        /// One past the last.
        end: u64,
        /// How many there are.
        len: u64,
    },
    /// There is nothing of such a number.
    #[error("there is no {what} {number}")]
    NoSuch {
        /// What was to be named.
        what: &'static str,
        /// The number given.
        number: i64,
    },
    /// A stream, a device or memory belongs to another device than the operation works on.
    #[error("{what} belongs to another device")]
    WrongDevice {
        /// What belongs to another device.
        what: &'static str,
    },
    /// A stream, a device or memory belongs to another driver, to which its handle means something
    /// else.
    #[error("{what} belongs to another driver")]
    WrongDriver {
        /// What belongs to another driver.
        what: &'static str,
    },
    /// A handle type that is unknown, that only Windows has, or that is several where one is wanted.
    #[error(
        "handle types {bits:#x} are not one that is possible here: a descriptor or a fabric handle"
    )]
    HandleType {
        /// The bits of the handle types that were given.
        bits: u32,
    },
}

impl ArgumentError {
    /// A stream that belongs to another device.
    pub(crate) const STREAM: Self = Self::WrongDevice { what: "the stream" };

    /// A device of another driver.
    pub(crate) const OTHER_DRIVER: Self = Self::WrongDriver { what: "the device" };

    /// Checks that a number of bytes is not zero and a multiple of what it must be.
    pub(crate) fn whole(what: &'static str, value: u64, multiple: u64) -> Result<(), Self> {
        Self::not_zero(what, value)?;
        Self::aligned(what, value, multiple)
    }

    /// Checks that a number is not zero.
    pub(crate) const fn not_zero(what: &'static str, value: u64) -> Result<(), Self> {
        match value {
            0 => Err(Self::Zero { what }),
            _ => Ok(()),
        }
    }

    /// The number of elements in bytes at an address. Checks that elements may lie there, and that the
    /// bytes are whole ones.
    pub(crate) fn elements_at<T>(address: u64, bytes: u64) -> Result<usize, Self> {
        let element = size_of::<T>();
        Self::not_zero("bytes of an element", element as u64)?;
        Self::aligned("the address of elements", address, align_of::<T>() as u64)?;
        Self::aligned("bytes of elements", bytes, element as u64)?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX) / element.max(1))
    }

    /// Checks that a number is a multiple of what it must be.
    pub(crate) const fn aligned(what: &'static str, value: u64, multiple: u64) -> Result<(), Self> {
        if value.is_multiple_of(multiple) {
            return Ok(());
        }
        Err(Self::Misaligned {
            what,
            value,
            multiple,
        })
    }

    /// Checks that a number is not smaller than it may be.
    pub(crate) const fn at_least(what: &'static str, value: u64, least: u64) -> Result<(), Self> {
        if value >= least {
            return Ok(());
        }
        Err(Self::TooSmall { what, value, least })
    }

    /// Checks that a number is not larger than it may be.
    pub(crate) const fn at_most(what: &'static str, value: u64, most: u64) -> Result<(), Self> {
        if value <= most {
            return Ok(());
        }
        Err(Self::TooLarge { what, value, most })
    }

    /// Checks the size of the largest extent: a power of two, in whole granules.
    pub(crate) const fn extent(value: u64, granularity: u64) -> Result<(), Self> {
        let what = "bytes of an extent";
        if !value.is_power_of_two() {
            return Err(Self::NotPowerOfTwo { what, value });
        }
        Self::aligned(what, value, granularity)
    }

    /// Bytes that are not all there.
    pub(crate) const fn bytes(offset: u64, size: u64, len: u64) -> Self {
        Self::OutOfRange {
            what: "bytes",
            start: offset,
            end: offset.saturating_add(size),
            len,
        }
    }

    /// A range of which not all is there.
    pub(crate) const fn outside(what: &'static str, range: &Range<usize>, len: usize) -> Self {
        Self::OutOfRange {
            what,
            start: range.start as u64,
            end: range.end as u64,
            len: len as u64,
        }
    }
}
