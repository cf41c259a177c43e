//! The execution of queued work.
//!
//! Work looks up its addresses when it runs, not when it was queued: a late write goes to the
//! memory mapped there by then, and where nothing is mapped, the context is lost. A GPU does the
//! same to memory that was unmapped too early.
//!
//! `unsafe` is needed for copies to and from host memory, which is given by address.
#![allow(unsafe_code)]

use std::ptr;
use std::slice;

use super::answer::{Answer, ILLEGAL_ADDRESS};
use super::backing::Backing;
use super::resolve::Piece;
use super::state::State;
use super::work::{Use, Work};
use cuvmm_driver::{CUresult, Call, Ordinal};

impl<B: Backing> State<B> {
    /// Runs a piece of work. An error loses the context.
    pub(crate) fn execute(&mut self, device: i32, work: &Work) -> Answer {
        match work {
            // The machine's owner runs functions of the program (see `host_launch`).
            Work::Marker | Work::Prefetch | Work::Host(_) => Ok(()),
            &Work::Fill { to, byte, size } => {
                for piece in self.now(device, to, size, Use::Write)? {
                    self.fill_piece(&piece, byte)?;
                }
                Ok(())
            }
            &Work::Copy { to, from, size } => self.copy(device, to, from, size),
            &Work::ToDevice { to, ref from, size } => {
                let mut from = from.address();
                for piece in self.now(device, to, size, Use::Write)? {
                    let length = piece.size as usize;
                    let source = ptr::with_exposed_provenance::<u8>(from);
                    // SAFETY: the caller of the copy promised that the source is readable and not
                    // written until the copy is done, which is after this, or the work keeps the bytes.
                    let bytes = unsafe { slice::from_raw_parts(source, length) };
                    self.backing.write(piece.place, bytes).map_err(broken)?;
                    self.note_write(piece.place, piece.size);
                    from += length;
                }
                Ok(())
            }
            &Work::ToHost { to, from, size } => {
                let mut to = to;
                let pieces = self.now(device, from, size, Use::Read)?;
                self.note_read(device, from, &pieces, work.name());
                for piece in pieces {
                    let length = piece.size as usize;
                    let target = ptr::with_exposed_provenance_mut::<u8>(to);
                    // SAFETY: the caller of the copy promised that the destination is writable and
                    // not used otherwise until the copy is done, which is after this.
                    let bytes = unsafe { slice::from_raw_parts_mut(target, length) };
                    self.backing.read(piece.place, bytes).map_err(broken)?;
                    to += length;
                }
                Ok(())
            }
            Work::Kernel { reads, writes } => {
                for &(from, size) in reads {
                    let pieces = self
                        .resolve_apart(device, from, size, Use::Read)
                        .ok_or(ILLEGAL_ADDRESS)?;
                    self.note_read(device, from, &pieces, work.name());
                }
                for &(to, size, byte) in writes {
                    let pieces = self.resolve_apart(device, to, size, Use::Write);
                    for piece in pieces.ok_or(ILLEGAL_ADDRESS)? {
                        self.fill_piece(&piece, byte)?;
                    }
                }
                Ok(())
            }
            &Work::FreeAllocation { address } => {
                self.end_allocation(Call::MemFreeAsync, address);
                Ok(())
            }
            Work::Graph(nodes) => nodes.iter().try_for_each(|node| self.execute(device, node)),
        }
    }

    fn fill_piece(&mut self, piece: &Piece, byte: u8) -> Answer {
        self.backing
            .fill(piece.place, byte, piece.size)
            .map_err(broken)?;
        self.note_write(piece.place, piece.size);
        Ok(())
    }

    /// Discards work that will never run, and frees the memory that it would have freed.
    fn give_up_work(&mut self, work: &Work) {
        if let &Work::FreeAllocation { address } = work {
            self.end_allocation(Call::MemFreeAsync, address);
        }
    }

    pub(crate) fn lose(&mut self, device: i32, code: CUresult) {
        let Ok(index) = self.device(Ordinal(device)) else {
            return;
        };
        self.devices[index].lost.get_or_insert(code);
        self.discard_work(device);
        self.progress = true;
    }

    /// Discards all queued work of a device. Running functions of the program go on, and their
    /// streams no longer wait for them.
    pub(crate) fn discard_work(&mut self, device: i32) {
        self.due.retain(|due| due.stream.device != device);
        for work in self.streams.give_up(device) {
            self.give_up_work(&work);
        }
    }

    fn now(&self, device: i32, start: u64, size: u64, how: Use) -> Answer<Vec<Piece>> {
        // The call that queued the work has checked the access to memory pools.
        self.resolve(device, None, start, size, how)
            .ok_or(ILLEGAL_ADDRESS)
    }

    /// Copies piece by piece. Pieces of source and destination need not have the same boundaries.
    fn copy(&mut self, device: i32, to: u64, from: u64, size: u64) -> Answer {
        let mut sources = self.now(device, from, size, Use::Read)?.into_iter();
        let mut source = sources.next();
        for target in self.now(device, to, size, Use::Write)? {
            let mut done = 0;
            while done < target.size {
                let Some(piece) = source.as_mut() else {
                    return Ok(());
                };
                let size = piece.size.min(target.size - done);
                let (to, from) = (target.place.plus(done), piece.place);
                self.backing.copy(to, from, size).map_err(broken)?;
                self.note_copy(to, from, size);
                done += size;
                piece.place = piece.place.plus(size);
                piece.size -= size;
                if piece.size == 0 {
                    source = sources.next();
                }
            }
        }
        Ok(())
    }
}

/// Converts a failure of the system to move bytes into a device's code: a failed launch.
fn broken(_: CUresult) -> CUresult {
    CUresult::CUDA_ERROR_LAUNCH_FAILED
}
