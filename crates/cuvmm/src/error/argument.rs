//! Errors in the values of arguments.

use std::fmt;
use std::ops::Range;

use cuvmm_driver::{HandleTypes, Location};

use crate::display::Bytes;

/// An argument that cannot be used. Nothing has been done, and nothing has changed.
///
/// `what` names the argument, with its unit where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// This argument, a size, a count or a name, is zero or empty.
    #[error("{0}: at least one is required")]
    Zero(&'static str),
    /// The value is below the minimum.
    #[error("{what}: {} is less than the minimum of {}", Figure(.what, *.value), Figure(.what, *.least))]
    TooSmall {
        /// The argument.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The least possible value.
        least: u64,
    },
    /// The value is above the maximum.
    #[error("{what}: {} is more than the maximum of {}", Figure(.what, *.value), Figure(.what, *.most))]
    TooLarge {
        /// The argument.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The greatest possible value.
        most: u64,
    },
    /// The value does not fit 64 bits once it is rounded up or multiplied.
    #[error("{what}: {} overflows 64 bits when it is rounded up or multiplied", Figure(.what, *.value))]
    #[doc(alias = "Uncountable")]
    Overflow {
        /// The argument.
        what: &'static str,
        /// The value given.
        value: u64,
    },
    /// The value is not a multiple of the granularity, an element's size or an alignment, as
    /// required.
    #[error("{what}: {} is not a multiple of {}", Figure(.what, *.value), Figure(.what, *.multiple))]
    Misaligned {
        /// The argument.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The number that it must be a multiple of.
        multiple: u64,
    },
    /// A range of bytes does not consist of whole granules. Nothing outside the range is ever taken
    /// for it: the granules that it touches are to be named as such, or committed by
    /// [`Region::commit_covering`](crate::Region::commit_covering).
    #[error(
        "bytes {start}..{end} are not whole granules of {}: those that they touch are bytes \
         {covering_start}..{covering_end}",
        Bytes(*.granule)
    )]
    MisalignedRange {
        /// The first byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The bytes of a granule.
        granule: u64,
        /// The first byte of the granules that the range touches.
        covering_start: u64,
        /// One past the last byte of these granules.
        covering_end: u64,
    },
    /// A heap, or a region in a tenant, was to be built over a hardened pool, which guards blocks only.
    #[error(
        "a hardened pool has blocks only: allocate those, or build the pool without `hardened`"
    )]
    HardenedPool,
    /// A selection to sleep and a selection to wake of one exchange have blocks or a heap in common.
    #[error(
        "an exchange is to put blocks or a heap to sleep and to wake them too: select other tenants, \
         tags or heaps"
    )]
    SleepsAndWakes,
    /// This device, which was to be given access to memory, has it already: it is the memory's own
    /// device, or was named before.
    #[error("{0} has access already: it is the memory's own device, or is named twice")]
    HasAccess(Location),
    /// The value is not a power of two.
    #[error("{what}: {} is not a power of two", Figure(.what, *.value))]
    NotPowerOfTwo {
        /// The argument.
        what: &'static str,
        /// The value given.
        value: u64,
    },
    /// A range is empty or its end is before its start.
    #[error("{what} {start}..{end}: the range is empty")]
    Empty {
        /// The unit: bytes, elements, tokens.
        what: &'static str,
        /// The first.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A range ends beyond the end of the object.
    #[error("{what} {start}..{end}: there are {len}")]
    OutOfRange {
        /// The unit: bytes, elements, tokens.
        what: &'static str,
        /// The first.
        start: u64,
        /// One past the last.
        end: u64,
        /// The number that exist.
        len: u64,
    },
    /// No object has this number.
    #[error("there is no {what} {number}")]
    NoSuch {
        /// The kind of object.
        what: &'static str,
        /// The number given.
        number: i64,
    },
    /// This argument, a stream, a device or memory, belongs to a device other than the one that the
    /// operation works on.
    #[error("{0} belongs to another device")]
    WrongDevice(&'static str),
    /// This argument, a heap, belongs to another tenant than the one that the operation works on.
    #[error("{0} belongs to another tenant")]
    WrongTenant(&'static str),
    /// This argument, a stream, a device or memory, belongs to another driver, for which its handle
    /// means something else.
    #[error("{0} belongs to another driver")]
    WrongDriver(&'static str),
    /// The handle type of these bits is unknown, exists only on another system, is D3DKMT (which nothing
    /// closes), or is several types where one is required.
    #[error("{}: use {} or a fabric handle (FABRIC)", Unsupported(HandleTypes::from_bits_retain(*.0)), OS_HANDLE)]
    HandleType(u32),
}

/// The name of the system's own handle type, the other systems' handle types, and the system that has those.
const OS_HANDLE: &str = if cfg!(windows) {
    "an NT handle (WIN32)"
} else {
    "a descriptor (POSIX_FD)"
};
const FOREIGN: (HandleTypes, &str) = if cfg!(windows) {
    (HandleTypes::POSIX_FD, "Linux")
} else {
    (WIN32, "Windows")
};
const WIN32: HandleTypes = HandleTypes::WIN32.union(HandleTypes::WIN32_KMT);

/// Handle types that are not supported, with the reason.
struct Unsupported(HandleTypes);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types = self.0;
        let known = WIN32 | HandleTypes::POSIX_FD | HandleTypes::FABRIC;
        let (foreign, system) = FOREIGN;
        match types {
            none if none.is_empty() => f.write_str("no known handle type"),
            _ if !known.contains(types) => write!(f, "handle type {types} is unknown"),
            _ if types.intersects(foreign) => {
                write!(f, "handle type {types} exists only on {system}")
            }
            HandleTypes::WIN32_KMT => write!(f, "nothing closes a handle of type {types}"),
            _ => write!(f, "handle types {types} where one is required"),
        }
    }
}

/// The value of an argument, with a unit if its name says that it counts bytes.
struct Figure<'a>(&'a str, u64);

impl fmt::Display for Figure<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.contains("byte") {
            true => Bytes(self.1).fmt(f),
            false => self.1.fmt(f),
        }
    }
}

impl ArgumentError {
    /// The error for a stream that belongs to another device.
    pub(crate) const STREAM: Self = Self::WrongDevice("the stream");

    /// Checks that a number of bytes is not zero and a multiple of `multiple`.
    pub(crate) fn whole(what: &'static str, value: u64, multiple: u64) -> Result<(), Self> {
        Self::not_zero(what, value)?;
        Self::aligned(what, value, multiple)
    }

    pub(crate) const fn not_zero(what: &'static str, value: u64) -> Result<(), Self> {
        match value {
            0 => Err(Self::Zero(what)),
            _ => Ok(()),
        }
    }

    /// The number of elements in bytes at an address. Checks that the address is aligned for
    /// elements, and that the bytes are whole elements.
    pub(crate) fn elements_at<T>(address: u64, bytes: u64) -> Result<usize, Self> {
        let element = size_of::<T>();
        Self::not_zero("bytes of an element", element as u64)?;
        Self::aligned("the address of elements", address, align_of::<T>() as u64)?;
        Self::aligned("bytes of elements", bytes, element as u64)?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX) / element.max(1))
    }

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

    pub(crate) const fn at_least(what: &'static str, value: u64, least: u64) -> Result<(), Self> {
        if value >= least {
            return Ok(());
        }
        Err(Self::TooSmall { what, value, least })
    }

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

    /// The error for a range of bytes that is out of range.
    pub(crate) const fn bytes(offset: u64, size: u64, len: u64) -> Self {
        Self::OutOfRange {
            what: "bytes",
            start: offset,
            end: offset.saturating_add(size),
            len,
        }
    }

    pub(crate) const fn outside(what: &'static str, range: &Range<usize>, len: usize) -> Self {
        Self::OutOfRange {
            what,
            start: range.start as u64,
            end: range.end as u64,
            len: len as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ArgumentError, HandleTypes};

    #[test]
    fn numbers_of_bytes_have_units_and_others_have_none() {
        let said = |what, value, least| {
            let refused = ArgumentError::at_least(what, value, least);
            refused.map_err(|error| error.to_string())
        };
        assert_eq!(
            said("bytes of a limit", 1 << 20, 128 << 20),
            Err("bytes of a limit: 1 MiB is less than the minimum of 128 MiB".to_owned())
        );
        assert_eq!(
            said("sequences", 1, 2),
            Err("sequences: 1 is less than the minimum of 2".to_owned())
        );
        let misaligned = ArgumentError::aligned("an offset in bytes", 5, 2 << 20);
        assert_eq!(
            misaligned.map_err(|error| error.to_string()),
            Err("an offset in bytes: 5 B is not a multiple of 2 MiB".to_owned())
        );
    }

    #[test]
    fn handle_types_are_refused_with_the_reason() {
        let said = |types: HandleTypes| {
            let text = ArgumentError::HandleType(types.bits()).to_string();
            text.split_once(": use ")
                .map(|(reason, _)| reason.to_owned())
        };
        let of = |reason: &str| Some(reason.to_owned());
        let several = HandleTypes::POSIX_FD | HandleTypes::FABRIC;
        let unknown = HandleTypes::from_bits_retain(0x40);
        assert_eq!(
            said(HandleTypes::WIN32),
            of("handle type WIN32 exists only on Windows")
        );
        assert_eq!(
            said(several),
            of("handle types POSIX_FD | FABRIC where one is required")
        );
        assert_eq!(said(unknown), of("handle type 0x40 is unknown"));
        assert_eq!(said(HandleTypes::empty()), of("no known handle type"));
    }
}
