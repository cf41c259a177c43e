//! This process's address space: reserving ranges, mapping files in them, changing protection.
//!
//! [`arenas`](super::arenas) decides where reservations lie in the ranges. A mapped piece never
//! merges with its neighbor, because no two physicals are adjacent in a file (see
//! [`files`](super::files)). So each piece is exactly one memory area of the system, and its
//! removal splits nothing and needs no area. Areas are counted before the system is called, so that
//! some remain for the rest of the process.
//!
//! `unsafe` is needed to change mappings. In `host/`, only this file does so.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use super::arenas::{Arenas, SHARED, Span};
use super::system;
use crate::model::{Answer, OUT_OF_MEMORY, Part, Reach};
use cuvmm_driver::CUresult;

/// Areas left for the rest of the process: its allocator aborts the process if it gets none.
const RESERVED_AREAS: usize = 2_048;

#[derive(Clone, Debug)]
struct Piece {
    size: u64,
    file: Arc<OwnedFd>,
    offset: u64,
    reach: Reach,
}

#[derive(Debug)]
pub(super) struct Addresses {
    arenas: Arenas,
    pieces: BTreeMap<u64, Piece>,
    /// Upper bound of the memory areas in use here.
    areas: usize,
    most_areas: usize,
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn length(size: u64) -> Answer<usize> {
    usize::try_from(size).map_err(|_| OUT_OF_MEMORY)
}

fn code(error: Errno) -> CUresult {
    match error {
        Errno::NOMEM | Errno::EXIST | Errno::AGAIN | Errno::MFILE | Errno::NFILE => OUT_OF_MEMORY,
        _ => CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    }
}

fn empty() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

impl Addresses {
    /// The gap between reservations is in bytes.
    pub(super) fn new(gap: u64) -> Self {
        Self {
            arenas: Arenas::new(gap),
            pieces: BTreeMap::new(),
            areas: 0,
            most_areas: system::most_areas().saturating_sub(RESERVED_AREAS),
        }
    }

    fn room_for(&self, areas: usize) -> Answer {
        if self.areas + areas <= self.most_areas {
            Ok(())
        } else {
            Err(OUT_OF_MEMORY)
        }
    }

    /// Reserves an unused range, at `wanted` if that is given.
    pub(super) fn reserve(
        &mut self,
        size: u64,
        alignment: u64,
        wanted: Option<u64>,
    ) -> Answer<u64> {
        if let Some(wanted) = wanted {
            return self.reserve_at(wanted, size);
        }
        if self.arenas.is_small(size, alignment) {
            if let Some(start) = self.arenas.take_anywhere(size, alignment) {
                return Ok(start);
            }
            // Where a whole arena cannot be reserved, the range itself may still fit.
            if let Ok(start) = self.take(SHARED, system::page_size(), 0) {
                self.arenas.add_shared(Span {
                    start,
                    size: SHARED,
                });
                if let Some(start) = self.arenas.take_anywhere(size, alignment) {
                    return Ok(start);
                }
            }
        }
        let gap = self.arenas.gap();
        let start = self.take(size, alignment, gap)?;
        let span = Span {
            start: start - gap,
            size: size + 2 * gap,
        };
        self.arenas.add_single(span, start);
        Ok(start)
    }

    fn reserve_at(&mut self, start: u64, size: u64) -> Answer<u64> {
        match self.arenas.take_at(start, size) {
            Some(true) => return Ok(start),
            Some(false) => return Err(OUT_OF_MEMORY),
            None => {}
        }
        self.room_for(1)?;
        let flags = empty() | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the flag makes the system refuse where anything is mapped already.
        unsafe { mmap_anonymous(at(start), length(size)?, ProtFlags::empty(), flags) }
            .map_err(code)?;
        self.areas += 1;
        self.arenas.add_single(Span { start, size }, start);
        Ok(start)
    }

    fn take(&mut self, size: u64, alignment: u64, gap: u64) -> Answer<u64> {
        self.room_for(1)?;
        let start = take_aligned(size, alignment, gap)?;
        self.areas += 1;
        Ok(start)
    }

    pub(super) fn unreserve(&mut self, address: u64, size: u64) {
        let Some(span) = self.arenas.give_back(address, size) else {
            return;
        };
        self.arenas.forget(span.start);
        self.areas -= 1;
        let outcome = length(span.size).and_then(|length| {
            // SAFETY: this type reserved the range, and no reservation is left in it.
            unsafe { munmap(at(span.start), length) }.map_err(code)
        });
        if let Err(code) = outcome {
            // The range stays reserved and empty, which costs only addresses.
            tracing::error!(%code, "addresses could not be returned to the system");
        }
    }

    /// Maps a part of a file without access. A failed call has changed nothing.
    pub(super) fn place(&mut self, part: &Part, file: &Arc<OwnedFd>, offset: u64) -> Answer {
        let more = self.areas_around(part);
        self.room_for(more)?;
        let offset = offset + part.offset;
        let piece = Piece {
            size: part.size,
            file: Arc::clone(file),
            offset,
            reach: Reach::Nothing,
        };
        if let Err(code) = set_piece(part.address, &piece) {
            // If the system has already cleared the range, this reserves it again before another
            // thread's mapping is placed there; if it has not, this call is refused.
            let flags = empty() | MapFlags::FIXED_NOREPLACE;
            // SAFETY: the flag makes the system refuse where anything is mapped.
            let _ = unsafe {
                mmap_anonymous(
                    at(part.address),
                    length(part.size)?,
                    ProtFlags::empty(),
                    flags,
                )
            };
            return Err(code);
        }
        self.pieces.insert(part.address, piece);
        self.areas += more;
        Ok(())
    }

    /// Removes all pieces in these parts. A failed call has changed nothing.
    pub(super) fn clear(&mut self, parts: &[Part]) -> Answer {
        let inside = |part: &Part| part.address..part.address + part.size;
        let pieces = parts
            .iter()
            .flat_map(|part| self.pieces.range(inside(part)));
        let starts: Vec<u64> = pieces.map(|(&start, _)| start).collect();
        for (index, start) in starts.iter().enumerate() {
            let Err(code) = self.clear_piece(*start) else {
                continue;
            };
            for start in &starts[..index] {
                self.restore(*start);
            }
            return Err(code);
        }
        for start in starts {
            let Some(piece) = self.pieces.remove(&start) else {
                continue;
            };
            let part = Part {
                address: start,
                size: piece.size,
                offset: 0,
            };
            self.areas -= self.areas_around(&part);
        }
        Ok(())
    }

    fn clear_piece(&self, start: u64) -> Answer {
        let Some(piece) = self.pieces.get(&start) else {
            return Ok(());
        };
        let flags = empty() | MapFlags::FIXED;
        // SAFETY: the range is a piece that was mapped in a reservation of this driver; the caller
        // of unmap has promised that nothing uses it.
        unsafe { mmap_anonymous(at(start), length(piece.size)?, ProtFlags::empty(), flags) }
            .map(drop)
            .map_err(code)
    }

    fn restore(&self, start: u64) {
        if let Some(piece) = self.pieces.get(&start)
            && let Err(code) = set_piece(start, piece)
        {
            tracing::error!(%code, "a mapping could not be restored");
        }
    }

    pub(super) fn protect(&mut self, part: &Part, to: Reach) -> Answer {
        let inside = part.address..part.address + part.size;
        for (&start, piece) in self.pieces.range_mut(inside) {
            if piece.reach == to {
                continue;
            }
            // SAFETY: the range is a piece of this driver. A caller that removes access has
            // promised that nothing uses the range with it.
            unsafe { mprotect(at(start), length(piece.size)?, rights(to)) }.map_err(code)?;
            piece.reach = to;
        }
        Ok(())
    }

    /// Returns how many more areas there are with a piece in this part than with a hole: the piece
    /// splits its hole, unless it touches an end of the hole.
    fn areas_around(&self, part: &Part) -> usize {
        let end = part.address + part.size;
        let before = self.pieces.range(..part.address).next_back();
        let arena = self.arenas.containing(part.address);
        let left = arena.is_some_and(|arena| arena.start == part.address)
            || before.is_some_and(|(start, piece)| start + piece.size == part.address);
        let right = self.pieces.contains_key(&end)
            || arena.is_some_and(|arena| arena.start + arena.size == end);
        usize::from(!left) + usize::from(!right)
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        for span in self.arenas.all() {
            let Ok(size) = usize::try_from(span.size) else {
                continue;
            };
            // SAFETY: the ranges belong to this driver, and all mappings in them end with it: the
            // caller must not use them longer.
            let _ = unsafe { munmap(at(span.start), size) };
        }
    }
}

fn rights(reach: Reach) -> MprotectFlags {
    match reach {
        Reach::Nothing => MprotectFlags::empty(),
        Reach::Read => MprotectFlags::READ,
        Reach::Write => MprotectFlags::READ | MprotectFlags::WRITE,
    }
}

fn set_piece(start: u64, piece: &Piece) -> Answer {
    let protection = match piece.reach {
        Reach::Nothing => ProtFlags::empty(),
        Reach::Read => ProtFlags::READ,
        Reach::Write => ProtFlags::READ | ProtFlags::WRITE,
    };
    let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
    let (size, file) = (length(piece.size)?, &*piece.file);
    // SAFETY: the rules place pieces in reservations of this driver and refuse to overlap mappings,
    // so this replaces empty addresses only.
    unsafe { mmap(at(start), size, protection, flags, file, piece.offset) }
        .map(drop)
        .map_err(code)
}

/// Reserves an aligned range with a gap before and after it, and returns its start. Takes more than
/// is needed and unmaps the excess at both ends.
fn take_aligned(size: u64, alignment: u64, gap: u64) -> Answer<u64> {
    let page = system::page_size();
    let more = alignment.saturating_sub(page);
    let kept = size.checked_add(2 * gap).ok_or(OUT_OF_MEMORY)?;
    let all = kept.checked_add(more).ok_or(OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address chosen by the system touches no other.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), length(all)?, ProtFlags::empty(), empty()) }
            .map_err(code)?;
    let start = start.expose_provenance() as u64;
    let wanted = (start + gap).next_multiple_of(alignment.max(page));
    let first = wanted - gap;
    for (from, to) in [(start, first), (first + kept, start + all)] {
        if from < to {
            // SAFETY: both ends belong to the mapping made above, and nothing uses them. An end
            // that cannot be unmapped stays reserved, which does no harm.
            let _ = unsafe { munmap(at(from), length(to - from)?) };
        }
    }
    Ok(wanted)
}
