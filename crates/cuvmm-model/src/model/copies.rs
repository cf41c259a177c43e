//! Copies and fills: the checks made at the call, before the work is queued.

use std::thread;

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::mapping_table::Mapping;
use super::rights::Who;
use super::source::Source;
use super::state::State;
use super::stream_table::Mark;
use super::work::{Use, Work};
use cuvmm_driver::{AccessFlags, DeviceAddress, Ordinal, StreamHandle};

impl<B: Backing> State<B> {
    /// Checks the access to a range. A refusal has no other effect.
    fn check(&self, device: i32, start: DeviceAddress, size: u64, how: Use) -> Answer {
        let parties = self.parties.get(&thread::current().id());
        let pools = match (parties, how) {
            (None, _) => device,
            (Some(&(from, _)), Use::Read) => from,
            (Some(&(_, to)), Use::Write) => to,
        };
        self.resolve(device, Some(pools), start.0, size, how)
            .map(drop)
            .ok_or(INVALID_VALUE)
    }

    /// Returns two facts of a range: the host has no access to its first mapping, and another
    /// mapping differs from the first in this.
    fn sides(&self, start: DeviceAddress, size: u64) -> (bool, bool) {
        let closed = |mapping: &Mapping| mapping.rights.of(Who::Host) == AccessFlags::NONE;
        let mut sides = self
            .mappings
            .touching(start.0, size)
            .map(|(_, mapping)| closed(mapping));
        let first = sides.next().unwrap_or(false);
        (first, sides.any(|side| side != first))
    }

    /// Refuses a copy between the program and a range that the host can access only in part. The
    /// real driver crashes on such a copy.
    fn check_one_side(&self, start: DeviceAddress, size: u64) -> Answer {
        let (_, crosses) = self.sides(start, size);
        require(!crosses, INVALID_VALUE)
    }

    pub(crate) fn fill(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.check(device.0, destination, size, Use::Write)?;
        let (closed, crosses) = self.sides(destination, size);
        require(!(closed && crosses), INVALID_VALUE)?;
        self.submit(
            device,
            stream,
            Work::Fill {
                to: destination.0,
                byte,
                size,
            },
        )?;
        Ok(())
    }

    pub(crate) fn copy_on_device(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.check(device.0, source, size, Use::Read)?;
        self.check(device.0, destination, size, Use::Write)?;
        let work = Work::Copy {
            to: destination.0,
            from: source.0,
            size,
        };
        self.submit(device, stream, work)?;
        Ok(())
    }

    pub(crate) fn copy_to_device(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        from: Source,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<Option<Mark>> {
        self.context(device)?;
        require(size == 0 || from.address() != 0, INVALID_VALUE)?;
        self.check_registration(from.address() as u64, size)?;
        self.check(device.0, destination, size, Use::Write)?;
        self.check_one_side(destination, size)?;
        self.submit(
            device,
            stream,
            Work::ToDevice {
                to: destination.0,
                from,
                size,
            },
        )
    }

    pub(crate) fn copy_to_host(
        &mut self,
        device: Ordinal,
        destination: *mut u8,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<Option<Mark>> {
        self.context(device)?;
        require(size == 0 || !destination.is_null(), INVALID_VALUE)?;
        self.check_registration(destination.addr() as u64, size)?;
        self.check(device.0, source, size, Use::Read)?;
        self.check_one_side(source, size)?;
        let to = destination.expose_provenance();
        self.submit(
            device,
            stream,
            Work::ToHost {
                to,
                from: source.0,
                size,
            },
        )
    }
}
