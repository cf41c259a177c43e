//! Two devices that can access each other's memory.

use cuvmm_driver::{
    AccessDesc, DeviceAddress, DriverError, Location, Ordinal, PhysicalProps, PointerAttribute,
};

use super::places::open_to;
use crate::answer::bit;
use crate::{Answer, Bench, Case, Need, Rule};

const TWO: &[Need] = &[Need::TwoDevices];
const PEER: Ordinal = Ordinal(1);

pub(super) const CASES: &[Case] = &Rule::new("peers").needing(TWO).cases([
    Case::new(
        "peer.can_access",
        "Each can access the other, neither itself.",
        |b| {
            let ask = |device, peer| b.driver().can_access_peer(Ordinal(device), Ordinal(peer));
            Ok(Answer::value(bit(ask(0, 1)?))
                .with("back", bit(ask(1, 0)?))
                .with("itself", bit(ask(0, 0)?)))
        },
    ),
    Case::new(
        "peer.no_grant.memset",
        "The peer fills memory that it has no access to.",
        |b| {
            let (address, _) = b.open(1)?;
            let filled = b.fill_from(PEER, address, 1, 64);
            let sync = b.driver().context_synchronize(PEER);
            Ok(Answer::code(&filled).then("sync", &sync))
        },
    ),
    Case::new(
        "peer.no_grant.get_access",
        "The peer's access before any grant.",
        |b| {
            let (address, _) = b.open(1)?;
            let right = b.driver().get_access(address, Location::device(PEER));
            Ok(Answer::code(&right).with("value", right.map_or(-1, |flags| flags.0)))
        },
    ),
    Case::new(
        "peer.grant.memset",
        "The peer fills memory that it has access to.",
        |b| {
            let (address, _) = b.open(1)?;
            let size = b.granule();
            let granted = b.set_access(address, size, &[for_device(PEER)]);
            let filled = b.fill_from(PEER, address, 1, 64);
            let sync = b.driver().context_synchronize(PEER);
            Ok(Answer::code(&granted)
                .then("fill", &filled)
                .then("sync", &sync))
        },
    ),
    Case::new(
        "peer.grant_keeps_owner",
        "A grant to one device leaves the other's access.",
        |b| {
            let (address, _) = b.open(1)?;
            let size = b.granule();
            b.set_access(address, size, &[for_device(PEER)])?;
            let own = Location::device(b.device());
            let right = b.driver().get_access(address, own)?;
            Ok(Answer::value(right.0))
        },
    ),
    Case::new(
        "peer.wait_for_event",
        "A stream waits for an event of the peer.",
        |b| {
            let stream = b.stream()?;
            let waited = b.wait_for_device(PEER, stream);
            let sync = b.synchronize(stream);
            Ok(Answer::code(&waited).then("sync", &sync))
        },
    ),
    Case::new(
        "stripe.set_access_one_call",
        "Memory of both, in one reservation.",
        |b| {
            let base = striped(b)?;
            let access = [for_device(b.device()), for_device(PEER)];
            let size = 2 * b.granule();
            Ok(Answer::code(&b.set_access(base, size, &access)))
        },
    ),
    Case::new(
        "stripe.memset_whole",
        "Filled over the border by one device.",
        |b| {
            let base = striped(b)?;
            let (device, size) = (b.device(), 2 * b.granule());
            b.set_access(base, size, &[for_device(device), for_device(PEER)])?;
            let filled = b.fill(base, 5, size);
            let sync = b.driver().context_synchronize(device);
            Ok(Answer::code(&filled).then("sync", &sync))
        },
    ),
    Case::new(
        "stripe.ordinal_second",
        "The device of the second half.",
        |b| {
            let base = striped(b)?;
            let second = b.at(base, 1);
            let which = PointerAttribute::DEVICE_ORDINAL;
            Ok(Answer::value(b.pointer_attribute(second, which)?))
        },
    ),
]);

fn for_device(device: Ordinal) -> AccessDesc {
    open_to(Location::device(device))
}

/// Maps one granule of each device, side by side.
fn striped(b: &mut Bench) -> Result<DeviceAddress, DriverError> {
    let (base, size) = (b.addresses(2)?, b.granule());
    b.place(base, 1)?;
    let other = b.create(size, &PhysicalProps::device(PEER), 0)?;
    b.map(b.at(base, 1), size, 0, other, 0)?;
    Ok(base)
}
