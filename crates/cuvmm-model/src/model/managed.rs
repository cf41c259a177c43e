//! Managed memory: advice, prefetches, and queries about both.

use super::advice::{Advised, Attributes};
use super::allocation_table::{Allocations, Kind};
use super::answer::{Answer, INVALID_DEVICE, INVALID_VALUE, require};
use super::backing::Backing;
use super::state::State;
use super::work::Work;
use cuvmm_driver::{
    Advice, CudaVersion, DeviceAddress, DeviceAttribute, Location, LocationKind, Ordinal,
    RangeAttribute, StreamHandle,
};

/// The host and no location, as the driver's results number them.
const HOST: i32 = -1;
const NOWHERE: i32 = -2;

/// The version since which the kind of a location can be queried.
const KINDS_SINCE: CudaVersion = CudaVersion::new(12, 2);

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
}

/// Returns a location as results before CUDA 12.2 number it, without NUMA nodes.
fn number_of(place: Option<Location>) -> i32 {
    match place {
        Some(place) if place.kind == LocationKind::DEVICE => place.id,
        Some(_) => HOST,
        None => NOWHERE,
    }
}

fn kind_of(place: Option<Location>) -> i32 {
    place.map_or(LocationKind::INVALID, |place| place.kind).0
}

fn id_of(place: Option<Location>) -> i32 {
    match place {
        Some(place) if place.kind == LocationKind::HOST_NUMA => place.id,
        other => number_of(other),
    }
}

impl<B: Backing> State<B> {
    /// Returns a location where pages can be, as results name it. A thread is taken to run on the
    /// first node.
    fn home_at(&self, location: Location) -> Answer<Location> {
        match location.kind {
            LocationKind::HOST_NUMA => {
                let known = (0..self.rules.numa_nodes).contains(&location.id);
                require(known, INVALID_VALUE)?;
                Ok(location)
            }
            LocationKind::HOST_NUMA_CURRENT => Ok(Location::host_numa(0)),
            _ => self.user_at(location),
        }
    }

    fn user_at(&self, location: Location) -> Answer<Location> {
        match location.kind {
            LocationKind::DEVICE => {
                self.moves_on(Ordinal(location.id))?;
                Ok(location)
            }
            LocationKind::HOST => Ok(Location::HOST),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Checks that pages can move to and from a device while other processors use them.
    fn moves_on(&self, device: Ordinal) -> Answer {
        let ability = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
        self.can(device, ability, INVALID_DEVICE)
    }

    pub(crate) fn prefetch(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Answer {
        self.prefetch_all(device, &[(address, size, Some(location))], stream)
    }

    /// Moves several ranges in one piece of work. A range without a location is discarded: it keeps
    /// its bytes and its last location. A range that cannot be moved ends the batch with an error,
    /// after the ranges before it were moved.
    pub(crate) fn prefetch_all(
        &mut self,
        device: Ordinal,
        ranges: &[(DeviceAddress, u64, Option<Location>)],
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        let mut found = Vec::with_capacity(ranges.len());
        let mut outcome = Ok(());
        for &(address, size, _) in ranges {
            match self.allocations.managed(address.0, size) {
                Ok((_, end)) => found.push((address.0, end)),
                Err(code) if found.is_empty() => return Err(code),
                Err(code) => {
                    outcome = Err(code);
                    break;
                }
            }
        }
        let homes = ranges.iter().map(|&(.., location)| location);
        let homes = homes.map(|location| location.map(|it| self.home_at(it)).transpose());
        let homes = homes.collect::<Answer<Vec<_>>>()?;
        self.moves_on(device)?;
        self.submit(device, stream, Work::Prefetch)?;
        // A query returns the location of the last prefetch, even if the prefetch has not run.
        for ((start, end), home) in found.into_iter().zip(homes) {
            let Some(target) = home else { continue };
            let (advised, _) = self.allocations.managed(start, end - start)?;
            advised.change(start, end, |attributes| {
                attributes.prefetched = Some(target);
            });
        }
        outcome
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
        self.refuse_in_capture(None)?;
        let place = match advice {
            Advice::SET_PREFERRED_LOCATION
            | Advice::SET_ACCESSED_BY
            | Advice::UNSET_ACCESSED_BY
                if location.kind == LocationKind::DEVICE
                    && self.device(Ordinal(location.id)).is_err() =>
            {
                return Err(INVALID_VALUE);
            }
            Advice::SET_PREFERRED_LOCATION => self.home_at(location)?,
            Advice::SET_ACCESSED_BY | Advice::UNSET_ACCESSED_BY => self.user_at(location)?,
            _ => location,
        };
        let (advised, end) = self.allocations.managed(address.0, size)?;
        let change: fn(&mut Attributes, Location) = match advice {
            Advice::SET_READ_MOSTLY => |attributes, _| attributes.read_mostly = true,
            Advice::UNSET_READ_MOSTLY => |attributes, _| attributes.read_mostly = false,
            // A NUMA node is accepted, and queries do not report it.
            Advice::SET_PREFERRED_LOCATION => |attributes, place| {
                attributes.preferred =
                    Some(place).filter(|place| place.kind != LocationKind::HOST_NUMA);
            },
            Advice::UNSET_PREFERRED_LOCATION => |attributes, _| attributes.preferred = None,
            Advice::SET_ACCESSED_BY => |attributes, user| {
                attributes.accessed_by.insert(user);
            },
            Advice::UNSET_ACCESSED_BY => |attributes, user| {
                attributes.accessed_by.remove(&user);
            },
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
        let tells_kinds = self.rules.version >= KINDS_SINCE;
        let (advised, end) = self.allocations.managed(address.0, size)?;
        let range = (address.0, end);
        let preferred = || advised.same(range, |attributes| attributes.preferred);
        let prefetched = || advised.same(range, |attributes| attributes.prefetched);
        match attribute {
            RangeAttribute::READ_MOSTLY => {
                let mut all = advised.over(address.0, end);
                Ok(i32::from(all.all(|attributes| attributes.read_mostly)))
            }
            RangeAttribute::PREFERRED_LOCATION => Ok(number_of(preferred())),
            RangeAttribute::LAST_PREFETCH_LOCATION => Ok(number_of(prefetched())),
            _ if !tells_kinds => Err(INVALID_VALUE),
            RangeAttribute::PREFERRED_LOCATION_TYPE => Ok(kind_of(preferred())),
            RangeAttribute::PREFERRED_LOCATION_ID => Ok(id_of(preferred())),
            RangeAttribute::LAST_PREFETCH_LOCATION_TYPE => Ok(kind_of(prefetched())),
            RangeAttribute::LAST_PREFETCH_LOCATION_ID => Ok(id_of(prefetched())),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn range_accessed_by(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Answer<Vec<Location>> {
        self.context(device)?;
        let (advised, end) = self.allocations.managed(address.0, size)?;
        let mut all = advised.over(address.0, end);
        let first = all.next().map(|first| first.accessed_by.clone());
        let users = all.fold(first.unwrap_or_default(), |users, attributes| {
            &users & &attributes.accessed_by
        });
        Ok(users.into_iter().collect())
    }
}
