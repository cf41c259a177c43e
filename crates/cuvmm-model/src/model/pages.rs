//! Host memory that devices can access too: pinned and managed memory.
//!
//! Programs access it directly, so it is real on every backend, including the model.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

use super::answer::{Answer, OUT_OF_MEMORY};

pub(crate) use system::page_size;

/// Zeroed pages of this process, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Pages {
    address: u64,
    size: usize,
}

impl Pages {
    pub(crate) fn new(size: u64) -> Answer<Self> {
        let size = usize::try_from(size).map_err(|_| OUT_OF_MEMORY)?;
        let start = system::map(size).ok_or(OUT_OF_MEMORY)?;
        Ok(Self {
            address: start.expose_provenance() as u64,
            size,
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        system::unmap(self.address as usize, self.size);
    }
}
