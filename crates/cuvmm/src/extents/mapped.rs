//! Mappings unmapped only with proof.
//!
//! The public [`Mapping`] unmaps when it is dropped. Memory that a region or pool has placed may be
//! in use by work of the GPU at any time, so its extents are held as [`Mapped`]: an extent that is
//! dropped without proof that no work can use it stays mapped. Its memory and addresses are then
//! lost to the process and counted ([`Device::leaked`](crate::Device::leaked)), and its owner
//! reports the reason.
//!
//! Keeps I-25.
//!
//! `unsafe` is used to take the mapping out of a type whose drop does not drop it.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::fence::Unused;
use crate::error::CallError;
use crate::own::{Mapping, Physical};

/// A mapping that stays mapped when it is dropped.
#[derive(Debug)]
pub(crate) struct Mapped {
    mapping: ManuallyDrop<Mapping>,
}

impl Mapped {
    pub(super) const fn new(mapping: Mapping) -> Self {
        Self {
            mapping: ManuallyDrop::new(mapping),
        }
    }

    /// Unmaps (`cuMemUnmap`) and returns the physical; on failure, returns the mapping.
    pub(super) fn unmap(self, _proof: Unused) -> Result<Physical, (Self, CallError)> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped afterwards.
        let mapping = unsafe { ManuallyDrop::take(&mut this.mapping) };
        mapping
            .take_out()
            .map_err(|(mapping, error)| (Self::new(mapping), error))
    }

    /// [Unmaps](Self::unmap) a mapping. If the driver panics, `left` gets it, since it may be there.
    pub(super) fn unmap_or_leave(
        mut self,
        proof: Unused,
        left: &mut Vec<Self>,
    ) -> Result<Physical, (Self, CallError)> {
        match catch_unwind(AssertUnwindSafe(|| self.mapping.unmap())) {
            // Makes no second call.
            Ok(Ok(())) => self.unmap(proof),
            Ok(Err(error)) => Err((self, error)),
            Err(panic) => {
                left.push(self);
                resume_unwind(panic)
            }
        }
    }
}

impl Deref for Mapped {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let device = self.mapping.physical().device();
        if device.forked().is_none() {
            log!(debug, address = ?self.mapping.address(), "an extent stays mapped for good");
            device.report_leak(self.mapping.size());
        }
    }
}
