//! What is wrong with a range of bytes.

/// What is wrong with a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The range is empty or runs backwards.
    #[error("the range {start}..{end} is empty")]
    Empty {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// An end is not a whole number of granules.
    #[error("the range {start}..{end} is not made of whole granules of {granularity} bytes")]
    Misaligned {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The range leaves the region.
    #[error("the range {start}..{end} leaves the region of {bytes} bytes")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The region's size.
        bytes: u64,
    },
}
