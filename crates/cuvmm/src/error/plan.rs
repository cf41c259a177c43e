//! Errors of plans.

/// What is wrong with a plan. No driver call was made. Steps count from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A device of another driver than the first.
    #[error("device {device} belongs to another driver than device 0")]
    OtherDriver {
        /// Its place among the devices given.
        device: usize,
    },
    /// There is no such device.
    #[error("step {step}: there is no device {device} among {count}")]
    NoSuchDevice {
        /// The step.
        step: usize,
        /// Its place among the devices given.
        device: usize,
        /// How many were given.
        count: usize,
    },
    /// Nothing has this name at that point.
    #[error("step {step}: nothing is named {name:?} here")]
    UnknownName {
        /// The step.
        step: usize,
        /// The name.
        name: String,
    },
    /// Something has this name already.
    #[error("step {step}: {name:?} names something else already")]
    NameTaken {
        /// The step.
        step: usize,
        /// The name.
        name: String,
    },
    /// What is named is of another kind than the step needs.
    #[error("step {step}: {name:?} is {is}, and here must be {needed}")]
    WrongKind {
        /// The step.
        step: usize,
        /// The name.
        name: String,
        /// What it is.
        is: &'static str,
        /// What it must be.
        needed: &'static str,
    },
    /// A size, a step of growth or a stripe of zero bytes, or no device to stripe over.
    #[error("step {step}: {what} is zero")]
    Zero {
        /// The step.
        step: usize,
        /// What is zero.
        what: &'static str,
    },
    /// A size does not fit 64 bits once rounded.
    #[error("step {step}: {size} bytes are too many to count once rounded")]
    TooLarge {
        /// The step.
        step: usize,
        /// Bytes asked for.
        size: u64,
    },
    /// An offset or a stripe is not a whole number of granules.
    #[error("step {step}: {bytes} is not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// The step.
        step: usize,
        /// The offset or size in bytes.
        bytes: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// A range leaves the addresses.
    #[error("step {step}: {size} bytes at offset {offset} leave the {within} bytes of {name:?}")]
    OutOfRange {
        /// The step.
        step: usize,
        /// The addresses.
        name: String,
        /// Where the range begins.
        offset: u64,
        /// Its size once rounded.
        size: u64,
        /// The size of the addresses.
        within: u64,
    },
    /// Something is mapped there already.
    #[error("step {step}: {size} bytes at offset {offset} overlap what is mapped at {taken}")]
    Overlap {
        /// The step.
        step: usize,
        /// Where the mapping is to begin.
        offset: u64,
        /// Its size.
        size: u64,
        /// Where the mapping in the way begins.
        taken: u64,
    },
    /// Nothing is mapped there.
    #[error("step {step}: nothing is mapped at offset {offset} of {name:?}")]
    NotMapped {
        /// The step.
        step: usize,
        /// The addresses.
        name: String,
        /// The offset.
        offset: u64,
    },
    /// Part of the range is not committed.
    #[error("step {step}: {size} bytes at offset {offset} of {name:?} are not all committed")]
    NotCommitted {
        /// The step.
        step: usize,
        /// The addresses.
        name: String,
        /// Where the range begins.
        offset: u64,
        /// Its size once rounded.
        size: u64,
    },
    /// What is to grow has more bytes already.
    #[error("step {step}: {name:?} has {asked} bytes, more than the {to} it is to grow to")]
    NoGrowth {
        /// The step.
        step: usize,
        /// The addresses.
        name: String,
        /// Bytes it has by the steps before.
        asked: u64,
        /// Bytes it is to grow to.
        to: u64,
    },
    /// A physical is to be released that is mapped.
    #[error("step {step}: {name:?} is still mapped")]
    StillMapped {
        /// The step.
        step: usize,
        /// The physical.
        name: String,
    },
}

impl PlanError {
    /// The step that is wrong, from 1; nothing where it is not one step.
    #[must_use]
    pub const fn step(&self) -> Option<usize> {
        match self {
            Self::OtherDriver { .. } => None,
            Self::NoSuchDevice { step, .. }
            | Self::UnknownName { step, .. }
            | Self::NameTaken { step, .. }
            | Self::WrongKind { step, .. }
            | Self::Zero { step, .. }
            | Self::TooLarge { step, .. }
            | Self::Misaligned { step, .. }
            | Self::OutOfRange { step, .. }
            | Self::Overlap { step, .. }
            | Self::NotMapped { step, .. }
            | Self::NotCommitted { step, .. }
            | Self::NoGrowth { step, .. }
            | Self::StillMapped { step, .. } => Some(*step),
        }
    }
}
