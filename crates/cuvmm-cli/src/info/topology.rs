//! The memory that each device can access, probed by mapping one granule of it.

use std::sync::Arc;

use cuvmm::driver::{Driver, Location, Ordinal};
use serde::Serialize;

use super::probe;

#[derive(Debug, Serialize)]
pub(super) struct Reaches {
    pub(super) device: i32,
    pub(super) places: Vec<Place>,
}

#[derive(Debug, Serialize)]
pub(super) struct Place {
    pub(super) place: String,
    /// `true` for the device itself and for the host NUMA node nearest to it.
    pub(super) near: bool,
    pub(super) reached: bool,
    pub(super) reason: Option<String>,
}

/// Probes, for each device, the memory of all devices and of each host NUMA node that is nearest to
/// a device.
pub(super) fn of(driver: &Arc<dyn Driver>, devices: i32) -> Vec<Reaches> {
    let ordinals = || (0..devices).map(Ordinal);
    let nearest = |device| Location::host_numa(probe::node(&**driver, device));
    let mut nodes: Vec<Location> = ordinals().map(nearest).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let places: Vec<Location> = ordinals().map(Location::device).chain(nodes).collect();
    ordinals()
        .map(|device| {
            let near = [Location::device(device), nearest(device)];
            let one = |&place: &Location| {
                let tried = probe::reaches(driver, device, place);
                Place {
                    place: place.to_string(),
                    near: near.contains(&place),
                    reached: tried.is_ok(),
                    reason: tried.err(),
                }
            };
            Reaches {
                device: device.0,
                places: places.iter().map(one).collect(),
            }
        })
        .collect()
}
