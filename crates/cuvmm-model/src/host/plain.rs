//! The file of plain memory, parts of which other processes can map.
//!
//! Its first part holds a number for each part named to other processes, or 0 once that memory was
//! freed. The rest is the memory.
//!
//! `unsafe` is needed to map parts of the file.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::files::punch;
use crate::model::{Answer, INVALID_VALUE, OUT_OF_MEMORY, PlainName, Space};

/// The length of the file in bytes. Parts that were never written use no memory.
const LENGTH: u64 = 1 << 60;

/// The size of the table of numbers, in bytes.
const NUMBERS: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Mapped {
    address: u64,
    size: u64,
    offset: u64,
}

impl Mapped {
    pub(super) fn new(file: &OwnedFd, offset: u64, size: u64, granularity: u64) -> Answer<Self> {
        let room = size.checked_add(granularity).ok_or(OUT_OF_MEMORY)?;
        let room = usize::try_from(room).map_err(|_| OUT_OF_MEMORY)?;
        let none = ProtFlags::empty();
        // SAFETY: a new mapping at an address chosen by the system touches no other.
        let start = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(ptr::null_mut(), room, none, flags)
        }
        .map_err(|_| OUT_OF_MEMORY)?;
        let start = start.expose_provenance() as u64;
        let address = start.next_multiple_of(granularity);
        let place = |at: u64| ptr::with_exposed_provenance_mut::<c_void>(at as usize);
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies in the mapping made above, which nothing else uses.
        let mapped = unsafe { mmap(place(address), size as usize, both, flags, file, offset) };
        let (before, behind) = match mapped {
            Ok(_) => (address - start, start + room as u64 - address - size),
            Err(_) => (room as u64, 0),
        };
        for (at, bytes) in [(start, before), (address + size, behind)] {
            if bytes != 0 {
                // SAFETY: these parts of the first mapping are not used. A failure leaves them
                // mapped without access, which does no harm.
                let _ = unsafe { munmap(place(at), bytes as usize) };
            }
        }
        mapped.map_err(|_| OUT_OF_MEMORY)?;
        Ok(Self {
            address,
            size,
            offset,
        })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut::<c_void>(self.address as usize);
        // SAFETY: `new` made the mapping, and its memory was freed. A failure leaves it mapped,
        // which does no harm.
        let _ = unsafe { munmap(start, self.size as usize) };
    }
}

#[derive(Debug)]
pub(super) struct PlainFile {
    file: Option<Arc<OwnedFd>>,
    offsets: Space,
    granularity: u64,
    named: u64,
}

impl PlainFile {
    pub(super) fn new(granularity: u64) -> Self {
        Self {
            file: None,
            offsets: Space::new(NUMBERS..LENGTH),
            granularity,
            named: 0,
        }
    }

    fn file(&mut self) -> Answer<Arc<OwnedFd>> {
        if let Some(file) = &self.file {
            return Ok(Arc::clone(file));
        }
        let file = memfd_create("cuvmm-plain", MemfdFlags::CLOEXEC).map_err(|_| OUT_OF_MEMORY)?;
        ftruncate(&file, LENGTH).map_err(|_| OUT_OF_MEMORY)?;
        Ok(Arc::clone(self.file.insert(Arc::new(file))))
    }

    pub(super) fn allocate(&mut self, size: u64) -> Answer<Mapped> {
        let file = self.file()?;
        let alignment = self.granularity;
        let offset = self
            .offsets
            .allocate(size, alignment)
            .ok_or(OUT_OF_MEMORY)?;
        let mapped = Mapped::new(&file, offset, size, alignment);
        if mapped.is_err() {
            self.offsets.give_back(offset, size);
        }
        mapped
    }

    pub(super) fn free(&mut self, mapped: Mapped) {
        let (offset, size) = (mapped.offset, mapped.size);
        drop(mapped);
        let Some(file) = &self.file else { return };
        match punch(file, offset, size) {
            Ok(()) => self.offsets.give_back(offset, size),
            // The offset is never used again, because it would not read as zero.
            Err(error) => tracing::error!(%error, "memory could not be returned to the system"),
        }
    }

    pub(super) fn name(&mut self, mapped: &Mapped, address: u64, size: u64) -> Answer<PlainName> {
        let file = self.file()?;
        self.named += 1;
        let place = self.named * 8;
        if place >= NUMBERS {
            return Err(OUT_OF_MEMORY);
        }
        pwrite(&*file, &self.named.to_ne_bytes(), place).map_err(|_| OUT_OF_MEMORY)?;
        let offset = mapped.offset + (address - mapped.address);
        let process = u64::from(std::process::id());
        let descriptor = file.as_raw_fd() as u64;
        Ok(PlainName([
            process, descriptor, offset, size, self.named, place,
        ]))
    }

    /// Ends a name when its memory is freed.
    pub(super) fn end_name(&mut self, name: &PlainName) {
        if let Some(file) = &self.file {
            // After a failure other processes can still open the name, which does no harm here.
            let _ = pwrite(&**file, &[0; 8], name.0[5]);
        }
    }
}

/// Maps memory that a process has named, and returns its first address too.
pub(super) fn open(name: &PlainName, granularity: u64) -> Answer<(Mapped, u64)> {
    let [process, descriptor, offset, size, number, place] = name.0;
    let path = format!("/proc/{process}/fd/{descriptor}");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|_| INVALID_VALUE)?;
    let file = OwnedFd::from(file);
    let mut found = [0; 8];
    let read = pread(&file, &mut found, place).map_err(|_| INVALID_VALUE)?;
    if read != found.len() || u64::from_ne_bytes(found) != number || number == 0 || size == 0 {
        return Err(INVALID_VALUE);
    }
    let lead = offset % granularity;
    let whole = lead.checked_add(size);
    let whole = whole.and_then(|bytes| bytes.checked_next_multiple_of(granularity));
    let whole = whole.filter(|&bytes| offset.checked_add(bytes).is_some_and(|end| end <= LENGTH));
    let whole = whole.ok_or(INVALID_VALUE)?;
    let mapped = Mapped::new(&file, offset - lead, whole, granularity)?;
    let address = mapped.address() + lead;
    Ok((mapped, address))
}

#[cfg(test)]
mod tests {
    use super::{PlainFile, PlainName, open};

    const GRANULE: u64 = 2 << 20;

    #[test]
    fn a_name_opens_its_memory_until_it_ends() {
        let mut file = PlainFile::new(GRANULE);
        let mapped = file.allocate(GRANULE).expect("memory");
        assert_eq!(mapped.address() % GRANULE, 0);
        let name = file
            .name(&mapped, mapped.address() + 512, 100)
            .expect("a name");
        let (seen, address) = open(&name, GRANULE).expect("opened");
        assert_eq!(address, seen.address() + 512);
        for (word, wrong) in [(0, u64::MAX), (2, u64::MAX), (3, u64::MAX), (3, 0), (4, 7)] {
            let mut forged = name;
            forged.0[word] = wrong;
            assert!(open(&forged, GRANULE).is_err(), "word {word}");
        }
        file.end_name(&name);
        assert!(open(&name, GRANULE).is_err());
        assert!(open(&PlainName([0; 6]), GRANULE).is_err());
        file.free(mapped);
    }
}
