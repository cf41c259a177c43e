//! Export of memory as a tensor that owns it.
//!
//! Keeps I-66.
//!
//! `unsafe` in this file: dlpark's descriptors take a pointer. Its memory stays in place while the
//! owner lives, which lives in the descriptor until the deleter is called.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use dlpark::ffi::{DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed, ManagedTensorBase, legacy, versioned};

use super::consumer::Consumer;
use super::memory::{Held, Memory, place_of};
use super::tensor::{Figures, Tensor, alignment_of};
use crate::error::{ArgumentError, HandedBack, TensorError};
use crate::own::Access;
use crate::pool::Lease;

impl Tensor {
    /// Exports an owner's bytes as this tensor, for a consumer. The tensor's deleter drops the
    /// owner; export an [`Arc`](std::sync::Arc) of it if the memory is used here too.
    ///
    /// The descriptor is of DLPack 1.3, and `data` points at the first element, because PyTorch
    /// ignores `byte_offset`.
    ///
    /// The only driver calls are those that order the [`Consumer`].
    ///
    /// # Errors
    /// [`HandedBack`] with the owner in it, for example if the tensor is not within the memory, the
    /// block is asleep, or a writable tensor's memory is shared with a fork.
    pub fn export<O: Memory>(
        &self,
        owner: O,
        consumer: &Consumer,
    ) -> Result<versioned::Dlpack, HandedBack<O, TensorError>> {
        self.export_as::<DLManagedTensorVersioned, O>(owner, consumer)
    }

    /// Exports an owner's bytes with a descriptor from before DLPack 1.0, for consumers that
    /// support no other. Such a descriptor cannot be read-only.
    ///
    /// # Errors
    /// [`HandedBack`] in the cases of [`export`](Self::export), and if the tensor is read-only.
    pub fn export_legacy<O: Memory>(
        &self,
        owner: O,
        consumer: &Consumer,
    ) -> Result<legacy::Dlpack, HandedBack<O, TensorError>> {
        if self.is_read_only() {
            let reason = TensorError::ReadOnly;
            return Err(HandedBack { owner, reason });
        }
        self.export_as::<DLManagedTensor, O>(owner, consumer)
    }

    fn export_as<M: ManagedTensorBase, O: Memory>(
        &self,
        owner: O,
        consumer: &Consumer,
    ) -> Result<Managed<M>, HandedBack<O, TensorError>> {
        let prepared = self.look_at(&owner).and_then(|found| {
            let Figures { shape, strides, .. } = found.figures;
            let descriptor = Dynamic::new(shape, strides).prepare_as::<M>()?;
            consumer.order_behind(&owner, found.device == DLDevice::CPU)?;
            Ok((descriptor, found.data, found.device, found.lease))
        });
        let (descriptor, data, device, lease) = match prepared {
            Ok(prepared) => prepared,
            Err(reason) => return Err(HandedBack { owner, reason }),
        };
        let lent = Box::new(Lent {
            held: Some((lease, owner)),
        });
        let mut descriptor = descriptor.initialize(lent);
        descriptor
            .set_data(std::ptr::with_exposed_provenance_mut(data))
            .set_device(device)
            .set_dtype(self.element());
        if self.is_read_only() {
            // SAFETY: only the read-only flag is set, which claims nothing about the memory.
            unsafe { descriptor.set_flags_unchecked(DlpackFlags::READ_ONLY) };
        }
        // SAFETY: the bytes that the shape and the strides span from the pointer on are the
        // owner's, are committed, and stay in place while the owner lives, which lives in the
        // descriptor. The flags do not claim that the memory is a copy.
        Ok(unsafe { descriptor.finish() })
    }

    /// Checks the tensor against the memory. The result stays valid while the lease lives.
    fn look_at(&self, memory: &impl Held) -> Result<Found, TensorError> {
        let figures = self.figures()?;
        let (offset, size) = (self.first_byte(), figures.bytes);
        let outside = || ArgumentError::bytes(offset, size, memory.reach());
        let end = offset.checked_add(size).ok_or_else(outside)?;
        if end > memory.reach() {
            return Err(outside().into());
        }
        let access = match self.is_read_only() {
            true => Access::Read,
            false => Access::ReadWrite,
        };
        let lease = memory.admit(offset..end, access)?;
        let device = place_of(memory, &(offset..end))?;
        let data = match size {
            0 => 0,
            _ => self.pointer(memory)?,
        };
        Ok(Found {
            figures,
            data,
            device,
            lease,
        })
    }

    fn pointer(&self, memory: &impl Held) -> Result<usize, TensorError> {
        let offset = self.first_byte();
        let outside = || ArgumentError::bytes(offset, 1, memory.reach());
        let address = memory.address().checked_add(offset).ok_or_else(outside)?;
        let alignment = alignment_of(self.element());
        ArgumentError::aligned("the address of a tensor", address.0, alignment)?;
        Ok(usize::try_from(address.0).map_err(|_| outside())?)
    }
}

/// The contents of a descriptor, and the lease that keeps them valid.
struct Found {
    figures: Figures,
    /// The address of the first element; null if there is none.
    data: usize,
    device: DLDevice,
    lease: Option<Lease>,
}

/// The value that a deleter drops: first the lease that keeps the memory in place, then the owner.
struct Lent<O: Held> {
    held: Option<(Option<Lease>, O)>,
}

impl<O: Held> Drop for Lent<O> {
    fn drop(&mut self) {
        let held = self.held.take();
        let done = catch_unwind(AssertUnwindSafe(|| {
            if let Some((lease, owner)) = held {
                // A forked child owns nothing, and locks may have been held during the fork.
                if owner.device().forked().is_none() {
                    owner.record_use_anywhere();
                }
                drop(lease);
                drop(owner);
            }
        }));
        // A deleter is called from C: no panic may unwind out of it, not even from dropping the
        // payload.
        if let Err(panic) = done {
            std::mem::forget(panic);
        }
    }
}
