//! Memory that can be published: what it offers, and how writing to it ends.

use bytemuck::Pod;

use super::offer::Offer;
use crate::error::ShareError;
use crate::pool::Block;
use crate::region::Region;
use crate::vec::DeviceVec;

/// Memory that a [`Publisher`](super::Publisher) can take: a region, a vector, or a pool's block.
pub trait Publishable: Send + Sync + private::Seal + 'static {
    /// All that is in it.
    ///
    /// # Errors
    /// [`ShareError`] when there is nothing in it.
    fn offer(&self) -> Result<Offer, ShareError>;
}

pub(super) mod private {
    use crate::error::ShareError;

    pub trait Seal {
        /// Whether nothing that others hold here may write to it.
        fn may_be_sealed(&self) -> Result<(), ShareError>;

        /// Waits for what writes to it, and lets nobody here write any more.
        fn seal(&mut self) -> Result<(), ShareError>;
    }
}

impl Publishable for Region {
    fn offer(&self) -> Result<Offer, ShareError> {
        Offer::region(self, 0..self.size())
    }
}

impl private::Seal for Region {
    fn may_be_sealed(&self) -> Result<(), ShareError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), ShareError> {
        Self::seal(self)
    }
}

impl Publishable for Block {
    fn offer(&self) -> Result<Offer, ShareError> {
        Offer::block(self)
    }
}

impl private::Seal for Block {
    fn may_be_sealed(&self) -> Result<(), ShareError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), ShareError> {
        Self::seal(self)
    }
}

impl<T: Pod + Send + Sync> Publishable for DeviceVec<T> {
    fn offer(&self) -> Result<Offer, ShareError> {
        Offer::vec(self)
    }
}

impl<T: Pod + Send + Sync> private::Seal for DeviceVec<T> {
    fn may_be_sealed(&self) -> Result<(), ShareError> {
        Self::may_be_sealed(self)
    }

    fn seal(&mut self) -> Result<(), ShareError> {
        Self::seal(self)
    }
}
