//! What a stream can be asked to do, and the doing of it.
//!
//! Work looks its addresses up when it runs, not when it was queued: a write that comes late lands
//! in whatever is mapped there by then, and where nothing is, the context is lost. That is what a
//! GPU does to memory that was given away too early.
//!
//! `unsafe` is needed for the copies to and from host memory, which come as addresses.
#![allow(unsafe_code)]

use std::ptr;
use std::slice;

use super::answer::{Answer, ILLEGAL_ADDRESS};
use super::backing::Backing;
use super::copies::{Piece, Use};
use super::costs::Costs;
use super::state::State;
use crate::{CUresult, Call};

/// One piece of work.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// Nothing: a place in the queue that others can wait for.
    Marker,
    Fill {
        to: u64,
        byte: u8,
        size: u64,
    },
    Copy {
        to: u64,
        from: u64,
        size: u64,
    },
    /// From an address of the host.
    ToDevice {
        to: u64,
        from: usize,
        size: u64,
    },
    /// To an address of the host.
    ToHost {
        to: usize,
        from: u64,
        size: u64,
    },
    /// What a test launches: it touches its memory only when it runs.
    Kernel {
        reads: Vec<(u64, u64)>,
        writes: Vec<(u64, u64, u8)>,
    },
    /// An allocation of a memory pool ends here.
    FreeAllocation {
        address: u64,
    },
    /// A managed range is moved; the bytes stay where they are.
    Prefetch,
    Graph(Vec<Work>),
}

/// A range that a piece of work will use when it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) how: Use,
    /// The range is the program's end of a copy.
    pub(crate) of_host: bool,
}

impl Work {
    /// What it is called where work is reported.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Marker => "marker",
            Self::Fill { .. } => "fill",
            Self::Copy { .. } => "copy",
            Self::ToDevice { .. } => "copy to the device",
            Self::ToHost { .. } => "copy to the host",
            Self::Kernel { .. } => "kernel",
            Self::FreeAllocation { .. } => "free",
            Self::Prefetch => "prefetch",
            Self::Graph(_) => "graph",
        }
    }

    /// Shows each range that it will use.
    pub(crate) fn each_named(&self, see: &mut impl FnMut(Named)) {
        let mut names = |start, size, how, of_host| {
            see(Named {
                start,
                size,
                how,
                of_host,
            });
        };
        match self {
            &Self::Fill { to, size, .. } => names(to, size, Use::Write, false),
            &Self::Copy { to, from, size } => {
                names(from, size, Use::Read, false);
                names(to, size, Use::Write, false);
            }
            &Self::ToDevice { to, from, size } => {
                names(from as u64, size, Use::Read, true);
                names(to, size, Use::Write, false);
            }
            &Self::ToHost { to, from, size } => {
                names(from, size, Use::Read, false);
                names(to as u64, size, Use::Write, true);
            }
            Self::Kernel { reads, writes } => {
                for &(from, size) in reads {
                    names(from, size, Use::Read, false);
                }
                for &(to, size, _) in writes {
                    names(to, size, Use::Write, false);
                }
            }
            Self::Graph(nodes) => nodes.iter().for_each(|node| node.each_named(see)),
            Self::Marker | Self::FreeAllocation { .. } | Self::Prefetch => {}
        }
    }

    /// How long it takes, in virtual microseconds. What a test launches takes none.
    pub(crate) fn takes(&self, costs: &Costs) -> f64 {
        match self {
            &Self::Fill { size, .. } => costs.fill.at(size),
            &Self::Copy { size, .. } => costs.device_copy.at(size),
            &Self::ToDevice { size, .. } | &Self::ToHost { size, .. } => costs.host_copy.at(size),
            Self::Graph(nodes) => nodes.iter().map(|node| node.takes(costs)).sum(),
            Self::Marker
            | Self::Kernel { .. }
            | Self::FreeAllocation { .. }
            | Self::Prefetch { .. } => 0.0,
        }
    }
}

impl<B: Backing> State<B> {
    /// Does a piece of work now. An error loses the context.
    pub(crate) fn execute(&mut self, device: i32, work: &Work) -> Answer {
        match work {
            Work::Marker | Work::Prefetch => Ok(()),
            &Work::Fill { to, byte, size } => {
                for piece in self.now(device, to, size, Use::Write)? {
                    self.backing
                        .fill(piece.place, byte, piece.size)
                        .map_err(broken)?;
                }
                Ok(())
            }
            &Work::Copy { to, from, size } => self.copy(device, to, from, size),
            &Work::ToDevice { to, from, size } => {
                let mut from = from;
                for piece in self.now(device, to, size, Use::Write)? {
                    let length = piece.size as usize;
                    let source = ptr::with_exposed_provenance::<u8>(from);
                    // SAFETY: the caller of the copy promised that the source is readable and not
                    // written until the copy is done, which is after this.
                    let bytes = unsafe { slice::from_raw_parts(source, length) };
                    self.backing.write(piece.place, bytes).map_err(broken)?;
                    from += length;
                }
                Ok(())
            }
            &Work::ToHost { to, from, size } => {
                let mut to = to;
                for piece in self.now(device, from, size, Use::Read)? {
                    let length = piece.size as usize;
                    let target = ptr::with_exposed_provenance_mut::<u8>(to);
                    // SAFETY: the caller of the copy promised that the destination is writable and
                    // used by nobody else until the copy is done, which is after this.
                    let bytes = unsafe { slice::from_raw_parts_mut(target, length) };
                    self.backing.read(piece.place, bytes).map_err(broken)?;
                    to += length;
                }
                Ok(())
            }
            Work::Kernel { reads, writes } => {
                for &(from, size) in reads {
                    self.resolve_apart(device, from, size, Use::Read)
                        .ok_or(ILLEGAL_ADDRESS)?;
                }
                for &(to, size, byte) in writes {
                    let pieces = self.resolve_apart(device, to, size, Use::Write);
                    for piece in pieces.ok_or(ILLEGAL_ADDRESS)? {
                        self.backing
                            .fill(piece.place, byte, piece.size)
                            .map_err(broken)?;
                    }
                }
                Ok(())
            }
            &Work::FreeAllocation { address } => {
                self.free_in_order(address);
                Ok(())
            }
            Work::Graph(nodes) => nodes.iter().try_for_each(|node| self.execute(device, node)),
        }
    }

    /// Work that will never run: what it would have given back is given back all the same.
    pub(crate) fn give_up_work(&mut self, work: &Work) {
        if let &Work::FreeAllocation { address } = work {
            self.end_allocation(Call::MemFreeAsync, address);
        }
    }

    fn now(&self, device: i32, start: u64, size: u64, how: Use) -> Answer<Vec<Piece>> {
        self.resolve(device, start, size, how)
            .ok_or(ILLEGAL_ADDRESS)
    }

    /// Copies piece by piece, where pieces of source and destination need not end together.
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
                self.backing
                    .copy(target.place.plus(done), piece.place, size)
                    .map_err(broken)?;
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

/// The system could not bring the bytes: a device would report a failed launch.
fn broken(_: CUresult) -> CUresult {
    CUresult::CUDA_ERROR_LAUNCH_FAILED
}
