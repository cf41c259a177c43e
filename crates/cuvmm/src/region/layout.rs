//! Layouts: where the parts of a region are placed, on one device, in stripes over several, or
//! partly in host memory.

use std::ops::Range;

use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::own::{Physical, Place, reachable};

/// A rule that places the parts of a region.
///
/// A layout determines where a commit places new memory. It does not affect access: the region's
/// own device has access, and devices that were [granted](crate::Region::grant) it.
#[derive(Clone, Debug)]
pub struct Layout {
    shape: Shape,
}

#[derive(Clone, Debug)]
enum Shape {
    Whole(Place),
    RoundRobin { places: Vec<Place>, unit: u64 },
    Shares(Vec<Share>),
}

#[derive(Clone, Debug)]
struct Share {
    place: Place,
    bytes: u64,
    end: u64,
}

impl Layout {
    /// Places all of the region in one place.
    #[must_use]
    pub fn on(place: impl Into<Place>) -> Self {
        Self {
            shape: Shape::Whole(place.into()),
        }
    }

    /// Places stripes of `unit` bytes, a whole number of granules, on each place in turn. No extent
    /// is larger than a stripe, so small stripes cost many driver calls.
    #[must_use]
    pub fn round_robin(places: impl IntoIterator<Item = Place>, unit: u64) -> Self {
        let places = places.into_iter().collect();
        Self {
            shape: Shape::RoundRobin { places, unit },
        }
    }

    /// Places one share after the other, each with its size in bytes, in whole granules. The last
    /// share extends to the end of the region.
    #[must_use]
    pub fn shares(shares: impl IntoIterator<Item = (Place, u64)>) -> Self {
        let mut end = 0u64;
        let shares = shares.into_iter().map(|(place, bytes)| {
            end = end.saturating_add(bytes);
            Share { place, bytes, end }
        });
        Self {
            shape: Shape::Shares(shares.collect()),
        }
    }

    /// Returns the places that the layout names.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        let (whole, turns, shares) = match &self.shape {
            Shape::Whole(place) => (Some(place), [].as_slice(), [].as_slice()),
            Shape::RoundRobin { places, .. } => (None, places.as_slice(), [].as_slice()),
            Shape::Shares(shares) => (None, [].as_slice(), shares.as_slice()),
        };
        whole
            .into_iter()
            .chain(turns)
            .chain(shares.iter().map(|share| &share.place))
    }

    pub(super) fn check(&self, home: &Device) -> Result<(), MemoryError> {
        let granule = home.granule();
        ArgumentError::not_zero("places of a layout", self.places().count() as u64)?;
        let sizes = match &self.shape {
            Shape::Whole(_) => vec![],
            Shape::RoundRobin { unit, .. } => vec![*unit],
            Shape::Shares(shares) => shares.iter().map(|share| share.bytes).collect(),
        };
        for bytes in sizes {
            ArgumentError::whole("bytes of a stripe or share", bytes, granule.bytes())?;
        }
        self.places().try_for_each(|place| reachable(home, place))
    }

    pub(super) fn check_rdma(&self) -> Result<(), MemoryError> {
        for place in self.places() {
            if let Place::Device(device) = place {
                Physical::probe_rdma(device)?;
            }
        }
        Ok(())
    }

    pub(super) fn parts(&self, range: Range<u64>) -> Vec<(Range<u64>, &Place)> {
        let mut parts = vec![];
        let mut at = range.start;
        while at < range.end {
            let Some((place, end)) = self.at(at) else {
                break;
            };
            let end = end.min(range.end);
            parts.push((at..end, place));
            at = end;
        }
        parts
    }

    /// The place of an offset, and the end of the part at that place.
    fn at(&self, offset: u64) -> Option<(&Place, u64)> {
        match &self.shape {
            Shape::Whole(place) => Some((place, u64::MAX)),
            Shape::RoundRobin { places, unit } => {
                let stripe = offset.checked_div(*unit)?;
                let turn = stripe.checked_rem(places.len() as u64)?;
                let place = places.get(usize::try_from(turn).ok()?)?;
                Some((place, stripe.saturating_add(1).saturating_mul(*unit)))
            }
            Shape::Shares(shares) => {
                let (last, before) = shares.split_last()?;
                let index = before.partition_point(|share| share.end <= offset);
                Some(match before.get(index) {
                    Some(share) => (&share.place, share.end),
                    None => (&last.place, u64::MAX),
                })
            }
        }
    }
}
