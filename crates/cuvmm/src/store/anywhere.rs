//! Threads on systems other than Linux, which stay where they are.

use crate::device::Device;

/// A set of processors, of which there is none.
pub(super) enum Processors {}

/// Returns no processors: the system is not asked which are close to a device.
pub(super) const fn processors(_: &Device) -> Option<Processors> {
    None
}

/// Moves the calling thread, which is never asked for.
pub(super) const fn move_to(processors: &Processors) {
    match *processors {}
}
