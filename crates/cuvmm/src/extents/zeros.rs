//! Read-only zeros under holes: physicals of zeroed memory, each mapped many times.
//!
//! A stray read of a hole is then harmless, and a stray write still faults. Each alias counts as a
//! mapping. A terabyte of aliases of 2 MiB would use all the mappings that a device can have, so
//! aliases are as large as possible.
//!
//! Keeps I-142.

use std::collections::BTreeMap;
use std::ops::Range;

use super::failure::Failure;
use super::fence::Unused;
use super::place::{Placed, Unmapped};
use super::space::Space;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::own::{Access, AccessGrant, Physical};
use crate::size::Granularity;

/// The default largest alias. A terabyte of holes takes 16,384 aliases of this size and 64 MiB of
/// memory.
pub(crate) const DEFAULT_ZERO_EXTENT: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct Zeros {
    extent: u64,
    /// The memory behind the aliases: one physical for each size, never written.
    by_size: BTreeMap<u64, Physical>,
    aliases: BTreeMap<u64, Placed>,
    backed: u64,
}

impl Zeros {
    pub(crate) const fn new(extent: u64) -> Self {
        Self {
            extent,
            by_size: BTreeMap::new(),
            aliases: BTreeMap::new(),
            backed: 0,
        }
    }

    pub(crate) const fn empty_like(&self) -> Self {
        Self::new(self.extent)
    }

    pub(crate) fn count(&self) -> u64 {
        self.aliases.len() as u64
    }

    /// Bytes of addresses that read as zero.
    pub(crate) fn backed(&self) -> u64 {
        debug_assert_eq!(
            self.backed,
            self.aliases
                .values()
                .map(|alias| alias.mapping.size())
                .sum::<u64>()
        );
        self.backed
    }

    fn adopt(&mut self, offset: u64, alias: Placed) {
        self.backed += alias.mapping.size();
        self.aliases.insert(offset, alias);
    }

    fn remove(&mut self, offset: u64) -> Option<Placed> {
        let alias = self.aliases.remove(&offset)?;
        self.backed -= alias.mapping.size();
        Some(alias)
    }

    pub(crate) fn held(&self) -> u64 {
        self.by_size.values().map(Physical::size).sum()
    }

    /// The sizes of the aliases that back a hole.
    fn sizes(&self, granule: Granularity, hole: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
        ExtentSizes::up_to(self.extent).cover(granule, hole.clone())
    }

    pub(crate) fn needed(&self, granule: Granularity, hole: &Range<u64>) -> u64 {
        self.sizes(granule, hole).count() as u64
    }

    pub(crate) fn meeting(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.aliases.range(..range.start).next_back();
        before
            .into_iter()
            .chain(self.aliases.range(range.clone()))
            .map(|(&offset, alias)| offset..offset + alias.mapping.size())
            .filter(|alias| alias.end > range.start)
            .collect()
    }

    pub(crate) fn lacking(&self, hole: &Range<u64>) -> Vec<Range<u64>> {
        let mut parts = vec![];
        let mut at = hole.start;
        for alias in self.meeting(hole) {
            parts.push(at..alias.start);
            at = alias.end;
        }
        parts.push(at..hole.end);
        parts.retain(|part| part.start < part.end);
        parts
    }

    /// Backs holes with zeros: all of them or none.
    pub(crate) fn put(&mut self, space: &Space, holes: &[Range<u64>]) -> Result<(), MemoryError> {
        let mut put = vec![];
        for hole in holes {
            if let Err(failure) = Failure::of(|| self.back(space, hole, &mut put)) {
                for offset in put {
                    self.unmap(offset);
                }
                return Err(failure.into_error());
            }
        }
        Ok(())
    }

    fn back(
        &mut self,
        space: &Space,
        hole: &Range<u64>,
        put: &mut Vec<u64>,
    ) -> Result<(), MemoryError> {
        let granule = space.device().granule();
        let mut at = hole.start;
        for size in self.sizes(granule, hole) {
            let physical = match self.by_size.get(&size) {
                Some(physical) => physical.clone(),
                None => {
                    let physical = Physical::new(space.device(), size)?;
                    self.by_size.insert(size, physical.clone());
                    physical
                }
            };
            let alias = Unmapped::fresh(physical);
            let placed = space.target.place_for(at, alias, Access::Read);
            self.adopt(at, placed.map_err(|failed| failed.error)?);
            put.push(at);
            at += size;
        }
        Ok(())
    }

    /// Unmaps the aliases that overlap a range and returns their ranges: all of them or none. A panic
    /// of the driver is undone as a refusal is.
    pub(crate) fn take(
        &mut self,
        space: &Space,
        range: &Range<u64>,
        proof: Unused,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        let taken = self.meeting(range);
        let mut gone: Vec<Range<u64>> = vec![];
        for alias in &taken {
            let Some(placed) = self.remove(alias.start) else {
                continue;
            };
            let failure = match Failure::of(|| Ok(placed.unmap(proof))) {
                Ok(Ok(_)) => {
                    gone.push(alias.clone());
                    continue;
                }
                Ok(Err((placed, cause))) => {
                    self.adopt(alias.start, placed);
                    MemoryError::range(alias.start, alias.end - alias.start, cause).into()
                }
                Err(panic) => {
                    gone.push(alias.clone());
                    panic
                }
            };
            self.restore(space, &gone);
            return Err(failure.into_error());
        }
        Ok(taken)
    }

    /// Backs holes again after a failed operation that had unmapped their zeros. If this fails too,
    /// a hole has lost its zeros; no data is lost.
    pub(crate) fn restore(&mut self, space: &Space, holes: &[Range<u64>]) {
        for hole in holes {
            if let Err(error) = self.put(space, std::slice::from_ref(hole)) {
                log!(error, %error, start = hole.start, "a hole has lost its zeros");
            }
        }
    }

    fn unmap(&mut self, offset: u64) {
        if let Some(placed) = self.remove(offset)
            && let Err((_, error)) = placed.unmap(Unused::never_used())
        {
            log!(error, %error, offset, "a roll-back could not unmap: quarantined");
        }
    }

    pub(crate) fn clear(&mut self, proof: Unused) -> Result<(), CallError> {
        while let Some((offset, placed)) = self.aliases.pop_first() {
            self.backed -= placed.mapping.size();
            placed.unmap(proof).map_err(|(placed, error)| {
                self.adopt(offset, placed);
                error
            })?;
        }
        self.by_size.clear();
        Ok(())
    }

    pub(crate) fn grant_to(&self, guest: &AccessGrant) -> Result<(), MemoryError> {
        let opened = self.open_all(guest, Access::Read);
        if opened.is_err() {
            self.close_to(guest);
        }
        opened
    }

    pub(crate) fn revoke_from(&self, device: &Device) {
        self.close_to(&AccessGrant::new(device, Access::None));
    }

    /// Revokes access. A failure is only logged: a device that can still read zeros does no harm.
    fn close_to(&self, guest: &AccessGrant) {
        if let Err(error) = self.open_all(guest, Access::None) {
            log!(error, %error, "zeros stay readable");
        }
    }

    fn open_all(&self, guest: &AccessGrant, most: Access) -> Result<(), MemoryError> {
        let one = |alias: &Placed| alias.mapping.open([guest], most);
        self.aliases.values().try_for_each(one)
    }
}

/// The parts of aliases outside a range.
pub(crate) fn beside(aliases: &[Range<u64>], range: &Range<u64>) -> Vec<Range<u64>> {
    aliases
        .iter()
        .flat_map(|alias| without(alias, range))
        .collect()
}

fn without(range: &Range<u64>, other: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let before = range.start..range.end.min(other.start);
    let behind = range.start.max(other.end)..range.end;
    [before, behind].into_iter().filter(|part| !part.is_empty())
}
