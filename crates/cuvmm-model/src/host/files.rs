//! The bytes of physicals, which are in memory files.
//!
//! Each exportable physical has its own file. All others share one file, each at its own offset
//! with a gap behind it. So physicals that are adjacent in the address space are never adjacent in
//! the file, and the system never merges their memory areas. The gaps use no memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use crate::model::{Answer, MemoryKey, OUT_OF_MEMORY, Space};
use cuvmm_driver::CUresult;

/// The length of the shared file in bytes. Parts that were never written use no memory.
const LENGTH: u64 = 1 << 60;

#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub(super) file: Arc<OwnedFd>,
    pub(super) offset: u64,
    size: u64,
    common: bool,
}

#[derive(Debug)]
pub(super) struct Files {
    common: Option<Arc<OwnedFd>>,
    offsets: Space,
    extents: HashMap<MemoryKey, Extent>,
    gap: u64,
}

impl Files {
    pub(super) fn new(granularity: u64) -> Self {
        let offsets = Space::new(0..LENGTH);
        Self {
            common: None,
            offsets,
            extents: HashMap::new(),
            gap: granularity,
        }
    }

    fn common(&mut self) -> Answer<Arc<OwnedFd>> {
        if let Some(file) = &self.common {
            return Ok(Arc::clone(file));
        }
        let file = memfd_create("cuvmm", MemfdFlags::CLOEXEC).map_err(|_| OUT_OF_MEMORY)?;
        ftruncate(&file, LENGTH).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        Ok(Arc::clone(self.common.insert(Arc::new(file))))
    }

    pub(super) fn create(
        &mut self,
        key: MemoryKey,
        size: u64,
        own: Option<&Arc<OwnedFd>>,
    ) -> Answer {
        let extent = match own {
            Some(file) => Extent {
                file: Arc::clone(file),
                offset: 0,
                size,
                common: false,
            },
            None => {
                let file = self.common()?;
                let room = size.checked_add(self.gap).ok_or(OUT_OF_MEMORY)?;
                let offset = self.offsets.allocate(room, 1).ok_or(OUT_OF_MEMORY)?;
                Extent {
                    file,
                    offset,
                    size,
                    common: true,
                }
            }
        };
        self.extents.insert(key, extent);
        Ok(())
    }

    /// Frees the memory to the system. Memory created at the same offset later reads as zero.
    pub(super) fn destroy(&mut self, key: MemoryKey) {
        let Some(extent) = self.extents.remove(&key) else {
            return;
        };
        if !extent.common {
            return;
        }
        match punch(&extent.file, extent.offset, extent.size) {
            Ok(()) => self
                .offsets
                .give_back(extent.offset, extent.size + self.gap),
            // The offset is never used again, because it would not read as zero.
            Err(error) => tracing::error!(%error, "memory could not be returned to the system"),
        }
    }

    pub(super) fn get(&self, key: MemoryKey) -> Answer<&Extent> {
        self.extents
            .get(&key)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

/// Frees the memory of a part of a file, which then reads as zero.
pub(super) fn punch(file: &OwnedFd, offset: u64, size: u64) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::io::retry_on_intr(|| fallocate(file, flags, offset, size))
}
