//! Addresses with extents in them: placed and withdrawn whole, and rolled back when that fails.

use std::collections::BTreeMap;
use std::ops::Range;

use cuvmm_driver::DeviceAddress;

use crate::device::Device;
use crate::error::{AccessError, CallError, CommitError, CopyError, ReserveError};
use crate::own::{Access, CloseRefusal, Mapping, Physical, Reservation, Right, Span, Stream};

/// One extent: its place and size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// Where in the region or block it begins.
    pub offset: u64,
    /// Its size, a power of two granules.
    pub size: u64,
    /// Its first address.
    pub address: DeviceAddress,
}

/// A physical that is not mapped, and who wrote to it last.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) physical: Physical,
    /// Whoever used it since the driver zeroed it; a number of the pool's choosing.
    pub(crate) stain: Option<u64>,
    /// Whether it was created for the operation that is running, which undoes that if it fails.
    pub(crate) fresh: bool,
}

impl Piece {
    /// One that was just created.
    pub(crate) const fn fresh(physical: Physical) -> Self {
        Self {
            physical,
            stain: None,
            fresh: true,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.physical.size()
    }
}

/// An extent.
#[derive(Debug)]
pub(crate) struct Placed {
    mapping: Mapping,
    stain: Option<u64>,
    /// As in [`Piece`], until the operation that placed it has [settled](Space::settle).
    fresh: bool,
}

/// A reservation whose extents all have the same access.
#[derive(Debug)]
pub(crate) struct Space {
    reservation: Reservation,
    access: Vec<Access>,
    extents: BTreeMap<u64, Placed>,
    bytes: u64,
    /// What a failed roll-back left mapped: never used again, unmapped when the space goes.
    stuck: Vec<Mapping>,
}

/// A placing that failed: nothing of it is mapped, except what is stuck.
#[derive(Debug)]
pub(crate) struct PlaceError {
    pub(crate) error: CommitError,
    /// The pieces, back in the caller's hands.
    pub(crate) pieces: Vec<Piece>,
    /// Bytes of pieces that could not be unmapped again. They stay in the space.
    pub(crate) stuck: u64,
}

/// The same before a space has kept what is stuck.
pub(crate) struct PlaceFailure {
    pub(crate) error: CommitError,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) stuck: Vec<Mapping>,
}

impl PlaceFailure {
    /// Unmaps what a roll-back takes out again.
    fn take_out(&mut self, placed: Placed) {
        let Placed {
            mapping,
            stain,
            fresh,
        } = placed;
        match mapping.close() {
            Ok(physical) => self.pieces.push(Piece {
                physical,
                stain,
                fresh,
            }),
            Err(failed) => {
                tracing::error!(error = %failed, "a roll-back could not unmap: quarantined");
                self.stuck.push(failed.owner);
            }
        }
    }
}

/// A space's addresses and who has access there, to place extents without the space.
#[derive(Debug)]
pub(crate) struct Ground {
    reservation: Reservation,
    access: Vec<Access>,
}

impl Ground {
    /// Places a piece at an offset that nobody else places at.
    pub(crate) fn place(&self, offset: u64, piece: Piece) -> Result<Placed, PlaceFailure> {
        place_one(&self.reservation, &self.access, offset, piece)
    }
}

fn place_one(
    reservation: &Reservation,
    access: &[Access],
    offset: u64,
    piece: Piece,
) -> Result<Placed, PlaceFailure> {
    let size = piece.size();
    let mapping = match reservation.map(offset, &piece.physical) {
        Ok(mapping) => mapping,
        Err(error) => {
            return Err(PlaceFailure {
                error: CommitError::Map(error),
                pieces: vec![piece],
                stuck: vec![],
            });
        }
    };
    let opened = mapping.set_access(access);
    let placed = Placed {
        mapping,
        stain: piece.stain,
        fresh: piece.fresh,
    };
    // The mapping holds the physical: this is no longer a holder, or it could not be taken back.
    drop(piece);
    match opened {
        Ok(()) => Ok(placed),
        Err(error) => {
            let mut failed = PlaceFailure {
                error: access_failed(offset, size, error),
                pieces: vec![],
                stuck: vec![],
            };
            failed.take_out(placed);
            Err(failed)
        }
    }
}

impl Space {
    /// Reserves `size` bytes, in which `device` can read and write what is placed.
    pub(crate) fn reserve(device: &Device, size: u64) -> Result<Self, ReserveError> {
        Ok(Self {
            reservation: Reservation::new(device, size)?,
            access: vec![Access::device(device, Right::ReadWrite)],
            extents: BTreeMap::new(),
            bytes: 0,
            stuck: Vec::new(),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        self.reservation.device()
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.reservation.address()
    }

    pub(crate) fn size(&self) -> u64 {
        self.reservation.size()
    }

    /// Bytes of extents, stuck ones left out.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn stuck_bytes(&self) -> u64 {
        self.stuck.iter().map(Mapping::size).sum()
    }

    pub(crate) fn stuck_count(&self) -> u64 {
        self.stuck.len() as u64
    }

    /// Bytes of stuck extents that meet a range.
    pub(crate) fn stuck_in(&self, start: u64, end: u64) -> u64 {
        let meets = |mapping: &&Mapping| {
            mapping.offset() < end && start < mapping.offset() + mapping.size()
        };
        self.stuck.iter().filter(meets).map(Mapping::size).sum()
    }

    /// All extents in the order of their offsets.
    pub(crate) fn extents(&self) -> impl DoubleEndedIterator<Item = Extent> + '_ {
        self.extents.iter().map(|(&offset, placed)| Extent {
            offset,
            size: placed.mapping.size(),
            address: placed.mapping.address(),
        })
    }

    /// The extent that an offset lies in.
    pub(crate) fn extent_around(&self, offset: u64) -> Option<Extent> {
        let (&start, placed) = self.extents.range(..=offset).next_back()?;
        let size = placed.mapping.size();
        (offset - start < size).then(|| Extent {
            offset: start,
            size,
            address: placed.mapping.address(),
        })
    }

    /// The extents that meet a range.
    pub(crate) fn extents_in(&self, start: u64, end: u64) -> impl Iterator<Item = Extent> + '_ {
        self.extents
            .range(self.covering(start, end))
            .map(|(&offset, placed)| Extent {
                offset,
                size: placed.mapping.size(),
                address: placed.mapping.address(),
            })
    }

    /// Where the extents that meet a range begin.
    fn covering(&self, start: u64, end: u64) -> Range<u64> {
        if start >= end {
            return start..start;
        }
        let first = self
            .extent_around(start)
            .map_or(start, |extent| extent.offset);
        first..end
    }

    /// Where another thread can place pieces, for [`Self::adopt`] to take them in.
    pub(crate) fn ground(&self) -> Ground {
        Ground {
            reservation: self.reservation.another(),
            access: self.access.clone(),
        }
    }

    /// Places pieces side by side from `offset` and opens them to those who have access: all of
    /// them or none.
    pub(crate) fn place(&mut self, offset: u64, pieces: Vec<Piece>) -> Result<(), PlaceError> {
        let mut placed: Vec<Placed> = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.into_iter();
        let mut at = offset;
        while let Some(piece) = pieces.next() {
            let size = piece.size();
            match place_one(&self.reservation, &self.access, at, piece) {
                Ok(mapped) => placed.push(mapped),
                Err(mut failed) => {
                    for earlier in placed.into_iter().rev() {
                        failed.take_out(earlier);
                    }
                    let PlaceFailure {
                        error,
                        pieces: mut back,
                        stuck,
                    } = failed;
                    back.extend(pieces);
                    return Err(PlaceError {
                        error,
                        pieces: back,
                        stuck: self.keep_stuck(stuck),
                    });
                }
            }
            at += size;
        }
        placed.into_iter().for_each(|placed| self.adopt(placed));
        Ok(())
    }

    /// Takes in an extent that was placed on this space's ground.
    pub(crate) fn adopt(&mut self, placed: Placed) {
        self.bytes += placed.mapping.size();
        self.extents.insert(placed.mapping.offset(), placed);
    }

    /// Keeps mappings that could not be undone; returns their bytes.
    pub(crate) fn keep_stuck(&mut self, stuck: Vec<Mapping>) -> u64 {
        let bytes = stuck.iter().map(Mapping::size).sum();
        self.stuck.extend(stuck);
        bytes
    }

    /// The physicals of all extents in order, to be placed elsewhere as well.
    pub(crate) fn clones(&self, stain: u64) -> impl Iterator<Item = Piece> + '_ {
        self.extents.values().map(move |placed| Piece {
            physical: placed.mapping.physical().clone(),
            stain: Some(stain),
            fresh: false,
        })
    }

    /// Unmaps the extent that begins at `offset`. Whoever calls has made sure that no work uses
    /// it. On failure it is still there.
    pub(crate) fn withdraw(&mut self, offset: u64) -> Result<Option<Piece>, CallError> {
        let Some(Placed {
            mapping,
            stain,
            fresh,
        }) = self.extents.remove(&offset)
        else {
            return Ok(None);
        };
        match mapping.close() {
            Ok(physical) => {
                self.bytes -= physical.size();
                Ok(Some(Piece {
                    physical,
                    stain,
                    fresh,
                }))
            }
            Err(failed) => {
                let CloseRefusal::Call(cause) = failed.reason else {
                    // A mapping is never shared.
                    return Ok(None);
                };
                self.extents.insert(
                    offset,
                    Placed {
                        mapping: failed.owner,
                        stain,
                        fresh,
                    },
                );
                Err(cause)
            }
        }
    }

    /// The operation that placed extents from `offset` on has succeeded.
    pub(crate) fn settle(&mut self, offset: u64) {
        self.extents
            .range_mut(offset..)
            .for_each(|(_, placed)| placed.fresh = false);
    }

    /// Leaves an extent that could not be unmapped where it is, for good.
    pub(crate) fn quarantine(&mut self, offset: u64) {
        if let Some(placed) = self.extents.remove(&offset) {
            self.bytes -= placed.mapping.size();
            self.stuck.push(placed.mapping);
        }
    }

    /// Tries again to unmap what is stuck; returns the pieces that came free.
    pub(crate) fn retry_stuck(&mut self) -> Vec<Piece> {
        let mut freed = vec![];
        let stuck = std::mem::take(&mut self.stuck);
        for mapping in stuck {
            match mapping.close() {
                // Its history is not known any more: treated as somebody else's.
                Ok(physical) => {
                    freed.push(Piece {
                        physical,
                        stain: Some(u64::MAX),
                        fresh: false,
                    });
                }
                Err(failed) => self.stuck.push(failed.owner),
            }
        }
        freed
    }

    /// The parts of a range that somebody wrote to since the driver zeroed them, as offset, size
    /// and who it was.
    pub(crate) fn stained(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.extents
            .range(self.covering(start, end))
            .filter_map(move |(&offset, placed)| {
                let from = offset.max(start);
                let to = (offset + placed.mapping.size()).min(end);
                Some((from, to - from, placed.stain?))
            })
    }

    /// Notes who writes to the extents that meet a range from now on; returns where the last of
    /// them ends.
    pub(crate) fn stain(&mut self, start: u64, end: u64, who: u64) -> u64 {
        let range = self.covering(start, end);
        self.extents
            .range_mut(range)
            .fold(end, |_, (offset, placed)| {
                placed.stain = Some(who);
                offset + placed.mapping.size()
            })
    }

    /// Queues filling a committed range with zeros on a stream that its next user waits for.
    pub(crate) fn zero(&self, stream: &Stream, offset: u64, size: u64) -> Result<(), CopyError> {
        self.span(offset, size)?.fill_async(stream, offset, 0, size)
    }

    /// Queues a copy of a range of another space to the beginning of this one.
    pub(crate) fn copy_from(
        &self,
        stream: &Stream,
        other: &Self,
        offset: u64,
        size: u64,
    ) -> Result<(), CopyError> {
        let from = other.span(offset, size)?;
        self.span(0, size)?
            .copy_async(stream, 0, &from, offset, size)
    }

    /// Writes behind what `stream` has queued.
    pub(crate) fn write(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), CopyError> {
        self.span(offset, bytes.len() as u64)?
            .write(stream, offset, bytes)
    }

    /// Reads behind what `stream` has queued.
    pub(crate) fn read(
        &self,
        stream: &Stream,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), CopyError> {
        self.span(offset, bytes.len() as u64)?
            .read(stream, offset, bytes)
    }

    /// The whole space as a range to copy in, if the part that is asked for is committed.
    fn span(&self, offset: u64, size: u64) -> Result<Span<'_>, CopyError> {
        let uncommitted = CopyError::NotCommitted { offset, size };
        let Some(end) = offset.checked_add(size) else {
            return Err(uncommitted);
        };
        let mut at = offset;
        for extent in self.extents_in(offset, end) {
            if extent.offset > at {
                return Err(uncommitted);
            }
            at = extent.offset + extent.size;
        }
        if at < end {
            return Err(uncommitted);
        }
        Ok(self.reservation.span())
    }
}

fn access_failed(offset: u64, size: u64, error: AccessError) -> CommitError {
    match error {
        AccessError::Call { cause, .. } => CommitError::Call {
            offset,
            size,
            cause,
        },
        other => CommitError::Access(other),
    }
}
