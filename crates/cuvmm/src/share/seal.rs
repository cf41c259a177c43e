//! Memory that can be published: its offer, and the end of writing to it.

use bytemuck::Pod;

use super::offer::Offer;
use crate::error::ShareError;
use crate::pool::Block;
use crate::region::Region;
use crate::vec::DeviceVec;

/// Memory that a [`Publisher`](super::Publisher) accepts: a region, a vector, or a block of a pool.
pub trait Publishable: Send + Sync + private::Seal + 'static {
    /// Offers all memory in it.
    ///
    /// # Errors
    /// [`ShareError`] if it holds no memory.
    fn offer(&self) -> Result<Offer, ShareError>;
}

pub(super) mod private {
    use crate::error::ShareError;

    pub trait Seal {
        /// Checks that no lease, registration, tensor or slice in this process may still write to
        /// it.
        fn may_be_sealed(&self) -> Result<(), ShareError>;

        /// Waits for work that writes to it, and makes it read-only for this process's devices.
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
