//! What was advised for managed memory, and where it was sent.

use std::collections::BTreeMap;

use super::allocations::{Allocations, Kind};
use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::state::State;
use super::work::Work;
use crate::{Advice, DeviceAddress, Location, LocationKind, Ordinal, RangeAttribute, StreamHandle};

/// The host, and no place, as the driver's answers number them.
const HOST: i32 = -1;
const NOWHERE: i32 = -2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes {
    read_mostly: bool,
    preferred: i32,
    prefetched: i32,
}

/// Attributes by address: each entry holds until the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advised(BTreeMap<u64, Attributes>);

impl Advised {
    pub(crate) fn new(start: u64) -> Self {
        let none = Attributes {
            read_mostly: false,
            preferred: NOWHERE,
            prefetched: NOWHERE,
        };
        Self(BTreeMap::from([(start, none)]))
    }

    fn split(&mut self, at: u64) {
        if let Some((_, &attributes)) = self.0.range(..=at).next_back() {
            self.0.insert(at, attributes);
        }
    }

    fn change(&mut self, start: u64, end: u64, change: impl Fn(&mut Attributes)) {
        self.split(start);
        self.split(end);
        self.0
            .range_mut(start..end)
            .for_each(|(_, attributes)| change(attributes));
    }

    fn over(&self, start: u64, end: u64) -> impl Iterator<Item = Attributes> {
        let first = self
            .0
            .range(..=start)
            .next_back()
            .map_or(start, |(&first, _)| first);
        self.0.range(first..end).map(|(_, &attributes)| attributes)
    }
}

impl Allocations {
    fn managed(&mut self, address: u64, size: u64) -> Answer<(&mut Advised, u64)> {
        let end = address
            .checked_add(size)
            .filter(|_| size != 0)
            .ok_or(INVALID_VALUE)?;
        let (&start, found) = self
            .by_address
            .range_mut(..=address)
            .next_back()
            .ok_or(INVALID_VALUE)?;
        let inside = end <= start + found.size;
        require(found.kind == Kind::Managed && inside, INVALID_VALUE)?;
        Ok((&mut found.advised, end))
    }

    pub(crate) fn prefetched(&mut self, address: u64, size: u64, target: i32) {
        if let Ok((advised, end)) = self.managed(address, size) {
            advised.change(address, end, |attributes| attributes.prefetched = target);
        }
    }
}

impl<B: Backing> State<B> {
    /// The number of a location in the driver's answers.
    fn number_of(&self, location: Location) -> Answer<i32> {
        match location.kind {
            LocationKind::DEVICE => self.device(Ordinal(location.id)).map(|_| location.id),
            LocationKind::HOST | LocationKind::HOST_NUMA | LocationKind::HOST_NUMA_CURRENT => {
                Ok(HOST)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn prefetch(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.allocations.managed(address.0, size)?;
        let target = self.number_of(location)?;
        self.submit(
            device,
            stream,
            Work::Prefetch {
                address: address.0,
                size,
                target,
            },
        )?;
        Ok(())
    }

    pub(crate) fn advise(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        advice: Advice,
        location: Location,
    ) -> Answer {
        self.context(device)?;
        let place = match advice {
            Advice::SET_PREFERRED_LOCATION | Advice::SET_ACCESSED_BY => self.number_of(location)?,
            _ => NOWHERE,
        };
        let (advised, end) = self.allocations.managed(address.0, size)?;
        let change: fn(&mut Attributes, i32) = match advice {
            Advice::SET_READ_MOSTLY => |attributes, _| attributes.read_mostly = true,
            Advice::UNSET_READ_MOSTLY => |attributes, _| attributes.read_mostly = false,
            Advice::SET_PREFERRED_LOCATION | Advice::UNSET_PREFERRED_LOCATION => {
                |attributes, place| attributes.preferred = place
            }
            Advice::SET_ACCESSED_BY | Advice::UNSET_ACCESSED_BY => |_, _| {},
            _ => return Err(INVALID_VALUE),
        };
        advised.change(address.0, end, |attributes| change(attributes, place));
        Ok(())
    }

    pub(crate) fn range_attribute(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        attribute: RangeAttribute,
    ) -> Answer<i32> {
        self.context(device)?;
        let (advised, end) = self.allocations.managed(address.0, size)?;
        let mut all = advised.over(address.0, end);
        let same = |place: fn(&Attributes) -> i32| {
            let mut places = advised
                .over(address.0, end)
                .map(|attributes| place(&attributes));
            let first = places.next().unwrap_or(NOWHERE);
            if places.all(|other| other == first) {
                first
            } else {
                NOWHERE
            }
        };
        match attribute {
            RangeAttribute::READ_MOSTLY => {
                Ok(i32::from(all.all(|attributes| attributes.read_mostly)))
            }
            RangeAttribute::PREFERRED_LOCATION => Ok(same(|attributes| attributes.preferred)),
            RangeAttribute::LAST_PREFETCH_LOCATION => Ok(same(|attributes| attributes.prefetched)),
            _ => Err(INVALID_VALUE),
        }
    }
}
