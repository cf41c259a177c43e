//! A pool in which a late user faults instead of corrupting somebody else's memory.
//!
//! Each block has addresses of its own with guards on either side. What it gives up is overwritten
//! at once where its home stream alone used it, and unmapped as soon as its fence has passed: not
//! kept cached. Its addresses then [rest](super::resting). Nothing here waits: a slot whose fence has
//! not passed is looked at again by later operations, a few at a time, and by the mapper's thread
//! if there is one.
//!
//! Where memory could not be overwritten as it was given up, it is zeroed when it is placed again
//! ([`commit`](super::commit)), so that a new block never shows what an earlier one held.

use super::resting::Resting;
use crate::error::ArgumentError;
use crate::size::Granularity;

/// How a pool makes use after free and running over an end fault; see
/// [the pool's documentation](super#hardened-pools).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a pool is hardened by `PoolBuilder::hardened`"]
pub struct Hardened {
    guard: u64,
    fill: Option<u8>,
    rest_blocks: u64,
    rest_addresses: u64,
}

impl Hardened {
    /// A granule of guard on either side, freed memory filled with 0xDF, and addresses that rest
    /// until 1024 more blocks are gone or 1 TiB of addresses rests.
    pub const fn new() -> Self {
        Self {
            // Any is rounded up to a granule.
            guard: 1,
            fill: Some(0xDF),
            rest_blocks: 1024,
            rest_addresses: 1 << 40,
        }
    }

    /// Bytes of addresses before each block and behind it where nothing is ever mapped, rounded up
    /// to whole granules; a granule by default, and none for 0. They cost no memory, and count
    /// against the pool's limit of addresses.
    pub const fn guard(mut self, bytes: u64) -> Self {
        self.guard = bytes;
        self
    }

    /// The byte that memory is filled with as a block gives it up (`cuMemsetD8Async` on its home
    /// stream); 0xDF by default, which makes large negative numbers of most types and never a
    /// plausible address. `None` leaves what was there, as a plain pool does.
    pub const fn fill(mut self, byte: Option<u8>) -> Self {
        self.fill = byte;
        self
    }

    /// How many blocks that are gone keep their addresses: those of a block rest until so many
    /// others have come to rest after it; 1024 by default. With 0 none rest.
    pub const fn rest_blocks(mut self, blocks: u64) -> Self {
        self.rest_blocks = blocks;
        self
    }

    /// How many bytes of addresses rest at most, guards included; 1 TiB by default. Where the limit
    /// of addresses is short they make way sooner.
    pub const fn rest_addresses(mut self, bytes: u64) -> Self {
        self.rest_addresses = bytes;
        self
    }

    /// With guards in whole granules, if these and a granule between them fit in `addresses`.
    pub(super) fn checked(
        mut self,
        granule: Granularity,
        addresses: u64,
    ) -> Result<Self, ArgumentError> {
        let most = addresses.saturating_sub(granule.bytes()).checked_div(2);
        let most = granule.round_down(most.unwrap_or(0));
        ArgumentError::at_most("bytes of a guard", self.guard, most)?;
        self.guard = granule.round_up(self.guard).unwrap_or(most);
        Ok(self)
    }
}

impl Default for Hardened {
    fn default() -> Self {
        Self::new()
    }
}

/// What a hardened pool knows besides.
#[derive(Debug)]
pub(crate) struct Hardening {
    pub(super) guard: u64,
    pub(super) fill: Option<u8>,
    pub(super) resting: Resting,
}

impl Hardening {
    pub(crate) const fn new(options: Hardened) -> Self {
        Self {
            guard: options.guard,
            fill: options.fill,
            resting: Resting::new(options.rest_blocks, options.rest_addresses),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    #[test]
    fn guards_are_whole_granules_that_leave_room_for_one() {
        let granule = Granularity::new(G).unwrap();
        let checked = |guard, addresses| {
            let hardened = Hardened::new().guard(guard);
            let checked = hardened.checked(granule, addresses);
            checked.map(|hardened| hardened.guard)
        };
        assert_eq!(checked(0, G), Ok(0));
        assert_eq!(checked(1, 3 * G), Ok(G));
        assert_eq!(checked(G + 1, 5 * G), Ok(2 * G));
        for (given, addresses) in [
            (G, 3 * G - 1),
            (u64::MAX, u64::MAX),
            (u64::MAX / 2, u64::MAX),
        ] {
            let refused = checked(given, addresses);
            assert!(
                matches!(refused, Err(ArgumentError::TooLarge { value, .. }) if value == given)
            );
        }
    }
}
