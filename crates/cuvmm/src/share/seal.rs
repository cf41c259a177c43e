//! Memory that can be published: what it offers, and how writing to it ends.

use bytemuck::Pod;

use super::offer::Offer;
use crate::error::{OfferError, SealError};
use crate::pool::Block;
use crate::region::Region;
use crate::vec::DeviceVec;

/// Memory that a [`Publisher`](super::Publisher) can take: a region, a vector, or a pool's block.
pub trait Publishable: Send + Sync + private::Seal + 'static {
    /// All that is in it.
    ///
    /// # Errors
    /// [`OfferError`] when there is nothing in it.
    fn offer(&self) -> Result<Offer, OfferError>;
}

pub(super) mod private {
    use crate::error::SealError;

    pub trait Seal {
        /// Whether nothing that others hold here may write to it.
        fn may_be_sealed(&self) -> Result<(), SealError>;

        /// Waits for what writes to it, and lets nobody here write any more.
        fn seal(&mut self) -> Result<(), SealError>;
    }
}

impl Publishable for Region {
    fn offer(&self) -> Result<Offer, OfferError> {
        Offer::region(self, 0..self.size())
    }
}

impl private::Seal for Region {
    fn may_be_sealed(&self) -> Result<(), SealError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), SealError> {
        Self::seal(self)
    }
}

impl Publishable for Block {
    fn offer(&self) -> Result<Offer, OfferError> {
        Offer::block(self)
    }
}

impl private::Seal for Block {
    fn may_be_sealed(&self) -> Result<(), SealError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), SealError> {
        Self::seal(self)
    }
}

impl<T: Pod + Send + Sync> Publishable for DeviceVec<T> {
    fn offer(&self) -> Result<Offer, OfferError> {
        Offer::vec(self)
    }
}

impl<T: Pod + Send + Sync> private::Seal for DeviceVec<T> {
    fn may_be_sealed(&self) -> Result<(), SealError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), SealError> {
        Self::seal(self)
    }
}
