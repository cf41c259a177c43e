//! [Hardened pools](crate::pool#hardened-pools): late accesses to freed memory fault instead of
//! corrupting other blocks.
//!
//! Nothing here waits: a slot whose fence is incomplete is checked again by later operations, a few
//! slots at a time, and by the mapper's thread if any. Unmapped addresses [rest](super::resting).
//! Memory that could not be overwritten when it was given up is zeroed when it is placed again
//! ([`commit`](crate::pool::blocks::commit)), so that a new block never shows an earlier block's bytes.

use super::resting::Resting;
use crate::error::ArgumentError;
use crate::size::Granularity;

/// The parameters of a hardened pool, in which use after free and accesses past a block's end
/// fault; see [the pool's documentation](crate::pool#hardened-pools).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a pool is hardened by `PoolBuilder::hardened`"]
pub struct Hardened {
    guard: u64,
    fill: Option<u8>,
    rest_blocks: u64,
    rest_addresses: u64,
}

impl Hardened {
    /// Returns the default parameters: a granule of guard on either side, freed memory filled with
    /// 0xDF, and addresses that rest until 1024 more blocks have been freed or 1 TiB of addresses
    /// rests.
    pub const fn new() -> Self {
        Self {
            // Rounded up to a granule.
            guard: 1,
            fill: Some(0xDF),
            rest_blocks: 1024,
            rest_addresses: 1 << 40,
        }
    }

    /// Sets the bytes of addresses before and behind each block where nothing is ever mapped. They
    /// are rounded up to whole granules; the default is a granule, and 0 means no guards. Guards
    /// take no memory, and count against the pool's address limit: two guards and a granule have to
    /// fit in it.
    pub const fn guard(mut self, bytes: u64) -> Self {
        self.guard = bytes;
        self
    }

    /// Sets the byte that memory is filled with when a block gives it up (`cuMemsetD8Async` on its
    /// home stream). The default 0xDF makes large negative numbers of most types and never a
    /// plausible address. With `None` the contents stay, as in a plain pool.
    pub const fn fill(mut self, byte: Option<u8>) -> Self {
        self.fill = byte;
        self
    }

    /// Sets how many freed blocks keep their addresses reserved: a block's addresses rest until
    /// `blocks` other blocks have come to rest after it. The default is 1024; with 0 no addresses
    /// rest.
    pub const fn rest_blocks(mut self, blocks: u64) -> Self {
        self.rest_blocks = blocks;
        self
    }

    /// Sets how many bytes of addresses rest at most, including guards; 1 TiB by default. They are
    /// released earlier when the address limit is short.
    pub const fn rest_addresses(mut self, bytes: u64) -> Self {
        self.rest_addresses = bytes;
        self
    }

    /// Rounds the guards up to whole granules. Fails unless two guards and a granule fit in
    /// `addresses`.
    pub(in crate::pool) fn checked(
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

#[derive(Debug)]
pub(in crate::pool) struct Hardening {
    pub(in crate::pool) guard: u64,
    pub(in crate::pool) fill: Option<u8>,
    pub(in crate::pool) resting: Resting,
}

impl Hardening {
    pub(in crate::pool::blocks) const fn new(options: Hardened) -> Self {
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
