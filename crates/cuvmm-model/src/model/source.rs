//! The host side of copies to the device.
//!
//! `unsafe` is needed to read host memory, which is given by address.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::{ptr, slice};

#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// An address of the program, read when the work runs.
    At(usize),
    /// An address of the program, read at the call.
    Now(usize),
    /// Bytes that were read at the call.
    Kept(Arc<[u8]>),
}

impl Source {
    pub(crate) fn address(&self) -> usize {
        match self {
            Self::At(address) | Self::Now(address) => *address,
            Self::Kept(bytes) => bytes.as_ptr().expose_provenance(),
        }
    }

    /// Reads the bytes of [`Now`](Self::Now), at the call.
    pub(crate) fn keep(&mut self, size: u64) {
        if let &mut Self::Now(address) = self {
            let source = ptr::with_exposed_provenance::<u8>(address);
            // SAFETY: this is still the call, during which the caller lets nothing write the source.
            let bytes = unsafe { slice::from_raw_parts(source, size as usize) };
            *self = Self::Kept(bytes.into());
        }
    }
}
