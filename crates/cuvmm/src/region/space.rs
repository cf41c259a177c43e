//! Addresses with extents in them: placed and withdrawn whole, and rolled back when that fails.

use std::collections::BTreeMap;

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
    pub(crate) fn size(&self) -> u64 {
        self.physical.size()
    }
}

#[derive(Debug)]
struct Placed {
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

    /// The extents that meet a range.
    pub(crate) fn extents_in(&self, start: u64, end: u64) -> Vec<Extent> {
        let first = self
            .extents
            .range(..=start)
            .next_back()
            .filter(|(offset, placed)| *offset + placed.mapping.size() > start)
            .map_or(start, |(&offset, _)| offset);
        self.extents
            .range(first..end.max(first))
            .map(|(&offset, placed)| Extent {
                offset,
                size: placed.mapping.size(),
                address: placed.mapping.address(),
            })
            .collect()
    }

    /// Places pieces side by side from `offset` and opens them to those who have access: all of
    /// them or none.
    pub(crate) fn place(&mut self, offset: u64, pieces: Vec<Piece>) -> Result<(), PlaceError> {
        let mut placed: Vec<Placed> = Vec::with_capacity(pieces.len());
        let mut pieces = pieces.into_iter();
        let mut at = offset;
        while let Some(piece) = pieces.next() {
            let size = piece.size();
            let outcome = self
                .reservation
                .map(at, &piece.physical)
                .map_err(|error| (None, CommitError::Map(error)))
                .and_then(|mapping| match mapping.set_access(&self.access) {
                    Ok(()) => Ok(mapping),
                    Err(error) => Err((Some(mapping), access_failed(at, size, error))),
                });
            match outcome {
                Ok(mapping) => {
                    placed.push(Placed {
                        mapping,
                        stain: piece.stain,
                        fresh: piece.fresh,
                    });
                }
                Err((mapping, error)) => {
                    let mut back = vec![];
                    let mut stuck = 0;
                    match mapping {
                        Some(mapping) => {
                            let Piece { stain, fresh, .. } = piece;
                            stuck += self.take_out(
                                Placed {
                                    mapping,
                                    stain,
                                    fresh,
                                },
                                &mut back,
                            );
                        }
                        None => back.push(piece),
                    }
                    for earlier in placed.into_iter().rev() {
                        stuck += self.take_out(earlier, &mut back);
                    }
                    back.extend(pieces);
                    return Err(PlaceError {
                        error,
                        pieces: back,
                        stuck,
                    });
                }
            }
            at += size;
        }
        for placed in placed {
            self.bytes += placed.mapping.size();
            self.extents.insert(placed.mapping.offset(), placed);
        }
        Ok(())
    }

    /// Unmaps what a roll-back takes out again; returns the bytes that are stuck.
    fn take_out(&mut self, placed: Placed, back: &mut Vec<Piece>) -> u64 {
        let Placed {
            mapping,
            stain,
            fresh,
        } = placed;
        match mapping.close() {
            Ok(physical) => {
                back.push(Piece {
                    physical,
                    stain,
                    fresh,
                });
                0
            }
            Err(failed) => {
                tracing::error!(error = %failed, "a roll-back could not unmap: quarantined");
                let size = failed.owner.size();
                self.stuck.push(failed.owner);
                size
            }
        }
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
    pub(crate) fn stained(&self, start: u64, end: u64) -> Vec<(u64, u64, u64)> {
        self.extents_in(start, end)
            .iter()
            .filter_map(|extent| {
                let stain = self.extents.get(&extent.offset)?.stain?;
                let from = extent.offset.max(start);
                let to = (extent.offset + extent.size).min(end);
                Some((from, to - from, stain))
            })
            .collect()
    }

    /// Notes who writes to the extents that meet a range from now on.
    pub(crate) fn stain(&mut self, start: u64, end: u64, who: u64) {
        for extent in self.extents_in(start, end) {
            if let Some(placed) = self.extents.get_mut(&extent.offset) {
                placed.stain = Some(who);
            }
        }
    }

    /// Queues filling a committed range with zeros on a stream that its next user waits for.
    pub(crate) fn zero(&self, stream: &Stream, offset: u64, size: u64) -> Result<(), CopyError> {
        self.span(offset, size)?.fill_async(stream, offset, 0, size)
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
