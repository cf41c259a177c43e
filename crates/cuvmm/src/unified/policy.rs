//! Policies of page placement, and a record of the advice that the driver was given.
//!
//! The driver reports only advice that applies to all of a range, so the advice given is recorded
//! here by page. A policy then undoes exactly the advice in force, and a failure restores what it
//! changed.

use std::collections::BTreeSet;
use std::ops::{Range, RangeBounds};
use std::sync::PoisonError;

use bytemuck::Pod;
use cuvmm_driver::{Advice, Location};
use rangemap::RangeMap;

use super::{UnifiedBuffer, bytes_at, failed};
use crate::error::{CallError, ContainerError};
use crate::own::Managed;
use crate::size::Granularity;
use crate::sync::MutexGuard;

/// A predefined combination of advice for a range. Setting one replaces all earlier advice of this
/// buffer, from a policy or not.
#[doc(alias = "MigrationPolicy")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Policy {
    /// No advice: pages move to the device or host that accesses them. The policy of a new buffer.
    #[default]
    OnDemand,
    /// Pages belong on the device: the preferred location is the buffer's device, accessed by the
    /// host. A host that can access the device's memory uses them there; another host moves them.
    DeviceFirst,
    /// Pages belong on the host: the preferred location is the host, accessed by the buffer's
    /// device, which reads and writes them there, over the bus and without moving them.
    HostFirst,
    /// Mostly read: each device or host that reads a page gets a copy.
    ReadMostly,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Given {
    read_mostly: bool,
    preferred: Option<Location>,
    accessed_by: BTreeSet<Location>,
}

/// One piece of advice, set or unset.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    ReadMostly(bool),
    Preferred(Option<Location>),
    AccessedBy(Location, bool),
}

impl Item {
    /// The arguments of the driver call. A location that the driver ignores is the host.
    const fn call(self) -> (Advice, Location) {
        match self {
            Self::ReadMostly(true) => (Advice::SET_READ_MOSTLY, Location::HOST),
            Self::ReadMostly(false) => (Advice::UNSET_READ_MOSTLY, Location::HOST),
            Self::Preferred(Some(place)) => (Advice::SET_PREFERRED_LOCATION, place),
            Self::Preferred(None) => (Advice::UNSET_PREFERRED_LOCATION, Location::HOST),
            Self::AccessedBy(user, true) => (Advice::SET_ACCESSED_BY, user),
            Self::AccessedBy(user, false) => (Advice::UNSET_ACCESSED_BY, user),
        }
    }

    fn put(self, given: &mut Given) {
        match self {
            Self::ReadMostly(yes) => given.read_mostly = yes,
            Self::Preferred(place) => given.preferred = place,
            Self::AccessedBy(user, true) => drop(given.accessed_by.insert(user)),
            Self::AccessedBy(user, false) => drop(given.accessed_by.remove(&user)),
        }
    }
}

impl Given {
    /// The items that change this advice into `there`, unsetting first.
    fn to(&self, there: &Self) -> Vec<Item> {
        let mut items = vec![];
        if self.read_mostly && !there.read_mostly {
            items.push(Item::ReadMostly(false));
        }
        for &user in self.accessed_by.difference(&there.accessed_by) {
            items.push(Item::AccessedBy(user, false));
        }
        if self.preferred != there.preferred {
            items.push(Item::Preferred(there.preferred));
        }
        for &user in there.accessed_by.difference(&self.accessed_by) {
            items.push(Item::AccessedBy(user, true));
        }
        if there.read_mostly && !self.read_mostly {
            items.push(Item::ReadMostly(true));
        }
        items
    }
}

/// The advice that the driver has accepted, for every page.
pub(super) struct AdviceRecord {
    pages: RangeMap<u64, Given>,
    /// The size of a page of the host in bytes.
    page: Option<Granularity>,
}

/// Returns the size of a page of the host in bytes.
#[cfg(unix)]
fn host_page() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns the size of a page of the host in bytes, which is the same on all 64-bit Windows.
#[cfg(windows)]
const fn host_page() -> u64 {
    4096
}

impl AdviceRecord {
    /// A record of no advice for a number of bytes.
    pub(super) fn nothing(bytes: u64) -> Self {
        let mut told = Self {
            pages: RangeMap::new(),
            page: Granularity::new(host_page()),
        };
        let all = told.pages_of(&(0..bytes));
        if !all.is_empty() {
            told.pages.insert(all, Given::default());
        }
        told
    }

    /// The pages that the driver applies advice for a range to.
    fn pages_of(&self, bytes: &Range<u64>) -> Range<u64> {
        match self.page {
            Some(page) => {
                page.round_down(bytes.start)..page.round_up(bytes.end).unwrap_or(bytes.end)
            }
            None => bytes.clone(),
        }
    }

    /// The runs of pages in a range that have the same advice.
    fn pieces(&self, bytes: &Range<u64>) -> Vec<(Range<u64>, Given)> {
        let all = self.pages_of(bytes);
        let cut = |run: &Range<u64>| run.start.max(all.start)..run.end.min(all.end);
        self.pages
            .overlapping(&all)
            .map(|(run, given)| (cut(run), given.clone()))
            .collect()
    }

    /// Records advice that the driver accepted for a range.
    fn note(&mut self, bytes: &Range<u64>, change: impl Fn(&mut Given)) {
        for (run, mut given) in self.pieces(bytes) {
            change(&mut given);
            self.pages.insert(run, given);
        }
    }

    /// Gives the driver one piece of advice, and records it.
    pub(super) fn tell(
        &mut self,
        memory: &Managed,
        run: &Range<u64>,
        item: Item,
    ) -> Result<(), CallError> {
        let (advice, location) = item.call();
        // The last page may extend beyond the memory.
        let inside = run.start..run.end.min(memory.size());
        memory.advise(&inside, advice, location)?;
        self.note(run, |given| item.put(given));
        Ok(())
    }

    /// Changes the advice for a range to `to`.
    fn lead(&mut self, memory: &Managed, bytes: &Range<u64>, to: &Given) -> Result<(), CallError> {
        for (run, given) in self.pieces(bytes) {
            for item in given.to(to) {
                self.tell(memory, &run, item)?;
            }
        }
        Ok(())
    }

    /// Restores earlier advice as far as the driver allows; returns the first failure.
    fn put_back(
        &mut self,
        memory: &Managed,
        before: &[(Range<u64>, Given)],
    ) -> Result<(), CallError> {
        let mut outcome = Ok(());
        for (run, given) in before {
            outcome = outcome.and(self.lead(memory, run, given));
        }
        outcome
    }
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Sets the policy of a range, in place of all earlier advice of this buffer (`cuMemAdvise` for
    /// each change). Advice that is in force already is not given again.
    ///
    /// # Errors
    /// Those of [`Self::advise`]; the earlier advice is in force then. If that cannot be restored
    /// either, [`ContainerError::PartlyApplied`].
    #[doc(alias = "apply_policy")]
    pub fn set_policy(
        &self,
        range: impl RangeBounds<usize>,
        policy: Policy,
    ) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        let wanted = self.wanted(policy)?;
        let Some(memory) = self.memory_of(&range) else {
            return Ok(());
        };
        let bytes = bytes_at::<T>(&range);
        let mut told = self.told();
        let before = told.pieces(&bytes);
        let Err(cause) = told.lead(memory, &bytes, &wanted) else {
            return Ok(());
        };
        let Err(undoing) = told.put_back(memory, &before) else {
            return Err(failed::<T>(&range, cause).into());
        };
        Err(ContainerError::PartlyApplied {
            range,
            cause,
            undoing,
        })
    }

    fn wanted(&self, policy: Policy) -> Result<Given, ContainerError> {
        let device = self.device().location();
        let mut wanted = Given::default();
        match policy {
            Policy::OnDemand => {}
            Policy::ReadMostly => wanted.read_mostly = true,
            Policy::DeviceFirst => {
                self.moves_on(self.device())?;
                wanted.preferred = Some(device);
                wanted.accessed_by.insert(Location::HOST);
            }
            Policy::HostFirst => {
                self.moves_on(self.device())?;
                wanted.preferred = Some(Location::HOST);
                wanted.accessed_by.insert(device);
            }
        }
        Ok(wanted)
    }

    /// Locks the record of advice. The lock is held during driver calls, so that two threads do not
    /// interleave their advice.
    pub(super) fn told(&self) -> MutexGuard<'_, AdviceRecord> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
