//! The backing of the host driver: addresses of this process, bytes in memory files.
//!
//! Copies go through the files and not through the addresses. So they need no access of the host,
//! cannot fault, and allocate nothing to read memory that was never written.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::{pread, pwrite, retry_on_intr};

use super::addresses::Addresses;
use super::bytes;
use super::files::{Files, punch};
use super::plain::{Mapped, PlainFile};
use super::system;
use crate::model::{
    Answer, Backing, Change, INVALID_VALUE, MemoryKey, OUT_OF_MEMORY, Pages, Part, Place, PlainName,
};
use cuvmm_driver::{CUresult, DeviceMemory, DriverKind};

/// In bytes.
const CHUNK: usize = 256 << 10;

/// Host memory behind the addresses.
#[derive(Debug)]
pub struct HostMemory {
    // Declared before the files, so that the mappings of the files are dropped first.
    addresses: Addresses,
    files: Files,
    pages: BTreeMap<u64, Pages>,
    plain: PlainFile,
    /// Plain memory by address: this process's, and that of others.
    mapped: BTreeMap<u64, Mapped>,
    opened: BTreeMap<u64, Mapped>,
    granularity: u64,
    buffer: Vec<u8>,
}

impl HostMemory {
    pub(super) fn new(granularity: u64, gap: u64) -> Self {
        Self {
            addresses: Addresses::new(gap),
            files: Files::new(granularity),
            pages: BTreeMap::new(),
            plain: PlainFile::new(granularity),
            mapped: BTreeMap::new(),
            opened: BTreeMap::new(),
            granularity,
            buffer: Vec::new(),
        }
    }

    /// Calls `each` for each chunk of `size` bytes, with a buffer of the chunk's length and its
    /// offset.
    fn chunked(
        &mut self,
        size: u64,
        mut each: impl FnMut(&mut Self, &mut [u8], u64) -> Answer,
    ) -> Answer {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(CHUNK, 0);
        let mut outcome = Ok(());
        let mut done = 0;
        while done < size && outcome.is_ok() {
            let length = usize::try_from(size - done).map_or(CHUNK, |rest| rest.min(CHUNK));
            outcome = each(self, &mut buffer[..length], done);
            done += length as u64;
        }
        self.buffer = buffer;
        outcome
    }
}

impl Backing for HostMemory {
    const KIND: DriverKind = DriverKind::Host;
    const MEMORY: DeviceMemory = DeviceMemory::Host;
    const FILES_AT_ONCE: bool = true;

    fn reserve(&mut self, size: u64, alignment: u64, at: Option<u64>) -> Answer<u64> {
        self.addresses.reserve(size, alignment, at)
    }

    fn unreserve(&mut self, address: u64, size: u64) -> Answer {
        self.addresses.unreserve(address, size);
        Ok(())
    }

    fn create(&mut self, key: MemoryKey, size: u64, file: Option<&Arc<OwnedFd>>) -> Answer {
        self.files.create(key, size, file)
    }

    fn destroy(&mut self, key: MemoryKey) {
        self.files.destroy(key);
    }

    fn map(&mut self, key: MemoryKey, parts: &[Part]) -> Answer {
        let extent = self.files.get(key)?.clone();
        for (index, part) in parts.iter().enumerate() {
            if let Err(code) = self.addresses.place(part, &extent.file, extent.offset) {
                // The new parts are areas of their own and can be cleared.
                let _ = self.addresses.clear(&parts[..index]);
                return Err(code);
            }
        }
        Ok(())
    }

    fn unmap(&mut self, parts: &[Part]) -> Answer {
        self.addresses.clear(parts)
    }

    fn protect(&mut self, changes: &[Change]) -> Answer {
        for (index, change) in changes.iter().enumerate() {
            if let Err(code) = self.addresses.protect(&change.part, change.to) {
                for undone in changes[..=index].iter().rev() {
                    let _ = self.addresses.protect(&undone.part, undone.from);
                }
                return Err(code);
            }
        }
        Ok(())
    }

    fn allocate(&mut self, size: u64, touchable: bool) -> Answer<u64> {
        if !touchable {
            let mapped = self.plain.allocate(size)?;
            let address = mapped.address();
            self.mapped.insert(address, mapped);
            return Ok(address);
        }
        let pages = Pages::new(size)?;
        let address = pages.address();
        self.pages.insert(address, pages);
        Ok(address)
    }

    fn deallocate(&mut self, address: u64, _size: u64) {
        self.pages.remove(&address);
        self.opened.remove(&address);
        if let Some(mapped) = self.mapped.remove(&address) {
            self.plain.free(mapped);
        }
    }

    fn name(&mut self, part: u64, address: u64, size: u64) -> Answer<PlainName> {
        let mapped = self.mapped.get(&part).ok_or(INVALID_VALUE)?;
        self.plain.name(mapped, address, size)
    }

    fn end_name(&mut self, name: &PlainName) {
        self.plain.end_name(name);
    }

    fn open(&mut self, name: &PlainName) -> Answer<u64> {
        let (mapped, address) = super::plain::open(name, self.granularity)?;
        self.opened.insert(address, mapped);
        Ok(address)
    }

    fn read(&mut self, from: Place, to: &mut [u8]) -> Answer {
        let (key, offset) = match from {
            Place::Allocation(address) => {
                bytes::read(address, to);
                return Ok(());
            }
            Place::Memory(key, offset) => (key, offset),
        };
        let extent = self.files.get(key)?;
        let mut at = extent.offset + offset;
        let mut rest = to;
        while !rest.is_empty() {
            let read = retry_on_intr(|| pread(&*extent.file, &mut *rest, at)).map_err(lost)?;
            if read == 0 {
                return Err(OUT_OF_MEMORY);
            }
            rest = &mut rest[read..];
            at += read as u64;
        }
        Ok(())
    }

    fn write(&mut self, to: Place, from: &[u8]) -> Answer {
        let (key, offset) = match to {
            Place::Allocation(address) => {
                bytes::write(address, from);
                return Ok(());
            }
            Place::Memory(key, offset) => (key, offset),
        };
        let extent = self.files.get(key)?;
        let mut at = extent.offset + offset;
        let mut rest = from;
        while !rest.is_empty() {
            let written = retry_on_intr(|| pwrite(&*extent.file, rest, at)).map_err(lost)?;
            if written == 0 {
                return Err(OUT_OF_MEMORY);
            }
            rest = &rest[written..];
            at += written as u64;
        }
        Ok(())
    }

    /// Fills a range. Zeroing whole pages frees their memory; they still read as zero.
    fn fill(&mut self, to: Place, byte: u8, size: u64) -> Answer {
        let (key, offset) = match to {
            Place::Allocation(address) => {
                bytes::fill(address, byte, size);
                return Ok(());
            }
            Place::Memory(key, offset) => (key, offset),
        };
        let page = system::page_size();
        let extent = self.files.get(key)?;
        let at = extent.offset + offset;
        if byte == 0 && at.is_multiple_of(page) && size.is_multiple_of(page) && size != 0 {
            return punch(&extent.file, at, size).map_err(lost);
        }
        self.chunked(size, |memory, buffer, done| {
            buffer.fill(byte);
            memory.write(to.plus(done), buffer)
        })
    }

    fn copy(&mut self, to: Place, from: Place, size: u64) -> Answer {
        self.chunked(size, |memory, buffer, done| {
            memory.read(from.plus(done), buffer)?;
            memory.write(to.plus(done), buffer)
        })
    }
}

/// Returns the code for a read or write that the system refused.
fn lost(_: rustix::io::Errno) -> CUresult {
    OUT_OF_MEMORY
}
